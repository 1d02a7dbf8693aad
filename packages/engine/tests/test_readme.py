"""The README's examples run as they stand."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def run(block: str) -> list[str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(block, str(README), "exec"), {"__name__": "example"})
    return out.getvalue().splitlines()


def test_the_example_of_one_process_runs(smollm2_path: Path) -> None:
    lines = run(BLOCKS[0])
    assert lines[0].startswith("The capital of France is -> ")
    assert any(line.startswith("Water boils at -> ") for line in lines)
    assert re.fullmatch(r"\d+ tokens/s", lines[-1])


def test_the_example_of_asyncio_runs(smollm2_path: Path) -> None:
    assert len("".join(run(BLOCKS[1]))) > 20


def test_there_is_no_other_example() -> None:
    assert len(BLOCKS) == 2
