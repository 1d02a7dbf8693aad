"""The ASGI application: routes, and what lies around them.

Envelope (request id, books) ─► CORS, if configured ─► API keys, if configured ─► routes
"""

from __future__ import annotations

import re
import time
import uuid

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lamella.engine.errors import EngineError, OverloadedError
from lamella.engine.metrics.counters import ServerCounters
from lamella.engine.server import errors
from lamella.engine.server.auth import ApiKeys
from lamella.engine.server.body import ClientGone
from lamella.engine.server.chat import create_chat_completion
from lamella.engine.server.completions import create_completion
from lamella.engine.server.health import health, metrics, version
from lamella.engine.server.models import list_models, show_model
from lamella.engine.server.state import ServerState
from lamella.engine.server.tokens import detokenize, tokenize

ROUTES = [
    Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
    Route("/v1/completions", create_completion, methods=["POST"]),
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", show_model, methods=["GET"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/health", health, methods=["GET"]),
    Route("/version", version, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
]

_HANDLERS = frozenset(route.path for route in ROUTES)
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def build_app(state: ServerState) -> ASGIApp:
    """The application of one server."""
    routes = Starlette(
        routes=ROUTES,
        exception_handlers={
            EngineError: _on_engine_error,
            HTTPException: errors.on_http_error,
            ClientGone: _on_client_gone,
            Exception: errors.on_crash,
        },
    )
    routes.router.redirect_slashes = False
    routes.state.server = state
    app: ASGIApp = routes
    if state.options.api_keys:
        app = ApiKeys(app, state.options.api_keys)
    if state.options.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=state.options.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-lamella-ignored", "retry-after"],
        )
    return Envelope(app, state.counters)


class Envelope:
    """Gives each answer the request's x-request-id, or a new one, and counts it."""

    def __init__(self, app: ASGIApp, counters: ServerCounters) -> None:
        self._app = app
        self._counters = counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        request_id = _request_id(scope)
        status = 499

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        finally:
            self._counters.on_http(_handler(scope["path"]), scope["method"], status, time.monotonic() - started_s)


def _request_id(scope: Scope) -> bytes:
    """The client's, unless it would not be fit for a header or a log."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return bytes(value)
    return uuid.uuid4().hex.encode()


def _handler(path: str) -> str:
    if path in _HANDLERS:
        return path
    return "/v1/models/{name}" if path.startswith("/v1/models/") else "other"


async def _on_engine_error(http: Request, error: Exception) -> Response:
    if isinstance(error, OverloadedError):
        state: ServerState = http.app.state.server
        state.counters.rejected += 1
    return await errors.on_engine_error(http, error)


async def _on_client_gone(http: Request, error: Exception) -> Response:
    """Nobody reads it; the status is for the books."""
    del http, error
    return Response(status_code=499)
