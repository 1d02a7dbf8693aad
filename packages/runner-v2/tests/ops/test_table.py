"""Who is picked, and what explain() says about it."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from lamella.runner_v2.config import RunnerConfig
from lamella.runner_v2.errors import ConfigError, UnsupportedError
from lamella.runner_v2.ops.providers import registry
from lamella.runner_v2.ops.providers.registry import create_providers
from lamella.runner_v2.ops.providers.torch import TorchProvider
from lamella.runner_v2.ops.spec import Picked, Site
from lamella.runner_v2.ops.table import OpTable
from lamella.runner_v2.quant.scheme import FORMATS
from lamella.runner_v2.testing.op_cases import raw_part


class Fast:
    """Serves the named ops, those with weights up to some number of tokens; results say who computed them."""

    name = "fast"

    def __init__(self, *ops: str, max_num_tokens: int | None = None) -> None:
        self._ops = ops
        self._max = max_num_tokens

    def supports(self, site: Site) -> str | None:
        if site.op not in self._ops:
            return f"no {site.op} here"
        return "float32 only" if any(f.quantised for f in site.weights) else None

    def pick(self, site: Site) -> Picked:
        def pack(parts: Sequence[Any]) -> Mapping[str, torch.Tensor]:
            return {"negated": -parts[0].data}

        def run(x: torch.Tensor, *args: Any) -> torch.Tensor:
            return x @ args[-1].T if args else x

        if site.weights:
            return Picked(site.op, self.name, run, pack, lambda packed: packed["negated"], max_num_tokens=self._max)
        return Picked(site.op, self.name, run, max_num_tokens=self._max)


def site(op: str, format: str | None = None, **params: Any) -> Site:
    weights = (FORMATS[format],) if format else ()
    return Site(op, "cpu", torch.float32, weights, 1, params)


NORM = site("rms_norm", width=8, eps=1e-6, plus_one=False)
LINEAR = {"in": 32, "outs": (4,), "bias": False}


def test_first_supporting_provider_serves() -> None:
    table = OpTable([Fast("linear"), TorchProvider()])
    assert table.providers == ("fast", "torch")
    assert table.pick(site("linear", "float32", **LINEAR)).provider == "fast"
    assert table.pick(site("linear", "q4_0", **LINEAR)).provider == "torch"
    assert table.pick(NORM).provider == "torch"
    assert table.pick(NORM).provider == "torch"
    fast, quantised, norm = table.explain()
    assert (fast.op, fast.provider, fast.refused) == ("linear", "fast", {})
    assert quantised.refused == {"fast": "float32 only"}
    assert "q4_0" in quantised.site
    assert (norm.refused, norm.num_sites) == ({"fast": "no rms_norm here"}, 2)


def test_nobody_serves() -> None:
    table = OpTable([Fast("linear"), TorchProvider()])
    with pytest.raises(UnsupportedError, match="fast: no teleport here; torch: no reference for an op named teleport"):
        table.pick(site("teleport"))


def test_widest_that_is_better_than_the_reference() -> None:
    sites = [site("decoder_layer"), site("gated_activation", kind="silu", width=4), NORM]
    assert OpTable([Fast("decoder_layer"), TorchProvider()]).pick_widest(sites).op == "decoder_layer"
    assert OpTable([Fast("gated_activation"), TorchProvider()]).pick_widest(sites).op == "gated_activation"
    table = OpTable([Fast("linear"), TorchProvider()])
    assert (table.pick_widest(sites).op, table.pick_widest(sites).provider) == ("rms_norm", "torch")
    layer = table.explain()[0]
    assert layer.provider is None
    assert layer.refused == {
        "fast": "no decoder_layer here",
        "torch": "the reference of a fused op is its smaller ops",
    }


def test_ranges_of_tokens_compose() -> None:
    """Short steps go to the first provider, longer ones to the next; each has its own packing of the weights."""
    table = OpTable([Fast("linear", "gated_activation", max_num_tokens=2), TorchProvider()])
    picked = table.pick(site("linear", "float32", **LINEAR))
    assert picked.provider == "fast | torch"
    part = raw_part("layers.0.o", (4, 32))
    assert picked.pack is not None
    assert picked.bind is not None
    packed = picked.pack([part])
    assert set(packed) == {"fast.negated", "torch.weight"}
    handle = picked.bind(packed)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    expected = x @ part.data.T
    torch.testing.assert_close(picked.run(x, handle), expected)
    torch.testing.assert_close(picked.run(x[:2], handle), -expected[:2])
    plain = table.pick(site("gated_activation", kind="silu", width=4))
    assert plain.run(x[:2]).shape == (2, 32)
    assert plain.run(x).shape == (3, 16)
    assert table.explain()[0].refused == {"fast": "serves up to 2 tokens"}


def test_an_open_end_is_needed() -> None:
    with pytest.raises(UnsupportedError, match="serves up to 2 tokens"):
        OpTable([Fast("linear", max_num_tokens=2)]).pick(site("linear", "float32", **LINEAR))


class TestRegistry:
    @staticmethod
    def config(**options: Any) -> RunnerConfig:
        return RunnerConfig(model_path="", **options)

    def test_dense_dtypes_mean_the_reference(self) -> None:
        for dtype in ("float32", "bfloat16", "float16"):
            (only,) = create_providers(self.config(dtype=dtype))
            assert isinstance(only, TorchProvider)
            assert only.weight_dtype is getattr(torch, dtype)
        with pytest.raises(ConfigError, match="means the reference ops"):
            create_providers(self.config(dtype="float32", providers=("host", "torch")))

    def test_reference_comes_last_always(self) -> None:
        assert create_providers(self.config())[-1].name == "torch"
        assert [p.name for p in create_providers(self.config(providers=("torch",)))] == ["torch"]

    def test_unknown_names(self) -> None:
        with pytest.raises(ConfigError, match="providers \\['gpu'\\] are unknown; there are host, torch"):
            create_providers(self.config(providers=("gpu",)))
        with pytest.raises(ConfigError, match="dtype 'int3' is unknown"):
            create_providers(self.config(dtype="int3"))

    def test_without_native_code(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        """One warning, and the reference serves; asked for by name it is an error."""
        monkeypatch.setitem(sys.modules, "lamella.runner_v2.ops.providers.host", None)
        registry._warn_once.cache_clear()
        for _ in range(3):
            assert [p.name for p in create_providers(self.config())] == ["torch"]
        assert len(caplog.records) == 1
        assert "the torch reference ops serve" in caplog.text
        with pytest.raises(UnsupportedError, match="'host' was asked for"):
            create_providers(self.config(providers=("host",)))
