from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.engine.errors import CapacityError
from lamella.engine.scheduler.kv_plan import KvDemand, balance_len, max_fitting_len, plan_blocks
from lamella.runner_v2.step import KvGroup, RankReport


def report(*windows: int | None, sizes: tuple[int, ...] = (100, 30), rank: int = 0) -> RankReport:
    groups = tuple(
        KvGroup(f"g{n}", "full" if w is None else "sliding", 16, size, (n,), window=w)
        for n, (w, size) in enumerate(zip(windows, sizes))
    )
    return RankReport(rank, groups, 10**9, 0, 1000, "none")


def test_one_full_group_takes_everything() -> None:
    layout = plan_blocks([report(None)], 100 * 1000 + 99, KvDemand(1024, 512, 8))
    assert layout.num_blocks == (1000,)


def test_full_and_sliding_groups_run_out_together() -> None:
    demand = KvDemand(max_model_len=4096, max_num_batched_tokens=512, max_num_seqs=100)
    kv_bytes = 4_000_000
    layout = plan_blocks([report(None, 512)], kv_bytes, demand)
    full, sliding = layout.num_blocks
    assert kv_bytes - 100 < full * 100 + sliding * 30 <= kv_bytes
    sequences = (full - 1) // 256
    assert (sliding - 1 - 32) // 34 == sequences
    assert sequences == 150  # of 256 · 100 + 34 · 30 bytes each


def test_the_groups_run_out_at_the_length_of_as_many_sequences_as_may_run() -> None:
    groups = report(None, 512).groups
    demand = KvDemand(max_model_len=65_536, max_num_batched_tokens=512, max_num_seqs=100)
    length = balance_len(groups, 2_000_000, demand)
    full, sliding = plan_blocks([report(None, 512)], 2_000_000, demand).num_blocks
    assert 2048 < length < 65_536
    assert (full - 1) // -(-length // 16) == 100 == (sliding - 1 - 32) // 34
    assert balance_len(groups, 2_000_000, demand._replace(max_num_seqs=1000)) == 4 * 512
    assert balance_len(groups, 2_000_000, demand._replace(max_model_len=700)) == 700


def test_windows_are_there_for_many_sequences_of_a_model_with_few_full_layers() -> None:
    """Of 26 layers with 1 KiB per token each, 22 slide over 512 tokens; the context is long and memory is short."""
    one = report(None, 512, sizes=(4 * 16 * 1024, 22 * 16 * 1024))
    demand = KvDemand(max_model_len=32_768, max_num_batched_tokens=512, max_num_seqs=128)
    full, sliding = plan_blocks([one], 1 << 30, demand).num_blocks
    long, short = 32_768 // 16, 1024 // 16
    assert full - 1 >= long  # one longest sequence still fits
    # at the longest length alone the windows would last for seven sequences
    assert min((full - 1) // short, (sliding - 1 - 32) // 34) >= 50


def test_the_rank_with_the_least_decides() -> None:
    ranks = [report(None, sizes=(100,)), report(None, sizes=(200,), rank=1)]
    assert plan_blocks(ranks, 100_000, KvDemand(1024, 512, 8)).num_blocks == (500,)


def test_too_little_names_both_figures_and_what_fits() -> None:
    text = r"1024 tokens needs 6500 bytes .* there are 3300; .* has 512 tokens"
    with pytest.raises(CapacityError, match=text) as info:
        plan_blocks([report(None)], 3300, KvDemand(1024, 512, 8))
    assert info.value.max_len == 512
    assert plan_blocks([report(None)], 3300, KvDemand(512, 512, 8)).num_blocks == (33,)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    st.lists(st.sampled_from([None, 1, 30, 512]), min_size=1, max_size=2),
    st.integers(0, 60_000),
    st.integers(1, 2000),
    st.integers(1, 600),
    st.integers(1, 100),
    st.integers(0, 4),
)
def test_plans_fit_and_hold_one_longest_sequence(
    windows: list[int | None], kv_bytes: int, max_len: int, step_tokens: int, num_seqs: int, drafts: int
) -> None:
    one = report(*windows)
    demand = KvDemand(max_len, step_tokens, num_seqs, drafts, lookahead=drafts, depth=2)
    longest = max_fitting_len(one.groups, kv_bytes, demand)
    if longest < max_len:
        with pytest.raises(CapacityError) as info:
            plan_blocks([one], kv_bytes, demand)
        assert info.value.max_len == longest
        return
    layout = plan_blocks([one], kv_bytes, demand)
    assert sum(g.bytes_per_block * n for g, n in zip(one.groups, layout.num_blocks)) <= kv_bytes
    for group, count in zip(one.groups, layout.num_blocks):
        held = max_len + drafts if group.window is None else min(max_len + drafts, group.window + 2 * (1 + drafts))
        assert (count - 1) * 16 >= held
