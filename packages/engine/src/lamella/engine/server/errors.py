"""Errors as HTTP answers, in OpenAI's shape:

    {"error": {"message": str, "type": str, "param": str | null, "code": str | null}}

A message never repeats a request's content at length, and an unexpected failure tells nothing of the inside.
"""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from lamella.engine.errors import (
    EngineDeadError,
    EngineError,
    ModelNotFoundError,
    OverloadedError,
    RequestError,
    TooLargeError,
    UnsupportedFieldError,
)

MAX_MESSAGE_LEN = 500

CODES: dict[type[EngineError], str] = {
    UnsupportedFieldError: "unsupported_field",
    ModelNotFoundError: "model_not_found",
    TooLargeError: "body_too_large",
    OverloadedError: "overloaded",
    EngineDeadError: "engine_dead",
}


class ErrorBody(msgspec.Struct):
    """What stands under "error"."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class UnauthorizedError(EngineError):
    """No valid API key."""

    status = 401


def error_body(error: EngineError) -> ErrorBody:
    """The part of an answer, or of a stream's event, that tells of an error."""
    message = str(error)
    if len(message) > MAX_MESSAGE_LEN:
        message = message[: MAX_MESSAGE_LEN - 1] + "…"
    return ErrorBody(
        message,
        "invalid_request_error" if error.status < 500 else "server_error",
        error.param if isinstance(error, RequestError) else None,
        "invalid_api_key" if isinstance(error, UnauthorizedError) else CODES.get(type(error)),
    )


def error_response(error: EngineError) -> Response:
    """An answer that tells of an error."""
    headers = {}
    if isinstance(error, OverloadedError):
        headers["retry-after"] = str(error.retry_after_s)
    elif isinstance(error, UnauthorizedError):
        headers["www-authenticate"] = "Bearer"
    elif isinstance(error, TooLargeError):
        headers["connection"] = "close"  # the rest of the body is not read
    return json_response({"error": error_body(error)}, error.status, headers)


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON by msgspec."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


async def on_engine_error(request: Request, error: Exception) -> Response:
    """Handler of EngineError."""
    del request
    assert isinstance(error, EngineError)
    return error_response(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Handler of the router's own errors: unknown route, wrong method."""
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code == HTTPStatus.NOT_FOUND:
        message = f"there is no route {request.url.path[:100]}"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{request.method} is not allowed on {request.url.path[:100]}"
    body = ErrorBody(message, "invalid_request_error")
    return json_response({"error": body}, error.status_code, dict(error.headers or {}))


async def on_crash(request: Request, error: Exception) -> Response:
    """Handler of everything else: a fault of the server. The HTTP server logs the traceback."""
    del request, error
    return json_response({"error": ErrorBody("the server failed on this request", "server_error")}, 500)
