"""/v1/chat/completions over HTTP, by the official client where it can say it."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest

from lamella.engine.testing.server_thread import MODEL, ServerThread
from lamella.engine.testing.sse_reader import joined_text, read_events


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_conversation_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "say:héllo"}],
    )
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "héllo", "stop")
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    prompt = "[system]Be brief.<end>[user]say:héllo<end>[assistant]".replace("<end>", "E")
    assert answer.usage.prompt_tokens == len(prompt.encode())


def test_a_stream_begins_with_the_role_and_ends_with_the_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=user("say:a€b"), stream=True, stream_options={"include_usage": True}
        )
    )
    first = chunks[0].choices[0].delta
    assert (first.role, first.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "a€b"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)


def test_several_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=user("say:n#"), n=3)
    assert [(c.index, c.message.content) for c in answer.choices] == [(0, "n0"), (1, "n1"), (2, "n2")]
    texts = ["", "", ""]
    roles: list[int] = []
    for chunk in client.chat.completions.create(model=MODEL, messages=user("say:n#"), n=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.delta.role:
                roles.append(choice.index)
    assert texts == ["n0", "n1", "n2"]
    assert sorted(roles) == [0, 1, 2]


def test_stop_ends_one_choice_only(http: httpx.Client, server: ServerThread) -> None:
    body = {"messages": user("say:x#y"), "n": 3, "stop": ["x1"], "max_tokens": 20}
    choices = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert [(c["message"]["content"], c["stop_reason"]) for c in choices] == [("x0y", None), ("", "x1"), ("x2y", None)]


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=user("say:aé"), logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [(entry.token, entry.bytes) for entry in logprobs.content[:3]] == [("a", [97]), ("", [195]), ("é", [169])]
    assert [len(entry.top_logprobs) for entry in logprobs.content[:3]] == [2, 2, 2]
    assert logprobs.content[0].logprob == pytest.approx(-0.693, abs=1e-3)
    streamed = [
        entry
        for chunk in client.chat.completions.create(
            model=MODEL, messages=user("say:aé"), logprobs=True, top_logprobs=2, stream=True
        )
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == logprobs.content


def test_max_completion_tokens_wins(http: httpx.Client) -> None:
    body = {"messages": user("say:abcdef"), "max_tokens": 5, "max_completion_tokens": 2}
    answer = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == ("ab", "length")


def test_without_a_limit_the_context_is_filled(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": user("repeat"), "ignore_eos": True}).json()
    assert answer["usage"]["total_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"


def test_the_last_message_can_be_continued(http: httpx.Client) -> None:
    messages = [*user("hello"), {"role": "assistant", "content": "say:on"}]
    body = {"messages": messages, "continue_final_message": True, "return_token_ids": True}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "on"
    assert bytes(i for i in answer["prompt_token_ids"] if i < 256) == b"[user]hello[assistant]say:on"
    body["add_generation_prompt"] = True
    assert http.post("/v1/chat/completions", json=body).status_code == 400


def test_text_parts_are_text(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "say:"}, {"type": "text", "text": "hi"}]
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}]}).json()
    assert answer["choices"][0]["message"]["content"] == "\nhi"


def test_ids_in_a_stream(http: httpx.Client) -> None:
    body = {"messages": user("say:ab"), "stream": True, "return_token_ids": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
        events = list(read_events(answer.iter_lines()))
    assert bytes(i for i in events[0]["prompt_token_ids"] if i < 256) == b"[user]say:ab[assistant]"
    ids = [i for event in events for i in event["choices"][0].get("token_ids", [])]
    assert ids == [97, 98, 257]
    assert joined_text(events) == "ab"


def test_sixty_four_clients_at_once(server: ServerThread) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=30) as client:

            async def streamed(i: int) -> str:
                text = ""
                async for chunk in await client.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": f"say:answer {i} €"}], stream=True
                ):
                    text += chunk.choices[0].delta.content or ""
                return text

            async def whole(i: int) -> str | None:
                answer = await client.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": f"say:answer {i} €"}]
                )
                return answer.choices[0].message.content

            texts = await asyncio.gather(*(streamed(i) if i % 2 else whole(i) for i in range(64)))
            assert texts == [f"answer {i} €" for i in range(64)]

    asyncio.run(main())
