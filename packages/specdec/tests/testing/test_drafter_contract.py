"""What every drafter promises, the fake included."""

from __future__ import annotations

import pytest

from lamella.specdec import (
    ArbitraryConfig,
    ArbitraryDrafter,
    CombinedDrafter,
    InputError,
    NgramConfig,
    NgramDrafter,
    Rows,
    SuffixConfig,
    SuffixDrafter,
)
from lamella.specdec.drafters.ngram_index import ReferenceNgramIndex
from lamella.specdec.drafters.suffix import index_arguments
from lamella.specdec.drafters.suffix_index import ReferenceSuffixIndex
from lamella.specdec.protocols import Drafter
from lamella.specdec.testing import ScriptedDrafter

SUFFIX = SuffixConfig(3, max_spec_factor=3.0, max_cached_requests=0)  # what others said would be drafted too

MAKERS = {
    "arbitrary": lambda: ArbitraryDrafter(ArbitraryConfig(3)),
    "combined": lambda: CombinedDrafter([SuffixDrafter(SUFFIX), NgramDrafter(NgramConfig(3, 1, 2))]),
    "ngram": lambda: NgramDrafter(NgramConfig(3, 1, 2)),
    "ngram reference": lambda: NgramDrafter(NgramConfig(3, 1, 2), ReferenceNgramIndex(1, 2, False)),
    "suffix": lambda: SuffixDrafter(SUFFIX),
    "suffix reference": lambda: SuffixDrafter(SUFFIX, ReferenceSuffixIndex(*index_arguments(SUFFIX))),
    "scripted": lambda: ScriptedDrafter(lambda ids: [7] * 9, 3),
}


@pytest.fixture(params=sorted(MAKERS))
def drafter(request) -> Drafter:
    return MAKERS[request.param]()


REPEATING = [7, 7, 7, 7]


def test_drafts_stay_within_each_rows_limit_and_the_drafters_own(drafter):
    view = Rows([3, 1, 2], [0, 0, 0], [REPEATING] * 3)
    drafter.observe(view)
    assert drafter.needs.max_drafts == 3
    assert drafter.propose(view, [0, 2, 50]).lens == [0, 2, 3]
    assert drafter.propose(view, 1).lens == [1, 1, 1]


def test_proposing_changes_nothing(drafter):
    view = Rows.single(REPEATING)
    drafter.observe(view)
    first = [list(ids) for ids in drafter.propose(view, 3).ids]
    assert [list(ids) for ids in drafter.propose(view, 3).ids] == first
    drafter.observe(view)
    assert [list(ids) for ids in drafter.propose(view, 3).ids] == first


def test_forgotten_and_reowned_rows_start_afresh(drafter):
    drafter.observe(Rows([0, 1], [0, 0], [REPEATING, REPEATING]))
    drafter.forget([0, 8])
    assert drafter.propose(Rows([0], [0], [REPEATING]), 3).lens == [0]
    assert drafter.propose(Rows([1], [1], [REPEATING]), 3).lens == [0]
    drafter.observe(Rows([1], [1], [[7]]))  # shorter than before: a new owner may be


def test_shrinking_rows_and_negative_ids_are_refused(drafter):
    drafter.observe(Rows.single(REPEATING))
    with pytest.raises(InputError, match="row 0 had 4 ids and now has 3"):
        drafter.observe(Rows.single(REPEATING[:3]))
    with pytest.raises(InputError, match="row 0 has"):
        drafter.observe(Rows.single([*REPEATING, -1]))


def test_an_empty_batch_is_fine(drafter):
    view = Rows([], [], [])
    drafter.observe(view)
    assert drafter.propose(view, 3).ids == []
