"""Show how a model would be run: every choice with its reason, op table, KV groups, memory plan.

  lamella inspect smollm2
  lamella inspect ./my-model --max-num-seqs 8 --json

The first thing to attach to a bug report. Loads the model as `serve` would, then ends.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import lamella.engine as lamella
from lamella.engine.config.flags import add_flags, add_model, options_from
from lamella.engine.config.schema import EngineOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="the same as one JSON object")
    # what only requests would notice
    add_flags(parser, EngineOptions, skip=("model", "chat_template", "seed", "max_logprobs"))


def run(args: argparse.Namespace) -> int:
    options = options_from(args, EngineOptions, model=args.model)
    with lamella.LLM.from_options(options, progress=not args.json) as llm:
        report = llm.info.report
    print(json.dumps(report, indent=2) if args.json else render(report))
    return 0


def render(report: dict[str, Any]) -> str:
    """The report's sections as aligned text."""
    out = []
    for section, content in report.items():
        out.append(section)
        if isinstance(content, dict):
            content = [[key, value] for key, value in content.items()]
        if isinstance(content, str):
            out.extend("  " + line for line in content.splitlines())
            out.append("")
            continue
        rows = [[str(cell) for cell in row] for row in content]
        widths = [
            max((len(row[i]) for row in rows if i < len(row)), default=0) for i in range(max(map(len, rows), default=0))
        ]
        for row in rows:
            out.append("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
        out.append("")
    return "\n".join(out).rstrip()
