"""The layer loop with its hooks, recordings of steps, host memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lamella.runner_v2.graphs import GraphCache, GraphKey
from lamella.runner_v2.host_memory import available_bytes
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
        key = GraphKey("logits", 1)
        assert [cache.run(key, lambda: next(counter)) for _ in range(3)] == [0, 1, 2]
        assert len(cache) == 0
        assert not cache.records

    def test_replays_what_was_recorded_and_nothing_else(self) -> None:
        recorded: list[int] = []

        class Recorder:
            last_num_nodes = 7

            def record(self, call: Callable[[], Any]) -> Callable[[], Any]:
                place = len(recorded)
                recorded.append(call())
                return lambda: ("replayed", recorded[place])

            def forget(self) -> None:
                forgotten.append(len(cache))

        forgotten: list[int] = []
        cache = GraphCache(Recorder())
        counter = iter(range(9))
        one, two, three = GraphKey("logits", 1), GraphKey("sample", 1), GraphKey("logits", 2)
        for key in (one, two):
            cache.record(key, lambda: next(counter))
        assert [cache.run(key, lambda: next(counter)) for key in (one, two, three, one)] == [
            ("replayed", 0),
            ("replayed", 1),
            2,
            ("replayed", 0),
        ]
        assert len(cache) == 2
        assert cache.num_nodes("logits") == {1: 7}
        cache.clear()
        assert cache.run(one, lambda: "again") == "again"
        assert forgotten == [0], "the recorder hears of it when the recordings are gone"


class TestHostMemory:
    def test_the_system_says(self, tmp_path: Path) -> None:
        installed = available_bytes(tmp_path)
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/meminfo").write_text("MemTotal:  100 kB\nMemFree: 5 kB\n")
        assert available_bytes(tmp_path) == installed > 1 << 20
        (tmp_path / "proc/meminfo").write_text("MemTotal:  100 kB\nMemFree: 5 kB\nMemAvailable:   42 kB\n")
        assert available_bytes(tmp_path) == 42 * 1024

    def test_a_group_above_this_one_leaves_less(self, tmp_path: Path) -> None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/meminfo").write_text("MemAvailable:   42 kB\n")
        (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
        above = tmp_path / "sys/fs/cgroup/a"
        (above / "b").mkdir(parents=True)
        (above / "b/memory.max").write_text("max\n")
        (above / "b/memory.current").write_text("600\n")
        assert available_bytes(tmp_path) == 42 * 1024
        (above / "memory.max").write_text("1000\n")
        (above / "memory.current").write_text("600\n")
        (above / "memory.stat").write_text("anon 300\nactive_file 20\ninactive_file 100\n")
        assert available_bytes(tmp_path) == 520

    def test_something_is_available(self) -> None:
        assert 1 << 20 < available_bytes() < 1 << 50
