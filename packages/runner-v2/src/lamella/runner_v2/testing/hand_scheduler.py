"""Steps by hand: rows and blocks for tests that drive a runner without a scheduler.

hand = HandScheduler(runner.execute, runner.report().groups, num_blocks=64)
row = hand.add([1, 2, 3])
hand.step({row: 3})          a chunk of the prompt, or 1 token of a decoding row
hand.ids[row]                prompt and output so far
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.step import KvGroup, KvLayout, NewBlocks, NewRow, Step, StepOutput, Work

GREEDY = RowParams(temperature=0.0)


class HandScheduler:
    """Keeps ids, lengths and blocks of the rows that a test adds. Blocks are handed out in a shuffled order."""

    def __init__(
        self, execute: Callable[[Step], StepOutput], groups: Sequence[KvGroup], num_blocks: int = 64, seed: int = 0
    ) -> None:
        self.execute = execute
        self.groups = tuple(groups)
        self.layout = KvLayout((num_blocks,) * len(self.groups))
        """For runner.allocate()."""
        self.ids: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.num_drafts: dict[int, int] = {}
        self.tables: dict[int, list[list[int]]] = {}
        self.outputs: list[StepOutput] = []
        self._generations: dict[int, int] = {}
        self._step_id = 0
        self._free = [list(range(1, num_blocks)) for _ in self.groups]
        for free in self._free:
            random.Random(seed).shuffle(free)
        self._added: list[NewRow] = []
        self._removed: list[tuple[int, int]] = []

    def add(
        self,
        token_ids: Sequence[int],
        params: RowParams = GREEDY,
        *,
        row: int | None = None,
        prompt_len: int | None = None,
        computed_len: int = 0,
        tables: Sequence[Sequence[int]] | None = None,
    ) -> int:
        """A sequence enters the lowest free row (or the given one) with the next step. tables: blocks that already hold
        computed_len tokens."""
        if row is None:
            row = next(r for r in range(len(self.ids) + 1) if r not in self.ids)
        assert row not in self.ids, f"row {row} is taken"
        self._generations[row] = self._generations.get(row, 0) + 1
        self.ids[row] = list(token_ids)
        self.computed[row] = computed_len
        self.num_drafts[row] = 0
        self.tables[row] = [list(t) for t in tables] if tables is not None else [[] for _ in self.groups]
        blocks = tuple(list(table) for table in self.tables[row])
        length = len(token_ids) if prompt_len is None else prompt_len
        new = NewRow(row, self._generations[row], list(token_ids), length, computed_len, params, blocks)
        self._added.append(new)
        return row

    def remove(self, row: int, *, keep_blocks: bool = False) -> None:
        """The sequence leaves with the next step; its blocks are free for others, with what they hold."""
        self._removed.append((row, self._generations[row]))
        if not keep_blocks:
            for free, table in zip(self._free, self.tables[row], strict=True):
                free.extend(block for block in table if block)
        for books in (self.ids, self.computed, self.num_drafts, self.tables):
            del books[row]

    def step(
        self, query_lens: Mapping[int, int], *, verify: bool = True, propose: int = 0, masked: tuple[int, ...] = ()
    ) -> StepOutput:
        """Compute so many tokens of each row, in this order. Rows that hold drafts verify them all (verify), and
        propose up to `propose` new ones."""
        verify_lens = {row: self.num_drafts[row] if verify else 0 for row in query_lens}
        new_blocks = []
        for row, query_len in query_lens.items():
            end = self.computed[row] + query_len + verify_lens[row]
            for group, kv_group in enumerate(self.groups):
                table = self.tables[row][group]
                start = len(table)
                while len(table) * kv_group.block_size < end:
                    table.append(self._free[group].pop())
                if len(table) > start:
                    new_blocks.append(NewBlocks(row, group, table[start:], start))
        work = Work(
            tuple(query_lens),
            tuple(query_len + verify_lens[row] for row, query_len in query_lens.items()),
            tuple(verify_lens.values()),
            tuple(propose if self._samples(row, n) else 0 for row, n in query_lens.items()),
        )
        self._step_id += 1
        step = Step(self._step_id, tuple(self._removed), tuple(self._added), tuple(new_blocks), work, masked)
        self._removed, self._added = [], []
        output = self.execute(step)
        self._commit(work, output)
        return output

    def prefill(self, row: int, chunks: Sequence[int]) -> StepOutput:
        """The prompt in chunks of these lengths; the output of the last one."""
        return [self.step({row: chunk}) for chunk in chunks][-1]

    def decode(self, rows: Sequence[int], num_tokens: int, propose: int = 0) -> None:
        """Steps of all rows until each has so many more ids."""
        goal = {row: len(self.ids[row]) + num_tokens for row in rows}
        while any(len(self.ids[row]) < goal[row] for row in rows):
            self.step({row: 1 for row in rows if len(self.ids[row]) < goal[row]}, propose=propose)

    def _samples(self, row: int, query_len: int) -> bool:
        return self.computed[row] + query_len >= len(self.ids[row])

    def _commit(self, work: Work, output: StepOutput) -> None:
        self.outputs.append(output)
        end = 0
        for i, row in enumerate(work.rows):
            start, end = end, end + output.num_tokens[i]
            emitted = output.token_ids[start:end]
            rejected = work.verify_lens[i] - max(0, len(emitted) - 1)
            self.computed[row] += work.query_lens[i] - rejected
            self.ids[row].extend(emitted)
            self.num_drafts[row] = output.num_drafts[i] if output.num_drafts else 0
