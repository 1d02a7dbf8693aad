"""Prove that each package stands alone: build it, install it in an empty environment, run its own tests there.

    python tools/alone.py [--fast] [--timeout SECONDS] [--keep FOLDER] [PACKAGE ...]

For each package, one after another:

    packages/p ──► sdist ──► wheel (built from the sdist, not from the repository)
                               │  holds lamella/<p>/ and nothing else of lamella/
                               ▼
    a new environment: the wheel, the wheels of the siblings it requires, what it declares, what its tests declare
                               │
                               ▼
    its tests, unpacked from the sdist, with the repository on no path

A package with extras is tested twice: without them (tests that need them skip themselves), then with all of them.

--fast builds in this environment instead of an isolated one, and links third-party packages from here instead of
installing them: exactly those in the closure of what is declared, with their versions checked. So a forgotten
requirement is noticed either way.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from native import compiler
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent


class Package(NamedTuple):
    """One of our distributions, as its pyproject describes it."""

    folder: Path
    name: str
    """lamella-kvtier"""
    requires: list[Requirement]
    extras: dict[str, list[Requirement]]
    test_requires: list[Requirement]

    @property
    def module(self) -> str:
        """lamella/<module> is the folder it installs."""
        return self.folder.name.replace("-", "_")

    @property
    def has_native(self) -> bool:
        return (self.folder / "CMakeLists.txt").exists()


class Built(NamedTuple):
    """What was built of a package."""

    wheel: Path
    unpacked: Path
    """Folder of the sdist's contents."""


class Failure(Exception):
    """A package does not stand alone; the message says how."""


def read_packages(root: Path = ROOT) -> dict[str, Package]:
    """All packages by distribution name."""
    packages = {}
    for path in sorted((root / "packages").glob("*/pyproject.toml")):
        table = tomllib.loads(path.read_text())
        project = table["project"]
        packages[project["name"]] = Package(
            path.parent,
            project["name"],
            [Requirement(text) for text in project.get("dependencies", [])],
            {
                extra: [Requirement(text) for text in texts]
                for extra, texts in project.get("optional-dependencies", {}).items()
            },
            [Requirement(text) for text in table.get("dependency-groups", {}).get("test", [])],
        )
    return packages


class Needs(NamedTuple):
    """What an environment for a package takes."""

    siblings: list[Package]
    third_party: list[Requirement]


def needs(package: Package, packages: dict[str, Package], with_extras: bool) -> Needs:
    """What the package declares, through the siblings that it requires; all its own extras, or none."""
    found: dict[str, Package] = {}
    third_party: list[Requirement] = []
    waiting = list(package.requires)
    for extra in package.extras.values() if with_extras else []:
        waiting += extra
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name not in packages:
            third_party.append(requirement)
            continue
        if name not in found:
            found[name] = packages[name]
            waiting += packages[name].requires
        for extra_name in requirement.extras:
            waiting += packages[name].extras[extra_name]
    return Needs(list(found.values()), third_party)


def build(package: Package, folder: Path, fast: bool) -> Built:
    """sdist, and a wheel made of it."""
    command = [sys.executable, "-m", "build", "--outdir", str(folder), *(["--no-isolation"] if fast else [])]
    _run([*command, str(package.folder)], timeout=1800)
    (sdist,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return Built(wheel, folder / sdist.name.removesuffix(".tar.gz"))


def check_wheel(package: Package, wheel: Path) -> None:
    """Raise Failure unless the wheel holds lamella/<module>/ and metadata, nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
    wrong = wheel_mistakes(names, package.module)
    if package.has_native and compiler() is not None and not any(f"/{package.module}/_C." in name for name in names):
        wrong.append("lamella/<module>/_C is missing although there is a compiler")
    if wrong:
        raise Failure(f"{wheel.name}: " + "; ".join(wrong))


def wheel_mistakes(names: Sequence[str], module: str) -> list[str]:
    """What is wrong with a wheel of these files."""
    wrong = []
    for name in names:
        parts = name.split("/")
        if parts[0] == "lamella":
            if len(parts) == 2:
                wrong.append(f"{name} lies directly in the namespace")
            elif parts[1] != module:
                wrong.append(f"{name} is of another package")
        elif not parts[0].endswith(".dist-info"):
            wrong.append(f"{name} lies outside lamella/")
    for needed in (f"lamella/{module}/__init__.py", f"lamella/{module}/py.typed"):
        if needed not in names:
            wrong.append(f"{needed} is missing")
    if not any(".dist-info/" in name and name.endswith("LICENSE") for name in names):
        wrong.append("the license text is missing")
    return wrong


def make_environment(
    folder: Path, package: Package, need: Needs, wheels: Sequence[Path], with_extras: bool, fast: bool
) -> Path:
    """A new environment with the wheels (the package's own first) and what they and the tests declare. Returns its
    interpreter."""
    # with pip, as people have it: `lamella pull` uses it
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    if fast:
        _run([*pip, "--no-deps", "--no-index", *map(str, wheels)], timeout=300)
        _borrow(closure([*need.third_party, *package.test_requires]), folder)
    else:
        extras = f"[{','.join(package.extras)}]" if with_extras and package.extras else ""
        own, *others = map(str, wheels)
        _run([*pip, f"{own}{extras}", *others, *map(str, package.test_requires)], timeout=1800)
    return python


def closure(requirements: Iterable[Requirement]) -> list[importlib.metadata.Distribution]:
    """The installed distributions that these requirements pull in. Raises Failure if one is missing or too old."""
    found: dict[tuple[str, str], importlib.metadata.Distribution] = {}
    waiting = list(requirements)
    while waiting:
        requirement = waiting.pop()
        for extra in ["", *requirement.extras]:
            key = (canonicalize_name(requirement.name), extra)
            if key in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
                continue
            try:
                distribution = importlib.metadata.distribution(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                raise Failure(f"{requirement} is declared but not installed here: run without --fast") from None
            if not requirement.specifier.contains(distribution.version, prereleases=True):
                raise Failure(f"{requirement} is declared, but {distribution.version} is installed here")
            found[key] = distribution
            for text in distribution.requires or []:
                inner = Requirement(text)
                if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                    inner.marker = None
                    waiting.append(inner)
    return list({id(d): d for d in found.values()}.values())


def _borrow(distributions: Iterable[importlib.metadata.Distribution], folder: Path) -> None:
    """Link the distributions' files into a folder of their own, and put that on the environment's path.

    Only what is linked can be imported: the lender's .pth files (our editable packages) do not follow.
    """
    borrowed = folder / "borrowed"
    borrowed.mkdir()
    for distribution in distributions:
        for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            source = Path(str(distribution.locate_file(top)))
            if not (borrowed / top).exists() and source.exists():
                (borrowed / top).symlink_to(source)
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "borrowed.pth").write_text(f"{borrowed}\n")


def pytest_settings(root: Path = ROOT) -> str:
    """The repository's pytest settings as a pytest.ini, so that tests mean the same without the repository."""
    options: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    lines = ["[pytest]"]
    for key, value in options.items():
        if key == "addopts":
            lines.append(f"addopts = {shlex.join(value)}")
        elif isinstance(value, list) and key != "testpaths":
            lines.append(f"{key} =")
            lines += [f"    {item}" for item in value]
        elif not isinstance(value, list):
            lines.append(f"{key} = {value}")
    return "\n".join([*lines, "testpaths = tests"]) + "\n"


def test(package: Package, python: Path, built: Built, timeout: int) -> None:
    """Run the package's tests from the unpacked sdist. Raises Failure."""
    place = python.parent.parent / "run"
    for name in ("tests", "README.md", "bench"):
        source = built.unpacked / name
        if source.is_dir():
            shutil.copytree(source, place / name)
        elif source.exists():
            place.mkdir(exist_ok=True)
            shutil.copy(source, place / name)
    (place / "pytest.ini").write_text(pytest_settings())
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment.setdefault("OMP_NUM_THREADS", "2")
    where = f"import lamella.{package.module} as m; print(m.__file__)"
    at = _run([str(python), "-c", where], timeout=300, cwd=place, env=environment).strip().splitlines()[-1]
    if not Path(at).resolve().is_relative_to(python.parent.parent.resolve()):
        raise Failure(f"lamella.{package.module} comes from {at}, not from the new environment")
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(command, cwd=place, env=environment, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise Failure(f"the tests took more than {timeout} s") from None
    if done.returncode != 0:
        raise Failure(f"the tests failed (pytest exit status {done.returncode})")


def _run(command: Sequence[str], timeout: int, **options: Any) -> str:
    """Standard output of a command. Raises Failure with all it said if it fails."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, **options
    )
    if done.returncode != 0:
        raise Failure(f"{shlex.join(command)} failed:\n{done.stdout}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "packages",
        nargs="*",
        metavar="PACKAGE",
        help="folders in packages/; if none is named all but kernels-*, which need a vendor's compiler",
    )
    parser.add_argument("--fast", action="store_true", help="link third-party packages from this environment")
    parser.add_argument("--timeout", type=int, default=1800, help="seconds for one package's tests (default 1800)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave wheels and environments in this new folder")
    args = parser.parse_args()
    packages = read_packages()
    by_folder = {package.folder.name: package for package in packages.values()}
    if unknown := [name for name in args.packages if name not in by_folder]:
        parser.error(f"no package {', '.join(unknown)}; there are: {', '.join(by_folder)}")
    chosen = [by_folder[name] for name in args.packages] or [
        p for p in packages.values() if not p.folder.name.startswith("kernels-")
    ]
    if args.keep:
        args.keep.mkdir(parents=True)
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="lamella-alone-") as temporary:
        folder = (args.keep or Path(temporary)).resolve()
        built: dict[str, Built] = {}
        for package in chosen:
            for stage in [False, True] if package.extras else [False]:
                start = time.monotonic()
                title = f"{package.name}{' with extras' if stage else ''}"
                print(f"==== {title}", flush=True)
                try:
                    need = needs(package, packages, stage)
                    for one in [package, *need.siblings]:
                        if one.name not in built:
                            built[one.name] = build(one, folder / one.folder.name, args.fast)
                            check_wheel(one, built[one.name].wheel)
                    place = folder / f"{package.folder.name}-{'extras' if stage else 'bare'}"
                    wheels = [built[one.name].wheel for one in [package, *need.siblings]]
                    python = make_environment(place, package, need, wheels, stage, args.fast)
                    test(package, python, built[package.name], args.timeout)
                except Failure as failure:
                    failures.append(title)
                    print(f"alone: {title}: {failure}", flush=True)
                print(f"==== {title}: {time.monotonic() - start:.0f} s", flush=True)
    print(f"alone: failed: {', '.join(failures)}" if failures else f"alone: {len(chosen)} packages stand alone")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
