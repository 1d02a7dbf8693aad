"""Drafts one after the other, against a network whose answers are known: it continues what it has been shown."""

from __future__ import annotations

import random

import pytest

from lamella.specdec.batch import Computed, Rows

torch = pytest.importorskip("torch")
from lamella.specdec.networks.chain import DraftModelDrafter  # noqa: E402  # imports torch

VOCAB = 11


class Remembering:
    """A network that keeps what it is shown of each row, as KV would, and chooses by all of it."""

    vocab_size = VOCAB

    def __init__(self) -> None:
        self.kept: dict[int, list[int]] = {}
        self.passes: list[int] = []

    def forward(self, rows, starts, lens, ids, hidden=None):
        assert ids.dtype == torch.int32
        self.passes.append(len(ids))
        out, end = [], 0
        for row, start, length in zip(rows, starts, lens, strict=True):
            kept = self.kept.setdefault(row, [])
            assert start <= len(kept), f"row {row} skips from {len(kept)} to {start}"
            for token_id in ids[end : end + length].tolist():
                del kept[start:]
                kept.append(token_id)
                start += 1
                out.append([float(sum((n + 1) * x for n, x in enumerate(kept)) % VOCAB)])
            end += length
        return torch.tensor(out)

    def logits(self, hidden):
        return -((torch.arange(VOCAB) - hidden - 1) % VOCAB).float()

    def target_ids(self, ids):
        return ids


def continued(ids: list[int], count: int) -> list[int]:
    """What the network would choose behind ids, count times."""
    found = list(ids)
    for _ in range(count):
        found.append((sum((n + 1) * x for n, x in enumerate(found)) + 1) % VOCAB)
    return found[len(ids) :]


def view(rows: dict[int, tuple[int, int, list[int]]], generation: int = 1) -> Rows:
    """row -> (start, end, all its ids, one behind end at least)."""
    ids = [token_id for start, end, known in rows.values() for token_id in known[start : end + 1]]
    return Rows(
        list(rows), [generation] * len(rows), [known for _, _, known in rows.values()],
        computed=Computed(
            list(range(len(rows))), [start for start, _, _ in rows.values()], [end for _, end, _ in rows.values()],
            [1] * len(rows), torch.tensor(ids, dtype=torch.int32),
        ),
    )  # fmt: skip


def test_random_lives_of_rows_draft_what_the_network_would_say() -> None:
    """Chunks, accepted drafts and rejected ones, rows that come and go, with and without proposals."""
    rng = random.Random(4)
    network, drafter = Remembering(), DraftModelDrafter(5)
    drafter.bind(network)
    ids: dict[int, list[int]] = {}
    computed: dict[int, int] = {}
    num_drafts = 0
    for step in range(200):
        for row in range(3):
            if row in ids and rng.random() < 0.1:
                del ids[row]
                network.kept.pop(row, None)
                drafter.forget([row])
            if row not in ids:
                ids[row], computed[row] = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 9))], 0
        rows = {}
        for row in rng.sample(range(3), rng.randint(1, 3)):
            start, known = computed[row], len(ids[row])
            if known - start > 1 and rng.random() < 0.6:  # part of a prompt
                end = start + rng.randint(1, known - start - 1)
            else:
                end = known + rng.randint(0, 3)
                ids[row] += [rng.randrange(VOCAB) for _ in range(end + 1 - known)]
            rows[row] = (start, end, ids[row])
            computed[row] = end
        seen = view(rows)
        drafter.observe(seen)
        lens = [rng.randint(0, 7) if len(known) == end + 1 else 0 for _, end, known in rows.values()]
        drafts = drafter.propose(seen, lens).ids
        for (row, (_, end, known)), length, found in zip(rows.items(), lens, drafts, strict=True):
            assert list(found) == continued(known[: end + 1], min(length, 5)), f"step {step}, row {row}"
            num_drafts += len(found)
    assert num_drafts > 300


def test_a_row_with_a_prefix_from_the_cache_begins_behind_it() -> None:
    network, drafter = Remembering(), DraftModelDrafter(2)
    drafter.bind(network)
    network.kept[0] = [1, 2, 3, 4]
    drafter.observe(view({0: (4, 6, [1, 2, 3, 4, 5, 6, 7])}))
    assert network.passes == [3]
    assert network.kept[0] == [1, 2, 3, 4, 5, 6, 7]


def test_a_new_owner_of_a_row_is_shown_from_its_own_start() -> None:
    network, drafter = Remembering(), DraftModelDrafter(2)
    drafter.bind(network)
    drafter.observe(view({0: (0, 3, [1, 2, 3, 4])}))
    drafter.observe(view({0: (0, 1, [5, 6])}, generation=2))
    assert network.kept[0] == [5, 6]


def test_needs_and_misuse() -> None:
    drafter = DraftModelDrafter(3)
    assert (drafter.needs.network, drafter.needs.lookahead, drafter.needs.one_hot) == (True, 3, True)
    with pytest.raises(AssertionError, match="must be told what was computed"):
        drafter.observe(Rows.single([1, 2]))
    with pytest.raises(AssertionError, match="bind"):
        drafter.observe(view({0: (0, 1, [1, 2])}))
    drafter.bind(Remembering())
    assert drafter.propose(Rows.single([1, 2]), 3).ids == [[]]
