"""The tiny checkpoints themselves: transformers loads the same model from every form of them."""

from pathlib import Path

import pytest
import torch
import transformers

from lamella.runner_v2.testing.tiny_gguf import permuted, write_gguf
from lamella.runner_v2.testing.tiny_models import TINY_CONFIGS, write_folder
from lamella.runner_v2.testing.tiny_tokenizer import EOS_ID, VOCAB_SIZE, vocabulary
from lamella.runner_v2.weights.gguf import rotate_half_rows

IDS = torch.arange(40)[None] * 7 % VOCAB_SIZE


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_reference_is_what_transformers_loads(family: str, tmp_path: Path) -> None:
    model = write_folder(tmp_path, family, num_shards=2)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = loaded(IDS).logits
        assert torch.equal(model.reference()(IDS).logits, expected)
    assert expected.abs().max() > 1


def test_quantised_state_is_near_the_weights_it_was_made_of(tmp_path: Path) -> None:
    dense = write_gguf(tmp_path / "a.gguf", "qwen3").state
    blocks = write_gguf(tmp_path / "b.gguf", "qwen3", formats="q8_0").state
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(dense[name], blocks[name])
    assert torch.allclose(dense[name], blocks[name], atol=0.005)


def test_permutation_and_its_inverse() -> None:
    rows = torch.arange(24).reshape(24, 1)  # two heads of 12
    stored = torch.from_numpy(permuted(rows.numpy(), 2))
    assert stored[:6, 0].tolist() == [0, 6, 1, 7, 2, 8]
    assert torch.equal(rotate_half_rows(stored, 12), rows)


def test_tokenizer(tmp_path: Path) -> None:
    write_folder(tmp_path, "llama")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokens, merges = vocabulary()
    assert len(tokenizer) == len(tokens) == len(set(tokens)) == VOCAB_SIZE
    assert all(left + right in tokens for left, right in merges)
    text = "the user said: héllo 😀\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert EOS_ID in tokenizer.encode(prompt)
