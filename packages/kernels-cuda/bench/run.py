"""Runs one bench file: python run.py FAMILY OUT.json GREEN,TEST,FILES. tools/gpu.py calls it."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
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

    importlib.import_module(family).rows(emit)


if __name__ == "__main__":
    main(*sys.argv[1:])
