"""A device that runs behind the host, played on a CPU: staged writes, recordings, the kernels' stand-in.

    with fake_device() as platform:
        runner = ModelRunner.load(path, platform=platform, **FAKE_DEVICE)

A recording is played by running its call again and copying the results to where the first ones lie, as a graph's
results always lie at the same addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lamella.runner_v2.graphs import Recorder
from lamella.runner_v2.testing import cuda_kernels
from lamella.runner_v2.writes import StagedWrites, Writes

FAKE_DEVICE: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "providers": ("cuda", "torch")}
"""Options of a runner on it."""


class FakeDevice:
    """A Platform."""

    runs_behind = True

    def __init__(self, free_bytes: int = 1 << 28) -> None:
        self.writes: Writes = StagedWrites("cpu")
        self.recorder: Recorder | None = RerunRecorder()
        self.kernels: Any | None = cuda_kernels
        self._free_bytes = free_bytes

    def free_bytes(self, measure: Callable[[], None], estimated_bytes: int) -> int:
        measure()
        return self._free_bytes

    @contextmanager
    def recording(self) -> Iterator[None]:
        yield


class RerunRecorder:
    """Counts what is recorded and replayed."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0
        self.num_forgotten = 0
        self.last_num_nodes = 0

    def record(self, call: Callable[[], Any]) -> Callable[[], Any]:
        self.num_recorded += 1
        outputs = call()

        def replay() -> Any:
            self.num_replayed += 1
            for old, new in zip(_tensors(outputs), _tensors(call()), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)
            return outputs

        return replay

    def forget(self) -> None:
        self.num_forgotten += 1


@contextmanager
def fake_device(**options: Any) -> Iterator[FakeDevice]:
    """The device, with the kernels' stand-in in the place of the package."""
    with cuda_kernels.using(cuda_kernels):
        yield FakeDevice(**options)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
