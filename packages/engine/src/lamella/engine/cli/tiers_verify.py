"""Read every record of a disk tier's folder and check it: headers, checksums, checkpoints.

  lamella tiers verify /var/tmp/kv

Changes nothing, and needs no server; one may run on the folder meanwhile. Exit code 1 if anything is damaged. A damaged
record is never given to a model: the tier finds it out, too, when it reads it, and computes what it held.
"""

from __future__ import annotations

import argparse

from lamella.engine.config.schema import format_size
from lamella.engine.errors import StartError
from lamella.kvtier import KvTierError
from lamella.kvtier.data.disk.verify import verify_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="the folder of --kv-tier disk=FOLDER:SIZE")


def run(args: argparse.Namespace) -> int:
    try:
        report = verify_folder(args.folder)
    except KvTierError as error:
        raise StartError(str(error)) from None
    print(f"segments   {report.segments}, {report.unfinished} of them unfinished")
    print(f"records    {report.records} whole, {format_size(report.num_bytes)} of blocks")
    print(f"files      {format_size(report.file_bytes)}")
    for fingerprint, count in report.fingerprints.most_common():
        print(f"model      {fingerprint}: {count} records")
    for kind, count in report.faults.most_common():
        print(f"damaged    {kind}: {count}")
    for place in report.damaged:
        print(f"  {place}")
    print("the folder is sound" if report.ok else "the folder is damaged")
    return 0 if report.ok else 1
