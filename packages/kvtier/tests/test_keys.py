from __future__ import annotations

import subprocess
import sys
from array import array
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.kvtier import Extras, KeyChain, Media, keys
from lamella.kvtier.keys import KEY_BYTES, block_key, root_key

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(IDS, st.lists(st.integers(0, 40), max_size=6), st.integers(1, 5))
def test_a_chain_is_the_same_however_it_is_extended(ids: list[int], cuts: list[int], size: int) -> None:
    grown = KeyChain(size, Extras(salt="s"))
    for cut in sorted(cuts):
        grown.extend(ids[:cut])
    grown.extend(ids)
    parent = root_key(Extras(salt="s"))
    expected = []
    for start in range(0, len(ids) - size + 1, size):
        parent = block_key(parent, ids[start : start + size])
        expected.append(parent)
    assert grown.keys == expected
    assert all(len(key) == KEY_BYTES for key in grown.keys)
    assert len(set(grown.keys)) == len(grown.keys)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(IDS, st.lists(st.integers(0, 40), max_size=6), st.integers(1, 5), st.integers(1, 7), st.booleans())
def test_a_key_with_a_lookahead_names_the_ids_behind_its_block(
    ids: list[int], cuts: list[int], size: int, lookahead: int, packed: bool
) -> None:
    """However it is extended; and no block has a key before they are known."""
    grown = KeyChain(size, lookahead=lookahead)
    for cut in sorted(cuts):
        grown.extend(array("I", ids[:cut]) if packed else ids[:cut])
        grown.extend(ids, up_to=cut)
    grown.extend(ids)
    parent = root_key()
    expected = []
    for start in range(0, len(ids) - size - lookahead + 1, size):
        parent = block_key(parent, ids[start : start + size + lookahead])
        expected.append(parent)
    assert grown.keys == expected
    plain = KeyChain(size).extend(ids)
    assert not set(plain) & set(expected)
    if expected:
        other = list(ids)
        other[len(expected) * size + lookahead - 1] ^= 1
        assert KeyChain(size, lookahead=lookahead).extend(other)[-1] != expected[-1]


@given(ids=st.lists(st.integers(0, 2**32 - 1), max_size=40), size=st.integers(1, 9), compiled=st.booleans())
def test_packed_ids_give_the_keys_of_a_list(ids: list[int], size: int, compiled: bool) -> None:
    with mock.patch("lamella.kvtier.keys.native", keys.native if compiled else None):
        assert KeyChain(size).extend(array("I", ids)) == KeyChain(size).extend(ids)


def test_extend_up_to_leaves_the_rest_without_keys() -> None:
    chain = KeyChain(4)
    assert len(chain.extend(list(range(16)), up_to=11)) == 2
    assert len(chain.extend(list(range(16)), up_to=3)) == 2
    assert chain.parent(0) == root_key()
    assert chain.parent(1) == chain.keys[0]


def test_each_extra_changes_every_key() -> None:
    ids = list(range(8))
    variants = [
        Extras(),
        Extras(salt=""),
        Extras(salt="a"),
        Extras(adapter="a"),
        Extras(adapter="a", salt="a"),
        Extras(adapter="aS", salt=None),
        Extras(media=(Media(b"picture", 0, 2),)),
        Extras(media=(Media(b"picture", 1, 2),)),
        Extras(media=(Media(b"sound", 0, 2),)),
    ]
    chains = [KeyChain(4, extras).extend(ids) for extras in variants]
    for n in range(2):
        assert len({chain[n] for chain in chains}) == len(variants)


def test_media_enter_the_blocks_they_overlap_with_their_offset() -> None:
    ids = list(range(16))
    plain = KeyChain(4).extend(ids)
    media = (Media(b"x" * 8, 6, 5), Media(b"y" * 8, 13, 1))
    keys = KeyChain(4, Extras(media=media)).extend(ids)
    assert keys[0] == plain[0]
    assert keys[1] == block_key(keys[0], ids[4:8], [(b"x" * 8, 2)])
    assert keys[2] == block_key(keys[1], ids[8:12], [(b"x" * 8, -2)])
    assert keys[3] == block_key(keys[2], ids[12:16], [(b"y" * 8, 1)])


def test_lengths_are_part_of_the_encoding() -> None:
    root = root_key()
    assert block_key(root, [1, 2]) != block_key(root, [1, 2, 0])
    assert block_key(root, [1], [(b"ab", 0), (b"c", 0)]) != block_key(root, [1], [(b"a", 0), (b"bc", 0)])


def test_keys_do_not_depend_on_the_process() -> None:
    program = "from lamella.kvtier import *; print(KeyChain(2, Extras(salt='s')).extend([1, 2, 3, 4])[-1].hex())"
    here = KeyChain(2, Extras(salt="s")).extend([1, 2, 3, 4])[-1].hex()
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert there.stdout.strip() == here
    assert here == "b88da93bad802d47a4eea1437f072f258de696eb04c3ca3f1632840cdde5566d"
