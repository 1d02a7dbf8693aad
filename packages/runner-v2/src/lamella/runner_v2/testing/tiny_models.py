"""Random tiny checkpoints of every family, in the real file formats.

    config.json dict --> random float32 weights --> folder (safetensors, sharded or not) | GGUF (see tiny_gguf)

A TinyModel also keeps the weights as float32 under the names of transformers, dequantised where the file is quantised,
so that a test can build the reference from them.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from lamella.runner_v2.config import ModelConfig
from lamella.runner_v2.models.fields import Fields
from lamella.runner_v2.models.registry import family_of
from lamella.runner_v2.testing.tiny_tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, write_tokenizer
from lamella.runner_v2.weights.rules import parts_of

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}

TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {
        **_COMMON,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "head_dim": 32,
        "sliding_window": 16,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    },
    "qwen2": {
        **_COMMON,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "qwen3": {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 32,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen3_moe": {
        **_COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 1,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "gemma3_text": {
        **_COMMON,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
}

# Widths at which blocks of 256 weights can be cut for four ranks.
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
}


class TinyModel(NamedTuple):
    """A checkpoint that was written, and what is in it."""

    path: Path
    config: dict[str, Any]
    """As config.json says it."""
    state: dict[str, torch.Tensor]
    """Float32, under the names of transformers' files; exactly the values that the file stands for."""

    def reference(self) -> Any:
        """transformers' model in float32 with these weights (eager attention)."""
        import transformers  # a test dependency

        config = transformers.AutoConfig.for_model(**_without(self.config, "architectures"))
        with torch.device("meta"):
            blank = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model = type(blank).from_pretrained(
            None, config=config, state_dict=dict(self.state), dtype=torch.float32, attn_implementation="eager"
        )
        return model.eval()


def tiny_config(family: str, **overrides: Any) -> dict[str, Any]:
    """The config.json of a tiny model; overrides replace fields of it."""
    return {**TINY_CONFIGS[family], **overrides}


def write_folder(
    folder: str | Path,
    family: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    num_shards: int = 1,
    tokenizer: bool = True,
    **overrides: Any,
) -> TinyModel:
    """A checkpoint folder without the help of transformers: config.json, generation_config.json, safetensors (with an
    index if there are several shards) and a tokenizer. dtype is that of all tensors."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, **overrides)
    stored = {name: t.to(getattr(torch, dtype)) for name, t in random_weights(config, seed).items()}
    _write_json(folder / "config.json", {**config, "dtype": dtype})
    ends = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    _write_json(folder / "generation_config.json", ends)
    _write_shards(folder, stored, num_shards)
    if tokenizer:
        write_tokenizer(folder)
    return TinyModel(folder, {**config, "dtype": dtype}, {name: t.float() for name, t in stored.items()})


def save_with_transformers(
    folder: str | Path, family: str, *, seed: int = 0, dtype: str = "float32", **overrides: Any
) -> TinyModel:
    """The same weights, written by transformers' own save_pretrained."""
    config = tiny_config(family, **overrides)
    state = random_weights(config, seed)
    model = TinyModel(Path(folder), config, state).reference().to(getattr(torch, dtype))
    model.save_pretrained(folder)
    return TinyModel(Path(folder), config, {name: t.to(getattr(torch, dtype)).float() for name, t in state.items()})


def model_config(config: dict[str, Any]) -> ModelConfig:
    """What the loader makes of a config.json."""
    fields = Fields(config, "config.json")
    return family_of(fields).parse(fields)


def names_of(config: dict[str, Any]) -> dict[str, str]:
    """Canonical key -> name in a folder, for every weight of the model."""
    fields = Fields(config, "config.json")
    family = family_of(fields)
    naming = family.naming(())
    sources = {key: naming.source(key) for key in parts_of(family.parse(fields))}
    return {key: source.name for key, source in sources.items() if source is not None}


def random_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Float32 weights under the names of a folder. Vectors are random too: ones and zeros would hide mistakes."""
    model, names = model_config(config), names_of(config)
    weights = {}
    for key, part in parts_of(model).items():
        generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(key.encode()))
        noise = torch.randn(part.shape, generator=generator)
        if key.endswith("_bias"):
            weights[names[key]] = noise * 0.1
        elif len(part.shape) == 1:
            # on a grid, so that adding one (as GGUF does for Gemma) is exact
            factor = (noise * 0.2 * 1024).round() / 1024
            weights[names[key]] = factor if model.norm_plus_one else 1 + factor
        else:
            weights[names[key]] = noise * 0.15
    return weights


def _write_shards(folder: Path, tensors: dict[str, torch.Tensor], num_shards: int) -> None:
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    per_shard = math.ceil(len(names) / num_shards)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        held = names[shard * per_shard : (shard + 1) * per_shard]
        save_file({name: tensors[name] for name in held}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(held, file))
    total = sum(t.nbytes for t in tensors.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2))


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}
