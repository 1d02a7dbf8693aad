from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from lamella.kvtier import CopyJob, LayoutError, Location, TicketResult
from lamella.kvtier.data.fp8 import Fp8Codec, RowGeometry
from lamella.kvtier.data.host_buffer import HostBuffer
from lamella.kvtier.data.mover import TierMover
from lamella.kvtier.jobs import TierEvent
from lamella.kvtier.testing.memory_store import MemoryStore

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def setting(dtype: str, num_slots: int = 4, layers: int = 3) -> tuple[HostBuffer, Fp8Codec, tuple[int, ...]]:
    shape = (layers, 2, 2, 16, 64)
    buffer = HostBuffer([torch.Size(shape).numel() * DTYPES[dtype].itemsize], [num_slots])
    return buffer, Fp8Codec(buffer, [RowGeometry(2, 16, 64, dtype, layers)], num_scratch=2), shape


def values(buffer: HostBuffer, slot: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(buffer.view(0, slot), dtype=DTYPES[dtype]).view(shape)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_the_error_is_that_of_three_bits_of_mantissa(dtype: str) -> None:
    buffer, codec, shape = setting(dtype)
    generator = torch.Generator().manual_seed(1)
    sizes = torch.logspace(-3, 2, 12).view(3, 2, 2, 1, 1)  # heads differ in size by far
    original = (torch.randn(shape, generator=generator) * sizes).to(DTYPES[dtype])
    values(buffer, 1, dtype, shape).copy_(original)
    record = codec.view(0, 0)
    codec.pack(0, buffer.view(0, 1), record)
    codec.unpack(0, record, buffer.view(0, 2))
    back = values(buffer, 2, dtype, shape)
    largest = original.float().abs().amax((3, 4), keepdim=True)
    error = (back.float() - original.float()).abs()
    bound = original.float().abs() / 16 + largest * 2.0**-18 + 2.0**-24  # the last is of float16
    assert bool((error <= bound * 1.01).all())
    relative = float((error / largest).square().mean().sqrt() / (original.float() / largest).square().mean().sqrt())
    assert relative < 0.03
    assert len(record) == 12 * 4 + original.numel()
    assert len(record) < 0.51 * buffer.bytes_per_block[0]


def test_zeros_and_largest_values_come_back_as_they_were() -> None:
    buffer, codec, shape = setting("float32")
    slot = values(buffer, 0, "float32", shape)
    slot.zero_()
    slot[1, 0, 1] = 3.4e38
    slot[2, 1, 0] = -1e-30
    record = codec.view(0, 1)
    codec.pack(0, buffer.view(0, 0), record)
    codec.unpack(0, record, buffer.view(0, 1))
    torch.testing.assert_close(values(buffer, 1, "float32", shape), slot, rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_values_that_are_not_finite_are_not_stored(value: float) -> None:
    buffer, codec, shape = setting("bfloat16")
    values(buffer, 0, "bfloat16", shape)[0, 0, 0, 0, 0] = value
    with pytest.raises(ValueError, match="not finite"):
        codec.pack(0, buffer.view(0, 0), codec.view(0, 0))


def test_rows_of_another_form_are_refused() -> None:
    buffer = HostBuffer([4096], [2])
    with pytest.raises(LayoutError, match="rows of uint8 are not stored as fp8"):
        Fp8Codec(buffer, [RowGeometry(1, 16, 64, "uint8", 2)])
    with pytest.raises(LayoutError, match="makes 8192 bytes a block, its slots hold 4096"):
        Fp8Codec(buffer, [RowGeometry(1, 16, 64, "bfloat16", 2)])
    assert Fp8Codec.fingerprint(b"f" * 16) != b"f" * 16


def test_blocks_go_to_disk_and_back_through_few_places() -> None:
    buffer, codec, shape = setting("float32", num_slots=20)
    store = MemoryStore()
    mover = TierMover(buffer, store=store, codec=codec)
    for slot in range(10):
        values(buffer, slot, "float32", shape).copy_(torch.randn(shape))
    values(buffer, 9, "float32", shape)[0] = float("nan")
    size = buffer.bytes_per_block[0]

    def run(jobs: list[CopyJob]) -> list[bool]:
        mover.submit(jobs)
        events: list[TierEvent] = []
        end = time.monotonic() + 20.0
        while len(events) < len(jobs) and time.monotonic() < end:
            mover.wait(1.0)
            events += mover.poll()
        ended = {event.ticket: event.ok for event in events if isinstance(event, TicketResult)}
        return [ended[job.ticket] for job in jobs]

    disk = Location("disk", 0, 0)
    down = [CopyJob(n, bytes([n]) * 32, Location("host", 0, n), disk, size) for n in range(10)]
    assert run(down) == [True] * 9 + [False]
    assert {len(data) for _, data in store.records.values()} == {codec.packed_bytes[0]}
    up = [CopyJob(20 + n, bytes([n]) * 32, disk, Location("host", 0, 10 + n), size) for n in range(10)]
    assert run(up) == [True] * 9 + [False]
    for n in range(9):
        torch.testing.assert_close(
            values(buffer, 10 + n, "float32", shape), values(buffer, n, "float32", shape), rtol=0.0626, atol=1e-2
        )
    mover.close()


@pytest.mark.slow
def test_cost(record_property: Callable[[str, object], None]) -> None:
    """How fast a core packs and unpacks."""
    buffer, codec, shape = setting("bfloat16", num_slots=2, layers=32)
    values(buffer, 0, "bfloat16", shape).copy_(torch.randn(shape))
    record = codec.view(0, 0)
    for name, act in (
        ("pack", lambda: codec.pack(0, buffer.view(0, 0), record)),
        ("unpack", lambda: codec.unpack(0, record, buffer.view(0, 1))),
    ):
        act()
        start = time.perf_counter()
        for _ in range(20):
            act()
        speed = 20 * buffer.bytes_per_block[0] / (time.perf_counter() - start)
        record_property("figure", f"fp8 {name}: {speed / 1e9:.2f} GB/s of bfloat16")
        assert speed > 5e7
