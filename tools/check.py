"""Everything that is checked without running the product. Exit status 1 if anything failed.

    python tools/check.py [--fix] [STEP ...]

Steps: ruff, format, mypy, imports, tidy; all of them if none is named. --fix lets ruff mend what it can first.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PYTHON = [sys.executable, "-m"]
LINT_IMPORTS = [sys.executable, "-c", "import importlinter.cli; importlinter.cli.lint_imports_command()"]


class Outcome(NamedTuple):
    """How one command went."""

    name: str
    ok: bool
    seconds: float


def commands() -> dict[str, dict[str, list[str]]]:
    """Step -> name -> command."""
    folders = sorted(path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml"))
    packages = [folder.replace("-", "_") for folder in folders]
    return {
        "ruff": {"ruff check": [*PYTHON, "ruff", "check"]},
        "format": {"ruff format": [*PYTHON, "ruff", "format", "--check", "--output-format=concise"]},
        "mypy": {f"mypy lamella.{p}": [*PYTHON, "mypy", "-p", f"lamella.{p}"] for p in packages}
        | {"mypy tools": [*PYTHON, "mypy", *sorted(map(str, (ROOT / "tools").glob("*.py")))]},
        "imports": {"import contracts": LINT_IMPORTS},
        "tidy": {"tidy": [sys.executable, "tools/tidy.py"]},
    }


def run(name: str, command: list[str]) -> Outcome:
    """Run one command; its output is shown only if it failed."""
    start = time.monotonic()
    # kernels-* are installed in environments of their own, with their vendor's compiler; their sources are read here
    sources = [str(path) for path in sorted((ROOT / "packages").glob("kernels-*/src"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sources, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        print(f"---- {name}\n{done.stdout.rstrip()}", flush=True)
    return Outcome(name, done.returncode == 0, time.monotonic() - start)


def main() -> None:
    steps = commands()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", choices=[[], *steps], help=", ".join(steps))
    parser.add_argument("--fix", action="store_true", help="let ruff mend and format first")
    args = parser.parse_args()
    if args.fix:
        subprocess.run([*PYTHON, "ruff", "check", "--fix", "--quiet"], cwd=ROOT)
        subprocess.run([*PYTHON, "ruff", "format", "--quiet"], cwd=ROOT)
    outcomes = [run(name, command) for step in args.steps or steps for name, command in steps[step].items()]
    width = max(len(outcome.name) for outcome in outcomes)
    print("----")
    for outcome in outcomes:
        print(f"{outcome.name:{width}}  {'ok' if outcome.ok else 'FAILED':6}  {outcome.seconds:5.1f} s")
    failed = [outcome.name for outcome in outcomes if not outcome.ok]
    print(f"check: {len(failed)} of {len(outcomes)} failed: {', '.join(failed)}" if failed else "check: all is well")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
