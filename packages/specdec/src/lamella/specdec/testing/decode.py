"""The smallest engine: one sequence, drafted and verified until enough tokens are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lamella.specdec.batch import Rows
from lamella.specdec.protocols import Drafter
from lamella.specdec.stats import AcceptanceStats
from lamella.specdec.verify.reference import verify_one_hot


def decode(
    choose: Callable[[Sequence[int]], int],
    prompt: Sequence[int],
    num_tokens: int,
    drafter: Drafter | None = None,
    stats: AcceptanceStats | None = None,
) -> list[int]:
    """num_tokens ids behind the prompt, each chosen by choose(prefix): greedy, or sampled with noise by position.

    With a drafter, every round chooses behind all of its drafts, as one pass of a target model would.
    """
    ids = list(prompt)
    while len(ids) < len(prompt) + num_tokens:
        drafts: Sequence[int] = []
        if drafter is not None:
            view = Rows.single(ids)
            drafter.observe(view)
            drafts = drafter.propose(view, len(prompt) + num_tokens - len(ids) - 1).ids[0]
        target_ids = [choose([*ids, *drafts[:i]]) for i in range(len(drafts) + 1)]
        verdict = verify_one_hot(target_ids, [drafts], [0, len(target_ids)])
        accepted = verdict.num_accepted[0]
        if stats is not None:
            stats.observe([len(drafts)], [accepted])
        ids += [*drafts[:accepted], verdict.next_ids[0]]
    return ids[len(prompt) :]
