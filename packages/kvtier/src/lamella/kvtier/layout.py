"""What the KV cache consists of: groups of caches, how many blocks each has, and under which name bytes are meaningful.

Every group has its own pool of block ids, [0, num_blocks). Block 0 is the null block: it stands in tables for blocks
that nobody reads (left of a sliding window) and is never handed out.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from lamella.kvtier.errors import LayoutError

GroupKind = Literal["full", "sliding", "compressed", "state"]

NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class Group:
    """Caches that share block table, tokens per block, row format and retention."""

    name: str
    kind: GroupKind
    block_size: int
    """Tokens per block; in a state group a block is one whole state and this is the distance of snapshots."""
    bytes_per_block: int
    """Over all layers and tensors of the group, on one rank."""
    window: int | None = None
    """Sliding groups: a query at position p reads [p - window + 1, p]."""
    ratio: int = 1
    """Compressed groups: tokens per stored row."""
    num_columns: int = 1
    """State groups: draft versions of a live state, the current one included."""
    row_format: str = ""
    """How a row's bytes are to be read (dtype, quantisation); part of the fingerprint."""
    hot_rows: int = 0
    """0: the device is the home of a running sequence's blocks. Else the host is, and the device keeps so many rows of
    a sequence hot, fetched inside the step (see control/hot_buffer.py): only for layers that select rows."""

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.bytes_per_block < 1:
            raise LayoutError(
                f"group {self.name}: block_size {self.block_size} and bytes_per_block {self.bytes_per_block} "
                "must be at least 1"
            )
        if self.kind == "sliding" and (self.window is None or self.window < 1):
            raise LayoutError(f"group {self.name}: a sliding group needs a window of at least 1, got {self.window}")
        if self.hot_rows < 0 or (self.hot_rows and self.kind not in ("full", "compressed")):
            raise LayoutError(f"group {self.name}: kind {self.kind} has no hot rows, got {self.hot_rows}")
        if self.kind != "sliding" and self.window is not None:
            raise LayoutError(f"group {self.name}: kind {self.kind} has no window, got {self.window}")

    @property
    def window_blocks(self) -> int:
        """Blocks that a query at a block border reads to its left."""
        assert self.window is not None
        return -(-(self.window - 1) // self.block_size)


@dataclass(frozen=True, slots=True)
class Layout:
    """Groups with their numbers of blocks (the null block included)."""

    groups: tuple[Group, ...]
    num_blocks: tuple[int, ...]
    model: str = ""
    """Identity of the weights that wrote the bytes."""

    def __post_init__(self) -> None:
        if not self.groups:
            raise LayoutError("a layout needs at least one group")
        if len(self.groups) != len(self.num_blocks):
            raise LayoutError(f"{len(self.groups)} groups, but {len(self.num_blocks)} numbers of blocks")
        if any(n < 2 for n in self.num_blocks):
            raise LayoutError(f"every group needs a block beside the null block, got {self.num_blocks}")

    @property
    def num_bytes(self) -> int:
        """Of all blocks, on one rank."""
        return sum(g.bytes_per_block * n for g, n in zip(self.groups, self.num_blocks))

    def fingerprint(self) -> bytes:
        """16 bytes that name model, groups and row formats, but not the numbers of blocks: bytes written under one
        fingerprint are readable under the same one and under no other."""
        digest = hashlib.blake2b(digest_size=16, person=b"lamella.layout")
        for text in (self.model, *(_describe(g) for g in self.groups)):
            encoded = text.encode()
            digest.update(len(encoded).to_bytes(4, "little") + encoded)
        return digest.digest()


def _describe(group: Group) -> str:
    return (
        f"{group.name!r} {group.kind} block={group.block_size} bytes={group.bytes_per_block} window={group.window} "
        f"ratio={group.ratio} columns={group.num_columns} rows={group.row_format!r}"
    )
