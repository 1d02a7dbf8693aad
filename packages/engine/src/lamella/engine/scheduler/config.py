"""What the scheduler may do, resolved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from lamella.engine.errors import StartError
from lamella.engine.scheduler.cost import FLAT, TokenCost

PolicyName = Literal["fcfs", "priority"]


def no_patience(num_tokens: int) -> float:
    """Of an engine without tiers, where nothing is ever loaded."""
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and policy. StartError if they contradict each other."""

    max_model_len: int
    """Longest sequence, prompt and output together."""
    max_num_seqs: int
    """Device rows: most sequences that hold blocks at a time."""
    max_num_batched_tokens: int
    """Most tokens of one step."""
    max_chunk_len: int
    """Most tokens of one step for one sequence: what the block pools can cover at once."""
    token_cost: TokenCost = FLAT
    """Makes the steps of long contexts shorter than max_num_batched_tokens."""
    policy: PolicyName = "fcfs"
    prefix_caching: bool = True
    max_num_drafts: int = 0
    """Most drafts of a row in one step; 0: no speculation."""
    draft_costs: Sequence[tuple[int, float]] | None = None
    """(tokens, seconds) of steps, by rising tokens: as many of a row's drafts are verified as pay by it, none included.
    None: all that there are."""
    draft_methods: tuple[str, ...] = ()
    """Names of the drafters, in the order in which the runner numbers them; "" for one that has none."""
    draft_rule: str = "standard"
    """By which drafts are kept."""
    draft_rule_exact: bool = True
    """It keeps the target's law."""
    lookahead: int = 0
    """Slots behind the planned tokens that a drafter may write."""
    key_lookahead: int = 0
    """Ids behind a block that what a drafter keeps in it depends on: its key names them too."""
    patience: Callable[[int], float] = no_patience
    """Seconds that a sequence waits for a tier to bring a prompt of so many tokens."""

    holds_restores: bool = False
    """Where sequences decode, one that enters waits for its copies from the host before it computes, so that their
    steps do not; else, and alone, its first step waits for them layer by layer."""

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise StartError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs {self.max_num_seqs}: "
                "a step could not give every running sequence a token"
            )
        if self.max_chunk_len <= self.max_num_drafts:
            raise StartError(
                f"the KV blocks let a step compute {self.max_chunk_len} tokens of a sequence, too few for a token and "
                f"its {self.max_num_drafts} drafts"
            )
