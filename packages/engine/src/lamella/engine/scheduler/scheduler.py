"""Chooses the work of each step: who computes how many tokens, with which blocks.

    plan()      decoding rows ─▶ chunks of admitted prompts ─▶ admissions ─▶ Step
    commit()    StepOutput ─▶ deltas

There is no prefill phase and no decode phase: every sequence computes from its reach on, up to what the host knows of
it. Several steps may be planned before the first one's result is known; see engine.sequence for the lengths that make
that possible. No torch, clock, thread or file here: the clock and the source of seeds are passed in.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import NamedTuple

from lamella.engine.request import Delta, Request
from lamella.engine.scheduler.books import Books, InFlight
from lamella.engine.scheduler.budget import Budget
from lamella.engine.scheduler.commit import commit
from lamella.engine.scheduler.config import SchedulerConfig
from lamella.engine.scheduler.loading import Turn
from lamella.engine.scheduler.preempt import displace, make_room
from lamella.engine.sequence import Sequence, State
from lamella.engine.wire import Stats
from lamella.kvtier import TierManager
from lamella.runner_v2.step import NewBlocks, NewRow, Step, StepOutput, Work
from lamella.specdec import FixedLength

_NO_WORK = Work((), (), (), ())


class Chunk(NamedTuple):
    """Tokens of a prompt (or of ids known from before a preemption) that a sequence computes in one step."""

    sequence: Sequence
    length: int


class Scheduler:
    """Continuous batching over one TierManager. See SchedulerConfig for its limits."""

    def __init__(
        self,
        config: SchedulerConfig,
        manager: TierManager,
        *,
        clock: Callable[[], float],
        draw_seed: Callable[[], int],
    ) -> None:
        self.books = Books(config, manager, clock, draw_seed)
        self._config = config
        self._manager = manager
        self._draft_lens = FixedLength(config.max_num_drafts) if config.max_num_drafts else None
        self._next_step_id = 0
        self._last_work = _NO_WORK
        self._refused: tuple[int, int] | None = None
        """(sequence, blocks released so far) of the last admission that did not fit."""

    def add(self, request: Request, packed: array[int] | None = None) -> None:
        """Queue a request that has been checked (see limits.py). packed: what the check returned; None: packed here."""
        self.books.add(request, packed)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its sequences. No delta; unknown and ended ones are ignored."""
        siblings = self.books.requests.get(request_id)
        if siblings is None:
            return
        for sequence in reversed(siblings.sequences):  # those that wait for the first one before it
            if not sequence.ghost and index in (None, sequence.index):
                self.books.abort(sequence)

    @property
    def has_work(self) -> bool:
        """A sequence has not ended, or a step is in flight."""
        return bool(self.books.requests or self.books.in_flight)

    def plan(self) -> Step | None:
        """The next step, or None if there is nothing that could be computed now. Assumes what is planned is submitted.

        Steps in flight: decoding rows go on without their results; a row whose drafts or tokens in flight may already
        end it is left out until they have committed.
        """
        books, config = self.books, self._config
        if books.loading:
            books.take_loaded()
        books.sweep()
        step_id = self._next_step_id
        rows = [s for s in books.decoding if s.reach + 1 < s.max_len]
        budget = Budget(config.max_num_batched_tokens, config.max_chunk_len, config.token_cost)
        budget.take_rows(len(rows))
        if config.max_num_drafts:
            self._fit_drafts(rows, budget)
        if config.token_cost.slope:
            # a row's token and drafts stand at reach, reach + 1, …
            budget.take_contexts(sum([s.reach * (1 + s.drafts) + s.drafts * (s.drafts + 1) // 2 for s in rows]))
        chunks = self._chunks(budget, self._held(rows))
        new_blocks, preempted = self._cover(rows, chunks)
        if preempted:
            rows = [s for s in rows if s.state is State.RUNNING and s.reach + s.drafts < s.room]
            chunks = [c for c in chunks if c.sequence.state is State.RUNNING and self._covered(c)]
            books.sweep()
        batch = _Batch(step_id, self._draft_lens)
        batch.add_rows(rows)
        for chunk in chunks:
            batch.add_chunk(chunk)
        added = [] if preempted or books.draining else self._admit(batch, budget)
        if not batch.sequences:
            return None
        if batch.num_chunks:
            self._regroup()
        work = batch.work()
        books.in_flight.append(InFlight(step_id, batch.sequences, work.query_lens, work.verify_lens))
        self._next_step_id += 1
        same = work == self._last_work
        self._last_work = work
        readers = self._manager.copy_readers()
        return Step(
            step_id,
            books.rows.take_removed(),
            tuple(added),
            tuple(new_blocks),
            None if same else work,
            waits_for_copies=bool(readers) and not readers.isdisjoint([s.id for s in batch.sequences]),
        )

    def commit(self, output: StepOutput) -> list[Delta]:
        """Take the result of the oldest step in flight into the books."""
        return commit(self.books, output)

    def snapshot(self) -> Stats:
        """Counters and gauges."""
        return self.books.snapshot()

    # ---- private ---------------------------------------------------------------------------------------------------

    def _fit_drafts(self, rows: Seq[Sequence], budget: Budget) -> None:
        """Verify those drafts that pay, and no more than there are tokens for; count what was decided."""
        adaptive = self.books.adaptive
        held = [s.drafts for s in rows]
        paying = held
        if adaptive is not None:
            paying = adaptive.choose([s.streak for s in rows], held, [s.held_method for s in rows])
        num_drafts = sum(paying)
        fitting = paying
        if num_drafts <= budget.left:
            budget.take_drafts(num_drafts)
        else:
            fitting = [budget.take_drafts(count) for count in paying]
        lengths = self.books.lengths
        for place, (sequence, count) in enumerate(zip(rows, fitting)):
            sequence.drafts = count
            lengths.observe(count, held[place])
            if not count:
                lengths.observe_off(self._why_none(sequence, held[place], paying[place]))

    def _why_none(self, sequence: Sequence, held: int, paying: int) -> str:
        """A decoding row verifies no draft: the reason, as metrics name it."""
        if sequence.never_drafts is not None:
            return sequence.never_drafts
        if not held:
            return "nothing_found" if sequence.asked_drafts else "last_token"
        if paying:
            return "token_budget"
        assert self.books.adaptive is not None
        return "measuring" if self.books.adaptive.measures else "not_paying"

    def _held(self, rows: Seq[Sequence]) -> set[int]:
        """Sequences that do not compute in this step, because it would wait for their copies and rows that decode with
        it. Empty where nothing decodes, or it waits anyway."""
        readers = self._manager.copy_readers() if rows and self._config.holds_restores else set()
        return readers if readers.isdisjoint([s.id for s in rows]) else set()

    def _chunks(self, budget: Budget, held: set[int]) -> list[Chunk]:
        """Share what is left of the budget among admitted prompts that are not held, in the order of the policy."""
        chunks: list[Chunk] = []
        for sequence in self.books.prefilling:
            if sequence.id in held:
                continue
            length = budget.take_chunk(sequence.reach, len(sequence.ids) - sequence.reach)
            if length:
                chunks.append(Chunk(sequence, length))
        return chunks

    def _covered(self, chunk: Chunk) -> bool:
        return chunk.sequence.reach + chunk.length <= chunk.sequence.room

    def _cover(self, rows: Seq[Sequence], chunks: Seq[Chunk]) -> tuple[list[NewBlocks], bool]:
        """Blocks for what the step writes. True: somebody was preempted, or has to sit this step out."""
        lacking = [(s, s.reach + 1 + s.drafts) for s in rows if s.reach + s.drafts >= s.room]
        lacking += [(c.sequence, c.sequence.reach + c.length) for c in chunks if not self._covered(c)]
        if not lacking:
            return [], False
        manager, lookahead = self._manager, self._config.lookahead
        if manager.slides:
            for sequence, _ in lacking:
                manager.slide(sequence.id, sequence.computed_len, sequence.last_step)
        grown: list[tuple[Sequence, NewBlocks]] = []
        preempted = False
        while lacking:
            growths = manager.extend([(s.id, end + lookahead) for s, end in lacking])
            for (sequence, _), growth in zip(lacking, growths):
                sequence.room = growth.covered_len - lookahead
                grown += [(sequence, NewBlocks(sequence.row, g, ids, start)) for g, start, ids in growth.blocks]
            lacking = lacking[len(growths) :]
            if lacking:
                preempted = True
                if not make_room(self.books, lacking[0][0]):
                    break
                lacking = [(s, end) for s, end in lacking if s.state is State.RUNNING]
        if preempted:
            grown = [(s, blocks) for s, blocks in grown if s.state is State.RUNNING]
        return [blocks for _, blocks in grown], preempted

    def _admit(self, batch: _Batch, budget: Budget) -> list[NewRow]:
        """Let waiting sequences in, strictly in order, as long as rows, tokens and blocks for the whole prompt last."""
        books = self.books
        rows = batch.sequences[: len(batch.sequences) - batch.num_chunks]
        added: list[NewRow] = []
        while budget.next_chunk():
            head = books.waiting.head()
            if head is None:
                break
            if not head.tiers_settled:
                turn = books.loading.turn(head, can_enter=books.rows.num_free > 0)
                if turn is Turn.LOADS:
                    books.waiting.leave(head)
                    continue
                if turn is Turn.WAITS:
                    break
            entered = self._enter(head, batch.step_id, budget) if books.rows.num_free else None
            if entered is None:
                displace(books, head)
                break
            books.waiting.leave(head)
            books.prefilling.append(head)
            added.append(entered)
            if head.id in self._held(rows):
                head.last_step = batch.step_id  # that it enters with
                continue
            chunk = Chunk(head, budget.take_chunk(head.reach, len(head.ids) - head.reach))
            batch.add_chunk(chunk)
        return added

    def _enter(self, sequence: Sequence, step_id: int, budget: Budget) -> NewRow | None:
        """Blocks and a row for a waiting sequence; None if its blocks do not fit."""
        books, manager = self.books, self._manager
        if self._refused == (sequence.id, manager.num_released):
            return None
        request, entries = sequence.siblings.request, sequence.siblings.prompt_entries
        scored = entries is None or len(entries) >= sequence.prompt_len
        acquired = manager.acquire(
            sequence.id,
            sequence.packed,
            sequence.chain,
            chunk_len=budget.next_chunk(),
            max_hit_len=None if scored or entries is None else len(entries) - 1,
            spare_len=self._config.lookahead,
            headroom=min(books.num_running, manager.capacity // 16),
            tiers=request.use_kv_tiers,
            tenant=request.cache_salt,
        )
        if acquired is None:
            self._refused = None if manager.slides else (sequence.id, manager.num_released)
            return None
        row, generation = books.rows.take()
        sequence.enter(row, generation, acquired.cached_len, acquired.covered_len - self._config.lookahead)
        sequence.seal_at = acquired.cached_len + manager.block_size
        if sequence.first_step_s is None:
            sequence.first_step_s = books.clock()
            sequence.cached_len = acquired.cached_len
            sequence.restored_len = acquired.loaded_len
            if sequence.chain is not None:
                books.stats.prefix_queries += sequence.prompt_len
                books.stats.prefix_hits += acquired.cached_len
        params = sequence.params
        if scored and entries is not None:
            params = replace(params, num_prompt_logprobs=None)
        return NewRow(
            row,
            generation,
            sequence.packed,
            sequence.prompt_len,
            acquired.cached_len,
            params,
            acquired.tables,
            draft_method=sequence.draft_method,
        )

    def _regroup(self) -> None:
        """Who has all known ids planned decodes from the next step on."""
        books = self.books
        books.decoding += [s for s in books.prefilling if s.reach >= len(s.ids)]
        books.prefilling = [s for s in books.prefilling if s.reach < len(s.ids)]
        books.prefilling.sort(key=lambda s: s.key)


class _Batch:
    """The work of a step as it grows, in batch order: decoding rows, then chunks."""

    __slots__ = (
        "_draft_lens",
        "num_chunks",
        "propose_lens",
        "query_lens",
        "rows",
        "sequences",
        "step_id",
        "verify_lens",
    )

    def __init__(self, step_id: int, draft_lens: FixedLength | None) -> None:
        """draft_lens: how many drafts rows make at the step's end; None: no speculation."""
        self._draft_lens = draft_lens
        self.step_id = step_id
        self.sequences: list[Sequence] = []
        self.rows: list[int] = []
        self.query_lens: list[int] = []
        self.verify_lens: list[int] = []
        self.propose_lens: list[int] = []
        self.num_chunks = 0

    def add_rows(self, sequences: list[Sequence]) -> None:
        """One token each, and the drafts that they hold. Moves reach."""
        step_id = self.step_id
        self.sequences = sequences
        self.rows = [s.row for s in sequences]
        if self._draft_lens is None:
            for sequence in sequences:
                sequence.reach += 1
                sequence.last_step = step_id
            self.query_lens = [1] * len(sequences)
            self.verify_lens = [0] * len(sequences)
            self.propose_lens = [0] * len(sequences)
            return
        self.verify_lens = [s.drafts for s in sequences]
        self.query_lens = [1 + verify_len for verify_len in self.verify_lens]
        for sequence in sequences:
            sequence.reach += 1 + sequence.drafts
            sequence.last_step = step_id
        self.propose_lens = self._propose(self._draft_lens, sequences)

    def add_chunk(self, chunk: Chunk) -> None:
        """Tokens of a prompt. Moves reach."""
        sequence = chunk.sequence
        sequence.reach += chunk.length
        sequence.last_step = self.step_id
        self.sequences.append(sequence)
        self.rows.append(sequence.row)
        self.query_lens.append(chunk.length)
        self.verify_lens.append(0)
        if self._draft_lens is not None and sequence.reach == len(sequence.ids):
            self.propose_lens += self._propose(self._draft_lens, [sequence])
        else:
            self.propose_lens.append(0)
        self.num_chunks += 1

    def work(self) -> Work:
        return Work(tuple(self.rows), tuple(self.query_lens), tuple(self.verify_lens), tuple(self.propose_lens))

    @staticmethod
    def _propose(draft_lens: FixedLength, sequences: Seq[Sequence]) -> list[int]:
        """Drafts to make at the step's end, which the sequences then hold. The step itself emits one token for sure;
        what max_len leaves behind it is the room of the next one."""
        chosen = draft_lens.choose([s.max_len - s.reach - 1 for s in sequences])
        chosen = [min(drafts, s.max_drafts) for s, drafts in zip(sequences, chosen)]
        for sequence, drafts in zip(sequences, chosen):
            sequence.drafts = sequence.asked_drafts = drafts
        return chosen
