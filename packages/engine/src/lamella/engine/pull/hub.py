"""Models from a hub in Hugging Face's manner: a repository's folder, or one GGUF file of it.

Files go to the hub library's own cache, which other programs share. Its environment counts: HF_TOKEN, HF_ENDPOINT,
HF_HOME, HF_HUB_OFFLINE.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.errors as hub_errors
from tqdm import tqdm

from lamella.engine.console import note_without_bar
from lamella.engine.errors import StartError

_WANTED = ("*.safetensors", "*.json", "*.model", "*.jinja")
# Second copies of the weights in other layouts, and folders for other programs.
_UNWANTED = ("consolidated*", "*/*.safetensors", "*/*.json", "*/*.model", "original/*")
_MAX_LISTED = 12


@dataclass(frozen=True)
class HubModel:
    """A repository, or one file in it."""

    repo_id: str
    file: str | None = None

    def __str__(self) -> str:
        return self.repo_id if self.file is None else f"{self.repo_id}:{self.file}"


@dataclass(frozen=True)
class HubOptions:
    """How to reach the hub; None: what the environment says."""

    revision: str | None = None
    token: str | None = None
    endpoint: str | None = None
    cache_dir: Path | None = None


def pull_hub(model: HubModel, options: HubOptions, *, progress: bool = True) -> Path:
    """The folder or file in the hub's cache, fetched as far as it is not there. With progress, bars on standard error,
    or two lines where it is no terminal.

    Raises StartError, one line with the remedy: not found, gated, no such revision or file, no network and not in the
    cache, nothing in the repository that can be loaded.
    """
    bars = {} if progress else {"tqdm_class": _SilentBar}
    common: dict[str, Any] = {
        "revision": options.revision,
        "token": options.token,
        "endpoint": options.endpoint,
        "cache_dir": options.cache_dir,
        "library_name": "lamella",
        **bars,
    }
    if progress:
        note_without_bar(f"pull {model}: fetching from the hub what is not in its cache")
    with _explained(model, options):
        if model.file is not None:
            path = Path(huggingface_hub.hf_hub_download(model.repo_id, model.file, **common))
        else:
            snapshot = huggingface_hub.snapshot_download(
                model.repo_id, allow_patterns=list(_WANTED), ignore_patterns=list(_UNWANTED), **common
            )
            path = Path(str(snapshot))
    if model.file is None and not any(path.glob("*.safetensors")):
        raise StartError(_nothing_to_load(model, options))
    if progress:
        note_without_bar(f"pull {model}: done, {path}")
    return path


@contextmanager
def _explained(model: HubModel, options: HubOptions) -> Iterator[None]:
    """Turn the library's errors into one line each."""
    revision = options.revision or "main"
    try:
        yield
    except hub_errors.GatedRepoError as error:
        raise StartError(
            f"{model.repo_id} is gated: accept its conditions on its page, then set HF_TOKEN or run `hf auth login`"
        ) from error
    except hub_errors.RepositoryNotFoundError as error:
        raise StartError(
            f"{model.repo_id} was not found on the hub; check the name, and if it is private set HF_TOKEN"
        ) from error
    except hub_errors.RevisionNotFoundError as error:
        raise StartError(f"{model.repo_id} has no revision {revision!r}") from error
    except hub_errors.LocalEntryNotFoundError as error:
        raise StartError(
            f"{model} is not in the local cache, and the hub cannot be reached (no network, or HF_HUB_OFFLINE is set); "
            f"copy the model onto this machine and give its path"
        ) from error
    except hub_errors.EntryNotFoundError as error:
        raise StartError(f"{model.repo_id} has no file {model.file!r}{_gguf_list(model, options)}") from error
    except hub_errors.HFValidationError as error:
        raise StartError(f"{model.repo_id!r} is not a hub id: {error}") from error
    except Exception as error:
        # The library's transport has errors of its own, and they change with its versions.
        first_line = next(iter(str(error).splitlines()), "")
        raise StartError(f"{model} could not be fetched: {type(error).__name__}: {first_line}") from error


def _nothing_to_load(model: HubModel, options: HubOptions) -> str:
    listed = _gguf_list(model, options)
    if listed:
        example = listed.removeprefix("; it has ").split(",")[0].split(" ")[0]
        return f"{model.repo_id} has GGUF files only; name one of them, as in {model.repo_id}:{example}{listed}"
    return f"{model.repo_id} has no .safetensors files; other weight formats are not read"


def _gguf_list(model: HubModel, options: HubOptions) -> str:
    """'; it has a.gguf, b.gguf', or nothing where the repository has none or cannot be asked."""
    try:
        api = huggingface_hub.HfApi(endpoint=options.endpoint, token=options.token)
        files = api.list_repo_files(model.repo_id, revision=options.revision)
    except (OSError, ValueError):
        return ""
    names = sorted(name for name in files if name.endswith(".gguf"))
    if not names:
        return ""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return f"; it has {', '.join(names[:_MAX_LISTED])}{more}"


def _start_silent(bar: Any, *args: Any, **options: Any) -> None:
    options.pop("name", None)  # the hub library's own keyword
    tqdm.__init__(bar, *args, **{**options, "disable": True})


_SilentBar: Any = type("SilentBar", (tqdm,), {"__init__": _start_silent})
"""A bar that shows nothing."""
