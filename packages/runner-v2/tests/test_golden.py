"""SmolLM2-135M: known ids and logits of a real model. Skipped where its file is not in the user's cache."""

import math
from pathlib import Path

from lamella.runner_v2.runner import ModelRunner
from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.testing.hand_scheduler import HandScheduler

PROMPT = [504, 3575, 282, 4649, 314]  # "The capital of France is"
CONTINUATION = [7042, 30, 198, 198, 504, 2988, 314, 42]
TOP = {7042: 17.371, 260: 14.889, 4528: 13.245, 2250: 13.009, 1315: 12.952}
LOG_SUM_EXP = 17.629


def generate(path: Path, **options: object) -> HandScheduler:
    runner = ModelRunner.load(path, max_model_len=64, max_num_rows=1, **options)
    hand = HandScheduler(runner.execute, runner.report().groups)
    runner.allocate(hand.layout)
    row = hand.add(PROMPT, RowParams(temperature=0.0, num_logprobs=5))
    hand.prefill(row, [3, 2])
    hand.decode([row], 7)
    return hand


def test_float32(smollm2: Path) -> None:
    """All eight ids, and the logits of the first step."""
    hand = generate(smollm2, dtype="float32")
    assert hand.ids[0] == PROMPT + CONTINUATION
    first = hand.outputs[1].logprobs
    assert first is not None
    assert first[0] is not None
    _, *ids = first[0].token_ids
    assert ids == list(TOP)
    for token_id, logprob in zip(ids, first[0].logprobs[1:], strict=True):
        assert math.isclose(logprob, TOP[token_id] - LOG_SUM_EXP, abs_tol=2e-3)


def test_default(smollm2: Path) -> None:
    """The fast path rounds activations: the first five ids have gaps that it cannot cross."""
    assert generate(smollm2).ids[0][: len(PROMPT) + 5] == PROMPT + CONTINUATION[:5]
