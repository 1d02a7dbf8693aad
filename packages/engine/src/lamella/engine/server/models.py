"""GET /v1/models and /v1/models/{name}."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lamella.engine.server.errors import json_response
from lamella.engine.server.state import ServerState


async def list_models(http: Request) -> Response:
    """Every name under which the model is served."""
    state: ServerState = http.app.state.server
    return json_response({"object": "list", "data": [_card(state, name) for name in state.options.served_names]})


async def show_model(http: Request) -> Response:
    """One of the names."""
    state: ServerState = http.app.state.server
    return json_response(_card(state, state.model(http.path_params["name"])))


def _card(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "lamella",
        "root": state.options.model_root or name,
        "parent": None,
        "max_model_len": state.max_model_len,
    }
