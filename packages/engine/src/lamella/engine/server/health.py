"""GET /health, /version and /metrics: for those who watch over the server."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from lamella.engine.server.errors import json_response
from lamella.engine.server.state import ServerState
from lamella.engine.version import VERSION


async def health(http: Request) -> Response:
    """200 while requests are taken; 503 with the reason if the core died or the server drains."""
    state: ServerState = http.app.state.server
    if state.client.dead is not None:
        return json_response({"status": "dead", "reason": state.client.dead}, 503)
    if state.draining:
        return json_response({"status": "draining"}, 503)
    return json_response({"status": "ok"})


async def version(http: Request) -> Response:
    """The version of lamella."""
    del http
    return json_response({"version": VERSION})


async def metrics(http: Request) -> Response:
    """All counters, see metrics/prometheus.py."""
    state: ServerState = http.app.state.server
    body, content_type = state.exporter.render(http.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})
