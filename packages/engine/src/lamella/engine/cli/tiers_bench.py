"""What a folder's disk gives: through the tier, and without it.

  lamella tiers bench /var/tmp/kv --block-bytes 1MiB --depth 32 --seconds 4

The same blocks, the same depth, in turns; the peer is fio where it is installed, else a raw loop past the page cache.
Works in a folder of its own below FOLDER, which is gone afterwards.
"""

from __future__ import annotations

import argparse

from lamella.engine.cli.report import Report, Row
from lamella.engine.config.flags import number, output_file
from lamella.engine.config.schema import format_size, parse_size
from lamella.engine.errors import StartError
from lamella.kvtier import KvTierError
from lamella.kvtier.data.disk.measure import Speed, measure_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="an existing folder on the disk to measure")
    parser.add_argument("--block-bytes", default="1MiB", metavar="SIZE", help="bytes of a block (default: 1MiB)")
    parser.add_argument("--depth", type=number("int", 1, 1024), default=32, metavar="N", help="at once (default: 32)")
    parser.add_argument(
        "--seconds", type=number("float", 0.1, 600), default=4.0, metavar="X", help="per measurement (default: 4)"
    )
    parser.add_argument(
        "--max-bytes", default="1GiB", metavar="SIZE", help="use up to twice so much of the disk (default: 1GiB)"
    )
    parser.add_argument("--json", type=output_file(), metavar="FILE", help="write the rows as JSON")


def run(args: argparse.Namespace) -> int:
    block_bytes, max_bytes = parse_size(args.block_bytes), parse_size(args.max_bytes)
    try:
        speed = measure_folder(args.folder, block_bytes, args.depth, args.seconds, max_bytes=max_bytes)
    except KvTierError as error:
        raise StartError(str(error)) from None
    print(f"engine: {speed.engine}; blocks of {format_size(speed.block_bytes)}, {speed.depth} at once")
    rows = []
    for name, ours, peer, ratio in (
        ("write", speed.write, speed.peer_write, speed.write_ratio),
        ("read", speed.read, speed.peer_read, speed.read_ratio),
    ):
        rows += rows_of(name, ours, peer, ratio, speed.peer)
    report = Report.of(rows)
    print(report.table())
    if args.json:
        report.write(args.json)
    return 0


def rows_of(name: str, ours: Speed, peer: Speed | None, ratio: float | None, peer_name: str) -> list[Row]:
    """Speed beside the peer's, and latencies, of one direction."""
    return [
        Row(
            name=name,
            value=ours.bytes_per_s / 1e9,
            unit="GB/s",
            peer=None if peer is None else f"{peer_name} {peer.bytes_per_s / 1e9:.2f}",
            ratio=ratio,
        ),
        Row(name=f"{name} p50", value=ours.p50_s * 1e3, unit="ms"),
        Row(name=f"{name} p99", value=ours.p99_s * 1e3, unit="ms"),
    ]
