"""What followed the runs of ids in token rows and finished outputs: the reference of the native `_C.SuffixIndex`, with
equal results.

    ids of a row     a b c a b d a b        windows of up to max_tree_depth ids are counted, each where it ends:
                     ─────       ───        "a b" 3 times, "a b c" once, "a b d" once
                                            what follows "a b": c and d, one half each; of equals the later one, d

Two sets of windows: the row's own ids, and the newest finished outputs of all rows. Drafts are the path of most
frequent ids behind a match, a run at the row's end that occurred before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from lamella.specdec.drafters.index_drafter import ReferenceIndex, ReferenceRow


class ReferenceSuffixIndex(ReferenceIndex["_Row"]):
    """Index over rows by (row, generation), and the outputs of rows that are gone.

    A row's output is what came behind the ids that it was first seen with. When the row is forgotten or changes owner,
    its last max_cached_tokens join the finished ones, whose oldest leave until at most max_cached_requests outputs of
    at most max_cached_tokens ids together remain. max_cached_requests 0: none are kept.
    """

    def __init__(
        self,
        max_tree_depth: int,
        max_cached_requests: int,
        max_cached_tokens: int,
        max_spec_factor: float,
        max_spec_offset: float,
        min_token_prob: float,
    ) -> None:
        super().__init__()
        self._max_depth = max_tree_depth
        self._max_requests = max_cached_requests
        self._max_tokens = max_cached_tokens
        self._factor = max_spec_factor
        self._offset = max_spec_offset
        self._min_prob = min_token_prob
        self._finished = _Windows(max_tree_depth)
        self._outputs: deque[list[int]] = deque()
        self._num_tokens = 0

    @property
    def num_cached_requests(self) -> int:
        """Finished outputs held."""
        return len(self._outputs)

    @property
    def num_cached_tokens(self) -> int:
        """Their ids."""
        return self._num_tokens

    @property
    def num_nodes(self) -> int:
        """Windows counted, of all rows and outputs. The native index needs fewer for the same counts."""
        return self._finished.num_nodes + sum(row.windows.num_nodes for row in self._rows.values())

    def _new_row(self, generation: int) -> _Row:
        return _Row(generation, self._max_depth)

    def _append(self, row: _Row, token_id: int) -> None:
        row.ids.append(token_id)
        row.windows.append(token_id)

    def _appended(self, row: _Row) -> None:
        if row.prompt_len == 0:
            row.prompt_len = len(row.ids)

    def _dropped(self, row: _Row) -> None:
        self._keep(row.ids[max(row.prompt_len, len(row.ids) - self._max_tokens) :])

    def _keep(self, output: list[int]) -> None:
        if self._max_requests == 0 or len(output) < 2:  # of a single id nothing is learnt
            return
        while self._outputs and (
            len(self._outputs) >= self._max_requests or self._num_tokens + len(output) > self._max_tokens
        ):
            oldest = self._outputs.popleft()
            self._num_tokens -= len(oldest)
            self._finished.drop(oldest)
        for token_id in output:
            self._finished.append(token_id)
        self._finished.close()
        self._outputs.append(output)
        self._num_tokens += len(output)

    def _propose(self, row: _Row, max_len: int) -> list[int]:
        own_score, own = self._best(row.windows, row.ids, max_len)
        score, drafts = self._best(self._finished, row.ids, max_len)
        return drafts if score > own_score else own

    def _best(self, windows: _Windows, ids: list[int], max_len: int) -> tuple[float, list[int]]:
        """The path with the highest score behind any match; of equal ones that of the longest match."""
        best_score, best = 0.0, list[int]()
        for match_len in range(1, min(len(ids), self._max_depth - 1) + 1):
            node = windows.find(ids[len(ids) - match_len :])
            if node is None:
                break
            budget = min(max_len, math.floor(match_len * self._factor + self._offset))
            score, drafts = self._follow(node, min(budget, self._max_depth - match_len))
            if drafts and score >= best_score:
                best_score, best = score, drafts
        return best_score, best

    def _follow(self, node: _Node, max_len: int) -> tuple[float, list[int]]:
        """Most frequent ids behind a node, and the sum of the products of their frequencies."""
        prob, score, drafts = 1.0, 0.0, list[int]()
        while len(drafts) < max_len and node.children:
            token_id, best = max(node.children.items(), key=lambda child: (child[1].count, child[1].last))
            prob *= best.count / node.followed
            if prob < self._min_prob:
                break
            drafts.append(token_id)
            score += prob
            node = best
        return score, drafts


class _Row(ReferenceRow):
    """The first prompt_len of its ids were there when it was first seen."""

    __slots__ = ("prompt_len", "windows")

    def __init__(self, generation: int, max_depth: int) -> None:
        super().__init__(generation)
        self.prompt_len = 0
        self.windows = _Windows(max_depth)


class _Node:
    """A window: how often it occurred, how often an id counted below followed, the position behind its last end."""

    __slots__ = ("children", "count", "followed", "last")

    def __init__(self) -> None:
        self.children: dict[int, _Node] = {}
        self.count = 0
        self.followed = 0
        self.last = 0


class _Windows:
    """Counts of all windows of at most max_depth ids of a set of sequences; at most max_depth nodes an id."""

    def __init__(self, max_depth: int) -> None:
        self.num_nodes = 0
        self._max_depth = max_depth
        self._root = _Node()
        self._open: list[_Node] = []  # of the windows that end where the open sequence does, shortest first
        self._end = 0

    def append(self, token_id: int) -> None:
        """Extend the open sequence."""
        self._end += 1
        extended: list[_Node] = []
        for node in [self._root, *self._open[: self._max_depth - 1]]:
            child = node.children.get(token_id)
            if child is None:
                child = node.children[token_id] = _Node()
                self.num_nodes += 1
            child.count += 1
            child.last = self._end
            node.followed += 1
            extended.append(child)
        self._open = extended

    def close(self) -> None:
        """End the open sequence."""
        self._open = []

    def drop(self, ids: Sequence[int]) -> None:
        """Take the oldest sequence out."""
        for start in range(len(ids)):
            node = self._root
            for token_id in ids[start : start + self._max_depth]:
                child = node.children[token_id]
                child.count -= 1
                node.followed -= 1
                if child.count == 0:
                    del node.children[token_id]
                    self.num_nodes -= 1
                node = child

    def find(self, ids: Iterable[int]) -> _Node | None:
        """The node of a window, if it occurred."""
        node = self._root
        for token_id in ids:
            child = node.children.get(token_id)
            if child is None:
                return None
            node = child
        return node
