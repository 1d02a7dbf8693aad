"""What must not be loaded along with a module: import contracts do not see what package __init__ files pull in."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = [
    "lamella.engine",
    "lamella.engine.scheduler.scheduler",
    "lamella.engine.server",
    "lamella.engine.wire",
    "lamella.kvtier",
    "lamella.specdec",
    "lamella.runner_v2",
    "lamella.runner_v2.step",
    "lamella.runner_v2.sampling.params",
]


@pytest.mark.parametrize("module", MODULES)
def test_importing_it_does_not_import_torch(module):
    code = f"import sys, {module}; sys.exit(sum(name in sys.modules for name in ('torch', 'transformers')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr or "torch or transformers was imported"


def test_the_core_process_loads_neither_text_nor_http():
    names = ("tokenizers", "transformers", "jinja2", "huggingface_hub", "starlette", "uvicorn", "lamella.engine.cli")
    code = (
        "import sys, lamella.engine.compose.core, lamella.engine.compose.build; "
        f"sys.exit(' '.join(name for name in {names} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr.strip() == ""
