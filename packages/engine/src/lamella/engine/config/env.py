"""The only place that reads the process environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def option_from_environment(name: str) -> str | None:
    """Text of LAMELLA_<NAME>, an option's value where the command line does not give it."""
    return os.environ.get("LAMELLA_" + name.upper())


def names_in_environment() -> list[str]:
    """What follows LAMELLA_ in the names of all variables that begin so, sorted."""
    return sorted(name[len("LAMELLA_") :] for name in os.environ if name.startswith("LAMELLA_"))


def cache_dir() -> Path:
    """Folder for pulled models: LAMELLA_CACHE, else the platform's user cache folder."""
    override = os.environ.get("LAMELLA_CACHE")
    if override:
        return Path(override).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "lamella"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "lamella" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lamella"


def no_color() -> bool:
    """The user wants plain text (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))
