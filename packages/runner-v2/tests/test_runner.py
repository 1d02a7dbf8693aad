"""The runner's books: drafts, stale rows, failures, prompt logprobs, movers, memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lamella.runner_v2.errors import CapacityError, ConfigError, UnsupportedError
from lamella.runner_v2.parallel.groups import ThreadGroup
from lamella.runner_v2.protocols import SpecNeeds
from lamella.runner_v2.runner import ModelRunner
from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.step import Common, KvLayout, Step, Work
from lamella.runner_v2.testing.hand_scheduler import GREEDY, HandScheduler
from lamella.runner_v2.testing.scripted_speculator import ScriptedSpeculator
from lamella.runner_v2.testing.tiny_models import TinyModel, write_folder

PROMPTS = [[5, 17, 99, 3, 42, 42, 8], [200, 7, 7, 31], [60, 61, 62, 63, 64, 65, 66, 67, 68, 69]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_folder(tmp_path_factory.mktemp("llama"), "llama", seed=3)


def start(model: TinyModel, *, num_blocks: int = 64, **options: Any) -> tuple[ModelRunner, HandScheduler]:
    options = {"dtype": "float32", "max_num_rows": 4, "num_threads": 1, **options}
    runner = ModelRunner.load(model.path, **options)
    hand = HandScheduler(runner.execute, runner.report().groups, num_blocks)
    runner.allocate(hand.layout)
    return runner, hand


def generate(hand: HandScheduler, params: Sequence[RowParams], num_tokens: int, propose: int = 0) -> list[list[int]]:
    """All prompts together, the last one in two chunks."""
    rows = [hand.add(prompt, p) for prompt, p in zip(PROMPTS, params, strict=True)]
    *whole, last = rows
    hand.step({**{row: len(hand.ids[row]) for row in whole}, last: 6}, propose=propose)
    hand.step({last: 4, **dict.fromkeys(whole, 1)}, propose=propose)
    hand.decode(rows, num_tokens, propose)
    return [hand.ids[row][: len(prompt) + num_tokens] for row, prompt in zip(rows, PROMPTS, strict=True)]


MIXED_PARAMS = [
    GREEDY,
    RowParams(temperature=0.8, seed=11, top_k=20),
    RowParams(temperature=1.0, seed=12, frequency_penalty=0.5, repetition_penalty=1.3),
]


class TestDrafts:
    NUM_TOKENS = 24

    @pytest.mark.parametrize("wrong_after", [0, 1, 2, 9], ids=lambda n: f"{n} right")
    def test_same_ids_as_without(self, model: TinyModel, wrong_after: int) -> None:
        """Accepted or rejected, drafts change nothing: seeded noise depends on the position alone."""
        _, plain = start(model, batch_invariant=True)
        expected = generate(plain, MIXED_PARAMS, self.NUM_TOKENS + 4)

        def script(row: int, ids: Sequence[int], length: int) -> list[int]:
            future = expected[row][len(ids) :][:length]
            return [token if i < wrong_after else (token + 1) % 256 for i, token in enumerate(future)]

        speculator = ScriptedSpeculator(script, max_drafts=3)
        _, hand = start(model, batch_invariant=True, max_num_drafts=3, speculator=speculator)
        drafted = generate(hand, MIXED_PARAMS, self.NUM_TOKENS, propose=3)
        assert drafted == [ids[: len(prompt) + self.NUM_TOKENS] for ids, prompt in zip(expected, PROMPTS, strict=True)]
        num_decode_steps = len(hand.outputs) - 2
        assert max(speculator.num_accepted) == min(wrong_after, 3)
        assert num_decode_steps <= -(-self.NUM_TOKENS // (1 + min(wrong_after, 3))) + 2

    def test_fewer_drafts_than_planned(self, model: TinyModel) -> None:
        """A step may be planned for more drafts than the row turns out to hold: the missing ones are rejected."""
        _, plain = start(model)
        expected = generate(plain, [GREEDY] * 3, 12)
        speculator = ScriptedSpeculator(lambda row, ids, length: expected[row][len(ids) :][:1], max_drafts=3)
        _, hand = start(model, max_num_drafts=3, speculator=speculator)
        rows = [hand.add(prompt, GREEDY) for prompt in PROMPTS]
        hand.step({row: len(hand.ids[row]) for row in rows}, propose=3)
        assert hand.outputs[-1].num_drafts == [1, 1, 1]
        assert hand.outputs[-1].draft_ids == [expected[row][len(prompt) + 1] for row, prompt in enumerate(PROMPTS)]
        hand.num_drafts = dict.fromkeys(rows, 3)
        output = hand.step(dict.fromkeys(rows, 1), propose=3)
        assert output.num_tokens == [2, 2, 2]
        hand.decode(rows, 8)
        for row, ids in enumerate(expected):
            assert hand.ids[row][: len(ids)][:14] == ids[:14]

    def test_drafts_that_were_held_do_not_outlast_a_step_without_any(self, model: TinyModel) -> None:
        """Steps by turns with drafts, all wrong, and without: behind a row's last id lies what it holds, else -1."""
        speculator = ScriptedSpeculator(lambda row, ids, length: [250] * 3 if len(ids) % 2 else [], max_drafts=3)
        runner, hand = start(model, max_num_drafts=3, speculator=speculator)
        rows = [hand.add(prompt, GREEDY) for prompt in PROMPTS]
        hand.step({row: len(hand.ids[row]) for row in rows}, propose=3)
        for _ in range(6):
            for row in rows:
                last = len(hand.ids[row])
                held = [250] * 3 if last % 2 else [-1] * 3
                assert runner._state.all_token_ids[row, last : last + 3].tolist() == held
            hand.num_drafts = dict.fromkeys(rows, 0)
            hand.step(dict.fromkeys(rows, 1), propose=3)

    def test_what_the_speculator_sees(self, model: TinyModel) -> None:
        speculator = ScriptedSpeculator(lambda row, ids, length: [], max_drafts=2)
        _, hand = start(model, max_num_drafts=2, speculator=speculator)
        row = hand.add(PROMPTS[2])
        hand.prefill(row, [6, 4])
        hand.step({row: 1})
        views = speculator.views
        assert [view.new_counts for view in views] == [[10], [1], [1]]
        assert views[-1].token_ids == [hand.ids[row]]
        hand.remove(row)
        row = hand.add(PROMPTS[0])
        hand.prefill(row, [7])
        assert speculator.forgotten == [0]
        assert views[-1].new_counts == [8]
        assert views[-1].generations == (2,)
        assert hand.outputs[-1].num_drafts is None

    def test_skipped_drafts(self, model: TinyModel) -> None:
        speculator = ScriptedSpeculator(lambda row, ids, length: [1, 1], max_drafts=2)
        runner, hand = start(model, max_num_drafts=2, speculator=speculator)
        row = hand.add(PROMPTS[0])
        hand.prefill(row, [7])
        skipping = Step(90, work=Work((row,), (1,), (0,), (2,)), common=Common(skip_drafts=True))
        assert runner.execute(skipping).num_drafts is None
        assert runner.execute(skipping._replace(common=Common())).num_drafts == [2]

    @pytest.mark.parametrize(
        ("needs", "error"),
        [
            (SpecNeeds(max_drafts=2, hidden_layers=(1,)), UnsupportedError),
            (SpecNeeds(max_drafts=2, hidden_layers=(3,)), ConfigError),
            (SpecNeeds(max_drafts=2, network=True), ConfigError),
            (SpecNeeds(max_drafts=2, one_hot=False), UnsupportedError),
            (SpecNeeds(max_drafts=5), ConfigError),
        ],
    )
    def test_unmet_needs(self, model: TinyModel, needs: SpecNeeds, error: type[Exception]) -> None:
        speculator = ScriptedSpeculator(lambda row, ids, length: [], max_drafts=2)
        speculator.needs = needs
        with pytest.raises(error):
            start(model, max_num_drafts=3, speculator=speculator)


class TestRows:
    def test_stale_removal_changes_nothing(self, model: TinyModel) -> None:
        """A removal of an earlier owner, arriving late, leaves the row to its new one."""
        runner, hand = start(model)
        first = hand.add(PROMPTS[0])
        hand.prefill(first, [7])
        hand.remove(first)
        row = hand.add(PROMPTS[1])
        assert hand.prefill(row, [4]).generations == (2,)
        expected_next = len(hand.ids[row])
        output = runner.execute(Step(50, removed=((row, 1),), work=Work((row,), (1,), (0,), (0,))))
        assert output.generations == (2,)
        assert output.num_tokens == [1]
        assert expected_next == 5

    def test_repeated_step_is_constant_size(self, model: TinyModel) -> None:
        """Work None repeats the rows and lengths of the step before; generated ids go on."""
        _, hand = start(model, block_size=32)
        expected = generate(hand, [GREEDY] * 3, 10)
        runner, hand = start(model, block_size=32)
        rows = [hand.add(prompt) for prompt in PROMPTS]
        hand.step({row: len(hand.ids[row]) for row in rows})
        hand.step(dict.fromkeys(rows, 1))
        for step_id in range(8):
            output = runner.execute(Step(100 + step_id))
            for row, token in zip(output.rows, output.token_ids, strict=True):
                hand.ids[row].append(token)
        assert [hand.ids[row] for row in rows] == expected

    def test_repeated_chunk_ends_with_the_prompt(self, model: TinyModel) -> None:
        """Two chunks of one length: the same work, but only the second one samples."""
        runner, hand = start(model)
        row = hand.add(PROMPTS[2])
        assert hand.step({row: 5}).num_tokens == [0]
        assert runner.execute(Step(100)).num_tokens == [1]

    def test_empty_step(self, model: TinyModel) -> None:
        runner, hand = start(model)
        output = hand.step({})
        assert (output.rows, output.token_ids, output.num_tokens) == ((), [], [])
        assert runner.kv_bytes == 64 * runner.report().groups[0].bytes_per_block

    def test_too_many_tokens(self, model: TinyModel) -> None:
        _, hand = start(model, max_num_tokens=8)
        row = hand.add(PROMPTS[2])
        with pytest.raises(AssertionError, match="10 tokens in a step, 8 at most"):
            hand.step({row: 10})


class TestFailures:
    def test_nan_fails_its_row_alone(self, model: TinyModel) -> None:
        runner, hand = start(model)
        _, twin = start(model)
        for h in (hand, twin):
            rows = [h.add(prompt) for prompt in PROMPTS]
            h.step({row: len(h.ids[row]) for row in rows})
        cache = runner._caches[0]
        cache.v[hand.tables[1][0][0], 0, 2] = torch.nan
        output, clean = hand.step({0: 1, 1: 1, 2: 1}), twin.step({0: 1, 1: 1, 2: 1})
        assert output.failed == ((1, "the logits contain NaN"),)
        assert output.num_tokens == [1, 0, 1]
        assert output.token_ids == [clean.token_ids[0], clean.token_ids[2]]
        assert clean.failed == ()
        # the blocks of the failed row go to another one: what is masked may hold NaN
        hand.remove(1)
        twin.remove(1)
        for h in (hand, twin):
            h.prefill(h.add(PROMPTS[0]), [7])
        assert hand.outputs[-1].failed == ()
        assert hand.outputs[-1].token_ids == twin.outputs[-1].token_ids

    def test_a_row_without_an_allowed_token_is_named(self, model: TinyModel) -> None:
        runner, hand = start(model)
        barred = RowParams(temperature=0.0, allowed_ids=(4, 5), stop_ids=(4,), min_tokens=1, bad_words=((5,),))
        rows = [hand.add(PROMPTS[0]), hand.add(PROMPTS[1], barred), hand.add(PROMPTS[2])]
        hand.step({row: len(hand.ids[row]) for row in rows[:2]})
        output = hand.outputs[-1]
        assert output.failed == ((1, "no token is allowed: every logit is -inf"),)
        assert output.forbidden == (1,)
        assert output.num_tokens == [1, 0]
        hand.prefill(rows[2], [10])
        runner._caches[0].v[hand.tables[2][0][0], 0, 2] = torch.nan
        output = hand.step({rows[2]: 1})
        assert output.failed == ((2, "the logits contain NaN"),)
        assert output.forbidden == ()

    def test_layout(self, model: TinyModel) -> None:
        runner, _ = start(model)
        with pytest.raises(ConfigError, match="2 groups, the model 1"):
            runner.allocate(KvLayout((8, 8)))
        with pytest.raises(CapacityError, match="at least 2 blocks"):
            runner.allocate(KvLayout((1,)))

    def test_heads_that_do_not_divide(self, model: TinyModel) -> None:
        with pytest.raises(ConfigError, match="tensor parallel size 3 does not divide the model's 4 heads"):
            ModelRunner.load(model.path, tp_rank=0, tp_size=3, group=ThreadGroup.create(3)[0])


class TestLogprobs:
    def test_prompt_logprobs_do_not_depend_on_chunks(self, model: TinyModel) -> None:
        params = RowParams(temperature=0.0, num_prompt_logprobs=3, num_logprobs=2)
        prompt = list(range(20, 60))
        with torch.no_grad():
            logits = model.reference()(torch.tensor([prompt])).logits[0].log_softmax(-1)
        for chunks in ([40], [1, 13, 26], [39, 1]):
            _, hand = start(model)
            row = hand.add(prompt, params)
            other = hand.add(PROMPTS[0])
            hand.step({other: 7, row: chunks[0]})
            for chunk in chunks[1:]:
                hand.step({row: chunk, other: 1})
            entries = [e for output in hand.outputs for e in (output.prompt_logprobs or {}).get(row, [])]
            assert len(entries) == 39
            assert all(set(output.prompt_logprobs or {}) <= {row} for output in hand.outputs)
            for position, entry in enumerate(entries, start=1):
                best = logits[position - 1].topk(3)
                assert entry.token_ids == [prompt[position], *best.indices.tolist()]
                expected = [logits[position - 1, prompt[position]], *best.values]
                np.testing.assert_allclose(entry.logprobs, expected, atol=1e-4)
                assert entry.rank == int((logits[position - 1] >= expected[0]).sum())
            final = hand.outputs[-1].logprobs
            assert final is not None
            sampled = final[list(hand.outputs[-1].rows).index(row)]
            assert sampled is not None
            assert sampled.token_ids[0] == sampled.token_ids[1] == int(logits[-1].argmax())

    def test_recomputed_output_is_not_prompt(self, model: TinyModel) -> None:
        """After a preemption the row computes its output again, but only prompt tokens are scored."""
        _, hand = start(model)
        row = hand.add(list(range(30)), RowParams(temperature=0.0, num_prompt_logprobs=0), prompt_len=20)
        hand.prefill(row, [15, 15])
        assert [len(o.prompt_logprobs[row]) for o in hand.outputs if o.prompt_logprobs] == [15, 4]


class TestMover:
    def test_called_around_each_step_and_layer(self, model: TinyModel) -> None:
        calls: list[tuple[str, int]] = []

        class Mover:
            def bind(self, layers: Any, caches: Any) -> None:
                assert sorted(i for group in layers for i in group) == [0, 1, 2]
                assert all(len(tensors) == 2 for tensors in caches)

            def before_step(self, step_id: int, waits: bool) -> None:
                assert not waits
                calls.append(("before", step_id))

            def wait_layer(self, layer_idx: int) -> None:
                calls.append(("layer", layer_idx))

            def after_step(self, step_id: int) -> None:
                calls.append(("after", step_id))

            def close(self) -> None:
                calls.append(("close", 0))

        _, hand = start(model, mover=Mover())
        hand.prefill(hand.add(PROMPTS[0]), [7])
        assert calls == [("before", 1), ("layer", 0), ("layer", 1), ("layer", 2), ("after", 1)]


class TestInvariance:
    def test_bits_do_not_depend_on_batch_or_chunks(self, model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
        """batch_invariant: the logits of a row are the same bits alone, in a batch, in chunks, after a prefix hit."""
        prompt = list(range(7, 70))

        def logits_of(schedule: list[dict[int, int]], others: int) -> torch.Tensor:
            runner, hand = start(model, batch_invariant=True)
            seen: list[torch.Tensor] = []
            finish = runner.assembly.model.finish

            def record(carried: Any, idx: torch.Tensor) -> torch.Tensor:
                seen.append(finish(carried, idx))
                return seen[-1].clone()

            monkeypatch.setattr(runner.assembly.model, "finish", record)
            hand.add(prompt)
            for i in range(others):
                hand.add(PROMPTS[i % 3] + [i])
            last = torch.empty(0)
            for work in schedule:
                hand.step(work)
                if hand.outputs[-1].num_tokens[list(work).index(0)]:
                    sampling = [row for row, n in zip(work, hand.outputs[-1].num_tokens, strict=True) if n]
                    last = seen[-1][sampling.index(0)]
            return last

        alone = logits_of([{0: 63}, {0: 1}], others=0)
        chunks = logits_of([{0: 31}, {0: 1}, {0: 31}, {0: 1}], others=0)
        crowd = logits_of([{2: 5, 0: 31, 1: 8}, {1: 1, 0: 32, 3: 11}, {3: 1, 0: 1, 2: 1, 1: 1}], others=3)
        assert torch.equal(alone, chunks)
        assert torch.equal(alone, crowd)
