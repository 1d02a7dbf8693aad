"""specdec's drafters and verification as the runner's `Speculator`.

    runner                            this adapter                      specdec
    observe(SpecView)         →       passed on as it is         →      Drafter.observe
    propose(SpecView, lens)   →       host lists → tensor, -1 padded ←  Drafter.propose
    bind(DraftModel)          →       to the drafter with a network  →  ChainDrafter.bind
    verify(ids, drafts, …)    →       by the rule                →      verify.one_hot, .lossy, .synthetic

Drafts are one-hot: the runner samples every logits row as if there were no drafts. By the standard rule verification
compares ids, so that seeded output is the one without speculation; other rules have to be asked for by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from lamella.engine.errors import StartError
from lamella.runner_v2.protocols import DraftModel, Drafts, SpecNeeds, SpecView, Verdict
from lamella.specdec import (
    ArbitraryConfig,
    ArbitraryDrafter,
    CombinedDrafter,
    ConfigError,
    Drafter,
    NetworkConfig,
    NgramConfig,
    NgramDrafter,
    Rule,
    SpeculativeConfig,
    SuffixDrafter,
    parse_speculation,
)
from lamella.specdec.batch import NO_DRAFT
from lamella.specdec.networks.chain import ChainDrafter, DraftModelDrafter
from lamella.specdec.rules import STANDARD, LossyRule, Standard, Synthetic, Threshold
from lamella.specdec.verify.lossy import verify_lossy
from lamella.specdec.verify.registry import Synthetic as SyntheticVerification
from lamella.specdec.verify.registry import verifiers


class DrafterSpeculator:
    """A drafter with one-hot drafts, kept by a rule. Satisfies `Speculator`."""

    def __init__(self, drafter: Drafter, rule: Rule = STANDARD, network: ChainDrafter | None = None) -> None:
        """network: the one that drafts with a network: the drafter itself, or one of those that it combines."""
        assert drafter.needs.one_hot, "drafts with probabilities need another verification"
        self.rule = rule
        self.needs = SpecNeeds(
            max_drafts=drafter.needs.max_drafts,
            host_ids=drafter.needs.host_ids,
            network=drafter.needs.network,
            lookahead=drafter.needs.lookahead,
            ids_ahead=drafter.needs.ids_ahead,
            probs=isinstance(rule, LossyRule),
            uniforms=isinstance(rule, Synthetic | Threshold),
            keeps_other_ids=not rule.exact,
        )
        self._drafter = drafter
        self._network = network
        self._synthetic: SyntheticVerification | None = None

    def bind(self, model: DraftModel | None) -> None:
        """Lend the runner's network to the drafter that needs one."""
        assert (model is None) == (self._network is None), "who needs a network is given one, and nobody else"
        if model is not None and self._network is not None:
            self._network.bind(model)

    def observe(self, view: SpecView) -> None:
        """Take in each row's new ids."""
        self._drafter.observe(view)

    def propose(self, view: SpecView, propose_len: Sequence[int]) -> Drafts:
        """Up to propose_len[i] drafts for row i; ids are [num_rows, max_drafts] on the CPU, whatever the lengths."""
        batch = self._drafter.propose(view, propose_len)
        width = self.needs.max_drafts
        ids = np.full((len(view.rows), width), NO_DRAFT, np.int32)
        lens = batch.lens
        for place, length in enumerate(lens):
            if length:
                ids[place, :length] = batch.ids[place]
        return Drafts(torch.from_numpy(ids), lens, methods=batch.methods)

    def verify(
        self,
        target_ids: torch.Tensor,  # [L]
        probs: torch.Tensor | None,  # [L, vocab] for lossy rules
        drafts: torch.Tensor,  # [R, max_len] int32, -1 = none
        uniforms: torch.Tensor | None,  # [R, max_len] where needs says so
        logits_start: torch.Tensor,  # [R + 1]
    ) -> Verdict:
        """Judge by the rule."""
        if isinstance(self.rule, Standard):
            assert probs is None, "these drafts are chosen, not drawn: pass no probabilities"
            verdict = verifiers(drafts.device).one_hot(target_ids, drafts, logits_start)
        elif isinstance(self.rule, Synthetic):
            assert uniforms is not None
            if self._synthetic is None:
                self._synthetic = verifiers(drafts.device).synthetic(self.rule.rates, drafts.device)
            verdict = self._synthetic.verify(target_ids, drafts, logits_start, uniforms)
        else:
            assert probs is not None
            verdict = verify_lossy(self.rule, target_ids, probs, drafts, logits_start, uniforms)
        return Verdict(verdict.num_accepted, verdict.next_ids)

    def forget(self, rows: Sequence[int]) -> None:
        """These device rows changed owner."""
        self._drafter.forget(rows)


def from_config(config: str | Mapping[str, object]) -> DrafterSpeculator:
    """The speculator that a `--speculative-config` describes: JSON text, or the object already parsed.

    Raises StartError naming the key or method that is unknown, unsupported or out of range.
    """
    try:
        parsed = parse_speculation(config)
    except ConfigError as error:
        raise StartError(str(error)) from None
    drafters = [make_drafter(one) for one in parsed.drafters]
    network = next((drafter for drafter in drafters if isinstance(drafter, ChainDrafter)), None)
    drafter = drafters[0] if len(drafters) == 1 else CombinedDrafter(drafters)
    return DrafterSpeculator(drafter, parsed.rule, network)


def make_drafter(config: SpeculativeConfig) -> Drafter:
    """The drafter of one method."""
    if isinstance(config, NgramConfig):
        return NgramDrafter(config)
    if isinstance(config, NetworkConfig):
        return DraftModelDrafter(config.num_speculative_tokens)
    return ArbitraryDrafter(config) if isinstance(config, ArbitraryConfig) else SuffixDrafter(config)
