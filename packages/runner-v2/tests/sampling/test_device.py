"""The reference on an accelerator: the ids of the CPU, to the last one."""

import numpy as np
import pytest
import torch

from lamella.runner_v2.sampling.kernels import TorchKernels
from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.sampling.rows import LogitsRows
from lamella.runner_v2.sampling.sampler import Sampler
from lamella.runner_v2.step import Mask

VOCAB = 5003


@pytest.mark.gpu
def test_ids_of_the_cpu():
    rng = np.random.default_rng(0)
    params = [
        RowParams(
            temperature=float(rng.choice([0.0, 0.7, 1.0, 2.0])),
            top_k=int(rng.choice([0, 1, 40])),
            top_p=float(rng.choice([1.0, 0.5, 0.95])),
            min_p=float(rng.choice([0.0, 0.05])),
            repetition_penalty=float(rng.choice([1.0, 1.3])),
            frequency_penalty=float(rng.choice([0.0, 0.4])),
            logit_bias=((int(rng.integers(VOCAB)), 5.0),),
            bad_words=((int(rng.integers(VOCAB)),), (8, 9)),
            allowed_ids=None if row % 4 else tuple(range(0, VOCAB, 3)),
            min_tokens=5,
            stop_ids=(2, 3),
            seed=int(rng.integers(2**63)),
            num_logprobs=3 if row % 2 else None,
        )
        for row in range(32)
    ]
    x = (rng.standard_normal((96, VOCAB)) * 3).astype(np.float32)
    x[::7] = np.round(x[::7])
    x[10] = np.nan
    masks = [Mask(row, 1, rng.bytes(-(-VOCAB // 32) * 4)) for row in range(0, 32, 3)]
    layout = LogitsRows.of(list(range(32)), [20] * 32, [[8, 9]] * 32)
    results = []
    for device in ("cpu", "cuda"):
        sampler = Sampler(VOCAB, 32, device, 2, TorchKernels())
        for row in range(32):
            sampler.add(row, params[row], [1, 2, 8, VOCAB + 1], [5, 8])
        results.append(sampler.sample(torch.from_numpy(x.copy()).to(device), layout, masks))
    cpu, gpu = results
    assert gpu.ids.device.type == "cuda"
    assert gpu.ids.tolist() == cpu.ids.tolist()
    assert gpu.failed == cpu.failed
    assert cpu.logprobs is not None
    assert gpu.logprobs is not None
    for a, b in zip(cpu.logprobs, gpu.logprobs):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.token_ids == b.token_ids
            assert a.rank == b.rank
            assert b.logprobs == pytest.approx(a.logprobs, abs=1e-5)
