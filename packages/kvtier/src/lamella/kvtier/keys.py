"""Chained block keys: the identity of a block's content.

    root     = H(adapter, cache salt)
    key[0]   = H(tokens of block 0, media of block 0, root)
    key[i]   = H(tokens of block i, media of block i, key[i-1])

With a lookahead, tokens of block i are those behind it too, as many as it says: for rows of KV that depend on them, as
those of a network that drafts do. Then a block has no key before they are known.

A key therefore names everything left of it too: equal keys, equal prefix. What goes into H can be read back from its
end, where lengths and the domain stand, so that no two different contents have the same encoding. H is SHA-256: stable
over processes, machines and versions (never Python's hash()), and processors have instructions for it. Tokens stand
before the parent's key, since they need not wait for it.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple

try:
    from lamella.kvtier import _C as native
except ImportError:  # built without a compiler
    native = None  # type: ignore[assignment]

KEY_BYTES = 32

Key = bytes

_DOMAIN = b"lamella.kv.2"
_ROOT_DOMAIN = b"lamella.kv.2 root"
_LITTLE_ENDIAN = sys.byteorder == "little"
_sha256 = hashlib.sha256

_NATIVE_FROM = 4
"""New blocks in one call from which the native chain is worth its call; it gives the same keys."""


class Media(NamedTuple):
    """An image, sound or other item whose placeholder tokens lie at [start, start + length)."""

    digest: bytes
    start: int
    length: int


class Extras(NamedTuple):
    """What makes equal token ids different content."""

    adapter: str | None = None
    salt: str | None = None
    """Requests share blocks only with requests of the same salt."""
    media: tuple[Media, ...] = ()
    """In order of start."""


NO_EXTRAS = Extras()


def root_key(extras: Extras = NO_EXTRAS) -> Key:
    """The parent of a sequence's first block."""
    digest = _sha256()
    if extras.adapter is not None:
        digest.update(_tagged(b"A", extras.adapter.encode()))
    if extras.salt is not None:
        digest.update(_tagged(b"S", extras.salt.encode()))
    digest.update(_ROOT_DOMAIN)
    return digest.digest()


def block_key(parent: Key, token_ids: Sequence[int], media: Sequence[tuple[bytes, int]] = ()) -> Key:
    """Key of a full block.

    media: (digest, start of the item relative to the block's start) of every item that overlaps the block. The start
    may be negative: an item that began in an earlier block.
    """
    n = len(token_ids)
    items = b"".join(_tagged(b"M", struct.pack("<q", start) + item) for item, start in media)
    return _sha256(struct.pack(f"<{n}I", *token_ids) + items + parent + _ending(n, len(items))).digest()


class KeyChain:
    """Keys of one sequence's full blocks, extended as tokens come: appending costs O(new tokens).

    token_ids   [ block 0 ][ block 1 ] … [ block n-1 ][ open tail )
    keys          keys[0]    keys[1]        keys[n-1]   none yet
    """

    __slots__ = ("_root", "_struct", "block_size", "keys", "lookahead", "media")

    def __init__(self, block_size: int, extras: Extras = NO_EXTRAS, lookahead: int = 0) -> None:
        """lookahead: ids behind a block that its key names too."""
        assert lookahead >= 0, lookahead
        self.block_size = block_size
        self.lookahead = lookahead
        self.keys: list[Key] = []
        self.media = extras.media
        self._root = root_key(extras)
        self._struct = struct.Struct(f"<{block_size + lookahead}I")

    def extend(self, token_ids: Sequence[int], up_to: int | None = None) -> list[Key]:
        """Add the keys of the full blocks in token_ids[:up_to] that have none yet; return all keys.

        token_ids is the whole sequence from position 0; ids that already have a key must not have changed. A block
        whose lookahead goes beyond token_ids gets none yet.
        """
        size, width = self.block_size, self.block_size + self.lookahead
        keys = self.keys
        num_known = len(token_ids) - self.lookahead
        num_full = (num_known if up_to is None else min(up_to, num_known)) // size
        if len(keys) >= num_full:
            return keys
        parent = keys[-1] if keys else self._root
        if native is not None and not self.media and not self.lookahead and num_full - len(keys) >= _NATIVE_FROM:
            native.chain_keys(parent, token_ids, len(keys) * size, size, num_full - len(keys), keys)
            return keys
        raw = _encoded(token_ids)
        ending, pack = _ending(width, 0), self._struct.pack
        for block in range(len(keys), num_full):
            start = block * size
            if self.media:
                parent = block_key(parent, token_ids[start : start + width], self._media_of(start))
            elif raw is not None:
                parent = _sha256(bytes(raw[4 * start : 4 * (start + width)]) + parent + ending).digest()
            else:
                parent = _sha256(pack(*token_ids[start : start + width]) + parent + ending).digest()
            keys.append(parent)
        return keys

    def parent(self, block: int) -> Key:
        """Key of the block before this one; the root for block 0."""
        return self.keys[block - 1] if block else self._root

    def _media_of(self, start: int) -> list[tuple[bytes, int]]:
        end = start + self.block_size + self.lookahead
        return [(m.digest, m.start - start) for m in self.media if m.start < end and m.start + m.length > start]


def _encoded(token_ids: Sequence[int]) -> memoryview | None:
    """The ids as they go into a key, where they lie in memory like that already."""
    if isinstance(token_ids, array) and token_ids.typecode == "I" and token_ids.itemsize == 4 and _LITTLE_ENDIAN:
        return memoryview(token_ids).cast("B")
    return None


def _ending(num_ids: int, media_bytes: int) -> bytes:
    """What stands behind a block's tokens, media and parent."""
    return struct.pack("<II", num_ids, media_bytes) + _DOMAIN


def _tagged(tag: bytes, content: bytes) -> bytes:
    return tag + len(content).to_bytes(4, "little") + content
