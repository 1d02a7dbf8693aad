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
    """Sections: model, options, ops, KV groups, memory, KV tiers, sampling defaults, speculation.

    machine: as it was before loading. num_blocks: per group of the report, the null block included. explained: the
    runner's op table. tiers: a table of those below the device. A section is a table whose first row names the columns,
    or key -> value; sizes are bytes.
    """
    return {
        "model": _model(resolved),
        "options": [list(decision) for decision in resolved.decisions],
        "ops": _ops(explained, resolved.model.num_layers),
        "KV groups": _groups(report, num_blocks),
        "memory": _memory(resolved, machine, report, num_blocks),
        "KV tiers": [list(row) for row in tiers],
        "sampling defaults": dict(resolved.sampling_defaults),
        "speculation": {"most drafts": speculator.needs.max_drafts} if speculator else {},
    }


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
    runner = resolved.runner
    kv_bytes = sum(group.bytes_per_block * count for group, count in zip(report.groups, num_blocks, strict=True))
    logits_rows = runner.max_num_rows * (1 + runner.max_num_drafts)
    step = f"estimate for {runner.max_num_tokens} tokens and {logits_rows} logits rows"
    rows: list[tuple[str, int, str]] = [
        ("this machine", machine.total_bytes, "within the container's limit, if there is one"),
        ("available at start", machine.available_bytes, "before loading"),
        ("weights", report.weight_bytes, ""),
        ("workspace of a step", activation_bytes(runner, resolved.model), step),
        ("KV cache", kv_bytes, f"of {format_size(resolved.kv_bytes)} planned, in whole blocks"),
        ("left free", max(0, report.free_bytes - kv_bytes), "beside all these"),
    ]
    return [["", "size", "bytes", "what"], *([name, format_size(size), size, what] for name, size, what in rows)]
