"""Templates in the styles of the families, and what they are allowed to do."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from lamella.engine.errors import RequestError, StartError, UnsupportedFieldError
from lamella.engine.text.chat_template import ChatTemplate
from lamella.engine.text.tokenizer import Tokenizer
from lamella.engine.text.tokenizer_parts import TokenizerParts

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant', 'system'] and not 'tool_calls' in message %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""

MISTRAL = """\
{{- bos_token }}
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if message.role == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message.content + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message.content + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {{- tool_call.function | tojson }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- else %}
        {{- " " + message.content | trim + eos_token }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}"""

CONVERSATION = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi there"},
    {"role": "user", "content": "How are you?"},
]


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.BPE({"<s>": 0, "</s>": 1, "a": 2}, []))


def template(backend: tokenizers.Tokenizer, source: str | None = None, **named: str) -> ChatTemplate:
    sources = named if source is None else {"default": source, **named}
    parts = TokenizerParts(backend, "model", 3, bos_id=0, eos_ids=(1,), chat_templates=sources)
    return ChatTemplate(Tokenizer(parts), now=lambda: datetime(2024, 7, 26, 12))


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


class TestFamilies:
    def test_chatml(self, backend: tokenizers.Tokenizer) -> None:
        rendered = template(backend, CHATML).render(CONVERSATION)
        assert rendered == (
            "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi there<|im_end|>\n"
            "<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_llama3(self, backend: tokenizers.Tokenizer) -> None:
        rendered = template(backend, LLAMA3).render(user(" Hello "), add_generation_prompt=False)
        assert rendered == "<s><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"

    def test_gemma(self, backend: tokenizers.Tokenizer) -> None:
        messages = [{"role": "system", "content": "Be brief."}, *CONVERSATION[:2]]
        expected = (
            "<s><start_of_turn>user\nBe brief.\n\nHello<end_of_turn>\n<start_of_turn>model\nHi there<end_of_turn>\n"
            "<start_of_turn>model\n"
        )
        assert template(backend, GEMMA).render(messages) == expected
        in_parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
        assert template(backend, GEMMA).render(in_parts) == expected

    def test_mistral(self, backend: tokenizers.Tokenizer) -> None:
        messages = [{"role": "system", "content": "Be brief."}, *CONVERSATION]
        assert template(backend, MISTRAL).render(messages) == (
            "<s>[INST] Hello[/INST] Hi there</s>[INST] Be brief.\n\nHow are you?[/INST]"
        )

    def test_tool_calls_reach_the_template_as_objects(self, backend: tokenizers.Tokenizer) -> None:
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "ü<"}'}}
        messages = [*user("1+1?"), {"role": "assistant", "content": None, "tool_calls": [call]}]
        rendered = template(backend, MISTRAL).render(messages, add_generation_prompt=False)
        assert rendered == '<s>[INST] 1+1?[/INST][TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": "ü<"}}]</s>'

    def test_smollm2(self, smollm2: Tokenizer) -> None:
        rendered = ChatTemplate(smollm2).render(user("Hi"))
        assert rendered == (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )
        assert smollm2.encode(rendered, add_special_tokens=False)[:3] == [1, 9690, 198]

    @pytest.mark.parametrize("source", [CHATML, LLAMA3, GEMMA, MISTRAL])
    def test_agrees_with_transformers(self, backend: tokenizers.Tokenizer, source: str) -> None:
        transformers = pytest.importorskip("transformers")
        reference = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
        for prompt in (True, False):
            expected = reference.apply_chat_template(
                CONVERSATION, chat_template=source, tokenize=False, add_generation_prompt=prompt
            )
            assert template(backend, source).render(CONVERSATION, add_generation_prompt=prompt) == expected
        expected = reference.apply_chat_template(
            CONVERSATION[:2], chat_template=source, tokenize=False, continue_final_message=True
        )
        continued = template(backend, source).render(
            CONVERSATION[:2], add_generation_prompt=False, continue_final_message=True
        )
        assert continued == expected


class TestLanguage:
    def test_blocks_are_trimmed(self, backend: tokenizers.Tokenizer) -> None:
        source = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\nend"
        assert template(backend, source).render(user("x")) == "x\nend"

    def test_loop_controls(self, backend: tokenizers.Tokenizer) -> None:
        skip, stop = "{% if i == 1 %}{% continue %}{% endif %}", "{% if i == 3 %}{% break %}{% endif %}"
        source = "{% for i in range(9) %}" + skip + stop + "{{ i }}{% endfor %}"
        assert template(backend, source).render(user("x")) == "02"

    def test_generation_tag(self, backend: tokenizers.Tokenizer) -> None:
        source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}."
        assert template(backend, source).render(user("x")) == "x."

    def test_tojson(self, backend: tokenizers.Tokenizer) -> None:
        source = "{{ {'b': 'ü<&>', 'a': [1]} | tojson }}|{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}"
        assert template(backend, source).render(user("x")) == '{"b": "ü<&>", "a": [1]}|{\n "a": 2,\n "b": 1\n}'

    def test_strftime_now(self, backend: tokenizers.Tokenizer) -> None:
        assert template(backend, "{{ strftime_now('%d %b %Y') }}").render(user("x")) == "26 Jul 2024"

    def test_variables(self, backend: tokenizers.Tokenizer) -> None:
        source = "{{ enable_thinking }} {{ tools is none }} {{ documents is none }} {{ unk_token is defined }}"
        rendered = template(backend, source).render(user("x"), variables={"enable_thinking": False, "messages": []})
        assert rendered == "False True True False"

    def test_named_template_for_tools(self, backend: tokenizers.Tokenizer) -> None:
        found = template(backend, "plain", tool_use="{{ tools[0].name }}")
        assert found.render(user("x")) == "plain"
        assert found.render(user("x"), tools=[{"name": "f"}]) == "f"

    def test_template_of_the_request(self, backend: tokenizers.Tokenizer) -> None:
        assert template(backend, CHATML).render(user("x"), template="{{ messages[0].content }}!") == "x!"


class TestContent:
    PARTS = ({"type": "text", "text": "one"}, {"type": "text", "text": "two"})

    def test_parts_are_joined_where_the_template_takes_strings(self, backend: tokenizers.Tokenizer) -> None:
        assert template(backend, "{{ messages[0].content }}").render(user(list(self.PARTS))) == "one\ntwo"
        assert (
            template(backend, "{{ messages[0].content }}").render(user(["one", {"type": "refusal", "refusal": "no"}]))
            == "one\nno"
        )

    @pytest.mark.parametrize(
        "loop",
        [
            "{% for part in message['content'] %}{{ part.text }};{% endfor %}",
            "{% for part in message.content | list %}{{ part.text }};{% endfor %}",
            "{% for part in message.content[0:] %}{{ part.text }};{% endfor %}",
            "{% set content = message.content %}{% for part in content %}{{ part.text }};{% endfor %}",
        ],
    )
    def test_parts_stay_where_the_template_loops(self, backend: tokenizers.Tokenizer, loop: str) -> None:
        source = "{% for message in messages %}" + loop + "{% endfor %}"
        assert template(backend, source).render(user(list(self.PARTS))) == "one;two;"
        assert template(backend, source).render(user("one")) == "one;", "a string becomes a part"

    def test_macro_that_loops(self, backend: tokenizers.Tokenizer) -> None:
        source = (
            "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}"
            "{% for part in content %}{{ part.text }};{% endfor %}{% endif %}{% endmacro %}"
            "{{ show(messages[0].content) }}"
        )
        assert template(backend, source).render(user(list(self.PARTS))) == "one;two;"
        assert template(backend, source).render(user("one")) == "one"

    def test_other_loops_do_not_count(self, backend: tokenizers.Tokenizer) -> None:
        source = "{% set name = 'x' %}{% for m in messages %}{% for c in name %}{{ m.content }}{% endfor %}{% endfor %}"
        assert template(backend, source).render(user(list(self.PARTS))) == "one\ntwo"

    @pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file", None, 7])
    def test_parts_that_are_not_text(self, backend: tokenizers.Tokenizer, kind: Any) -> None:
        with pytest.raises(
            UnsupportedFieldError, match=rf"messages\[0\].content\[1\] is of the type {kind!r}"
        ) as raised:
            template(backend, CHATML).render(user([{"type": "text", "text": "a"}, {"type": kind}]))
        assert raised.value.param == "messages"

    @pytest.mark.parametrize(
        ("messages", "message"),
        [
            ([], "at least one message"),
            ({}, "at least one message"),
            (["x"], r"messages\[0\] must be an object, got str"),
            ([{"content": "x"}], r"messages\[0\] has no role"),
            ([{"role": 5, "content": "x"}], r"messages\[0\] has no role"),
            ([{"role": "user"}], r"messages\[0\] has no content"),
            ([{"role": "user", "content": 5}], r"content must be a string or a list, got int"),
            ([{"role": "user", "content": [5]}], r"content\[0\] must be an object, got int"),
            ([{"role": "user", "content": [{"type": "text"}]}], "no string in its field 'text'"),
            ([{"role": "assistant", "tool_calls": 5}], "tool_calls must be a string or a list"),
            ([{"role": "assistant", "tool_calls": [5]}], "tool_calls must hold objects, got int"),
            ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}], "arguments that are not JSON"),
        ],
    )
    def test_malformed_messages(self, backend: tokenizers.Tokenizer, messages: Any, message: str) -> None:
        with pytest.raises(RequestError, match=message):
            template(backend, CHATML).render(messages)

    def test_the_clients_messages_stay_as_they_are(self, backend: tokenizers.Tokenizer) -> None:
        messages = [*user([{"type": "text", "text": "x"}])]
        template(backend, GEMMA).render(messages, add_generation_prompt=False, continue_final_message=True)
        assert messages == user([{"type": "text", "text": "x"}])


class TestContinuedMessage:
    def test_cuts_behind_the_content(self, backend: tokenizers.Tokenizer) -> None:
        """Also where the content occurs again in what follows it."""
        messages = [*user("end"), {"role": "assistant", "content": "im_end"}]
        rendered = template(backend, CHATML).render(messages, add_generation_prompt=False, continue_final_message=True)
        assert rendered == "<|im_start|>user\nend<|im_end|>\n<|im_start|>assistant\nim_end"

    def test_content_in_parts(self, backend: tokenizers.Tokenizer) -> None:
        messages = [*user("a"), {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]
        rendered = template(backend, GEMMA).render(messages, add_generation_prompt=False, continue_final_message=True)
        assert rendered.endswith("<start_of_turn>model\nb")

    def test_empty_content(self, backend: tokenizers.Tokenizer) -> None:
        messages = [*user("a"), {"role": "assistant", "content": ""}]
        rendered = template(backend, CHATML).render(messages, add_generation_prompt=False, continue_final_message=True)
        assert rendered.endswith("<|im_start|>assistant\n")

    def test_not_with_a_generation_prompt(self, backend: tokenizers.Tokenizer) -> None:
        with pytest.raises(RequestError, match="exclude each other") as raised:
            template(backend, CHATML).render(CONVERSATION, continue_final_message=True)
        assert raised.value.param == "continue_final_message"

    def test_content_that_the_template_leaves_out(self, backend: tokenizers.Tokenizer) -> None:
        with pytest.raises(RequestError, match="leaves out the last message"):
            template(backend, "hello").render(CONVERSATION, add_generation_prompt=False, continue_final_message=True)


class TestErrors:
    def test_what_the_template_refuses(self, backend: tokenizers.Tokenizer) -> None:
        with pytest.raises(RequestError, match="refuses these messages: Conversation roles must alternate") as raised:
            template(backend, GEMMA).render([*user("a"), *user("b")])
        assert raised.value.param == "messages"

    @pytest.mark.parametrize(
        "source", ["{{ messages[0].nothing.more }}", "{{ 1 / 0 }}", "{{ messages.x() }}", "{{ 'a' + 1 }}"]
    )
    def test_templates_that_fail(self, backend: tokenizers.Tokenizer, source: str) -> None:
        with pytest.raises(RequestError, match="the chat template (fails on|refuses) these messages"):
            template(backend, source).render(user("x"))

    def test_syntax_error(self, backend: tokenizers.Tokenizer) -> None:
        with pytest.raises(RequestError, match="not valid: line 2: ") as raised:
            template(backend, "a\n{% if %}").render(user("x"))
        assert raised.value.param == "chat_template"

    @pytest.mark.parametrize(
        "source",
        [
            "{{ ''.__class__.__mro__ }}",
            "{{ messages.append(1) }}",
            "{{ messages[0].update({'role': 'x'}) }}",
            "{{ raise_exception.__globals__.json }}",
            "{{ 'a' * 99999999 }}",
            "{{ 99999999 * [0] }}",
            "{{ 9 ** 9 ** 9 }}",
            "{% for i in range(99999999) %}x{% endfor %}",
        ],
    )
    def test_what_the_sandbox_forbids(self, backend: tokenizers.Tokenizer, source: str) -> None:
        with pytest.raises(RequestError, match="the chat template (refuses|fails on)"):
            template(backend, source).render(user("x"))

    def test_limit_on_the_output(self, backend: tokenizers.Tokenizer) -> None:
        parts = TokenizerParts(
            backend,
            "model",
            3,
            chat_templates={"default": "{% for i in range(50) %}{{ messages[0].content }}{% endfor %}"},
        )
        limited = ChatTemplate(Tokenizer(parts), max_chars=100)
        assert len(limited.render(user("ab"))) == 100
        with pytest.raises(RequestError, match="exceeds 100 characters"):
            limited.render(user("abc"))

    def test_no_template(self, backend: tokenizers.Tokenizer) -> None:
        bare = template(backend)
        assert not bare.exists
        with pytest.raises(RequestError, match="has no chat template; use the completions endpoint.*--chat-template"):
            bare.render(user("x"))
        with pytest.raises(RequestError, match=r"no default chat template \(only: rag\)"):
            template(backend, rag="x").render(user("x"))


class TestOverride:
    def test_by_file_or_source(self, smollm2: Tokenizer, tmp_path: Path) -> None:
        file = tmp_path / "own.jinja"
        file.write_text("<{{ messages[0].content }}>")
        assert ChatTemplate(smollm2, str(file)).render(user("x")) == "<x>"
        assert ChatTemplate(smollm2, "[{{ messages[0].content }}]").render(user("x")) == "[x]"

    def test_missing_file(self, smollm2: Tokenizer) -> None:
        with pytest.raises(StartError, match=r"none.jinja cannot be read"):
            ChatTemplate(smollm2, "none.jinja")
