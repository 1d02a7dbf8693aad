"""Drafts one after the other: each pass of a network makes one draft of every row.

A language model of its own (`DraftModelDrafter`) reads ids alone:

    the target computed   … t4 t5 t6 t7       and chose t8
    first pass                 t5 t6 t7 t8    what the network has not seen yet; its last output gives d1
    pass 2                                d1  gives d2
    pass 3                                   d2  gives d3

The network sees every token that the target has computed, once it is final, whether drafts are wanted or not. So where
a cached prefix is found, the network's part of it is there too.

Each draft is the likeliest id (one-hot), so that verification needs no probabilities.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lamella.specdec.batch import DraftBatch
from lamella.specdec.networks.model import DraftModel
from lamella.specdec.protocols import ComputedView, DrafterNeeds, DraftView


class Pass(NamedTuple):
    """What a pass of the network reads."""

    rows: list[int]
    starts: list[int]
    lens: list[int]
    ids: torch.Tensor  # [n]
    hidden: torch.Tensor | None  # [n, w]


class Seen(NamedTuple):
    """Where the first pass of a step has left the rows."""

    places: dict[int, int]
    """Row -> place in what follows."""
    positions: list[int]
    """Behind each row's last token."""
    hidden: torch.Tensor  # [R, h] what the network returned for it


NOTHING_SEEN = Seen({}, [], torch.empty(0, 0))


class ChainDrafter(ABC):
    """Satisfies `Drafter`; the subclass says what the first pass of a step reads."""

    def __init__(self, needs: DrafterNeeds) -> None:
        self.needs = needs
        self._model: DraftModel | None = None
        self._seen = NOTHING_SEEN

    def bind(self, model: DraftModel) -> None:
        """The network to draft with, before the first view."""
        self._model = model

    def observe(self, view: DraftView) -> None:
        """Let the network see what was computed, and what is known behind it."""
        assert view.computed is not None, "a drafter with a network must be told what was computed"
        self._seen = NOTHING_SEEN
        first = self._first_pass(view, view.computed)
        if not first.rows:
            return
        hidden = self._bound.forward(*first)
        lens = torch.tensor(first.lens)
        self._seen = Seen(
            {row: place for place, row in enumerate(first.rows)},
            [start + length for start, length in zip(first.starts, first.lens)],
            hidden.index_select(0, (lens.cumsum(0) - 1).to(hidden.device)),
        )

    def propose(self, view: DraftView, max_len: int | Sequence[int]) -> DraftBatch:
        """max_len drafts per row, never more than max_drafts; none for rows that the last observe() did not see."""
        limits = [max_len] * len(view.rows) if isinstance(max_len, int) else max_len
        seen, model = self._seen, self._bound
        lens = [min(n, self.needs.max_drafts) if row in seen.places else 0 for row, n in zip(view.rows, limits)]
        drafts: list[list[int]] = [[] for _ in view.rows]
        active = [place for place, length in enumerate(lens) if length > 0]
        if not active:
            return DraftBatch(drafts)
        found = [seen.places[view.rows[place]] for place in active]
        hidden = seen.hidden[found]
        passes: list[tuple[list[int], torch.Tensor]] = []
        while True:
            ids = model.target_ids(model.logits(hidden).argmax(dim=1))
            depth = len(passes) + 1
            passes.append((active, ids))
            going = [i for i, place in enumerate(active) if lens[place] > depth]
            if not going:
                break
            if len(going) < len(active):
                active, ids, hidden = [active[i] for i in going], ids[going], hidden[going]
            rows = [view.rows[place] for place in active]
            starts = [seen.positions[seen.places[row]] + depth - 1 for row in rows]
            hidden = model.forward(rows, starts, [1] * len(rows), ids.int(), hidden)
        for places, ids in passes:
            for place, token_id in zip(places, ids.tolist()):
                drafts[place].append(token_id)
        return DraftBatch(drafts)

    @abstractmethod
    def forget(self, rows: Sequence[int]) -> None: ...

    @abstractmethod
    def _first_pass(self, view: DraftView, computed: ComputedView) -> Pass:
        """Of each row in `computed` the tokens that the network has not seen yet."""

    @property
    def _bound(self) -> DraftModel:
        assert self._model is not None, "bind() comes before the first view"
        return self._model


class DraftModelDrafter(ChainDrafter):
    """Drafts by a language model that has the target's vocabulary."""

    def __init__(self, num_speculative_tokens: int) -> None:
        super().__init__(
            DrafterNeeds(
                max_drafts=num_speculative_tokens,
                host_ids=False,
                one_hot=True,
                network=True,
                lookahead=num_speculative_tokens,  # the id that was chosen last, and all drafts but the last
            )
        )
        self._known: dict[int, tuple[int, int]] = {}
        """Row -> (generation, tokens that the network has seen)."""

    def forget(self, rows: Sequence[int]) -> None:
        """Drop these rows."""
        for row in rows:
            self._known.pop(row, None)

    def _first_pass(self, view: DraftView, computed: ComputedView) -> Pass:
        rows, starts, lens, kept = [], [], [], []
        end = 0
        for place, start, stop, ahead in zip(computed.places, computed.starts, computed.ends, computed.ahead):
            row, generation = view.rows[place], view.generations[place]
            begin, end = end, end + stop - start + ahead
            known = self._known.get(row)
            first = known[1] if known is not None and known[0] == generation else start
            assert start <= first <= stop, f"row {row}: the network has seen {first} tokens of [{start}, {stop}]"
            rows.append(row)
            starts.append(first)
            lens.append(stop + 1 - first)
            kept.append(computed.ids[begin + first - start : begin + stop + 1 - start])
            self._known[row] = (generation, stop + 1)
        return Pass(rows, starts, lens, torch.cat(kept) if kept else torch.empty(0), None)
