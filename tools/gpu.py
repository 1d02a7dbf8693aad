"""Build the CUDA kernels for the device of this machine, test them on it, measure them.

    python tools/gpu.py [--only FAMILY,...] [--no-bench] [--sanitize] [--json FILE] [--log FOLDER]

Tests first: a row of the bench is written only if the test file that it names was green in this run. Prints a table of
target, measured, ratio to the peer; --json also writes the rows. Exit status 1 if a test failed or a target was missed.
--sanitize runs the small shapes under compute-sanitizer, where the machine has one that works.
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", help="families, by commas: norm,gemm,...")
    parser.add_argument("--no-bench", action="store_true", help="build and test only")
    parser.add_argument("--sanitize", action="store_true", help="compute-sanitizer over the small shapes, too")
    parser.add_argument("--archs", default="90a", help="LAMELLA_CUDA_ARCHS of the build")
    parser.add_argument("--json", type=Path, help="where the rows go")
    parser.add_argument("--log", type=Path, help="folder for the logs of build, tests and sanitizer")
    args = parser.parse_args()
    log = args.log or ROOT / "benchmarks" / "out"
    log.mkdir(parents=True, exist_ok=True)
    if not build(args.archs, log):
        return 1
    families = [name for name in args.only.split(",") if name]
    green, failures = test(families, log)
    if args.sanitize:
        sanitize(families, log)
    rows: list[dict[str, Any]] = []
    if not args.no_bench:
        rows = bench(families, green, log)
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
    path = os.pathsep.join([str(PACKAGE / "src"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def build(archs: str, log: Path) -> bool:
    """The library and its module, laid into the source folder, where this machine's Python finds them."""
    pybind11 = subprocess.run(
        [sys.executable, "-m", "pybind11", "--cmakedir"], capture_output=True, text=True, check=True
    ).stdout.strip()
    steps = [
        ["cmake", "-S", str(PACKAGE), "-B", str(BUILD), "-G", "Ninja", f"-DLAMELLA_CUDA_ARCHS={archs}",
         f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11}"],
        ["cmake", "--build", str(BUILD)],
    ]  # fmt: skip
    with (log / "build.log").open("w") as file:
        for step in steps:
            if subprocess.run(step, stdout=file, stderr=subprocess.STDOUT, check=False).returncode:
                text = (log / "build.log").read_text().splitlines()
                print("\n".join([line for line in text if "error" in line][:30] or text[-30:]))
                return False
    for path in [*BUILD.glob("_C*.so"), *BUILD.glob("liblamella_cuda.so")]:
        shutil.copy2(path, PACKAGE / "src" / "lamella" / "kernels_cuda")
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
    counts: dict[str, list[int]] = {}
    failures = []
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            name = case.get("classname", "").rsplit(".", 1)[-1] + ".py"
            red = case.find("failure") is not None or case.find("error") is not None
            if case.find("skipped") is not None:
                continue
            counts.setdefault(name, [0, 0])[red] += 1
            if red:
                failures.append(f"{name}::{case.get('name')}")
    for name, (passed, failed) in sorted(counts.items()):
        print(f"{name}: {passed} passed, {failed} failed")
    if not counts:
        print("\n".join((log / "tests.log").read_text().splitlines()[-30:]))
        failures.append("no test ran")
    return {name for name, (passed, failed) in counts.items() if passed and not failed}, failures


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
    def us(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    width = max((len(row["name"]) for row in rows), default=4)
    print(f"{'row':{width}}  target µs  measured  peer    peer/ours  roof")
    for row in rows:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        roof = "-" if row["roof"] is None else f"{row['roof']:.0%}"
        mark = {True: "", False: "  MISSED", None: ""}[row["ok"]]
        print(
            f"{row['name']:{width}}  {us(row['target']):>9}  {row['value']:>8.1f}  {us(row['peer']):>6}  {ratio:>9}  "
            f"{roof:>4}{mark}"
        )


def write(rows: list[dict[str, Any]], failures: list[str], path: Path) -> None:
    import torch

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    facts = {
        "machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}",
        "commit": os.environ.get("LAMELLA_COMMIT") or commit.stdout.strip()[:12] or "unknown",
        "date": datetime.date.today().isoformat(),
        "failed_tests": failures,
        "rows": rows,
    }
    path.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
