"""The README's example runs as it stands and does what it says."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from lamella.runner_v2.testing.tiny_models import write_folder

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_greedy_example(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_folder(tmp_path / "model", family, seed=9)
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    example = tmp_path / "example.py"
    example.write_text(code)
    monkeypatch.setattr(sys, "argv", [str(example), str(model.path), "5,6,7,8"])
    runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr().out
    ids = [int(x) for x in printed.strip("[]\n").split(",")]
    assert len(ids) == 20
    assert ids[:4] == [5, 6, 7, 8]
    with torch.no_grad():
        logits = model.reference()(torch.tensor([ids])).logits[0]
    for position in range(3, 19):
        # the default path may round: the chosen token is the best one or as good as it
        assert float(logits[position].max() - logits[position, ids[position + 1]]) < 0.5
