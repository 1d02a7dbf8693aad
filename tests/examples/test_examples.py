"""Every example does what it says."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lamella.kvtier import CopyJob, Location, TicketResult
from lamella.kvtier.config import parse_tiers
from lamella.kvtier.data.external import manager_maker
from lamella.kvtier.data.host_buffer import HostBuffer
from lamella.kvtier.data.mover import TierMover
from lamella.kvtier.jobs import LookupJob, LookupResult
from lamella.kvtier.testing.contract import check_manager

EXAMPLES = Path(__file__).parents[2] / "examples"


def module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


@pytest.fixture
def blob_server() -> Iterator[Any]:
    made = module("external_store_server", EXAMPLES / "external_store" / "server.py").BlobServer(max_bytes=64 << 20)
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def test_the_http_manager_keeps_the_contract(blob_server: Any) -> None:
    manager = module("external_store_manager", EXAMPLES / "external_store" / "manager.py")
    check_manager(lambda: manager.HttpManager(blob_server.url))


def test_blocks_travel_through_the_http_store(blob_server: Any) -> None:
    module("external_store_manager", EXAMPLES / "external_store" / "manager.py")
    text = f'ram=1MiB,external=external_store_manager:HttpManager,{{"url": "{blob_server.url}"}}'
    (external,) = parse_tiers(text).externals
    buffer = HostBuffer([9000], [8])
    make = manager_maker(external.module_path, external.options)
    mover = TierMover(buffer, externals=[(external.name, make)], external_options={"backoff_s": 0.05})
    there = Location("external", 0, 0, external.name)
    keys = [bytes([n]) * 32 for n in range(4)]

    def run(jobs: list[Any]) -> list[Any]:
        mover.submit(jobs)
        events: list[Any] = []
        while len(events) < len(jobs):
            assert mover.wait(10.0)
            events += mover.poll()
        return sorted(events, key=lambda event: event.ticket)

    for n in range(3):
        buffer.view(0, n)[:] = bytes([n + 65]) * 9000
    down = [
        CopyJob(n, keys[n], Location("host", 0, n), there, 9000, parent=keys[n - 1] if n else None) for n in range(3)
    ]
    assert all(event.ok for event in run(down))
    assert run([LookupJob(9, external.name, 0, tuple(keys))])[0].num_present == 3
    up = [CopyJob(n, keys[n], there, Location("host", 0, n + 4), 9000) for n in range(4)]
    assert [event.ok for event in run(up)] == [True, True, True, False]
    assert [bytes(buffer.view(0, n + 4)[:1]) for n in range(3)] == [b"A", b"B", b"C"]
    # a blob that the store damaged is a miss
    names = list(blob_server.blobs._blobs)
    damaged = bytearray(blob_server.blobs.get(names[0]))
    damaged[4000] ^= 1
    blob_server.blobs.put(names[0], bytes(damaged))
    (event,) = run(up[:1])
    assert isinstance(event, TicketResult)
    assert event.error == "wrong bytes: payload checksum"
    mover.close()


def test_without_its_server_the_http_store_costs_misses_only() -> None:
    module("external_store_manager", EXAMPLES / "external_store" / "manager.py")
    make = manager_maker("external_store_manager:HttpManager", {"url": "http://127.0.0.1:9", "timeout_s": 1.0})
    mover = TierMover(HostBuffer([64], [2]), externals=[("store", make)])
    for n in range(5):
        mover.submit([LookupJob(n, "store", 0, (b"k" * 32,))])
        assert mover.wait(10.0)
        (event,) = mover.poll()
        assert isinstance(event, LookupResult)
        assert event.num_present == 0
    assert mover.stats()["store"]["breaker"] == "open"
    mover.close()


def test_a_transformers_model_gains_a_prefix_cache(tmp_path: Path) -> None:
    script = EXAMPLES / "transformers_cache.py"
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # small operations among busy cores
    command = [sys.executable, str(script), str(tmp_path)]
    # four prompts of 440 tokens share 400: cold, three of them find 25 blocks; warm, each finds all but its last block
    for expected in ([3 * 400, 4 * 432], [4 * 432, 4 * 432]):  # another process begins with what is on disk
        ran = subprocess.run(command, env=one_thread, capture_output=True, text=True, timeout=120, check=False)
        assert ran.returncode == 0, ran.stderr
        saved = [int(number) for number in re.findall(r"(\d+) saved", ran.stdout)]
        assert saved == expected, ran.stdout
        assert ran.stdout.count("without the cache: True") == 2
        assert list(tmp_path.glob("*.kv"))
