"""zstd for blocks, off by default: an extra, because most blocks hardly shrink."""

from __future__ import annotations

import importlib
from typing import Any

from lamella.kvtier.errors import KvTierError

LEVEL = 1


class Zstd:
    """Raises KvTierError without the package."""

    def __init__(self) -> None:
        try:
            module: Any = importlib.import_module("zstandard")
        except ImportError as problem:
            raise KvTierError(
                "compress=zstd needs the package zstandard: pip install 'lamella-kvtier[zstd]', or leave compress out"
            ) from problem
        self._compressor = module.ZstdCompressor(level=LEVEL)
        self._decompressor = module.ZstdDecompressor()

    def pack(self, data: memoryview) -> memoryview | None:
        """Fewer bytes; None if there would be no fewer pages."""
        packed: bytes = self._compressor.compress(data)
        return memoryview(packed) if -(-len(packed) // 4096) < -(-len(data) // 4096) else None

    def unpack(self, packed: memoryview, num_bytes: int) -> bytes | None:
        """Exactly num_bytes, or None."""
        try:
            data: bytes = self._decompressor.decompress(packed, max_output_size=num_bytes)
        except Exception:  # noqa: BLE001 - the package's own error class cannot be named without importing it
            return None
        return data if len(data) == num_bytes else None
