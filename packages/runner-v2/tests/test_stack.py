"""The layer loop with its hooks, recordings of steps, host memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lamella.runner_v2.graphs import GraphCache, GraphKey
from lamella.runner_v2.host_memory import _from_cgroup, _from_meminfo, available_bytes
from lamella.runner_v2.inputs import ModelInput
from lamella.runner_v2.stack import Hooks, LayerStack

INPUTS = ModelInput(torch.zeros(1), torch.zeros(1), (), ())


def test_layers_run_in_order_between_their_hooks() -> None:
    calls: list[Any] = []

    def layer(name: str) -> Callable[[str, ModelInput], str]:
        def run(carried: str, inputs: ModelInput) -> str:
            assert inputs is INPUTS
            return carried + name

        return run

    hooks = Hooks(before=(lambda i: calls.append(("before", i)),), after=(lambda i, c: calls.append((i, c)),))
    assert LayerStack([layer("a"), layer("b")], hooks).run("x", INPUTS) == "xab"
    assert calls == [("before", 0), (0, "xa"), ("before", 1), (1, "xab")]
    assert LayerStack([layer("a")]).run("x", INPUTS) == "xa"
    assert LayerStack([]).run("x", INPUTS) == "x"


class TestGraphCache:
    def test_without_recorder_every_step_is_eager(self) -> None:
        cache = GraphCache()
        counter = iter(range(9))
        key = GraphKey(1, 1, 1, "greedy")
        assert [cache.run(key, lambda: next(counter)) for _ in range(3)] == [0, 1, 2]
        assert len(cache) == 0

    def test_one_recording_per_key(self) -> None:
        recorded: list[int] = []

        class Recorder:
            def record(self, call: Callable[[], Any]) -> Callable[[], Any]:
                recorded.append(call())
                return lambda: ("replayed", recorded[-1])

        cache = GraphCache(Recorder())
        counter = iter(range(9))
        one, two = GraphKey(1, 1, 1, "greedy"), GraphKey(1, 1, 1, "random")
        results = [cache.run(key, lambda: next(counter)) for key in (one, one, two, one)]
        assert recorded == [0, 1]
        assert [r[0] for r in results] == ["replayed"] * 4
        assert len(cache) == 2


class TestHostMemory:
    def test_meminfo(self, tmp_path: Path) -> None:
        file = tmp_path / "meminfo"
        file.write_text("MemTotal:  100 kB\nMemFree: 5 kB\nMemAvailable:   42 kB\n")
        assert _from_meminfo(file) == 42 * 1024
        assert _from_meminfo(tmp_path / "none") is None

    def test_container_limit(self, tmp_path: Path) -> None:
        assert _from_cgroup(tmp_path) is None
        (tmp_path / "memory.max").write_text("max\n")
        (tmp_path / "memory.current").write_text("600\n")
        assert _from_cgroup(tmp_path) is None
        (tmp_path / "memory.max").write_text("1000\n")
        (tmp_path / "memory.stat").write_text("anon 300\nactive_file 20\ninactive_file 100\n")
        assert _from_cgroup(tmp_path) == 520

    def test_something_is_available(self) -> None:
        assert 1 << 20 < available_bytes() < 1 << 50
