"""Runs one bench file: python run.py FAMILY OUT.json GREEN,TEST,FILES. tools/gpu.py calls it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

READ_BYTES_PER_S = 4.62e12  # an H200's measured ceilings
FLOPS_PER_S = 789e12


def main(family: str, out: str, green: str) -> None:
    rows: list[dict[str, Any]] = []
    good = set(green.split(","))

    def emit(
        name: str,
        measured_s: float,
        target_s: float | None,
        peer_s: float | None,
        *,
        test: str,
        bytes: float | None = None,
        flops: float | None = None,
        **more: Any,
    ) -> None:
        if test.split("::")[0] not in good:
            print(f"{name}: not written, {test} is not green")
            return
        roofs = [n / roof for n, roof in ((bytes, READ_BYTES_PER_S), (flops, FLOPS_PER_S)) if n]
        rows.append(
            {
                "name": name,
                "value": measured_s * 1e6,
                "unit": "µs",
                "peer": None if peer_s is None else peer_s * 1e6,
                "ratio": None if peer_s is None else peer_s / measured_s,
                "target": None if target_s is None else target_s * 1e6,
                "ok": None if target_s is None else measured_s <= target_s,
                "roof": max(roofs) / measured_s if roofs else None,
                **more,
            }
        )
        Path(out).write_text(json.dumps(rows))

    _load("timing")
    _load(family).rows(emit)


def _load(name: str) -> ModuleType:
    """A file beside this one, which may be called like a module of the standard library."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if name == "timing":
        sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [entry for entry in sys.path if entry != here]
    main(*sys.argv[1:])
