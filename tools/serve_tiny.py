"""Serve a random checkpoint of any family: the HTTP face without a download.

hatch run serve-tiny --family qwen3 --port 8000

All other words go to `lamella serve`. SIGTERM and Ctrl-C end it and remove the checkpoint.
"""

from __future__ import annotations

import argparse
import sys
import tempfile

from lamella.engine.cli.main import main as lamella
from lamella.runner_v2.testing.tiny_models import TINY_CONFIGS, write_folder


def main() -> int:
    """Write the checkpoint into a temporary folder and serve it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--family", choices=sorted(TINY_CONFIGS), default="llama", help="default: llama")
    args, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        write_folder(folder, args.family)
        return lamella(["serve", folder, "--served-model-name", f"tiny-{args.family}", *rest])


if __name__ == "__main__":
    sys.exit(main())
