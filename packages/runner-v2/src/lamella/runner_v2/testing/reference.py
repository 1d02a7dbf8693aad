"""The reference: transformers' Llama on the dequantised weights of a GGUF file.

Reads the file with the gguf library and nothing of ours, so that a mistake of our loader cannot hide in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_reference(path: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """The model of a GGUF file of architecture llama, every weight dequantised exactly, then cast."""
    reader = gguf.GGUFReader(str(path))

    def field(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    heads, kv_heads = int(field("attention.head_count")), int(field("attention.head_count_kv"))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = LlamaConfig(
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=int(field("embedding_length")),
        intermediate_size=int(field("feed_forward_length")),
        num_hidden_layers=int(field("block_count")),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=int(field("context_length")),
        rms_norm_eps=float(field("attention.layer_norm_rms_epsilon")),
        rope_parameters={"rope_type": "default", "rope_theta": float(field("rope.freq_base"))},
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    state = {}
    for name, tensor in tensors.items():
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if name in _NAMES:
            state[_NAMES[name]] = weight
            continue
        _, layer, kind, _ = name.split(".")
        if kind in ("attn_q", "attn_k"):
            count = heads if kind == "attn_q" else kv_heads
            # rows of a head are stored as pairs (2i, 2i + 1); transformers rotates (i, i + half)
            rows, columns = weight.shape
            weight = weight.reshape(count, rows // count // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        state[f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight"] = weight
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tensors_by_name = {name: torch.from_numpy(np.ascontiguousarray(weight)).to(dtype) for name, weight in state.items()}
    if config.tie_word_embeddings:
        tensors_by_name["lm_head.weight"] = tensors_by_name["model.embed_tokens.weight"]
    model.load_state_dict(tensors_by_name, assign=True, strict=True)
    model.tie_weights()
    # buffers made on the meta device
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()
