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


class Computed(NamedTuple):
    """What a step has added to rows for good: accepted drafts among it, rejected ones not.

    row i:   positions [starts[i], ends[i])   computed; hidden has a row for each
             ids at [starts[i], ends[i] + ahead[i])   ids has them, row after row: what is known behind the end too
    """

    places: Sequence[int]
    """In the view, of the rows that have any: all but those whose step failed."""
    starts: Sequence[int]
    ends: Sequence[int]
    ahead: Sequence[int]
    """At least 1: the id that was chosen last, or the prompt's next one."""
    ids: torch.Tensor  # [sum(ends - starts + ahead)] int32
    hidden: torch.Tensor | None  # [sum(ends - starts), w], if the speculator asks for layers


class DraftModel(Protocol):
    """A network that drafts, as the runner lends it to a speculator. See `draft_pass.DraftPass`."""

    @property
    def vocab_size(self) -> int: ...

    def forward(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        lens: Sequence[int],
        ids: torch.Tensor,  # [n] int32
        hidden: torch.Tensor | None = None,  # [n, w]
    ) -> torch.Tensor: ...
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...
    def target_ids(self, ids: torch.Tensor) -> torch.Tensor: ...


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
    computed: Computed | None = None
    """For speculators with a network."""


class SpecNeeds(NamedTuple):
    """What a speculator asks of the runner."""

    max_drafts: int
    host_ids: bool = False
    network: bool = False
    """It drafts with the network that the runner was given, and is lent it by bind(); views tell what was computed."""
    hidden_layers: tuple[int, ...] = ()
    """Layers whose output it is shown, side by side; -1: the embeddings."""
    lookahead: int = 0
    """Slots behind a row's computed tokens that a pass of the network may write."""
    ids_ahead: int = 1
    """Most ids behind what was computed that it is shown, as far as they are known."""
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

    def bind(self, model: DraftModel | None) -> None:
        """The network to draft with, once, before the first view; None: the runner has none."""

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
