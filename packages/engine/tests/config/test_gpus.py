"""What a driver says of its GPUs, with a driver that is made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lamella.engine.config import gpus
from lamella.engine.config.gpus import NO_DRIVER, NO_KERNELS, read_gpus


class Driver:
    """Of two GPUs."""

    status = 0
    count = 2

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = self.count
        return 0

    def cuDeviceGet(self, out: Any, index: int) -> int:
        out._obj.value = index
        return 0

    def cuDeviceGetName(self, out: Any, size: int, device: Any) -> int:
        out.value = f"Card {device.value}".encode()
        return 0

    def cuDeviceTotalMem_v2(self, out: Any, device: Any) -> int:
        out._obj.value = 100 << 30
        return 0

    def cuDeviceGetAttribute(self, out: Any, attribute: int, device: Any) -> int:
        out._obj.value = {75: 9, 76: 0}[attribute]
        return 0

    def cuDeviceGetPCIBusId(self, out: Any, size: int, device: Any) -> int:
        out.value = f"0000:0{device.value}:00.0".encode()
        return 0


class Management:
    """Knows only the first one."""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus: bytes, out: Any) -> int:
        return 0 if bus == b"0000:00:00.0" else 6

    def nvmlDeviceGetMemoryInfo(self, handle: Any, out: Any) -> int:
        out._obj.free = 90 << 30
        return 0


def loading(**libraries: Any) -> Callable[[str], Any]:
    def load(name: str) -> Any:
        found = libraries.get(name.removeprefix("lib").partition(".")[0].replace("-", "_"))
        if found is None:
            raise OSError(f"{name}: cannot open shared object file")
        return found

    return load


def never() -> bool:
    raise AssertionError("asked without need")


@pytest.fixture(autouse=True)
def linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus.sys, "platform", "linux")


def test_without_a_driver_nothing_else_is_asked() -> None:
    assert read_gpus(loading(), never).missing == NO_DRIVER


def test_without_kernels_the_driver_is_left_asleep() -> None:
    class Asleep:
        def cuInit(self, flags: int) -> int:
            raise AssertionError("woken")

    assert read_gpus(loading(cuda=Asleep()), lambda: False).missing == NO_KERNELS


def test_names_sizes_and_refusals() -> None:
    found = read_gpus(
        loading(cuda=Driver(), nvidia_ml=Management()), lambda: True, lambda index: None if index else "too old"
    ).found
    assert [(gpu.index, gpu.name, gpu.capability, gpu.refused) for gpu in found] == [
        (0, "Card 0", (9, 0), "too old"),
        (1, "Card 1", (9, 0), None),
    ]
    assert [gpu.free_bytes >> 30 for gpu in found] == [90, 100]
    alone = read_gpus(loading(cuda=Driver()), lambda: True, lambda index: None).found
    assert [gpu.free_bytes for gpu in alone] == [100 << 30] * 2


@pytest.mark.parametrize(("status", "count", "text"), [(100, 0, "--gpus"), (803, 0, "restart"), (0, 0, "VISIBLE")])
def test_a_driver_that_shows_nothing_says_why(status: int, count: int, text: str) -> None:
    driver = Driver()
    driver.status, driver.count = status, count
    assert text in read_gpus(loading(cuda=driver), lambda: True).missing


def test_kernels_that_cannot_run_say_why() -> None:
    reason = gpus.kernels_refuse(0)
    assert reason is not None
    assert "lamella.kernels_cuda" in reason or "torch" in reason or "device" in reason
