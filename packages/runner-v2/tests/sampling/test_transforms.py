"""Each transform on sequences with three logits rows (two drafts), against the definitions."""

import math

import numpy as np
import pytest
import torch

from lamella.runner_v2.sampling.bias import Bias
from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.sampling.rows import LogitsRows
from lamella.runner_v2.sampling.sampler import Sampler
from lamella.runner_v2.step import Mask
from lamella.runner_v2.testing import sampling_oracle as oracle

VOCAB = 41
PROMPT = [3, 5, 5, 8, 40]
OUTPUT = [5, 9, 12, 9]
DRAFTS = [9, 3]

PARAMS = {
    "allowed ids": RowParams(0.0, allowed_ids=(1, 3, 9, 40)),
    "bias": RowParams(0.0, logit_bias=((3, 2.5), (40, -7.0), (3, 0.25))),
    "bias on allowed ids": RowParams(0.0, allowed_ids=(1, 3), logit_bias=((3, 100.0), (7, 100.0))),
    "min tokens reached by the drafts": RowParams(0.0, min_tokens=6, stop_ids=(0, 9, 3)),
    "min tokens far away": RowParams(0.0, min_tokens=100, stop_ids=(0, 9, 3, 1000)),
    "min tokens without stop ids": RowParams(0.0, min_tokens=100),
    "repetition": RowParams(0.0, repetition_penalty=1.7),
    "repetition below one": RowParams(0.0, repetition_penalty=0.4),
    "frequency": RowParams(0.0, frequency_penalty=0.6),
    "presence": RowParams(0.0, presence_penalty=-1.5),
    "all penalties": RowParams(0.0, repetition_penalty=1.2, frequency_penalty=-0.3, presence_penalty=0.8),
    "bad token": RowParams(0.0, bad_words=((9,), (11,))),
    "bad words": RowParams(0.0, bad_words=((12, 9, 4), (9, 9, 6), (9, 3, 7), (12, 9, 9, 3, 2), (8, 5, 1), (9, 13))),
    "everything": RowParams(
        0.9,
        top_k=12,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.3,
        frequency_penalty=0.2,
        presence_penalty=0.1,
        logit_bias=((3, 1.0),),
        bad_words=((9, 13), (2,)),
        min_tokens=5,
        stop_ids=(4, 6),
        seed=99,
    ),
    "temperature": RowParams(0.7, seed=5),
    "min-p": RowParams(1.5, min_p=0.3, seed=6),
    "top-k": RowParams(1.5, top_k=3, seed=7),
    "top-p": RowParams(1.5, top_p=0.4, seed=8),
}


def three_rows(seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy((rng.standard_normal((3, VOCAB)) * 3).astype(np.float32))


@pytest.mark.parametrize("name", PARAMS)
def test_three_rows_of_a_sequence(kernels, name):
    """Rows see the drafts before them as output; a plain row beside them keeps its logits bit by bit."""
    params = PARAMS[name]
    for seed in range(5):
        sampler = Sampler(VOCAB, 4, "cpu", max_drafts=2, kernels=kernels)
        sampler.add(2, params, PROMPT, OUTPUT)
        sampler.add(1, RowParams(0.0), [1], [])
        first = len(PROMPT) + len(OUTPUT)
        layout = LogitsRows.of([1, 2], [1, first], [[], DRAFTS])
        plain = three_rows(seed + 50)[:1]
        logits = torch.cat((plain, three_rows(seed)))
        raw = logits.clone()
        result = sampler.sample(logits, layout)
        assert not result.failed
        assert torch.equal(logits[0], plain[0])
        assert int(result.ids[0]) == int(plain[0].argmax())
        for i in range(3):
            output = OUTPUT + DRAFTS[:i]
            expected = oracle.transformed(raw[1 + i].tolist(), params, PROMPT, output)
            np.testing.assert_allclose(logits[1 + i].numpy(), expected, rtol=1e-6, atol=1e-6)
            assert int(result.ids[1 + i]) in oracle.choices(expected, params, first + i)


@pytest.mark.parametrize("name", PARAMS)
def test_rows_after_advance(kernels, name):
    """Told in pieces what was emitted, the sampler is where it would be had the row just entered with it."""
    params = PARAMS[name]
    told, fresh = (Sampler(VOCAB, 2, "cpu", max_drafts=2, kernels=kernels) for _ in range(2))
    told.add(0, params, PROMPT, OUTPUT[:1])
    told.advance([1, 0], [1, 2], [30, *OUTPUT[1:3]])
    told.advance([0], [0], [])
    told.advance([0], [1], OUTPUT[3:])
    fresh.add(0, params, PROMPT, OUTPUT)
    layout = LogitsRows.of([0], [len(PROMPT) + len(OUTPUT)], [DRAFTS])
    a, b = three_rows(1), three_rows(1)
    assert torch.equal(told.sample(a, layout).ids, fresh.sample(b, layout).ids)
    assert torch.equal(a, b)


def test_masks_of_single_rows(kernels):
    """A mask belongs to one (row, draft) pair and comes before everything: bias cannot revive what it hides."""
    params = RowParams(0.0, logit_bias=((6, 50.0),))
    sampler = Sampler(VOCAB, 4, "cpu", max_drafts=2, kernels=kernels)
    sampler.add(3, params, PROMPT, OUTPUT)
    rng = np.random.default_rng(4)
    allowed = rng.random((3, VOCAB)) < 0.4
    allowed[:, 6] = [True, False, False]
    allowed[0, 32:] = False
    masks = []
    for i in (0, 2):
        bits = np.zeros(64, np.uint8)
        bits[:VOCAB] = allowed[i]
        bits[VOCAB:] = 1  # beyond the vocabulary: no meaning
        masks.append(Mask(3, i, np.packbits(bits, bitorder="little").tobytes()))
    logits = three_rows(9)
    raw = logits.clone()
    result = sampler.sample(logits, LogitsRows.of([3], [9], [DRAFTS]), masks)
    for i in range(3):
        mask = allowed[i].tolist() if i != 1 else None
        expected = oracle.transformed(raw[i].tolist(), params, PROMPT, OUTPUT + DRAFTS[:i], mask)
        np.testing.assert_allclose(logits[i].numpy(), expected, rtol=1e-6)
        assert int(result.ids[i]) == int(np.argmax(expected))


def test_mask_that_forbids_everything_fails_its_row_alone(kernels):
    sampler = Sampler(VOCAB, 4, "cpu", max_drafts=2, kernels=kernels)
    sampler.add(0, RowParams(1.0, seed=1, num_logprobs=0), [1], [])
    logits = three_rows(0)
    raw = logits.clone()
    result = sampler.sample(logits, LogitsRows.of([0], [1], [DRAFTS]), [Mask(0, 1, bytes(8))])
    assert [i for i, _ in result.failed] == [1]
    assert "no token is allowed" in result.failed[0][1]
    assert result.logprobs is not None
    assert result.logprobs[1] is None
    for i in (0, 2):
        assert int(result.ids[i]) in oracle.choices(raw[i].tolist(), RowParams(1.0, seed=1), 1 + i)


def test_mask_for_a_row_that_is_not_sampled_is_a_bug(kernels):
    sampler = Sampler(VOCAB, 4, "cpu", kernels=kernels)
    with pytest.raises(AssertionError, match="row 2, draft 0"):
        sampler.sample(three_rows(0)[:1], LogitsRows.of([1], [1]), [Mask(2, 0, bytes(8))])
    with pytest.raises(AssertionError, match="4 bytes for 41 tokens"):
        sampler.sample(three_rows(0)[:1], LogitsRows.of([1], [1]), [Mask(1, 0, bytes(4))])


def test_single_allowed_token(kernels):
    sampler = Sampler(VOCAB, 1, "cpu", kernels=kernels)
    sampler.add(0, RowParams(3.0, top_p=1e-9, allowed_ids=(17,), seed=3), [1], [])
    assert sampler.sample(three_rows(0)[:1], LogitsRows.of([0], [1])).ids.tolist() == [17]


def test_prompt_ids_without_a_logit_are_not_penalised(kernels):
    """Placeholders of media lie outside the vocabulary."""
    sampler = Sampler(VOCAB, 1, "cpu", kernels=kernels)
    sampler.add(0, RowParams(0.0, repetition_penalty=2.0), [5, 100_000], [])
    logits = torch.ones(1, VOCAB)
    sampler.sample(logits, LogitsRows.of([0], [2]))
    assert logits[0, 5] == 0.5
    assert logits.sum() == VOCAB - 0.5


def test_ids_outside_the_vocabulary_are_a_bug(kernels):
    sampler = Sampler(VOCAB, 1, "cpu", kernels=kernels)
    with pytest.raises(AssertionError, match="allowed_ids"):
        sampler.add(0, RowParams(allowed_ids=(VOCAB,)), [1], [])
    with pytest.raises(AssertionError, match="logit_bias"):
        sampler.add(0, RowParams(logit_bias=((-1, 1.0),)), [1], [])


def test_long_outputs_grow_the_counts(kernels):
    """More distinct tokens than any first allocation."""
    vocab_size = 500
    params = RowParams(0.0, frequency_penalty=0.5, repetition_penalty=1.5)
    sampler = Sampler(vocab_size, 1, "cpu", kernels=kernels)
    sampler.add(0, params, [1], [])
    output = [(7 * i) % vocab_size for i in range(700)]
    for token_id in output:
        sampler.advance([0], [1], [token_id])
    logits = torch.linspace(-3, 3, vocab_size)[None].clone()
    expected = oracle.transformed(logits[0].tolist(), params, [1], output)
    sampler.sample(logits, LogitsRows.of([0], [701]))
    np.testing.assert_allclose(logits[0].numpy(), expected, rtol=1e-6, atol=1e-6)
    assert math.isfinite(float(logits.sum()))


def test_stop_ids_are_forgotten_once_min_tokens_are_there(kernels):
    sampler = Sampler(VOCAB, 4, "cpu", max_drafts=2, kernels=kernels)
    (bias,) = [t for t in sampler._transforms if isinstance(t, Bias)]
    sampler.add(0, RowParams(0.0, min_tokens=3, stop_ids=(1,)), PROMPT, [9])
    sampler.add(1, RowParams(0.0, min_tokens=4, stop_ids=(1,), logit_bias=((2, 1.0),)), PROMPT, [9])
    sampler.add(2, RowParams(0.0, min_tokens=1, stop_ids=(1,)), PROMPT, [9])
    assert bias.num_active == 2, "row 2 had its token before it came"
    sampler.advance([0, 1], [1, 1], [4, 4])
    assert bias.num_active == 2
    logits = torch.zeros((4, VOCAB))
    bias.apply(logits, LogitsRows.of([0, 1, 2], [7, 7, 6], [[6], [], []]))
    # positions 7 and 8 of row 0: the third output token is held back, the one behind its draft is not
    assert [bool(value) for value in logits[:, 1].isinf()] == [True, False, True, False]
    sampler.advance([1, 0], [2, 2], [4, 4, 4, 4])
    assert bias.num_active == 1
    assert bias._edits[1].stop_ids is None
    logits = torch.zeros((2, VOCAB))
    bias.apply(logits, LogitsRows.of([0, 1], [9, 9], [[], []]))
    assert logits.isfinite().all()
    assert float(logits[1, 2]) == 1.0
    sampler.remove(1)
    sampler.remove(0)
    assert bias.num_active == 0
