"""The layers that references are made of, against transformers' models with the same weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from lamella.runner_v2.testing.draft_heads.checkpoint import random_array
from lamella.runner_v2.testing.draft_heads.layer_format import layer_config, layer_shapes
from lamella.runner_v2.testing.draft_heads.plain_layers import (
    LayerShape,
    Weights,
    attend,
    decoder_layer,
    rms_norm,
    rotate,
)
from lamella.runner_v2.testing.tiny_models import write_folder

IDS = [5, 300, 17, 17, 0, 41, 8]
# what transformers keeps in float32 (norms, rotation) rounds to this
ROUNDING = 3e-5


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
        ("qwen2", {}),
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    ],
)
def test_model_of_plain_layers(tmp_path: Path, family: str, fields: dict[str, Any]) -> None:
    """Embedding, three layers, norm and output, built of the parts, put out the logits of transformers' model."""
    tiny = write_folder(tmp_path, family, tokenizer=False, **fields)
    with torch.no_grad():
        expected = tiny.reference().double()(torch.tensor([IDS])).logits[0].numpy()
    config, weights = tiny.config, Weights({name: t.double().numpy() for name, t in tiny.state.items()}, "model.")
    shape = LayerShape.of(config)
    rows = [weights["embed_tokens.weight"][token] for token in IDS]
    for index in range(config["num_hidden_layers"]):
        rows = decoder_layer(weights.below(f"layers.{index}."), shape, rows, range(len(IDS)))
    matrix = weights["embed_tokens.weight"] if config["tie_word_embeddings"] else weights.tensors["lm_head.weight"]
    logits = np.stack([matrix @ rms_norm(x, weights["norm.weight"], shape.eps) for x in rows])
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits, expected, atol=ROUNDING)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_layer_shapes_are_those_of_transformers(kind: str, bias: bool) -> None:
    fields = layer_config(kind, num_layers=1, hidden_size=32, vocab_size=8, attention_bias=bias)
    config = transformers.AutoConfig.for_model(**{k: v for k, v in fields.items() if k != "architectures"})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items() if ".layers.0." in name}
    assert shapes == layer_shapes("model.layers.0.", fields)


def test_rotation_by_hand() -> None:
    """A head of four numbers at position 2, base 100: pairs (0, 2) by 2 and (1, 3) by 0.2."""
    turned = rotate(np.array([[1.0, 2.0, 3.0, 4.0]]), 2, 100.0)[0]
    assert np.allclose(turned[0], np.cos(2) - 3 * np.sin(2))
    assert np.allclose(turned[1], 2 * np.cos(0.2) - 4 * np.sin(0.2))
    assert np.allclose(turned[2], 3 * np.cos(2) + np.sin(2))
    assert np.allclose(turned[3], 4 * np.cos(0.2) + 2 * np.sin(0.2))


def test_partial_rotation_leaves_the_rest() -> None:
    heads = random_array(0, "heads", [2, 8])
    turned = rotate(heads, 3, 100.0, 4)
    assert np.array_equal(turned[:, 4:], heads[:, 4:])
    assert np.allclose(turned[:, :4], rotate(heads[:, :4], 3, 100.0))


def test_attention_by_hand() -> None:
    """Two query heads on one key head of width one: weights e^(q k)."""
    queries = np.array([[1.0], [0.0]])
    seen = [(np.array([[0.0]]), np.array([[10.0]])), (np.array([[np.log(3.0)]]), np.array([[20.0]]))]
    assert np.allclose(attend(queries, seen), [10 * 0.25 + 20 * 0.75, 15.0])
