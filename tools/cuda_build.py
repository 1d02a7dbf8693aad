"""Compile the CUDA kernels for every architecture on a machine without a GPU, and test what can be tested there.

    hatch run cuda-build:check [--archs 90a] [--jobs N]

Builds into the source folder, incrementally: a changed kernel compiles its own file again. Then: the library holds
machine code for each architecture asked for and needs neither torch, Python nor a driver to load; the package imports,
says what is missing when a kernel is called, and names wrong arguments; types and import contracts of the package;
and specdec's Triton kernels, interpreted and compiled.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "packages" / "kernels-cuda"
MODULE = PACKAGE / "src" / "lamella" / "kernels_cuda"
BUILD = ROOT / "build" / "cuda"
ARCHS = "80;90a;100a"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--archs", default=ARCHS, help=f"architectures, by semicolons (default: {ARCHS})")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time (default: the cores)"
    )
    args = parser.parse_args()
    started = time.monotonic()
    failed = [
        name
        for name, passed in (
            ("build", build(args.archs, args.jobs)),
            ("library", check_library(args.archs.split(";"))),
            ("tests", run(["-m", "pytest", "-m", "not gpu", "-q", "packages/kernels-cuda/tests"])),
            ("types", run(["-m", "mypy", "-p", "lamella.kernels_cuda"])),
            ("triton", check_triton()),
        )
        if not passed
    ]
    outcome = f"failed: {', '.join(failed)}" if failed else "all is well"
    print(f"cuda-build: {outcome} ({time.monotonic() - started:.0f} s)")
    return 1 if failed else 0


def build(archs: str, jobs: int) -> bool:
    """The library and its module, laid into the source folder."""
    started = time.monotonic()
    pybind11 = subprocess.run(
        [sys.executable, "-m", "pybind11", "--cmakedir"], capture_output=True, text=True, check=True
    ).stdout.strip()
    configure = [
        *("cmake", "-S", str(PACKAGE), "-B", str(BUILD), "-G", "Ninja", f"-DLAMELLA_CUDA_ARCHS={archs}"),
        *(f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11}"),
    ]
    steps = [configure, ["cmake", "--build", str(BUILD), "--parallel", str(jobs)]]
    for step in steps:
        done = subprocess.run(step, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            lines = done.stdout.splitlines()
            print("\n".join([line for line in lines if "error" in line][:40] or lines[-40:]))
            return False
    for path in [*BUILD.glob("_C*.so"), *BUILD.glob("liblamella_cuda.so")]:
        shutil.copy2(path, MODULE)
    size = (MODULE / "liblamella_cuda.so").stat().st_size
    print(f"built for {archs} in {time.monotonic() - started:.0f} s; the library has {size / 2**20:.1f} MiB")
    return True


def check_library(archs: list[str]) -> bool:
    """Machine code for each architecture, and no library that a user may not have."""
    library = MODULE / "liblamella_cuda.so"
    if not library.exists():
        return False
    tool = next((str(p) for d in sys.path for p in Path(d).glob("nvidia/cu1*/bin/cuobjdump")), "cuobjdump")
    listed = subprocess.run([tool, "--list-elf", str(library)], capture_output=True, text=True, check=True).stdout
    found = set(re.findall(r"\.sm_(\w+)\.cubin", listed))
    needed = subprocess.run(["objdump", "-p", str(library)], capture_output=True, text=True, check=True).stdout
    foreign = [
        name
        for name in re.findall(r"NEEDED\s+(\S+)", needed)
        if not re.match(r"(lib(c|m|dl|rt|pthread)|ld-linux)\b", name)
    ]
    listing = ["nm", "-D", "--defined-only", "--format=just-symbols", str(library)]
    exported = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split()
    strangers = [name for name in exported if not name.startswith("lamella_")]
    if strangers:
        print(f"the library exports {len(strangers)} names that are not its own, such as {strangers[0]}")
    if found != set(archs):
        print(f"the library has code for {sorted(found)}, asked for were {sorted(archs)}")
    if foreign:
        print(f"the library needs {foreign}, which not every machine has")
    return found == set(archs) and not foreign and not strangers


def check_triton() -> bool:
    """specdec's Triton kernels: their results in Triton's interpreter, and machine code for NVIDIA and AMD GPUs."""
    tests = ROOT / "packages" / "specdec" / "tests" / "verify"
    command = ["-m", "pytest", "-q", "--confcutdir", str(tests), "-m", "not gpu"]
    interpreted = run([*command, str(tests / "test_triton.py")], {"TRITON_INTERPRET": "1"})
    return run([*command, str(tests / "test_triton_compiles.py")]) and interpreted


def run(words: list[str], extra: dict[str, str] | None = None) -> bool:
    """A Python of this environment that finds the packages' sources."""
    sources = [str(ROOT / "packages" / name / "src") for name in ("kernels-cuda", "specdec")]
    path = os.pathsep.join([*sources, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, **(extra or {})}
    return not subprocess.run([sys.executable, *words], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
