from __future__ import annotations

from dataclasses import replace

import pytest

from lamella.kvtier import CapacityError, Group, Layout, LayoutError, TierManager

FULL = Group("full", "full", 16, 1000, row_format="float16")
SLIDING = Group("sliding", "sliding", 16, 500, window=33)


def test_bytes_and_window_blocks() -> None:
    assert Layout((FULL, SLIDING), (10, 4)).num_bytes == 12_000
    assert [replace(SLIDING, window=w).window_blocks for w in (1, 2, 17, 18, 33)] == [0, 1, 1, 2, 2]


def test_the_fingerprint_names_what_bytes_mean_and_not_how_many_there_are() -> None:
    base = Layout((FULL, SLIDING), (10, 4), model="m")
    assert base.fingerprint() == Layout((FULL, SLIDING), (99, 5), model="m").fingerprint()
    others = [
        Layout((FULL, SLIDING), (10, 4), model="n"),
        Layout((SLIDING, FULL), (10, 4), model="m"),
        Layout((FULL,), (10,), model="m"),
        *(
            Layout((replace(FULL, **change), SLIDING), (10, 4), model="m")  # type: ignore[arg-type]
            for change in ({"row_format": "float32"}, {"block_size": 8}, {"bytes_per_block": 1}, {"name": "other"})
        ),
    ]
    assert len({base.fingerprint(), *(other.fingerprint() for other in others)}) == 1 + len(others)
    assert len(base.fingerprint()) == 16


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Group("g", "full", 0, 1), "block_size 0"),
        (lambda: Group("g", "full", 1, 0), "bytes_per_block 0"),
        (lambda: Group("g", "sliding", 1, 1), "window"),
        (lambda: Group("g", "full", 1, 1, window=4), "no window"),
        (lambda: Layout((), ()), "at least one group"),
        (lambda: Layout((FULL,), (1, 2)), "1 groups, but 2"),
        (lambda: Layout((FULL,), (1,)), "null block"),
        (
            lambda: TierManager(Layout((FULL, replace(SLIDING, block_size=8)), (4, 4))),
            r"same block_size, got \[8, 16\]",
        ),
        (lambda: TierManager(Layout((Group("s", "state", 16, 9),), (4,))), "come after at least one full"),
        (lambda: TierManager(Layout((Group("s", "state", 16, 9), FULL), (4, 4))), "come after at least one full"),
        (lambda: TierManager(Layout((Group("c", "compressed", 16, 9, ratio=4),), (4,))), "kind compressed is not kept"),
    ],
)
def test_what_cannot_work_is_refused(make: object, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        make()  # type: ignore[operator]


def test_what_fits_alone() -> None:
    manager = TierManager(Layout((FULL, SLIDING), (11, 5)))
    assert manager.max_len == 160
    assert manager.max_chunk_len(64) == 64
    assert manager.max_chunk_len(160) == 3 * 16 - 33 + 2
    with pytest.raises(CapacityError, match="2 blocks of 16 tokens"):
        TierManager(Layout((SLIDING,), (3,))).max_chunk_len(100)
