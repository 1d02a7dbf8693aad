"""specdec's drafters and verification as the runner's `Speculator`.

    runner                            this adapter                      specdec
    observe(SpecView)         →       passed on as it is         →      Drafter.observe
    propose(SpecView, lens)   →       host lists → tensor, -1 padded ←  Drafter.propose
    verify(ids, drafts, …)    →       passed on as it is         →      verify.one_hot

Drafts are one-hot: the runner samples every logits row as if there were no drafts and verification compares ids, so
that seeded output is the one without speculation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lamella.engine.errors import StartError
from lamella.runner_v2.protocols import Drafts, SpecNeeds, SpecView, Verdict
from lamella.specdec import ConfigError, Drafter, NgramConfig, NgramDrafter, SuffixDrafter, parse_speculative_config
from lamella.specdec.verify.one_hot import verify_one_hot


class DrafterSpeculator:
    """A host-side drafter with one-hot drafts. Satisfies `Speculator`."""

    def __init__(self, drafter: Drafter) -> None:
        assert drafter.needs.one_hot, "drafts with probabilities need another verification"
        self.needs = SpecNeeds(max_drafts=drafter.needs.max_drafts, host_ids=drafter.needs.host_ids)
        self._drafter = drafter

    def observe(self, view: SpecView) -> None:
        """Take in each row's new ids."""
        self._drafter.observe(view)

    def propose(self, view: SpecView, propose_len: Sequence[int]) -> Drafts:
        """Up to propose_len[i] drafts for row i; ids are [num_rows, max_drafts] on the CPU, whatever the lengths."""
        batch = self._drafter.propose(view, propose_len)
        width = self.needs.max_drafts
        ids = torch.tensor(batch.padded(width), dtype=torch.int32).reshape(len(view.rows), width)
        return Drafts(ids, batch.lens)

    def verify(
        self,
        target_ids: torch.Tensor,  # [L]
        probs: torch.Tensor | None,
        drafts: torch.Tensor,  # [R, max_len] int32, -1 = none
        uniforms: torch.Tensor | None,
        logits_start: torch.Tensor,  # [R + 1]
    ) -> Verdict:
        """Compare ids. One-hot drafts need neither probs nor uniforms."""
        assert probs is None, "these drafts are chosen, not drawn: pass no probabilities"
        verdict = verify_one_hot(target_ids, drafts, logits_start)
        return Verdict(verdict.num_accepted, verdict.next_ids)

    def forget(self, rows: Sequence[int]) -> None:
        """These device rows changed owner."""
        self._drafter.forget(rows)


def from_config(config: str | Mapping[str, object]) -> DrafterSpeculator:
    """The speculator that a `--speculative-config` describes: JSON text, or the object already parsed.

    Raises StartError naming the key or method that is unknown, unsupported or out of range.
    """
    try:
        parsed = parse_speculative_config(config)
    except ConfigError as error:
        raise StartError(str(error)) from None
    return DrafterSpeculator(NgramDrafter(parsed) if isinstance(parsed, NgramConfig) else SuffixDrafter(parsed))
