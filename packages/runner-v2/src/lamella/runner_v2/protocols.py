"""What the runner needs from others, stated here by the one who calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch


class Drafts(NamedTuple):
    """Proposals for the rows of a view. Missing drafts are -1."""

    ids: torch.Tensor  # [R, max_len] int32
    lens: Sequence[int]
    probs: torch.Tensor | None = None  # [R, max_len, vocab]; None: one-hot
    methods: Sequence[int] | None = None
    """Per row: place of the method that proposed; None: the speculator has but one."""


class Verdict(NamedTuple):
    """Outcome of checking drafts against the target."""

    num_accepted: torch.Tensor  # [R] int32
    next_ids: torch.Tensor  # [R] int32: the bonus token if all were accepted, else the recovered one


class SpecView(NamedTuple):
    """The rows of a step as a drafter may see them."""

    rows: Sequence[int]
    """Device rows."""
    generations: Sequence[int]
    token_ids: Sequence[Sequence[int]]
    """Per row: all known ids, prompt and output (host lists; only for drafters that need `host_ids`)."""
    new_counts: Sequence[int]
    """Per row: how many ids at the end are new since the row's last view."""
    methods: Sequence[int] = ()
    """Per row: place of the one method that may propose for it, -1: each; empty: each for all rows."""


class SpecNeeds(NamedTuple):
    """What a speculator asks of the runner."""

    max_drafts: int
    host_ids: bool = False
    hidden_layers: tuple[int, ...] = ()
    lookahead: int = 0
    one_hot: bool = True
    probs: bool = False
    """verify() is given the law that each logits row was sampled from."""
    uniforms: bool = False
    """verify() is given a uniform for each draft, a function of the row's seed and the draft's position."""
    keeps_other_ids: bool = False
    """A draft may stand that the target did not choose: then the draft is what is emitted."""


class Speculator(Protocol):
    """Makes drafts and judges them. Draws no randomness of its own."""

    needs: SpecNeeds

    def observe(self, view: SpecView) -> None:
        """Called every step, prompt chunks too, before propose."""

    def propose(self, view: SpecView, propose_len: Sequence[int]) -> Drafts:
        """Up to propose_len[i] drafts for row i."""

    def verify(
        self,
        target_ids: torch.Tensor,  # [L] id that the target chose at each logits row
        probs: torch.Tensor | None,  # [L, vocab]; None unless needed
        drafts: torch.Tensor,  # [R, max_len] int32, -1 = none
        uniforms: torch.Tensor | None,  # [R, max_len] float64; None unless needed
        logits_start: torch.Tensor,  # [R + 1]
    ) -> Verdict:
        """How many drafts of each row stand, and what comes next."""

    def forget(self, rows: Sequence[int]) -> None:
        """These device rows changed owner."""


class KvMover(Protocol):
    """Moves KV blocks between this rank's device and the host tier."""

    def bind(self, layers: Sequence[Sequence[int]], caches: Sequence[tuple[torch.Tensor, ...]]) -> None:
        """The memory to move: layer indices of each group, and each layer's tensors [num_blocks, ...]."""

    def before_step(self, step_id: int, waits: bool) -> None:
        """waits: wait_layer() is about the copies submitted so far; else the step reads none of their targets."""

    def wait_layer(self, layer_idx: int) -> None:
        """What is launched from now on may read this layer of these copies. A device waits, and not its host."""

    def after_step(self, step_id: int) -> None:
        """The step is launched: copies may begin behind it."""

    def close(self) -> None: ...
