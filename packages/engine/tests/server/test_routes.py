"""The routes around generation."""

from __future__ import annotations

import httpx
import openai
import pytest

from lamella.engine.testing.scripted_core import ScriptedCore
from lamella.engine.testing.server_thread import MODEL, serve
from lamella.engine.version import VERSION


def test_models(client: openai.OpenAI, http: httpx.Client) -> None:
    assert [model.id for model in client.models.list().data] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 512
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_several_names_serve_one_model() -> None:
    with (
        serve(ScriptedCore(), served_names=("org/name", "alias"), model_root="/models/x") as server,
        httpx.Client(base_url=server.url) as http,
    ):
        cards = http.get("/v1/models").json()["data"]
        assert [(card["id"], card["root"]) for card in cards] == [("org/name", "/models/x"), ("alias", "/models/x")]
        assert http.get("/v1/models/org/name").json()["id"] == "org/name"
        for asked, told in (("alias", "alias"), ("org/name", "org/name"), (None, "org/name")):
            body = {"prompt": "say:a", "model": asked}
            assert http.post("/v1/completions", json=body).json()["model"] == told


def test_health_and_version(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/version").json() == {"version": VERSION}


def test_tokenize_there_and_back(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "é<end>", "return_token_strs": True}).json()
    assert answer == {"count": 3, "max_model_len": 512, "tokens": [195, 169, 258], "token_strs": ["Ã", "©", "<end>"]}
    assert http.post("/detokenize", json={"tokens": [195, 169, 258]}).json() == {"prompt": "é<end>"}
    body = {"tokens": [195, 169, 258], "skip_special_tokens": True}
    assert http.post("/detokenize", json=body).json() == {"prompt": "é"}


def test_tokenize_messages(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    ids = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "[user]hi<end>[assistant]"
    ids = http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "[user]hi<end>"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/tokenize", {"messages": []}),
        ("/tokenize", {"messages": [{}]}),
        ("/tokenize", {"prompt": ["a"]}),
        ("/tokenize", {"prompt": "a", "model": "other"}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": "a"}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [259]}),
        ("/detokenize", {"tokens": [2**80]}),
        ("/detokenize", {"tokens": [1.5]}),
    ],
)
def test_mistakes(http: httpx.Client, path: str, body: object) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == (404 if "model" in str(body) else 400), answer.text
    assert answer.json()["error"]["message"]


def test_a_long_prompt_is_read_beside_the_loop(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "x" * 200_000}).json()
    assert answer["count"] == 200_000
    # nested too deeply for the reader of tool calls, on that thread
    calls = [{"function": {"name": "f", "arguments": "[" * 100_000}}]
    body = {"messages": [{"role": "assistant", "tool_calls": calls}]}
    answer = http.post("/tokenize", json=body)
    assert answer.status_code == 400, answer.text
