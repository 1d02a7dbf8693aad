"""A speculator that knows the future: drafts come from scripts, right or wrong as the test wants them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from lamella.runner_v2.protocols import DraftModel, Drafts, SpecNeeds, SpecView, Verdict

Script = Callable[[int, Sequence[int], int], Sequence[int]]
"""(device row, ids so far, how many) -> drafts, fewer if it likes."""


class ScriptedSpeculator:
    """Satisfies Speculator; verification is the rule spelt out in plain loops. Remembers what it was shown."""

    def __init__(self, script: Script, max_drafts: int) -> None:
        self.needs = SpecNeeds(max_drafts=max_drafts, host_ids=True)
        self.script = script
        self.views: list[SpecView] = []
        self.forgotten: list[int] = []
        self.num_accepted: list[int] = []

    def bind(self, model: DraftModel | None) -> None:
        assert model is None, "scripts need no network"

    def observe(self, view: SpecView) -> None:
        self.views.append(view._replace(token_ids=[list(ids) for ids in view.token_ids]))

    def propose(self, view: SpecView, propose_len: Sequence[int]) -> Drafts:
        drafts = [
            list(self.script(row, ids, length))[:length] if length else []
            for row, ids, length in zip(view.rows, view.token_ids, propose_len, strict=True)
        ]
        width = self.needs.max_drafts
        ids = torch.tensor([d + [-1] * (width - len(d)) for d in drafts], dtype=torch.int32).reshape(-1, width)
        return Drafts(ids, [len(d) for d in drafts])

    def verify(
        self,
        target_ids: torch.Tensor,
        probs: torch.Tensor | None,
        drafts: torch.Tensor,
        uniforms: torch.Tensor | None,
        logits_start: torch.Tensor,
    ) -> Verdict:
        chosen, starts = target_ids.tolist(), logits_start.tolist()
        accepted, next_ids = [], []
        for row, (start, end) in enumerate(pairwise(starts)):
            count = 0
            while count < end - start - 1 and int(drafts[row, count]) == chosen[start + count]:
                count += 1
            accepted.append(count)
            next_ids.append(chosen[start + count])
        self.num_accepted.extend(accepted)
        return Verdict(torch.tensor(accepted, dtype=torch.int32), torch.tensor(next_ids, dtype=torch.int32))

    def forget(self, rows: Sequence[int]) -> None:
        self.forgotten.extend(rows)
