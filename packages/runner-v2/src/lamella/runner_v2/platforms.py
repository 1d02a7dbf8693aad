"""What a runner needs of its device beside ops: how changes get there, how steps are recorded, how much memory is left.

A CPU computes a step while its caller waits. A device runs behind the host: steps are launched, and read later.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from lamella.runner_v2.config import RunnerConfig
from lamella.runner_v2.errors import ConfigError, UnsupportedError
from lamella.runner_v2.graphs import Recorder
from lamella.runner_v2.host_memory import available_bytes
from lamella.runner_v2.ops.providers.cuda_kernels import load_kernels
from lamella.runner_v2.writes import DirectWrites, StagedWrites, Writes

_RESERVE_BYTES = 512 << 20
"""Of a device's memory, for what no measurement sees: fragments, graphs, libraries' workspaces."""


class Platform(Protocol):
    """One device as a runner uses it."""

    writes: Writes
    recorder: Recorder | None
    kernels: Any | None
    """The namespace of lamella.kernels_cuda, where it can run on this device."""
    runs_behind: bool
    """Steps are computed behind the host's back."""

    def free_bytes(self, measure: Callable[[], None], estimated_bytes: int) -> int:
        """Memory for a KV cache. measure: runs the largest step; estimated_bytes: what such a step may need."""

    def recording(self) -> Any:
        """A context in which graphs are recorded."""


class CpuPlatform:
    """The host itself."""

    recorder: Recorder | None = None
    kernels: Any | None = None
    runs_behind = False

    def __init__(self) -> None:
        self.writes: Writes = DirectWrites()

    def free_bytes(self, measure: Callable[[], None], estimated_bytes: int) -> int:
        return max(0, available_bytes() - estimated_bytes)

    @contextmanager
    def recording(self) -> Iterator[None]:
        yield


class CudaPlatform:
    """A CUDA device."""

    runs_behind = True

    def __init__(self, device: str, kernels: Any | None) -> None:
        """ConfigError if there is no such device."""
        self._device = torch.device(device)
        count = torch.cuda.device_count()
        if (self._device.index or 0) >= count:
            raise ConfigError(f"device {device}: torch sees {count} CUDA devices")
        self._device = torch.device("cuda", self._device.index or 0)
        torch.cuda.set_device(self._device)
        self.kernels = kernels
        self.writes: Writes = StagedWrites(self._device)
        self.recorder: Recorder | None = CudaRecorder() if kernels is not None else None

    def free_bytes(self, measure: Callable[[], None], estimated_bytes: int) -> int:
        measure()  # libraries take their workspaces, and kernels are loaded
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        measure()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        return max(0, free - peak - _RESERVE_BYTES)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Without the garbage collector: what it frees while a stream is captured would end the capture."""
        torch.cuda.synchronize()
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()
            torch.cuda.synchronize()


class CudaRecorder:
    """Recordings share one pool of memory: they are replayed one after the other."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self.last_num_nodes = 0

    def record(self, call: Callable[[], Any]) -> Callable[[], Any]:
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, "thread_local")
            try:
                outputs = call()
            finally:
                graph.capture_end()
        self.last_num_nodes = _count_nodes(graph)
        graph.instantiate()
        current.wait_stream(self._stream)
        if self._pool is None:
            self._pool = graph.pool()

        def replay() -> Any:
            graph.replay()
            return outputs

        return replay

    def forget(self) -> None:
        self._pool = None  # torch gives it up with its last graph, and refuses to record into it again


def _count_nodes(graph: torch.cuda.CUDAGraph) -> int:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_size_t(0)
        code = driver.cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
        return 0 if code else int(count.value)
    except (OSError, AttributeError):
        return 0


def pick_platform(config: RunnerConfig) -> Platform:
    """The platform of config.device. ConfigError if there is no such device."""
    device = torch.device(config.device)
    if device.type == "cpu":
        return CpuPlatform()
    if device.type == "cuda":
        return CudaPlatform(config.device, _kernels_for(config))
    raise ConfigError(f"device {config.device!r} is unknown; there are cpu and cuda")


def _kernels_for(config: RunnerConfig) -> Any | None:
    """None where the reference ops were asked for, or kernels cannot run."""
    names = ("cuda",) if config.providers is None else config.providers
    if "cuda" not in names or config.dtype == "float32" or config.batch_invariant:
        return None
    try:
        return load_kernels(config.device)
    except UnsupportedError:
        return None  # the op table has said so
