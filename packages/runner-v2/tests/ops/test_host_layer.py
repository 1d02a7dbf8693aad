"""Whole decoder layers and attention of the host provider on every instruction set of this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

_C = pytest.importorskip("lamella.runner_v2._C")

from lamella.runner_v2.attention.host import HostAttention  # noqa: E402
from lamella.runner_v2.attention.paged import PagedAttention  # noqa: E402
from lamella.runner_v2.config import LayerConfig, ModelConfig, MoeConfig, RopeConfig  # noqa: E402
from lamella.runner_v2.inputs import LayerCache  # noqa: E402
from lamella.runner_v2.layers.rotary import make_table  # noqa: E402
from lamella.runner_v2.ops.providers.host import HostProvider  # noqa: E402
from lamella.runner_v2.ops.providers.torch import TorchProvider  # noqa: E402
from lamella.runner_v2.ops.spec import Provider, Site  # noqa: E402
from lamella.runner_v2.testing.attention_cases import (  # noqa: E402
    ATTENTION_CASES,
    AttentionCase,
    make_batch,
    make_data,
    run_case,
)
from lamella.runner_v2.testing.op_cases import raw_part  # noqa: E402
from lamella.runner_v2.testing.poison import poison  # noqa: E402
from lamella.runner_v2.weights.rules import parts_of  # noqa: E402

MAX_LEN = 512
PLAIN = ModelConfig(
    family="llama",
    vocab_size=256,
    hidden_size=256,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=512,
    layers=(LayerConfig(),),
    ropes=(RopeConfig(),),
    max_position=MAX_LEN,
    norm_eps=1e-5,
    attention_scale=32**-0.5,
)
MODELS = {
    "llama": PLAIN,
    "biased": replace(PLAIN, family="qwen2", qkv_bias=True, o_bias=True, mlp_bias=True),
    "gemma": replace(
        PLAIN,
        family="gemma3_text",
        activation="gelu_tanh",
        qk_norm=True,
        norm_plus_one=True,
        sandwich_norms=True,
        attention_softcap=20.0,
        layers=(LayerConfig(window=40),),
    ),
    "experts": replace(PLAIN, family="qwen3_moe", qk_norm=True, layers=(LayerConfig(moe=MoeConfig(4, 2, 256)),)),
    "sandwiched experts": replace(
        PLAIN, family="gemma3_text", sandwich_norms=True, layers=(LayerConfig(moe=MoeConfig(5, 3, 64, False)),)
    ),
    "partly rotated pairs": replace(PLAIN, ropes=(RopeConfig(rotary_dim=16, interleaved=True),), activation="gelu"),
}


@pytest.fixture(params=_C.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _C.isa()
    _C.set_isa(request.param)
    yield request.param
    _C.set_isa(before)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = _C.num_threads()
    yield
    _C.set_num_threads(before)


class OneLayer:
    """A layer with its cache, in which every row owns a run of blocks."""

    def __init__(
        self,
        provider: Provider,
        config: ModelConfig,
        format: str,
        kv_dtype: torch.dtype,
        num_rows: int,
        block_size: int = 16,
    ) -> None:
        layer = config.layers[0]
        parts = [
            raw_part(
                part.key,
                part.shape,
                format if len(part.shape) > 1 and not part.key.endswith("router") else "float32",
                0.2 if len(part.shape) == 1 else None,
            )
            for part in parts_of(config).values()
            if part.key.startswith("layers.0.")
        ]
        case = AttentionCase(
            "",
            ((1, 1),) * num_rows,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            layer.window,
            config.attention_softcap,
            block_size,
        )
        self.attention = HostAttention() if provider.name == "host" else PagedAttention()
        limits = case.limits(kv_dtype)
        assert self.attention.supports(limits) is None
        self.attention.bind(limits)
        formats = tuple(p.format for p in parts if len(p.shape) > 1)
        params = {"config": config, "layer": layer, "attention": provider.name, "kv_dtype": kv_dtype}
        site = Site("decoder_layer", "cpu", torch.float32, formats, 1, params)
        assert provider.supports(site) is None
        picked = provider.pick(site)
        assert picked.pack is not None
        assert picked.bind is not None
        table = make_table(config.ropes[0], config.head_dim, MAX_LEN, MAX_LEN)
        self._handle = picked.bind(picked.pack(parts), table, self.attention)
        self._run = picked.run
        self._window = layer.window
        self._block_size = block_size
        blocks = MAX_LEN // block_size
        self._tables = [list(range(1 + i * blocks, 1 + (i + 1) * blocks)) for i in range(num_rows)]
        shape = (1 + num_rows * blocks, config.num_kv_heads, block_size, config.head_dim)
        self.cache = LayerCache(*(poison(torch.zeros(shape, dtype=kv_dtype)) for _ in range(2)))

    def step(self, hidden: torch.Tensor, rows: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """rows: (row, length after the step, tokens). hidden is left as it is."""
        tables = [self._tables[row][: -(-seq_len // self._block_size)] for row, seq_len, _ in rows]
        batch = make_batch([row[1:] for row in rows], tables, self._block_size, self._window)
        return self._run(hidden.clone(), self.attention.plan(batch, 0), self.cache, self._handle)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("model", MODELS)
def test_equals_the_smaller_ops(model: str, isa: str) -> None:
    """Dense float32 weights and cache leave no rounding to hide behind: prompts, then one token each, mixed."""
    layers = [
        OneLayer(provider, MODELS[model], "float32", torch.float32, 3) for provider in (HostProvider(), TorchProvider())
    ]
    for rows in ([(0, 210, 210), (1, 7, 7)], [(0, 211, 1), (1, 8, 1), (2, 1, 1)], [(2, 60, 59), (0, 212, 1)]):
        hidden = randn(sum(row[2] for row in rows), 256)
        ours, expected = (layer.step(hidden, rows) for layer in layers)
        assert float((ours - expected).abs().max() / expected.abs().max()) < 2e-5


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("format", ["q4_1", "bfloat16"])
def test_bits_depend_on_the_row_alone(model: str, format: str, isa: str) -> None:
    """However a prompt is cut, whoever comes along and how many threads there are."""
    config = MODELS[model]
    if format == "q4_1" and model == "partly rotated pairs":
        config = replace(config, activation="silu")
    length = 330 if isa != "generic" else 200
    hidden = randn(length, 256)
    layer = OneLayer(HostProvider(1), config, format, torch.float16, 3)
    expected = layer.step(hidden, [(0, length, length)])
    layer = OneLayer(HostProvider(3), config, format, torch.float16, 3)
    others = randn(600, 256)
    done = 0
    for count, company in ((1, 0), (13, 40), (50, 1), (length - 66, 200), (1, 0), (1, 3)):
        rows = [(0, done + count, count)]
        mixed = hidden[done : done + count]
        if company:
            rows = [(1, company, company), *rows, (2, 1, 1)]
            mixed = torch.cat([others[:company], mixed, others[:1]])
        out = layer.step(mixed, rows)
        assert torch.equal(out[company : company + count], expected[done : done + count]), (done, count)
        done += count
    assert done == length


def test_nan_stays_in_its_row() -> None:
    layer = OneLayer(HostProvider(2), MODELS["experts"], "q8_0", torch.float16, 2)
    hidden = randn(40, 256)
    expected = layer.step(hidden, [(0, 20, 20), (1, 20, 20)])
    hidden[25] = torch.nan
    out = layer.step(hidden, [(0, 20, 20), (1, 20, 20)])
    assert torch.equal(out[:25], expected[:25])  # the other row, and the same row's earlier tokens
    assert torch.isnan(out[25:]).all()


def test_tokens_without_slot_write_nothing() -> None:
    layer = OneLayer(HostProvider(1), PLAIN, "q4_1", torch.float16, 1)
    batch = make_batch([(4, 4)], [[1]], 16)
    slots = batch.slot_mapping[0].clone()
    slots[3] = -1
    plan = layer.attention.plan(batch._replace(slot_mapping=(slots,)), 0)
    layer._run(randn(4, 256), plan, layer.cache, layer._handle)
    assert int((~torch.isnan(layer.cache.k[:, 0, :, 0])).sum()) == 3


def test_cache_saturates() -> None:
    """What is beyond a half's range becomes its largest value, not infinity."""
    backend = HostAttention()
    case = AttentionCase("", ((2, 2),), 1, 1, 16)
    backend.bind(case.limits(torch.float16))
    data = make_data(case, torch.float16)
    k = torch.full_like(data.k, 1e6)
    k[1, 0, :3] = torch.tensor([-1e6, torch.nan, 1.0004883])
    backend.write(k, k, data.cache, backend.plan(data.batch, 0))
    block = int(data.batch.block_tables[0][0, 0])
    assert data.cache.k[block, 0, 0].tolist() == [65504.0] * 16
    first, second, third, *_ = data.cache.k[block, 0, 1].tolist()
    assert (first, third) == (-65504.0, 1.0)  # to nearest, ties to even
    assert second != second


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", [case.name for case in ATTENTION_CASES])
def test_attention_equals_dense(case: str, kv_dtype: torch.dtype, isa: str) -> None:
    one = {c.name: c for c in ATTENTION_CASES}[case]
    _C.set_num_threads(2)
    backend = HostAttention()
    backend.bind(one.limits(kv_dtype))
    data = make_data(one, kv_dtype)
    out, lse = run_case(backend, data, fused=False)
    torch.testing.assert_close(out, data.out, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(lse, data.lse, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("block_size", [1, 4, 64, 256])
def test_any_power_of_two_is_a_block_size(block_size: int) -> None:
    case = AttentionCase("", ((70, 30), (300, 1), (9, 9)), block_size=block_size, window=50)
    backend = HostAttention()
    backend.bind(case.limits(torch.float16))
    data = make_data(case, torch.float16)
    out, _ = run_case(backend, data, fused=True)
    torch.testing.assert_close(out, data.out, rtol=1e-4, atol=2e-5)
    assert "power of two" in str(backend.supports(case._replace(block_size=24).limits(torch.float16)))


@pytest.mark.parametrize("window", [None, 700])
def test_spans_computed_apart_give_the_same_bits(window: int | None) -> None:
    """One thread walks a long row's spans in turn; several threads take one each."""
    case = AttentionCase("", ((1900, 1),), window=window)
    backend = HostAttention()
    backend.bind(case.limits(torch.float16))
    data = make_data(case, torch.float16)
    results = []
    for threads in (1, 2, 7):
        _C.set_num_threads(threads)
        results.append(run_case(backend, data, fused=False))
    for out, lse in results:
        torch.testing.assert_close(out, data.out, rtol=1e-4, atol=2e-5)
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def test_refusals_say_why() -> None:
    host = HostProvider()
    params = {"config": PLAIN, "layer": PLAIN.layers[0], "attention": "host", "kv_dtype": torch.float16}
    site = Site("decoder_layer", "cpu", torch.float32, (), 1, params)
    assert host.supports(site) is None
    assert "tp_size 2" in str(host.supports(replace(site, tp_size=2)))
    assert "backend torch" in str(host.supports(replace(site, params={**params, "attention": "torch"})))
    assert "bfloat16" in str(host.supports(replace(site, params={**params, "kv_dtype": torch.bfloat16})))
    assert "float16" in str(host.supports(replace(site, dtype=torch.float16)))
    assert "cuda" in str(host.supports(replace(site, device="cuda:0")))
    assert "no native op" in str(host.supports(replace(site, op="convolution")))


def test_threads_can_change_between_steps() -> None:
    layer = OneLayer(HostProvider(1), PLAIN, "q4_1", torch.float16, 1)
    hidden = randn(30, 256)
    results = []
    for threads in (1, 4, 2, 1, 3):
        _C.set_num_threads(threads)
        assert _C.num_threads() == threads
        results.append(layer.step(hidden, [(0, 30, 30)]))
    assert all(torch.equal(result, results[0]) for result in results)
