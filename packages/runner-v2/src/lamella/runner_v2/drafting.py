"""The runner's side of speculation: shows the speculator the rows of a step, keeps what it proposes, asks it to judge.

end of step n      observe(view), propose(view)      drafts go into the rows' state
step n + 1         [last, d1 .. dk] computed         verify(ids chosen at each of them) -> accepted count, next id

What verification may ask for besides (the law that the ids were sampled from, uniforms) is made only where it does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lamella.runner_v2.batch import BatchLayout, StepBatch
from lamella.runner_v2.errors import ConfigError, UnsupportedError
from lamella.runner_v2.protocols import Computed, DraftModel, SpecNeeds, Speculator, SpecView
from lamella.runner_v2.sampling.seeds import SALT_ACCEPT, key_of, uniforms
from lamella.runner_v2.state import Ints, SequenceState
from lamella.runner_v2.step import NewRow


class Held(NamedTuple):
    """Drafts that the rows of a step hold behind it."""

    lens: list[int]
    ids: list[int] | None
    """Row after row; None: they lie on the device only."""
    methods: list[int] | None = None
    """Place of the method that each row's come from; None: there is but one."""


class Drafting:
    """A speculator at work on the rows of one runner."""

    def __init__(self, speculator: Speculator, state: SequenceState, network: DraftModel | None = None) -> None:
        """network: what it drafts with. UnsupportedError or ConfigError if the speculator needs what this runner does
        not give."""
        needs = speculator.needs
        if not needs.one_hot:
            raise UnsupportedError("the speculator draws its drafts; only drafts that are chosen can be verified")
        if needs.max_drafts > state.max_num_drafts:
            raise ConfigError(
                f"the speculator makes {needs.max_drafts} drafts, max_num_drafts is {state.max_num_drafts}"
            )
        if needs.network != (network is not None):
            raise ConfigError(
                "the speculator drafts with a network, and the runner was given none: set RunnerConfig.draft"
                if needs.network
                else "the runner was given a network that drafts, and its speculator uses none"
            )
        if needs.hidden_layers and network is None:
            raise UnsupportedError("the speculator needs hidden states of the target, which only a network is shown")
        speculator.bind(network)
        self._speculator = speculator
        self._state = state
        self._viewed = np.zeros(len(state.generations), dtype=np.int64)
        """Ids of each row that the speculator has seen."""
        self._holds = np.zeros(len(state.generations), dtype=np.bool_)
        """Rows behind whose last id something else than -1 may lie."""
        self._keys = np.zeros(len(state.generations), dtype=np.uint64)
        """Of each row's noise."""
        self._methods = np.full(len(state.generations), -1, dtype=np.int64)
        """Place of the one method that may propose for a row; -1: each."""
        self._limited = False
        """Any row ever was."""

    @property
    def needs(self) -> SpecNeeds:
        return self._speculator.needs

    def add(self, new: NewRow) -> None:
        """The row has a new owner."""
        self._holds[new.row] = False
        self._keys[new.row] = key_of(new.params.seed)
        self._methods[new.row] = new.draft_method
        self._limited = self._limited or new.draft_method >= 0

    def forget(self, rows: Sequence[int]) -> None:
        """These device rows lost their owner."""
        self._viewed[list(rows)] = 0
        self._speculator.forget(rows)

    def verify(
        self,
        ids: torch.Tensor,  # [L] int32 chosen at each logits row
        probs: torch.Tensor | None,  # [L, V] that they were sampled by, if the speculator needs it
        batch: StepBatch,
        layout: BatchLayout,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(num_accepted [S] int32, next_ids [S] int32, ids [L] with those drafts in place that stand)."""
        needs, drafts = self._speculator.needs, batch.drafts
        uniforms = self._uniforms(batch.inputs.positions, layout) if needs.uniforms else None
        verdict = self._speculator.verify(ids, probs, drafts, uniforms, layout.device_sampled_start)
        if needs.keeps_other_ids:
            ids = self._standing(ids, drafts, verdict.num_accepted, layout)
        return verdict.num_accepted, verdict.next_ids, ids

    def draft(
        self,
        layout: BatchLayout,
        num_tokens: Sequence[int],
        token_ids: Sequence[int],
        skip: bool,
        hidden: torch.Tensor | None = None,  # [T, w] of the step's tokens
        failed: Collection[int] = (),
    ) -> Held | None:
        """Show the speculator what the step emitted, and let it propose. failed: places of rows without a result.

        Returns what each row now holds; None: none anywhere.
        """
        view = self._view(layout, num_tokens, token_ids)
        if self.needs.network:
            view = view._replace(computed=self._computed(layout, num_tokens, hidden, failed))
        self._speculator.observe(view)
        wanted = [
            length if count and not skip else 0
            for length, count in zip(layout.work.propose_lens, num_tokens, strict=True)
        ]
        if not any(wanted):
            return None
        drafts = self._speculator.propose(view, wanted)
        if any(drafts.lens) or self._holds[layout.rows].any():
            rows, made = layout.device_rows, drafts.ids.to(layout.device_rows.device)
            if len(layout.sampled) < layout.num_rows:
                rows, made = rows[layout.device_sampled], made[layout.device_sampled]
            self._state.put_drafts(rows, made)
            self._holds[layout.rows[layout.sampled]] = [drafts.lens[place] > 0 for place in layout.sampled]
        held = [min(length, limit) for length, limit in zip(drafts.lens, wanted, strict=True)]
        if not any(held):
            return None
        methods = None if drafts.methods is None else list(drafts.methods)
        if drafts.ids.device.type != "cpu":
            return Held(held, None, methods)
        ids = [token_id for row, length in zip(drafts.ids.tolist(), held) for token_id in row[:length]]
        return Held(held, ids, methods)

    def _view(self, layout: BatchLayout, num_tokens: Sequence[int], token_ids: Sequence[int]) -> SpecView:
        rows, ids = layout.work.rows, self._state.host_ids
        generations = tuple(self._state.generations[layout.rows].tolist())
        methods = self._methods[layout.rows].tolist() if self._limited else ()
        if ids is None:
            return SpecView(rows, generations, (), num_tokens, methods)
        self._state.append_host_ids(rows, num_tokens, token_ids)
        lens = np.fromiter((len(ids[row]) for row in rows), np.int64, len(rows))
        new_counts = (lens - self._viewed[layout.rows]).tolist()
        self._viewed[layout.rows] = lens
        return SpecView(rows, generations, [ids[row] for row in rows], new_counts, methods)

    def _computed(
        self,
        layout: BatchLayout,
        num_tokens: Sequence[int],
        hidden: torch.Tensor | None,
        failed: Collection[int],
    ) -> Computed:
        """What is now final of the step's tokens. Their result has been read: planned_len is what was computed."""
        state = self._state
        places = np.array([place for place in range(layout.num_rows) if place not in failed], np.int64)
        rows = layout.rows[places]
        ends = state.planned_len[rows].astype(np.int64)
        kept = layout.query_lens[places].astype(np.int64)
        emitted = np.asarray(num_tokens, np.int64)[places]
        kept -= np.where(emitted > 0, layout.verify_lens[places] + 1 - emitted, 0)
        starts = ends - kept
        known = np.where(emitted > 0, ends + 1, state.known_len[rows])
        ahead = np.minimum(known - ends, self.needs.ids_ahead)
        device = state.all_token_ids.device
        tokens = _ranges(rows * state.width + starts, kept + ahead)
        ids = state.all_token_ids.view(-1).index_select(0, torch.from_numpy(tokens).to(device))
        if hidden is not None and int(kept.sum()) < len(hidden):
            first = (np.cumsum(layout.query_lens) - layout.query_lens)[places]
            hidden = hidden.index_select(0, torch.from_numpy(_ranges(first, kept)).to(device))
        return Computed(places.tolist(), starts.tolist(), ends.tolist(), ahead.tolist(), ids, hidden)

    def _uniforms(self, positions: torch.Tensor, layout: BatchLayout) -> torch.Tensor:  # [T] -> [S, k] float64
        """One for each draft, of the row's seed and the draft's position. Where there is no draft it means nothing."""
        keys = torch.from_numpy(self._keys[layout.rows[layout.sampled]].view(np.int64)).to(positions.device)
        return uniforms(keys[:, None], positions.long()[layout.draft_tokens], SALT_ACCEPT)

    @staticmethod
    def _standing(
        ids: torch.Tensor, drafts: torch.Tensor, num_accepted: torch.Tensor, layout: BatchLayout
    ) -> torch.Tensor:  # [L]
        """At each logits row the draft that stands there, else the id that was chosen."""
        counts = np.diff(layout.sampled_start)
        place = torch.from_numpy(np.repeat(np.arange(len(counts)), counts)).to(ids.device)  # [L] index into drafts
        ahead = torch.from_numpy(np.asarray(layout.draft_idx, np.int64)).to(ids.device)
        drafted = drafts[place, ahead.clamp(max=drafts.shape[1] - 1)]
        return torch.where(ahead < num_accepted[place], drafted, ids)


def _ranges(starts: Ints, lens: Ints) -> npt.NDArray[np.int64]:
    """[starts[0], starts[0] + lens[0]), then the next one, ..."""
    ends = np.cumsum(lens, dtype=np.int64)
    return np.repeat(starts - (ends - lens), lens) + np.arange(ends[-1] if len(ends) else 0, dtype=np.int64)
