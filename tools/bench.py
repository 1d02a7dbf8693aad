"""Run a bench by name.

  hatch run bench cpu                       lamella beside its peers on the demo model, on this CPU
  hatch run bench gpu                       the engine on a GPU beside vLLM's figures; --tiny: a trial on the CPU
  hatch run bench gpu_tiers                 KV tiers below a GPU: copies, restores, what running requests feel, start
  hatch run bench runner-v2 sampling        packages/runner-v2/bench/sampling.py
  hatch run bench                           list what there is

Words after the name go to the bench; each takes --json FILE.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("peers", "gpu_engine", "gpu_start", "gpu_tiers_parts")
"""Of benches: no bench by themselves."""


def main() -> int:
    """Find the script and run it as __main__."""
    words = sys.argv[1:]
    scripts: dict[tuple[str, ...], Path] = {
        (path.stem,): path for path in sorted((ROOT / "benchmarks").glob("*.py")) if path.stem not in PARTS
    }
    for path in sorted((ROOT / "packages").glob("*/bench/*.py")):
        scripts[(path.parent.parent.name, path.stem)] = path
    for length in (1, 2):
        script = scripts.get(tuple(words[:length]))
        if script is not None:
            sys.argv = [str(script), *words[length:]]
            sys.path.insert(0, str(script.parent))
            runpy.run_path(str(script), run_name="__main__")
            return 0
    known = "\n".join("  " + " ".join(name) for name in scripts)
    print(f"{'no bench ' + ' '.join(words) + '; ' if words else ''}benches:\n{known}", file=sys.stderr)
    return 0 if not words else 1


if __name__ == "__main__":
    sys.exit(main())
