"""CUDA kernels for LLM inference: torch tensors of any origin in and out, on torch's current stream.

The package imports on any machine. A kernel that cannot run (no device, no driver, no code for the device) says so when
it is called; available() tells before.
"""

from lamella.kernels_cuda.activation import (
    gated_activation,
    quant_fp8_per_group,
    quant_fp8_per_token,
    silu_mul,
    silu_mul_fp8_per_group,
    silu_mul_fp8_per_token,
)
from lamella.kernels_cuda.attention import (
    decode_parts,
    decode_schedule,
    decode_schedule_size,
    merge_many_states,
    merge_states,
    paged_decode,
    paged_decode_workspace_size,
)
from lamella.kernels_cuda.batch import advance_decode, prepare_decode
from lamella.kernels_cuda.cache import kv_write, rope, rope_write
from lamella.kernels_cuda.copy import copy_block_pairs, copy_blocks
from lamella.kernels_cuda.device import available, capability, why_not
from lamella.kernels_cuda.gemm import linear, linear_fp8, linear_workspace, pack_gate_up
from lamella.kernels_cuda.layer import (
    experts_tail,
    experts_tail_rows,
    experts_tail_workspace,
    layer_tail,
    layer_tail_rows,
    layer_tail_workspace,
)
from lamella.kernels_cuda.moe import fused_moe, moe_align, moe_route, moe_workspace, moe_workspace_bytes
from lamella.kernels_cuda.norm import rms_norm, rms_norm_fp8
from lamella.kernels_cuda.prefill import paged_prefill
from lamella.kernels_cuda.sampling import (
    apply_bitmask,
    apply_penalties,
    logsumexp,
    sample,
    sampling_workspace_bytes,
    top_logprobs,
)

__all__ = [
    "advance_decode",
    "apply_bitmask",
    "apply_penalties",
    "available",
    "capability",
    "copy_block_pairs",
    "copy_blocks",
    "decode_parts",
    "decode_schedule",
    "decode_schedule_size",
    "experts_tail",
    "experts_tail_rows",
    "experts_tail_workspace",
    "fused_moe",
    "gated_activation",
    "kv_write",
    "layer_tail",
    "layer_tail_rows",
    "layer_tail_workspace",
    "linear",
    "linear_fp8",
    "linear_workspace",
    "logsumexp",
    "merge_many_states",
    "merge_states",
    "moe_align",
    "moe_route",
    "moe_workspace",
    "moe_workspace_bytes",
    "pack_gate_up",
    "paged_decode",
    "paged_decode_workspace_size",
    "paged_prefill",
    "prepare_decode",
    "quant_fp8_per_group",
    "quant_fp8_per_token",
    "rms_norm",
    "rms_norm_fp8",
    "rope",
    "rope_write",
    "sample",
    "sampling_workspace_bytes",
    "silu_mul",
    "silu_mul_fp8_per_group",
    "silu_mul_fp8_per_token",
    "top_logprobs",
    "why_not",
]
