"""The law that is told of a logits row is the one that its ids are sampled from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lamella.runner_v2.sampling.kernels import SamplingKernels
from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.sampling.rows import LogitsRows
from lamella.runner_v2.sampling.sampler import Sampler

NUM = 20_000
VOCAB = 12


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.4},
        {"temperature": 2.0, "top_k": 3},
        {"top_p": 0.6},
        {"temperature": 1.5, "min_p": 0.1},
        {"top_k": 6, "top_p": 0.8, "min_p": 0.05},
        {"logit_bias": ((2, 3.0), (7, -4.0)), "top_k": 5},
        {"allowed_ids": (1, 4, 9)},
    ],
    ids=str,
)
def test_ids_are_sampled_by_it(params: dict[str, object], kernels: SamplingKernels) -> None:
    sampler = Sampler(VOCAB, 2, "cpu", kernels=kernels)
    sampler.add(0, RowParams(seed=3, **params), [1], [])  # type: ignore[arg-type]
    layout = LogitsRows.of(np.zeros(NUM, np.int32), np.arange(NUM, dtype=np.int32))
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)).repeat(NUM, 1) * 2
    result = sampler.sample(logits, layout)
    law = sampler.law(logits, layout, result.ids)
    assert torch.equal(law, law[:1].expand_as(law))
    p = law[0].double()
    assert float(p.sum()) == pytest.approx(1.0, abs=1e-6)
    counts = torch.bincount(result.ids.long(), minlength=VOCAB).double()
    assert (counts[p == 0] == 0).all()
    some = p > 0
    chi = float((((counts - NUM * p) ** 2)[some] / (NUM * p[some])).sum())
    degrees = int(some.sum()) - 1
    assert chi <= degrees + 5 * (2 * max(degrees, 1)) ** 0.5 + 10


def test_greedy_rows_have_it_all_on_their_id() -> None:
    sampler = Sampler(VOCAB, 2, "cpu")
    sampler.add(0, RowParams(temperature=0.0), [1], [])
    sampler.add(1, RowParams(seed=3), [1], [])
    layout = LogitsRows.of([0, 1], [4, 4])
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(2))
    result = sampler.sample(logits, layout)
    law = sampler.law(logits, layout, result.ids)
    assert law[0].tolist() == [float(i == int(logits[0].argmax())) for i in range(VOCAB)]
    assert law[1].tolist() == pytest.approx(torch.softmax(logits[1].double(), 0).tolist(), abs=1e-6)
