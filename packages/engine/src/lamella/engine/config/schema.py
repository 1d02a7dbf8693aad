"""Every user option, defined once: flags, environment variables, Python keywords and --help derive from here.

None means "decide": resolve() decides and says why. Nothing here imports torch or reads the machine.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from dataclasses import dataclass
from typing import Any

from lamella.engine.errors import StartError


def option(
    default: Any = None,
    *,
    help: str,
    group: str,
    kind: str = "str",
    choices: tuple[str, ...] = (),
    metavar: str | None = None,
) -> Any:
    """A field with what is needed to derive a flag. kind: str, int, float, bool, size, json; list: the
    flag may be repeated and a variable's text holds several, between commas; texts: the same, but a variable's text is
    one, commas and all; ints: whole numbers between commas, in the flag as well."""
    meta = {"help": help, "group": group, "kind": kind, "choices": choices, "metavar": metavar}
    if kind in ("list", "texts", "ints"):
        return dataclasses.field(default_factory=list, metadata=meta)
    return dataclasses.field(default=default, metadata=meta)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What a user may say about the engine, on the command line and in Python alike."""

    model: str = option(
        "",
        group="model",
        help="a known short name (smollm2), a checkpoint folder, a .gguf file, or a hub id org/name[:file.gguf]; a "
        "folder or file that has the name of a known model is ./NAME",
    )
    revision: str | None = option(
        group="model", help="branch, tag or commit of a hub id; an error where MODEL is anything else"
    )
    dtype: str = option(
        "auto",
        group="model",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="auto keeps weights in the checkpoint's format and uses the fastest kernels; on a CPU the others turn all "
        "weights into that type and use the reference ops, on a GPU only float32 does, and auto is the model's own "
        "type, else bfloat16",
    )
    max_model_len: int | None = option(
        group="model",
        kind="int",
        help="longest sequence, prompt and output together (default: what the model was made for, at most what the KV "
        "cache holds)",
    )
    chat_template: str | None = option(group="model", help="file with a Jinja chat template instead of the model's own")
    generation_config: str = option(
        "auto",
        group="model",
        choices=("auto", "none"),
        help="auto: the model's generation_config gives the sampling defaults of requests; none: plain defaults",
    )
    device: str = option(
        "auto",
        group="machine",
        metavar="DEVICE",
        help="where the model runs: cpu, cuda, cuda:N (the N-th GPU); auto takes a GPU if there is one and the package "
        "lamella-kernels-cuda is installed",
    )
    threads: int | None = option(
        group="machine", kind="int", help="CPU threads (default: the cores this process may use)"
    )
    providers: str | None = option(
        group="machine",
        help="op providers in order of preference, separated by commas: host (native, for CPUs), cuda (kernels "
        "for GPUs), torch (reference)",
    )
    enforce_eager: bool = option(
        False,
        group="machine",
        kind="bool",
        help="never record steps as CUDA graphs: slower, but starts sooner and needs less memory",
    )
    cuda_graph_sizes: list[int] = option(
        group="machine",
        kind="ints",
        metavar="N,...",
        help="numbers of decoding sequences whose steps are recorded as CUDA graphs; smaller batches are padded to the "
        "next of them, larger ones run without (default: 1, 2, 4 and the multiples of 8 up to --max-num-seqs, at most "
        "512)",
    )
    kv_cache_memory: int | None = option(
        group="memory",
        kind="size",
        help="bytes for the KV cache, such as 2GiB (default on a CPU: a share of the available memory; on a GPU: what "
        "--gpu-memory-utilization leaves)",
    )
    gpu_memory_utilization: float | None = option(
        group="memory",
        kind="float",
        help="share of the GPU's memory that may be in use, by weights, steps, KV cache and whatever else is on it "
        "(default: 0.9)",
    )
    kv_cache_dtype: str = option(
        "auto",
        group="memory",
        choices=("auto", "float16", "float32", "bfloat16", "fp8"),
        help="type of the cached keys and values; fp8 (e4m3, without scales) on a GPU only",
    )
    block_size: int | None = option(
        group="memory", kind="int", help="tokens per KV block, a power of two (default: 16 on a CPU, 64 on a GPU)"
    )
    enable_prefix_caching: bool = option(
        True, group="memory", kind="bool", help="reuse the KV blocks of equal prompt prefixes"
    )
    kv_tier: list[str] = option(
        group="memory",
        kind="texts",
        metavar="TIERS",
        help="where KV blocks go that leave the device: ram=4GiB, disk=/folder:100GiB, policy=lru|s3fifo, "
        "admission=all|reused, tenant_share=0.5, compress=zstd, store_dtype=fp8, external=package.module:Class,{json}; "
        "divided by commas, may be repeated (default: nowhere, they are computed again)",
    )
    max_num_seqs: int | None = option(
        group="scheduling", kind="int", help="most sequences in one step (default: 64 on a CPU, 256 on a GPU)"
    )
    max_num_batched_tokens: int | None = option(
        group="scheduling",
        kind="int",
        help="most tokens in one step (default on a CPU: at least 512, measured at start, so that a step stays under "
        "0.5 s; steps with long contexts then have fewer; on a GPU: 16384)",
    )
    scheduling_policy: str = option(
        "fcfs",
        group="scheduling",
        choices=("fcfs", "priority"),
        help="fcfs: first come, first served; priority: lower request priority first, then arrival",
    )
    batch_invariant: bool = option(
        False,
        group="machine",
        kind="bool",
        help="give each answer the same bits whatever else is in the batch, on the reference ops too (prompts then "
        "take about 6 times as long, each token by itself; a CPU's native kernels always do, at full speed)",
    )
    speculative_config: dict[str, Any] | None = option(
        group="scheduling",
        kind="json",
        help="drafts that the model checks: from the sequence's own text, "
        '\'{"method":"ngram","num_speculative_tokens":4}\', or from finished outputs too, '
        '\'{"method":"suffix","num_speculative_tokens":8}\', or from a smaller model, '
        '\'{"method":"draft_model","model":"MODEL","num_speculative_tokens":4}\'; '
        '"fallback":{...} is one more drafter, '
        '"rejection_sample_method" the rule by which drafts are kept (default: standard, which changes no answer)',
    )
    seed: int | None = option(
        group="scheduling", kind="int", help="makes requests without a seed of their own repeatable"
    )
    max_logprobs: int = option(
        20,
        group="scheduling",
        kind="int",
        help="largest logprobs a request may ask for; -1: any, and -1 for all tokens",
    )
    load_format: str = option(
        "auto",
        group="model",
        choices=("auto", "dummy"),
        help="dummy: random weights of the right shapes, for measuring",
    )

    def __post_init__(self) -> None:
        _check_types(self)
        # beyond the upper ends tables are made that no memory holds, or time is spent that no one has
        for name, low, high in (
            ("max_model_len", 1, 2**31 - 1),
            ("threads", 1, 4096),
            ("kv_cache_memory", 1, 2**63 - 1),
            ("max_num_seqs", 1, 16384),
            ("max_num_batched_tokens", 1, 2**20),
            ("block_size", 1, 4096),
            ("max_logprobs", -1, 2**31 - 1),
            ("seed", -(2**63), 2**63 - 1),
            ("gpu_memory_utilization", 0.01, 1),
        ):
            _check_range(self, name, low, high)
        if self.block_size is not None and self.block_size & (self.block_size - 1):
            raise StartError(f"--block-size must be a power of two, got {self.block_size}")
        tokens, sequences = self.max_num_batched_tokens, self.max_num_seqs
        if tokens is not None and sequences is not None and tokens < sequences:
            raise StartError(
                f"--max-num-batched-tokens is {tokens}, below --max-num-seqs {sequences}: a step must be able to give "
                "each sequence a token; raise the one or lower the other"
            )
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", self.device):
            raise StartError(f"--device must be auto, cpu, cuda or cuda:N; got {self.device!r:.100}")
        for size in self.cuda_graph_sizes:
            if not 1 <= size <= 16384:
                raise StartError(f"--cuda-graph-sizes must be numbers from 1 to 16384, got {size}")
        if self.cuda_graph_sizes and self.enforce_eager:
            raise StartError("--enforce-eager records no CUDA graphs, and --cuda-graph-sizes says which: leave one out")
        for field in dataclasses.fields(self):
            choices = field.metadata["choices"]
            if choices and getattr(self, field.name) not in choices:
                raise StartError(
                    f"{flag(field.name)} must be one of {', '.join(choices)}; got {getattr(self, field.name)!r}"
                )


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What a user may say about the HTTP server."""

    host: str = option("127.0.0.1", group="server", help="address to listen on")
    port: int = option(8000, group="server", kind="int", help="port to listen on; 0 picks a free one")
    served_model_name: list[str] = option(
        group="server", kind="list", help="name or names under which the model is served (default: MODEL as typed)"
    )
    api_key: list[str] = option(
        group="server", kind="list", help="keys that clients must send; guards all but /health and /version"
    )
    allowed_origins: list[str] = option(group="server", kind="list", help="origins that browsers may call from (CORS)")
    max_body_size: int = option(16 * 1024 * 1024, group="server", kind="size", help="largest request body")
    max_num_queued_reqs: int = option(
        1024,
        group="server",
        kind="int",
        help="most requests that may wait for --max-num-seqs to have room, each prompt of a list counted; beyond it "
        "the answer is 503 with Retry-After",
    )
    stream_keep_alive: float = option(
        15.0,
        group="server",
        kind="float",
        help="seconds of silence after which a stream sends a comment, so that proxies do not cut it (most do after "
        "60); 0: never",
    )
    step_timeout: float = option(
        300.0,
        group="server",
        kind="float",
        help="seconds without a step, while requests wait, after which the engine core counts as hung and the server "
        "ends, with exit code 1; above what the longest step takes; 0: never",
    )
    drain_timeout: float = option(
        30.0, group="server", kind="float", help="seconds that running requests get after SIGTERM"
    )
    log_stats: bool = option(True, group="server", kind="bool", help="print throughput and queue lengths every 10 s")

    def __post_init__(self) -> None:
        _check_types(self)
        for name, low, high in (
            ("port", 0, 65535),
            ("max_body_size", 1, 2**40),
            ("max_num_queued_reqs", 0, 2**31 - 1),
            ("stream_keep_alive", 0, 10**6),
            ("step_timeout", 0, 10**6),
            ("drain_timeout", 0, 10**6),
        ):
            _check_range(self, name, low, high)
        if 0 < self.step_timeout < 1:
            raise StartError(f"--step-timeout must be 0 (never) or at least 1, got {self.step_timeout}")
        for name in ("served_model_name", "api_key", "allowed_origins"):
            if not all(getattr(self, name)):
                raise StartError(f"{flag(name)} must not be empty")
        if any(key != key.strip() or not key.isprintable() for key in self.api_key):
            raise StartError("--api-key has white space around it or characters that no header can carry")


REMOVED = {
    "calculate_kv_scales": "scales measured on the fly changed the output with the first request served. Remove it: "
    "keys and values are cached in floating-point types, which need no scales; --kv-cache-dtype chooses one",
    "override_attention_dtype": "attention runs in the type of its KV cache. Remove it and use --kv-cache-dtype to "
    "choose that type",
}
"""Options of other engines that people still pass: why they do not exist, and what to use."""


_TYPES: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "size": int,
    "float": (int, float),
    "bool": bool,
    "json": dict,
    "list": list,
    "texts": list,
    "ints": list,
}


_SHOWN_TYPES = {"size": "int", "json": "dict", "texts": "list", "ints": "list"}


def _check_types(options: Any) -> None:
    """Flags have been converted; what Python callers give has not."""
    for field in dataclasses.fields(options):
        value, kind = getattr(options, field.name), field.metadata["kind"]
        if value is None and field.default is None:
            continue
        is_number = kind in ("int", "size", "float")
        if not isinstance(value, _TYPES[kind]) or (is_number and isinstance(value, bool)):
            kind = _SHOWN_TYPES.get(kind, kind)
            raise StartError(f"{flag(field.name)} must be of the type {kind}, got {value!r:.100}")
        if not isinstance(value, list):
            continue
        item_type, items = (int, "whole numbers") if kind == "ints" else (str, "strings")
        if not all(isinstance(item, item_type) and not isinstance(item, bool) for item in value):
            raise StartError(f"{flag(field.name)} must hold {items}, got {value!r:.100}")


def _check_range(options: Any, name: str, low: float, high: float) -> None:
    value = getattr(options, name)
    if value is None:
        return
    if not value >= low:  # nan, too
        raise StartError(f"{flag(name)} must be at least {low}, got {value}")
    if value > high:
        raise StartError(f"{flag(name)} must be at most {high}, got {value}")


def flag(name: str) -> str:
    """The command-line spelling of an option."""
    return "--" + name.replace("_", "-")


def default_of(name: str) -> Any:
    """An engine option's default."""
    return EngineOptions.__dataclass_fields__[name].default


def engine_options(**keywords: Any) -> EngineOptions:
    """EngineOptions from Python keywords; an unknown one is an error that names it and the nearest."""
    known = {field.name: field for field in dataclasses.fields(EngineOptions)}
    of_server = {field.name for field in dataclasses.fields(ServeOptions)}
    for name, value in keywords.items():
        if name in REMOVED:
            raise StartError(f"{name} does not exist: {REMOVED[name]}")
        if name in of_server:
            raise StartError(f"{name} is an option of the HTTP server: give it to `lamella serve` as {flag(name)}")
        if name not in known:
            raise StartError(f"unknown option {name!r}{nearest(name, known)}")
        if known[name].metadata["kind"] == "size" and isinstance(value, str):
            keywords[name] = parse_size(value)
        if known[name].metadata["kind"] == "texts" and isinstance(value, str):
            keywords[name] = [value]
    return EngineOptions(**keywords)


def nearest(name: str, known: Any) -> str:
    """'; did you mean ...?' or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


_UNITS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "kib": 2**10,
    "m": 10**6,
    "mb": 10**6,
    "mib": 2**20,
    "g": 10**9,
    "gb": 10**9,
    "gib": 2**30,
    "t": 10**12,
    "tb": 10**12,
    "tib": 2**40,
}


def parse_size(text: str) -> int:
    """Bytes from '512MiB', '2GB', '1.5g' or a plain number."""
    number = text.strip().rstrip("bBiIkKmMgGtT")
    unit = text.strip()[len(number) :].lower()
    try:
        value = float(number) * _UNITS[unit]
        return int(value)
    except (ValueError, KeyError, OverflowError):
        raise StartError(f"{text!r} is not a size; write a number with a unit such as 512MiB or 2GB") from None


def format_size(num_bytes: float) -> str:
    """'1.5 GiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
