from __future__ import annotations

import re
from pathlib import Path

import lamella.kvtier

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs_and_prints_what_it_says() -> None:
    text = README.read_text()
    code, output = re.findall(r"```(?:python|text)\n(.*?)```", text, re.S)[:2]
    printed: list[str] = []
    exec(compile(code, str(README), "exec"), {"print": lambda *words: printed.append(" ".join(map(str, words)))})
    assert "\n".join(printed) == output.strip()


def test_public_names_exist() -> None:
    for name in lamella.kvtier.__all__:
        assert hasattr(lamella.kvtier, name)
