"""A bench's result: rows with target and ratio, as a table, as JSON, as a plot."""

from __future__ import annotations

import datetime
import io
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lamella.engine.config.machine import read_machine
from lamella.engine.errors import StartError


class Row(msgspec.Struct, kw_only=True):
    """One measured figure."""

    name: str
    value: float
    unit: str
    peer: str | None = None
    """What the ratio is taken to."""
    ratio: float | None = None
    target: str | None = None
    """In words, such as '>= 1.0 x llama.cpp'."""
    ok: bool | None = None
    """None: no target."""


class Report(msgspec.Struct, kw_only=True):
    """Rows with the machine, commit and date they were measured at."""

    machine: str
    commit: str
    date: str
    rows: list[Row]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Report:
        """A report of these rows, stamped with this machine, commit and the present day."""
        return cls(
            machine=describe_machine(),
            commit=describe_commit(),
            date=datetime.date.today().isoformat(),
            rows=list(rows),
        )

    def write(self, path: str | Path) -> None:
        """Write as JSON. Raises StartError where the file cannot be written."""
        try:
            Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")
        except OSError as error:
            raise StartError(f"cannot write {path}: {error.strerror}") from None

    def table(self) -> str:
        """Aligned columns for a terminal."""
        lines = [("name", "value", "unit", "peer", "ratio", "target", "ok")]
        for row in self.rows:
            lines.append(
                (
                    row.name,
                    format_value(row.value),
                    row.unit,
                    row.peer or "",
                    f"{row.ratio:.2f}" if row.ratio is not None else "",
                    row.target or "",
                    {True: "yes", False: "NO", None: ""}[row.ok],
                )
            )
        widths = [max(len(line[column]) for line in lines) for column in range(7)]
        right = (1, 4)
        out = []
        for line in lines:
            cells = [
                cell.rjust(width) if column in right else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(line, widths))
            ]
            out.append("  ".join(cells).rstrip())
        return "\n".join(out)


def format_value(value: float) -> str:
    """Three to four significant digits, without exponents for everyday sizes."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def describe_machine() -> str:
    """Processor, cores and memory in a line."""
    machine = read_machine()
    return f"{_processor()}, {machine.cores} cores, {machine.total_bytes / 2**30:.0f} GiB, {platform.system()}"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def describe_commit() -> str:
    """The commit of the source tree that this code runs from, with '+' when files differ from it."""
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *words], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def merge_rows(path: str | Path, report: Report) -> Report:
    """The report with rows of an older file kept where this run did not measure them again."""
    try:
        old = msgspec.json.decode(Path(path).read_bytes(), type=Report)
    except (OSError, msgspec.MsgspecError, json.JSONDecodeError):
        return report
    fresh = {row.name for row in report.rows}
    return msgspec.structs.replace(report, rows=[r for r in old.rows if r.name not in fresh] + report.rows)


def plot_lines(
    path: str | Path,
    title: str,
    series: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    *,
    x_label: str,
    y_label: str,
    stepped: bool = False,
) -> None:
    """Draw (name, xs, ys) series into a PNG, SVG or PDF file, or an HTML page with the drawing inside.

    Raises StartError where matplotlib is missing or the file cannot be written.
    """
    figure, axes = _figure()
    for name, xs, ys in series:
        if stepped:
            axes.step(xs, ys, where="post", label=name)
        else:
            axes.plot(xs, ys, marker="o", markersize=3, label=name)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.3)
    axes.set_ylim(bottom=0)
    if len(series) > 1:
        axes.legend()
    _save(figure, path, title)


def plot_bars(path: str | Path, title: str, rows: Sequence[Row]) -> None:
    """Draw each row's ratio to its peer; rows without a ratio are left out."""
    figure, axes = _figure()
    drawn = [row for row in rows if row.ratio is not None]
    axes.barh(
        [f"{row.name}\nto {row.peer}" if row.peer else row.name for row in drawn],
        [row.ratio for row in drawn],
        color=["#2a7f62" if row.ok is not False else "#b3423a" for row in drawn],
    )
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set(title=title, xlabel="ratio")
    _save(figure, path, title)


def plot_columns(
    path: str | Path, title: str, places: Sequence[str], series: Mapping[str, Sequence[float]], *, y_label: str
) -> None:
    """Draw columns side by side: at each place one of each series."""
    figure, axes = _figure()
    width = 0.8 / max(1, len(series))
    for n, (name, values) in enumerate(series.items()):
        axes.bar([i + n * width for i in range(len(places))], list(values), width=width, label=name)
    axes.set_xticks([i + width * (len(series) - 1) / 2 for i in range(len(places))], labels=list(places))
    axes.set(title=title, ylabel=y_label)
    axes.legend()
    _save(figure, path, title)


def _figure() -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise StartError("a plot needs matplotlib: pip install 'lamella-engine[plot]'") from None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    return figure, figure.subplots()


def _save(figure: Any, path: str | Path, title: str) -> None:
    path = Path(path)
    try:
        if path.suffix == ".html":
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg")
            svg = buffer.getvalue()
            path.write_text(
                f"<!doctype html><meta charset=utf-8><title>{title}</title>{svg[svg.index('<svg') :]}", encoding="utf-8"
            )
        else:
            figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise StartError(f"cannot write the plot {path}: {error}") from None
