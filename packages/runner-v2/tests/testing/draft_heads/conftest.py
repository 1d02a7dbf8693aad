"""What the tests of all draft heads share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lamella.runner_v2.testing.draft_heads import checkpoint, goldens, target


@pytest.fixture
def ends(tmp_path: Path) -> target.Ends:
    """The ends of the target with which goldens were made."""
    return target.ends(target.write_ends(tmp_path / "target", goldens.SEED, **goldens.SIZES))


@pytest.fixture
def golden(tmp_path: Path) -> Callable[..., tuple[Path, checkpoint.Array]]:
    """(head, case, writer) -> the case's checkpoint, and what speculators computed on it."""

    def find(head: str, case: str, write: Callable[..., Path]) -> tuple[Path, checkpoint.Array]:
        kept = goldens.load(Path(__file__).parent / "golden" / f"{head}.safetensors")
        folder = write(tmp_path / "head", goldens.SEED, **goldens.CASES[head][case])
        assert kept.digests[case] == checkpoint.digest(folder), "made of another checkpoint: `hatch run oracle:golden`"
        assert kept.versions["speculators"] == "0.9.0"
        return folder, kept.results[case]

    return find
