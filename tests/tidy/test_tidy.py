"""The repository keeps its own rules, and each rule catches what it is there for."""

from __future__ import annotations

import pytest

SOURCE = "packages/engine/src/lamella/engine/server/chat.py"
PROVIDER = "packages/runner-v2/src/lamella/runner_v2/ops/providers/host.py"


def test_the_repository_is_tidy(tidy, root):
    failing = [finding for finding in tidy.examine(root, tidy.repository_files(root)) if finding.fails]
    assert not failing, "\n".join(map(str, failing))


MISTAKES = {
    "banned file name": ("packages/kvtier/src/lamella/kvtier/utils.py", "", "name"),
    "banned folder name": ("packages/kvtier/src/lamella/kvtier/common/keys.py", "", "name"),
    "banned ending": ("tools/text_utils.py", "", "name"),
    "environment": (SOURCE, "import os\nx = os.environ['A']\n", "environment"),
    "environment by getenv": (SOURCE, "import os\nx = os.getenv('A')\n", "environment"),
    "environment by name": (SOURCE, "from os import environ\n", "environment"),
    "bare except": (SOURCE, "try:\n    x = 1\nexcept:\n    raise\n", "swallow"),
    "broad except that passes": (SOURCE, "try:\n    x = 1\nexcept Exception:\n    pass\n", "swallow"),
    "broad except among others": (SOURCE, "try:\n    x = 1\nexcept (OSError, Exception):\n    ...\n", "swallow"),
    "broad except that goes on": (SOURCE, "for i in 'a':\n    try:\n        x = 1\n    except BaseException:\n"
                                          "        continue\n", "swallow"),
    "suppress everything": (SOURCE, "import contextlib\nwith contextlib.suppress(Exception):\n    x = 1\n", "swallow"),
    "upward in disguise": (
        SOURCE,
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lamella.engine import core\n",
        "type-checking",
    ),
    "relative in disguise": (
        SOURCE,
        "import typing\nif typing.TYPE_CHECKING:\n    from . import core\n",
        "type-checking",
    ),
    "local import": (SOURCE, "def f():\n    import json\n", "local-import"),
    "local import in a method": (SOURCE, "class A:\n    async def f(self):\n        from a import b\n", "local-import"),
    "local import under a condition": (SOURCE, "def f(x):\n    if x:\n        import json\n", "local-import"),
    "local import of ours in a fake": (
        "packages/engine/src/lamella/engine/testing/fake.py",
        "def f():\n    from lamella.kvtier import keys\n",
        "local-import",
    ),
    "testing from a product module": (SOURCE, "from lamella.kvtier.testing import FakeClock\n", "testing"),
    "testing by its package": (SOURCE, "from lamella.kvtier import testing\n", "testing"),
    "file in the namespace": ("packages/kvtier/src/lamella/__init__.py", "", "namespace"),
    "marker": ("README.md", "one\nTO" "DO: write this\n", "marker"),
    "machine path": ("README.md", "see /wo" "rk/main for it\n", "place"),
    "home folder": (SOURCE, "x = '/ho" "me/someone/file'\n", "place"),
    "registry host": ("README.md", "pip install -i https://py" "pi.org/simple x\n", "place"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_found(tidy, mistake):
    path, text, rule = MISTAKES[mistake]
    assert [finding.rule for finding in tidy.findings(path, text)] == [rule]


FINE = {
    "environment in its owner": ("packages/engine/src/lamella/engine/config/env.py", "import os\nx = os.environ\n"),
    "environment in a tool": ("tools/native.py", "import os\nx = os.environ\n"),
    "broad except that reports": (SOURCE, "try:\n    x = 1\nexcept Exception as e:\n    print(e)\n"),
    "narrow except that passes": (SOURCE, "try:\n    x = 1\nexcept OSError:\n    pass\n"),
    "provider creator": (PROVIDER, "def make():\n    import torch\n"),
    "command": ("packages/engine/src/lamella/engine/cli/main.py", "def serve():\n    from a import b\n"),
    "lazy package attribute": (
        "packages/engine/src/lamella/engine/__init__.py",
        "def __getattr__(name):\n    from lamella.engine import offline\n    return offline\n",
    ),
    "lazy package attribute told to type checkers": (
        "packages/engine/src/lamella/engine/__init__.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lamella.engine.offline import LLM\n"
        "def __getattr__(name):\n    return name\n",
    ),
    "test dependency of a fake": (
        "packages/engine/src/lamella/engine/testing/fake.py",
        "def f():\n    import transformers\n",
    ),
    "third party under TYPE_CHECKING": (
        SOURCE,
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from asyncio import Task\n",
    ),
    "testing from testing": (
        "packages/engine/src/lamella/engine/testing/fake.py",
        "from lamella.kvtier.testing import FakeClock\n",
    ),
    "local import in a test": ("packages/engine/tests/test_a.py", "def f():\n    import json\n"),
    "words that contain a marker": ("README.md", "shackles of method TODOS\n"),
    "paths of the product": ("README.md", "GET /v1/models, /health, ~/.cache, /tmp/x, frameworks/workflows\n"),
}


@pytest.mark.parametrize("case", FINE)
def test_what_is_allowed_is_not_found(tidy, case):
    path, text = FINE[case]
    assert tidy.findings(path, text) == []


def test_long_files_are_reported_without_failing(tidy):
    (finding,) = tidy.findings(SOURCE, "x = 1\n" * 601)
    assert finding.rule == "note: long"
    assert not finding.fails
