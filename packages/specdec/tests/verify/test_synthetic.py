"""Acceptance by rates: the rates come out, shapes of batches do not matter, impossible rates are named."""

from __future__ import annotations

import re

import pytest

from lamella.specdec import ConfigError, InputError

torch = pytest.importorskip("torch")
synthetic = pytest.importorskip("lamella.specdec.verify.synthetic")


@pytest.mark.parametrize(
    ("length", "rates"),
    [(1.0, [0, 0, 0]), (2.5, [1, 0.5, 0]), (2.95, [1, 0.95, 0]), (4.0, [1, 1, 1])],
)
def test_rates_of_a_length(length, rates):
    assert synthetic.rates_of_length(length, 3) == pytest.approx(rates)


@pytest.mark.parametrize("length", [0.9, 4.1, float("nan")])
def test_impossible_lengths_are_named(length):
    with pytest.raises(ConfigError, match=re.escape("must be in [1, 4] with 3 drafts")):
        synthetic.rates_of_length(length, 3)


@pytest.mark.parametrize(
    ("rates", "said"),
    [([0.5, 0.6], "rates[1] must be in [0, 0.5], got 0.6"), ([1.1], "rates[0] must be in [0, 1.0], got 1.1")],
)
def test_impossible_rates_are_named(rates, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        synthetic.SyntheticAcceptance(rates)


@pytest.mark.parametrize("rates", [[0.8, 0.64, 0.512], [1.0, 0.5, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
def test_the_rates_come_out(rates):
    rows, width = 40_000, 4  # one draft more than there are rates
    rng = torch.Generator().manual_seed(1)
    verdict = synthetic.SyntheticAcceptance(rates).verify(
        torch.arange(rows * (width + 1)),
        torch.zeros(rows, width, dtype=torch.int32),
        torch.arange(rows + 1) * (width + 1),
        torch.rand(rows, width, generator=rng),
    )
    for i, rate in enumerate([*rates, 0.0]):
        share = (verdict.num_accepted > i).double().mean().item()
        assert abs(share - rate) <= 5 * (rate * (1 - rate) / rows) ** 0.5
    assert torch.equal(verdict.next_ids, (torch.arange(rows) * (width + 1) + verdict.num_accepted).int())


def test_only_drafts_with_logits_stand():
    verdict = synthetic.SyntheticAcceptance([1.0, 1.0]).verify(
        torch.arange(10, 16),
        torch.tensor([[5, -1], [5, 5], [5, 5], [-1, 5]]),
        torch.tensor([0, 3, 3, 4, 6]),
        torch.zeros(4, 2),
    )
    assert verdict.num_accepted.tolist() == [1, 0, 0, 0]
    assert verdict.next_ids.tolist() == [11, -1, 13, 14]


def test_batches_without_logits_and_wrong_uniforms():
    made = synthetic.SyntheticAcceptance([1.0])
    empty = made.verify(torch.zeros(0), torch.zeros(2, 1), torch.zeros(3, dtype=torch.int32), torch.zeros(2, 1))
    assert (empty.num_accepted.tolist(), empty.next_ids.tolist()) == ([0, 0], [-1, -1])
    with pytest.raises(InputError, match="^accept_uniforms: expected "):
        made.verify(torch.zeros(1), torch.zeros(2, 1), torch.tensor([0, 1, 1]), torch.zeros(2, 2))
