"""A GGUF file: metadata and tensors, mapped. No torch here, so that whoever only needs the tokenizer stays light.

Reading is the gguf library's. Its parser makes several array objects per element of an array field, which takes
seconds for a tokenizer; here an array is stepped over when the file is opened and decoded when it is asked for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt

from lamella.runner_v2.errors import CheckpointError, UnsupportedError

_MAGIC = b"GGUF"
_LEN = struct.Struct("<Q")
# what the parser meets in a damaged file: counts, offsets and codes without sense
_PARSE_ERRORS = (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError, MemoryError, struct.error)


class GgufTensor(NamedTuple):
    """A tensor in the file."""

    ggml_type: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    """In weights, outermost dimension first."""
    offset: int
    """Of the data in the file."""
    data: npt.NDArray[Any]
    """F32, F16: [*shape]; every other type: uint8 [..., row_bytes]. A copy-on-write view of the file."""


class GgufFile:
    """One GGUF file, opened. CheckpointError if it is damaged, truncated or no GGUF file at all."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        _check_start(self.path)
        try:
            reader = _LazyReader(self.path, "c")
        except _PARSE_ERRORS as error:
            raise CheckpointError(f"{self.path}: damaged or truncated GGUF file: {error}") from error
        self._metadata = _Metadata(reader.fields)
        self.tensors: dict[str, GgufTensor] = {
            t.name: GgufTensor(t.tensor_type, tuple(reversed(t.shape.tolist())), int(t.data_offset), t.data)
            for t in reader.tensors
        }
        if self._metadata.get("split.count", 0) > 1:
            raise UnsupportedError(
                f"{self.path}: one of {self._metadata['split.count']} pieces; join them with llama-gguf-split --merge"
            )

    def metadata(self) -> Mapping[str, Any]:
        """Key -> bool, int, float, str, or a list of these (decoded on access)."""
        return self._metadata


class _Metadata(Mapping[str, Any]):
    """Decodes fields on access."""

    def __init__(self, fields: Mapping[str, gguf.ReaderField]) -> None:
        self._fields = {name: field for name, field in fields.items() if not name.startswith("GGUF.")}

    def __getitem__(self, key: str) -> Any:
        field = self._fields[key]
        if field.types[0] == gguf.GGUFValueType.STRING:
            return field.parts[field.data[0]].tobytes().decode("utf-8", "surrogateescape")
        if field.types[0] != gguf.GGUFValueType.ARRAY:
            return field.contents()
        items = field.parts[field.data[0]]
        if field.types[1] != gguf.GGUFValueType.STRING:
            return items.tolist()
        return list(_strings(items.tobytes(), int(field.parts[field.data[0] - 1][0])))

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


class _LazyReader(gguf.GGUFReader):  # type: ignore[misc]
    """Keeps an array field as one part, the bytes (or numbers) of all its elements."""

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[npt.NDArray[Any]], list[int], list[gguf.GGUFValueType]]:
        kind = gguf.GGUFValueType(raw_type)
        if kind != gguf.GGUFValueType.ARRAY:
            parts: tuple[int, list[npt.NDArray[Any]], list[int], list[gguf.GGUFValueType]] = super()._get_field_parts(
                orig_offs, raw_type
            )
            return parts
        raw_item_kind = self._get(orig_offs, np.uint32)
        item_kind = gguf.GGUFValueType(raw_item_kind[0])
        num_items = self._get(orig_offs + 4, np.uint64)
        start = orig_offs + 12
        if item_kind == gguf.GGUFValueType.STRING:
            items = self.data[start : _after_strings(self.data, start, int(num_items[0]))]
        else:
            items = self._get(start, self.gguf_scalar_to_np[item_kind], num_items[0])
            if len(items) != num_items[0]:
                raise ValueError("an array field ends beyond the end of the file")
        return 12 + items.nbytes, [raw_item_kind, num_items, items], [2], [kind, item_kind]


def _check_start(path: Path) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except OSError as error:
        raise CheckpointError(f"{path}: not readable: {error.strerror}") from error
    if start[:4] != _MAGIC:
        raise CheckpointError(f"{path}: not a GGUF file (it starts with {start[:4]!r})")
    if len(start) < 8:
        raise CheckpointError(f"{path}: truncated GGUF file: it has {len(start)} bytes")
    version = int.from_bytes(start[4:], "little")
    if version not in (2, 3):
        # a file for the other byte order shows its version in the upper half
        what = "big-endian files" if version and version & 0xFFFF == 0 else f"files of GGUF version {version}"
        raise UnsupportedError(f"{path}: {what} are not supported; supported: versions 2 and 3, little-endian")


def _after_strings(data: npt.NDArray[Any], start: int, count: int) -> int:
    """Offset behind count strings, each with its length in front."""
    view, unpack, offset, end = data.data, _LEN.unpack_from, start, len(data)
    for _ in range(count):
        offset += 8 + unpack(view, offset)[0]
        if offset > end:
            raise ValueError("a string ends beyond the end of the file")
    return offset


def _strings(data: bytes, count: int) -> Iterator[str]:
    offset = 0
    for _ in range(count):
        start = offset + 8
        offset = start + _LEN.unpack_from(data, offset)[0]
        yield data[start:offset].decode("utf-8", "surrogateescape")
