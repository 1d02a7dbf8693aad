from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from lamella.engine.server.app import ROUTES
from lamella.engine.testing.scripted_core import ScriptedCore
from lamella.engine.testing.server_thread import MODEL, serve

KEYS = ("first-key", "sécond")


@pytest.fixture(scope="module")
def guarded() -> Iterator[httpx.Client]:
    with (
        serve(ScriptedCore(), api_keys=KEYS, cors_origins=("https://page.example",)) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        yield client


@pytest.mark.parametrize(
    "path", [route.path.replace("{name:path}", "x") for route in ROUTES] + ["/none", "//v1/models"]
)
def test_every_route_but_health_and_version_asks_for_a_key(guarded: httpx.Client, path: str) -> None:
    for method in ("GET", "POST"):
        answer = guarded.request(method, path)
        if path in ("/health", "/version"):
            assert answer.status_code == (200 if method == "GET" else 405)
        else:
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "x-request-id" in answer.headers


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ("Bearer first-key", 200),
        ("bearer first-key", 200),
        ("Bearer sécond", 200),
        ("Bearer first-ke", 401),
        ("Bearer first-key2", 401),
        ("Bearer", 401),
        ("first-key", 401),
        ("Basic first-key", 401),
    ],
)
def test_keys(guarded: httpx.Client, value: str, status: int) -> None:
    assert guarded.get("/v1/models", headers={"authorization": value.encode()}).status_code == status


def test_two_authorization_headers_are_none(guarded: httpx.Client) -> None:
    headers = [("authorization", "Bearer first-key"), ("authorization", "Bearer wrong")]
    assert guarded.get("/v1/models", headers=headers).status_code == 401


def test_the_official_client_sees_an_authentication_error(guarded: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{guarded.base_url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        assert client.with_options(api_key="first-key").models.list().data[0].id == MODEL


def test_browsers_of_the_allowed_origin_may_ask(guarded: httpx.Client) -> None:
    preflight = {
        "origin": "https://page.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    answer = guarded.options("/v1/chat/completions", headers=preflight)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    refused = guarded.options("/v1/chat/completions", headers={**preflight, "origin": "https://other.example"})
    assert "access-control-allow-origin" not in refused.headers
    answer = guarded.get("/v1/models", headers={"origin": "https://page.example"})
    assert answer.status_code == 401, "the key is asked for all the same"
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
