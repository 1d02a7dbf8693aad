"""The sampler as the runner uses it: batches, logprobs, failures, rows that come and go."""

import math

import numpy as np
import pytest
import torch

from lamella.runner_v2.sampling.host import pick_kernels
from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.sampling.rows import LogitsRows
from lamella.runner_v2.sampling.sampler import Sampler
from lamella.runner_v2.step import Mask, TokenLogprobs
from lamella.runner_v2.testing import sampling_oracle as oracle

VOCAB = 97


def random_logits(num_rows: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy((rng.standard_normal((num_rows, VOCAB)) * scale).astype(np.float32))


def assert_logprobs(entry: TokenLogprobs | None, raw: torch.Tensor, token_id: int, k: int) -> None:
    """The entry is what the raw logits say."""
    assert entry is not None
    expected = oracle.logprobs(raw.tolist())
    order = sorted(range(VOCAB), key=lambda i: (-float(raw[i]), i))[:k]
    assert entry.token_ids == [token_id, *order]
    assert entry.logprobs == pytest.approx([expected[i] for i in entry.token_ids], abs=2e-6)
    assert entry.rank == int((raw >= raw[token_id]).sum())
    assert all(type(v) is float for v in entry.logprobs)
    assert all(type(i) is int for i in entry.token_ids)


class TestBatches:
    def test_ids_do_not_depend_on_the_batch(self, kernels):
        """Same seed, position and logits: same id alone, in any order, at any device row, with drafts or without."""
        rng = np.random.default_rng(1)
        params = [
            RowParams(
                float(rng.choice([0.0, 0.5, 1.0, 2.0])),
                top_k=int(rng.choice([0, 5])),
                top_p=float(rng.choice([0.8, 1.0])),
                repetition_penalty=float(rng.choice([1.0, 1.4])),
                seed=int(rng.integers(2**63)),
            )
            for _ in range(16)
        ]
        logits = random_logits(16)
        positions = rng.integers(1, 100, 16).tolist()

        def sample(order: list[int], rows: list[int]) -> dict[int, int]:
            sampler = Sampler(VOCAB, 32, "cpu", kernels=kernels)
            for i, row in zip(order, rows):
                sampler.add(row, params[i], [i, 2 * i], [3 * i])
            layout = LogitsRows.of(rows, [positions[i] for i in order])
            return dict(zip(order, sampler.sample(logits[order].clone(), layout).ids.tolist()))

        together = sample(list(range(16)), list(range(16)))
        assert sample(rng.permutation(16).tolist(), rng.permutation(32)[:16].tolist()) == together
        for i in range(16):
            assert sample([i], [5]) == {i: together[i]}

        # the row behind drafts d1 d2 is the row of a sequence whose output ends in d1 d2
        sampler = Sampler(VOCAB, 2, "cpu", max_drafts=2, kernels=kernels)
        hot = RowParams(1.0, frequency_penalty=1.0, seed=4)
        sampler.add(0, hot, [1], [2])
        sampler.add(1, hot, [1], [2, 30, 31])
        layout = LogitsRows.of([0, 1], [2, 4], [[30, 31], []])
        ids = sampler.sample(logits[[0, 1, 2, 2]].clone(), layout).ids.tolist()
        assert ids[2] == ids[3]

    def test_only_rows_that_ask_are_touched(self, kernels):
        sampler = Sampler(VOCAB, 4, "cpu", kernels=kernels)
        sampler.add(0, RowParams(1.0, top_k=3, top_p=0.5, min_p=0.1, seed=1), [1], [])
        sampler.add(1, RowParams(1.0, logit_bias=((4, 1.0),)), [1], [])
        sampler.add(2, RowParams(0.0, num_logprobs=3), [1], [])
        sampler.add(3, RowParams(0.0, min_tokens=1, stop_ids=(0,)), [1], [7])
        logits = random_logits(4)
        raw = logits.clone()
        sampler.sample(logits, LogitsRows.of([0, 1, 2, 3], [1, 1, 1, 2]))
        changed = (logits != raw).nonzero().tolist()
        assert changed == [[1, 4]]

    def test_greedy_takes_the_lowest_of_equal_ids(self, kernels):
        sampler = Sampler(VOCAB, 1, "cpu", kernels=kernels)
        sampler.add(0, RowParams(9e-6, seed=5), [1], [])  # as good as zero
        logits = torch.zeros(1, VOCAB)
        logits[0, [50, 11, 80]] = 1.0
        assert sampler.sample(logits, LogitsRows.of([0], [1])).ids.tolist() == [11]

    def test_results_have_the_types_of_the_contract(self, kernels):
        sampler = Sampler(VOCAB, 1, "cpu", kernels=kernels)
        for params in (RowParams(0.0), RowParams(1.0)):
            sampler.add(0, params, [1], [])
            result = sampler.sample(random_logits(1), LogitsRows.of([0], [1]))
            assert result.ids.dtype == torch.int32
            assert result.status.dtype == torch.uint8
            assert result.logprobs is None

    def test_providers(self):
        assert pick_kernels("cpu", ("torch",)).name == "torch"
        assert pick_kernels("meta").name == "torch"


class TestLifetimes:
    def test_a_row_forgets_its_old_owner(self, kernels):
        """Removed or taken over, nothing of the old parameters is left."""
        greedy = RowParams(0.0)
        everything = RowParams(1.0, 3, 0.5, 0.1, 2.0, 1.0, 1.0, ((1, 50.0),), ((2,), (3, 4)), (1, 2, 3), 9, (1,), 7, 5)
        for take_over in (False, True):
            sampler = Sampler(VOCAB, 2, "cpu", kernels=kernels)
            sampler.add(0, everything, [1, 2], [3])
            if take_over:
                sampler.add(0, greedy, [1], [])
            else:
                sampler.remove(0)
                sampler.remove(0)
                sampler.remove(1)
            logits = random_logits(1)
            raw = logits.clone()
            result = sampler.sample(logits, LogitsRows.of([0], [3]))
            assert result.ids.tolist() == [int(raw.argmax())]
            assert result.logprobs is None
            assert torch.equal(logits, raw)
            assert all(t.num_active == 0 for t in sampler._transforms)

    def test_rejected_drafts_do_not_count(self, kernels):
        """Drafts touch the logits of their own step only."""
        sampler = Sampler(VOCAB, 1, "cpu", max_drafts=2, kernels=kernels)
        sampler.add(0, RowParams(0.0, presence_penalty=1.0), [1], [2])
        sampler.sample(random_logits(3), LogitsRows.of([0], [2], [[10, 11]]))
        sampler.advance([0], [1], [12])  # none accepted; 12 instead
        logits = torch.zeros(1, VOCAB)
        sampler.sample(logits, LogitsRows.of([0], [3]))
        assert logits[0].nonzero().flatten().tolist() == [2, 12]


class TestLogprobs:
    def test_of_raw_logits(self, kernels):
        """Each row as many as it asked for, from logits as they came, whatever was done to them since."""
        asked = [None, 0, 1, 5, -1, VOCAB + 3]
        sampler = Sampler(VOCAB, 16, "cpu", kernels=kernels)
        for row, k in enumerate(asked):
            sampler.add(row, RowParams(0.0, num_logprobs=k), [1], [])
            sampler.add(8 + row, RowParams(1.0, seed=row, num_logprobs=k, logit_bias=((6, 9.0),)), [1], [])
        rows = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13]
        logits = random_logits(12)
        raw = logits.clone()
        result = sampler.sample(logits, LogitsRows.of(rows, [1] * 12))
        assert result.logprobs is not None
        for i, row in enumerate(rows):
            k = asked[row % 8]
            if k is None:
                assert result.logprobs[i] is None
            else:
                assert_logprobs(result.logprobs[i], raw[i], int(result.ids[i]), VOCAB if k < 0 else k)

    def test_of_every_row_of_a_sequence(self, kernels):
        sampler = Sampler(VOCAB, 1, "cpu", max_drafts=2, kernels=kernels)
        sampler.add(0, RowParams(0.0, num_logprobs=2, frequency_penalty=2.0), [1], [5])
        logits = random_logits(3)
        raw = logits.clone()
        result = sampler.sample(logits, LogitsRows.of([0], [2], [[5, 6]]))
        assert result.logprobs is not None
        for i in range(3):
            assert_logprobs(result.logprobs[i], raw[i], int(result.ids[i]), 2)

    def test_of_a_masked_row(self, kernels):
        sampler = Sampler(VOCAB, 1, "cpu", kernels=kernels)
        sampler.add(0, RowParams(0.0, num_logprobs=3), [1], [])
        logits = random_logits(1)
        raw = logits.clone()
        words = np.zeros(4, np.int32)
        words[2] = 1 << 5
        result = sampler.sample(logits, LogitsRows.of([0], [1]), [Mask(0, 0, words.tobytes())])
        assert result.ids.tolist() == [69]
        assert result.logprobs is not None
        assert_logprobs(result.logprobs[0], raw[0], 69, 3)

    def test_rank_counts_equals(self, kernels):
        sampler = Sampler(4, 1, "cpu", kernels=kernels)
        sampler.add(0, RowParams(0.0, num_logprobs=0), [1], [])
        result = sampler.sample(torch.tensor([[1.0, 2.0, 2.0, 2.0]]), LogitsRows.of([0], [1]))
        assert result.logprobs == [TokenLogprobs([1], [pytest.approx(-math.log(3 + math.exp(-1)))], 3)]

    def test_prompt_logprobs(self, kernels):
        sampler = Sampler(VOCAB, 1, "cpu", kernels=kernels)
        logits = random_logits(600)
        targets = np.random.default_rng(3).integers(0, VOCAB, 600).tolist()
        for k in (0, 3):
            for i, entry in enumerate(sampler.prompt_logprobs(logits, targets, k)):
                assert_logprobs(entry, logits[i], targets[i], k)
        (entry,) = sampler.prompt_logprobs(logits[:1], targets[:1], -1)
        assert_logprobs(entry, logits[0], targets[0], VOCAB)
        assert sampler.prompt_logprobs(logits[:0], [], 2) == []


class TestFailures:
    @pytest.mark.parametrize("params", [RowParams(0.0), RowParams(1.0, top_p=0.5), RowParams(1.0, num_logprobs=2)])
    def test_a_bad_row_fails_alone(self, kernels, params):
        sampler = Sampler(VOCAB, 6, "cpu", kernels=kernels)
        for row in range(6):
            sampler.add(row, params, [1], [])
        logits = random_logits(6)
        logits[1, 3] = math.nan
        logits[3] = -math.inf
        logits[4, 96] = math.inf
        raw = logits.clone()
        layout = LogitsRows.of(list(range(6)), [1] * 6)
        result = sampler.sample(logits, layout)
        assert [(i, "NaN" in why, "+inf" in why, "no token" in why) for i, why in result.failed] == [
            (1, True, False, False), (3, False, False, True), (4, False, True, False),
        ]  # fmt: skip
        good = [0, 2, 5]
        for i in good:
            assert int(result.ids[i]) in oracle.choices(raw[i].tolist(), params, 1)
        assert result.ids[[1, 3, 4]].tolist() == [0, 0, 0]
        if params.num_logprobs is not None:
            assert result.logprobs is not None
            assert [entry is None for entry in result.logprobs] == [i not in good for i in range(6)]

    def test_a_nan_behind_a_mask_has_no_logprobs(self, kernels):
        """Without logprobs the hidden NaN does no harm; with them there is nothing true to report."""
        for k, fails in ((None, False), (1, True)):
            sampler = Sampler(VOCAB, 1, "cpu", kernels=kernels)
            sampler.add(0, RowParams(0.0, allowed_ids=(4, 5), num_logprobs=k), [1], [])
            logits = random_logits(1)
            logits[0, 90] = math.nan
            assert bool(sampler.sample(logits, LogitsRows.of([0], [1])).failed) is fails
