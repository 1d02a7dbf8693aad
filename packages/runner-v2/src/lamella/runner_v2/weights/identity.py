"""Tells checkpoints apart by content, quickly: bytes that one wrote into a cache mean nothing to another.

    per file    name, size, its first MiB (the header with all names and shapes), and pages spread evenly over the rest

Two checkpoints that differ in nothing but a few weights between the pages that are read have the same identity; a
fine-tune, a merge or another quantisation changes nearly all pages.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from lamella.runner_v2.errors import CheckpointError

HEAD_BYTES = 1 << 20
PAGE_BYTES = 4096
NUM_PAGES = 256


def weights_identity(path: str | Path, *, with_weights: bool = True) -> str:
    """32 hex digits for a checkpoint folder or a .gguf file; the same wherever it lies. with_weights: False: the
    configuration alone, as for random weights. CheckpointError if a file cannot be read."""
    path = Path(path)
    digest = hashlib.blake2b(digest_size=16, person=b"lamella.weights")
    files = [path]
    if path.is_dir():
        files = [path / "config.json", *sorted(path.glob("*.safetensors"))] if with_weights else [path / "config.json"]
    try:
        for file in files:
            _add(digest, "" if file == path else file.name, file)
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from error
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, name: str, file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{len(name)} {name} {size} ".encode())
    with file.open("rb") as stream:
        digest.update(stream.read(HEAD_BYTES))
        if size <= HEAD_BYTES:
            return
        last = max(HEAD_BYTES, size - PAGE_BYTES)
        for n in range(NUM_PAGES + 1):
            stream.seek(HEAD_BYTES + (last - HEAD_BYTES) * n // NUM_PAGES)
            digest.update(stream.read(PAGE_BYTES))
