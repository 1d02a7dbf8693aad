"""Top-k 50 + top-p 0.95 over 128,256 logits, and what else lies on a step's way."""

import torch
from timing import seconds, sets_for

from lamella import kernels_cuda as kernels

VOCAB = 128256
TARGET_US = {1: 15.0, 32: 20.0, 256: 60.0}
PEER_US = {1: 320.0, 32: 410.0, 256: 920.0}  # torch.sort of the rows on this card


def rows(emit):
    for m, target in TARGET_US.items():
        every = [torch.randn(m, VOCAB, device="cuda") * 3 for _ in range(sets_for(m * VOCAB * 4))]
        ones = torch.ones(m, device="cuda")
        workspace = torch.empty(kernels.sampling_workspace_bytes(m, VOCAB), dtype=torch.uint8, device="cuda")
        shared = {
            "seeds": torch.arange(m, device="cuda"),
            "positions": torch.arange(m, device="cuda", dtype=torch.int32),
            "workspace": workspace,
            "ids": torch.empty(m, dtype=torch.int32, device="cuda"),
            "status": torch.empty(m, dtype=torch.uint8, device="cuda"),
        }
        limits = {"top_k": ones.int() * 50, "top_p": ones.double() * 0.95}
        cases = {
            "top-k 50 + top-p 0.95": {"temperature": ones, **limits},
            "top-p 0.95": {"temperature": ones, "top_p": limits["top_p"]},
            "temperature alone": {"temperature": ones},
            "greedy": {},
        }
        for name, extra in cases.items():
            first = name.startswith("top-k")
            emit(
                f"sampling, {name}, vocabulary 128,256, b{m}",
                seconds([lambda x=x, e={**shared, **extra}: kernels.sample(x, **e) for x in every]),
                target * 1e-6 if first else None,
                PEER_US[m] * 1e-6 if first else None,
                bytes=m * VOCAB * 4,
                test="test_sampling.py",
            )
        emit(
            f"top 20 log-probabilities, vocabulary 128,256, b{m}",
            seconds(
                [lambda x=x, i=shared["ids"], w=workspace: kernels.top_logprobs(x, 20, i, workspace=w) for x in every]
            ),
            None,
            None,
            bytes=m * VOCAB * 4,
            test="test_sampling.py",
        )
