"""Where the CUDA provider comes from, what it refuses and why, and what it allocates."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lamella.runner_v2.attention.cuda import CudaAttention
from lamella.runner_v2.attention.registry import choose_backend
from lamella.runner_v2.config import LayerConfig, ModelConfig, MoeConfig, RopeConfig, RunnerConfig
from lamella.runner_v2.errors import ConfigError, UnsupportedError
from lamella.runner_v2.ops.providers import registry
from lamella.runner_v2.ops.providers.cuda import CudaProvider
from lamella.runner_v2.ops.providers.cuda_kernels import load_kernels
from lamella.runner_v2.ops.providers.cuda_linear import FEW_TOKENS, Workspaces
from lamella.runner_v2.ops.providers.registry import create_providers
from lamella.runner_v2.ops.providers.torch import TorchProvider
from lamella.runner_v2.ops.spec import Site
from lamella.runner_v2.quant.scheme import WeightFormat
from lamella.runner_v2.testing import cuda_kernels
from lamella.runner_v2.testing.assembled import KERNEL_SIZES, MAX_TOKENS, Assembled, mixed_steps
from lamella.runner_v2.testing.attention_cases import KERNEL_CASES, AttentionCase, make_data
from lamella.runner_v2.testing.op_cases import op_cases, placed, raw_part, relative_error, run_op
from lamella.runner_v2.testing.tiny_gguf import write_gguf

CASES = {case.name: placed(case, torch.bfloat16, "cpu") for case in op_cases()}
PLAIN = ModelConfig(
    family="llama",
    vocab_size=256,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=192,
    layers=(LayerConfig(),),
    ropes=(RopeConfig(),),
    max_position=64,
    norm_eps=1e-5,
    attention_scale=0.125,
)


@pytest.fixture
def provider() -> CudaProvider:
    return CudaProvider(cuda_kernels, 64, "cpu")


def chained_site(config: ModelConfig, **params: Any) -> Site:
    given = {"config": config, "layer": config.layers[0], "attention": "cuda", "kv_dtype": torch.bfloat16, **params}
    return Site("chained_layer", "cpu", torch.bfloat16, params=given)


def of(name: str, **params: Any) -> Site:
    site = CASES[name].site
    return replace(site, params={**site.params, **params})


def experts(**fields: Any) -> tuple[LayerConfig, ...]:
    sizes = {"num_experts": 8, "num_experts_per_token": 2, "intermediate_size": 32, **fields}
    return (LayerConfig(moe=MoeConfig(**sizes)),)


LINEAR = CASES["linear 1x512 float32"].site
REFUSALS: list[tuple[Site, str]] = [
    (Site("decoder_layer", "cpu", torch.bfloat16), "no kernel for an op named decoder_layer"),
    (replace(LINEAR, device="cuda:0"), "device cuda:0"),
    (replace(LINEAR, dtype=torch.float32), "activations are torch.float32"),
    (replace(LINEAR, weights=(WeightFormat("int3", 8, 3),)), "weight format int3"),
    (of("rms_norm 1", width=572), "width 572 is no multiple of 8"),
    (of("add_rms_norm 1", width=572), "width 572 is no multiple of 8"),
    (of("gated_activation silu 5x96", width=36), "width 36"),
    (of("gated_activation silu 5x96", kind="relu"), "activation relu"),
    (of("logits float32 1", hidden=100), "hidden size 100"),
    (of("moe_route", num_experts=2048), "2048 experts"),
    (of("moe_route", num_experts_per_token=33), "33 experts per token"),
    (of("moe_experts 1 float32", activation="gelu"), "experts with activation gelu"),
    (of("moe_experts 1 float32", hidden=100), "hidden 100"),
    (of("moe_experts 1 float32", width=100), "width 100"),
    (replace(chained_site(PLAIN), tp_size=2), "tp_size 2"),
    (chained_site(PLAIN, attention="torch"), "attention backend torch"),
    (chained_site(PLAIN, kv_dtype=torch.float16), "cache of torch.float16"),
    (chained_site(replace(PLAIN, sandwich_norms=True)), "norms behind attention"),
    (chained_site(replace(PLAIN, head_dim=32)), "head_dim 32"),
    (chained_site(replace(PLAIN, hidden_size=260)), "hidden size 260"),
    (chained_site(replace(PLAIN, intermediate_size=100)), "intermediate size 100 is no multiple of 8"),
    (chained_site(replace(PLAIN, layers=experts(), activation="gelu")), "experts with activation gelu"),
    (chained_site(replace(PLAIN, layers=experts(intermediate_size=36))), "width of experts 36"),
    (chained_site(replace(PLAIN, layers=experts(num_experts_per_token=40, num_experts=64))), "40 of 64 experts"),
]


@pytest.mark.parametrize(("site", "why"), REFUSALS, ids=[why for _, why in REFUSALS])
def test_refusals_say_why(provider: CudaProvider, site: Site, why: str) -> None:
    reason = provider.supports(site)
    assert reason is not None
    assert why in reason


@pytest.mark.parametrize("layers", [(LayerConfig(),), experts()], ids=["dense", "experts"])
def test_layers_that_are_served(provider: CudaProvider, layers: tuple[LayerConfig, ...]) -> None:
    config = replace(PLAIN, layers=layers, o_bias=True, qkv_bias=True, qk_norm=True)
    for kv_dtype in (torch.bfloat16, torch.float8_e4m3fn):
        assert provider.supports(chained_site(config, kv_dtype=kv_dtype)) is None


def test_workspaces_are_shared_and_hold_any_step() -> None:
    """One for all products of a device; experts get the most that any number of tokens needs."""
    workspaces = Workspaces(cuda_kernels, 100)
    device = torch.device("cpu")
    assert workspaces.linear(device) is workspaces.linear(device)
    assert workspaces.linear(device).numel() == cuda_kernels.linear_workspace(FEW_TOKENS).numel()
    first = workspaces.moe(device, 2, 64, 64, 32)
    assert first.numel() == cuda_kernels.moe_workspace_bytes(100, 2, 64, 64, 32)
    assert workspaces.moe(device, 2, 32, 64, 32) is first
    assert workspaces.moe(device, 2, 64, 64, 1024).numel() > first.numel()


def test_new_weights_of_a_norm_are_seen(provider: CudaProvider) -> None:
    """A layer's float32 weight is rounded once; what is loaded over it later is rounded into the same memory."""
    case = CASES["rms_norm 5"]
    run = provider.pick(case.site).run
    x, weight = case.args()
    before = run(x, weight)
    assert torch.equal(run(x, weight), before)
    weight.copy_(weight * 2)
    assert torch.equal(run(x, weight), before * 2)


@pytest.mark.parametrize("format", ["float32", "q8_0"])
def test_a_tied_table_serves_both(provider: CudaProvider, format: str) -> None:
    case = CASES[f"logits {format} 9 softcap"]
    norm, table = case.parts
    params = {"vocab": 130, "hidden": 256, "scale": None, "tied": True}
    embed = provider.pick(replace(case.site, op="embed", params=params))
    logits = provider.pick(case.site)
    assert embed.pack is not None
    assert logits.pack is not None
    assert logits.bind is not None
    packed = {**embed.pack([table]), **logits.pack([norm])}
    assert set(packed) == {"weight", "norm"}
    assert torch.equal(logits.run(*case.args(), logits.bind(packed)), run_op(logits, case)[0])


def test_logits_keep_the_type_that_samplers_take(provider: CudaProvider) -> None:
    plain, capped = CASES["logits bfloat16 1"], CASES["logits bfloat16 9 softcap"]
    assert run_op(provider.pick(plain.site), plain)[0].dtype == torch.bfloat16
    assert run_op(provider.pick(capped.site), capped)[0].dtype == torch.float32
    half = placed(plain, torch.float16, "cpu")
    assert run_op(provider.pick(half.site), half)[0].dtype == torch.float32


@pytest.mark.parametrize("format", ["q8_0", "q4_1"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_quantised_files(tmp_path: Path, family: str, format: str) -> None:
    """Blocks are taken apart when a layer is packed; the logits are those of the reference with the same weights."""
    model = write_gguf(tmp_path / "model.gguf", family, formats=format, seed=2, **KERNEL_SIZES)
    dtype = torch.float16
    with cuda_kernels.using(cuda_kernels):
        ours = Assembled(model.path, (CudaProvider(cuda_kernels, MAX_TOKENS, "cpu"), TorchProvider(dtype)), dtype)
    reference = Assembled(model.path, (TorchProvider(),), torch.float32)
    for batch in mixed_steps(ours.config.vocab_size)[:3]:
        logits, expected = ours.step(batch), reference.step(batch)
        # of two experts that are nearly as good as each other rounding chooses, for this token and all that look at it
        limit = 0.15 if family == "qwen3_moe" else 1e-2
        assert relative_error(logits, expected) < limit
        assert relative_error(logits[0], expected[0]) < 1e-2 or batch.positions[0] > 0


class TestAttention:
    LIMITS = KERNEL_CASES[0].limits(torch.bfloat16, torch.bfloat16)

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"device": "cuda"}, "device cuda"),
            ({"dtype": torch.float32}, "activations are torch.float32"),
            ({"kv_dtype": torch.float16}, "cache of torch.float16"),
            ({"head_dim": 32}, "head_dim 32"),
            ({"num_heads": 5}, "5 heads are no multiple of 2"),
            ({"block_size": 24}, "block_size 24"),
        ],
        ids=str,
    )
    def test_refusals_say_why(self, change: dict[str, Any], why: str) -> None:
        reason = CudaAttention(cuda_kernels, "cpu").supports(self.LIMITS._replace(**change))
        assert reason is not None
        assert why in reason

    @pytest.mark.parametrize(
        ("rows", "told", "num_single"),
        [
            (((9, 1), (5, 1)), 0, 2),  # one token each, which nobody said
            (((9, 1), (5, 3)), 0, 0),
            (((9, 1), (5, 3)), 1, 1),
            (((9, 1), (5, 0), (3, 1)), 0, 0),  # a row without a token shifts those behind it
        ],
    )
    def test_rows_with_one_token_go_apart(self, rows: Any, told: int, num_single: int) -> None:
        case = AttentionCase("", rows, head_dim=64, num_single=told)
        backend = CudaAttention(cuda_kernels, "cpu")
        backend.bind(case.limits(torch.bfloat16, torch.bfloat16))
        plan = backend.plan(make_data(case, torch.bfloat16, dtype=torch.bfloat16).batch, 0)
        assert plan.num_single == num_single
        assert (plan.schedule is None) == (num_single == 0)
        assert (plan.query_start is None) == (num_single == len(rows))
        if plan.query_start is not None:
            assert plan.query_start[0] == 0
            assert plan.query_start[-1] == sum(count for _, count in rows[num_single:])

    def test_plans_of_a_lane_share_its_memory(self) -> None:
        case = AttentionCase("", ((9, 1), (5, 1)), head_dim=64)
        backend = CudaAttention(cuda_kernels, "cpu")
        backend.bind(case.limits(torch.bfloat16, torch.bfloat16))
        batch = make_data(case, torch.bfloat16, dtype=torch.bfloat16).batch
        first, again, other = backend.plan(batch, 0), backend.plan(batch, 0), backend.plan(batch, 0, lane=1)
        assert first.schedule is not None
        assert again.schedule is not None
        assert other.schedule is not None
        assert first.schedule.data_ptr() == again.schedule.data_ptr() != other.schedule.data_ptr()
        assert first.workspace is again.workspace is not other.workspace

    def test_choice(self) -> None:
        """The cache has the type of the activations, or 8 bits where asked for; the reference refuses those."""
        with cuda_kernels.using(cuda_kernels):
            for name, dtype in (("auto", torch.bfloat16), ("fp8", torch.float8_e4m3fn)):
                choice = choose_backend(("cuda", "torch"), self.LIMITS, name, False)
                assert (choice.backend.name, choice.limits.kv_dtype) == ("cuda", dtype)
            odd = self.LIMITS._replace(head_dim=32)
            assert choose_backend(("cuda", "torch"), odd, "auto", False).refused["cuda"].startswith("head_dim 32")
            with pytest.raises(UnsupportedError, match="torch: the reference keeps no 8-bit cache"):
                choose_backend(("cuda", "torch"), odd, "fp8", False)


class TestRegistry:
    @staticmethod
    def names(**options: Any) -> list[str]:
        return [p.name for p in create_providers(RunnerConfig(model_path="", **options))]

    @pytest.fixture
    def on_cuda(self) -> Iterator[None]:
        with cuda_kernels.using(cuda_kernels, "cuda"):
            yield

    @pytest.fixture
    def absent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "lamella.kernels_cuda", None)
        registry._warn_once.cache_clear()

    @pytest.mark.usefixtures("on_cuda")
    def test_what_serves_on_a_device(self) -> None:
        assert self.names(device="cuda") == ["cuda", "torch"]
        assert self.names(device="cuda:1", dtype="bfloat16") == ["cuda", "torch"]
        assert self.names(device="cuda", dtype="float16", providers=("cuda",)) == ["cuda", "torch"]
        assert self.names(device="cuda", dtype="float32") == ["torch"]
        assert self.names(device="cuda", batch_invariant=True) == ["torch"]
        assert self.names(device="cuda", providers=("torch",)) == ["torch"]
        assert "cuda" not in self.names(device="cpu")
        with pytest.raises(ConfigError, match="dtype float32 means the reference ops"):
            self.names(device="cuda", dtype="float32", providers=("cuda",))
        with pytest.raises(ConfigError, match="batch_invariant needs the reference ops"):
            self.names(device="cuda", batch_invariant=True, providers=("cuda",))
        with pytest.raises(UnsupportedError, match="do not run on device cpu"):
            self.names(device="cpu", providers=("cuda",))

    @pytest.mark.parametrize(
        ("options", "dtype", "expected"),
        [
            ({"device": "cuda"}, torch.float16, torch.float16),
            ({"device": "cuda"}, None, torch.bfloat16),
            ({"device": "cuda", "dtype": "float32"}, torch.float32, torch.float32),
            ({"device": "cpu", "providers": ("torch",)}, torch.float32, torch.float32),
        ],
    )
    def test_the_reference_multiplies_in_the_type_of_the_activations(
        self, options: dict[str, Any], dtype: torch.dtype | None, expected: torch.dtype
    ) -> None:
        with cuda_kernels.using(cuda_kernels, "cuda"):
            *_, reference = create_providers(RunnerConfig(model_path="", **options), dtype)
        assert isinstance(reference, TorchProvider)
        assert reference.weight_dtype == expected

    @pytest.mark.usefixtures("absent")
    def test_without_the_package(self, caplog: pytest.LogCaptureFixture) -> None:
        """One warning, and the reference serves; asked for by name it is an error with the remedy."""
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                assert self.names(device="cuda") == ["torch"]
        assert len(caplog.records) == 1
        assert "install lamella-kernels-cuda" in caplog.text
        with pytest.raises(UnsupportedError, match="'cuda' was asked for: .*install lamella-kernels-cuda"):
            self.names(device="cuda", providers=("cuda",))

    def test_a_package_that_cannot_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = ModuleType("lamella.kernels_cuda")
        module.why_not = lambda device: f"no driver for {device}"  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "lamella.kernels_cuda", module)
        with pytest.raises(UnsupportedError, match="cannot run on cuda:3: no driver for 3"):
            load_kernels("cuda:3")

    def test_a_stand_in_ends_with_its_block(self) -> None:
        with cuda_kernels.using("kernels"):
            assert load_kernels("cpu") == "kernels"
        with pytest.raises(UnsupportedError):
            load_kernels("cpu")


def test_packing_leaves_the_raw_parts_alone(provider: CudaProvider) -> None:
    """A part of the right type may be handed on as it is, but is never written to."""
    part = raw_part("layers.0.o", (16, 32), "bfloat16")
    before = part.data.clone()
    picked = provider.pick(replace(LINEAR, params={"in": 32, "outs": (16,), "bias": False}))
    assert picked.pack is not None
    assert picked.bind is not None
    picked.run(torch.ones(2, 32, dtype=torch.bfloat16), picked.bind(picked.pack([part])))
    assert torch.equal(part.data, before)
