"""Builds what lies below the device's KV blocks: plan for the books, memory of the host tier, movers.

options.kv_tier ─▶ parse ─▶ (model loaded, blocks planned) ─▶ slots, fingerprint ─▶ TierPlan, TierMover
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from lamella.engine.adapters.block_copier import block_copiers
from lamella.engine.config.resolve import Resolved, TimedChunk, token_cost
from lamella.engine.config.schema import format_size
from lamella.engine.core import tier_layout
from lamella.engine.errors import StartError
from lamella.kvtier import AdmissionPlan, CostModel, Job, KvTierError, LayoutError, TierEvent, TierPlan
from lamella.kvtier.config import DiskConfig, TiersConfig, parse_tiers
from lamella.kvtier.data.disk.measure import Probe, probe_reads
from lamella.kvtier.data.disk.store import DiskStore
from lamella.kvtier.data.external import manager_maker
from lamella.kvtier.data.fp8 import Fp8Codec, RowGeometry
from lamella.kvtier.data.host_buffer import HostBuffer, slots_for
from lamella.kvtier.data.mover import TierMover
from lamella.runner_v2.step import KvLayout, RankReport

MAX_PROBE_BYTES = 32 << 20
"""A start writes no more into the folder to measure it, and no more than a quarter of what the tier may have."""
TOLD_WAIT_S = 2.0
"""A start waits no longer for the list of what a folder holds: the first request should find it."""
LEAST_PATIENCE_S = 0.05
"""A sequence waits at least so long for a tier."""
PATIENCE = 2.0
"""Else so many times as long as computing its prompt would take."""


class BuiltTiers(NamedTuple):
    """What the core needs, and what `lamella inspect` shows."""

    plan: TierPlan
    mover: TierMover
    shown: list[list[Any]]

    def measure_link(self) -> None:
        """Put the speed of copies to the device where the cost model reads it. The mover is bound, and idle."""
        speed = self.mover.measure_link()
        if speed is not None:
            self.plan.cost.bytes_per_s["host"] = speed

    def table(self) -> list[list[Any]]:
        """What is shown, with the speeds that are known by now."""
        head, *rows = self.shown
        copied_by = self.mover.stats().get("host", {}).get("copied_by", ())
        if copied_by:
            (name, size, holds, how), *others = rows
            rows = [[name, size, holds, f"{how}, copied by {' and '.join(dict.fromkeys(copied_by))}"], *others]
        speeds = self.plan.cost.bytes_per_s
        told = [f"{speeds[row[0]] / 1e9:.2f} GB/s" if row[0] in speeds else "not yet" for row in rows]
        return [[*head, "measured"], *([*row, speed] for row, speed in zip(rows, told))]

    def patience(self, num_tokens: int) -> float:
        """Seconds that a sequence of so many tokens waits for its prefix."""
        return max(LEAST_PATIENCE_S, PATIENCE * self.plan.cost.recompute_s(0, num_tokens))


class LateMover:
    """Stands for a mover while there is none: the worker is made before its blocks' sizes are known."""

    def __init__(self) -> None:
        self._mover: TierMover | None = None

    def attach(self, mover: TierMover) -> None:
        """From now on this is that mover."""
        self._mover = mover

    @property
    def _attached(self) -> TierMover:
        assert self._mover is not None, "copies before the tiers were made"
        return self._mover

    def bind(self, layers: Sequence[Sequence[int]], caches: Sequence[tuple[torch.Tensor, ...]]) -> None:
        self._attached.bind(layers, caches)

    def submit(self, jobs: Sequence[Job]) -> None:
        self._attached.submit(jobs)

    def poll(self) -> list[TierEvent]:
        return self._attached.poll()

    def wait(self, timeout_s: float) -> bool:
        return self._attached.wait(timeout_s)

    def before_step(self, step_id: int, waits: bool) -> None:
        self._attached.before_step(step_id, waits)

    def wait_layer(self, layer_idx: int) -> None:
        if self._mover is not None:  # chunks that are only timed read no block
            self._mover.wait_layer(layer_idx)

    def after_step(self, step_id: int) -> None:
        self._attached.after_step(step_id)

    def close(self) -> None:
        if self._mover is not None:
            self._mover.close()


def parse(texts: Sequence[str]) -> TiersConfig | None:
    """What --kv-tier says; None without it. Raises StartError naming what is wrong; nothing is made yet."""
    if not texts:
        return None
    try:
        config = parse_tiers(list(texts))
        for external in config.externals:
            manager_maker(external.module_path, external.options)
    except KvTierError as error:
        raise StartError(f"--kv-tier {error}") from None
    return config


def build_tiers(
    config: TiersConfig,
    resolved: Resolved,
    report: RankReport,
    num_blocks: tuple[int, ...],
    model: str,
    chunks: Sequence[TimedChunk],
) -> BuiltTiers:
    """Make the tiers. model: identity of the weights. chunks: timed ones, for the cost of computing again. Raises
    StartError if there is no memory, folder or manager for them."""
    sizes = [group.bytes_per_block for group in report.groups]
    layout = tier_layout(report, KvLayout(num_blocks), f"{model} tp=1")
    base_s, cost = token_cost(*chunks)
    try:
        slots = slots_for(config.ram_bytes, sizes, [1] * len(sizes))
        buffer = HostBuffer(sizes, slots)
        codec, fingerprint, probe = None, layout.fingerprint(), None
        if config.store_dtype == "fp8":
            codec = _fp8_codec(buffer, resolved, report)
            fingerprint = Fp8Codec.fingerprint(fingerprint)
        store = None
        if config.disk is not None:
            store = DiskStore(
                config.disk.folder,
                fingerprint=fingerprint,
                capacity_bytes=config.disk.capacity_bytes,
                compress=config.compress,
                standalone=[n for n, group in enumerate(report.groups) if group.kind != "full"],
            )
            probe = _probe(config.disk, max(buffer.slot_bytes if codec is None else codec.packed_bytes))
        mover = TierMover(
            buffer,
            fingerprint=layout.fingerprint(),
            store=store,
            externals=[(e.name, manager_maker(e.module_path, e.options)) for e in config.externals],
            codec=codec,
            copiers=block_copiers(resolved.runner.device),
        )
    except (KvTierError, OSError) as error:
        raise StartError(f"--kv-tier: {error}") from error
    mover.wait_told(TOLD_WAIT_S)
    plan = TierPlan(
        host_slots=tuple(slots),
        eviction=config.policy,
        admission=AdmissionPlan(mode=config.admission, max_tenant_share=config.tenant_share),  # type: ignore[arg-type]
        has_disk=store is not None,
        externals=tuple(external.name for external in config.externals),
        cost=CostModel(prefill_s_per_token=base_s, prefill_s_per_position=base_s * cost.slope),
    )
    if probe is not None:
        # speeds are those of blocks, however few bytes the disk has of them
        packed = 1.0 if codec is None else sum(buffer.slot_bytes) / sum(codec.packed_bytes)
        plan.cost.bytes_per_s["disk"] = probe.bytes_per_s * packed
        plan.cost.latency_s["disk"] = probe.latency_s
    return BuiltTiers(plan, mover, _shown(config, slots, report, store))


def _probe(disk: DiskConfig, block_bytes: int) -> Probe | None:
    """None where the folder can only be read: the first loads will tell."""
    return probe_reads(disk.folder, block_bytes, max_bytes=min(MAX_PROBE_BYTES, disk.capacity_bytes // 4))


def _fp8_codec(buffer: HostBuffer, resolved: Resolved, report: RankReport) -> Fp8Codec:
    draft = resolved.runner.draft
    try:
        return Fp8Codec(buffer, [_geometry(resolved, report, n) for n in range(len(report.groups))])
    except LayoutError as error:
        if draft is None:
            raise
        raise StartError(
            "--kv-tier: store_dtype=fp8 needs layers of one shape, and those of the drafting network "
            f"{draft.model_path} differ from the model's ({error}): leave store_dtype out"
        ) from error


def _geometry(resolved: Resolved, report: RankReport, group: int) -> RowGeometry:
    rows = report.groups[group]
    model = resolved.model
    return RowGeometry(model.num_kv_heads, rows.block_size, model.head_dim, rows.row_format, len(rows.layers))


def _shown(config: TiersConfig, slots: Sequence[int], report: RankReport, store: DiskStore | None) -> list[list[Any]]:
    rows: list[list[Any]] = [["tier", "size", "holds", "how"]]
    tokens = min(count * group.block_size for count, group in zip(slots, report.groups))
    how_host = f"{config.policy}, admits {config.admission}"
    if config.tenant_share < 1.0:
        how_host += f", at most {config.tenant_share:.0%} for a cache salt"
    rows.append(["host", format_size(config.ram_bytes), f"{tokens} tokens", how_host])
    if config.disk is not None and store is not None:
        how = [store.engine_name]
        how += [config.compress] if config.compress != "none" else []
        how += [config.store_dtype] if config.store_dtype != "same" else []
        rows.append(["disk", format_size(config.disk.capacity_bytes), str(config.disk.folder), ", ".join(how)])
    rows += [[external.name, "its own", external.module_path, ""] for external in config.externals]
    return rows
