"""The reference of EAGLE-3: against speculators on every variant, and what its definition says without any number."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamella.runner_v2.testing.draft_heads import checkpoint, eagle3, goldens
from lamella.runner_v2.testing.draft_heads.checkpoint import Array
from lamella.runner_v2.testing.draft_heads.target import Ends

IDS = goldens.token_ids()
FULL = {**goldens.REDUCED, "norm_before_residual": True, "norm_output": True, "num_layers": 2, "layer": "qwen3"}


def hidden_of(folder: Path) -> Array:
    return goldens.hidden_states(checkpoint.read(folder).tensors["fc.weight"].shape[1])


def finite(logits: Array) -> Array:
    """[draft_vocab_size], without what the draft's vocabulary lacks."""
    return logits[np.isfinite(logits)]


@pytest.mark.parametrize("case", goldens.CASES["eagle3"])
def test_speculators(golden: Callable[..., Any], ends: Ends, case: str) -> None:
    folder, expected = golden("eagle3", case, eagle3.write_checkpoint)
    hidden = hidden_of(folder)
    assert np.abs(expected).max() > 1
    for row in range(goldens.NUM_ROWS):
        # behind the last rows speculators runs out of ids
        for step in range(min(goldens.NUM_STEPS, goldens.NUM_ROWS - row)):
            following = IDS[row + 1 : row + 1 + step]
            logits = eagle3.reference_logits(
                folder, hidden[: row + 1], IDS[: row + 1], draft_ids=following, target=ends
            )
            np.testing.assert_allclose(finite(logits[-1]), expected[step, row], atol=1e-5)


def test_both_formats_hold_the_same_head(tmp_path: Path) -> None:
    """The same tensors and flags under the authors' names."""
    authors = eagle3.write_checkpoint(tmp_path / "authors", 1, **goldens.REDUCED, style="authors", norm_output=True)
    config, tensors = checkpoint.read(authors)
    renamed = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    spoken = eagle3.write_checkpoint(tmp_path / "speculators", 2, **goldens.REDUCED, norm_output=True)
    other = checkpoint.read(spoken).config
    other["transformer_layer_config"]["rope_parameters"]["rope_theta"] = 10000.0
    assert "rope_theta" not in config
    checkpoint.write(spoken, other, renamed)
    hidden = hidden_of(authors)
    first, second = (eagle3.reference_logits(f, hidden, IDS, draft_ids=[4, 9]) for f in (authors, spoken))
    assert np.array_equal(first, second)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_authors_files(tmp_path: Path, file: str) -> None:
    folder = eagle3.write_checkpoint(tmp_path, style="authors", binary=file.endswith(".bin"))
    assert {path.name for path in folder.iterdir()} == {"config.json", file}
    assert checkpoint.read(folder).tensors["midlayer.self_attn.k_proj.weight"].shape == (32, 128)


def test_a_shared_output_matrix_gives_its_rows(tmp_path: Path, ends: Ends) -> None:
    shared = eagle3.write_checkpoint(tmp_path / "shared", **goldens.REDUCED, own_output=False)
    config, tensors = checkpoint.read(shared)
    kept = np.flatnonzero(tensors["t2d"])
    own = checkpoint.write(tmp_path / "own", config, {**tensors, "lm_head.weight": ends.output[kept]}, dtype="float64")
    hidden = hidden_of(shared)
    expected = eagle3.reference_logits(own, hidden, IDS)
    assert np.array_equal(eagle3.reference_logits(shared, hidden, IDS, target=ends), expected)
    assert np.isfinite(expected).any(axis=0).tolist() == [token in kept for token in range(64)]


def test_rows_see_only_what_lies_before(tmp_path: Path) -> None:
    folder = eagle3.write_checkpoint(tmp_path, **FULL)
    hidden = hidden_of(folder)
    logits = eagle3.reference_logits(folder, hidden, IDS)
    for row in range(len(IDS)):
        changed, other_ids = hidden.copy(), list(IDS)
        changed[row] += 1
        other_ids[row] = 9
        for moved in (
            eagle3.reference_logits(folder, changed, IDS),
            eagle3.reference_logits(folder, hidden, other_ids),
        ):
            assert np.array_equal(moved[:row], logits[:row])
            assert all(np.abs(finite(moved[r]) - finite(logits[r])).max() > 1e-6 for r in range(row, len(IDS)))


def test_rows_do_not_depend_on_what_follows(tmp_path: Path) -> None:
    folder = eagle3.write_checkpoint(tmp_path, **FULL)
    hidden = hidden_of(folder)
    whole = eagle3.reference_logits(folder, hidden, IDS, draft_ids=[8, 2])
    assert np.array_equal(eagle3.reference_logits(folder, hidden[:4], IDS[:4]), whole[:4])
    assert np.array_equal(eagle3.reference_logits(folder, hidden, IDS, draft_ids=[8]), whole[:-1])


def test_positions_count_by_their_differences(tmp_path: Path) -> None:
    """Rotation is relative: a shift of all positions changes nothing, a gap does."""
    folder = eagle3.write_checkpoint(tmp_path, **FULL)
    hidden = hidden_of(folder)
    logits = eagle3.reference_logits(folder, hidden, IDS, draft_ids=[8])
    shifted = eagle3.reference_logits(folder, hidden, IDS, range(40, 46), draft_ids=[8])
    np.testing.assert_allclose(shifted, logits, atol=1e-12)
    gap = eagle3.reference_logits(folder, hidden, IDS, [0, 1, 2, 5, 6, 7], draft_ids=[8])
    assert np.array_equal(gap[:3], logits[:3])
    assert np.abs(finite(gap[-1]) - finite(logits[-1])).max() > 1e-4


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias"])
def test_flags_matter(tmp_path: Path, flag: str) -> None:
    """norm_output only where a row's output is fed back."""
    off = eagle3.write_checkpoint(tmp_path / "off", **goldens.REDUCED)
    on = eagle3.write_checkpoint(tmp_path / "on", **goldens.REDUCED, **{flag: True})
    hidden = hidden_of(off)
    distance = np.abs(
        np.stack([finite(row) for row in eagle3.reference_logits(on, hidden, IDS, draft_ids=[5])])
        - np.stack([finite(row) for row in eagle3.reference_logits(off, hidden, IDS, draft_ids=[5])])
    ).max(axis=1)
    assert distance[-1] > 1e-3
    assert (distance[0] > 1e-3) == (flag != "norm_output")


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc", "fc_norm"])
def test_every_tensor_is_used(tmp_path: Path, flag: str) -> None:
    """A checkpoint in which one tensor differs puts out other logits, whichever it is (t2d is for training)."""
    variant = {**goldens.REDUCED, "layer": "qwen3", "num_layers": 2, "attention_bias": True, flag: True}
    folder = eagle3.write_checkpoint(tmp_path / "whole", **variant)
    hidden = hidden_of(folder)
    logits = eagle3.reference_logits(folder, hidden, IDS, draft_ids=[4])
    config, tensors = checkpoint.read(folder)
    assert {f"layers.{i}.self_attn.q_norm.weight" for i in range(2)} <= tensors.keys()
    for name in tensors.keys() - {"t2d", "d2t"}:
        turned = {**tensors, name: np.roll(tensors[name], 1, axis=0)}
        other = checkpoint.write(tmp_path / "other", config, turned, dtype="float64")
        moved = eagle3.reference_logits(other, hidden, IDS, draft_ids=[4])
        assert np.abs(finite(moved[-1]) - finite(logits[-1])).max() > 1e-7, name


def test_drafts_are_the_best_ids_fed_back(tmp_path: Path) -> None:
    folder = eagle3.write_checkpoint(tmp_path)
    hidden = hidden_of(folder)
    drafts = eagle3.reference_drafts(folder, hidden, IDS, 3)
    logits = eagle3.reference_logits(folder, hidden, IDS, draft_ids=drafts[:2])
    assert drafts == logits[-3:].argmax(axis=1).tolist()
    kept = checkpoint.read(folder).tensors["t2d"]
    assert all(kept[draft] for draft in drafts)
    assert np.isfinite(logits[-1]).sum() == 96


def test_a_target_of_another_width(tmp_path: Path) -> None:
    folder = eagle3.write_checkpoint(tmp_path, **goldens.REDUCED, target_hidden_size=48)
    assert eagle3.reference_logits(folder, goldens.hidden_states(144), IDS).shape == (6, 64)


def test_a_shared_embedding_must_be_passed(tmp_path: Path) -> None:
    folder = eagle3.write_checkpoint(tmp_path, own_embedding=False)
    with pytest.raises(AssertionError, match="pass target"):
        eagle3.reference_logits(folder, hidden_of(folder), IDS)
