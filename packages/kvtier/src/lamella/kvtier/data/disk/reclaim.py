"""Which records of the oldest segment are worth keeping when its space is taken back.

    oldest segment   [ a ][ b ][ c ][ d ]          a ── b ── e      e lies in a newer segment; d was read
                       └────┴─────────┴─▶ newest   a, b, d are copied forward; c goes, with all that hangs on it

A record that was read since it was written, or on which a record of another segment hangs, survives, and so does what
it hangs on; as much as fits into the budget, records that were read first.
"""

from __future__ import annotations

from lamella.kvtier.data.disk.header import record_bytes
from lamella.kvtier.data.disk.index import Name, RecordIndex, group_of
from lamella.kvtier.data.disk.segment import Segment


def survivors(segment: Segment, index: RecordIndex, budget_bytes: int) -> list[Name]:
    """Parents before their children."""
    records = index.records
    here = [name for name in dict.fromkeys(segment.records) if _lies_in(segment, name, index)]
    was_read = [name for name in here if name in index.hit]
    is_parent = [name for name in here if any(records[child].segment != segment.id for child in index.children(name))]
    chosen: dict[Name, None] = {}
    for name in [*was_read, *is_parent]:
        line: list[Name] = []
        above: Name | None = name
        while above is not None and above not in chosen and _lies_in(segment, above, index):
            line.append(above)
            above = None if group_of(above) in index.standalone else records[above].parent
        cost = sum(record_bytes(records[link].stored_bytes) for link in line)
        if cost <= budget_bytes:
            budget_bytes -= cost
            chosen.update(dict.fromkeys(reversed(line)))
    return list(chosen)


def _lies_in(segment: Segment, name: Name, index: RecordIndex) -> bool:
    record = index.records.get(name)
    return record is not None and record.segment == segment.id
