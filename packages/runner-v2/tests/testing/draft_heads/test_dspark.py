"""The reference of DSpark: speculators' blocks, and how drafts depend on those before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamella.runner_v2.testing.draft_heads import checkpoint, dflash, dspark, goldens
from lamella.runner_v2.testing.draft_heads.checkpoint import Array
from lamella.runner_v2.testing.draft_heads.target import Ends

SIZES = goldens.SIZES
LAST_ID = goldens.BLOCK_IDS[7]


def hidden_of(folder: Path, num_rows: int = 7) -> Array:
    return goldens.block_hidden_states(checkpoint.read(folder).tensors["fc.weight"].shape[1])[:num_rows]


@pytest.mark.parametrize("case", goldens.CASES["dspark"])
def test_speculators(golden: Callable[..., Any], ends: Ends, case: str) -> None:
    folder, expected = golden("dspark", case, dspark.write_checkpoint)
    unused = 0 if goldens.CASES["dspark"][case].get("sample_from_anchor", True) else 1
    for block, anchor in zip(expected, goldens.ANCHORS):
        following = goldens.BLOCK_IDS[anchor + 1 : anchor + 4 - unused]
        rows = dspark.reference_rows(
            folder, hidden_of(folder, anchor), goldens.BLOCK_IDS[anchor], draft_ids=following, target=ends
        )
        kept = np.isfinite(rows.logits[0])
        np.testing.assert_allclose(rows.logits[:, kept], block[unused:, :-1], atol=1e-5)
        np.testing.assert_allclose(rows.confidences, 1 / (1 + np.exp(-block[unused:, -1])), atol=1e-6)
        assert rows.ids[:-1] == following


def test_without_its_heads_it_is_dflash(tmp_path: Path, ends: Ends) -> None:
    """The backbone's tensors are a DFlash checkpoint, whose logits DSpark's are up to the bias."""
    folder = dspark.write_checkpoint(tmp_path / "dspark", 1, **SIZES, sample_from_anchor=False)
    config, tensors = checkpoint.read(folder)
    backbone = {name: value for name, value in tensors.items() if not name.startswith(("markov", "confidence"))}
    plain = checkpoint.write(tmp_path / "dflash", config, backbone, dtype="float64")
    hidden = hidden_of(folder)
    rows = dspark.reference_rows(folder, hidden, LAST_ID, draft_ids=[5, 6], target=ends)
    w1, w2 = (tensors[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
    expected = dflash.reference_logits(plain, hidden, LAST_ID, target=ends) + w1[[LAST_ID, 5, 6]] @ w2.T
    np.testing.assert_allclose(rows.logits, expected, atol=1e-12)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_draft_counts_for_those_behind_it(tmp_path: Path, ends: Ends, kind: str) -> None:
    """Row and confidence k follow on drafts before k only: on the last one, or on all of them through the state."""
    folder = dspark.write_checkpoint(tmp_path, 1, **SIZES, markov_head_type=kind)
    hidden = hidden_of(folder)
    plain = dspark.reference_rows(folder, hidden, LAST_ID, draft_ids=[5, 6, 7, 8], target=ends)
    for changed in range(4):
        ids = [5, 6, 7, 8]
        ids[changed] = 40
        rows = dspark.reference_rows(folder, hidden, LAST_ID, draft_ids=ids, target=ends)
        assert rows.confidences is not None
        moved = [k for k in range(4) if np.abs(rows.logits[k] - plain.logits[k]).max() > 1e-9]
        assert moved == (list(range(changed + 1, 4)) if kind == "rnn" else [changed + 1] if changed < 3 else [])
        assert np.flatnonzero(rows.confidences != plain.confidences).tolist() == [k for k in (changed + 1,) if k < 4]
    other = dspark.reference_rows(folder, hidden, 40, draft_ids=[5, 6, 7, 8], target=ends)
    assert np.abs(other.logits[0] - plain.logits[0]).max() > 1e-3


def test_drafts_are_greedy_where_none_are_given(tmp_path: Path, ends: Ends) -> None:
    folder = dspark.write_checkpoint(tmp_path, 1, **SIZES, draft_vocab_size=24)
    hidden = hidden_of(folder)
    drafts = dspark.reference_drafts(folder, hidden, LAST_ID, target=ends)
    given = dspark.reference_logits(folder, hidden, LAST_ID, draft_ids=drafts, target=ends)
    assert given.argmax(axis=1).tolist() == drafts
    assert dspark.reference_drafts(folder, hidden, LAST_ID, 2, target=ends) != []
    half = dspark.reference_rows(folder, hidden, LAST_ID, draft_ids=drafts[:2], target=ends)
    assert half.ids == drafts


def test_draft_topk_keeps_the_best_of_the_unbiased(tmp_path: Path, ends: Ends) -> None:
    folder = dspark.write_checkpoint(tmp_path, 1, **SIZES)
    hidden = hidden_of(folder)
    whole = dspark.reference_rows(folder, hidden, LAST_ID, draft_ids=[5, 6, 7], target=ends)
    few = dspark.reference_rows(folder, hidden, LAST_ID, draft_ids=[5, 6, 7], target=ends, draft_topk=4)
    assert np.isfinite(few.logits).sum(axis=1).tolist() == [4] * 4
    kept = np.isfinite(few.logits)
    assert np.array_equal(few.logits[kept], whole.logits[kept])
    tensors = checkpoint.read(folder).tensors
    bias = tensors["markov_head.markov_w1.weight"][LAST_ID] @ tensors["markov_head.markov_w2.weight"].T
    assert set(np.argsort(-(whole.logits[0] - bias))[:4]) == set(np.flatnonzero(kept[0]))


def test_both_formats_hold_the_same_head(tmp_path: Path, ends: Ends) -> None:
    authors = dspark.write_checkpoint(tmp_path / "authors", 1, style="authors", **SIZES)
    spoken = dspark.write_checkpoint(tmp_path / "speculators", 1, **SIZES)
    first, second = (
        dspark.reference_rows(folder, hidden_of(folder), LAST_ID, target=ends) for folder in (authors, spoken)
    )
    assert np.array_equal(first.logits, second.logits)
    assert np.array_equal(first.confidences, second.confidences)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_every_tensor_is_used(tmp_path: Path, ends: Ends, kind: str) -> None:
    folder = dspark.write_checkpoint(tmp_path / "whole", 1, **SIZES, markov_head_type=kind)
    hidden = hidden_of(folder)
    plain = dspark.reference_rows(folder, hidden, LAST_ID, draft_ids=[5, 6, 7], target=ends)
    config, tensors = checkpoint.read(folder)
    for name in tensors:
        other = checkpoint.write(
            tmp_path / "other", config, {**tensors, name: tensors[name][::-1] * 1.5}, dtype="float64"
        )
        rows = dspark.reference_rows(other, hidden, LAST_ID, draft_ids=[5, 6, 7], target=ends)
        of_confidence = name.startswith("confidence_head")
        assert (np.abs(rows.logits - plain.logits).max() > 1e-9) == (not of_confidence), name
        assert not of_confidence or np.abs(rows.confidences - plain.confidences).max() > 1e-6, name
