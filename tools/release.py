"""Which package a release tag means, and whether it is ready to be released.

    python tools/release.py TAG

A tag is <folder>-v<version>, for example specdec-v0.1.2: each package is released by itself, and all share
major.minor. Prints `folder=…`, `native=…` lines for the workflow; exit status 1 with the reason if the tag, the version
in the pyproject and the CHANGELOG do not say the same.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent


class Release(NamedTuple):
    """A package at a version."""

    folder: str
    version: str
    native: bool


def read_tag(tag: str, root: Path = ROOT) -> Release:
    """The release that a tag means. Raises ValueError if it is none, or the package is not ready."""
    match = re.fullmatch(r"([a-z][a-z0-9-]*)-v(\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)", tag)
    if match is None:
        raise ValueError(f"{tag!r} is no release tag: <folder>-v<version>, for example specdec-v0.1.2")
    folder, version = match[1], match[2]
    path = root / "packages" / folder
    if not (path / "pyproject.toml").exists():
        known = ", ".join(sorted(p.parent.name for p in (root / "packages").glob("*/pyproject.toml")))
        raise ValueError(f"there is no package {folder!r}; there are: {known}")
    stated = tomllib.loads((path / "pyproject.toml").read_text())["project"]["version"]
    if stated != version:
        raise ValueError(f"packages/{folder}/pyproject.toml says {stated}, the tag says {version}")
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", (path / "CHANGELOG.md").read_text(), re.M):
        raise ValueError(f"packages/{folder}/CHANGELOG.md has no dated section {version}")
    return Release(folder, version, (path / "CMakeLists.txt").exists())


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    try:
        release = read_tag(sys.argv[1])
    except ValueError as error:
        raise SystemExit(f"release: {error}") from None
    print(f"folder={release.folder}\nversion={release.version}\nnative={'true' if release.native else 'false'}")


if __name__ == "__main__":
    main()
