"""A rank as the executor sees it."""

from pathlib import Path

import pytest
import torch

from lamella.runner_v2.config import RunnerConfig
from lamella.runner_v2.errors import CheckpointError, ConfigError, UnsupportedError
from lamella.runner_v2.inputs import ModelInput
from lamella.runner_v2.layers.decoder import Carried
from lamella.runner_v2.profiling import profile_prefill, spread_ids
from lamella.runner_v2.step import KvLayout, Mask
from lamella.runner_v2.testing.hand_scheduler import HandScheduler
from lamella.runner_v2.testing.tiny_models import write_folder
from lamella.runner_v2.worker import Worker


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    model = write_folder(tmp_path, "gemma3_text")
    return Worker(RunnerConfig(str(model.path), dtype="float32", max_num_rows=3, max_model_len=256, num_threads=1))


def test_life(worker: Worker) -> None:
    report = worker.open()
    assert [group.name for group in report.groups] == ["full", "sliding_16"]
    assert report.vocab_size == 320
    assert report.weight_bytes > 1 << 18
    assert report.free_bytes > 1 << 20
    hand = HandScheduler(worker.step, report.groups, 16)
    worker.allocate(hand.layout)
    row = hand.add([1, 2, 3, 4])
    hand.prefill(row, [4])
    hand.decode([row], 3)
    stats = worker.call("stats")
    assert (stats["steps"], stats["emitted"]) == (4, 4)
    assert stats["seconds"] > 0
    assert stats["kv_bytes"] == sum(16 * group.bytes_per_block for group in report.groups)
    worker.close()
    with pytest.raises(AssertionError):
        worker.call("stats")


def test_calls(worker: Worker) -> None:
    worker.open()
    explained = worker.call("explain")
    assert explained["model"]["family"] == "gemma3_text"
    assert explained["attention"] == {"backend": "torch", "refused": {}}
    ops = {choice["op"]: choice for choice in explained["ops"]}
    assert ops["rms_norm"]["provider"] == "torch"
    assert ops["decoder_layer"]["provider"] is None
    before = worker.call("profile", num_tokens=40)
    assert before["num_tokens"] == 40
    assert len(before["layers_s"]) == 6
    parts = before["embed_s"] + sum(before["layers_s"]) + before["finish_s"]
    assert parts == pytest.approx(before["seconds"])
    assert 0 < worker.call("measure_prefill", num_tokens=16) < 10
    with pytest.raises(ConfigError, match="1 to 257 tokens, not 258"):
        worker.call("measure_prefill", num_tokens=258)
    assert 0 < worker.call("measure_prefill", num_tokens=16, context_len=241) < 10
    with pytest.raises(ConfigError, match="16 tokens has 0 to 241 before it, not 242"):
        worker.call("measure_prefill", num_tokens=16, context_len=242)
    assert 0 < worker.call("measure_prefill", num_tokens=16, num_logits=16) < 10
    with pytest.raises(ConfigError, match="has 1 to 16 logits, not 17"):
        worker.call("measure_prefill", num_tokens=16, num_logits=17)
    with pytest.raises(ConfigError, match="knows no operation 'sleep'; it knows stats"):
        worker.call("sleep")


def test_measuring_touches_no_cache(worker: Worker) -> None:
    hand = HandScheduler(worker.step, worker.open().groups, 16)
    worker.allocate(hand.layout)
    row = hand.add([1, 2, 3, 4])
    hand.prefill(row, [4])
    before = [cache.k.clone() for cache in worker.runner._caches]
    worker.call("measure_prefill", num_tokens=64)
    assert all(torch.equal(b, cache.k) for b, cache in zip(before, worker.runner._caches, strict=True))


@pytest.mark.parametrize("vocab_size", [7, 320, 151936])
def test_a_measured_prompt_has_ids_of_the_whole_vocabulary(vocab_size: int) -> None:
    ids = spread_ids(256, vocab_size)
    assert ids.dtype == torch.int32
    assert int(ids.min()) >= 0
    assert int(ids.max()) < vocab_size
    tenths = torch.bincount(ids * 10 // vocab_size, minlength=10)
    assert int(tenths.min()) >= (20 if vocab_size > 10 else 0)
    assert len(ids.unique()) > min(vocab_size, 256) * 2 / 3
    assert torch.equal(ids, spread_ids(256, vocab_size))


def test_measuring_runs_those_ids(worker: Worker) -> None:
    worker.open()
    assembly = worker.runner.assembly
    seen: list[torch.Tensor] = []

    class Model:
        layers, finish = assembly.model.layers, assembly.model.finish

        def embed(self, inputs: ModelInput) -> Carried:
            seen.append(inputs.token_ids)
            return assembly.model.embed(inputs)

    profile_prefill(assembly._replace(model=Model()), 48, "cpu", num_runs=1)
    assert torch.equal(seen[0], spread_ids(48, assembly.config.vocab_size))


@pytest.mark.parametrize("context_len", [0, 7, 16, 130])
def test_a_measured_chunk_stands_behind_its_context(worker: Worker, context_len: int) -> None:
    worker.open()
    assembly = worker.runner.assembly
    seen: list[ModelInput] = []

    class Model:
        layers, finish = assembly.model.layers, assembly.model.finish

        def embed(self, inputs: ModelInput) -> Carried:
            seen.append(inputs)
            return assembly.model.embed(inputs)

    profile_prefill(assembly._replace(model=Model()), 48, "cpu", context_len=context_len, num_runs=1)
    positions, plan = seen[0].positions, seen[0].plans[0]
    end = context_len + 48
    assert positions.tolist() == list(range(context_len, end))
    assert (plan.seq_lens, plan.tables.shape) == ([end], (1, -(-end // 16)))
    written = plan.block_idx * 16 + plan.block_offset
    assert len(written.unique()) == 48
    assert torch.equal(plan.tables[0][positions // 16], plan.block_idx)
    before = plan.tables[0][: context_len // 16]
    assert 0 not in plan.tables
    assert not set(before.tolist()) & set(plan.block_idx.tolist()), "a context is not overwritten"


def test_masks_come_before_the_step(worker: Worker) -> None:
    hand = HandScheduler(worker.step, worker.open().groups, 16)
    worker.allocate(hand.layout)
    first, second = hand.add([1, 2, 3]), hand.add([9, 8])
    with pytest.raises(UnsupportedError, match="step 1 needs masks for rows \\[1\\]"):
        hand.step({first: 3, second: 2}, masked=(second,))
    words = [0] * 10
    words[77 // 32] = 1 << (77 % 32)
    mask = Mask(second, 0, b"".join(w.to_bytes(4, "little", signed=False) for w in words))
    hand = HandScheduler(worker.step, hand.groups, 16)
    first, second = hand.add([1, 2, 3]), hand.add([9, 8])
    worker.provide(1, [mask])
    hand.step({first: 3, second: 2}, masked=(second,))
    assert hand.ids[second][-1] == 77


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        Worker(RunnerConfig(str(tmp_path / "none"))).open()


def test_dummy_weights(tmp_path: Path) -> None:
    """Speed and memory of a model can be had without its weights: config.json suffices."""
    model = write_folder(tmp_path, "qwen3")
    worker = Worker(RunnerConfig(str(model.path), dtype="float32", max_model_len=64, dummy_weights=True))
    worker.open()
    worker.allocate(KvLayout((4,)))
    assert worker.call("measure_prefill", num_tokens=8) > 0
