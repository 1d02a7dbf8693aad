"""Every test of what is sampled runs on each set of kernels that this machine has."""

import pytest
import torch

from lamella.runner_v2.sampling.host import HostKernels, pick_kernels
from lamella.runner_v2.sampling.kernels import TorchKernels

native = pick_kernels("cpu").name == "host"


@pytest.fixture(params=["torch", "host"])
def kernels(request):
    if request.param == "torch":
        return TorchKernels()
    if not native:
        pytest.skip("no native module")
    return HostKernels()


@pytest.fixture(autouse=True)
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
