"""What `lamella inspect` prints: how a model is run here, by section. Plain data, made once at start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lamella.engine.adapters.speculator import DrafterSpeculator
from lamella.engine.config.machine import Machine
from lamella.engine.config.resolve import Resolved
from lamella.engine.config.schema import format_size
from lamella.runner_v2.assembly import activation_bytes
from lamella.runner_v2.step import RankReport


def describe(
    resolved: Resolved,
    machine: Machine,
    report: RankReport,
    num_blocks: Sequence[int],
    explained: dict[str, Any],
    speculator: DrafterSpeculator | None,
    tiers: Sequence[Sequence[Any]] = (),
) -> dict[str, Any]:
    """Sections: model, device, options, ops, KV groups, memory, KV tiers, sampling defaults, speculation.

    machine: as it was before loading. num_blocks: per group of the report, the null block included. explained: the
    runner's op table, and under "device", if it is there, what the runner says of its steps. tiers: a table of those
    below the device. A section is a table whose first row names the columns, or key -> value; sizes are bytes.
    """
    return {
        "model": _model(resolved),
        "device": _device(resolved, explained),
        "options": [list(decision) for decision in resolved.decisions],
        "ops": _ops(explained, resolved.model.num_layers),
        "KV groups": _groups(report, num_blocks),
        "memory": _memory(resolved, machine, report, num_blocks),
        "KV tiers": [list(row) for row in tiers],
        "sampling defaults": dict(resolved.sampling_defaults),
        "speculation": _speculation(resolved, speculator) if speculator else {},
    }


def _speculation(resolved: Resolved, speculator: DrafterSpeculator) -> dict[str, Any]:
    rule = speculator.rule
    shown: dict[str, Any] = {"most drafts": speculator.needs.max_drafts}
    if resolved.speculation is not None:
        shown["methods"] = ", ".join(resolved.speculation.methods)
    return {**shown, "rule": rule.name, "output": "exact" if rule.exact else "not that of the model alone"}


def _model(resolved: Resolved) -> dict[str, Any]:
    model = resolved.model
    moe = next((layer.moe for layer in model.layers if layer.moe), None)
    return {
        "path": resolved.runner.model_path,
        "family": model.family,
        "layers": model.num_layers,
        "hidden": model.hidden_size,
        "heads": f"{model.num_heads} query, {model.num_kv_heads} key/value, of {model.head_dim}",
        "vocabulary": model.vocab_size,
        "experts": f"{moe.num_experts_per_token} of {moe.num_experts}" if moe else "none",
        "positions": model.max_position,
    }


def _device(resolved: Resolved, explained: dict[str, Any]) -> dict[str, Any]:
    platform, runner = resolved.platform, resolved.runner
    shown: dict[str, Any] = {"device": platform.device, "why": platform.reason}
    if platform.gpu is not None:
        shown["GPU"] = platform.gpu.name
        shown["compute capability"] = "{}.{}".format(*platform.gpu.capability)
        shown["steps in flight"] = resolved.depth
        shown["CUDA graphs"] = ", ".join(map(str, runner.graph_rows)) or "none"
    else:
        shown["threads"] = runner.num_threads
    return {**shown, **explained.get("device", {})}


def _ops(explained: dict[str, Any], num_layers: int) -> list[list[Any]]:
    rows: list[list[Any]] = [["op", "provider", "places", "site", "why not others"]]
    for choice in explained["ops"]:
        rows.append(
            [
                choice["op"],
                choice["provider"] or "(smaller ops)",
                choice["num_sites"],
                choice["site"],
                _refused(choice["refused"]),
            ]
        )
    attention = explained["attention"]
    rows.append(["attention", attention["backend"], num_layers, "", _refused(attention["refused"])])
    return rows


def _refused(reasons: dict[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in reasons.items())


def _groups(report: RankReport, num_blocks: Sequence[int]) -> list[list[Any]]:
    """tokens: what the group's blocks hold, the null block left out."""
    rows: list[list[Any]] = [
        ["group", "layers", "window", "row format", "tokens per block", "bytes per block", "blocks", "tokens", "bytes"]
    ]
    for group, count in zip(report.groups, num_blocks, strict=True):
        rows.append(
            [
                group.name,
                len(group.layers),
                group.window or "-",
                group.row_format,
                group.block_size,
                group.bytes_per_block,
                count,
                (count - 1) * group.block_size,
                count * group.bytes_per_block,
            ]
        )
    return rows


def _memory(resolved: Resolved, machine: Machine, report: RankReport, num_blocks: Sequence[int]) -> list[list[Any]]:
    """free_bytes was measured with the weights in memory, and leaves room for a step."""
    kv_bytes = sum(group.bytes_per_block * count for group, count in zip(report.groups, num_blocks, strict=True))
    rows = _device_memory(resolved, machine, report)
    rows += [
        ("KV cache", kv_bytes, f"of {format_size(resolved.kv_bytes)} planned, in whole blocks"),
        ("left free", max(0, report.free_bytes - kv_bytes), "beside all these"),
    ]
    return [["", "size", "bytes", "what"], *([name, format_size(size), size, what] for name, size, what in rows)]


def _device_memory(resolved: Resolved, machine: Machine, report: RankReport) -> list[tuple[str, int, str]]:
    """What there is where the model runs, and what it takes beside the KV cache."""
    runner, gpu = resolved.runner, resolved.platform.gpu
    weights = ("weights", report.weight_bytes, "")
    logits_rows = runner.max_num_rows * (1 + runner.max_num_drafts)
    step = f"{runner.max_num_tokens} tokens and {logits_rows} logits rows"
    if gpu is None:
        return [
            ("this machine", machine.total_bytes, "within the container's limit, if there is one"),
            ("available at start", machine.available_bytes, "before loading"),
            weights,
            ("workspace of a step", activation_bytes(runner, resolved.model), f"estimate for {step}"),
        ]
    taken = max(0, gpu.free_bytes - report.weight_bytes - report.free_bytes)
    return [
        ("this GPU", gpu.total_bytes, gpu.name),
        ("free at start", gpu.free_bytes, "before loading"),
        weights,
        ("workspace of a step", taken, f"measured for {step}; the driver's context and recorded graphs included"),
    ]
