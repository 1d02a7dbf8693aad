"""What the README shows is true: its Python runs as it stands, its commands are taken by `lamella` as they stand."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamella.engine.cli.bench import WHAT
from lamella.engine.cli.main import COMMANDS, main
from lamella.engine.cli.tiers import WHAT as TIERS

ROOT = Path(__file__).resolve().parent.parent.parent
READMES = [ROOT / "README.md", ROOT / "packages" / "engine" / "README.md"]


def commands_in(text: str) -> Iterator[str]:
    """Lines and quoted pieces that begin with `lamella`; a|b stands for either, what follows a gap is a remark."""
    text = text.replace("\\\n", " ")
    lines = re.findall(r"^ *(?:\.venv/bin/)?(lamella .+)$", text, re.MULTILINE)
    quoted = re.findall(r"`(lamella [^`]+)`", text)
    for line in [*lines, *quoted]:
        found = re.split(r" {3,}", line.replace("\\|", "|"))[0]
        choices = re.search(r"[\w-]+(\|[\w-]+)+", found)
        for choice in choices[0].split("|") if choices else [""]:
            yield found.replace(choices[0], choice) if choices else found


def shown() -> list[str]:
    texts = [path.read_text(encoding="utf-8") for path in READMES]
    for name in [*COMMANDS, *(f"bench_{what}" for what in WHAT), *(f"tiers_{what}" for what in TIERS)]:
        texts.append(importlib.import_module(f"lamella.engine.cli.{name}").__doc__ or "")
    return sorted({command for text in texts for command in commands_in(text) if "COMMAND" not in command})


def test_commands_are_found() -> None:
    found = shown()
    for command in (
        "lamella chat smollm2",
        "lamella serve smollm2 --port 8000",
        "lamella run MODEL --message TEXT",
        "lamella bench throughput",
        'lamella run smollm2 --message "Why is the sky blue?"',
        "lamella pull org/name:file.gguf",
    ):
        assert command in found
    assert {command.split()[1] for command in found} == set(COMMANDS)


@pytest.mark.parametrize("command", shown())
def test_each_command_that_is_shown_is_taken(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    words = shlex.split(command, comments=True)[1:]
    if words[:1] == ["bench"] and "WHAT" in words:
        words[1:2] = ["latency"]
    if words in (["bench", "latency"], ["bench", "throughput"], ["bench", "spec"]):
        words.append("MODEL")
    of_several = [*(f"bench_{what}" for what in WHAT), *(f"tiers_{what}" for what in TIERS)]
    for name in [*(set(COMMANDS) - {"bench", "tiers"}), *of_several]:
        module: Any = importlib.import_module(f"lamella.engine.cli.{name}")
        monkeypatch.setattr(module, "run", lambda args, name=name: ran.append(name) or 0)
    if "--help" in words:
        with pytest.raises(SystemExit, match="0"):
            main(words)
        return
    assert main(words) == 0
    assert ran == ["_".join(words[:2]) if words[0] in ("bench", "tiers") else words[0]]


def test_the_python_of_the_readme_runs(smollm2_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", READMES[0].read_text(encoding="utf-8"), re.DOTALL)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(block, str(READMES[0]), "exec"), {"__name__": "example"})
    first, *answer = out.getvalue().splitlines()
    assert first == " Paris."
    assert "".join(answer).strip()
