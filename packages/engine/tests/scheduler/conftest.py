"""A scheduler with a fake runner behind it, driven step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from lamella.engine.core import tier_layout
from lamella.engine.request import Delta, Request, SamplingParams
from lamella.engine.scheduler.config import SchedulerConfig
from lamella.engine.scheduler.scheduler import Scheduler
from lamella.kvtier import TierManager
from lamella.kvtier.testing.fake_clock import FakeClock
from lamella.runner_v2.step import KvLayout, Step
from lamella.runner_v2.testing.fake_runner import FakeModel, FakeRunner


class Rig:
    """scheduler.plan → runner → scheduler.commit, with as many steps in flight as a test wants."""

    def __init__(
        self,
        *,
        num_blocks: int | tuple[int, ...] = 100,
        block_size: int = 4,
        model: FakeModel | None = None,
        max_model_len: int = 64,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 64,
        max_num_drafts: int = 0,
        lookahead: int = 0,
        draft_methods: tuple[str, ...] = (),
        **config: Any,
    ) -> None:
        self.runner = FakeRunner(
            model,
            block_size=block_size,
            max_num_rows=max_num_seqs,
            max_num_drafts=max_num_drafts,
            lookahead=lookahead,
            num_methods=max(1, len(draft_methods)),
        )
        report = self.runner.open()
        counts = (num_blocks,) * len(report.groups) if isinstance(num_blocks, int) else num_blocks
        layout = KvLayout(counts)
        self.runner.allocate(layout)
        self.manager = TierManager(tier_layout(report, layout, ""))
        self.clock = FakeClock(100.0)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_chunk_len=self.manager.max_chunk_len(max_model_len),
                max_num_drafts=max_num_drafts,
                lookahead=lookahead,
                draft_methods=draft_methods,
                **config,
            ),
            self.manager,
            clock=self.clock.now,
            draw_seed=lambda: 3,
        )
        self.books = self.scheduler.books
        self.in_flight: deque[Step] = deque()
        self.num_added = 0

    def add(self, prompt: list[int], max_tokens: int = 8, **fields: Any) -> Request:
        """Queue a request; sampling parameters and request fields by name."""
        request_fields = {"priority", "cache_salt", "use_prefix_cache", "eos_ids"}
        own = {name: fields.pop(name) for name in request_fields & fields.keys()}
        eos_ids = own.pop("eos_ids", [])
        params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, "seed": 11, **fields})
        request = Request(f"r{self.num_added}", prompt, params, max_tokens, eos_ids, **own)
        self.num_added += 1
        self.scheduler.add(request)
        return request

    def plan(self) -> Step | None:
        """Plan a step and put it in flight."""
        step = self.scheduler.plan()
        if step is not None:
            self.in_flight.append(step)
        return step

    def commit(self) -> list[Delta]:
        """Run and commit the oldest step in flight."""
        deltas = self.scheduler.commit(self.runner.step(self.in_flight.popleft()))
        self.manager.check()
        return deltas

    def step(self) -> list[Delta]:
        """Plan and commit."""
        assert self.plan() is not None
        return self.commit()

    def finish(self, limit: int = 200) -> dict[tuple[str, int], list[Delta]]:
        """Step until nothing is left; deltas by sequence."""
        told: dict[tuple[str, int], list[Delta]] = {}
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            step = self.plan()
            if step is not None or self.in_flight:
                for delta in self.commit():
                    told.setdefault((delta.request_id, delta.index), []).append(delta)
        assert not self.scheduler.has_work
        assert self.manager.in_use == 0.0
        return told


def ids_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@pytest.fixture
def rig() -> Callable[..., Rig]:
    return Rig


@pytest.fixture
def ids() -> Callable[[list[Delta]], list[int]]:
    return ids_of
