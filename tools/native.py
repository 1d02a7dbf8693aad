"""Rebuild the native modules of the editable packages.

    python tools/native.py [--if-stale] [--quiet] [PACKAGE ...]

A module carries a build id: a hash over everything that went into it (cmake/LamellaPybind.cmake says what exactly).
It is stale if its sources hash to something else. Without a compiler the packages are installed without their native
modules, one line says so, and the Python and torch references serve.

Exit status 1 if a module could not be built although there is a compiler.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
NEEDS_NVCC = "lamella_cuda_library("
"""In the CMakeLists.txt of packages that have an environment of their own, with nvcc."""
ENDINGS = ("cpp", "cc", "c", "hpp", "h", "inc")
COMPILERS = ("c++", "g++", "clang++", "cl")


class Native(NamedTuple):
    """A package with native code, and the state of its module in this environment."""

    folder: Path
    module: str
    """Import name of the extension module."""
    source_id: str
    """What the sources hash to."""
    build_id: str | None
    """What the installed module was built from; None: not built."""

    @property
    def stale(self) -> bool:
        """Built from other sources. A module that is not built is not stale: its reference serves."""
        return self.build_id is not None and self.build_id != self.source_id


def source_id(package: Path) -> str:
    """The build id that a module built from the package's sources as they are now would have."""
    root = package.resolve().parent.parent
    lines = [_line("", package, package / "CMakeLists.txt")]
    lines += [_line("cmake/", root / "cmake", path) for path in (root / "cmake").glob("*.cmake")]
    for ending in ENDINGS:
        lines += [_line("", package, path) for path in (package / "csrc").rglob(f"*.{ending}")]
        if "LAMELLA_NATIVE_DIR" in (package / "CMakeLists.txt").read_text():
            abi = root / "native" / "abi"
            lines += [_line("abi/", abi, path) for path in abi.rglob(f"*.{ending}")]
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()[:16]


def _line(prefix: str, folder: Path, path: Path) -> str:
    return f"{prefix}{path.relative_to(folder).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}\n"


def native_packages(root: Path = ROOT) -> list[Native]:
    """Every package with native code for the host, and what is installed of it in the interpreter that runs this."""
    files = sorted((root / "packages").glob("*/CMakeLists.txt"))
    folders = [path.parent for path in files if NEEDS_NVCC not in path.read_text()]
    modules = {folder: f"lamella.{folder.name.replace('-', '_')}._C" for folder in folders}
    built = _build_ids(list(modules.values()))
    return [Native(folder, module, source_id(folder), built[module]) for folder, module in modules.items()]


def _build_ids(modules: list[str]) -> dict[str, str | None]:
    """Asked of a process of its own: a module that was loaded once would stay as it was."""
    code = (
        "import importlib, json, sys\n"
        "ids = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        ids[name] = importlib.import_module(name).build_id\n"
        "    except ImportError:\n"
        "        ids[name] = None\n"
        "print(json.dumps(ids))\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code, *modules], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"native: a native module cannot be loaded:\n{done.stderr}")
    ids: dict[str, str | None] = json.loads(done.stdout)
    return ids


def compiler() -> str | None:
    """The C++ compiler that CMake would take, as far as can be told without it."""
    chosen = os.environ.get("CXX")
    return shutil.which(chosen.split()[0]) if chosen else next(filter(None, map(shutil.which, COMPILERS)), None)


def rebuild(native: Native, quiet: bool) -> None:
    """Reinstall the package in place. Raises SystemExit with the build's output if it fails."""
    if not quiet:
        print(f"native: building {native.module}", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "-v", "-e"]
    done = subprocess.run([*command, str(native.folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    built = _build_ids([native.module])[native.module]
    if done.returncode != 0 or (built != native.source_id and compiler() is not None):
        print(done.stdout, file=sys.stderr)
        raise SystemExit(f"native: {native.module} could not be built")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="folders in packages/; all native ones if none")
    parser.add_argument(
        "--if-stale", action="store_true", help="only those whose sources changed since they were built"
    )
    parser.add_argument("--quiet", action="store_true", help="say nothing unless something is wrong")
    args = parser.parse_args()
    natives = native_packages()
    known = [native.folder.name for native in natives]
    for name in args.packages:
        if name not in known:
            parser.error(f"{name} is no package with native code; those are: {', '.join(known)}")
    wanted = [native for native in natives if not args.packages or native.folder.name in args.packages]
    can_build = compiler() is not None
    for native in wanted:
        # without a compiler there is nothing to gain from a package that has no module already
        unbuilt = native.build_id is None and can_build
        if native.stale or unbuilt or (can_build and not args.if_stale):
            rebuild(native, args.quiet)
    names = [native.folder.name for native in wanted]
    missing = [native.module for native in native_packages() if native.build_id is None and native.folder.name in names]
    if missing:
        print(f"native: no C++ compiler found, so references serve in place of {', '.join(missing)}", file=sys.stderr)


if __name__ == "__main__":
    main()
