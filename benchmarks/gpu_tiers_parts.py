"""One part of benchmarks/gpu_tiers.py: the process that it starts.

    python gpu_tiers_parts.py SPEC.json

To the spec's `out` go JSON lines: {"says": what begins}, {"row": a figure with its checks passed}, {"done": true}.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_engine import Bench, describe_device, lines_to

from lamella.engine.adapters.block_copier import block_copiers
from lamella.kvtier import CopyJob, KeyChain, Location, TicketResult
from lamella.kvtier.data.cuda_mover import CudaDeviceMover
from lamella.kvtier.data.host_buffer import HostBuffer
from lamella.kvtier.data.queue import EventQueue

Say = Callable[[dict[str, Any]], None]
ROW_S = 60.0
SETTLE_S = 40.0
"""A start pins in the background; rows are about pinned slots."""


class Wrong(RuntimeError):
    """A check failed: the row does not stand."""


def attempt(say: Say, name: str, unit: str, measure: Callable[[], None]) -> None:
    """One group of rows: an error of it is a row, and the next one follows."""
    say({"says": name})
    try:
        measure()
    except Exception as error:  # noqa: BLE001 - whatever it was, the other rows are to be measured
        traceback.print_exc()
        say({"row": {"name": name, "unit": unit, "error": f"{type(error).__name__}: {error}"}})


# ---- copies ----------------------------------------------------------------------------------------------------------


def link(spec: dict[str, Any], say: Say) -> None:
    """The raw link, then copies through the mover: all blocks come back as they were."""
    speeds = {name: raw_link(name) for name in ("host -> device", "device -> host")}
    for name, speed in speeds.items():
        say({"row": {"name": f"pinned link, {name}, one copy of 1 GiB", "unit": "GB/s", "value": speed}})
    for layout, shape in spec["layouts"].items():
        attempt(say, f"copies, {layout}", "GB/s", lambda name=layout, s=shape: layout_rows(name, s, speeds, spec, say))


def raw_link(name: str) -> float:
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target, source = (device, host) if name.startswith("host") else (host, device)
    runs = []
    for _ in range(6):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        runs.append((1 << 30) / (time.perf_counter() - started) / 1e9)
    return statistics.median(runs[1:])


def layout_rows(name: str, shape: dict[str, Any], speeds: dict[str, float], spec: dict[str, Any], say: Say) -> None:
    setting = Copies(shape["layers"], shape["piece"], max(shape["sizes"]))
    try:
        say({"says": f"{name}: pinned in {setting.pinned_s:.2f} s"})
        for num_bytes in shape["sizes"]:
            for scattered in shape["scattered"]:
                for loads in (False, True):
                    rates, on_device = {}, {}
                    for copier in setting.copiers:
                        wall, device = setting.rate(copier, num_bytes, scattered, loads)
                        rates[copier.name], on_device[copier.name] = wall, device
                    taken = setting.chosen[0 if loads else 1]
                    way = "host -> device" if loads else "device -> host"
                    target = spec["targets"].get(name) if loads else None
                    if loads and target is None:
                        target = 0.9 * speeds[way]
                    how = "scattered" if scattered else "in order"
                    row = {
                        "name": f"{'restore' if loads else 'write back'} {num_bytes >> 20} MiB {how}, {name}",
                        "unit": "GB/s",
                        "value": rates[taken],
                        "target": target,
                        "floor": speeds[way],
                        "by": taken,
                        **{f"{copier} GB/s": rate for copier, rate in rates.items()},
                        **{f"{copier} GB/s, the device's time": rate for copier, rate in on_device.items()},
                    }
                    say({"row": row})
    finally:
        setting.mover.close()


class Copies:
    """Caches of `layers` layers with random bytes, and as many slots."""

    def __init__(self, layers: int, piece: int, num_bytes: int) -> None:
        self.block_bytes = layers * 2 * piece
        self.count = num_bytes // self.block_bytes
        self.caches = [
            tuple(
                torch.randint(0, 1 << 30, (self.count + 1, piece // 4), dtype=torch.int32, device="cuda")
                for _ in range(2)
            )
            for _ in range(layers)
        ]
        self.buffer = HostBuffer([self.block_bytes], [self.count])
        self.events = EventQueue()
        self.copiers = block_copiers("cuda")
        if not self.copiers:
            raise Wrong("neither the driver's batched copies nor the kernels are here")
        started = time.perf_counter()
        self.mover = CudaDeviceMover(self.buffer, [list(range(layers))], self.caches, self.events, copiers=self.copiers)
        if not self.mover._pinner.wait_for(0, self.count, SETTLE_S):
            raise Wrong(f"the slab was not pinned: CUDA error {self.mover._pinner.error}")
        self.pinned_s = time.perf_counter() - started
        self.mover.measure(0, min(self.count, (64 << 20) // self.block_bytes))
        self.chosen = self.mover.stats()["copied_by"]

    def rate(self, copier: Any, num_bytes: int, scattered: bool, loads: bool) -> tuple[float, float]:
        """GB/s from submit() to the last ticket's end, and while the device copied; medians of five. Raises Wrong if a
        byte is."""
        count = num_bytes // self.block_bytes
        slots = torch.randperm(self.count)[:count] if scattered else torch.arange(count)
        blocks = (torch.randperm(self.count)[:count] if scattered else torch.arange(count)) + 1
        self.mover._chosen = [copier, copier]
        down, up = ([*self.jobs(slots, blocks, way)] for way in (False, True))
        want = self.digest(blocks)
        self.run(down)
        runs = [self.run(up if loads else down) for _ in range(6)][1:]
        self.clear(blocks)
        self.run(up)
        if not torch.equal(self.digest(blocks), want):
            raise Wrong("bytes changed on their way")
        wall, device = (num_bytes / statistics.median(seconds) / 1e9 for seconds in zip(*runs))
        return wall, device

    def jobs(self, slots: torch.Tensor, blocks: torch.Tensor, loads: bool) -> Iterator[CopyJob]:
        for n, (slot, block) in enumerate(zip(slots.tolist(), blocks.tolist())):
            ends = (Location("host", 0, slot), Location("device", 0, block))
            source, target = ends if loads else ends[::-1]
            yield CopyJob(n, b"", source, target, self.block_bytes)

    def run(self, jobs: list[CopyJob]) -> tuple[float, float]:
        """Seconds here, and of the device."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        self.mover.submit(jobs)
        ended: list[TicketResult] = []
        while len(ended) < len(jobs):
            self.mover.poll()
            ended += self.events.take()  # type: ignore[arg-type]
            if time.perf_counter() - started > 20:
                raise Wrong(f"{len(jobs) - len(ended)} of {len(jobs)} copies did not end")
        seconds = time.perf_counter() - started
        failed = [result.error for result in ended if not result.ok]
        if failed:
            raise Wrong(f"{len(failed)} copies failed: {failed[0]}")
        return seconds, sum(result.seconds for result in ended)

    def clear(self, blocks: torch.Tensor) -> None:
        for layer in self.caches:
            for cache in layer:
                cache[blocks.cuda()] = 0
        torch.cuda.synchronize()

    def digest(self, blocks: torch.Tensor) -> torch.Tensor:
        return torch.stack([block_digests(cache, blocks.cuda()) for layer in self.caches for cache in layer])


def block_digests(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:  # [blocks]
    """A number for each of these blocks of a tensor, that depends on every bit and on its place."""
    words = cache.view(cache.shape[0], -1).view(torch.int16)
    place = torch.arange(1, words.shape[1] + 1, device=words.device) % 8191
    return torch.cat([(words[part].long() * place).sum(1) for part in blocks.split(64)])


# ---- the engine ------------------------------------------------------------------------------------------------------


class TieredBench(Bench):
    """An engine on tiers, and looks below its hood."""

    @property
    def mover(self) -> Any:
        return self.core._executor._mover._mover

    @property
    def copying(self) -> bool:
        """Copies between device and host are under way."""
        device = self.mover._device
        return bool(device.busy or device.queue_depth)

    def settle(self) -> None:
        """Until all copies have ended."""
        while self.core.has_work:
            self.round()

    def wait_for_pins(self) -> float:
        """Seconds until the slab is pinned as far as it will be."""
        started = time.perf_counter()
        pinner = getattr(self.mover._device, "_pinner", None)
        if pinner is not None and not pinner.wait(SETTLE_S):
            raise Wrong(f"{pinner.num_bytes / 2**30:.1f} GiB are pinned after {SETTLE_S:.0f} s")
        return time.perf_counter() - started

    def digest(self, prompt: list[int]) -> torch.Tensor:  # [layers * tensors, blocks]
        """Of the KV that the device holds of a prompt, by tensor and block."""
        manager, runner = self.core._manager, self.core._executor._worker.runner
        num_blocks = (len(prompt) - 1) // manager.block_size
        keys = KeyChain(manager.block_size).extend(prompt)[:num_blocks]
        blocks = torch.tensor(manager._all[0].find_all(keys), device=runner._caches[0].k.device)
        return torch.stack([block_digests(cache, blocks) for layer in runner._caches for cache in layer]).cpu()

    def check(self, prompt: list[int], known: torch.Tensor, cached_len: int) -> None:
        """Raises Wrong if a block that was not computed anew is not what it was. (What is computed anew, in steps of
        another shape, differs in last bits.)"""
        count = cached_len // self.core._manager.block_size
        wrong = self.digest(prompt)[:, :count] != known[:, :count]
        if wrong.any():
            tensors, blocks = (wrong.any(dim=n).nonzero()[:, 0].tolist() for n in (1, 0))
            raise Wrong(
                f"what came back is not what went: of {count} blocks {len(blocks)}, {blocks[0]} to {blocks[-1]}, "
                f"in {len(tensors)} of {len(wrong)} tensors, {tensors[0]} to {tensors[-1]}"
            )

    def restored(self, prompt: list[int], known: torch.Tensor) -> float:
        """Milliseconds to the first token of a prompt that only the host holds. Raises Wrong if it was not, or if what
        came back is not what went."""
        before = self.core.stats().tiers["host"].hit_tokens
        self.start_row()
        ms, delta = self._first_token_ms(prompt, use_cache=True)
        self.settle()
        found = self.core.stats().tiers["host"].hit_tokens - before
        size = self.core.info.block_size
        if delta.cached_len < len(prompt) - 2 * size or found < len(prompt) - 8 * size:
            raise Wrong(f"{delta.cached_len} of {len(prompt)} tokens were cached, {found} of them on the host")
        self.check(prompt, known, delta.cached_len)
        return ms

    def start_row(self) -> None:
        self._deadline_s = time.monotonic() + ROW_S

    def keep(self, length: int, count: int) -> tuple[list[list[int]], list[torch.Tensor], list[float]]:
        """Prompts that the host holds, their digests, milliseconds of computing them."""
        prompts, digests, cold = [self.prompt(length) for _ in range(count)], [], []
        for prompt in prompts:
            self.start_row()
            cold.append(self._first_token_ms(prompt, use_cache=True)[0])
            self.settle()
            digests.append(self.digest(prompt))
        return prompts, digests, cold


def tiered(spec: dict[str, Any], say: Say) -> TieredBench:
    started = time.perf_counter()
    bench = TieredBench(spec["folder"], spec["options"], ROW_S)
    if spec.get("always_loads"):  # a tiny model computes faster than anything is copied
        bench.core._manager._below._shared.plan.cost.prefill_s_per_token = 0.0
        bench.core._manager._below._shared.plan.cost.prefill_s_per_position = 0.0
    tiers = bench.core.info.report["KV tiers"]
    say({"says": f"engine in {time.perf_counter() - started:.1f} s; tiers {tiers}"})
    return bench


def restore(spec: dict[str, Any], say: Say) -> None:
    """Prompts in turn over a device pool that holds fewer: each comes from the host."""
    bench = tiered(spec, say)
    try:
        attempt(say, "pinning in the background", "s", lambda: pinning_row(bench, spec, say))
        for shape in spec["lengths"]:
            name = f"first token, {shape['length']} tokens restored from the host"
            attempt(say, name, "ms", lambda n=name, s=shape: restore_row(bench, n, s, say))
    finally:
        bench.core.close()


def pinning_row(bench: TieredBench, spec: dict[str, Any], say: Say) -> None:
    """Requests are served meanwhile."""
    started = time.perf_counter()
    bench.start_row()
    while not getattr(getattr(bench.mover._device, "_pinner", None), "ended", True):
        bench._first_token_ms(bench.prompt(64))
        bench.start_row()
        if time.perf_counter() - started > SETTLE_S:
            raise Wrong("not pinned in time")
    stats = bench.mover.stats()["host"]
    say(
        {
            "row": {
                "name": f"pinning in the background, {spec['options']['kv_tier'][0]}, from the engine's start",
                "unit": "s",
                "value": time.perf_counter() - started,
                "gib_pinned": stats.get("bytes_pinned", 0) / 2**30,
                "copied_by": list(stats.get("copied_by", ())),
            }
        }
    )


def restore_row(bench: TieredBench, name: str, shape: dict[str, Any], say: Say) -> None:
    prompts, digests, cold = bench.keep(shape["length"], shape["prompts"])
    runs, again = [], []
    for n in range(1 + shape["runs"]):
        which = n % len(prompts)
        runs.append(bench.restored(prompts[which], digests[which]))
        bench.start_row()
        again.append(bench._first_token_ms(prompts[which], use_cache=True)[0])
        bench.settle()
    limits = {key: shape.get(key) for key in ("peer", "target", "floor")}
    row = {"name": name, "unit": "ms", "value": statistics.median(runs[1:]), "runs": runs[1:], **limits}
    say({"row": {**row, "cold_ms": statistics.median(cold), "device_hit_ms": statistics.median(again[1:])}})


def decode(spec: dict[str, Any], say: Say) -> None:
    """Rounds of a batch that decodes: alone, while another prompt comes from the host, while blocks go there."""
    bench = tiered(spec, say)
    try:
        attempt(say, "decode while copies run", "%", lambda: decode_rows(bench, spec, say))
    finally:
        bench.core.close()


def decode_rows(bench: TieredBench, spec: dict[str, Any], say: Say) -> None:
    batch, context, length = spec["batch"], spec["context"], spec["length"]
    bench.wait_for_pins()
    prompts, digests, _ = bench.keep(length, spec.get("prompts", 3))
    most = bench.core.info.max_model_len - context - 1
    names = {bench.submit(bench.prompt(context), min(most, 2000)) for _ in range(batch)}
    waiting = set(names)
    bench.start_row()
    while waiting:
        waiting -= {delta.request_id for delta in bench.round() if delta.token_ids}
    plain: list[float] = []
    beside: dict[str, list[float]] = {"a restore": [], "a write-back": []}

    def quiet(count: int) -> None:
        while bench.copying:
            bench.round()
        for _ in range(4):
            bench.round()
        plain.extend(timed(bench) for _ in range(count))

    quiet(spec.get("quiet", 40))
    for n in range(spec.get("restores", 5)):
        which = n % len(prompts)
        bench.start_row()
        before = bench.core.stats().tiers["host"].hit_tokens
        name = bench.submit(prompts[which], 1, use_cache=True)
        rounds: list[float] = []
        while True:
            started = time.perf_counter()
            deltas = bench.round()
            rounds.append(time.perf_counter() - started)
            if first := [delta for delta in deltas if delta.request_id == name and delta.token_ids]:
                break
        found = bench.core.stats().tiers["host"].hit_tokens - before
        if found < length // 2:
            raise Wrong(f"{found} of {length} tokens came from the host")
        bench.check(prompts[which], digests[which], first[0].cached_len)
        beside["a restore"] += rounds[: len(rounds) - spec.get("last_rounds", 3)]  # its own chunk is in those
        quiet(15)
    for _ in range(spec.get("write_backs", 4)):
        bench.start_row()
        name = bench.submit(bench.prompt(spec["stored"]), 1, use_cache=True)
        while not any(delta.request_id == name and delta.token_ids for delta in bench.round()):
            pass
        bench.round()  # was submitted behind the prompt's chunk
        while bench.copying:
            beside["a write-back"].append(timed(bench))
        quiet(15)
    bench.core.abort(sorted(names))
    bench.drain()
    bench.settle()
    alone = statistics.mean(sorted(plain)[: max(1, int(0.98 * len(plain)))])
    for what, rounds in beside.items():
        row: dict[str, Any] = {
            "name": f"decode step beside {what}, batch {batch}",
            "unit": "%",
            "target": spec.get("target"),
            "alone_ms": alone * 1e3,
            "alone_median_ms": statistics.median(plain) * 1e3,
            "rounds": len(rounds),
        }
        if len(rounds) < 3:
            say({"row": {**row, "error": f"{len(rounds)} rounds ran beside {what}: too few to judge"}})
            continue
        row["value"] = 100 * (statistics.mean(rounds) / alone - 1)
        row["median_%"] = 100 * (statistics.median(rounds) / statistics.median(plain) - 1)
        row["longest_ms"] = max(rounds) * 1e3
        say({"row": row})


def timed(bench: TieredBench) -> float:
    started = time.perf_counter()
    bench.round()
    return time.perf_counter() - started


# ---- start -----------------------------------------------------------------------------------------------------------


def start(spec: dict[str, Any], say: Say) -> None:
    """Fresh processes up to the first token, in turn without and with the tier."""
    attempt(say, f"start with {spec['tier']}", "s", lambda: start_row(spec, say))


def start_row(spec: dict[str, Any], say: Say) -> None:
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    script = str(Path(__file__).parent / "gpu_start.py")
    for n in range(2 * spec["runs"]):
        tier = bool(n % 2)
        options = {**spec["options"], **({"kv_tier": [spec["tier"]]} if tier else {})}
        command = [sys.executable, script, str(time.monotonic()), spec["folder"], json.dumps(options)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=ROW_S, check=False)
        if done.returncode:
            raise Wrong(f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        figures = json.loads(done.stdout.strip().splitlines()[-1])
        found[tier].append(figures)
        say({"says": f"{'with' if tier else 'without'} the tier: {figures['value']:.2f} s"})
    without, with_tier = ([f["engine_s"] + f["first_token_s"] for f in found[tier]] for tier in (False, True))
    say(
        {
            "row": {
                "name": f"start-up that {spec['tier']} adds, to the first token",
                "unit": "s",
                "value": min(with_tier) - min(without),
                "target": spec.get("target"),
                "with_s": with_tier,
                "without_s": without,
            }
        }
    )


def main(path: str) -> None:
    spec = json.loads(Path(path).read_text())
    kinds = {"link": link, "restore": restore, "decode": decode, "start": start}
    with lines_to(Path(spec["out"])) as say:
        say({"machine": describe_device()})
        kinds[spec["kind"]](spec, say)
        say({"done": True})


if __name__ == "__main__":
    main(sys.argv[1])
