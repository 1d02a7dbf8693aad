"""Moves weights from a checkpoint into the store: check everything, then read in file order, pack, store, bind.

    file ──read──▶ raw parts ──staging──▶ on the device ──pack──▶ named tensors ──▶ store ──bind──▶ layer

On a CPU there is nothing to stage. On a device packing is the device's work: what is quantised is turned into numbers
there, and the next part is read from the file meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import torch
from tqdm import tqdm

from lamella.runner_v2.errors import CheckpointError
from lamella.runner_v2.weights.slots import Checkpoint, Part, RawPart, Slot
from lamella.runner_v2.weights.staging import open_staging
from lamella.runner_v2.weights.store import WeightStore

_MAX_NAMED = 8


def load(
    checkpoint: Checkpoint,
    slots: Sequence[Slot],
    store: WeightStore,
    tp_rank: int = 0,
    tp_size: int = 1,
    progress: bool = False,
    device: str | torch.device = "cpu",
) -> None:
    """Fill the slots. Packed tensors are stored as "{slot.name}.{name}"; a second load into the same store writes into
    the same storage. device: where raw parts are before they are packed; the store's own.

    CheckpointError, before anything is read, if tensors are missing, superfluous or misshapen. progress shows a bar on
    standard error.
    """
    check(checkpoint, [part for slot in slots for part in slot.parts])
    todo = []
    for slot in slots:
        parts = [part for part in slot.parts if not part.optional or checkpoint.has(part.key)]
        place = min((checkpoint.place_of(part.key) for part in parts), default=(0, 0))
        todo.append((place, slot, parts))
    todo.sort(key=lambda entry: entry[0])
    total = sum(_num_bytes(checkpoint, part) for _, _, parts in todo for part in parts) // tp_size
    move = open_staging(device)
    with tqdm(total=total, desc="weights", unit="B", unit_scale=True, file=sys.stderr, disable=not progress) as bar:
        for _, slot, parts in todo:
            raw = [checkpoint.read(part, tp_rank, tp_size) for part in parts]
            if move is not None:
                raw = [part._replace(data=move(part.data)) for part in raw]
            _fill(slot, raw, store)
            bar.update(sum(part.data.nbytes for part in raw))


def check(checkpoint: Checkpoint, parts: Sequence[Part]) -> None:
    """CheckpointError naming what is missing, misshapen or superfluous (up to eight names each)."""
    missing = [part for part in parts if not part.optional and not checkpoint.has(part.key)]
    misshapen = [
        f"{checkpoint.name_of(part.key)} is {_shape(checkpoint.shape_of(part.key))}, needed {_shape(part.shape)}"
        for part in parts
        if checkpoint.has(part.key) and checkpoint.shape_of(part.key) != part.shape
    ]
    problems = [
        f"{what}: {_listed(names)}"
        for what, names in (
            ("missing", [checkpoint.name_of(part.key) for part in missing]),
            ("of the wrong shape", misshapen),
            ("unknown to this model", checkpoint.unread({part.key for part in parts})),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            f"the checkpoint does not fit model family {checkpoint.config.family}: tensors "
            + "; tensors ".join(problems)
        )


def _fill(slot: Slot, raw: list[RawPart], store: WeightStore) -> None:
    stored = {name: store.put(f"{slot.name}.{name}", tensor) for name, tensor in slot.pack(raw).items()}
    slot.bind(stored)


def _num_bytes(checkpoint: Checkpoint, part: Part) -> int:
    format = checkpoint.format_of(part.key)
    length = 1
    for size in part.shape:
        length *= size
    return length // format.block_len * format.block_bytes


def _shape(shape: Iterable[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
