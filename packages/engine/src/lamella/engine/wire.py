"""Messages between the client side and the core process: msgpack, positional, append-only, recordable.

client -> core   Add, Abort, Call
core -> client   Progress*, Ready, (Batch | CallResult)*, Dead

A core that cannot start says Dead instead of Ready. The call `shutdown` ends the core without a Dead.
"""

from __future__ import annotations

from typing import Any

import msgspec

from lamella.engine.request import Delta, Request


class Add(msgspec.Struct, tag="add", array_like=True, gc=False):
    """A new request."""

    request: Request


class Abort(msgspec.Struct, tag="abort", array_like=True, gc=False):
    """These are no longer wanted (client went away, or a stop string was found).

    Each entry is a request id, which ends all its sequences, or `sequence_id(request_id, index)`, which ends one of
    them. Unknown and already finished ones are ignored. The client expects no answer, and ignores what still comes.
    """

    request_ids: list[str]
    reason: str = "abort"


class Call(msgspec.Struct, tag="call", array_like=True, gc=False):
    """An operation between steps: stats, reset_prefix_cache, drain, shutdown."""

    call_id: int
    method: str
    args: dict[str, Any] = {}


class SpecInfo(msgspec.Struct, array_like=True):
    """How an engine speculates."""

    methods: list[str]
    """Drafters, in order of preference."""
    max_drafts: int
    """Of a row in one step."""
    rule: str = "standard"
    """By which drafts are kept (rejection_sample_method)."""
    exact: bool = True
    """The rule keeps the target's law."""
    adaptive: bool = False
    """Only those drafts are verified that pay."""


class CoreInfo(msgspec.Struct, array_like=True):
    """Values that are fixed once the core is ready."""

    max_model_len: int
    vocab_size: int
    num_blocks: list[int]
    block_size: int
    kv_tokens: int
    """Tokens that the KV cache holds."""
    max_num_seqs: int
    max_num_batched_tokens: int
    report: dict[str, Any] = {}
    """What `inspect` shows: resolved options with reasons, op table, groups, memory plan."""
    speculation: SpecInfo | None = None


class TierFigures(msgspec.Struct, array_like=True, gc=False):
    """One tier of the KV cache below the device: counters since start, gauges where said."""

    num_blocks: int = 0
    """Gauge, as are capacity and queue_depth."""
    capacity: int = 0
    """In blocks; 0: not known, or no limit."""
    queue_depth: int = 0
    lookups: int = 0
    """Prompts looked up."""
    queried_tokens: int = 0
    hit_tokens: int = 0
    """Prompt tokens found there and in no faster tier."""
    partial_hits: int = 0
    """Lookups of which less was brought than was found."""
    bytes_in: int = 0
    bytes_out: int = 0
    evictions: int = 0
    refused: dict[str, int] = {}
    """Blocks not taken in, by reason."""
    failures: dict[str, int] = {}
    """Copies that failed, by kind."""
    loads: int = 0
    load_seconds: float = 0.0
    prefill_tokens_saved: int = 0
    seconds_saved: float = 0.0
    """Of prefill, as measured at start."""
    seconds_spent: float = 0.0
    """That requests waited for loads, and copies kept a step waiting."""


class Stats(msgspec.Struct, array_like=True, gc=False):
    """Gauges and counters of the core, sent with each batch of deltas (counters are totals since start)."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0
    """Of prompts that are done, whether computed or taken from the cache; a prompt counts once, whatever its n."""
    generation_tokens: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up."""
    prefix_hits: int = 0
    preemptions: int = 0
    spec_drafts: int = 0
    spec_draft_tokens: int = 0
    spec_accepted_tokens: int = 0
    spec_accepted_per_pos: list[int] = []
    step_seconds: float = 0.0
    """Total time the runner worked."""
    schedule_seconds: float = 0.0
    """Total time of planning and committing."""
    computed_tokens: int = 0
    """Tokens that the steps ran through the model: chunks, decoding rows, drafts."""
    computed_prompt_tokens: int = 0
    """Those of prompts: no cached ones; after a preemption they count again."""
    tiers: dict[str, TierFigures] = {}
    """By the tier's name: host, disk, or an external manager's; empty without tiers."""
    late_loads: int = 0
    """Sequences that went on without what a tier did not bring in time."""
    spec_lens: list[int] = []
    """Place n: decoding rows, summed over steps, that verified n drafts."""
    spec_off: dict[str, int] = {}
    """Reason -> those that verified none because of it."""
    spec_unverified_tokens: int = 0
    """Draft tokens that were made and not verified."""
    spec_draft_seconds: float = 0.0
    """Of step_seconds, what drafting took."""
    spec_verify_seconds: float = 0.0
    """Of step_seconds, what the steps took that verified drafts, drafting left out."""
    spec_method_draft_tokens: dict[str, int] = {}
    """Method -> draft tokens of it that were verified."""
    spec_method_accepted_tokens: dict[str, int] = {}


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The core has loaded its model."""

    info: CoreInfo


class Progress(msgspec.Struct, tag="progress", array_like=True):
    """A line on how loading goes; before Ready."""

    text: str


class Batch(msgspec.Struct, tag="batch", array_like=True, gc=False):
    """Results of one step. Without deltas: a sign that steps are made, or that sequences came, began or went."""

    deltas: list[Delta]
    stats: Stats | None = None


class CallResult(msgspec.Struct, tag="result", array_like=True, gc=False):
    """Answer to a Call."""

    call_id: int
    value: Any = None
    error: str | None = None


class Dead(msgspec.Struct, tag="dead", array_like=True):
    """The core ends: the last message it sends."""

    reason: str


def sequence_id(request_id: str, index: int) -> str:
    """How an Abort names one sequence of a request. Request ids hold no '#'."""
    return f"{request_id}#{index}"


def parse_sequence_id(name: str) -> tuple[str, int | None]:
    """(request id, index) of an Abort's entry; index None: the whole request."""
    request_id, hash_mark, index = name.partition("#")
    return request_id, int(index) if hash_mark else None


ToCore = Add | Abort | Call
ToClient = Ready | Progress | Batch | CallResult | Dead

encoder = msgspec.msgpack.Encoder()
to_core = msgspec.msgpack.Decoder(ToCore)
to_client = msgspec.msgpack.Decoder(ToClient)
