"""Which family serves which checkpoint. Family files are imported when they are first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lamella.runner_v2.errors import UnsupportedError
from lamella.runner_v2.models.family import Family
from lamella.runner_v2.models.fields import Fields

_PACKAGE = "lamella.runner_v2.models"

# architecture -> (module, declaration in it)
ARCHITECTURES: dict[str, tuple[str, str]] = {
    "LlamaForCausalLM": ("llama", "LLAMA"),
    "MistralForCausalLM": ("llama", "MISTRAL"),
    "Qwen2ForCausalLM": ("qwen2", "QWEN2"),
    "Qwen3ForCausalLM": ("qwen3", "QWEN3"),
    "Qwen3MoeForCausalLM": ("qwen3", "QWEN3_MOE"),
    "Gemma3ForCausalLM": ("gemma3", "GEMMA3_TEXT"),
    "Gemma3ForConditionalGeneration": ("gemma3", "GEMMA3"),
}

# for a config.json without architectures
MODEL_TYPES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
}


def family_of(fields: Fields) -> Family:
    """The family of a config.json. UnsupportedError naming architecture and the supported ones."""
    architectures = fields.texts("architectures") or ()
    if not architectures:
        return _declared(fields.choice("model_type", MODEL_TYPES))
    for architecture in architectures:
        if architecture in ARCHITECTURES:
            return _declared(architecture)
    raise UnsupportedError(
        f"{fields.source}: architecture {', '.join(architectures)} is not supported; supported: "
        + ", ".join(ARCHITECTURES)
    )


def _declared(architecture: str) -> Family:
    module, name = ARCHITECTURES[architecture]
    family: Any = getattr(import_module(f"{_PACKAGE}.{module}"), name)
    assert isinstance(family, Family)
    return family
