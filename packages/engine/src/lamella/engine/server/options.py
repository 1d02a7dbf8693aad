"""What the server is told when it starts. Frozen; nothing here imports the HTTP stack."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass
from typing import Any

from lamella.engine.errors import StartError


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Resolved options of one server."""

    served_names: tuple[str, ...]
    """Ids under which the model is served; the first is the one that answers carry."""
    model_root: str = ""
    """Where the model lies, for /v1/models."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free one."""
    api_keys: tuple[str, ...] = ()
    """Empty: no key is asked for."""
    cors_origins: tuple[str, ...] = ()
    """Origins that browsers may call from; '*' for all."""
    max_body_bytes: int = 16 * 1024 * 1024
    keep_alive_s: float = 15.0
    """A stream that is silent for so long sends a comment; 0: never."""
    drain_timeout_s: float = 30.0
    """What running requests get after SIGTERM."""
    sampling_defaults: dict[str, Any] | None = None
    """SamplingParams fields that apply where a request is silent; None: "sampling defaults" of the core's report, which
    come from the model's generation_config."""
    max_logprobs: int = 20
    """Largest that a request may ask for; -1: any, and with -1 the whole vocabulary."""
    log_stats: bool = True
    """Log a line on throughput every 10 s while there is work."""
    stats_interval_s: float = 10.0


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises StartError when the address is taken or not ours.

    Done before the model is loaded, so that a mistake costs no waiting. Clients are refused until the server listens.
    """
    if not 0 <= port <= 65535:
        raise StartError(f"port must be in [0, 65535], got {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise StartError(
            f"cannot listen on host {host!r}: {error}; give an address of this machine with --host"
        ) from None
    sock = socket.socket(family, kind, protocol)
    try:
        # a port whose last server ended a moment ago may be taken; one that is listened on may not
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise StartError(_why(host, port, error)) from None
    return sock


def listen(sock: socket.socket, backlog: int = 2048) -> None:
    """Start listening. Raises StartError if another one was faster."""
    try:
        sock.listen(backlog)
    except OSError as error:
        host, port = sock.getsockname()[:2]
        raise StartError(_why(host, port, error)) from None
    sock.setblocking(False)


def _why(host: str, port: int, error: OSError) -> str:
    remedy = {
        errno.EADDRNOTAVAIL: "give an address of this machine with --host",
        errno.EACCES: "this port is for administrators; choose a --port above 1023",
    }.get(error.errno or 0, "choose another --port (0 picks a free one)")
    return f"cannot listen on {host}:{port}: {error.strerror or error}; {remedy}"
