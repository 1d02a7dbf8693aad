from __future__ import annotations

from random import Random

import pytest

from lamella.kvtier import CostModel
from lamella.kvtier.control.cost import Part

BYTES_PER_TOKEN = 131_072


def measured(link: float, disk: float, rate: float, quadratic: float) -> CostModel:
    return CostModel({"host": link, "disk": disk}, {"disk": 2e-4}, 1 / rate, quadratic)


def simulate(model: CostModel, loaded: int, length: int, disk: float) -> float:
    """What a choice takes: the load, token by token, and then the computation, token by token."""
    seconds = (2e-4 + loaded * BYTES_PER_TOKEN / disk) if loaded else 0.0
    step = max(1, length // 400)
    for position in range(loaded, length, step):
        end = min(length, position + step)
        middle = (position + end - 1) / 2
        seconds += (end - position) * (model.prefill_s_per_token + model.prefill_s_per_position * middle)
    return seconds


def test_the_choice_costs_at_most_a_tenth_more_than_the_better_one() -> None:
    """50 machines and prompts; speeds are known as far as noisy copies have told."""
    rng = Random(7)
    loads = 0
    for _ in range(50):
        disk = 10 ** rng.uniform(8, 10.3)
        rate = 10 ** rng.uniform(3, 5)
        length = int(10 ** rng.uniform(2, 5))
        found = int(length * rng.uniform(0.2, 1.0)) // 16 * 16
        model = measured(55e9, disk * rng.uniform(0.3, 3.0), rate, rng.choice((0.0, 1e-9, 1e-8)))
        for _ in range(40):
            num_bytes = rng.randint(1, 64) << 20
            model.observe("disk", num_bytes, num_bytes / disk * rng.uniform(0.97, 1.03))
        chosen = model.choose(0, length, [Part("disk", found, found * BYTES_PER_TOKEN)])
        assert chosen in (0, found)
        loads += chosen > 0
        cost = simulate(model, chosen, length, disk)
        better = min(simulate(model, 0, length, disk), simulate(model, found, length, disk))
        assert cost <= 1.1 * better, (disk, rate, length, found, chosen)
    assert 10 < loads < 45


def test_a_slow_disk_recomputes_short_prefixes_and_loads_long_ones() -> None:
    """An 8B model on a fast device: 40,900 tokens/s, growing with the length; a disk of 2 GB/s is 16,000 tokens/s."""
    model = measured(55.4e9, 2e9, 40_900, 2e-9)
    chosen = {n: model.choose(0, n + 1, [Part("disk", n, n * BYTES_PER_TOKEN)]) for n in (512, 4096, 32_768, 131_072)}
    assert chosen == {512: 0, 4096: 0, 32_768: 0, 131_072: 131_072}
    assert model.choose(0, 513, [Part("host", 512, 512 * BYTES_PER_TOKEN)]) == 512


def test_a_queue_makes_a_tier_slower() -> None:
    model = measured(55e9, 8e9, 40_000, 0.0)
    part = Part("disk", 4096, 4096 * BYTES_PER_TOKEN)
    assert model.choose(0, 4097, [part]) == 4096
    assert model.choose(0, 4097, [part._replace(queued_bytes=1 << 30)]) == 0


def test_it_stops_before_the_tier_that_does_not_pay() -> None:
    model = CostModel({"disk": 8e9, "shop": 1e8}, {}, 1 / 40_000)
    parts = [Part("disk", 1024, 1024 * BYTES_PER_TOKEN), Part("shop", 4096, 3072 * BYTES_PER_TOKEN)]
    assert model.choose(0, 4097, parts) == 1024
    assert model.choose(1024, 4097, parts[1:]) == 1024


@pytest.mark.parametrize("start", [0, 512])
def test_what_was_not_measured_is_tried(start: int) -> None:
    assert CostModel().choose(start, 4097, [Part("disk", 4096, 1)]) == 4096
    assert CostModel(prefill_s_per_token=1e-6).choose(start, 4097, [Part("disk", 4096, 1 << 40)]) == 4096
    assert CostModel().choose(start, 4097, []) == start


def test_speed_follows_what_copies_tell() -> None:
    model = CostModel()
    model.observe("disk", 100, 1.0)
    assert model.bytes_per_s == {"disk": 100.0}
    model.observe("disk", 200, 1.0)
    assert model.bytes_per_s["disk"] == pytest.approx(120.0)
    model.observe("disk", 0, 1.0)
    model.observe("disk", 5, 0.0)
    assert model.bytes_per_s["disk"] == pytest.approx(120.0)
    for start, end in ((0, 0), (0, 10), (7, 31)):
        exact = sum(0.5 + 0.25 * position for position in range(start, end))
        assert CostModel({}, {}, 0.5, 0.25).recompute_s(start, end) == pytest.approx(exact)
