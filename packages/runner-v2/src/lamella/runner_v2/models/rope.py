"""Reads rotary embeddings out of a config.json, in every spelling that has been in use:

rope_theta + rope_scaling {type | rope_type, factor, ...}       one for all layers
rope_parameters {rope_type, rope_theta, ...}                    one for all layers
rope_parameters {full_attention: {...}, sliding_attention: {...}}   one per layer type
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from lamella.runner_v2.config import RopeConfig
from lamella.runner_v2.errors import CheckpointError
from lamella.runner_v2.models.fields import MAX_INTEGER, Fields

Kind = Literal["default", "linear", "llama3", "yarn", "dynamic", "longrope"]

LAYER_TYPES = ("full_attention", "sliding_attention")
_KINDS: dict[str, Kind] = {
    "default": "default",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
    "dynamic": "dynamic",
    "longrope": "longrope",
    "su": "longrope",
}


def rope_of(
    fields: Fields,
    head_dim: int,
    layer_type: str = "full_attention",
    theta: float = 10000.0,
    *,
    partial: bool = False,
) -> RopeConfig:
    """The rotary embedding of the layers of one type; theta is the family's default. partial: of a family that may
    rotate a part of each head only.

    UnsupportedError for an unknown type or a part of the heads where the family knows none, CheckpointError for a
    missing or senseless parameter.
    """
    section = fields.section("rope_scaling") or fields.section("rope_parameters") or Fields({}, fields.source)
    if any(name in section.values for name in LAYER_TYPES):
        section = section.section(layer_type) or Fields({}, section.source)
    kind = section.choice("rope_type" if section.has("rope_type") else "type", _KINDS, "default")
    rotary = section.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if rotary != 1.0 and not partial:
        where = section if section.has("partial_rotary_factor") else fields
        # other readers of such a file rotate whole heads and say nothing: whoever made it meant one of the two
        raise where.unsupported("partial_rotary_factor", "this family rotates whole heads: take it out or make it 1")
    rotary_dim = int(head_dim * rotary)
    theta = section.number("rope_theta", fields.number("rope_theta", theta))
    if theta <= 0 or rotary_dim < 2 or rotary_dim % 2:
        raise section.wrong("rope_theta" if theta <= 0 else "partial_rotary_factor", "this cannot rotate")
    part = rotary_dim if rotary_dim != head_dim else None
    if kind == "default":
        return RopeConfig(theta=theta, rotary_dim=part)
    max_position = fields.integer("max_position_embeddings")
    original = section.integer(
        "original_max_position_embeddings", fields.integer("original_max_position_embeddings", max_position)
    )
    may_lack_factor = kind in ("yarn", "longrope")
    factor = section.positive("factor", max_position / original if may_lack_factor else None)
    rope = RopeConfig(theta=theta, kind=kind, factor=factor, rotary_dim=part)
    if kind == "linear":
        return rope
    return _scaled(section, replace(rope, original_max_position=original), rotary_dim // 2)


def stretched(stated: int, rope: RopeConfig, source: str) -> int:
    """The longest context. YaRN extends the pretrained length, and files differ in which of the two they state.

    CheckpointError naming the source if the factor leads nowhere.
    """
    if rope.kind != "yarn" or rope.original_max_position is None:
        return stated
    length = rope.original_max_position * rope.factor
    if length > MAX_INTEGER:
        raise CheckpointError(
            f"{source}: a context of {rope.original_max_position} positions stretched by {rope.factor} is no context"
        )
    return max(stated, int(length))


def _scaled(section: Fields, rope: RopeConfig, num_pairs: int) -> RopeConfig:
    if rope.kind == "dynamic":
        return rope
    if rope.kind == "llama3":
        low, high = section.positive("low_freq_factor"), section.positive("high_freq_factor")
        if low >= high:
            raise section.wrong("low_freq_factor", f"needed: less than high_freq_factor ({high})")
        return replace(rope, low_freq_factor=low, high_freq_factor=high)
    rope = replace(rope, attention_factor=section.optional_number("attention_factor"))
    if rope.kind == "yarn":
        return replace(
            rope,
            beta_fast=section.positive("beta_fast", 32.0),
            beta_slow=section.positive("beta_slow", 1.0),
            mscale=section.optional_number("mscale"),
            mscale_all_dim=section.optional_number("mscale_all_dim"),
            truncate=section.boolean("truncate", True),
        )
    short, long = section.numbers("short_factor"), section.numbers("long_factor")
    for name, factors in (("short_factor", short), ("long_factor", long)):
        if factors is None or len(factors) != num_pairs:
            raise section.wrong(name, f"needed: a list of {num_pairs} numbers, one per rotated pair")
    return replace(rope, short_factor=short, long_factor=long)
