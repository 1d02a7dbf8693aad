"""The server process: binds the port, starts the core's process, then loads the HTTP stack while the core loads.

bind ─► find the model ─► core process starts ─► import the HTTP stack, read the tokenizer ─► serve
                          └ loads weights, measures ────────────────────────────────► ready ┘
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import signal
import sys
from types import FrameType

from lamella.engine.client import EngineClient
from lamella.engine.compose.core_config import CORE_FACTORY
from lamella.engine.compose.front import core_config, find_model, load_front
from lamella.engine.config.schema import EngineOptions, ServeOptions
from lamella.engine.console import note
from lamella.engine.links.process import ProcessLink
from lamella.engine.server.options import ServerOptions, bind


def serve(options: EngineOptions, serve_options: ServeOptions) -> int:
    """Serve until a signal or the core's death; returns the exit code. Raises StartError if it cannot start."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    for noisy in ("httpx", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    sock = bind(serve_options.host, serve_options.port)
    source = find_model(options, progress=True)
    config = core_config(options, source, progress=True)
    # until the server has handlers of its own, which let requests finish
    with contextlib.suppress(ValueError):  # not on the main thread
        signal.signal(signal.SIGTERM, _end)
    link = ProcessLink(CORE_FACTORY, config.to_wire())
    try:
        # behind the core's start, so that both load at the same time
        run = importlib.import_module("lamella.engine.server.run")
        front = load_front(options, progress=True, source=source)
        code: int = run.run_server(
            lambda: EngineClient(
                link,
                max_queued=serve_options.max_num_queued_reqs,
                progress=note,
                step_timeout_s=serve_options.step_timeout,
            ),
            front.tokenizer,
            ServerOptions(
                served_names=tuple(serve_options.served_model_name) or (options.model,),
                model_root=front.path,
                host=serve_options.host,
                port=serve_options.port,
                api_keys=tuple(serve_options.api_key),
                cors_origins=tuple(serve_options.allowed_origins),
                max_body_bytes=serve_options.max_body_size,
                keep_alive_s=serve_options.stream_keep_alive,
                drain_timeout_s=serve_options.drain_timeout,
                max_logprobs=options.max_logprobs,
                log_stats=serve_options.log_stats,
            ),
            template=front.template,
            sock=sock,
        )
    except BaseException:
        link.close(0.0)
        sock.close()
        raise
    return code


def _end(_signal: int, _frame: FrameType | None) -> None:
    """As at the end of the program, so that what was begun is cleared away."""
    sys.exit(0)
