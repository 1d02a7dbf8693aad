"""OpenAI-compatible HTTP server.

  lamella serve smollm2
  lamella serve ./my-model --host 0.0.0.0 --port 8080 --api-key "$KEY" --served-model-name mine

Routes: /v1/completions, /v1/chat/completions, /v1/models, /tokenize, /detokenize, /health, /version, /metrics.
SIGTERM and Ctrl-C let running requests finish (--drain-timeout). The exit code is not 0 if the engine died.
"""

from __future__ import annotations

import argparse

from lamella.engine.compose.server import serve
from lamella.engine.config.flags import add_flags, add_model, options_from
from lamella.engine.config.schema import EngineOptions, ServeOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_flags(parser, ServeOptions)
    add_flags(parser, EngineOptions, skip=("model",))


def run(args: argparse.Namespace) -> int:
    return serve(options_from(args, EngineOptions, model=args.model), options_from(args, ServeOptions))
