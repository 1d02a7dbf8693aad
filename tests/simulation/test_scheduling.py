"""Scheduler, block manager and executor over the fake runner, in worlds made up from a seed.

Whatever arrives, is aborted, preempted, drafted or cached: every sequence must get exactly the ids that it gets when it
runs alone, and the books must hold after each round. The fake runner computes ids from its own KV blocks, so that a
wrong block shows as a wrong id.

    hatch run sim                                                   many seeds
    hatch run sim --seed 17                                         one of them
"""

from __future__ import annotations

import random
from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.engine.core import CoreOptions, EngineCore
from lamella.engine.executor.in_process import InProcess
from lamella.engine.request import Delta, Logprob, Request, SamplingParams
from lamella.engine.scheduler.config import PolicyName
from lamella.engine.scheduler.cost import TokenCost
from lamella.engine.sequence import State, row_params
from lamella.engine.testing.fake_mover import FakeMover, Faults
from lamella.engine.wire import sequence_id
from lamella.kvtier import AdmissionPlan, CostModel, TierPlan
from lamella.kvtier.testing.fake_clock import FakeClock
from lamella.runner_v2.step import Step, TokenLogprobs, Work
from lamella.runner_v2.testing.fake_runner import FakeModel, FakeRunner

WINDOWS: list[tuple[int | None, ...]] = [(None,), (None,), (5,), (None, 6), (None, 3, 9)]
EOS, STOP, FAIL = 0, 1, 2


@dataclass(frozen=True)
class World:
    """What a simulation is about. Pools are small: preemption is the rule."""

    windows: tuple[int | None, ...]
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: tuple[int, ...]
    depth: int
    threaded: bool
    max_num_drafts: int
    lookahead: int
    policy: PolicyName
    prefix_caching: bool
    num_requests: int
    arrival_rate: float
    abort_rate: float
    reset_rate: float
    token_cost: TokenCost
    tiers: TierPlan | None = None
    faults: Faults = field(default_factory=Faults)
    patience_s: float = 0.0
    draft_costs: tuple[tuple[int, float], ...] | None = None

    @property
    def holds_restores(self) -> bool:
        return self.max_model_len % 2 == 1

    @staticmethod
    def draw(rng: random.Random, scale: int) -> World:
        """scale: 1 for small worlds. A world without tiers does not depend on whether others have some."""
        world = World._draw(rng, scale)
        # the share of a plain step that a draft costs; of the worlds' numbers, so that no other draw changes
        costs = (None, (0.001, 0.3, 0.7)[world.max_model_len % 3])[world.num_requests % 2]
        if costs is not None:
            world = replace(world, draft_costs=((1, 1.0), (2, 1.0 + costs)))
        if rng.random() < 0.5:
            return world
        num_slots = rng.choice((1, 3, 8, 30 * scale))
        admission = rng.choice(
            (AdmissionPlan(), AdmissionPlan("reused", rng.choice((0, 2))), AdmissionPlan("all", 0, 0.5))
        )
        cost = CostModel()
        if rng.random() < 0.3:
            cost = CostModel({"disk": 50.0}, {}, rng.choice((0.1, 1.0, 10.0)), 0.01)
        return replace(
            world,
            threaded=False,
            tiers=TierPlan(
                host_slots=tuple(num_slots for _ in world.windows),
                eviction=rng.choice(("lru", "s3fifo")),
                admission=admission,
                has_disk=rng.random() < 0.6,
                externals=rng.choice(((), (), ("far",), ("near", "far"))),
                max_demoting=rng.choice((1, 4, 100)),
                max_storing=rng.choice((1, 4, 100)),
                max_waiting=rng.choice((2, 1000)),
                max_storing_share=rng.choice((0.1, 0.5, 1.0)),
                max_loading_share=rng.choice((0.3, 1.0)),
                cost=cost,
            ),
            faults=Faults(
                fail=rng.choice((0.0, 0.0, 0.1, 0.5)),
                delay=rng.choice((0.0, 0.3, 0.9)),
                forget=rng.choice((0.0, 0.2)),
                lie=rng.choice((0.0, 0.3)),
            ),
            patience_s=rng.choice((0.3, 3.0, 1000.0)),
        )

    @staticmethod
    def _draw(rng: random.Random, scale: int) -> World:
        windows = rng.choice(WINDOWS)
        block_size = rng.choice((1, 2, 2, 4, 4, 8))
        max_model_len = rng.randrange(10, 20 + 16 * scale)
        max_num_seqs = rng.randrange(1, 4 + 3 * scale)
        depth = rng.choice((1, 1, 2, 3))
        max_num_drafts = rng.choice((0, 0, 1, 3))
        lookahead = rng.choice((0, max_num_drafts))
        slack = rng.choice((0, 2, 6, 20))
        return World(
            windows=windows,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.choice((0, 1, 5, 30)),
            num_blocks=tuple(
                1
                + least_blocks(w, block_size, max_model_len + lookahead, depth * (1 + max_num_drafts) + lookahead)
                + rng.randrange(slack + 1)
                for w in windows
            ),
            depth=depth,
            threaded=rng.random() < 0.02,
            max_num_drafts=max_num_drafts,
            lookahead=lookahead,
            policy=rng.choice(("fcfs", "priority")),
            prefix_caching=rng.random() < 0.85,
            num_requests=rng.randrange(1, 1 + 4 * scale),
            arrival_rate=rng.choice((0.2, 0.7, 1.0)),
            abort_rate=rng.choice((0.0, 0.0, 0.05, 0.2)),
            reset_rate=rng.choice((0.0, 0.0, 0.05)),
            token_cost=TokenCost(rng.choice((0.0, 0.0, 0.05, 1.0)), rng.choice((1, 3))),
        )


def least_blocks(window: int | None, block_size: int, max_len: int, in_flight: int) -> int:
    """Blocks with which one sequence can run alone."""
    whole = -(-max_len // block_size)
    return whole if window is None else min(whole, -(-(window + in_flight) // block_size) + 2)


@dataclass
class Expected:
    """A sequence, what it must get, and what it got."""

    ids: list[int]
    reason: str
    stop_reason: int | None
    logprobs: list[Logprob] | None
    prompt_logprobs: list[Logprob | None] | None
    got: list[int] = field(default_factory=list)
    got_logprobs: list[Logprob] = field(default_factory=list)
    started: bool = False
    ended: bool = False
    aborted: bool = False

    def take(self, delta: Delta, prompt_len: int) -> None:
        assert not self.ended, "a delta behind the last one"
        assert not self.aborted, "a delta behind an abort"
        self.got += delta.token_ids
        assert self.got == self.ids[: len(self.got)], f"ids {self.got}, alone {self.ids}"
        if self.logprobs is not None:
            self.got_logprobs += delta.logprobs or []
            assert len(self.got_logprobs) == len(self.got)
            assert self.got_logprobs == self.logprobs[: len(self.got)]
        else:
            assert delta.logprobs is None
        if delta.finish_reason == "error" and not self.started:
            assert delta.prompt_logprobs is None
        elif self.started:
            assert (delta.prompt_logprobs, delta.cached_len) == (None, 0)
        else:
            assert delta.prompt_logprobs == self.prompt_logprobs
            assert 0 <= delta.cached_len < prompt_len
            assert 0 <= delta.restored_len <= delta.cached_len
            assert delta.queued_s >= delta.restore_s >= 0
            assert delta.prefill_s >= 0
        self.started = True
        if delta.finish_reason is not None:
            self.ended = True
            assert delta.finish_reason == self.reason
            assert delta.stop_reason == self.stop_reason
            assert (delta.error is not None) == (self.reason == "error")
            if self.reason != "error":  # drafts may fail with their row before they are told
                assert self.got == self.ids
        else:
            assert delta.token_ids, "an empty delta"


class CheckedExecutor(InProcess):
    """Asserts what every step must respect."""

    world: World
    clock: FakeClock
    core: EngineCore
    decoded: Set[int] = frozenset()
    """Sequences whose prompts were computed before this step."""

    def submit(self, step: Step) -> None:
        work = step.work
        if work is not None:
            assert work.rows, "a step without rows"
            assert len(set(work.rows)) == len(work.rows) <= self.world.max_num_seqs
            assert sum(work.query_lens) <= self.world.max_num_batched_tokens
            assert min(work.query_lens) >= 1
            assert all(0 <= v < q for v, q in zip(work.verify_lens, work.query_lens))
            assert max(work.propose_lens) <= self.world.max_num_drafts
            self.check_cost(work)
            self.check_controls(work)
        books = self.core._scheduler.books
        for sequence in (*books.prefilling, *books.decoding):
            assert sequence.reach < max(sequence.max_len, sequence.prompt_len + 1), "computed beyond the end"
        self.decoded = {s.id for s in books.decoding}
        self.clock.advance(0.125)
        super().submit(step)

    def check_controls(self, work: Work) -> None:
        """No row makes or verifies more drafts than its request wants."""
        books = self.core._scheduler.books
        sequences = {s.row: s for s in (*books.prefilling, *books.decoding)}
        for row, verify_len, propose_len in zip(work.rows, work.verify_lens, work.propose_lens):
            params = sequences[row].siblings.request.params
            asked = params.num_speculative_tokens
            most = self.world.max_num_drafts if asked is None else asked
            assert max(verify_len, propose_len) <= (0 if params.disable_spec_decode else most)

    def check_cost(self, work: Work) -> None:
        """Beyond the least of prompt tokens, a step takes no longer than a full one from an empty context on."""
        books, cost = self.core._scheduler.books, self.world.token_cost
        sequences = {s.row: s for s in (*books.prefilling, *books.decoding)}
        reached = [sequences[row].reach for row in work.rows]
        whole = sum(cost.of(end - num, num) for end, num in zip(reached, work.query_lens))
        decoding = {s.row for s in books.decoding if s.id in self.decoded}
        prompt_tokens = sum(num for row, num in zip(work.rows, work.query_lens) if row not in decoding)
        if prompt_tokens > cost.least_tokens:
            last_token = cost.of(self.world.max_model_len, 1)
            assert whole <= cost.of(0, self.world.max_num_batched_tokens) + last_token, "a step that takes too long"


class Simulation:
    """One world, from the first request to the last delta."""

    def __init__(self, seed: int, scale: int = 1) -> None:
        self.rng = random.Random(seed)
        self.world = world = World.draw(self.rng, scale)
        self.model = FakeModel(vocab_size=24, windows=world.windows, fail_id=FAIL if self.rng.random() < 0.3 else None)
        self.runner = FakeRunner(
            self.model,
            block_size=world.block_size,
            max_num_rows=world.max_num_seqs,
            max_num_drafts=world.max_num_drafts,
            lookahead=world.lookahead,
            num_methods=2,
        )
        self.clock = FakeClock()
        self.controls = random.Random(seed + 1)  # of its own, so that no other draw changes
        self.mover = FakeMover(lambda: self.runner._memory, random.Random(seed), world.faults)
        if world.tiers is not None and not world.threaded:
            self.runner.mover, self.mover.late = self.mover, True
        self.executor = CheckedExecutor(
            self.runner,
            depth=world.depth,
            threaded=world.threaded,
            mover=None if world.tiers is None else self.mover,
        )
        self.executor.world, self.executor.clock = world, self.clock
        self.core = EngineCore(
            self.executor,
            self.executor.open(),
            CoreOptions(
                max_model_len=world.max_model_len,
                max_num_seqs=world.max_num_seqs,
                max_num_batched_tokens=world.max_num_batched_tokens,
                num_blocks=world.num_blocks,
                max_num_drafts=world.max_num_drafts,
                policy=world.policy,
                prefix_caching=world.prefix_caching,
                token_cost=world.token_cost,
                draft_costs=world.draft_costs,
                draft_methods=("one", "other"),
                tiers=world.tiers,
                holds_restores=world.holds_restores,
                patience=lambda _: world.patience_s,
            ),
            clock=self.clock.now,
            draw_seed=lambda: 7,
        )
        self.executor.core = self.core
        self.texts = [[self.rng.randrange(3, 24) for _ in range(world.max_model_len)] for _ in range(2)]
        self.requests: dict[str, Request] = {}
        self.told_accepted = self.told_rejected = 0
        self.expected: dict[tuple[str, int], Expected] = {}

    def run(self) -> None:
        """Until everything has ended."""
        rng, world, core = self.rng, self.world, self.core
        num_rounds = 0
        while len(self.requests) < world.num_requests or core.has_work:
            while len(self.requests) < world.num_requests and rng.random() < world.arrival_rate:
                self.arrive()
            if rng.random() < world.abort_rate:
                self.abort()
            if rng.random() < world.reset_rate:
                core.call("reset_prefix_cache", {})
            self.clock.advance(0.001)
            batch = core.run_once()
            for delta in batch.deltas if batch is not None else []:
                request = self.requests[delta.request_id]
                self.told_accepted += delta.accepted_drafts
                self.told_rejected += delta.rejected_drafts
                if delta.accepted_drafts or delta.rejected_drafts:
                    assert delta.accepted_drafts <= len(delta.token_ids)
                    assert not request.params.disable_spec_decode
                self.expected[delta.request_id, delta.index].take(delta, len(request.prompt_ids))
                if request.cache_salt not in (None, "a") and request.params.n == 1:
                    assert delta.cached_len == 0, "a hit across salts"
                assert delta.cached_len == 0 or (request.use_prefix_cache and world.prefix_caching)
            self.check()
            num_rounds += 1
            slow = 1 if world.tiers is None else 40
            assert num_rounds < slow * 200 * (1 + world.num_requests), "it does not come to an end"
        assert all(entry.ended != entry.aborted for entry in self.expected.values())
        core.check()
        stats = core.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
        assert sum(stats.spec_method_draft_tokens.values()) == stats.spec_draft_tokens
        assert sum(stats.spec_method_accepted_tokens.values()) == stats.spec_accepted_tokens
        assert sum(stats.spec_off.values()) == (stats.spec_lens or [0])[0]
        assert self.told_accepted <= stats.spec_accepted_tokens
        assert self.told_rejected <= stats.spec_draft_tokens - stats.spec_accepted_tokens
        assert not core._manager.busy
        core.close()
        assert self.mover.closed == (world.tiers is not None)

    def check(self) -> None:
        """The books, and that whoever ended holds nothing."""
        self.core.check()
        books = self.core._scheduler.books
        holding = [s for s in (*books.prefilling, *books.decoding) if s.state is State.RUNNING]
        holding += [s for s in books.draining if s.state is State.DRAINING]
        assert sorted(self.core._manager._holdings) == sorted(s.id for s in holding)
        assert len(holding) + books.rows.num_free == self.world.max_num_seqs
        for sequence in holding:
            assert sequence.computed_len <= sequence.reach <= sequence.room
            assert sequence.computed_len < sequence.committed_len <= sequence.planned_len
            assert not self.expected[sequence.request_id, sequence.index].ended

    def arrive(self) -> None:
        """A request; its prompt shares a prefix with others'."""
        rng, world = self.rng, self.world
        prompt_len = rng.randrange(1, world.max_model_len)
        prompt = rng.choice(self.texts)[:prompt_len]
        if rng.random() < 0.6:
            prompt[rng.randrange(prompt_len) :] = [rng.randrange(3, 24)]
        if rng.random() < 0.05:
            prompt[-1] = FAIL
        max_tokens = rng.choice((0, 1, 2, 4, 8, 40))
        max_tokens = min(max_tokens, world.max_model_len - len(prompt))
        n = rng.choice((1, 1, 1, 2, 3))
        request = Request(
            request_id=f"r{len(self.requests)}",
            prompt_ids=prompt,
            params=SamplingParams(
                n=n,
                max_tokens=max_tokens,
                min_tokens=rng.choice((0, 0, 0, min(3, max_tokens))),
                temperature=1.0 if n > 1 else rng.choice((0.0, 1.0)),
                seed=rng.randrange(1 << 63),
                stop_token_ids=rng.choice(([], [STOP], [STOP, 20, 21])),
                allowed_token_ids=rng.choice((None, None, None, [EOS, 4, 5, 6])),
                logprobs=rng.choice((None, None, 0, 3)),
                prompt_logprobs=rng.choice((None, None, None, 2)),
                **self.draft_controls(),
            ),
            max_tokens=max_tokens,
            eos_ids=rng.choice(([], [EOS])),
            priority=rng.randrange(3) if world.policy == "priority" else 0,
            cache_salt=rng.choice((None, None, None, "a", f"of r{len(self.requests)} alone")),
            use_prefix_cache=rng.random() < 0.9,
        )
        self.requests[request.request_id] = request
        for index in range(n):
            self.expected[request.request_id, index] = self.alone(request, index)
        self.core.add(request)

    def draft_controls(self) -> dict[str, Any]:
        """What the request says about drafts."""
        rng = self.controls
        if rng.random() < 0.2:
            return {"disable_spec_decode": True}
        return {
            "num_speculative_tokens": rng.choice((None, None, 0, 1, 2, 50)),
            "spec_method": rng.choice((None, None, "one", "other")),
        }

    def alone(self, request: Request, index: int) -> Expected:
        """What a sequence gets when nobody else is there."""
        params = row_params(request, index, 0)
        prompt, model = request.prompt_ids, self.model
        ids: list[int] = []
        prompt_logprobs: list[Logprob | None] | None = None
        if request.params.prompt_logprobs is not None:
            found = model.prompt_logprobs(prompt, request.params.prompt_logprobs)
            prompt_logprobs = [None, *map(as_logprob, found)]
        reason, stop_reason = "length", None
        if model.fail_id in prompt:
            reason = "error"
        else:
            ids = model.generate(prompt, params, request.max_tokens)
            last = ids[-1] if ids else None
            if last in request.eos_ids:
                reason = "stop"
            elif last in request.params.stop_token_ids:
                reason, stop_reason = "stop", last
            if model.fail_id in ids[:-1]:
                ids = ids[: ids.index(FAIL) + 1]
                reason, stop_reason = "error", None
        logprobs = None
        if request.params.logprobs is not None:
            scored = model.prompt_logprobs([*prompt, *ids], request.params.logprobs)
            logprobs = [as_logprob(entry) for entry in scored[len(prompt) - 1 :]]
        return Expected(ids, reason, stop_reason, logprobs, prompt_logprobs)

    def abort(self) -> None:
        """The client goes away, or has found a stop string in one of its sequences."""
        running = [key for key, entry in self.expected.items() if not entry.ended and not entry.aborted]
        if not running:
            return
        request_id, index = self.rng.choice(running)
        whole = self.rng.random() < 0.5
        for key, entry in self.expected.items():
            if key[0] == request_id and (whole or key[1] == index) and not entry.ended:
                entry.aborted = True
        self.core.abort([request_id if whole else sequence_id(request_id, index), "unknown", "unknown#1"])


def as_logprob(entry: TokenLogprobs) -> Logprob:
    return Logprob(entry.token_ids, entry.logprobs, entry.rank)


@settings(deadline=None, derandomize=True, database=None, max_examples=2000)
@given(st.integers(0, 2**40))
def test_random_small_worlds(seed: int) -> None:
    Simulation(seed).run()


@pytest.mark.parametrize("seed", range(40))
def test_a_slice_of_larger_worlds(seed: int) -> None:
    Simulation(seed, scale=3).run()


@pytest.mark.simulation
def test_many_worlds(first_seed: int, num_seeds: int) -> None:
    for seed in range(first_seed, first_seed + num_seeds):
        try:
            Simulation(seed, scale=1 + seed % 4).run()
        except BaseException as error:
            raise AssertionError(f"world {seed}: {error}") from error
