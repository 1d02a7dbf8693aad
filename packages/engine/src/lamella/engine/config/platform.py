"""What the device decides: where the model runs, and the defaults that follow from it.

    options, machine ─► choose_platform ─► Platform ─► resolve asks it instead of the device's name

A CPU's step is bound by arithmetic, so steps are small and measured. A GPU's is bound by reading the weights, so many
sequences share one, and launching it costs more than planning it, so that decoding steps are recorded as graphs and the
next one is planned while one runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from lamella.engine.config.gpus import Gpu, Gpus
from lamella.engine.config.machine import Machine
from lamella.engine.config.schema import EngineOptions
from lamella.engine.errors import StartError

GPU_UTILIZATION = 0.9
GPU_TOKENS = 16384
MAX_GRAPH_ROWS = 512
GRAPH_STRIDE = 8


@dataclass(frozen=True, slots=True)
class Platform:
    """A device to run on, and what it makes of the options that were left open."""

    device: str
    """As RunnerConfig has it: cpu, cuda or cuda:N."""
    reason: str
    gpu: Gpu | None
    """None: the CPU."""
    providers: str
    """Those that serve by default, in order of preference."""
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int | None
    """None: measured."""

    @property
    def is_gpu(self) -> bool:
        return self.gpu is not None


def choose_platform(options: EngineOptions, machine: Machine) -> Platform:
    """The device of --device. Raises StartError where that is a GPU which is not there or cannot be used, and for
    options that the device has no use for."""
    if options.device == "cpu":
        platform = _cpu("given")
    elif options.device == "auto":
        usable = next((gpu for gpu in machine.gpus.found if gpu.refused is None), None)
        # the first one is what "cuda" means to everybody
        if usable is not None:
            device = "cuda" if usable.index == 0 else f"cuda:{usable.index}"
            platform = _gpu(device, usable, f"{_named(usable)} is there, and the CUDA kernels run on it")
        else:
            platform = _cpu(f"no GPU that can be used: {_why_none(machine.gpus)}")
    else:
        platform = _gpu(options.device, _asked(options.device, machine.gpus), "given")
    if not platform.is_gpu:
        _refuse_on_cpu(options)
    return platform


def graph_rows(options: EngineOptions, max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of decoding rows whose steps are recorded: those given, as far as there can be so many rows, or 1, 2, 4
    and the multiples of 8, and the most there can be."""
    if options.enforce_eager:
        return ()
    if options.cuda_graph_sizes:
        return tuple(sorted({min(size, max_num_seqs) for size in options.cuda_graph_sizes}))
    most = min(max_num_seqs, MAX_GRAPH_ROWS)
    return tuple(size for size in (1, 2, 4, *range(GRAPH_STRIDE, most, GRAPH_STRIDE)) if size < most) + (most,)


def _cpu(reason: str) -> Platform:
    return Platform("cpu", reason, None, "host, torch", block_size=16, max_num_seqs=64, max_num_batched_tokens=None)


def _gpu(device: str, gpu: Gpu, reason: str) -> Platform:
    return Platform(
        device, reason, gpu, "cuda, torch", block_size=64, max_num_seqs=256, max_num_batched_tokens=GPU_TOKENS
    )


def _asked(device: str, gpus: Gpus) -> Gpu:
    if not gpus.found:
        raise StartError(f"--device {device} cannot be used: {gpus.missing}; or leave --device out to run on the CPU")
    index = int(device.partition(":")[2] or 0)
    if index >= len(gpus.found):
        listed = ", ".join(f"cuda:{gpu.index} ({gpu.name})" for gpu in gpus.found)
        raise StartError(f"--device {device} does not exist; there are {listed}")
    gpu = gpus.found[index]
    if gpu.refused is not None:
        raise StartError(f"--device {device} ({gpu.name}) cannot be used: {gpu.refused}; --device cpu runs on the CPU")
    return gpu


def _why_none(gpus: Gpus) -> str:
    return gpus.missing or "; ".join(f"{gpu.name}: {gpu.refused}" for gpu in gpus.found)


def _named(gpu: Gpu) -> str:
    return f"cuda:{gpu.index} ({gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]})"


def _refuse_on_cpu(options: EngineOptions) -> None:
    """An option that has no effect is a mistake of whoever gave it."""
    for name, given, instead in (
        ("--gpu-memory-utilization", options.gpu_memory_utilization is not None, "use --kv-cache-memory"),
        ("--cuda-graph-sizes", bool(options.cuda_graph_sizes), "leave it out"),
        ("--enforce-eager", options.enforce_eager, "leave it out: steps of a CPU are never recorded"),
        ("--kv-cache-dtype fp8", options.kv_cache_dtype == "fp8", "use float16 or bfloat16"),
    ):
        if given:
            raise StartError(f"{name} is for GPUs, and the model runs on the CPU: {instead}")
