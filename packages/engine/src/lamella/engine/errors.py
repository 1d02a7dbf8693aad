"""Errors a user of the engine can meet.

EngineError                 base; `status` is what an HTTP client sees
├── RequestError            400: the request cannot be served as it is; `param` names the field
│   └── UnsupportedFieldError   400: a known field that is not supported yet
├── ModelNotFoundError      404
├── TooLargeError           413: the body is over the limit
├── OverloadedError         503 with Retry-After: a queue is full, or the server drains
├── EngineDeadError         503: the core process ended
└── StartError              the engine cannot start (option, model, port); printed as one line, exit code 1
    └── CapacityError           the KV cache cannot hold one request of the longest length; says what would fit
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error the engine raises on purpose."""

    status = 500


class RequestError(EngineError):
    """The request cannot be served as it is."""

    status = 400

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnsupportedFieldError(RequestError):
    """A field that is known and not supported yet."""


class ModelNotFoundError(EngineError):
    """No model of that name is served."""

    status = 404


class TooLargeError(EngineError):
    """The request body is over the limit."""

    status = 413


class OverloadedError(EngineError):
    """A queue is full or the server drains; try again after `retry_after_s`."""

    status = 503

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDeadError(EngineError):
    """The engine core ended; nothing more can be served."""

    status = 503


class StartError(EngineError):
    """The engine cannot start."""


class CapacityError(StartError):
    """The KV cache cannot hold one request of the longest length; `max_len` tokens would fit."""

    def __init__(self, message: str, max_len: int = 0) -> None:
        super().__init__(message)
        self.max_len = max_len
