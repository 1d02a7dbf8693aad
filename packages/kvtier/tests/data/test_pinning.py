from __future__ import annotations

from lamella.kvtier.data.host_buffer import PAGE_BYTES, HostBuffer
from lamella.kvtier.data.pinning import SlabPinner


def test_slabs_are_pinned_in_turns_and_a_refusal_leaves_the_rest() -> None:
    buffer = HostBuffer([PAGE_BYTES, PAGE_BYTES], [8, 4])
    pinned: list[int] = []
    unpinned: list[int] = []

    def register(address: int, num_bytes: int) -> int:
        if len(pinned) == 2:
            return 2
        pinned.append(address)
        assert num_bytes == 3 * PAGE_BYTES
        return 0

    pinner = SlabPinner(buffer, register, lambda address: unpinned.append(address) or 0, slab_bytes=3 * PAGE_BYTES)
    pinner.wait(5.0)
    assert pinner.ready == [3, 3]
    assert pinner.covers(0, 2)
    assert not pinner.covers(0, 3)
    pinner.close()
    assert unpinned == pinned


def test_all_slots_are_pinned_in_the_end() -> None:
    buffer = HostBuffer([PAGE_BYTES, 3 * PAGE_BYTES], [7, 5])
    sizes: list[int] = []
    pinner = SlabPinner(buffer, lambda _, size: sizes.append(size) or 0, lambda _: 0, slab_bytes=4 * PAGE_BYTES)
    assert pinner.wait(5.0)
    assert pinner.ready == [7, 5]
    assert sorted(sizes) == [3 * PAGE_BYTES] * 6 + [4 * PAGE_BYTES]
    pinner.close()
