"""Arenas count, align and limit."""

import gc

import pytest
import torch

from lamella.runner_v2.errors import CapacityError
from lamella.runner_v2.memory import Arena, allocating


def test_tensors_are_aligned_apart_and_counted() -> None:
    arena = Arena("weights")
    tensors = [arena.empty((size,), torch.uint8) for size in (1, 63, 64, 65, 1000, 9 << 20)]
    for value, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(value)
    assert all(bool((tensor == value).all()) for value, tensor in enumerate(tensors))
    assert arena.allocated_bytes == 1 + 63 + 64 + 65 + 1000 + (9 << 20)
    assert arena.num_tensors == 6


def test_shapes_and_types() -> None:
    arena = Arena("kv")
    tensor = arena.zeros((3, 5), torch.bfloat16)
    assert tensor.shape == (3, 5)
    assert tensor.dtype == torch.bfloat16
    assert not tensor.any()
    assert arena.empty((0, 4), torch.float32).shape == (0, 4)
    assert arena.empty((), torch.int64).shape == ()


def test_zeros_are_zeros_whatever_was_there_before() -> None:
    arena = Arena("kv")
    for size in (1000, 16 << 20):
        arena.empty((size,), torch.uint8).fill_(255)
        arena.release()
        assert not arena.zeros((size,), torch.uint8).any()


def test_limit() -> None:
    arena = Arena("kv", limit_bytes=4096)
    arena.empty((1024,), torch.float16)
    with pytest.raises(CapacityError, match=r"kv: 2\.0 KiB more do not fit: 2\.0 KiB of a limit of 4\.0 KiB"):
        arena.empty((1025,), torch.float16)
    arena.empty((1024,), torch.float16)
    assert arena.allocated_bytes == 4096


def test_impossible_size_is_a_capacity_error() -> None:
    with pytest.raises(CapacityError, match="weights: no memory on cpu for"):
        Arena("weights").empty((1 << 60,), torch.uint8)


def test_tensors_outlive_the_arena() -> None:
    arena = Arena("weights")
    tensor = arena.empty((1000,), torch.float32).fill_(3)
    arena.release()
    assert (arena.allocated_bytes, arena.num_tensors) == (0, 0)
    del arena
    gc.collect()
    assert bool((tensor == 3).all())


def test_device_without_chunks() -> None:
    tensor = Arena("weights", "meta").empty((4, 4), torch.float32)
    assert tensor.device.type == "meta"


def test_memory_that_torch_does_not_get_is_told_with_its_size() -> None:
    with pytest.raises(CapacityError, match=r"loading x: out of memory, 4194304\.0 GiB"), allocating("loading x"):
        torch.empty(2**52, dtype=torch.uint8)
    with pytest.raises(CapacityError, match="loading x: out of memory"), allocating("loading x"):
        raise MemoryError
    with pytest.raises(RuntimeError, match="something else"), allocating("loading x"):
        raise RuntimeError("something else")
