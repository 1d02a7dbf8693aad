import importlib.util
import sys
from pathlib import Path

import pytest

# the package is in an environment of its own; elsewhere there is nothing to test
collect_ignore_glob = [] if importlib.util.find_spec("lamella.kernels_cuda") else ["test_*.py"]

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def seed():
    import torch

    torch.manual_seed(0)
