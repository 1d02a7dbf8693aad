"""What holds without a GPU: the package imports, says why no kernel can run, and names wrong arguments."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from lamella import kernels_cuda as kernels

built = pytest.mark.skipif(
    "cannot be loaded" in (kernels.why_not() or ""), reason="the native module is not built here"
)
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def test_every_public_name_is_there() -> None:
    assert all(hasattr(kernels, name) for name in kernels.__all__)


def test_without_the_native_module_the_reason_is_told() -> None:
    """As on a platform for which there is no wheel."""
    code = (
        "import sys; sys.modules['lamella.kernels_cuda._C'] = None\n"
        "from lamella import kernels_cuda as kernels\n"
        "assert not kernels.available() and kernels.capability() == (0, 0)\n"
        "assert 'cannot be loaded' in kernels.why_not()\n"
        "import torch\n"
        "try: kernels.rms_norm(torch.zeros(1, 8), torch.zeros(8), 1e-6)\n"
        "except RuntimeError as error: assert 'install its wheel' in str(error)\n"
        "else: raise AssertionError('a kernel ran')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@built
@without_gpu
def test_a_machine_without_a_gpu_is_told_so() -> None:
    assert not kernels.available()
    assert "no CUDA device 0" in (kernels.why_not() or "")
    assert kernels.capability() == (0, 0)


@built
def test_a_tensor_that_is_not_on_a_gpu_is_named() -> None:
    x, weight = torch.zeros(2, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"^out: not on a CUDA device"):
        kernels.rms_norm(x, weight, 1e-6)
    with pytest.raises(ValueError, match=r"^x: not on a CUDA device"):
        kernels.silu_mul(x)


@built
def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(ValueError, match=r"^kind: is 'tanh', needed silu, gelu"):
        kernels.gated_activation(torch.zeros(2, 64), "tanh")  # type: ignore[arg-type]
