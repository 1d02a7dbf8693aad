"""Bodies made at random around what the endpoints know: never a 5xx, never a hang, and the server goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lamella.engine.server.schema_chat import ChatRequest
from lamella.engine.server.schema_completions import CompletionRequest, DetokenizeRequest, TokenizeRequest
from lamella.engine.server.unsupported import CHAT, COMPLETIONS
from lamella.engine.testing.scripted_core import ScriptedCore
from lamella.engine.testing.server_thread import serve

NUM_EXAMPLES = 220

numbers = st.one_of(
    st.integers(-3, 300),
    st.sampled_from([2**31, 2**63, 2**64, 10**18, -(2**63), 10**40, 0.5, -0.5, 1e300, -1e300, 1e-300]),
    st.floats(allow_nan=False, allow_infinity=False),
)
texts = st.one_of(st.text(max_size=12), st.sampled_from(["", "say:a€b", "x" * 600, "<eos>", "user", "text", "\x00"]))
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=8,
)
messages = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"role": st.one_of(st.sampled_from(["user", "assistant", "system", "tool"]), values)},
            optional={"content": values, "tool_calls": values, "name": values},
        ),
        values,
    ),
    max_size=3,
)


def bodies(schema: type[msgspec.Struct], others: list[str], likely: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Objects with fields of the schema and others, mostly with a prompt so that deeper checks are reached."""
    names = [field.name for field in msgspec.structs.fields(schema)] + others + ["unknown", "\u00e9", "model "]
    fields = st.dictionaries(st.sampled_from(names), values, max_size=4)
    return st.builds(lambda base, extra: {**base, **extra}, st.fixed_dictionaries({}, optional=likely), fields)


PROMPTS = st.one_of(texts, st.lists(numbers, max_size=5), st.lists(texts, max_size=3), values)
COMPLETION = bodies(CompletionRequest, list(COMPLETIONS), {"prompt": PROMPTS, "stream": st.booleans()})
CONVERSATION = bodies(ChatRequest, list(CHAT), {"messages": messages, "stream": st.booleans()})
REQUESTS = st.one_of(
    st.tuples(st.just("/v1/completions"), COMPLETION),
    st.tuples(st.just("/v1/chat/completions"), CONVERSATION),
    st.tuples(st.just("/tokenize"), bodies(TokenizeRequest, [], {"prompt": texts})),
    st.tuples(st.just("/detokenize"), bodies(DetokenizeRequest, [], {"tokens": st.lists(numbers, max_size=4)})),
    st.tuples(st.sampled_from(["/v1/completions", "/v1/chat/completions"]), values),
)


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    """A server with a short context, which even n = 128 fills soon."""
    core = ScriptedCore()
    core.info = msgspec.structs.replace(core.info, max_model_len=40, max_num_seqs=256)
    with serve(core) as server, httpx.Client(base_url=server.url, timeout=10) as client:
        yield client


@given(request=REQUESTS, cut=st.one_of(st.none(), st.integers(0, 200)), noise=st.binary(max_size=3))
@settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_no_body_breaks_the_server(http: httpx.Client, request: tuple[str, Any], cut: int | None, noise: bytes) -> None:
    path, body = request
    data = json.dumps(body, ensure_ascii=False).encode(errors="surrogatepass")
    if cut is not None:
        data = data[:cut] + noise
    answer = http.post(path, content=data)
    assert answer.status_code in (200, 400, 404), (answer.status_code, answer.text, data)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert 0 < len(error["message"]) <= 500
    elif b'"error"' in answer.content:
        raise AssertionError((answer.text, data))
    good = http.post("/v1/completions", json={"prompt": "say:ok", "max_tokens": 9})
    assert good.json()["choices"][0]["text"] == "ok"
