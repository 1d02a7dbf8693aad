"""What every external manager has to do, as a check that any implementation can run:

    from lamella.kvtier.testing.contract import check_manager
    check_manager(lambda: MyManager(url="..."))

It stores some megabytes under names that nobody else has, asserts what comes back, and says what is wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from lamella.kvtier.protocols import ExternalManager

NAME_BYTES = 52
SIZES = (129, 4096, 4096 + 128, 1 << 20)


def check_manager(make: Callable[[], ExternalManager], seed: int | None = None) -> None:
    """Asserts that what make() gives keeps its promises. seed: names and bytes as last time; None: new ones, so that a
    store that outlives the check does not know them yet."""
    source = random.Random(seed) if seed is not None else random.SystemRandom()
    manager = make()
    try:
        _empty_calls(manager)
        for size in SIZES:
            _round_trip(manager, source, size)
        _partial_load(manager, source)
        _buffers_are_not_kept(manager, source)
        _same_again(manager, source)
        _many(manager, source)
    finally:
        manager.close()


def _empty_calls(manager: ExternalManager) -> None:
    assert manager.lookup([]) == 0, "a lookup of nothing finds 0"
    assert list(manager.load([])) == [], "a load of nothing answers nothing"
    assert list(manager.store([])) == [], "a store of nothing answers nothing"


def _round_trip(manager: ExternalManager, source: random.Random, size: int) -> None:
    names = [source.randbytes(NAME_BYTES) for _ in range(3)]
    contents = [source.randbytes(size) for _ in names]
    found = manager.lookup(names)
    assert found == 0, f"names that were never stored are not found, lookup said {found!r}"
    _store(manager, names, contents)
    found = manager.lookup(names)
    assert found == 3, f"three stored blocks are found, lookup said {found!r}"
    assert manager.lookup([source.randbytes(NAME_BYTES), *names]) == 0, (
        "a lookup ends at the first name that is missing"
    )
    assert manager.lookup([names[0], source.randbytes(NAME_BYTES), names[1]]) == 1, "a lookup counts a prefix"
    order = [2, 0, 1]
    answers, buffers = _load(manager, [names[n] for n in order], size)
    assert answers == [True] * 3, f"three stored blocks are loaded, load answered {answers!r}"
    for n, buffer in zip(order, buffers):
        assert bytes(buffer) == contents[n], f"block {n} of {size} bytes came back changed"


def _partial_load(manager: ExternalManager, source: random.Random) -> None:
    names = [source.randbytes(NAME_BYTES) for _ in range(3)]
    contents = [source.randbytes(512) for _ in names]
    _store(manager, names[::2], contents[::2])
    answers, buffers = _load(manager, names, 512)
    assert answers == [True, False, True], f"one of three blocks is missing, load answered {answers!r}"
    assert bytes(buffers[0]) == contents[0], "the block before a missing one came back changed"
    assert bytes(buffers[2]) == contents[2], "the block behind a missing one came back changed"
    for size in (511, 513):
        answers, _ = _load(manager, names[:1], size)
        assert answers == [False], f"a block of 512 bytes does not fill {size}, load answered {answers!r}"


def _buffers_are_not_kept(manager: ExternalManager, source: random.Random) -> None:
    name, content = source.randbytes(NAME_BYTES), source.randbytes(2048)
    given = bytearray(content)
    answers = list(manager.store([(name, None, memoryview(given))]))
    assert answers == [True], f"a block is stored, store answered {answers!r}"
    given[:] = bytes(2048)
    _, (first,) = _load(manager, [name], 2048)
    assert bytes(first) == content, "the bytes given to store() are valid during the call only: they must be copied"
    _, (second,) = _load(manager, [name], 2048)
    second[:] = bytes(2048)
    _, (third,) = _load(manager, [name], 2048)
    assert bytes(third) == content, "what the caller does with a loaded buffer must not change what is stored"


def _same_again(manager: ExternalManager, source: random.Random) -> None:
    name, content = source.randbytes(NAME_BYTES), source.randbytes(1024)
    for _ in range(2):
        manager.store([(name, None, memoryview(content))])
    assert manager.lookup([name]) == 1, "a block that is stored twice is there"
    _, (buffer,) = _load(manager, [name], 1024)
    assert bytes(buffer) == content, "a block that is stored twice came back changed"


def _many(manager: ExternalManager, source: random.Random) -> None:
    names = [source.randbytes(NAME_BYTES) for _ in range(64)]
    contents = [source.randbytes(300) for _ in names]
    _store(manager, names, contents)
    assert manager.lookup(names) == 64, "all of many blocks are found"
    answers, buffers = _load(manager, names, 300)
    assert answers == [True] * 64, "all of many blocks are loaded"
    assert [bytes(buffer) for buffer in buffers] == contents, "many blocks came back changed or in another order"


def _store(manager: ExternalManager, names: Sequence[bytes], contents: Sequence[bytes]) -> None:
    parents = [None, *names[:-1]]
    items = [(name, parent, memoryview(data)) for name, parent, data in zip(names, parents, contents)]
    answers = list(manager.store(items))
    assert answers == [True] * len(names), f"store of {len(names)} blocks answered {answers!r}: True for each expected"


def _load(manager: ExternalManager, names: Sequence[bytes], size: int) -> tuple[list[bool], list[memoryview]]:
    buffers = [memoryview(bytearray(size)) for _ in names]
    answers = manager.load(list(zip(names, buffers)))
    assert isinstance(answers, (list, tuple)), f"load answers a list or tuple, not {type(answers).__name__}"
    return list(answers), buffers
