"""The reference of DFlash: speculators' blocks, and who sees whom."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamella.runner_v2.testing.draft_heads import checkpoint, dflash, goldens
from lamella.runner_v2.testing.draft_heads.block_backbone import MASK_ID, Backbone
from lamella.runner_v2.testing.draft_heads.checkpoint import Array
from lamella.runner_v2.testing.draft_heads.plain_layers import LayerShape, Weights, decoder_layer, rms_norm
from lamella.runner_v2.testing.draft_heads.target import Ends

SIZES = goldens.SIZES
LAST_ID = goldens.BLOCK_IDS[7]


def hidden_of(folder: Path, num_rows: int = 7) -> Array:
    return goldens.block_hidden_states(checkpoint.read(folder).tensors["fc.weight"].shape[1])[:num_rows]


@pytest.mark.parametrize("case", goldens.CASES["dflash"])
def test_speculators(golden: Callable[..., Any], ends: Ends, case: str) -> None:
    folder, expected = golden("dflash", case, dflash.write_checkpoint)
    assert np.abs(expected).max() > 1
    unused = 0 if case == "from_anchor" else 1
    for block, anchor in zip(expected, goldens.ANCHORS):
        logits = dflash.reference_logits(folder, hidden_of(folder, anchor), goldens.BLOCK_IDS[anchor], target=ends)
        assert len(logits) == 4 - unused
        kept = np.isfinite(logits[0])
        np.testing.assert_allclose(logits[:, kept], block[unused:], atol=1e-5)


def test_both_formats_hold_the_same_head(tmp_path: Path, ends: Ends) -> None:
    authors = dflash.write_checkpoint(tmp_path / "authors", 1, style="authors", **SIZES)
    spoken = dflash.write_checkpoint(tmp_path / "speculators", 1, **SIZES)
    first, second = (
        dflash.reference_logits(folder, hidden_of(folder), LAST_ID, target=ends) for folder in (authors, spoken)
    )
    assert np.array_equal(first, second)
    ids = checkpoint.read(authors).config["dflash_config"]["target_layer_ids"]
    assert checkpoint.read(spoken).config["aux_hidden_state_layer_ids"] == [index + 1 for index in ids]


def influence(backbone: Backbone, folder: Path) -> tuple[Array, Array]:
    """How far each slot's output moves when a row of the context, or the embedding in one slot, moves:
    [num_slots, num_context], [num_slots, num_slots]. Rows are told apart by embeddings of their own."""
    hidden = hidden_of(folder)
    plain = np.stack(backbone.hidden_states(hidden, LAST_ID, None, 4))

    def moved(rows: Array) -> Array:
        return np.asarray(np.abs(rows - plain).max(axis=1))

    by_context = []
    for row in range(len(hidden)):
        changed = hidden.copy()
        changed[row] *= -1
        by_context.append(moved(np.stack(backbone.hidden_states(changed, LAST_ID, None, 4))))
    by_slot = []
    for slot in range(4):
        shaken = _Shaken(slot)
        by_slot.append(moved(np.stack(backbone.hidden_states(hidden, LAST_ID, None, 4, shaken))))
    return np.stack(by_context, axis=1), np.stack(by_slot, axis=1)


class _Shaken:
    """Moves what one slot gives to others: its row as attention reads it."""

    def __init__(self, slot: int) -> None:
        self.slot = slot

    def before(self, weights: Weights, normed: list[Array]) -> tuple[list[Array], Any]:
        if "attention" in weights.prefix:
            normed = [x * (-1 if index == self.slot else 1) for index, x in enumerate(normed)]
        return normed, None

    def after(self, weights: Weights, outputs: list[Array], kept: Any) -> list[Array]:
        return outputs


@pytest.mark.parametrize(
    ("variant", "window_rule", "context", "slots"),
    [
        # by row of the context (0 .. 6; the anchor is at 7) and by slot: which slots see it
        ({}, None, ["1111111"] * 4, ["1111"] * 4),
        ({"style": "authors", "causal": True}, None, ["1111111"] * 4, ["1000", "1100", "1110", "1111"]),
        ({"sliding_layers": [0], "sliding_window": 2}, None, ["0000011"] * 4, ["1000", "1100", "1110", "1111"]),
        ({"sliding_layers": [0], "sliding_window": 2, "causal": False}, None, ["0000011"] * 4, ["1111"] * 4),
        (
            {"sliding_layers": [0], "sliding_window": 3, "style": "authors"},
            None,
            ["0000011", "0000001", "0000000", "0000000"],
            ["1000", "1100", "1110", "0111"],
        ),
        (
            {"sliding_layers": [0], "sliding_window": 3, "style": "authors", "causal": False},
            None,
            ["0000011", "0000001", "0000000", "0000000"],
            ["1110", "1111", "1111", "0111"],
        ),
        ({"sliding_layers": [0], "sliding_window": 3}, "query", ["0000011", "0000001", "0000000", "0000000"], None),
    ],
)
def test_who_sees_whom(
    tmp_path: Path,
    ends: Ends,
    variant: dict[str, Any],
    window_rule: str | None,
    context: list[str],
    slots: list[str] | None,
) -> None:
    """One layer, so that nothing is seen by way of others."""
    folder = dflash.write_checkpoint(tmp_path, 2, num_layers=1, **SIZES, **variant)
    by_context, by_slot = influence(Backbone(folder, ends, window_rule), folder)
    assert ["".join("01"[int(moved > 1e-9)] for moved in row) for row in by_context] == context
    assert slots is None or ["".join("01"[int(moved > 1e-9)] for moved in row) for row in by_slot] == slots


@pytest.mark.parametrize("causal", [False, True])
def test_without_its_context_a_block_is_a_model(
    tmp_path: Path, ends: Ends, monkeypatch: pytest.MonkeyPatch, causal: bool
) -> None:
    """Plain Qwen3 layers over [last token, MASK, …], which are held to transformers."""
    folder = dflash.write_checkpoint(tmp_path, 2, style="authors", causal=causal, **SIZES)
    monkeypatch.setattr(Backbone, "_sees_context", lambda *_: False)
    backbone = Backbone(folder, ends)
    rows = backbone.hidden_states(hidden_of(folder), LAST_ID, None, 4)
    shape = LayerShape.of(backbone.fields)
    expected = [ends.embedding[token] for token in (LAST_ID, MASK_ID, MASK_ID, MASK_ID)]
    for index in range(2):
        layer = backbone.weights.below(f"layers.{index}.")
        expected = decoder_layer(layer, shape, expected, range(7, 11), lambda q, k: k <= q or not causal)
    expected = [rms_norm(x, backbone.weights["norm.weight"], shape.eps) for x in expected]
    np.testing.assert_allclose(rows, expected, atol=1e-12)


def test_positions_count_by_their_differences(tmp_path: Path, ends: Ends) -> None:
    folder = dflash.write_checkpoint(tmp_path, 1, **SIZES)
    hidden = hidden_of(folder)
    logits = dflash.reference_logits(folder, hidden, LAST_ID, target=ends)
    shifted = dflash.reference_logits(folder, hidden, LAST_ID, range(50, 57), target=ends)
    np.testing.assert_allclose(shifted, logits, atol=1e-10)
    gap = dflash.reference_logits(folder, hidden, LAST_ID, [0, 1, 2, 3, 4, 5, 9], target=ends)
    assert np.abs(gap - logits).max() > 1e-4


def test_a_shorter_block(tmp_path: Path, ends: Ends) -> None:
    """Fewer masks change what is seen where a block looks both ways, and nothing where it is causal."""
    for causal in (False, True):
        folder = dflash.write_checkpoint(tmp_path / str(causal), 1, style="authors", causal=causal, **SIZES)
        hidden = hidden_of(folder)
        whole = dflash.reference_logits(folder, hidden, LAST_ID, target=ends)
        short = dflash.reference_logits(folder, hidden, LAST_ID, num_drafts=2, target=ends)
        assert short.shape == (2, 64)
        assert np.allclose(short, whole[:2], atol=1e-12) == causal


@pytest.mark.parametrize("variant", [{}, {"draft_vocab_size": 24, "attention_bias": True}])
def test_every_tensor_is_used(tmp_path: Path, ends: Ends, variant: dict[str, Any]) -> None:
    folder = dflash.write_checkpoint(tmp_path / "whole", 1, **SIZES, **variant)
    hidden = hidden_of(folder)
    logits = dflash.reference_logits(folder, hidden, LAST_ID, target=ends)
    config, tensors = checkpoint.read(folder)
    for name in tensors.keys() - {"d2t", "t2d"}:
        turned = {**tensors, name: np.roll(tensors[name], 1, axis=0)}
        other = checkpoint.write(tmp_path / "other", config, turned, dtype="float64")
        moved = dflash.reference_logits(other, hidden, LAST_ID, target=ends)
        kept = np.isfinite(logits)
        assert np.abs(moved[kept] - logits[kept]).max() > 1e-7, name


def test_drafts_are_the_best_of_each_slot(tmp_path: Path, ends: Ends) -> None:
    folder = dflash.write_checkpoint(tmp_path, 1, **SIZES, draft_vocab_size=24)
    logits = dflash.reference_logits(folder, hidden_of(folder), LAST_ID, target=ends)
    assert dflash.reference_drafts(folder, hidden_of(folder), LAST_ID, target=ends) == logits.argmax(axis=1).tolist()
    with pytest.raises(AssertionError, match="pass target"):
        dflash.reference_logits(folder, hidden_of(folder), LAST_ID)
