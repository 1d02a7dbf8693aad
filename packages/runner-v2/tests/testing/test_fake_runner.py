from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from lamella.runner_v2.errors import ConfigError
from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.step import KvLayout, Mask, NewBlocks, NewRow, Step, StepOutput, Work
from lamella.runner_v2.testing.fake_runner import FakeModel, FakeRunner

GREEDY = RowParams(temperature=0.0)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def runner(model: FakeModel | None = None, max_num_drafts: int = 0, lookahead: int = 0) -> FakeRunner:
    fake = FakeRunner(model, block_size=4, max_num_drafts=max_num_drafts, lookahead=lookahead)
    fake.allocate(KvLayout((32,) * len(fake.open().groups)))
    return fake


def enter(fake: FakeRunner, row: int, blocks: list[int], query_len: int, **fields: object) -> StepOutput:
    new = NewRow(row, 1, PROMPT, len(PROMPT), 0, GREEDY, (blocks,) * len(fake.model.windows))
    return fake.step(Step(0, added=(new._replace(**fields),), work=Work((row,), (query_len,), (0,), (0,))))


def one(row: int, query_len: int = 1, verify_len: int = 0, propose_len: int = 0) -> Work:
    return Work((row,), (query_len,), (verify_len,), (propose_len,))


def test_it_needs_no_torch() -> None:
    program = "import sys, lamella.runner_v2.testing.fake_runner; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 3)])
@pytest.mark.parametrize("params", [GREEDY, RowParams(seed=8)])
def test_blocks_and_chunks_give_what_a_straight_line_gives(windows: tuple[int | None, ...], params: RowParams) -> None:
    model = FakeModel(windows=windows)
    expected = model.generate(PROMPT, params, 9)
    assert len(set(expected)) > 3
    fake = runner(model)
    output = enter(fake, 2, [7, 3, 9, 1, 5], 4, params=params)
    assert (output.num_tokens, output.token_ids) == ([0], [])
    output = fake.step(Step(1, work=one(2, 6)))
    tokens = output.token_ids
    for n in range(2, 10):
        tokens += fake.step(Step(n, work=one(2) if n == 2 else None)).token_ids
    assert tokens == expected


@pytest.mark.parametrize("lookahead", [0, 3])
def test_drafts_change_speed_and_nothing_else(lookahead: int) -> None:
    fake = runner(max_num_drafts=3, lookahead=lookahead)
    expected = fake.model.generate(PROMPT, GREEDY, 20)
    tokens = enter(fake, 0, list(range(1, 10)), 10).token_ids
    accepted = num_steps = 0
    for n in range(1, 30):
        verify_len = 3 if n > 1 else 0  # more than the row holds, at times
        output = fake.step(Step(n, work=one(0, 1 + verify_len, verify_len, 3)))
        assert output.num_tokens == [len(output.token_ids)]
        tokens += output.token_ids
        accepted += len(output.token_ids) - 1
        num_steps += 1
        if len(tokens) >= 20:
            break
    assert tokens[:20] == expected
    assert accepted > 0
    assert num_steps < 19


def test_a_wrong_table_shows() -> None:
    expected = FakeModel().generate(PROMPT, GREEDY, 2)
    fake = runner()
    first = enter(fake, 0, [1, 2, 3], 10).token_ids
    fake.step(Step(1, added=(NewRow(1, 1, [8] * 4, 4, 0, GREEDY, ([2],)),), work=one(1, 4)))  # overwrites a block
    second = fake.step(Step(2, work=one(0))).token_ids
    assert first == expected[:1]
    assert second != expected[1:]


def test_what_was_never_written_shows() -> None:
    fake = runner()
    enter(fake, 0, [1, 2, 3], 10)
    hit = NewRow(1, 1, PROMPT, 10, 8, GREEDY, ([1, 2, 4],))
    assert fake.step(Step(1, added=(hit,), work=one(1, 2))).token_ids == FakeModel().generate(PROMPT, GREEDY, 1)
    miss = NewRow(2, 1, PROMPT, 10, 8, GREEDY, ([1, 5, 6],))
    assert fake.step(Step(2, added=(miss,), work=one(2, 2))).token_ids != FakeModel().generate(PROMPT, GREEDY, 1)


def test_blocks_left_of_a_window_are_not_read() -> None:
    model = FakeModel(windows=(3,))
    fake = runner(model)
    enter(fake, 0, [1, 2, 3], 10)
    hit = NewRow(1, 1, PROMPT, 10, 8, GREEDY, ([0, 2, 4],))
    assert fake.step(Step(1, added=(hit,), work=one(1, 2))).token_ids == model.generate(PROMPT, GREEDY, 1)
    bad = NewRow(2, 1, PROMPT, 10, 8, GREEDY, ([0, 0, 4],))
    with pytest.raises(AssertionError, match="null block is read"):
        fake.step(Step(2, added=(bad,), work=one(2, 2)))


def test_new_blocks_take_the_place_of_what_lay_behind_their_start() -> None:
    fake = runner()
    tokens = enter(fake, 0, [1, 2, 3, 9, 8], 10).token_ids
    step = Step(1, new_blocks=(NewBlocks(0, 0, [4, 5], 3),), work=one(0))
    tokens += fake.step(step).token_ids
    assert fake.rows[0].tables == [[1, 2, 3, 4, 5]]
    with pytest.raises(AssertionError, match="hole"):
        fake.step(Step(2, new_blocks=(NewBlocks(0, 0, [6], 7),)))


def test_rows_have_owners() -> None:
    fake = runner()
    enter(fake, 0, [1, 2, 3], 10)
    with pytest.raises(AssertionError, match="taken"):
        enter(fake, 0, [4, 5, 6], 10)
    with pytest.raises(AssertionError, match="another owner"):
        fake.step(Step(1, removed=((0, 2),)))
    with pytest.raises(AssertionError, match="not known"):
        enter(fake, 1, [4, 5, 6], 11)


def test_masks_and_other_limits_on_ids() -> None:
    fake = runner()
    words = (1 << 50).to_bytes(8, "little")
    fake.provide(0, [Mask(0, 0, words)])
    new = NewRow(0, 1, PROMPT, 10, 0, GREEDY, ([1, 2, 3],))
    output = fake.step(Step(0, added=(new,), work=one(0, 10), masked_rows=(0,)))
    assert output.token_ids == [50]
    with pytest.raises(AssertionError, match="waits for the mask"):
        fake.step(Step(1, work=one(0), masked_rows=(0,)))
    params = replace(GREEDY, allowed_ids=(7, 8), stop_ids=(7,), min_tokens=3)
    assert fake.model.generate(PROMPT, params, 9)[:3] == [8, 8, 8]


def test_a_failing_row_fails_alone_and_for_good() -> None:
    fake = runner(FakeModel(fail_id=5))
    new = NewRow(1, 1, [1, 2, 3], 3, 0, GREEDY, ([4],))
    bad = NewRow(0, 1, PROMPT, 10, 0, GREEDY, ([1, 2, 3],))
    output = fake.step(Step(0, added=(bad, new), work=Work((0, 1), (10, 3), (0, 0), (0, 0))))
    assert output.failed == ((0, "logits are NaN"),)
    assert output.num_tokens == [0, 1]
    assert output.token_ids == FakeModel(fail_id=5).generate([1, 2, 3], GREEDY, 1)
    assert fake.step(Step(1, work=Work((0, 1), (1, 1), (0, 0), (0, 0)))).failed == ((0, "logits are NaN"),)


def test_logprobs_do_not_depend_on_chunks() -> None:
    params = replace(GREEDY, num_logprobs=2, num_prompt_logprobs=1)
    fake = runner()
    first = enter(fake, 0, [1, 2, 3], 4, params=params)
    second = fake.step(Step(1, work=one(0, 6)))
    assert first.prompt_logprobs is not None
    assert second.prompt_logprobs is not None
    assert first.prompt_logprobs[0] + second.prompt_logprobs[0] == fake.model.prompt_logprobs(PROMPT, 1)
    assert second.logprobs is not None
    assert second.logprobs[0] == fake.model.prompt_logprobs([*PROMPT, *second.token_ids], 2)[-1]


def test_operations_between_steps() -> None:
    fake = runner()
    assert fake.call("echo", a=1) == {"a": 1}
    with pytest.raises(ConfigError, match="echo, num_rows"):
        fake.call("sing")
    fake.close()
    with pytest.raises(AssertionError, match="after close"):
        fake.step(Step(0))
