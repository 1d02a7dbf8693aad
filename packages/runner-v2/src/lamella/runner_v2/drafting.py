"""The runner's side of speculation: shows the speculator the rows of a step, keeps what it proposes, asks it to judge.

end of step n      observe(view), propose(view)      drafts go into the rows' state
step n + 1         [last, d1 .. dk] computed         verify(ids chosen at each of them) -> accepted count, next id
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from lamella.runner_v2.batch import BatchLayout
from lamella.runner_v2.errors import ConfigError, UnsupportedError
from lamella.runner_v2.protocols import SpecNeeds, Speculator, SpecView
from lamella.runner_v2.state import SequenceState


class Held(NamedTuple):
    """Drafts that the rows of a step hold behind it."""

    lens: list[int]
    ids: list[int] | None
    """Row after row; None: they lie on the device only."""


class Drafting:
    """A speculator at work on the rows of one runner."""

    def __init__(self, speculator: Speculator, state: SequenceState) -> None:
        """UnsupportedError or ConfigError if the speculator needs what this runner does not give."""
        needs = speculator.needs
        if needs.hidden_layers:
            raise UnsupportedError("the speculator needs hidden states of the target, which this runner does not keep")
        if not needs.one_hot:
            raise UnsupportedError("the speculator draws its drafts; only drafts that are chosen can be verified")
        if needs.max_drafts > state.max_num_drafts:
            raise ConfigError(
                f"the speculator makes {needs.max_drafts} drafts, max_num_drafts is {state.max_num_drafts}"
            )
        self._speculator = speculator
        self._state = state
        self._viewed = np.zeros(len(state.generations), dtype=np.int64)
        """Ids of each row that the speculator has seen."""

    @property
    def needs(self) -> SpecNeeds:
        return self._speculator.needs

    def forget(self, rows: Sequence[int]) -> None:
        """These device rows lost their owner."""
        self._viewed[list(rows)] = 0
        self._speculator.forget(rows)

    def verify(self, ids: torch.Tensor, drafts: torch.Tensor, layout: BatchLayout) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids [L] chosen at each logits row and drafts [S, k] -> (num_accepted [S] int32, next_ids [S] int32)."""
        verdict = self._speculator.verify(ids, None, drafts, None, layout.device_sampled_start)
        return verdict.num_accepted, verdict.next_ids

    def draft(
        self, layout: BatchLayout, num_tokens: Sequence[int], token_ids: Sequence[int], skip: bool
    ) -> Held | None:
        """Show the speculator what the step emitted, and let it propose.

        Returns what each row now holds; None: none anywhere.
        """
        view = self._view(layout, num_tokens, token_ids)
        self._speculator.observe(view)
        wanted = [
            length if count and not skip else 0
            for length, count in zip(layout.work.propose_lens, num_tokens, strict=True)
        ]
        if not any(wanted):
            return None
        drafts = self._speculator.propose(view, wanted)
        sampled = layout.device_sampled
        self._state.put_drafts(layout.device_rows[sampled], drafts.ids.to(sampled.device)[sampled])
        held = [min(length, limit) for length, limit in zip(drafts.lens, wanted, strict=True)]
        if not any(held):
            return None
        if not self.needs.host_ids:
            return Held(held, None)
        ids = [token_id for row, length in zip(drafts.ids.tolist(), held) for token_id in row[:length]]
        return Held(held, ids)

    def _view(self, layout: BatchLayout, num_tokens: Sequence[int], token_ids: Sequence[int]) -> SpecView:
        rows, ids = layout.work.rows, self._state.host_ids
        generations = tuple(self._state.generations[layout.rows].tolist())
        if ids is None:
            return SpecView(rows, generations, (), num_tokens)
        self._state.append_host_ids(rows, num_tokens, token_ids)
        lens = np.fromiter((len(ids[row]) for row in rows), np.int64, len(rows))
        new_counts = (lens - self._viewed[layout.rows]).tolist()
        self._viewed[layout.rows] = lens
        return SpecView(rows, generations, [ids[row] for row in rows], new_counts)
