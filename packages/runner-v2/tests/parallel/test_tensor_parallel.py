"""Weights cut for 2 and 4 ranks, which are threads of this process: the same logits and ids as on one rank."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from lamella.runner_v2.parallel.groups import SoloGroup, ThreadGroup
from lamella.runner_v2.runner import ModelRunner
from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.testing.hand_scheduler import GREEDY, HandScheduler
from lamella.runner_v2.testing.tiny_gguf import write_gguf
from lamella.runner_v2.testing.tiny_models import TINY_CONFIGS, WIDE, TinyModel, write_folder

T = TypeVar("T")
PROMPTS = [list(range(11, 61)), [7, 7, 300, 2, 9]]


def on_ranks(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """work on every rank of a group; the first error of any rank is raised."""
    results: dict[int, T] = {}
    errors: list[Exception] = []

    def run(group: ThreadGroup) -> None:
        try:
            results[group.rank] = work(group)
        except Exception as error:  # noqa: BLE001 - told to the test's thread
            errors.append(error)
            group.abort()

    threads = [threading.Thread(target=run, args=(group,)) for group in ThreadGroup.create(size, timeout_s=30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return [results[rank] for rank in range(size)]


def generate(model: TinyModel, group: Any, **options: Any) -> tuple[list[list[int]], torch.Tensor]:
    """Ids of a greedy and a sampled row, and the logits of the last step."""
    runner = ModelRunner.load(
        model.path, dtype="float32", max_num_rows=2, group=group, tp_rank=group.rank, tp_size=group.size, **options
    )
    hand = HandScheduler(runner.execute, runner.report().groups)
    runner.allocate(hand.layout)
    kept: list[torch.Tensor] = []
    finish = runner.assembly.model.finish

    def record(carried: Any, idx: torch.Tensor) -> torch.Tensor:
        kept.append(finish(carried, idx))
        return kept[-1].clone()

    runner.assembly.model.finish = record  # type: ignore[method-assign]
    rows = [hand.add(PROMPTS[0], GREEDY), hand.add(PROMPTS[1], RowParams(temperature=0.7, seed=4))]
    hand.step({rows[0]: 31, rows[1]: 5})
    hand.step({rows[1]: 1, rows[0]: 19})
    hand.decode(rows, 6)
    return [hand.ids[row] for row in rows], kept[-1]


def check(model: TinyModel, size: int) -> None:
    expected_ids, expected = generate(model, SoloGroup())
    ranks = on_ranks(size, lambda group: generate(model, group, num_threads=None))
    for ids, logits in ranks:
        assert ids == expected_ids
        assert torch.equal(logits, ranks[0][1])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_same_as_one_rank(family: str, size: int, tmp_path: Path) -> None:
    check(write_folder(tmp_path, family, seed=4), size)


@pytest.mark.parametrize("size", [2, 4])
def test_vocabulary_that_does_not_divide(size: int, tmp_path: Path) -> None:
    """The last rank's rows are padded with zeros; a padded logit is never chosen."""
    check(write_folder(tmp_path, "qwen2", seed=4, vocab_size=317, tokenizer=False), size)


@pytest.mark.parametrize("size", [2, 4])
def test_cut_on_blocks(size: int, tmp_path: Path) -> None:
    """K-quants are cut on blocks of 256 weights."""
    formats = {"*": "q4_k", "down": "q6_k", "embed": "q8_0", "v": "q6_k"}
    check(write_gguf(tmp_path / "wide.gguf", "qwen3", seed=4, formats=formats, num_hidden_layers=2, **WIDE), size)


def test_weights_are_cut(tmp_path: Path) -> None:
    """Two ranks hold about half of the matrices each."""
    model = write_folder(tmp_path, "mistral")

    def weight_bytes(group: Any) -> int:
        runner = ModelRunner.load(model.path, dtype="float32", group=group, tp_rank=group.rank, tp_size=group.size)
        return runner.report().weight_bytes

    whole = weight_bytes(SoloGroup())
    for part in on_ranks(2, weight_bytes):
        assert 0.5 * whole < part < 0.52 * whole


class TestThreadGroup:
    def test_all_reduce_and_gather(self) -> None:
        def work(group: ThreadGroup) -> tuple[torch.Tensor, torch.Tensor]:
            mine = torch.full((2, 3), float(group.rank))
            for _ in range(50):
                assert group.all_reduce(mine).eq(6).all()
            return group.all_reduce(mine), group.all_gather(mine, 1)

        for total, gathered in on_ranks(4, work):
            assert total.eq(6).all()
            assert gathered[0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]

    def test_a_missing_rank_breaks_the_group(self) -> None:
        group, _ = ThreadGroup.create(2, timeout_s=0.05)
        with pytest.raises(threading.BrokenBarrierError):
            group.all_reduce(torch.zeros(1))
