from __future__ import annotations

import pytest

from lamella.kvtier.data import frame

FINGERPRINT, KEY, PARENT = b"f" * 16, b"k" * 32, b"p" * 32
PAYLOAD = memoryview(bytes(range(256)) * 4)


def test_a_frame_holds_what_was_packed() -> None:
    packed = frame.pack(FINGERPRINT, 3, KEY, PARENT, PAYLOAD)
    assert frame.fault(memoryview(packed), FINGERPRINT, 3, KEY) is None
    assert bytes(packed[frame.HEADER_BYTES :]) == bytes(PAYLOAD)


def test_every_flipped_bit_is_noticed() -> None:
    packed = frame.pack(FINGERPRINT, 3, KEY, PARENT, PAYLOAD)
    for byte in range(len(packed)):
        for bit in (1, 128):
            packed[byte] ^= bit
            assert frame.fault(memoryview(packed), FINGERPRINT, 3, KEY) is not None, f"byte {byte}"
            packed[byte] ^= bit


@pytest.mark.parametrize(
    ("wanted", "fault"),
    [
        ((b"F" * 16, 3, KEY), "another block"),
        ((FINGERPRINT, 2, KEY), "another block"),
        ((FINGERPRINT, 3, b"K" * 32), "another block"),
    ],
)
def test_another_block_is_noticed(wanted: tuple[bytes, int, bytes], fault: str) -> None:
    packed = frame.pack(FINGERPRINT, 3, KEY, None, PAYLOAD)
    assert frame.fault(memoryview(packed), *wanted) == fault


def test_cut_frames_are_noticed() -> None:
    packed = memoryview(frame.pack(FINGERPRINT, 3, KEY, None, PAYLOAD))
    assert frame.fault(packed[:100], FINGERPRINT, 3, KEY) == "short"
    assert frame.fault(packed[:-1], FINGERPRINT, 3, KEY) == "length"
    assert frame.fault(memoryview(bytes(len(packed))), FINGERPRINT, 3, KEY) is not None
