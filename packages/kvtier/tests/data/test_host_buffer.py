from __future__ import annotations

import subprocess
import sys
import time

import pytest

from lamella.kvtier import CapacityError
from lamella.kvtier.data.host_buffer import PAGE_BYTES, REGION_BYTES, HostBuffer, free_memory, slots_for


def test_slots_are_page_aligned_and_apart() -> None:
    buffer = HostBuffer([100, 5000], [3, 2], num_ranks=2)
    assert buffer.slot_bytes == (PAGE_BYTES, 3 * PAGE_BYTES)
    assert buffer.offsets == (0, REGION_BYTES)
    views = [(group, slot) for group in (0, 1) for slot in range(buffer.num_slots[group])]
    for n, (group, slot) in enumerate(views):
        buffer.view(group, slot)[:] = bytes([n + 1]) * (2 * buffer.bytes_per_block[group])
    for n, (group, slot) in enumerate(views):
        assert bytes(buffer.view(group, slot)) == bytes([n + 1]) * (2 * buffer.bytes_per_block[group])
    buffer.rank_view(1, 1, 1)[:] = b"r" * 5000
    assert bytes(buffer.view(1, 1)) == bytes([5]) * 5000 + b"r" * 5000
    assert len(buffer.region(1)) == 2 * 3 * PAGE_BYTES
    buffer.close()


def test_a_slot_that_is_not_there_is_refused() -> None:
    buffer = HostBuffer([100], [3])
    for slot in (-1, 3):
        with pytest.raises(IndexError, match=f"slot {slot} of group 0, which has 3"):
            buffer.view(0, slot)
    buffer.close()


def test_another_process_sees_the_same_bytes() -> None:
    buffer = HostBuffer([8], [4])
    buffer.view(0, 2)[:] = b"original"
    code = (
        "import sys; from lamella.kvtier.data.host_buffer import HostBuffer; "
        "other = HostBuffer([8], [4], fd=int(sys.argv[1])); assert bytes(other.view(0, 2)) == b'original'; "
        "other.view(0, 3)[:] = b'answered'"
    )
    subprocess.run([sys.executable, "-c", code, str(buffer.fd)], pass_fds=[buffer.fd], check=True)
    assert bytes(buffer.view(0, 3)) == b"answered"
    buffer.close()


def test_more_than_the_memory_is_refused_with_both_figures() -> None:
    with pytest.raises(CapacityError, match=r"needs 4\.00 GiB of memory, but 1\.00 GiB are left"):
        HostBuffer([1 << 20], [4096], available_bytes=1 << 30)
    with pytest.raises(CapacityError, match="ram="):
        HostBuffer([1 << 30], [1 << 20])
    assert 0 < free_memory() < 1 << 50


def test_a_large_slab_costs_no_time_at_the_start() -> None:
    start = time.perf_counter()
    buffer = HostBuffer([2 << 20], [20 << 10], available_bytes=1 << 50)
    buffer.view(0, 20_000)[:4] = b"last"
    seconds = time.perf_counter() - start
    assert buffer.num_bytes == 40 << 30
    assert seconds < 0.5
    buffer.close()


def test_slots_are_shared_out_in_proportion() -> None:
    sizes, weights = [1 << 20, 3 << 20], [3, 1]
    slots = slots_for(1 << 30, sizes, weights)
    assert slots[0] == pytest.approx(3 * slots[1], abs=3)
    used = HostBuffer(sizes, slots, available_bytes=1 << 40)
    assert (1 << 30) - (8 << 20) < used.num_bytes <= 1 << 30
    used.close()
    with pytest.raises(CapacityError, match="not even one block of every group"):
        slots_for(1 << 20, sizes, weights)
