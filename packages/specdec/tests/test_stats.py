from __future__ import annotations

import pytest

from lamella.specdec import AcceptanceStats, LengthStats


def test_counts_steps_tokens_and_positions():
    stats = AcceptanceStats()
    stats.observe([3, 0, 2], [3, 0, 0])
    stats.observe([3], [1])
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 8, 4)
    assert stats.accepted_per_pos == [2, 1, 1]
    assert stats.mean_acceptance_length == pytest.approx(1 + 4 / 3)
    assert stats.acceptance_rate == 0.5
    assert stats.rate_per_pos == pytest.approx([2 / 3, 1 / 3, 1 / 3])


def test_nothing_drafted_is_a_length_of_one():
    stats = AcceptanceStats()
    stats.observe([0, 0], [0, 0])
    assert (stats.num_drafts, stats.mean_acceptance_length, stats.acceptance_rate) == (0, 1.0, 0.0)
    assert stats.rate_per_pos == []


def test_more_accepted_than_drafted_is_a_bug():
    with pytest.raises(AssertionError):
        AcceptanceStats().observe([2], [3])


def test_an_interval_is_the_difference_of_totals():
    stats = AcceptanceStats()
    stats.observe([2], [1])
    before = stats.copy()
    stats.observe([4], [4])
    interval = stats.since(before)
    assert (interval.num_drafts, interval.num_draft_tokens, interval.num_accepted_tokens) == (1, 4, 4)
    assert interval.accepted_per_pos == [1, 1, 1, 1]
    assert before.accepted_per_pos == [1]
    assert interval.log_line(2.0) == (
        "SpecDecoding metrics: Mean acceptance length: 5.00, Accepted throughput: 2.00 tokens/s, "
        "Drafted throughput: 2.00 tokens/s, Accepted: 4 tokens, Drafted: 4 tokens, "
        "Per-position acceptance rate: 1.000, 1.000, 1.000, 1.000, Avg Draft acceptance rate: 100.0%"
    )


def test_an_interval_without_drafts_has_a_line():
    stats = AcceptanceStats()
    stats.observe([2], [2])
    assert "Per-position acceptance rate: 0.000, 0.000, " in stats.since(stats.copy()).log_line(1.0)


def test_lengths_and_reasons_are_counted():
    stats = LengthStats()
    stats.observe(2, 5)
    stats.observe(0, 3)
    stats.observe_off("not_paying")
    stats.observe(0, 0)
    stats.observe_off("nothing_found")
    stats.observe_off("nothing_found")
    assert stats.lens == [2, 0, 1]
    assert stats.off == {"not_paying": 1, "nothing_found": 2}
    assert stats.num_unverified == 6
