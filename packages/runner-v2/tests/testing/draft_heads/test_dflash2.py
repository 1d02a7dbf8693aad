"""The reference of DFlash2: speculators' blocks, and what its two parts come to where they do nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamella.runner_v2.testing.draft_heads import checkpoint, dflash, dflash2, goldens
from lamella.runner_v2.testing.draft_heads.checkpoint import Array
from lamella.runner_v2.testing.draft_heads.plain_layers import Weights
from lamella.runner_v2.testing.draft_heads.target import Ends

SIZES = goldens.SIZES
LAST_ID = goldens.BLOCK_IDS[7]


def hidden_of(folder: Path, num_rows: int = 7) -> Array:
    return goldens.block_hidden_states(checkpoint.read(folder).tensors["fc.weight"].shape[1])[:num_rows]


@pytest.mark.parametrize("case", goldens.CASES["dflash2"])
def test_speculators(golden: Callable[..., Any], ends: Ends, case: str) -> None:
    folder, expected = golden("dflash2", case, dflash2.write_checkpoint)
    unused = 0 if goldens.CASES["dflash2"][case].get("sample_from_anchor", False) else 1
    for unary, scores, anchor in zip(*expected, goldens.ANCHORS):
        hidden, last_id = hidden_of(folder, anchor), goldens.BLOCK_IDS[anchor]
        following = goldens.BLOCK_IDS[anchor + 1 : anchor + 4 - unused]
        alone = dflash2.reference_unary_logits(folder, hidden, last_id, target=ends)
        np.testing.assert_allclose(alone, unary[unused:], atol=1e-5)
        walked = dflash2.reference_logits(folder, hidden, last_id, draft_ids=following, target=ends)
        assert np.array_equal(np.isfinite(walked), np.isfinite(scores[unused:]))
        kept = np.isfinite(walked)
        np.testing.assert_allclose(walked[kept], scores[unused:][kept], atol=1e-5)


def test_identity_convolutions_leave_dflash(tmp_path: Path, ends: Ends) -> None:
    folder = dflash2.write_checkpoint(tmp_path / "dflash2", 1, **SIZES)
    config, tensors = checkpoint.read(folder)
    for name in tensors:
        if name.endswith("base_kernel"):
            tensors[name] = np.zeros_like(tensors[name])
            tensors[name][:, 0] = 1
        elif name.endswith("kernel_projection.weight"):
            tensors[name] = np.zeros_like(tensors[name])
    still = checkpoint.write(tmp_path / "still", config, tensors, dtype="float64")
    parts = ("attention_conv", "mlp_conv", "candidate_selector")
    backbone = {name: value for name, value in tensors.items() if not any(part in name for part in parts)}
    plain = checkpoint.write(tmp_path / "dflash", config, backbone, dtype="float64")
    hidden = hidden_of(folder)
    expected = dflash.reference_logits(plain, hidden, LAST_ID, target=ends)
    np.testing.assert_allclose(
        dflash2.reference_unary_logits(still, hidden, LAST_ID, target=ends), expected, atol=1e-12
    )
    moved = dflash2.reference_unary_logits(folder, hidden, LAST_ID, target=ends)
    assert np.all(np.abs(moved - expected).max(axis=1) > 1e-2)


def test_convolution_by_hand() -> None:
    """Two rows of two numbers in one group; coefficients of the first row are 0 and 1, of the second 10 and 100."""
    weights = Weights(
        {
            "base_kernel": np.array([[[1.0, 2.0], [3.0, 4.0]], [[1.0, 1.0], [0.0, 0.0]]]),
            # the first number of x → [in tap 0, in tap 1, out tap 0, out tap 1], by the second number
            "kernel_projection.weight": np.array([[0.0, 10.0], [0.0, 100.0], [0.0, 0.0], [0.0, 1.0]]),
        }
    )
    around = dflash2.Convolutions(taps=2, group_size=2)
    inputs, kept = around.before(weights, [np.array([5.0, 0.0]), np.array([7.0, 1.0])])
    assert inputs[0].tolist() == [5.0, 0.0]
    # tap 0: (base + 10) * [7, 1]; tap 1: (base + 100) * [5, 0]
    assert inputs[1].tolist() == [11 * 7 + 103 * 5, 12 * 1 + 0]
    outputs = around.after(weights, [np.array([2.0, 3.0]), np.array([4.0, 5.0])], kept)
    assert outputs[0].tolist() == [2.0, 3.0]
    assert outputs[1].tolist() == [4.0 + 1 * 2, 5.0 + 1 * 3]


def test_selector_by_hand(tmp_path: Path, ends: Ends) -> None:
    """Scores of a row's candidates behind a token, from the codebooks and what the slot alone says."""
    folder = dflash2.write_checkpoint(tmp_path, 1, **SIZES, selector_rank=1, selector_top_k=3)
    tensors = checkpoint.read(folder).tensors
    hidden = hidden_of(folder)
    unary = dflash2.reference_unary_logits(folder, hidden, LAST_ID, target=ends)
    behind_5 = dflash2.reference_logits(folder, hidden, LAST_ID, draft_ids=[5], target=ends)[1]
    behind_6 = dflash2.reference_logits(folder, hidden, LAST_ID, draft_ids=[6], target=ends)[1]
    candidates = np.argsort(-unary[1])[:3]
    assert set(np.flatnonzero(np.isfinite(behind_5))) == set(candidates)
    before = tensors["candidate_selector.predecessor_codebook"][[5, 6], 0]
    edges_5, edges_6 = (row[candidates] - unary[1][candidates] for row in (behind_5, behind_6))
    # rank 1: an edge is predecessor * successor * the slot's one number
    np.testing.assert_allclose(edges_5 * before[1], edges_6 * before[0], atol=1e-10)
    successors = tensors["candidate_selector.successor_codebook"][candidates, 0]
    np.testing.assert_allclose(edges_5 / successors, edges_5[0] / successors[0], atol=1e-10)


def test_greedy_walk(tmp_path: Path, ends: Ends) -> None:
    folder = dflash2.write_checkpoint(tmp_path, 1, **SIZES)
    hidden = hidden_of(folder)
    drafts = dflash2.reference_drafts(folder, hidden, LAST_ID, target=ends)
    scores = dflash2.reference_logits(folder, hidden, LAST_ID, draft_ids=drafts, target=ends)
    assert scores.argmax(axis=1).tolist() == drafts
    assert np.isfinite(scores).sum(axis=1).tolist() == [5, 5, 5]


def test_authors_fields(tmp_path: Path, ends: Ends) -> None:
    """The same head in both formats; then each of the authors' own scales, which speculators has not."""
    spoken = dflash2.write_checkpoint(tmp_path / "speculators", 1, **SIZES)
    authors = dflash2.write_checkpoint(tmp_path / "authors", 1, style="authors", **SIZES)
    hidden = hidden_of(spoken)
    plain = dflash2.reference_logits(spoken, hidden, LAST_ID, target=ends)
    assert np.array_equal(dflash2.reference_logits(authors, hidden, LAST_ID, target=ends), plain)
    unary = dflash2.reference_unary_logits(spoken, hidden, LAST_ID, target=ends)
    capped = dflash2.write_checkpoint(
        tmp_path / "capped", 1, style="authors", **SIZES, output_multiplier=0.5, final_logit_softcapping=2.0
    )
    np.testing.assert_allclose(
        dflash2.reference_unary_logits(capped, hidden, LAST_ID, target=ends), 2 * np.tanh(unary / 4), atol=1e-12
    )
    scaled = dflash2.write_checkpoint(tmp_path / "scaled", 1, style="authors", **SIZES, input_embedding_scale=3.0)
    larger = ends._replace(embedding=ends.embedding * 3)
    assert np.array_equal(
        dflash2.reference_logits(scaled, hidden, LAST_ID, target=ends),
        dflash2.reference_logits(authors, hidden, LAST_ID, target=larger),
    )


def test_every_tensor_is_used(tmp_path: Path, ends: Ends) -> None:
    folder = dflash2.write_checkpoint(tmp_path / "whole", 1, **SIZES)
    hidden = hidden_of(folder)
    plain = dflash2.reference_logits(folder, hidden, LAST_ID, target=ends)
    config, tensors = checkpoint.read(folder)
    for name in tensors:
        turned = {**tensors, name: np.roll(tensors[name], 1, axis=0) * 1.1}
        other = checkpoint.write(tmp_path / "other", config, turned, dtype="float64")
        rows = dflash2.reference_logits(other, hidden, LAST_ID, target=ends)
        # other candidates, or other scores of the same ones
        same = np.array_equal(np.isfinite(rows), np.isfinite(plain))
        kept = np.isfinite(plain)
        assert not same or np.abs(rows[kept] - plain[kept]).max() > 1e-7, name
