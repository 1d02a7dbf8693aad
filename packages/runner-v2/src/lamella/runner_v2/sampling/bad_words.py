"""Bad words: token sequences that the output must not complete."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.sampling.rows import LogitsRows


class _Words:
    """The bad words of a row and the end of its output, as far as a word can reach back."""

    __slots__ = ("by_prefix_end", "reach", "singles", "tail")

    def __init__(self, words: Sequence[Sequence[int]], output_ids: Sequence[int]) -> None:
        self.singles = sorted({w[0] for w in words if len(w) == 1})
        self.by_prefix_end: dict[int, list[tuple[list[int], int]]] = {}
        for w in words:
            if len(w) > 1:
                self.by_prefix_end.setdefault(w[-2], []).append((list(w[:-1]), w[-1]))
        self.reach = max((len(w) - 1 for w in words), default=0)
        self.tail: list[int] = []
        self.extend(output_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        self.tail.extend(token_ids)
        del self.tail[: max(0, len(self.tail) - self.reach)]

    def banned(self, drafts: Sequence[int]) -> list[int]:
        """Ids that would complete a word behind output + drafts."""
        seen = [*self.tail, *drafts] if drafts else self.tail
        ids = list(self.singles)
        if seen:
            for prefix, last in self.by_prefix_end.get(seen[-1], ()):
                if seen[-len(prefix) :] == prefix:
                    ids.append(last)
        return ids


class BadWords:
    """Sets to -inf what would complete a bad word behind the row's output and drafts. The prompt does not count: a
    word that began in it is not the model's."""

    def __init__(self, vocab_size: int, max_num_rows: int) -> None:
        self.num_active = 0
        self._vocab_size = vocab_size
        self._active = np.zeros(max_num_rows, bool)
        self._words: dict[int, _Words] = {}

    def add(self, row: int, params: RowParams, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        self.remove(row)
        # a word whose last id is outside the vocabulary cannot be completed
        words = [w for w in params.bad_words if w and 0 <= w[-1] < self._vocab_size]
        if not words:
            return
        self._words[row] = _Words(words, output_ids)
        self._active[row] = True
        self.num_active += 1

    def remove(self, row: int) -> None:
        if self._words.pop(row, None) is not None:
            self._active[row] = False
            self.num_active -= 1

    def touches(self, layout: LogitsRows) -> npt.NDArray[np.bool_]:
        return self._active[layout.rows]

    def apply(self, logits: torch.Tensor, layout: LogitsRows) -> None:
        places: list[int] = []
        ids: list[int] = []
        for i in np.flatnonzero(self._active[layout.rows]).tolist():
            banned = self._words[int(layout.rows[i])].banned(layout.prefix(i))
            places.extend([i] * len(banned))
            ids.extend(banned)
        if ids:
            index = torch.tensor([places, ids], dtype=torch.int64, device=logits.device)
            logits[index[0], index[1]] = -torch.inf

    def advance(self, row: int, token_ids: Sequence[int]) -> None:
        words = self._words.get(row)
        if words is not None:
            words.extend(token_ids)
