"""Conversations in turns over a pool that holds few of them: what the tiers below spare the device.

Blocks go down while their sessions run, and are gone from device and host before the next turn: each turn's prefix has
to come back from the disk. The fake mover ends copies late and in any order.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from lamella.engine.core import CoreOptions, EngineCore
from lamella.engine.executor.in_process import InProcess
from lamella.engine.request import Request, SamplingParams
from lamella.engine.testing.fake_mover import FakeMover, Faults
from lamella.engine.wire import Stats
from lamella.kvtier import TierPlan
from lamella.kvtier.testing.fake_clock import FakeClock
from lamella.runner_v2.step import Step
from lamella.runner_v2.testing.fake_runner import FakeModel, FakeRunner

BLOCK_SIZE, TURN_LEN, NUM_ROWS = 4, 16, 4


class Replay(NamedTuple):
    chats: list[list[int]]
    stats: Stats


class TimedExecutor(InProcess):
    """A step takes 50 ms."""

    clock: FakeClock

    def submit(self, step: Step) -> None:
        self.clock.advance(0.05)
        super().submit(step)


def replay(sessions: int, turns: int, host_tokens: int, seed: int, delay: float = 0.5) -> Replay:
    """Turns of all sessions in order, on a device pool for NUM_ROWS sessions. host_tokens: 0 for no tiers."""
    session_len = 2 * turns * TURN_LEN
    runner = FakeRunner(FakeModel(200, (None,), fail_id=None), block_size=BLOCK_SIZE, max_num_rows=NUM_ROWS)
    clock = FakeClock()
    mover = FakeMover(lambda: runner._memory, random.Random(seed), Faults(delay=delay))
    executor = TimedExecutor(runner, mover=mover if host_tokens else None)
    executor.clock = clock
    core = EngineCore(
        executor,
        executor.open(),
        CoreOptions(
            max_model_len=session_len,
            max_num_seqs=NUM_ROWS,
            max_num_batched_tokens=128,
            num_blocks=(NUM_ROWS * session_len // BLOCK_SIZE + 9,),
            tiers=TierPlan(host_slots=(host_tokens // BLOCK_SIZE,), has_disk=True) if host_tokens else None,
            patience=lambda _: 2.0,
        ),
        clock=clock.now,
        draw_seed=lambda: 7,
    )
    rng = random.Random(seed)
    chats: list[list[int]] = [[] for _ in range(sessions)]
    for turn in range(turns):
        for n, chat in enumerate(chats):
            chat += [rng.randrange(3, 200) for _ in range(TURN_LEN)]
            params = SamplingParams(max_tokens=TURN_LEN, temperature=0.0, ignore_eos=True)
            core.add(Request(f"{turn}-{n}", list(chat), params, TURN_LEN, []))
        while core.has_work:
            clock.advance(0.005)
            batch = core.run_once()
            for delta in batch.deltas if batch is not None else []:
                chats[int(delta.request_id.split("-")[1])] += delta.token_ids
        core.check()
    stats = core.stats()
    core.close()
    return Replay(chats, stats)


@pytest.mark.parametrize(
    ("sessions", "turns", "host_tokens", "least"),
    [
        (50, 8, 50 * 256 // 10, 0.9),  # a tenth of all KV, five sessions
        (12, 4, 12 * 128 // 3, 0.85),
        (12, 4, 160, 0.5),  # little more than one session: most of what is sealed only passes through
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_prefix_is_computed_once(sessions: int, turns: int, host_tokens: int, least: float, seed: int) -> None:
    alone = replay(sessions, turns, 0, seed)
    tiers = replay(sessions, turns, host_tokens, seed)
    assert tiers.chats == alone.chats
    # all but the user's turn and the last, open block of the answer before it
    needed = sessions * (TURN_LEN + (turns - 1) * (TURN_LEN + BLOCK_SIZE))
    whole = alone.stats.computed_prompt_tokens - needed
    spared = alone.stats.computed_prompt_tokens - tiers.stats.computed_prompt_tokens
    assert spared >= least * whole, f"{spared} of {whole} tokens were spared"


@pytest.mark.parametrize("delay", [0.0, 0.8])
def test_blocks_go_down_once_though_the_host_is_small(delay: float) -> None:
    stats = replay(12, 4, 160, seed=2, delay=delay).stats
    host, disk = stats.tiers["host"], stats.tiers["disk"]
    sealed = 12 * (128 // BLOCK_SIZE - 1)
    block_bytes = disk.bytes_in // disk.num_blocks
    assert disk.num_blocks >= 0.9 * sealed
    assert host.bytes_in / block_bytes <= 1.2 * sealed
