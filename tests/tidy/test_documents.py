"""What the documents name is there."""

from __future__ import annotations

import re

import pytest

DOCUMENTS = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "GLOSSARY.md"]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_and_links_exist(root, document):
    text = (root / document).read_text(encoding="utf-8")
    text = text.replace("packages/x-y", "packages/<name>")  # stands for any package
    named = re.findall(r"`((?:packages|tools|tests|cmake|native|\.github|benchmarks)/[\w./-]*[\w/])`", text)
    linked = [link for link in re.findall(r"\]\(([^)#:]+)\)", text) if "://" not in link]
    missing = [path for path in {*named, *linked} if not (root / path).exists()]
    assert not missing


def test_hatch_scripts_that_are_named_exist(root):
    settings = (root / "pyproject.toml").read_text(encoding="utf-8")
    section = settings.split("[tool.hatch.envs.default.scripts]")[1].split("[tool.")[0]
    scripts = set(re.findall(r"^([\w-]+) = ", section, re.MULTILINE))
    texts = [(root / document).read_text(encoding="utf-8") for document in DOCUMENTS]
    named = {name for text in texts for name in re.findall(r"hatch run ([\w:-]+)", text)}
    of_others = {name for name in named if ":" in name}
    for name in of_others:
        environment, script = name.split(":")
        other = settings.split(f"[tool.hatch.envs.{environment}.scripts]")[1].split("[tool.")[0]
        assert re.search(rf"^{script} = ", other, re.MULTILINE), name
    assert named - of_others <= scripts
    assert {"demo", "test", "check", "bench", "alone"} <= named


def test_each_recipe_names_five_files_at_most(root):
    recipes = (root / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Recipes")[1].split("## Releases")[0]
    parts = re.split(r"^\*\*(.+?)\*\*", recipes, flags=re.MULTILINE)[1:]
    titles, bodies = parts[::2], parts[1::2]
    assert titles == ["A model family", "An op", "A drafter", "A sampling transform", "A command"]
    for body in bodies:
        assert 2 <= len(re.findall(r"^\d\. ", body, re.MULTILINE)) <= 5
