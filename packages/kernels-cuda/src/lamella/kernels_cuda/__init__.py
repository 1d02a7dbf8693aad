"""CUDA kernels for LLM inference: torch tensors of any origin in and out, on torch's current stream.

The package imports on any machine. A kernel that cannot run (no device, no driver, no code for the device) says so when
it is called; available() tells before.
"""

from lamella.kernels_cuda.cache import kv_write, rope, rope_write
from lamella.kernels_cuda.device import available, capability, why_not
from lamella.kernels_cuda.norm import rms_norm, rms_norm_fp8

__all__ = ["available", "capability", "kv_write", "rms_norm", "rms_norm_fp8", "rope", "rope_write", "why_not"]
