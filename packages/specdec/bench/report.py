"""Where and when rows were measured, and the file that holds them."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from collections.abc import Sequence


def write_report(path: str, rows: Sequence[dict[str, object]]) -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    report = {
        "machine": f"{platform.machine()} {platform.system()}",
        "commit": commit.stdout.strip(),
        "date": datetime.date.today().isoformat(),
        "rows": list(rows),
    }
    with open(path, "w") as file:
        json.dump(report, file, indent=1)
