"""The reference of MTP: transformers' targets and modules, speculators' passes, and what the definition says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_layers import MtpModel

from lamella.runner_v2.testing.draft_heads import checkpoint, goldens, mtp
from lamella.runner_v2.testing.draft_heads.mtp_layers import KINDS, KindLayer
from lamella.runner_v2.testing.draft_heads.plain_layers import Weights

IDS = goldens.token_ids()
SIZES = goldens.SIZES
HIDDEN = goldens.hidden_states(SIZES["hidden_size"])


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_those_of_the_target(tmp_path: Path, kind: str) -> None:
    """transformers reads the target from the folder, and its logits are those of two layers of this kind."""
    folder = mtp.write_checkpoint(tmp_path, 1, kind=kind, **SIZES)
    model = load_target(folder)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    config, tensors = checkpoint.read(folder)
    layer, weights = KindLayer(config), Weights(tensors)
    rows = [tensors["model.embed_tokens.weight"][token] for token in IDS]
    for index in range(2):
        rows = layer.run(weights.below(f"model.layers.{index}."), rows, range(len(IDS)))
    logits = np.stack([tensors["lm_head.weight"] @ layer.norm(weights, "model.norm", x) for x in rows])
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits, expected, atol=3e-5)


def load_target(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3"])
def test_transformers_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """transformers has these modules too, and reads them from the same folder."""
    folder = mtp.write_checkpoint(tmp_path, 1, kind=kind, **SIZES)
    model = load_target(folder)
    # it knows modules by the numbers of published models
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2.*"])
    module = MtpModel.from_pretrained(model)
    with torch.no_grad():
        hidden = module.forward_layer(
            0, torch.from_numpy(HIDDEN)[None], torch.arange(6)[None], None, input_ids=torch.tensor([IDS])
        )
        logits = model.lm_head(hidden)[0].numpy()
    rows = mtp.reference_rows(folder, HIDDEN, IDS, zero_first=False)
    assert np.abs(logits).max() > 1
    np.testing.assert_allclose(rows.hidden_states, hidden[0].numpy(), atol=3e-5)
    np.testing.assert_allclose(rows.logits, logits, atol=3e-5)


@pytest.mark.parametrize("case", goldens.CASES["mtp"])
def test_speculators(golden: Callable[..., Any], case: str) -> None:
    """In speculators a later pass goes over all rows anew, at the positions of the first one: without the keys of the
    passes before. So each pass is compared by itself, fed with what the one before put out."""
    folder, expected = golden("mtp", case, mtp.write_checkpoint)
    assert np.abs(expected).max() > 1
    num_rows = expected.shape[1]
    hidden = HIDDEN[:num_rows]
    for step, logits in enumerate(expected):
        rows = mtp.reference_rows(folder, hidden, IDS[step + 1 : step + 1 + num_rows])
        np.testing.assert_allclose(rows.logits, logits, atol=1e-5)
        hidden = rows.hidden_states


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_is_a_row_behind_the_last(tmp_path: Path, kind: str) -> None:
    """Feeding drafts back is a pass over the target's rows, longer by the drafts' rows with handed-on hidden states."""
    folder = mtp.write_checkpoint(tmp_path, 1, kind=kind, **SIZES)
    looped = mtp.reference_rows(folder, HIDDEN[:4], IDS[:4], draft_ids=[9, 4])
    longer = np.concatenate([HIDDEN[:4], looped.hidden_states[3:5]])
    flat = mtp.reference_rows(folder, longer, [*IDS[:4], 9, 4])
    np.testing.assert_allclose(looped.logits, flat.logits, atol=1e-12)
    assert np.abs(looped.logits[4] - looped.logits[3]).max() > 1e-2


@pytest.mark.parametrize("kind", ["qwen3", "glm4_moe"])
def test_styles_hold_the_same_module(tmp_path: Path, kind: str) -> None:
    named = mtp.write_checkpoint(tmp_path / "mtp", 1, kind=kind, style="mtp", **SIZES)
    config, tensors = checkpoint.read(named)
    old, new = mtp.names_of("mtp", 2), mtp.names_of("layers", 2)
    renamed = dict(tensors)
    for name in [name for name in tensors if name.startswith("mtp.")]:
        for before, after in zip(old, new):
            if name.startswith(before):
                renamed[name.replace(before, after)] = renamed.pop(name)
    layered = checkpoint.write(tmp_path / "layers", config, renamed, dtype="float64")
    logits = mtp.reference_logits(named, HIDDEN, IDS, zero_first=True, draft_ids=[3])
    assert np.array_equal(mtp.reference_logits(layered, HIDDEN, IDS, draft_ids=[3]), logits)


def test_zero_at_position_0(tmp_path: Path) -> None:
    """Only there: a first row at position 1 keeps its token."""
    folder = mtp.write_checkpoint(tmp_path, 1, kind="glm4_moe", **SIZES)
    zero = mtp.reference_logits(folder, HIDDEN, IDS)
    assert np.array_equal(mtp.reference_logits(folder, HIDDEN, [50, *IDS[1:]]), zero)
    kept = mtp.reference_logits(folder, HIDDEN, IDS, zero_first=False)
    assert np.all(np.abs(kept - zero).max(axis=1) > 1e-4)
    later = mtp.reference_logits(folder, HIDDEN, IDS, range(1, 7))
    np.testing.assert_allclose(later, kept, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_of_the_module_is_used(tmp_path: Path, kind: str) -> None:
    """Whatever is turned, apart from experts that no token chose; copies of the ends are the target's."""
    folder = mtp.write_checkpoint(tmp_path / "whole", 1, kind=kind, **SIZES)
    logits = mtp.reference_logits(folder, HIDDEN, IDS, draft_ids=[3])
    config, tensors = checkpoint.read(folder)
    met = 0
    for name in tensors:
        turned = {**tensors, name: np.roll(tensors[name], 1, axis=0)}
        other = checkpoint.write(tmp_path / "other", config, turned, dtype="float64")
        moved = np.abs(mtp.reference_logits(other, HIDDEN, IDS, draft_ids=[3]) - logits).max() > 1e-9
        of_the_target = name.startswith(("model.layers.0.", "model.layers.1.", "model.norm"))
        copied = name.endswith(("shared_head.head.weight", "model.layers.2.embed_tokens.weight"))
        if ".experts." in name and not of_the_target:
            met += moved
        else:
            # the gate of the one shared expert is a single row
            assert moved == (not of_the_target and not copied) or turned[name].shape[0] == 1, name
    assert (met > 0) == ("experts" in " ".join(tensors))


def test_rows_see_only_what_lies_before(tmp_path: Path) -> None:
    folder = mtp.write_checkpoint(tmp_path, 1, kind="qwen3_5_text", **SIZES)
    logits = mtp.reference_logits(folder, HIDDEN, IDS)
    for row in range(6):
        changed = HIDDEN.copy()
        changed[row] *= -1
        moved = mtp.reference_logits(folder, changed, IDS)
        assert np.array_equal(moved[:row], logits[:row])
        assert np.all(np.abs(moved[row:] - logits[row:]).max(axis=1) > 1e-6)


def test_drafts_are_the_best_ids_fed_back(tmp_path: Path) -> None:
    folder = mtp.write_checkpoint(tmp_path, 1, **SIZES, tied=True)
    drafts = mtp.reference_drafts(folder, HIDDEN, IDS, 3)
    logits = mtp.reference_logits(folder, HIDDEN, IDS, draft_ids=drafts[:2])
    assert drafts == logits[-3:].argmax(axis=1).tolist()
