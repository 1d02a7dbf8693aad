"""The laws of verified tokens, exactly: an oracle for every verification that draws.

Everything is written from the papers' definitions in rational numbers, for vocabularies and lengths small enough to
enumerate every draft. A law is a dict from the tokens of one step (accepted drafts, then the next id) to their
probability; `completed` fills it up to a fixed length by plain sampling, where it must equal `target_law`.

An implementation is compared without sampling noise. For given drafts its outcome is constant on the cells that the
`Fate`'s thresholds cut out of the cube of uniforms, so it is asked just inside the corners of every cell:

    u_1   0 ─────────── t_1 ───────── 1
            x         x     x       x        a cell whose corners disagree has its threshold elsewhere
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

Ids = tuple[int, ...]
Law = dict[Ids, Fraction]
Row = list[Fraction]
"""Probability of each id."""
Probs = Callable[[Sequence[int]], Sequence[Fraction]]
"""Probability of each id behind a prefix."""

ONE = Fraction(1)


class Fate(NamedTuple):
    """What happens to given drafts of a chain."""

    thresholds: list[Fraction]
    """Per draft: its decision is yes where its uniform lies below."""
    stop: list[Fraction]
    """[k + 1] probability that exactly n drafts are accepted."""
    next_rows: list[Row]
    """[k + 1] law of the next id behind n accepted drafts."""


class TreeFate(NamedTuple):
    """What happens to a given tree."""

    thresholds: list[Fraction]
    """Per node: where the walk tries it, it is accepted if its uniform lies below."""
    stop: dict[Ids, Fraction]
    """Accepted path of nodes -> probability."""
    next_rows: dict[Ids, Row]
    """Accepted path of nodes -> law of the next id."""


def target_law(target: Probs, num_tokens: int) -> Law:
    """Law of num_tokens ids sampled one by one."""
    return completed({(): ONE}, target, num_tokens)


def completed(law: Law, target: Probs, num_tokens: int) -> Law:
    """The law of at most num_tokens ids, filled up to num_tokens by sampling from the target."""
    done: Law = defaultdict(Fraction)
    waiting = dict(law)
    while waiting:
        ids, prob = waiting.popitem()
        if not prob:
            continue
        if len(ids) == num_tokens:
            done[ids] += prob
            continue
        for token_id, step in enumerate(target(ids)):
            longer = (*ids, token_id)
            waiting[longer] = waiting.get(longer, Fraction(0)) + prob * step
    return dict(done)


def rejection_fate(target: Probs, draft: Probs | None, drafts: Ids) -> Fate:
    """Standard rejection sampling (Leviathan et al. 2023, Chen et al. 2023); draft None: chosen drafts."""
    thresholds: list[Fraction] = []
    next_rows: list[Row] = []
    for i, token_id in enumerate(drafts):
        p, q = list(target(drafts[:i])), _draft_row(target, draft, drafts[:i], token_id)
        thresholds.append(min(ONE, p[token_id] / q[token_id]))
        next_rows.append(_scaled([max(a - b, Fraction(0)) for a, b in zip(p, q)]))
    next_rows.append(list(target(drafts)))
    stop = []
    alive = ONE
    for threshold in thresholds:
        stop.append(alive * (1 - threshold))
        alive *= threshold
    return Fate(thresholds, [*stop, alive], next_rows)


def block_fate(target: Probs, draft: Probs | None, drafts: Ids) -> Fate:
    """Block verification (Sun et al. 2024)."""
    k = len(drafts)
    thresholds: list[Fraction] = []
    next_rows: list[Row] = []
    weight = ONE
    for i in range(k + 1):
        if i > 0:
            before = drafts[: i - 1]
            q_before = _draft_row(target, draft, before, drafts[i - 1])[drafts[i - 1]]
            weight = min(ONE, weight * target(before)[drafts[i - 1]] / q_before)
        if i == k:
            thresholds += [weight] if k else []
            next_rows.append(list(target(drafts)))
            break
        p, q = target(drafts[:i]), _draft_row(target, draft, drafts[:i], drafts[i])
        rest = [max(weight * a - b, Fraction(0)) for a, b in zip(p, q)]
        next_rows.append(_scaled(rest))
        if i > 0:
            whole = sum(rest) + 1 - weight
            thresholds.append(sum(rest, Fraction(0)) / whole if whole else ONE)
    stop = [Fraction(0)] * (k + 1)
    none_longer = ONE
    for n in range(k, 0, -1):
        stop[n] = none_longer * thresholds[n - 1]
        none_longer *= 1 - thresholds[n - 1]
    stop[0] = none_longer
    return Fate(thresholds, stop, next_rows)


def tree_fate(
    target: Probs, draft: Probs | None, parents: Sequence[int], ids: Ids, replacement: bool = False
) -> TreeFate:
    """Recursive rejection along a tree (SpecInfer 2024; without replacement: Jeon et al. 2024)."""
    thresholds = [Fraction(0)] * len(parents)
    stop: dict[Ids, Fraction] = {}
    next_rows: dict[Ids, Row] = {}

    def walk(node: int, path: Ids, prob: Fraction) -> None:
        prefix = tuple(ids[n] for n in path)
        r = list(target(prefix))
        gone: list[int] = []
        for child in (n for n, parent in enumerate(parents) if parent == node):
            if draft is None:
                q = [ONE if x == ids[child] else Fraction(0) for x in range(len(r))]
            else:
                q = _without(draft(prefix), [] if replacement else gone)
            # a child to which q gives nothing cannot have been drawn
            yes = min(ONE, r[ids[child]] / q[ids[child]]) if q[ids[child]] else Fraction(0)
            thresholds[child] = yes
            walk(child, (*path, child), prob * yes)
            prob *= 1 - yes
            rest = [max(a - b, Fraction(0)) for a, b in zip(r, q)]
            r = _scaled(rest) if sum(rest) else r
            gone.append(ids[child])
        stop[path] = prob
        next_rows[path] = r

    walk(-1, (), ONE)
    return TreeFate(thresholds, stop, next_rows)


def drafts_law(draft: Probs, num_drafts: int) -> Law:
    """Every chain that a drafter may draw."""
    return target_law(draft, num_drafts)


def trees_law(draft: Probs, parents: Sequence[int], replacement: bool = False) -> Law:
    """Every tree that a drafter may draw: ids by node. A family that outgrows the support of q repeats id 0 there."""
    law: Law = {(): ONE}
    for node, parent in enumerate(parents):
        longer: Law = defaultdict(Fraction)
        for ids, prob in law.items():
            prefix: Ids = ()
            above = parent
            while above >= 0:
                prefix = (ids[above], *prefix)
                above = parents[above]
            gone = [] if replacement else [ids[n] for n in range(node) if parents[n] == parent]
            row = _without(draft(prefix), gone)
            if not sum(row):
                row = [ONE, *row[1:]]
            for token_id, step in enumerate(row):
                if step:
                    longer[ids + (token_id,)] += prob * step
        law = dict(longer)
    return law


def emitted(fate: Fate, drafts: Ids) -> Law:
    """Law of the tokens of one step, given its drafts."""
    law: Law = defaultdict(Fraction)
    for n, prob in enumerate(fate.stop):
        for token_id, step in enumerate(fate.next_rows[n]):
            law[drafts[:n] + (token_id,)] += prob * step
    return {ids: prob for ids, prob in law.items() if prob}


def tree_emitted(fate: TreeFate, ids: Ids) -> Law:
    """Law of the tokens of one step, given its tree."""
    law: Law = defaultdict(Fraction)
    for path, prob in fate.stop.items():
        for token_id, step in enumerate(fate.next_rows[path]):
            law[tuple(ids[n] for n in path) + (token_id,)] += prob * step
    return {tokens: prob for tokens, prob in law.items() if prob}


def mixed(parts: Iterable[tuple[Fraction, Law]]) -> Law:
    """Sum of laws by weight."""
    law: Law = defaultdict(Fraction)
    for weight, part in parts:
        for ids, prob in part.items():
            law[ids] += weight * prob
    return dict(law)


def mean_accepted(law: Law) -> Fraction:
    """Expected number of accepted drafts: every step emits one token more."""
    return sum((prob * (len(ids) - 1) for ids, prob in law.items()), Fraction(0))


def overlap(target: Probs, draft: Probs, num_drafts: int) -> Fraction:
    """Σ over n and d_1 … d_n of Π min(p, q): what standard rejection sampling accepts on average."""
    total = Fraction(0)
    level: Law = {(): ONE}
    for _ in range(num_drafts):
        level = {
            (*ids, token_id): prob * min(p, q)
            for ids, prob in level.items()
            for token_id, (p, q) in enumerate(zip(target(ids), draft(ids)))
        }
        total += sum(level.values())
    return total


class Cell(NamedTuple):
    """A box of uniforms, and points just inside its corners."""

    volume: float
    corners: list[tuple[float, ...]]


def cells(axes: Sequence[Iterable[Fraction]], inset: float = 1e-9) -> Iterator[Cell]:
    """The boxes into which each axis' breakpoints cut the unit cube; those thinner than the inset are left out."""
    spans = []
    for axis in axes:
        edges = sorted({0.0, 1.0, *(float(edge) for edge in axis)})
        spans.append([(lo, hi) for lo, hi in itertools.pairwise(edges) if hi - lo > 3 * inset])
    for box in itertools.product(*spans):
        volume = 1.0
        for lo, hi in box:
            volume *= hi - lo
        yield Cell(volume, list(itertools.product(*((lo + inset, hi - inset) for lo, hi in box))))


def running_sums(rows: Iterable[Row]) -> set[Fraction]:
    """Where an inverse CDF of any of the rows steps."""
    return {total for row in rows for total in itertools.accumulate(row)}


def _draft_row(target: Probs, draft: Probs | None, prefix: Ids, token_id: int) -> Row:
    if draft is not None:
        return list(draft(prefix))
    return [ONE if x == token_id else Fraction(0) for x in range(len(target(prefix)))]


def _without(row: Sequence[Fraction], gone: Sequence[int]) -> Row:
    return _scaled([Fraction(0) if x in gone else prob for x, prob in enumerate(row)])


def _scaled(row: Row) -> Row:
    total = sum(row)
    return [prob / total for prob in row] if total else row
