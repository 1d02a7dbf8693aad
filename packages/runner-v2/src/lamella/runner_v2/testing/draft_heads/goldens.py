"""What `speculators` computes on these checkpoints: which cases there are, and the files that keep the results.

    CASES ──► tools/draft_goldens.py (environment `oracle`: speculators, another transformers) ──► <head>.safetensors
      └─────► the tests: the same checkpoint again from its seed, reference ──► compared with what the file holds

A file remembers the digest of each checkpoint, so that a changed writer is told from a wrong reference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from lamella.runner_v2.testing.draft_heads.checkpoint import Array, random_array

SEED = 7
NUM_ROWS = 6
"""Positions of the sequence on which heads are compared."""
NUM_STEPS = 3
"""Passes of heads that are fed back on themselves."""
SIZES: dict[str, Any] = {"hidden_size": 32, "vocab_size": 64}
REDUCED: dict[str, Any] = {**SIZES, "draft_vocab_size": 24}

CASES: dict[str, dict[str, dict[str, Any]]] = {
    "eagle3": {
        "plain": REDUCED,
        "norm_before_residual": {**REDUCED, "norm_before_residual": True},
        "norm_before_fc": {**REDUCED, "norm_before_fc": True},
        "fc_norm_and_norm_output": {**REDUCED, "fc_norm": True, "norm_output": True},
        "two_qwen3_layers": {**REDUCED, "layer": "qwen3", "num_layers": 2, "norm_before_residual": True},
        "whole_vocabulary_with_bias": {**SIZES, "draft_vocab_size": None, "attention_bias": True},
        "shared_ends": {**REDUCED, "own_embedding": False, "own_output": False},
        "two_aux_layers": {**REDUCED, "aux_layer_ids": (1, 4)},
        "authors": {**REDUCED, "style": "authors", "binary": True},
    },
    "dflash": {
        "plain": SIZES,
        "reduced_vocabulary_with_bias": {**REDUCED, "attention_bias": True, "target_layer_ids": (0, 2, 5)},
        "sliding_layer": {**SIZES, "num_layers": 3, "sliding_layers": (1,)},
        "sliding_layers_non_causal": {**SIZES, "sliding_layers": (0, 1), "causal": False},
        "from_anchor": {**SIZES, "sample_from_anchor": True},
        "authors": {**SIZES, "style": "authors"},
    },
    "dspark": {
        "vanilla": SIZES,
        "gated": {**SIZES, "markov_head_type": "gated"},
        "rnn": {**SIZES, "markov_head_type": "rnn"},
        "rnn_not_from_anchor": {**SIZES, "markov_head_type": "rnn", "sample_from_anchor": False},
        "reduced_vocabulary": {**REDUCED, "sample_from_anchor": False},
        "confidence_without_markov": {**SIZES, "confidence_with_markov": False},
    },
    "dflash2": {
        "plain": SIZES,
        "three_taps": {**SIZES, "conv_kernel_size": 3, "conv_group_size": 8},
        "sliding_layer": {**SIZES, "sliding_layers": (0,)},
        "from_anchor": {**SIZES, "sample_from_anchor": True},
    },
    "mtp": {kind: {**SIZES, "kind": kind} for kind in ("qwen3", "qwen3_next", "qwen3_5_text")},
}
"""head -> case -> variant of its write_checkpoint, all with SEED."""


class Golden(NamedTuple):
    """One head's results."""

    results: dict[str, Array]
    """case -> what speculators computed; the shape is the head's."""
    digests: dict[str, str]
    """case -> `checkpoint.digest` of the folder that it was computed on."""
    versions: dict[str, str]
    """Package -> version that computed it."""


def hidden_states(width: int) -> Array:  # [NUM_ROWS, width]
    """The target's hidden states on which heads are compared."""
    return random_array(SEED, f"hidden states {width}", [NUM_ROWS, width])


def token_ids() -> list[int]:
    """[NUM_ROWS], the token behind each of them."""
    return [3, 60, 17, 17, 0, 41]


BLOCK_IDS = [3, 60, 17, 17, 0, 41, 22, 9, 33, 5, 50, 12]
"""The sequence on which block drafters are compared."""
ANCHORS = (3, 7)
"""Places in it at which blocks start; the hidden states before them are their context."""


def block_hidden_states(width: int) -> Array:  # [len(BLOCK_IDS), width]
    """The target's hidden states of that sequence."""
    return random_array(SEED, f"block hidden states {width}", [len(BLOCK_IDS), width])


def save(path: Path, golden: Golden) -> None:
    """Write one head's results, in float32."""
    about = {"digests": json.dumps(golden.digests), "versions": json.dumps(golden.versions)}
    save_file({case: result.astype(np.float32) for case, result in golden.results.items()}, path, metadata=about)


def load(path: Path) -> Golden:
    """Read what `save` wrote."""
    with safe_open(path, framework="np") as file:
        about = file.metadata()
        results = {case: np.asarray(file.get_tensor(case), dtype=np.float64) for case in json.loads(about["digests"])}
    return Golden(results, json.loads(about["digests"]), json.loads(about["versions"]))
