"""What the disk tier reaches of a folder's disk, and how long a restart takes.

    hatch run bench kvtier disk                                        in the system's temporary folder
    hatch run bench kvtier disk --folder /data --seconds 20 --json FILE

read, write   the store beside fio, or where that is not installed beside a raw loop past the page cache: same folder,
              same run, same block size and depth, in turns; the peer's name is in the row
restart       DiskStore() on a folder of many records: with its checkpoint, and by reading every record's header
              (fewer of them: each takes two pages of real disk)
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from lamella.engine.cli.report import Report, Row, merge_rows
from lamella.kvtier.data.disk import checkpoint
from lamella.kvtier.data.disk.header import PAGE, RecordHeader, record_bytes, write_header
from lamella.kvtier.data.disk.index import Name, Record, name_of
from lamella.kvtier.data.disk.measure import Speed, measure_folder
from lamella.kvtier.data.disk.segment import SegmentName, checkpoint_name
from lamella.kvtier.data.disk.store import DiskStore

FINGERPRINT = b"kvtier bench dsk"
BLOCK_SIZES = (128 << 10, 1 << 20, 4 << 20)
BLOCKS_OF_A_CHAIN = 1000
RECORDS_OF_A_SEGMENT = 8192
TARGET_RATIO, TARGET_RESTART_S = 0.9, 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--records", type=int, default=1_000_000, help="of the restart")
    parser.add_argument("--json", metavar="FILE", help="write the rows; rows of other benches are kept")
    args = parser.parse_args()
    rows: list[Row] = []
    for block_bytes in BLOCK_SIZES:
        speed = measure_folder(args.folder, block_bytes, args.depth, args.seconds)
        print(f"{speed.engine}, {block_bytes >> 10} KiB, {args.depth} at once", flush=True)
        what = f"{block_bytes >> 10} KiB x {args.depth}"
        rows.append(speed_row(f"disk write, {what}", speed.write, speed.peer, speed.peer_write, speed.write_ratio))
        rows.append(speed_row(f"disk read, {what}", speed.read, speed.peer, speed.peer_read, speed.read_ratio))
    folder = Path(tempfile.mkdtemp(prefix="lamella-restart-", dir=args.folder))
    try:
        rows.append(restart_row(folder / "kept", args.records, with_checkpoint=True))
        rows.append(restart_row(folder / "lost", args.records // 20, with_checkpoint=False))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report = Report.of(rows)
    print(report.table())
    if args.json:
        merge_rows(args.json, report).write(args.json)
    return 0 if all(row.ok is not False for row in rows) else 1


def speed_row(name: str, ours: Speed, peer_name: str, peer: Speed | None, ratio: float | None) -> Row:
    """Beside the peer."""
    return Row(
        name=name,
        value=ours.bytes_per_s / 1e9,
        unit="GB/s",
        peer=None if peer is None else f"{peer_name} {peer.bytes_per_s / 1e9:.2f}",
        ratio=ratio,
        target=f">= {TARGET_RATIO} x",
        ok=ratio is not None and ratio >= TARGET_RATIO,
    )


def restart_row(folder: Path, num_records: int, *, with_checkpoint: bool) -> Row:
    """Open a folder of so many records of one page, in chains. Payloads are holes: nothing reads them."""
    make_folder(folder, num_records, with_checkpoint)
    os.sync()
    start = time.perf_counter()
    store = DiskStore(folder, fingerprint=FINGERPRINT, capacity_bytes=1 << 50)
    seconds = time.perf_counter() - start
    found = sum(1 for _ in store.content())
    store.close()
    assert found == num_records, f"{found} of {num_records} records were found"
    return Row(
        name=f"restart, {num_records:,} records, {'checkpoint' if with_checkpoint else 'headers alone'}",
        value=seconds,
        unit="s",
        target=f"<= {TARGET_RESTART_S:g} s" if with_checkpoint else None,
        ok=seconds <= TARGET_RESTART_S if with_checkpoint else None,
    )


def make_folder(folder: Path, num_records: int, with_checkpoint: bool) -> None:
    """Sealed segments of records, and their checkpoint; without it, the headers are really there."""
    folder.mkdir(mode=0o700)
    size = record_bytes(PAGE)
    short = FINGERPRINT[:4].hex()
    keys = [hashlib.blake2b(n.to_bytes(4, "little"), digest_size=32).digest() for n in range(num_records)]
    files: list[tuple[str, int]] = []
    records: list[tuple[Name, Record]] = []
    page = memoryview(bytearray(PAGE))
    for first in range(0, num_records, RECORDS_OF_A_SEGMENT):
        count = min(RECORDS_OF_A_SEGMENT, num_records - first)
        name = SegmentName(1 + first // RECORDS_OF_A_SEGMENT, short, "a" * 8, True).file
        with open(folder / name, "wb") as file:
            file.truncate(count * size)
            for place in range(count):
                n = first + place
                parent = keys[n - 1] if n % BLOCKS_OF_A_CHAIN else None
                above = None if parent is None else name_of(0, parent)
                records.append((name_of(0, keys[n]), Record(len(files), place * size, PAGE, PAGE, 0, above)))
                if not with_checkpoint:
                    write_header(RecordHeader(0, FINGERPRINT, 0, keys[n], parent, place * size, PAGE, PAGE, 0), page)
                    file.seek(place * size)
                    file.write(page)
        files.append((name, count * size))
    if with_checkpoint:
        (folder / checkpoint_name(FINGERPRINT)).write_bytes(checkpoint.encode(FINGERPRINT, files, records, set()))


if __name__ == "__main__":
    raise SystemExit(main())
