"""A runner without a model: a worker whose "KV cache" is real enough that every mistake in its blocks shows.

The pseudo-model stores 8 bytes per token and group: the id, and a tag computed from all bytes that the token's
attention would read, through the row's block table. The next id is a function of the last tag. So a wrong table, a
wrong prefix hit, a block that somebody else overwrote or a length that is off by one changes the ids that come out:

    entry[p] = (id[p], tag[p])        tag[p] = H(id[p], p, entries that p reads, per group)
    full:    reads [0, p)             sliding: reads [p - window + 1, p)

`FakeModel.generate` computes the same without blocks, chunks, batches or drafts: the oracle. No torch here.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

from lamella.runner_v2.errors import ConfigError
from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.step import (
    KvGroup,
    KvLayout,
    Mask,
    NewRow,
    RankReport,
    Step,
    StepOutput,
    TokenLogprobs,
    Work,
)

NOT_A_NUMBER = "logits are NaN"
NONE_ALLOWED = "no token is allowed"

ENTRY_BYTES = 8
POISON = b"\xff"

_entry = struct.Struct("<iI")
_site = struct.Struct("<iq")
_u64 = struct.Struct("<Qq")


class NoneAllowed(Exception):
    """The parameters of a row leave no id to choose."""


class FakeModel(NamedTuple):
    """The pseudo-model: vocabulary, groups (None: full attention, else a sliding window) and faults."""

    vocab_size: int = 64
    windows: tuple[int | None, ...] = (None,)
    fail_id: int | None = None
    """A row that computes this id fails, as if its logits were NaN."""

    def generate(self, prompt_ids: Sequence[int], params: RowParams, max_tokens: int) -> list[int]:
        """The output of a sequence that runs alone; ends behind the first of params.stop_ids, which is included."""
        context = Context(self.windows)
        tag = 0
        for token in prompt_ids:
            tag = context.push(token)
        output: list[int] = []
        while len(output) < max_tokens:
            token = self.choose(tag, params, len(prompt_ids) + len(output), len(output))
            output.append(token)
            if token in params.stop_ids:
                break
            tag = context.push(token)
        return output

    def choose(self, tag: int, params: RowParams, position: int, num_output: int, words: bytes | None = None) -> int:
        """The id at `position`, sampled from the "logits" behind tag. Raises NoneAllowed."""
        noise = tag if params.greedy else crc32(_u64.pack(params.seed, position), tag)
        stops = params.stop_ids if num_output < params.min_tokens else ()
        for offset in range(self.vocab_size):
            token = (noise + offset) % self.vocab_size
            if token in stops or (params.allowed_ids is not None and token not in params.allowed_ids):
                continue
            if words is None or words[token // 8] >> (token % 8) & 1:
                return token
        raise NoneAllowed

    def logprobs(self, tag: int, token: int, count: int) -> TokenLogprobs:
        """Invented, but a function of the tag: `token` first, then the `count` best (-1: all)."""
        num_best = self.vocab_size if count == -1 else min(count, self.vocab_size)
        best = [(tag + n) % self.vocab_size for n in range(num_best)]
        rank = (token - tag) % self.vocab_size + 1
        return TokenLogprobs([token, *best], [-0.5 * rank, *(-0.5 * (n + 1) for n in range(num_best))], rank)

    def prompt_logprobs(self, prompt_ids: Sequence[int], count: int) -> list[TokenLogprobs]:
        """What a sequence that is alone gets: entries for the prompt's second token and those behind it."""
        context = Context(self.windows)
        tags = [context.push(token) for token in prompt_ids]
        return [self.logprobs(tag, token, count) for tag, token in zip(tags, prompt_ids[1:])]


class Context:
    """What attention reads, per group, and how a token's tag follows from it."""

    __slots__ = ("_entries", "_first", "_sums", "_windows", "length")

    def __init__(
        self, windows: Sequence[int | None], length: int = 0, first: Sequence[int] = (), entries: Sequence[bytes] = ()
    ) -> None:
        """Of group g, entries[g] holds the positions [first[g], length)."""
        self._windows = windows
        self.length = length
        self._first = list(first) or [0] * len(windows)
        self._entries = [bytearray(e) for e in entries] or [bytearray() for _ in windows]
        self._sums = [[crc32(e)] for e in self._entries]
        """Full groups: checksum of all entries, after each push."""

    def push(self, token: int) -> int:
        """Compute the token at position `length`; returns its tag."""
        position = self.length
        tag = crc32(_site.pack(token, position))
        for group, window in enumerate(self._windows):
            if window is None:
                read = self._sums[group][-1]
            else:
                start = max(0, position - window + 1) - self._first[group]
                assert start >= 0
                read = crc32(memoryview(self._entries[group])[start * ENTRY_BYTES :])
            tag = _mix(tag ^ read)
        entry = _entry.pack(token, tag)
        for entries, sums in zip(self._entries, self._sums):
            entries += entry
            sums.append(crc32(entry, sums[-1]))
        self.length = position + 1
        return tag


def _mix(word: int) -> int:
    """Scramble 32 bits. A checksum alone is linear: what it adds to one entry can cancel in the next."""
    word = (word ^ word >> 16) * 0x7FEB352D & 0xFFFFFFFF
    word = (word ^ word >> 15) * 0x846CA68B & 0xFFFFFFFF
    return word ^ word >> 16


class _Row:
    """A device row."""

    __slots__ = (
        "computed_len",
        "draft_method",
        "drafts",
        "failed",
        "generation",
        "ids",
        "method",
        "params",
        "prompt_len",
        "tables",
    )

    def __init__(self, new: NewRow) -> None:
        self.generation = new.generation
        self.ids = list(new.token_ids)
        self.prompt_len = new.prompt_len
        self.computed_len = new.computed_len
        self.params = new.params
        self.tables = [list(table) for table in new.blocks]
        self.drafts: list[int] = []
        self.method = 0
        """Which "drafter" made them."""
        self.draft_method = new.draft_method
        self.failed: str | None = None
        """What it computes from now on is rubbish; steps that were planned before this was known still have it."""


class _Result(NamedTuple):
    token_ids: list[int]
    tags: list[int]
    prompt_logprobs: list[TokenLogprobs] | None
    failed: str | None


class FakeRunner:
    """A worker over FakeModel. It asserts that the steps it gets make sense."""

    def __init__(
        self,
        model: FakeModel | None = None,
        *,
        block_size: int = 4,
        max_num_rows: int = 64,
        max_num_drafts: int = 0,
        lookahead: int = 0,
        free_bytes: int = 1 << 20,
        row_format: str = "fake",
        num_methods: int = 1,
    ) -> None:
        """max_num_drafts: most drafts that a row makes for its next step. lookahead: slots behind a row's tokens that
        the "drafter" dirties. num_methods: how many "drafters" there are."""
        assert lookahead >= max_num_drafts or lookahead == 0
        self.model = model or FakeModel()
        self.block_size = block_size
        self.max_num_rows = max_num_rows
        self.max_num_drafts = max_num_drafts
        self.lookahead = lookahead
        self.free_bytes = free_bytes
        self.rows: dict[int, _Row] = {}
        self.num_steps = 0
        self.runs_behind = False
        """Set: the owner launches and finishes steps. What a launch computes is kept until it is asked for."""
        self.mover: Any = None
        """Set: told before each step whether it waits for copies, and after it."""
        self._launched: list[StepOutput] = []
        self.proposed: dict[int, int] = {}
        """Method -> drafts that it made."""
        self._row_format = row_format
        self._num_methods = num_methods
        self._memory: list[bytearray] = []
        self._masks: dict[int, tuple[Mask, ...]] = {}
        self._work = Work((), (), (), ())

    def open(self) -> RankReport:
        """Groups and free memory of this "device"."""
        groups = tuple(
            KvGroup(
                name="full" if window is None else f"sliding_{window}",
                kind="full" if window is None else "sliding",
                block_size=self.block_size,
                bytes_per_block=self.block_size * ENTRY_BYTES,
                layers=(g,),
                window=window,
                row_format=self._row_format,
            )
            for g, window in enumerate(self.model.windows)
        )
        return RankReport(0, groups, self.free_bytes, 0, self.model.vocab_size, "fake", self.lookahead)

    def allocate(self, layout: KvLayout) -> None:
        """Create the blocks, full of poison."""
        assert len(layout.num_blocks) == len(self.model.windows)
        self._memory = [bytearray(POISON * (n * self.block_size * ENTRY_BYTES)) for n in layout.num_blocks]

    def launch(self, step: Step) -> None:
        """Compute a step now, tell of it in finish()."""
        assert self.runs_behind
        self._launched.append(self.step(step))

    def finish(self) -> StepOutput:
        """The output of the oldest step launched."""
        return self._launched.pop(0)

    def provide(self, step_id: int, masks: Sequence[Mask]) -> None:
        """Masks of a step that is yet to come; several calls add up."""
        self._masks[step_id] = (*self._masks.get(step_id, ()), *masks)

    def step(self, step: Step) -> StepOutput:
        """Run a step at once."""
        assert self._memory, "step before allocate, or after close"
        masks = self._masks.pop(step.step_id, ())
        if self.mover is not None:
            self.mover.before_step(step.step_id, step.waits_for_copies)
        self._apply_changes(step)
        if step.work is not None:
            self._work = step.work
        work = self._work
        allowed = {(mask.row, mask.draft_idx): mask.words for mask in masks}
        assert {mask.row for mask in masks} <= set(step.masked_rows), "a mask for a row that does not wait for one"
        results = [
            self._compute(row, query_len, verify_len, allowed, row in step.masked_rows)
            for row, query_len, verify_len in zip(work.rows, work.query_lens, work.verify_lens)
        ]
        for row, result, propose_len in zip(work.rows, results, work.propose_lens):
            if result.token_ids and not step.common.skip_drafts:
                self._propose(self.rows[row], propose_len)
            else:
                self.rows[row].drafts = []
        self.num_steps += 1
        return self._output(step.step_id, work, results)

    def call(self, op: str, **arguments: Any) -> Any:
        """Operations between steps: `echo` returns its arguments, `num_rows` the rows in use."""
        if op == "echo":
            return arguments
        if op == "num_rows":
            return self._num_rows(**arguments)
        raise ConfigError(f"the fake runner knows no operation {op!r}; it knows echo, num_rows")

    def close(self) -> None:
        """Give the memory back; no step after that."""
        self._memory = []
        self.rows.clear()

    def _num_rows(self) -> int:
        return len(self.rows)

    def _apply_changes(self, step: Step) -> None:
        for row, generation in step.removed:
            assert self.rows.pop(row).generation == generation, f"row {row} has another owner"
        for new in step.added:
            assert 0 <= new.row < self.max_num_rows, f"row {new.row} does not exist"
            assert new.row not in self.rows, f"row {new.row} is taken"
            assert 0 <= new.computed_len < len(new.token_ids)
            assert 0 < new.prompt_len <= len(new.token_ids)
            assert len(new.blocks) == len(self._memory)
            self.rows[new.row] = _Row(new)
        for new_blocks in step.new_blocks:
            table = self.rows[new_blocks.row].tables[new_blocks.group]
            assert new_blocks.start <= len(table), "a hole in the block table"
            del table[new_blocks.start :]
            table += new_blocks.block_ids

    def _compute(
        self, row_id: int, query_len: int, verify_len: int, allowed: Mapping[tuple[int, int], bytes], masked: bool
    ) -> _Result:
        row = self.rows[row_id]
        if row.failed:
            return _Result([], [], None, row.failed)
        start = row.computed_len
        num_given = query_len - verify_len
        assert num_given >= 1
        assert start + num_given <= len(row.ids), f"row {row_id}: {query_len} tokens from {start} on are not known"
        emits = start + num_given == len(row.ids)
        assert emits or not verify_len, "drafts behind a chunk that does not end the known tokens"
        assert verify_len <= self.max_num_drafts
        drafts = [*row.drafts, *[-1] * verify_len][:verify_len]
        tokens = row.ids[start : start + num_given] + drafts
        context = self._read(row, start)
        tags = [context.push(token) for token in tokens]
        self._write(row, start, tokens, tags)
        if self.model.fail_id is not None and self.model.fail_id in tokens[:num_given]:
            return self._fail(row, NOT_A_NUMBER)
        prompt_logprobs = None
        if row.params.num_prompt_logprobs is not None:
            behind = row.ids[start + 1 : min(start + num_given, row.prompt_len - 1) + 1]
            count = row.params.num_prompt_logprobs
            prompt_logprobs = [self.model.logprobs(tag, token, count) for tag, token in zip(tags, behind)]
        if not emits:
            row.computed_len += query_len
            return _Result([], [], prompt_logprobs, None)
        emitted: list[int] = []
        for draft_idx in range(verify_len + 1):
            position = start + num_given + draft_idx
            words = allowed.get((row_id, draft_idx))
            assert words is not None or not masked, f"row {row_id} waits for the mask of draft {draft_idx}"
            try:
                token = self.model.choose(
                    tags[num_given - 1 + draft_idx], row.params, position, position - row.prompt_len, words
                )
            except NoneAllowed:
                return self._fail(row, NONE_ALLOWED)
            emitted.append(token)
            if draft_idx == verify_len or drafts[draft_idx] != token:
                break
            if token == self.model.fail_id and not set(emitted) & set(row.params.stop_ids):
                return self._fail(row, NOT_A_NUMBER)  # behind a stop id nobody looks
        row.ids += emitted
        row.computed_len += num_given + len(emitted) - 1
        return _Result(emitted, tags[num_given - 1 :][: len(emitted)], prompt_logprobs, None)

    def _fail(self, row: _Row, reason: str) -> _Result:
        row.failed = reason
        return _Result([], [], None, reason)

    def _read(self, row: _Row, position: int) -> Context:
        """Gather what a token at `position` and those behind it read, through the block tables."""
        size = self.block_size
        firsts: list[int] = []
        entries: list[bytes] = []
        for window, table, memory in zip(self.model.windows, row.tables, self._memory):
            first = 0 if window is None else max(0, position - window + 1)
            first_block = first // size
            parts = []
            for block in table[first_block : -(-position // size)]:
                assert block != 0, "the null block is read"
                parts.append(memory[block * size * ENTRY_BYTES : (block + 1) * size * ENTRY_BYTES])
            firsts.append(first_block * size)
            gathered = b"".join(parts)[: (position - first_block * size) * ENTRY_BYTES]
            assert len(gathered) == (position - first_block * size) * ENTRY_BYTES, "the block table is too short"
            entries.append(gathered)
        return Context(self.model.windows, position, firsts, entries)

    def _write(self, row: _Row, start: int, tokens: Sequence[int], tags: Sequence[int]) -> None:
        size = self.block_size
        for table, memory in zip(row.tables, self._memory):
            for position, (token, tag) in enumerate(zip(tokens, tags), start):
                block = table[position // size]
                assert block != 0, "the null block is written"
                slot = block * size + position % size
                memory[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES] = _entry.pack(token, tag)

    def _propose(self, row: _Row, propose_len: int) -> None:
        """Drafts that are often right: it looks the next ids up, and then spoils some."""
        assert propose_len <= self.max_num_drafts
        row.drafts = []
        assert row.draft_method < self._num_methods
        if not propose_len:
            return
        context = self._read(row, row.computed_len)
        token = row.ids[-1]
        tag = context.push(token)
        for n in range(tag % (propose_len + 1)):
            position = row.computed_len + 1 + n
            try:
                token = self.model.choose(tag, row.params, position, position - row.prompt_len)
            except NoneAllowed:
                break
            if crc32(b"spoil", tag) % 4 == 0:
                token = (token + 1) % self.model.vocab_size
            row.drafts.append(token)
            tag = context.push(token)
        row.method = tag % self._num_methods if row.draft_method < 0 else row.draft_method
        self.proposed[row.method] = self.proposed.get(row.method, 0) + len(row.drafts)
        if self.lookahead:
            count = self.lookahead
            self._write(row, row.computed_len, [-2] * count, [0] * count)

    def _output(self, step_id: int, work: Work, results: Sequence[_Result]) -> StepOutput:
        rows = [self.rows[row] for row in work.rows]
        logprobs: list[TokenLogprobs | None] | None = None
        if any(row.params.num_logprobs is not None for row in rows):
            logprobs = []
            for row, result in zip(rows, results):
                count = row.params.num_logprobs
                for token, tag in zip(result.token_ids, result.tags):
                    logprobs.append(None if count is None else self.model.logprobs(tag, token, count))
        num_drafts = [len(row.drafts) for row in rows]
        prompt_logprobs = {
            row: result.prompt_logprobs for row, result in zip(work.rows, results) if result.prompt_logprobs is not None
        }
        return StepOutput(
            step_id=step_id,
            rows=work.rows,
            generations=tuple(row.generation for row in rows),
            num_tokens=[len(result.token_ids) for result in results],
            token_ids=[token for result in results for token in result.token_ids],
            num_drafts=num_drafts if any(num_drafts) else None,
            draft_ids=[token for row in rows for token in row.drafts] if any(num_drafts) else None,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs or None,
            failed=tuple((row, result.failed) for row, result in zip(work.rows, results) if result.failed),
            forbidden=tuple(row for row, result in zip(work.rows, results) if result.failed == NONE_ALLOWED),
            draft_methods=[row.method for row in rows] if any(num_drafts) and self._num_methods > 1 else None,
        )
