"""What the movers of the CPU reach: host slab, device ⇄ host, fp8 records.

    hatch run bench kvtier movers [--json FILE]

Shapes are those of SmolLM2-135M in float32: 30 layers, 3 heads, 16 tokens a block, 64 values a row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lamella.kvtier import CopyJob, Location
from lamella.kvtier.data.fp8 import Fp8Codec, RowGeometry
from lamella.kvtier.data.host_buffer import HostBuffer
from lamella.kvtier.data.mover import TierMover

LAYERS, HEADS, BLOCK, DIM = 30, 3, 16, 64
BLOCK_BYTES = LAYERS * 2 * HEADS * BLOCK * DIM * 4
NUM_BLOCKS, NUM_SLOTS = 600, 1200
KEY = b"k" * 32


class Setting:
    def __init__(self) -> None:
        torch.manual_seed(0)
        shape = (NUM_BLOCKS, HEADS, BLOCK, DIM)
        self.buffer = HostBuffer([BLOCK_BYTES], [NUM_SLOTS])
        for slot in range(NUM_SLOTS):  # pages that were never touched would be measured instead of copies
            self.buffer.view(0, slot)[:] = bytes(BLOCK_BYTES)
        self.mover = TierMover(self.buffer)
        self.mover.bind([list(range(LAYERS))], [(torch.rand(shape), torch.rand(shape)) for _ in range(LAYERS)])
        self.step = 0

    def jobs(self, count: int, *, loads: bool, scattered: bool) -> list[CopyJob]:
        slots = torch.randperm(NUM_SLOTS)[:count] if scattered else torch.arange(count)
        blocks = (torch.randperm(NUM_BLOCKS - 1)[:count] if scattered else torch.arange(count)) + 1
        made = []
        for n, (slot, block) in enumerate(zip(slots.tolist(), blocks.tolist())):
            host, device = Location("host", 0, slot), Location("device", 0, block)
            source, target = (host, device) if loads else (device, host)
            made.append(CopyJob(n, KEY, source, target, BLOCK_BYTES))
        return made

    def run(self, jobs: list[CopyJob]) -> tuple[float, float]:
        """Seconds to the first layer, and to the end."""
        self.step += 1
        start = time.perf_counter()
        self.mover.submit(jobs)
        self.mover.before_step(self.step)
        self.mover.wait_layer(0)
        first = time.perf_counter() - start
        self.mover.wait_layer(LAYERS - 1)
        self.mover.after_step(self.step)
        ended = 0
        while ended < len(jobs):
            self.mover.wait(1.0)
            ended += len(self.mover.poll())
        return first, time.perf_counter() - start


def copies(setting: Setting) -> dict[str, float]:
    told: dict[str, float] = {}
    for count in (8, 64, 512):
        for loads in (True, False):
            for scattered in (True, False):
                jobs = setting.jobs(count, loads=loads, scattered=scattered)
                runs = [setting.run(jobs) for _ in range(7)]
                name = f"{'load' if loads else 'store'} {count} {'scattered' if scattered else 'in order'}"
                told[f"{name}, GB/s"] = count * BLOCK_BYTES / statistics.median(run[1] for run in runs) / 1e9
                if loads:
                    told[f"{name}, ms to the first layer"] = 1e3 * statistics.median(run[0] for run in runs)
    return told


def hooks(setting: Setting) -> dict[str, float]:
    """What a step pays when nothing is loaded."""
    mover = setting.mover
    count = 20_000
    setting.step += 1
    mover.before_step(setting.step)
    start = time.perf_counter()
    for _ in range(count):
        mover.wait_layer(3)
    seconds = (time.perf_counter() - start) / count
    mover.after_step(setting.step)
    return {"wait_layer with nothing to wait for, ns": seconds * 1e9}


def slowdown(setting: Setting) -> dict[str, float]:
    """Steps of plain matrix products, in turns without and with stores that never end."""
    weights = [torch.rand(576, 1536) for _ in range(90)]
    row = torch.rand(1, 576)
    mover = setting.mover
    wanted = threading.Event()
    over = threading.Event()
    num_stored = 0

    def pump() -> None:
        nonlocal num_stored
        while not over.is_set():
            if wanted.wait(0.01):
                mover.submit(setting.jobs(64, loads=False, scattered=True))
                ended = 0
                while ended < 64:
                    mover.wait(1.0)
                    ended += len(mover.poll())
                num_stored += 64

    def step() -> float:
        setting.step += 1
        start = time.perf_counter()
        mover.before_step(setting.step)
        for weight in weights:
            _ = row @ weight
        mover.after_step(setting.step)
        return time.perf_counter() - start

    thread = threading.Thread(target=pump)
    thread.start()
    times: dict[bool, list[float]] = {False: [], True: []}
    storing_s = 0.0
    for turn in range(40):
        with_stores = bool(turn % 2)
        if with_stores:
            wanted.set()
        else:
            wanted.clear()
            mover.wait(0.0)
            time.sleep(0.1)
        start = time.perf_counter()
        times[with_stores] += [step() for _ in range(20)]
        storing_s += (time.perf_counter() - start) * with_stores
    over.set()
    wanted.set()
    thread.join()
    without, loaded = statistics.median(times[False]), statistics.median(times[True])
    return {
        "step, ms": without * 1e3,
        "step while blocks are stored, ms": loaded * 1e3,
        "slowdown, %": 100 * (loaded / without - 1),
        "blocks stored a second meanwhile": num_stored / storing_s,
    }


def large_slab() -> dict[str, float]:
    start = time.perf_counter()
    buffer = HostBuffer([BLOCK_BYTES], [(40 << 30) // BLOCK_BYTES], available_bytes=1 << 60)
    seconds = time.perf_counter() - start
    buffer.close()
    return {"start of a 40 GiB slab, ms": seconds * 1e3}


def fp8() -> dict[str, float]:
    buffer = HostBuffer([BLOCK_BYTES], [2])
    codec = Fp8Codec(buffer, [RowGeometry(HEADS, BLOCK, DIM, "float32", LAYERS)], num_scratch=1)
    slot = torch.frombuffer(buffer.view(0, 0), dtype=torch.float32)
    slot.copy_(torch.randn(len(slot)))
    record = codec.view(0, 0)
    acts: dict[str, Callable[[], None]] = {
        "pack": lambda: codec.pack(0, buffer.view(0, 0), record),
        "unpack": lambda: codec.unpack(0, record, buffer.view(0, 1)),
    }
    told: dict[str, float] = {}
    for name, act in acts.items():
        act()
        start = time.perf_counter()
        for _ in range(20):
            act()
        told[f"fp8 {name}, GB/s of float32"] = 20 * BLOCK_BYTES / (time.perf_counter() - start) / 1e9
    back = torch.frombuffer(buffer.view(0, 1), dtype=torch.float32)
    told["fp8 error, root mean square by that of the values"] = float((back - slot).norm() / slot.norm())
    told["fp8 bytes by those of the slot"] = codec.packed_bytes[0] / BLOCK_BYTES
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    setting = Setting()
    told = large_slab() | copies(setting) | hooks(setting) | slowdown(setting) | fp8()
    setting.mover.close()
    for name, value in told.items():
        print(f"{name:60} {value:10.3f}")
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
