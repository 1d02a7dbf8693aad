"""How well drafts do. A row's step counts as one draft if it verified at least one draft token.

mean acceptance length = tokens gained per drafting step, the next token included = 1 + accepted / drafts
rate of position i     = steps whose drafts 0..i were all accepted / drafts (so it never rises with i)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class AcceptanceStats:
    """Totals since the start. Counts only what was verified: drafts that no step looked at do not appear."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)

    def observe(self, draft_lens: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Count one step: per row, how many drafts were verified and how many of them stood."""
        for draft_len, accepted in zip(draft_lens, num_accepted, strict=True):
            if draft_len == 0:
                continue
            assert 0 <= accepted <= draft_len, (accepted, draft_len)
            self.num_drafts += 1
            self.num_draft_tokens += draft_len
            self.num_accepted_tokens += accepted
            if accepted > len(self.accepted_per_pos):
                self.accepted_per_pos.extend([0] * (accepted - len(self.accepted_per_pos)))
            for pos in range(accepted):
                self.accepted_per_pos[pos] += 1

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per drafting step; 1.0 before the first."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted ÷ proposed draft tokens; 0.0 before the first."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def rate_per_pos(self) -> list[float]:
        """Share of drafting steps that kept each position; 0.0 before the first."""
        return [count / max(1, self.num_drafts) for count in self.accepted_per_pos]

    def copy(self) -> AcceptanceStats:
        """The totals as they are now."""
        return AcceptanceStats(
            self.num_drafts, self.num_draft_tokens, self.num_accepted_tokens, list(self.accepted_per_pos)
        )

    def since(self, earlier: AcceptanceStats) -> AcceptanceStats:
        """What was added to an earlier copy of these totals."""
        before = earlier.accepted_per_pos
        return AcceptanceStats(
            self.num_drafts - earlier.num_drafts,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_accepted_tokens - earlier.num_accepted_tokens,
            [count - (before[pos] if pos < len(before) else 0) for pos, count in enumerate(self.accepted_per_pos)],
        )

    def log_line(self, seconds: float) -> str:
        """These totals as a line for the log, taken over so many seconds; in the words that vLLM's users look for."""
        return (
            f"SpecDecoding metrics: Mean acceptance length: {self.mean_acceptance_length:.2f}, "
            f"Accepted throughput: {self.num_accepted_tokens / seconds:.2f} tokens/s, "
            f"Drafted throughput: {self.num_draft_tokens / seconds:.2f} tokens/s, "
            f"Accepted: {self.num_accepted_tokens} tokens, Drafted: {self.num_draft_tokens} tokens, "
            f"Per-position acceptance rate: {', '.join(f'{rate:.3f}' for rate in self.rate_per_pos)}, "
            f"Avg Draft acceptance rate: {100 * self.acceptance_rate:.1f}%"
        )


@dataclass(slots=True)
class LengthStats:
    """Totals since the start of what was decided for each decoding row and step: how many drafts are verified, and why
    there are none."""

    lens: list[int] = field(default_factory=list)
    """Place n: times that n drafts were verified."""
    off: dict[str, int] = field(default_factory=dict)
    """Reason -> times that none was."""
    num_unverified: int = 0
    """Drafts that rows held and that were not verified, as they did not pay or there was no room for them."""

    def observe(self, num_verified: int, num_held: int) -> None:
        """A row verifies so many of the drafts that it holds."""
        if num_verified >= len(self.lens):
            self.lens.extend([0] * (num_verified + 1 - len(self.lens)))
        self.lens[num_verified] += 1
        self.num_unverified += num_held - num_verified

    def observe_off(self, reason: str) -> None:
        """It verifies none, because of this."""
        self.off[reason] = self.off.get(reason, 0) + 1
