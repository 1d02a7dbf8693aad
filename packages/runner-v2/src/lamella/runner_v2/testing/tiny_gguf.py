"""Tiny GGUF files of every family, written with the gguf library as converters write them.

float32 weight --quantize (K-quants: random blocks)--> rows --permute q, k of llama--> file
                                                        +--dequantize--> TinyModel.state
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import quants

from lamella.runner_v2.quant.gguf_blocks import ggml_types, random_blocks
from lamella.runner_v2.quant.scheme import FORMATS
from lamella.runner_v2.testing.tiny_models import TinyModel, random_weights, tiny_config
from lamella.runner_v2.testing.tiny_tokenizer import BOS_ID, CHAT_TEMPLATE, EOS_ID, PAD_ID, SPECIAL, vocabulary

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)\.weight")
_ROUTER = ".mlp.gate.weight"
_STD = 0.15


def write_gguf(
    path: str | Path,
    family: str,
    *,
    seed: int = 0,
    formats: str | Mapping[str, str] = "float32",
    tokenizer: bool = True,
    **overrides: Any,
) -> TinyModel:
    """A GGUF file. formats names the format of all matrices, or maps "q", "down", "embed", "lm_head" ... to theirs
    and "*" to that of the others; vectors and routers are float32. Blocks of 256 need tiny_models.WIDE as overrides.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if family == "qwen3_moe":
        overrides = {"mlp_only_layers": [], **overrides}  # the architecture has no dense layers
    config = tiny_config(family, **overrides)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[family]])
    _add_metadata(writer, config, family)
    if tokenizer:
        _add_tokenizer(writer)
    if config.get("rope_parameters", {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))
    state = _add_weights(writer, config, family, seed, {"*": formats} if isinstance(formats, str) else formats)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return TinyModel(path, config, state)


def permuted(rows: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Rows of q or k in rotate-half order -> interleaved order, as in files of architecture llama."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def llama3_factors(config: dict[str, Any]) -> npt.NDArray[np.float32]:
    """The divisors of the inverse frequencies into which converters turn the llama3 scaling."""
    rope, head_dim = config["rope_parameters"], config["head_dim"]
    low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for idx in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (idx / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def _add_weights(
    writer: gguf.GGUFWriter, config: dict[str, Any], family: str, seed: int, formats: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """Returns the weights as the file holds them, under the names of transformers."""
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], config["num_hidden_layers"])
    num_heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    state: dict[str, torch.Tensor] = {}
    stacks: dict[str, list[npt.NDArray[Any]]] = {}
    for name, weight in random_weights(config, seed).items():
        field = _field(name)
        format = "float32" if weight.ndim == 1 or name.endswith(_ROUTER) else formats.get(field, formats.get("*", ""))
        rows, state[name] = _stored(weight, format, zlib.crc32(name.encode()) + seed)
        if family in ("llama", "mistral") and field in num_heads:
            rows = permuted(rows, num_heads[field])
        if family == "gemma3_text" and weight.ndim == 1:
            rows = rows + 1
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            name = f"{expert[1]}.{expert[3]}.weight"
            stack = stacks.setdefault(name, [])
            stack.append(rows)
            if len(stack) < config["num_experts"]:
                continue
            rows = np.stack(stack)
        file_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert file_name is not None, name
        writer.add_tensor(file_name, rows, raw_dtype=ggml_types()[format])
    return state


def _field(name: str) -> str:
    """Canonical short name of a matrix: embed, lm_head, q, k, v, o, gate, up, down."""
    return {"embed_tokens": "embed"}.get(stem := name.split(".")[-2], stem.removesuffix("_proj"))


def _stored(weight: torch.Tensor, format: str, seed: int) -> tuple[npt.NDArray[Any], torch.Tensor]:
    """Rows as the file holds them, and the float32 weights they stand for."""
    kind, values = FORMATS[format], weight.numpy()
    if kind.block_len == 256:
        # the library cannot make K-quants: random blocks instead of the given weights
        num_blocks = values.size // kind.block_len
        blocks = random_blocks(kind, num_blocks, _STD, np.random.default_rng(seed))
        rows = blocks.reshape(values.shape[0], -1)
    else:
        rows = quants.quantize(values, ggml_types()[format])
    return rows, torch.from_numpy(np.array(quants.dequantize(rows, ggml_types()[format]))).reshape(weight.shape)


def _add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any], family: str) -> None:
    writer.add_name(f"tiny {family}")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if family == "qwen3_moe":
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if family == "gemma3_text":
        pattern = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_array("gemma3.attention.sliding_window_pattern", pattern)
        writer.add_attention_scale(config["query_pre_attn_scalar"] ** -0.5)
        local = config["rope_parameters"]["sliding_attention"]["rope_theta"]
        writer.add_float32("gemma3.rope.freq_base_swa", local)
    rope = config.get("rope_parameters", {"rope_theta": config.get("rope_theta")})
    _add_rope(writer, rope.get("full_attention", rope))


def _add_rope(writer: gguf.GGUFWriter, rope: dict[str, Any]) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope.get("rope_type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR if kind == "linear" else gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokens, merges = vocabulary()
    kinds = [gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{left} {right}" for left, right in merges])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_pad_token_id(PAD_ID)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
