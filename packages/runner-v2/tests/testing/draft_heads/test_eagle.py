"""The reference of EAGLE, which speculators does not have: held to transformers' Llama without the norms that EAGLE has
not, and fed back by hand."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from lamella.runner_v2.testing.draft_heads import checkpoint, eagle, goldens
from lamella.runner_v2.testing.draft_heads.checkpoint import Array
from lamella.runner_v2.testing.draft_heads.target import Ends

IDS = goldens.token_ids()
HIDDEN = goldens.hidden_states(goldens.SIZES["hidden_size"])


def transformers_outputs(folder: Path, ends: Ends, hidden: Array, ids: list[int]) -> Array:
    """[num_rows, hidden_size]: Llama's layers over fc's outputs."""
    fields, tensors = checkpoint.read(folder)
    config = transformers.LlamaConfig(**{name: value for name, value in fields.items() if name != "architectures"})
    model = transformers.LlamaModel(config).double()
    layers = {name: torch.from_numpy(value) for name, value in tensors.items() if name.startswith("layers.")}
    missing, unexpected = model.load_state_dict(layers, strict=False)
    assert set(missing) == {"embed_tokens.weight", "norm.weight", "layers.0.input_layernorm.weight"}
    assert not unexpected
    model.norm = model.layers[0].input_layernorm = torch.nn.Identity()
    embedding = tensors.get("embed_tokens.weight", ends.embedding)
    entered = np.concatenate([embedding[ids], hidden], axis=1) @ tensors["fc.weight"].T + tensors.get("fc.bias", 0.0)
    with torch.no_grad():
        return np.asarray(model(inputs_embeds=torch.from_numpy(entered)[None]).last_hidden_state[0].numpy())


@pytest.mark.parametrize(("num_layers", "fc_bias", "own_embedding"), [(1, False, True), (2, True, False)])
def test_transformers(tmp_path: Path, ends: Ends, num_layers: int, fc_bias: bool, own_embedding: bool) -> None:
    folder = eagle.write_checkpoint(
        tmp_path, 1, num_layers=num_layers, fc_bias=fc_bias, own_embedding=own_embedding, **goldens.SIZES
    )
    logits = eagle.reference_logits(folder, HIDDEN, IDS, draft_ids=[9, 30], target=ends)
    hidden, ids = HIDDEN, list(IDS)
    for draft in (9, 30):
        outputs = transformers_outputs(folder, ends, hidden, ids)
        np.testing.assert_allclose(logits[: len(ids)], outputs @ ends.output.T, atol=1e-4)
        hidden, ids = np.concatenate([hidden, outputs[-1:]]), [*ids, draft]
    last = transformers_outputs(folder, ends, hidden, ids)[-1]
    assert np.abs(logits[-1]).max() > 1
    np.testing.assert_allclose(logits[-1], ends.output @ last, atol=1e-4)


def test_rows_see_only_what_lies_before(tmp_path: Path, ends: Ends) -> None:
    folder = eagle.write_checkpoint(tmp_path, 1, **goldens.SIZES)
    logits = eagle.reference_logits(folder, HIDDEN, IDS, target=ends)
    for row in range(6):
        changed = HIDDEN.copy()
        changed[row] += 1
        moved = eagle.reference_logits(folder, changed, IDS, target=ends)
        assert np.array_equal(moved[:row], logits[:row])
        assert np.all(np.abs(moved[row:] - logits[row:]).max(axis=1) > 1e-6)


def test_every_tensor_is_used(tmp_path: Path, ends: Ends) -> None:
    folder = eagle.write_checkpoint(tmp_path / "whole", 1, num_layers=2, fc_bias=True, **goldens.SIZES)
    logits = eagle.reference_logits(folder, HIDDEN, IDS, target=ends)
    config, tensors = checkpoint.read(folder)
    assert "layers.1.input_layernorm.weight" in tensors
    for name in tensors:
        turned = {**tensors, name: np.roll(tensors[name], 1, axis=0)}
        other = checkpoint.write(tmp_path / "other", config, turned, dtype="float64")
        assert np.abs(eagle.reference_logits(other, HIDDEN, IDS, target=ends) - logits).max() > 1e-7, name


def test_drafts_are_the_best_ids_fed_back(tmp_path: Path, ends: Ends) -> None:
    folder = eagle.write_checkpoint(tmp_path / "head", 1, binary=True, **goldens.SIZES)
    assert {path.name for path in folder.iterdir()} == {"config.json", "pytorch_model.bin"}
    drafts = eagle.reference_drafts(folder, HIDDEN, IDS, 3, target=ends)
    logits = eagle.reference_logits(folder, HIDDEN, IDS, draft_ids=drafts[:2], target=ends)
    assert drafts == logits[-3:].argmax(axis=1).tolist()
