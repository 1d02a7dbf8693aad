"""API keys: a wrapper around the whole application, so that a new route is guarded without being told to."""

from __future__ import annotations

import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from lamella.engine.server.errors import UnauthorizedError, error_response

OPEN_PATHS = frozenset({"/health", "/version"})
"""The only paths that are served without a key."""


class ApiKeys:
    """Lets a request pass if it carries one of the keys as `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._valid(scope):
            await self._app(scope, receive, send)
        else:
            await error_response(UnauthorizedError("a valid API key is needed: Authorization: Bearer KEY"))(
                scope, receive, send
            )

    def _valid(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        digest = hashlib.sha256(key.strip()).digest()
        # every key is compared, whichever fits: the time tells nothing
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0
