"""Tensors come to the device whole, and no buffer is written while the device may still read it."""

import pytest
import torch

from lamella.runner_v2.weights.staging import Staging, open_staging

CPU = torch.device("cpu")


class FakeEvent:
    def __init__(self, log: list[str]) -> None:
        self.log, self.name = log, str(sum(entry.startswith("new") for entry in log))
        log.append(f"new {self.name}")

    def record(self) -> None:
        self.log.append(f"record {self.name}")

    def synchronize(self) -> None:
        self.log.append(f"wait {self.name}")


def staging(log: list[str], buffer_bytes: int = 256) -> Staging:
    return Staging(CPU, lambda n: torch.zeros(n, dtype=torch.uint8), lambda: FakeEvent(log), buffer_bytes)


@pytest.mark.parametrize("shape", [(3,), (0,), (5, 7), (64, 100), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_what_is_moved_is_equal(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    move = staging([]).move
    for _ in range(4):
        tensor = (torch.randn(shape) * 50).to(dtype)
        moved = move(tensor)
        assert torch.equal(moved, tensor)
        assert moved.dtype == dtype
        assert tensor.numel() == 0 or moved.data_ptr() != tensor.data_ptr()


def test_what_is_not_contiguous_is_moved_too() -> None:
    tensor = torch.arange(200.0).view(10, 20).t()
    assert torch.equal(staging([]).move(tensor), tensor)


def test_a_buffer_is_waited_for_before_it_is_filled_again() -> None:
    log: list[str] = []
    staging(log).move(torch.arange(256 * 5, dtype=torch.int32).to(torch.uint8))
    assert log == ["new 0", "record 0", "new 1", "record 1", "wait 0", "record 0", "wait 1", "record 1", "wait 0"]


def test_small_tensors_share_a_buffer() -> None:
    log: list[str] = []
    move = staging(log).move
    for _ in range(4):  # 64 bytes each, with what aligns them
        move(torch.ones(3))
    assert log == ["new 0"]
    move(torch.ones(3))
    assert log == ["new 0", "record 0", "new 1"]


def test_nothing_is_staged_where_there_is_nothing_to_do() -> None:
    assert open_staging("cpu") is None
    move = open_staging("meta")
    assert move is not None
    assert move(torch.ones(2)).device.type == "meta"
    log: list[str] = []
    there = torch.ones(2, device="meta")
    assert staging(log).move(there) is there
    assert log == [], "no buffer is made for what is on the device"
