"""`lamella chat`: a conversation that goes on, and what Ctrl-C does to it."""

from __future__ import annotations

import select
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import lamella.engine as lamella
from lamella.engine.cli.chat import Chat, read_line
from lamella.engine.errors import RequestError

LONG = ("--max-tokens", "4000", "--ignore-eos", "--temperature", "0", "--threads", "1", "--kv-cache-memory", "32MiB")


@pytest.fixture
def process(tiny: str, spawn: Any) -> Iterator[subprocess.Popen[str]]:
    """A chat whose prompt has appeared; it answers for seconds."""
    running = spawn("chat", tiny, *LONG)
    try:
        assert read_until(running, "> ") == "> "
        yield running
    finally:
        running.kill()
        running.communicate()


def read_until(process: subprocess.Popen[str], end: str) -> str:
    """Standard output up to `end`. A watchdog kills the process where it does not come."""
    assert process.stdout is not None
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    text = ""
    while not text.endswith(end) and (char := process.stdout.read(1)):
        text += char
    watchdog.cancel()
    assert text.endswith(end), text
    return text


def write(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(process: subprocess.Popen[str]) -> None:
    for _ in range(2):
        write(process, "tell me everything")
        assert process.stdout is not None
        process.stdout.read(3)
        process.send_signal(signal.SIGINT)
        assert read_until(process, "\n> ")
    write(process, "/stats")
    read_until(process, "> ")
    write(process, "/exit")
    assert process.wait(30) == 0
    assert process.stderr is not None
    errors = process.stderr.read()
    assert "Traceback" not in errors
    assert "no answer yet" in errors, "an answer that was stopped has no figures"


def test_ctrl_c_at_the_prompt_gives_another_prompt(process: subprocess.Popen[str]) -> None:
    # one that comes between the prompt and the wait behind it is noticed only with the next
    for _ in range(100):
        process.send_signal(signal.SIGINT)
        if select.select([process.stdout], [], [], 0.3)[0]:
            break
    assert read_until(process, "> ") == "\n> "
    write(process, "/exit")
    assert process.wait(30) == 0


def test_the_end_of_the_input_ends_the_chat(process: subprocess.Popen[str]) -> None:
    out, errors = process.communicate("/nonsense\n", timeout=30)
    assert process.returncode == 0
    assert out.endswith("\n")
    assert "unknown command /nonsense; commands are /clear /system /stats /exit" in errors


class Stream:
    """A TextStream of given pieces, which may end in an exception."""

    def __init__(self, pieces: list[str], error: BaseException | None = None) -> None:
        self.pieces, self.error = pieces, error
        self.finished = error is None
        self.closed = False
        said = lamella.CompletionOutput(0, "".join(pieces), [1] * len(pieces), None, None, "stop", None)
        self.output = lamella.RequestOutput("r", None, [1, 2], None, [said], self.finished, 0, 0.1, None, None)

    def __iter__(self) -> Iterator[str]:
        yield from self.pieces
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.closed = True


class Model:
    """Answers with the streams it was given, and keeps what it was asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[list[str]] = []

    def stream_chat(self, messages: list[dict[str, str]], params: Any) -> Stream:
        self.asked.append([f"{message['role']}: {message['content']}" for message in messages])
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        assert isinstance(answer, Stream)
        return answer


def chat_with(*answers: Any, system: str | None = None) -> tuple[Chat, Model]:
    model = Model(*answers)
    return Chat(model, lamella.SamplingParams(), system), model  # type: ignore[arg-type]


def test_turns_are_kept_and_commands_forget_them() -> None:
    chat, model = chat_with(*(Stream(["a", "b"]) for _ in range(4)), system="be kind")
    chat.answer("one")
    chat.answer("two")
    chat.obey("/clear")
    chat.answer("three")
    chat.obey("/system  be brief ")
    chat.answer("four")
    assert model.asked == [
        ["system: be kind", "user: one"],
        ["system: be kind", "user: one", "assistant: ab", "user: two"],
        ["system: be kind", "user: three"],
        ["system: be brief", "user: four"],
    ]


def test_what_came_before_ctrl_c_stays_and_a_question_without_an_answer_goes() -> None:
    some, none = Stream(["so", " far"], KeyboardInterrupt()), Stream([], KeyboardInterrupt())
    chat, model = chat_with(some, none, KeyboardInterrupt(), Stream([]), Stream(["x"]))
    for text in ("one", "two", "three", "four", "five"):
        chat.answer(text)
    assert some.closed
    assert none.closed
    assert model.asked[-1] == ["user: one", "assistant: so far", "user: four", "assistant: ", "user: five"]


def test_a_conversation_that_got_too_long_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    chat, model = chat_with(RequestError("prompt has 9 tokens; the context holds 8", "prompt"), Stream(["x"]))
    chat.answer("one")
    assert capsys.readouterr().err == "prompt has 9 tokens; the context holds 8 (use /clear to begin anew)\n"
    chat.answer("two")
    assert model.asked[-1] == ["user: two"]


def test_figures_are_those_of_the_last_whole_answer(capsys: pytest.CaptureFixture[str]) -> None:
    chat, _ = chat_with(Stream(["a", "b", "c"]), Stream(["x"], KeyboardInterrupt()))
    chat.obey("/stats")
    chat.answer("one")
    chat.answer("two")
    chat.obey("/stats")
    chat.obey("/what ever")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "no answer yet"
    assert lines[1].startswith("3 tokens")
    assert lines[2].startswith("unknown command /what;")


def test_lines_that_are_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def raises(error: BaseException) -> Any:
        def read(prompt: str) -> str:
            raise error

        return read

    monkeypatch.setattr("builtins.input", lambda prompt: "  hello ")
    assert read_line() == "hello"
    monkeypatch.setattr("builtins.input", raises(EOFError()))
    assert read_line() is None
    monkeypatch.setattr("builtins.input", raises(KeyboardInterrupt()))
    assert read_line() == ""
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", raises(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")))
    assert read_line() == ""
    assert capsys.readouterr().err == "that was not valid utf-8\n"
