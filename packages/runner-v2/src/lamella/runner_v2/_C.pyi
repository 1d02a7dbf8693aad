"""The native module: kernels for CPUs. Tensors are taken as they lie in memory; results go into the tensors given."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

build_id: str
MAX_HEAD_DIM: int

_Part = tuple[torch.Tensor, int, int, int, torch.Tensor | None]

# threads and instruction sets
def set_num_threads(count: int) -> None: ...
def num_threads() -> int: ...
def isas() -> list[str]: ...
def isa() -> str: ...
def set_isa(name: str) -> None: ...

# packing
def format_code(name: str) -> int: ...
def packed_shape(format: str, rows: int, cols: int) -> tuple[int, int]: ...
def pack(format: str, rows: int, cols: int, data: torch.Tensor, panels: torch.Tensor) -> None: ...

# handles: they keep the tensors they are made of
class Plan:
    def __init__(
        self,
        positions: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor,
        window: int,
    ) -> None: ...
    @property
    def positions(self) -> torch.Tensor: ...

class Linear:
    def __init__(self, parts: Sequence[_Part]) -> None: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...

class Head:
    def __init__(self, part: _Part, norm: torch.Tensor | None, eps: float, softcap: float) -> None: ...
    @property
    def rows(self) -> int: ...

class Table:
    def __init__(self, part: _Part, scale: float) -> None: ...
    @property
    def cols(self) -> int: ...

class Experts:
    def __init__(self, parts: Sequence[_Part], activation: str) -> None: ...

class Layer:
    def __init__(
        self,
        *,
        hidden: int,
        eps: float,
        heads: tuple[int, int, int, float, float],
        activation: str,
        norms: Mapping[str, torch.Tensor],
        cos: torch.Tensor,
        sin: torch.Tensor,
        interleaved: bool,
        qkv: Sequence[_Part],
        o: Sequence[_Part],
        gate_up: Sequence[_Part],
        down: Sequence[_Part],
        router: Sequence[_Part],
        experts: Sequence[_Part],
        experts_per_token: int,
        norm_topk: bool,
    ) -> None: ...

class Attention:
    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, softcap: float) -> None: ...
    def write(
        self, k: torch.Tensor, v: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor, plan: Plan
    ) -> None: ...
    def run(
        self,
        q: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        plan: Plan,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None: ...

# ops
def decoder_layer(hidden: torch.Tensor, plan: Plan, cache: tuple[Any, ...], handle: Layer) -> torch.Tensor: ...
def linear(x: torch.Tensor, handle: Linear, out: torch.Tensor) -> None: ...
def logits(hidden: torch.Tensor, handle: Head, out: torch.Tensor) -> None: ...
def embed(ids: torch.Tensor, handle: Table, out: torch.Tensor) -> None: ...
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None: ...
def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None: ...
def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
) -> None: ...
def gated_activation(gate_up: torch.Tensor, kind: str, out: torch.Tensor) -> None: ...
def moe_route(logits: torch.Tensor, renormalise: bool, ids: torch.Tensor, weights: torch.Tensor) -> None: ...
def moe_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: Experts, out: torch.Tensor
) -> None: ...

# sampling
def sampling_greedy(logits: torch.Tensor, ids: torch.Tensor, status: torch.Tensor) -> None: ...
def sampling_choose(
    logits: torch.Tensor,
    temperature: npt.NDArray[np.float32],
    inverse_temperature: npt.NDArray[np.float32],
    log_min_p: npt.NDArray[np.float64],
    top_k: npt.NDArray[np.int32],
    top_p: npt.NDArray[np.float64],
    keys: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.int32],
    salt: int,
    ids: torch.Tensor,
    status: torch.Tensor,
) -> None: ...
def sampling_logprobs(
    logits: torch.Tensor,
    rows: npt.NDArray[np.int32],
    token_ids: torch.Tensor,
    k: int,
    chosen: torch.Tensor,
    ranks: torch.Tensor,
    best_ids: torch.Tensor,
    best: torch.Tensor,
) -> None: ...
def sampling_penalise(
    logits: torch.Tensor,
    logits_rows: npt.NDArray[np.int32],
    start: npt.NDArray[np.int64],
    token_ids: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int32],
    repetition: npt.NDArray[np.float32],
    frequency: npt.NDArray[np.float32],
    presence: npt.NDArray[np.float32],
) -> None: ...
def sampling_mask(logits: torch.Tensor, rows: npt.NDArray[np.int32], words: npt.NDArray[np.int32]) -> None: ...
