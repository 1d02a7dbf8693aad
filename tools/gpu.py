"""Build the CUDA kernels for the device of this machine, test them on it, measure them, and the engine over them.

    python tools/gpu.py [--only FAMILY,...] [--library FILE] [--engine [WORDS]] [--no-bench] [--sanitize] [--json FILE]

Tests first: a row of the bench is written only if the test file that it names was green in this run; those of the
engine, if all tests of runner and engine that need a GPU were. Prints a table of target, measured, ratio to the peer;
--json also writes the rows. Exit status 1 if a test failed or a target was missed. --library takes a liblamella_cuda.so
that is built already and compiles only the module over it. --sanitize runs the small shapes under compute-sanitizer,
where the machine has one that works.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "packages" / "kernels-cuda"
BUILD = ROOT / "build" / "gpu"
ENGINE_TESTS = ("packages/runner-v2/tests", "packages/engine/tests", "tests", "packages/kvtier/tests/data")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", help="families, by commas: norm,gemm,...")
    parser.add_argument("--library", type=Path, help="a liblamella_cuda.so: kernels are not compiled")
    parser.add_argument(
        "--engine", nargs="?", const="", metavar="WORDS", help="the engine, too; only rows whose names hold these words"
    )
    parser.add_argument("--no-kernels", action="store_true", help="neither tests nor benches of the kernels themselves")
    parser.add_argument("--no-bench", action="store_true", help="build and test only")
    parser.add_argument("--sanitize", action="store_true", help="compute-sanitizer over the small shapes, too")
    parser.add_argument("--archs", default="90a", help="LAMELLA_CUDA_ARCHS of the build")
    parser.add_argument("--json", type=Path, help="where the rows go")
    parser.add_argument("--log", type=Path, help="folder for the logs of build, tests and sanitizer")
    args = parser.parse_args()
    log = args.log or ROOT / "benchmarks" / "out"
    log.mkdir(parents=True, exist_ok=True)
    if not build(args.archs, log, args.library):
        return 1
    families = [name for name in args.only.split(",") if name]
    green, failures = (set(), []) if args.no_kernels else test(families, log)
    if args.sanitize:
        sanitize(families, log)
    rows: list[dict[str, Any]] = []
    if not args.no_bench and not args.no_kernels:
        rows = bench(families, green, log)
    if args.engine is not None:
        red = test_engine(log)
        failures += red
        if not args.no_bench:
            measured = bench_engine(args.engine, log)
            if red:
                print("the engine's rows are not written: its tests are not green")
                table(measured)
            else:
                rows += measured
    if not args.no_bench:
        table(rows)
        if args.json is not None:
            write(rows, failures, args.json)
    missed = [row["name"] for row in rows if row["ok"] is False]
    if failures:
        print(f"{len(failures)} tests failed: {', '.join(failures[:20])}")
    if missed:
        print(f"{len(missed)} of {len(rows)} rows miss their target")
    return 1 if failures or missed else 0


def environment() -> dict[str, str]:
    sources = [str(path) for path in sorted((ROOT / "packages").glob("*/src"))]
    path = os.pathsep.join([*sources, os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def build(archs: str, log: Path, library: Path | None) -> bool:
    """The library and its module, laid into the source folder, where this machine's Python finds them. library: one
    that is built already, for these architectures."""
    home = PACKAGE / "src" / "lamella" / "kernels_cuda"
    prebuilt = []
    if library is not None:
        if not library.is_file():
            print(f"--library: there is no {library}")
            return False
        if library.resolve() != (home / "liblamella_cuda.so").resolve():
            shutil.copy2(library, home / "liblamella_cuda.so")
        prebuilt = [f"-DLAMELLA_CUDA_LIBRARY={home / 'liblamella_cuda.so'}"]
    pybind11 = subprocess.run(
        [sys.executable, "-m", "pybind11", "--cmakedir"], capture_output=True, text=True, check=True
    ).stdout.strip()
    steps = [
        ["cmake", "-S", str(PACKAGE), "-B", str(BUILD), "-G", "Ninja", f"-DLAMELLA_CUDA_ARCHS={archs}",
         f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11}", *prebuilt],
        ["cmake", "--build", str(BUILD)],
    ]  # fmt: skip
    with (log / "build.log").open("w") as file:
        for step in steps:
            if subprocess.run(step, stdout=file, stderr=subprocess.STDOUT, check=False).returncode:
                text = (log / "build.log").read_text().splitlines()
                print("\n".join([line for line in text if "error" in line][:30] or text[-30:]))
                return False
    for path in [*BUILD.glob("_C*.so"), *([] if prebuilt else BUILD.glob("liblamella_cuda.so"))]:
        shutil.copy2(path, home)
    return True


def test(families: list[str], log: Path) -> tuple[set[str], list[str]]:
    """Runs the tests; the files that are green, and the names of the tests that are not."""
    files = [f"tests/test_{name}.py" for name in families] or ["tests"]
    report = log / "tests.xml"
    command = [
        sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(PACKAGE), "--confcutdir", str(PACKAGE),
        "-m", "gpu", "-q", "--tb=short", "-p", "no:cacheprovider", f"--junitxml={report}", *files,
    ]  # fmt: skip
    with (log / "tests.log").open("w") as file:
        subprocess.run(command, cwd=PACKAGE, env=environment(), stdout=file, stderr=subprocess.STDOUT, check=False)
    return read_report(report, log / "tests.log")


def read_report(report: Path, log: Path) -> tuple[set[str], list[str]]:
    """The files that are green, and the names of the tests that are not."""
    counts: dict[str, list[int]] = {}
    failures = []
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            # where a file could not be imported, there is no class, and the name is the file's
            name = (case.get("classname") or case.get("name") or "").rsplit(".", 1)[-1] + ".py"
            red = case.find("failure") is not None or case.find("error") is not None
            if case.find("skipped") is not None:
                continue
            counts.setdefault(name, [0, 0])[red] += 1
            if red:
                failures.append(f"{name}::{case.get('name')}")
    for name, (passed, failed) in sorted(counts.items()):
        print(f"{name}: {passed} passed, {failed} failed")
    if not counts:
        print("\n".join(log.read_text().splitlines()[-30:]))
        failures.append("no test ran")
    return {name for name, (passed, failed) in counts.items() if passed and not failed}, failures


def test_engine(log: Path) -> list[str]:
    """Names of the tests of runner and engine that need a GPU and are not green. Only files with such tests are read:
    this machine may lack what others import."""
    files = [
        str(path)
        for folder in ENGINE_TESTS
        for path in sorted((ROOT / folder).rglob("test_*.py"))
        if "mark.gpu" in path.read_text(encoding="utf-8")
    ]
    report = log / "engine_tests.xml"
    report.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(ROOT), "--confcutdir", str(ROOT / "tests"),
        "--import-mode=importlib", "-m", "gpu", "-q", "--tb=short", "-p", "no:cacheprovider",
        "--continue-on-collection-errors", f"--junitxml={report}", *files,
    ]  # fmt: skip
    with (log / "engine_tests.log").open("w") as file:
        subprocess.run(command, cwd=ROOT, env=environment(), stdout=file, stderr=subprocess.STDOUT, check=False)
    return read_report(report, log / "engine_tests.log")[1]


def bench_engine(words: str, log: Path) -> list[dict[str, Any]]:
    """Rows of benchmarks/gpu.py that have a value, in the order in which they were measured."""
    out = log / "bench_engine.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--json", str(out), "--only", words]
    with (log / "bench_engine.log").open("w") as file:
        subprocess.run(command, env=environment(), stdout=file, stderr=subprocess.STDOUT, check=False)
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"] if out.exists() else []
    for row in rows:
        if "error" in row:
            print(f"{row['name']}: {row['error']}")
    if not rows:
        print("\n".join((log / "bench_engine.log").read_text().splitlines()[-30:]))
    return [row for row in rows if row.get("value") is not None]


def sanitize(families: list[str], log: Path) -> None:
    """The tests named *small* and a few first ones under compute-sanitizer's memcheck and racecheck."""
    files = [f"tests/test_{name}.py" for name in families] or ["tests"]
    for tool in ("memcheck", "racecheck"):
        command = [
            "compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "pytest", "-c",
            os.devnull, "--rootdir", str(PACKAGE), "--confcutdir", str(PACKAGE), "-m", "sanitize", "-q", "-x", *files,
        ]  # fmt: skip
        path = log / f"{tool}.log"
        try:
            with path.open("w") as file:
                code = subprocess.run(
                    command, cwd=PACKAGE, env=environment(), stdout=file, stderr=subprocess.STDOUT, check=False
                ).returncode
        except FileNotFoundError:
            print("compute-sanitizer is not on this machine")
            return
        tail = [line for line in path.read_text().splitlines() if "ERROR SUMMARY" in line or " passed" in line]
        print(f"{tool}: exit status {code}; {' | '.join(tail[-2:])}")


def bench(families: list[str], green: set[str], log: Path) -> list[dict[str, Any]]:
    """Rows of bench/*.py, each in a process of its own: one that dies takes no other with it."""
    rows: list[dict[str, Any]] = []
    for path in sorted((PACKAGE / "bench").glob("*.py")):
        if path.stem in ("timing", "run") or (families and path.stem not in families):
            continue
        out = log / f"bench_{path.stem}.json"
        out.unlink(missing_ok=True)
        command = [sys.executable, str(PACKAGE / "bench" / "run.py"), path.stem, str(out), ",".join(sorted(green))]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
        (log / f"bench_{path.stem}.log").write_text(done.stdout + done.stderr)
        if done.returncode:
            print(f"bench {path.stem}: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        if out.exists():
            rows += json.loads(out.read_text())
    return rows


def table(rows: list[dict[str, Any]]) -> None:
    def figure(value: float | None) -> str:
        return "-" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"

    width = max((len(row["name"]) for row in rows), default=4)
    print(f"{'row':{width}}  {'unit':8}     target   measured       peer  speed-up  roof")
    for row in rows:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        roof = "-" if row.get("roof") is None else f"{row['roof']:.0%}"
        mark = {True: "", False: "  MISSED", None: ""}[row["ok"]]
        print(
            f"{row['name']:{width}}  {row['unit']:8}  {figure(row['target']):>9}  {figure(row['value']):>9}  "
            f"{figure(row['peer']):>9}  {ratio:>8}  {roof:>4}{mark}"
        )


def write(rows: list[dict[str, Any]], failures: list[str], path: Path) -> None:
    """Each row with the commit it was measured at; an older file's stay where this run has none of their name."""
    import torch

    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    commit = os.environ.get("LAMELLA_COMMIT") or asked.stdout.strip()[:12] or "unknown"
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    by_name = {row["name"]: row for row in [*old, *({**row, "commit": commit} for row in rows)]}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    facts = {
        "machine": f"{device}, torch {torch.__version__}, CUDA {torch.version.cuda}",
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "failed_tests": failures,
        "rows": list(by_name.values()),
    }
    path.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
