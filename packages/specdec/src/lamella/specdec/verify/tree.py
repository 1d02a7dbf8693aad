"""Verification of a tree of drafts: several candidates at a position, of which one at most is kept.

    parents = (-1, -1, 0, 0, 1)          last known id ─┬─ node 0 ─┬─ node 2
                                                        │          └─ node 3
                                                        └─ node 1 ─── node 4

The recursive rejection of Miao et al., "SpecInfer" (2024), for children drawn one after the other, and of Jeon et al.,
"Recursive Speculative Decoding" (2024), for children drawn without replacement. At a node with target law p and
children c_1, c_2, … drawn from q, in this order, beginning with r = p:

    accept c_j     if u_j · q(c_j) < r(c_j): go on at c_j
    else           r = max(r - q, 0) over its sum;  without replacement also q = q with c_j set to 0, over its sum
    no child left  next id from r

The joint law of the new tokens is the target's. Children that were chosen, not drawn (the best few of a draft model, as
in EAGLE-2), are each all of their own q: accept c_j if u_j < r(c_j), else set r(c_j) to 0. To judge them as if they had
been drawn would bend the law.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lamella.specdec.batch import NO_DRAFT
from lamella.specdec.errors import InputError
from lamella.specdec.verify.judged import Judged, below_one, check_uniforms, draw, normalised, residual_or


class DraftTree:
    """The shape of a tree, on a device: made once, used in every step."""

    def __init__(self, parents: Sequence[int], device: torch.device | str = "cpu") -> None:
        """parents[n] is the node that node n continues, below n; -1 is the last known id.

        Siblings are tried in the order of their numbers. Raises InputError for a parent that is not before its node.
        """
        for node, parent in enumerate(parents):
            if not -1 <= parent < node:
                raise InputError(f"parents[{node}]: expected -1 or a node before {node}, got {parent}")
        families: list[list[int]] = [[] for _ in range(len(parents) + 1)]  # behind the last known id, node 0, node 1, …
        depth = [0]
        for node, parent in enumerate(parents):
            families[parent + 1].append(node)
            depth.append(depth[parent + 1] + 1)
        self.num_nodes = len(parents)
        self.depth = max(depth)
        """Nodes of the longest path."""
        self.max_children = max(map(len, families))
        padded = [family + [NO_DRAFT] * (self.max_children - len(family)) for family in families]
        self.children = torch.tensor(padded, dtype=torch.long, device=device).reshape(len(families), self.max_children)


@dataclass(frozen=True, slots=True)
class TreeVerdict:
    """Outcome of checking trees: the row's new tokens are the drafts at its path's nodes and then next_id."""

    num_accepted: torch.Tensor  # [num_rows] int32
    path: torch.Tensor  # [num_rows, depth] int32 accepted nodes from the root on, -1 behind the last
    next_ids: torch.Tensor  # [num_rows] int32


def verify_tree(
    tree: DraftTree,
    probs: torch.Tensor,  # [num_logits, vocab] the target's, behind all sampling transforms
    drafts: torch.Tensor,  # [num_rows, num_nodes] NO_DRAFT where a row lacks the node
    logits_start: torch.Tensor,  # [num_rows + 1]
    draft_probs: torch.Tensor | None,  # [num_rows, num_nodes, draft_vocab]; None: the drafts were chosen, not drawn
    accept_uniforms: torch.Tensor,  # [num_rows, num_nodes] in [0, 1)
    next_uniforms: torch.Tensor,  # [num_rows, depth + 1] in [0, 1)
    replacement: bool = False,
) -> TreeVerdict:
    """Follow each row's tree from the last known id to the deepest accepted node, and draw the id behind it.

    Row i's first logits row belongs to the last known id, the (n + 1)th behind it to node n; k logits rows judge the
    first k - 1 nodes. A chain (parents -1, 0, 1, …) is judged exactly as by verify_rejection.

    draft_probs[:, n] is the law of the family of node n before any of it was drawn; only the first present sibling's is
    read. With `replacement` siblings were drawn independently of one another, else each among the ids left by those
    before it. Which nodes a row lacks must not depend on the ids of other nodes at or behind them.

    accept_uniforms[:, n] decides on node n; next_uniforms[:, n] draws the next id behind n accepted nodes. All of them
    must be independent of one another (siblings share a position!) and of the noise that drew the drafts.

    Reads nothing back to the host. Raises InputError naming the argument that does not fit.
    """
    judged = Judged(probs, drafts, logits_start, draft_probs)
    if judged.width != tree.num_nodes:
        raise InputError(
            f"drafts: expected one column for each of the tree's {tree.num_nodes} nodes, got {judged.width}"
        )
    check_uniforms("accept_uniforms", accept_uniforms, (judged.num_rows, judged.width))
    check_uniforms("next_uniforms", next_uniforms, (judged.num_rows, tree.depth + 1))
    path = torch.full((judged.num_rows, tree.depth), NO_DRAFT, dtype=torch.int32, device=drafts.device)
    if probs.shape[0] == 0:
        verdict = judged.no_verdict()
        return TreeVerdict(verdict.num_accepted, path, verdict.next_ids)
    accept = below_one(accept_uniforms)
    num_accepted = torch.zeros_like(judged.start)
    node = torch.full_like(judged.start, -1)  # where each row stands; rows that stay keep their residual
    residual = judged.target(0)
    for level in range(tree.depth):
        child_node, residual = _step(tree, judged, accept, node, num_accepted == level, residual, replacement)
        moved = child_node >= 0
        path[:, level] = child_node
        node = torch.where(moved, child_node, node)
        num_accepted = num_accepted + moved
        residual = torch.where(moved[:, None], judged.target(node + 1), residual)
    next_ids = draw(residual, below_one(next_uniforms).gather(1, num_accepted[:, None])[:, 0])
    verdict = judged.verdict(num_accepted, next_ids)
    return TreeVerdict(verdict.num_accepted, path, verdict.next_ids)


def _step(
    tree: DraftTree,
    judged: Judged,
    accept: torch.Tensor,  # [num_rows, num_nodes] float64
    node: torch.Tensor,  # [num_rows]
    moving: torch.Tensor,  # [num_rows] rows that have not been refused yet
    residual: torch.Tensor,  # [num_rows, vocab] r
    replacement: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # [num_rows] accepted child or -1, [num_rows, vocab] r
    """Try the children of each row's node in order."""
    taken = torch.full_like(node, -1)
    one = torch.ones(judged.num_rows, dtype=torch.float64, device=residual.device)
    family = torch.zeros_like(residual)  # q of the children not tried yet
    begun = torch.zeros_like(moving)
    for j in range(tree.max_children):
        child = tree.children[node + 1, j]
        column = child.clamp(min=0)
        ids = judged.drafts.gather(1, column[:, None])[:, 0]
        tried = moving & (taken < 0) & (child >= 0) & (ids >= 0) & (child + 1 < judged.num_logits)
        if judged.one_hot:
            family = judged.draft(column)
        else:
            family = torch.where((tried & ~begun)[:, None], judged.draft(column), family)
            begun = begun | tried
        q, r = judged.at(family, ids), judged.at(residual, ids)
        stands = tried & (q > 0) & (accept.gather(1, column[:, None])[:, 0] * q < r)
        refused = (tried & ~stands)[:, None]
        residual = torch.where(refused, normalised(residual_or(residual, one, family)), residual)
        taken = torch.where(stands, child, taken)
        if not replacement and not judged.one_hot:
            left = normalised(family * (judged.ids != ids[:, None]))
            family = torch.where(refused, left, family)
    return taken, residual
