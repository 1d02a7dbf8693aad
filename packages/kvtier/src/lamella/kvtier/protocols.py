"""What kvtier's data plane needs from others. Implementers do not inherit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class ExternalManager(Protocol):
    """A store beyond this machine's memory and disk: a class that is made once per node, by name and JSON options.

    Calls may block and may raise: they come from a thread of their own, one at a time. Names are opaque bytes, equal
    for equal content under one layout, and say nothing about the content. What is stored may be forgotten at any time.
    The bytes carry kvtier's own frame (identity and checksum): a wrong answer costs time and never correctness.

    `lamella.kvtier.testing.contract.check_manager` holds any implementation to this.
    """

    def lookup(self, names: Sequence[bytes]) -> int:
        """How many of these, from the first on, are there: the first that is missing ends the count."""

    def load(self, items: Sequence[tuple[bytes, memoryview]]) -> Sequence[bool]:
        """Fill the buffer of each (name, buffer) with what was stored under the name, which is exactly as long. True
        for each that was filled; a buffer is not written after the call has returned."""

    def store(self, items: Sequence[tuple[bytes, bytes | None, memoryview]]) -> Sequence[bool]:
        """Keep the bytes of each (name, name of the block before it or None, bytes). True for each that was kept;
        declining is allowed. The bytes are valid during the call only."""

    def close(self) -> None:
        """No call comes later."""


class BlockCopier(Protocol):
    """Copies blocks between a device's cache and pinned host memory by a kernel, on the current stream."""

    def copy(self, source: Any, target: Any, pairs: Any) -> None:
        """target[b] = source[a] for each pair (a, b).

        source, target: tensors [num_blocks, num_words], rows contiguous, any stride between them; one on the device,
        one in pinned host memory. pairs: [num_copies, 2] int64 on the device.
        """
