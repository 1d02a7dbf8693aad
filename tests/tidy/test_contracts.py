"""The import contracts hold, and each of them notices when it is broken."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

# -S: the editable packages' finder must not put the repository before the copy
LINT = (
    "import sys; sys.path[:0] = sys.argv[1:2]; sys.path.append(sys.argv[2]); "
    "from importlinter.cli import lint_imports; "
    "sys.exit(lint_imports(config_filename='pyproject.toml', cache_dir='cache', limit_to_contracts=sys.argv[3:]))"
)


@pytest.fixture(scope="module")
def copy(root, tmp_path_factory) -> Path:
    """All packages' sources as one namespace, with the contracts."""
    folder = tmp_path_factory.mktemp("contracts")
    for source in sorted((root / "packages").glob("*/src/lamella/*")):
        shutil.copytree(source, folder / "lamella" / source.name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(root / "pyproject.toml", folder)
    return folder


def lint(folder: Path, *contracts: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-S", "-c", LINT, str(folder), sysconfig.get_path("purelib"), *contracts]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_all_contracts_are_kept(copy):
    done = lint(copy)
    assert done.returncode == 0, done.stdout + done.stderr


BREAKS = [
    ("packages", "kvtier/keys.py", "import lamella.specdec"),
    ("packages", "specdec/stats.py", "from lamella.kvtier import keys"),
    ("packages", "runner_v2/step.py", "import lamella.kvtier"),
    ("packages", "runner_v2/stack.py", "from lamella.specdec.batch import Verdict"),
    ("packages", "runner_v2/config.py", "import lamella.engine"),
    ("packages", "kernels_cuda/norm.py", "import lamella.runner_v2.step"),
    ("kernels", "runner_v2/layers/linear.py", "import lamella.kernels_cuda"),
    ("kernels", "kvtier/keys.py", "from lamella.kernels_cuda import copy"),
    ("kernels-alone", "kernels_cuda/norm.py", "import numpy"),
    ("kernels-alone", "kernels_cuda/gemm.py", "from lamella.kvtier import keys"),
    ("model-parts", "runner_v2/layers/linear.py", "import lamella.runner_v2.runner"),
    ("model-parts", "runner_v2/models/llama.py", "from lamella.runner_v2 import batch"),
    ("runner-outside", "runner_v2/weights/store.py", "import transformers"),
    ("runner-outside", "runner_v2/quant/scheme.py", "import tokenizers"),
    ("step", "runner_v2/step.py", "import torch"),
    ("step", "runner_v2/sampling/params.py", "import torch"),
    ("kvtier-control", "kvtier/control/manager.py", "import time"),
    ("kvtier-control", "kvtier/keys.py", "import torch"),  # through what control imports
    ("specdec-host", "specdec/drafters/ngram.py", "import torch"),
    ("specdec-host", "specdec/drafters/suffix_index.py", "import random"),
    ("specdec-host", "specdec/batch.py", "import torch"),
    ("specdec-host", "specdec/length/fixed.py", "import random"),
    ("scheduler", "engine/scheduler/scheduler.py", "import asyncio"),
    ("scheduler", "engine/scheduler/scheduler.py", "from lamella.runner_v2 import inputs"),  # which imports torch
    ("server", "engine/server/chat.py", "import lamella.engine.scheduler.scheduler"),
    ("server", "engine/client.py", "import torch"),
    ("core", "engine/core.py", "import lamella.engine.server"),
    ("core-process", "engine/compose/core_config.py", "import lamella.engine.models"),  # which imports huggingface_hub
    ("core-process", "engine/core.py", "import lamella.engine.text.tokenizer"),
    ("commands", "engine/compose/front.py", "import lamella.engine.cli.sampling_flags"),
    ("commands", "engine/models.py", "from lamella.engine.cli import report"),
    ("fakes", "engine/client.py", "import lamella.kvtier.testing"),
    ("fakes", "runner_v2/stack.py", "from lamella.runner_v2.testing import tiny_models"),
]


@pytest.mark.parametrize(("contract", "path", "line"), BREAKS)
def test_a_broken_contract_is_noticed(copy, contract, path, line):
    file = copy / "lamella" / path
    before = file.read_text(encoding="utf-8")
    try:
        file.write_text(f"{before}\n{line}\n", encoding="utf-8")
        done = lint(copy, contract)
    finally:
        file.write_text(before, encoding="utf-8")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 broken" in done.stdout


def test_every_contract_is_broken_once(contract_ids):
    assert {contract for contract, _, _ in BREAKS} == contract_ids


@pytest.fixture
def contract_ids(root) -> set[str]:
    lines = (root / "pyproject.toml").read_text(encoding="utf-8").split("[[tool.importlinter.contracts]]")[1:]
    return {line.split('id = "')[1].split('"')[0] for line in lines}
