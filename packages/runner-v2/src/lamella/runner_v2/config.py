"""Frozen descriptions of a model and of how to run it. Parsed once, read by everybody, changed by nobody."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "gelu"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of a set of layers. See transformers' modeling_rope_utils for the types."""

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "yarn", "dynamic", "longrope"] = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    rotary_dim: int | None = None
    """Leading dimensions that rotate; None: the whole head."""
    interleaved: bool = False
    """Pairs (2i, 2i + 1) instead of (i, i + d/2)."""
    freq_factors: tuple[float, ...] | None = None
    """Divisors of the inverse frequencies, one per rotated pair, after `kind` has had its effect (GGUF files of Llama 3
    carry the llama3 scaling in this form)."""


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Routed experts: softmax over all experts in float32, top-k, renormalised where norm_topk is set."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    norm_topk: bool = True


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One decoder layer."""

    window: int | None = None
    """Sliding window in tokens, the query's own included; None: full attention."""
    rope_idx: int = 0
    """Index into ModelConfig.ropes."""
    moe: MoeConfig | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only language model, independent of the file format it came from. Widths are those of the whole
    model, not of one rank."""

    family: str
    """Registry name: llama, mistral, qwen2, qwen3, qwen3_moe, gemma3_text."""
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    layers: tuple[LayerConfig, ...]
    ropes: tuple[RopeConfig, ...]
    max_position: int
    norm_eps: float
    attention_scale: float
    activation: Activation = "silu"
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over head_dim of each q and k head, before the rotation."""
    norm_plus_one: bool = False
    """Norm weights are stored zero-centred: the factor is 1 + w (false for GGUF files, which hold the sum)."""
    sandwich_norms: bool = False
    """Norms also behind attention and behind the MLP, before the residual is added (Gemma)."""
    embed_scale: float | None = None
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    dtype: str = "bfloat16"
    """Type in which the checkpoint stores its dense weights."""
    generation: dict[str, object] = field(default_factory=dict)
    """Sampling defaults from generation_config.json: temperature, top_p, top_k, min_p, repetition_penalty, do_sample,
    max_new_tokens. End ids are the business of who has the tokenizer."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """A network that drafts."""

    method: str
    """draft_model: a language model with the tokenizer of the model it drafts for."""
    model_path: str
    """A checkpoint folder or a .gguf file."""


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """How a rank runs a model. Resolved: no field means "decide later"."""

    model_path: str
    """A checkpoint folder or a .gguf file."""
    device: str = "cpu"
    dtype: str = "auto"
    """On a CPU: auto keeps quantised weights quantised and the fastest provider serves; float32, bfloat16, float16:
    dense weights of that type with the reference ops. On a device it is the type of activations and weights: auto is
    the model's own if it has 16 bits, else bfloat16; float32 means the reference ops."""
    kv_dtype: str = "auto"
    providers: tuple[str, ...] | None = None
    """Names in order of preference; None: every available one, fastest first. ("torch",) gives the reference ops."""
    num_threads: int | None = None
    block_size: int = 16
    max_num_rows: int = 64
    max_num_tokens: int = 2048
    """Most tokens of one step."""
    max_model_len: int = 8192
    max_num_drafts: int = 0
    """Most drafts of a row in one step."""
    draft: DraftConfig | None = None
    """A network that drafts; its speculator says so in its needs."""
    tp_rank: int = 0
    tp_size: int = 1
    dummy_weights: bool = False
    progress: bool = False
    graph_rows: tuple[int, ...] = ()
    """Numbers of decoding rows whose steps are recorded as graphs at start, smaller batches being padded to the next of
    them; empty: no graphs. For devices."""
    batch_invariant: bool = False
    """Reference ops give each row the same bits whatever else is in the batch (slower)."""
