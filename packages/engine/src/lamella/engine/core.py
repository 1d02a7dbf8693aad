"""The engine core: requests in, deltas out, one step after another.

    add, abort ─▶ inbox ─▶ run_once: drain ─▶ plan ─▶ submit ─▶ poll ─▶ commit ─▶ Batch

It owns scheduler, block manager and executor and is driven by one thread. It holds no clock, socket or thread of its
own. A broken invariant, or a worker that died, is raised out of run_once: the core is over, and its owner reports it.
"""

from __future__ import annotations

import logging
import secrets
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lamella.engine.errors import CapacityError, EngineDeadError, EngineError, RequestError
from lamella.engine.executor.protocol import Alone, Executor, Rendezvous
from lamella.engine.request import Delta, Request
from lamella.engine.scheduler.config import PolicyName, SchedulerConfig, no_patience
from lamella.engine.scheduler.cost import FLAT, TokenCost
from lamella.engine.scheduler.limits import check_request
from lamella.engine.scheduler.scheduler import Scheduler
from lamella.engine.wire import Batch, CoreInfo, SpecInfo, Stats, TierFigures, parse_sequence_id
from lamella.kvtier import Group, KvTierError, Layout, TierEvent, TierManager, TierPlan
from lamella.runner_v2.errors import RunnerError
from lamella.runner_v2.step import KvLayout, RankReport

log = logging.getLogger("lamella.core")

SETTLE_S = 2.0
"""What a core that is closed waits for copies that are under way."""
FIGURES_S = 0.25
"""The figures of the tiers in a batch's stats are no older."""
COPY_WAIT_S = 0.005
"""A round in which nothing can be computed waits no longer for a copy: requests come in between rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreOptions:
    """How a core runs; resolved."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: tuple[int, ...]
    """Blocks per group on each rank, the null block included."""
    max_num_drafts: int = 0
    draft_costs: Sequence[tuple[int, float]] | None = None
    """(tokens, seconds) of steps: verify as many drafts as pay by it. None: all."""
    draft_methods: tuple[str, ...] = ()
    """Names of the drafters, in the order in which the runner numbers them."""
    draft_rule: str = "standard"
    """By which drafts are kept."""
    draft_rule_exact: bool = True
    """It keeps the target's law."""
    token_cost: TokenCost = FLAT
    """How much longer a token takes in a long context; the scheduler cuts chunks by it."""
    policy: PolicyName = "fcfs"
    prefix_caching: bool = True
    model: str = ""
    """Identity of the weights, for the fingerprint of the cache."""
    tiers: TierPlan | None = None
    """What lies below the device; None: nothing, and the executor needs no mover."""
    patience: Callable[[int], float] = no_patience
    """Seconds that a sequence waits for a tier to bring a prompt of so many tokens."""
    holds_restores: bool = False
    """Whoever enters beside sequences that decode lets his copies from the host end first."""
    report: dict[str, Any] = field(default_factory=dict)
    """Goes into CoreInfo as it is."""


class EngineCore:
    """Satisfies core_loop.Core."""

    def __init__(
        self,
        executor: Executor,
        reports: Sequence[RankReport],
        options: CoreOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw_seed: Callable[[], int] | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        """executor is open, and reports is what open() returned; KV is allocated here. clock: seconds, monotonic.
        draw_seed: 64 random bits for each sequence whose request gives no seed.

        Raises CapacityError if the KV cache cannot hold one sequence of max_model_len tokens.
        """
        report = reports[0]
        layout = KvLayout(options.num_blocks)
        executor.allocate(layout)
        self._executor = executor
        self._manager = TierManager(tier_layout(report, layout, options.model), tiers=options.tiers)
        self._moves = options.tiers is not None
        try:
            max_chunk_len = self._manager.max_chunk_len(options.max_model_len + report.lookahead) - report.lookahead
        except KvTierError as error:
            raise CapacityError(str(error)) from error
        self._config = SchedulerConfig(
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_chunk_len=max_chunk_len,
            token_cost=options.token_cost,
            policy=options.policy,
            prefix_caching=options.prefix_caching,
            max_num_drafts=options.max_num_drafts,
            draft_costs=options.draft_costs,
            draft_methods=options.draft_methods,
            draft_rule=options.draft_rule,
            draft_rule_exact=options.draft_rule_exact,
            lookahead=report.lookahead,
            patience=options.patience,
            holds_restores=options.holds_restores,
        )
        self._scheduler = Scheduler(
            self._config,
            self._manager,
            clock=clock,
            draw_seed=draw_seed or (lambda: secrets.randbits(64)),
        )
        self._vocab_size = report.vocab_size
        self._clock = clock
        self._agree = (rendezvous or Alone()).agree
        self._inbox: list[Request | tuple[str, int | None]] = []
        self._queued: dict[str, array[int]] = {}
        """Id of each request in the inbox -> its prompt, packed."""
        self._untold: list[Delta] = []
        """For the next batch: refusals, and what steps said that ended before a call."""
        self._told = (False, 0, 0)
        """has_work, sequences that run and that wait, as of the last batch."""
        self._num_in_flight = 0
        self._figures: dict[str, TierFigures] = {}
        self._figures_s = float("-inf")
        self._schedule_s = 0.0
        self.closed = False
        self.info = CoreInfo(
            max_model_len=options.max_model_len,
            vocab_size=report.vocab_size,
            num_blocks=list(layout.num_blocks),
            block_size=self._manager.block_size,
            kv_tokens=kv_tokens(report, layout),
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            report=options.report,
            speculation=spec_info(options),
        )

    @property
    def has_work(self) -> bool:
        """A request has not ended, a step is in flight, or something still has to be told."""
        return bool(self._inbox or self._untold or self._scheduler.has_work or self._manager.busy)

    def submit(self, request: Request) -> None:
        """Queue a request for the next round.

        Raises RequestError if it can never be served.
        """
        if request.request_id in self._queued or request.request_id in self._scheduler.books.requests:
            raise RequestError(f"request id {request.request_id!r} is in use", "request_id")
        packed = check_request(request, self._config, self._manager, self._vocab_size)
        self._inbox.append(request)
        self._queued[request.request_id] = packed

    def add(self, request: Request) -> None:
        """Queue a request for the next round; what is wrong with it comes back as a delta of each of its sequences."""
        try:
            self.submit(request)
        except EngineError as error:
            self._untold += [
                Delta(request.request_id, index, [], "error", error=str(error), error_status=error.status)
                for index in range(request.params.n)
            ]

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests, or single sequences named as by wire.sequence_id, at the next round. Nothing more is told of
        them; unknown and ended ones are ignored."""
        self._inbox += [parse_sequence_id(name) for name in request_ids]

    def run_once(self) -> Batch | None:
        """One round. Up to executor.depth steps are in flight; returns what the oldest one's result says.

        Without deltas there is a batch for its stats if sequences came, began or went; else None.
        """
        if self._moves and not self._num_in_flight:
            self._untold += self._take_results(0.0)
        started = self._clock()
        self._drain_inbox()
        while self._num_in_flight < self._executor.depth and (step := self._scheduler.plan()) is not None:
            common = self._agree(step.common)
            self._schedule_s += self._clock() - started
            if self._moves:
                self._move()  # before the step: what it reads of the host tier is on its way when it starts
            self._executor.submit(step if common is step.common else step._replace(common=common))
            self._num_in_flight += 1
            started = self._clock()
        self._schedule_s += self._clock() - started
        if self._moves:
            self._move()
        batch = self._batch(self._take_results())
        assert self.has_work or self._manager.in_use == 0.0, "an idle core holds blocks"
        return batch

    def call(self, method: str, args: Mapping[str, Any]) -> Any:
        """An operation between steps: `stats`, `reset_prefix_cache`, or one of the workers (a list, one entry per
        rank). Steps in flight end first, and their deltas come with the next round. EngineError if it is unknown."""
        if method == "stats":
            return self.stats()
        self._drain_inbox()
        while self._num_in_flight:
            self._untold += self._take_results()
        if method == "reset_prefix_cache":
            self._manager.reset_prefix_cache()
            return True
        try:
            return self._executor.call(method, args)
        except (RunnerError, TypeError) as error:  # unknown operation, or arguments that it does not take
            raise EngineError(str(error)) from error

    def stats(self) -> Stats:
        """Counters and gauges."""
        stats = self._scheduler.snapshot()
        stats.schedule_seconds = self._schedule_s
        if self._moves:
            self._figures_s = self._clock()
            self._figures = stats.tiers = tier_figures(self._manager)
        return stats

    def check(self) -> None:
        """Assert every invariant of the block manager. Walks all blocks: for tests."""
        self._manager.check()

    def close(self) -> None:
        """Free the devices. Requests that still run are lost; blocks on their way to a slower tier get SETTLE_S."""
        if not self.closed and self._moves and not self._num_in_flight:
            self._settle()
        self.closed = True
        self._executor.close()

    # ---- private ---------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Wait for copies; what is lost of them is a miss next time."""
        deadline_s = self._clock() + SETTLE_S
        try:
            while self._manager.busy and self._clock() < deadline_s:
                self._take_results()
        except EngineDeadError:
            log.warning("the worker died before the last blocks were copied")

    def _drain_inbox(self) -> None:
        if not self._inbox:
            return
        inbox, self._inbox = self._inbox, []
        queued, self._queued = self._queued, {}
        for entry in inbox:
            if isinstance(entry, Request):
                self._scheduler.add(entry, queued[entry.request_id])
            else:
                self._scheduler.abort(*entry)

    def _move(self) -> None:
        """Hand over the copies that the books ask for."""
        jobs = self._manager.take_jobs()
        if jobs:
            self._executor.copy(jobs)

    def _take_results(self, patience_s: float = COPY_WAIT_S) -> list[Delta]:
        """Wait for the oldest step in flight, or up to patience_s for a copy if there is none but copies; commit what
        has ended."""
        if not self._num_in_flight and not self._moves:
            return []
        events = self._executor.poll(None if self._num_in_flight else patience_s if self._manager.busy else 0.0)
        if events.died is not None:
            raise EngineDeadError(f"worker {events.died.rank} died: {events.died.reason}")
        started = self._clock()
        if events.tickets:
            self._take_tickets(events.tickets)
        deltas: list[Delta] = []
        for output in events.outputs:
            self._num_in_flight -= 1
            deltas += self._scheduler.commit(output)
        self._schedule_s += self._clock() - started
        return deltas

    def _take_tickets(self, events: Sequence[TierEvent]) -> None:
        """Before the outputs of steps that waited for these copies: where one failed, they are not true."""
        manager = self._manager
        manager.complete_all(events)
        suspects = manager.take_poisoned()
        if suspects:
            self._scheduler.books.distrust(suspects)
        self._move()  # what a copy that ended makes possible

    def _batch_stats(self) -> Stats:
        """For every batch: the tiers' figures may be a little old."""
        if not self._moves or self._clock() - self._figures_s >= FIGURES_S:
            return self.stats()
        stats = self._scheduler.snapshot()
        stats.schedule_seconds = self._schedule_s
        stats.tiers = self._figures
        return stats

    def _batch(self, deltas: list[Delta]) -> Batch | None:
        if self._untold:
            deltas = self._untold + deltas
            self._untold = []
        books = self._scheduler.books
        books.sweep()
        counts = (self._scheduler.has_work, books.num_running, books.num_waiting)
        if not deltas and counts == self._told:
            return None
        self._told = counts
        return Batch(deltas, self._batch_stats())


def tier_figures(manager: TierManager) -> dict[str, TierFigures]:
    """What the manager counts of each tier, as it crosses the process border."""
    names = TierFigures.__struct_fields__
    return {
        tier: TierFigures(**{name: getattr(stats, name) for name in names})
        for tier, stats in manager.tier_stats().items()
    }


def spec_info(options: CoreOptions) -> SpecInfo | None:
    """What clients may know of its speculation; None: it has none."""
    if not options.max_num_drafts:
        return None
    return SpecInfo(
        list(options.draft_methods),
        options.max_num_drafts,
        options.draft_rule,
        options.draft_rule_exact,
        options.draft_costs is not None,
    )


def kv_tokens(report: RankReport, layout: KvLayout) -> int:
    """Tokens whose KV the cache holds: of full groups all, else the windows of one sequence after the other."""
    counts = [(n - 1) * g.block_size for g, n in zip(report.groups, layout.num_blocks) if g.kind == "full"]
    return min(counts or [(n - 1) * g.block_size for g, n in zip(report.groups, layout.num_blocks)])


def tier_layout(report: RankReport, layout: KvLayout, model: str) -> Layout:
    """The runner's groups in the block manager's words."""
    groups = tuple(
        Group(g.name, g.kind, g.block_size, g.bytes_per_block, window=g.window, row_format=g.row_format)
        for g in report.groups
    )
    return Layout(groups, layout.num_blocks, model)


__all__ = ["CoreOptions", "EngineCore", "kv_tokens", "tier_layout"]
