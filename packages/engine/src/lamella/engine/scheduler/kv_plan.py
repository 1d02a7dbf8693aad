"""How many blocks each group of KV caches gets, from the bytes there are.

A sequence of n tokens holds ceil(n / block_size) blocks of a full group, but of a sliding one only what its window
covers; while a step computes prompt chunks, the sliding groups hold those as well, once for all sequences together:

    full       S · ceil(n / size)                                               S sequences of n tokens
    sliding    S · (ceil((window + drafts) / size) + 1) + ceil(step tokens / size)

S is chosen as large as the bytes allow, so that all groups run out together; what is left over goes to the full groups.
n is the longest at which max_num_seqs sequences fit, but no less than a few windows: sequences are rarely as long as
max_model_len, and groups that run out together there leave the sliding ones with windows for few sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lamella.engine.errors import CapacityError
from lamella.runner_v2.step import KvGroup, KvLayout, RankReport

BALANCED_WINDOWS = 4
"""However little memory there is, the groups run out together at no shorter length."""


class KvDemand(NamedTuple):
    """What sequences need, at most."""

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_num_drafts: int = 0
    lookahead: int = 0
    depth: int = 1
    """Steps in flight: blocks left of a window come back that many steps late."""


def plan_blocks(reports: Sequence[RankReport], kv_bytes: int, demand: KvDemand) -> KvLayout:
    """Blocks per group, the null block included, within kv_bytes on every rank.

    Raises CapacityError, with the longest length that fits, if not even one sequence of max_model_len does.
    """
    plans = [_plan_rank(report.groups, kv_bytes, demand) for report in reports]
    return KvLayout(tuple(min(counts) for counts in zip(*plans)))


def sequence_bytes(groups: Sequence[KvGroup], length: int, demand: KvDemand) -> int:
    """Bytes without which one sequence of that length, alone, cannot be served."""
    return _bytes(groups, _least(groups, length, demand))


def useful_bytes(groups: Sequence[KvGroup], demand: KvDemand) -> int:
    """Bytes that max_num_seqs sequences of max_model_len can use at once; more would lie idle."""
    least = _least(groups, demand.max_model_len, demand)
    return _bytes(groups, _blocks(groups, demand.max_num_seqs, demand.max_model_len, demand, least))


def max_fitting_len(groups: Sequence[KvGroup], kv_bytes: int, demand: KvDemand) -> int:
    """Longest sequence that kv_bytes hold, alone; 0 if none."""
    return _most(demand.max_model_len, lambda length: _bytes(groups, _least(groups, length, demand)) <= kv_bytes)


def balance_len(groups: Sequence[KvGroup], kv_bytes: int, demand: KvDemand) -> int:
    """Length at which the groups run out together: the longest at which kv_bytes hold max_num_seqs sequences, and at
    least BALANCED_WINDOWS windows."""
    least = _least(groups, demand.max_model_len, demand)

    def fits(length: int) -> bool:
        return _bytes(groups, _blocks(groups, demand.max_num_seqs, length, demand, least)) <= kv_bytes

    widest = max((group.window or 0 for group in groups), default=0)
    return min(demand.max_model_len, max(1, BALANCED_WINDOWS * widest, _most(demand.max_model_len, fits)))


def _plan_rank(groups: Sequence[KvGroup], kv_bytes: int, demand: KvDemand) -> list[int]:
    least = _least(groups, demand.max_model_len, demand)
    if _bytes(groups, least) > kv_bytes:
        longest = max_fitting_len(groups, kv_bytes, demand)
        raise CapacityError(
            f"one sequence of {demand.max_model_len} tokens needs {_bytes(groups, least)} bytes of KV cache, but there "
            f"are {kv_bytes}; the longest that fits has {longest} tokens: lower max_model_len or raise the KV memory",
            longest,
        )
    length = balance_len(groups, kv_bytes, demand)

    def fits(num_sequences: int) -> bool:
        return _bytes(groups, _blocks(groups, num_sequences, length, demand, least)) <= kv_bytes

    of_one = _bytes(groups, [_per_sequence(group, length, demand) for group in groups])
    num_sequences = _most(kv_bytes // max(1, of_one) + 1, fits)
    counts = _blocks(groups, num_sequences, length, demand, least)
    rest = kv_bytes - _bytes(groups, counts)
    growing = [n for n, group in enumerate(groups) if group.kind == "full"] or list(range(len(groups)))
    extra = rest // sum(groups[n].bytes_per_block for n in growing)
    for n in growing:
        counts[n] += extra
    return counts


def _blocks(
    groups: Sequence[KvGroup], num_sequences: int, length: int, demand: KvDemand, least: Sequence[int]
) -> list[int]:
    """For that many sequences of `length` tokens, and at least `least`."""
    if not num_sequences:
        return list(least)
    return [
        max(low, 1 + num_sequences * _per_sequence(group, length, demand) + _shared(group, demand))
        for group, low in zip(groups, least)
    ]


def _least(groups: Sequence[KvGroup], length: int, demand: KvDemand) -> list[int]:
    """For one sequence of `length` tokens that is alone, computed in chunks of at least one block."""
    return [1 + _per_sequence(group, length, demand, slack=1) for group in groups]


def _per_sequence(group: KvGroup, length: int, demand: KvDemand, slack: int = 0) -> int:
    """slack: blocks of prompt chunks beside the window."""
    blocks = -(-(length + demand.lookahead) // group.block_size)
    if group.kind == "sliding":
        assert group.window is not None
        in_flight = demand.depth * (1 + demand.max_num_drafts) + demand.lookahead
        blocks = min(blocks, -(-(group.window + in_flight) // group.block_size) + 1 + slack)
    return blocks


def _shared(group: KvGroup, demand: KvDemand) -> int:
    """Blocks of prompt chunks that wait to slide out of a window."""
    if group.kind != "sliding":
        return 0
    return -(-demand.depth * demand.max_num_batched_tokens // group.block_size)


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to limit that fits, if all smaller ones do; 0 if none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _bytes(groups: Sequence[KvGroup], counts: Sequence[int]) -> int:
    return sum(group.bytes_per_block * count for group, count in zip(groups, counts))
