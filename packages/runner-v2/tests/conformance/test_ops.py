"""Every op of every provider of this build against its reference, in memory that is NaN until it is written."""

from dataclasses import replace

import pytest
import torch

from lamella.runner_v2.attention.backend import AttentionBackend
from lamella.runner_v2.attention.paged import PagedAttention
from lamella.runner_v2.attention.registry import choose_backend
from lamella.runner_v2.config import RunnerConfig
from lamella.runner_v2.errors import UnsupportedError
from lamella.runner_v2.ops.providers.registry import create_providers
from lamella.runner_v2.ops.providers.torch import TorchProvider
from lamella.runner_v2.ops.spec import Provider
from lamella.runner_v2.testing.op_cases import OpCase, op_cases, run_op
from lamella.runner_v2.testing.poison import poisoned_memory

CASES = {case.name: case for case in op_cases()}
PROVIDERS: dict[str, Provider] = {
    **{provider.name: provider for provider in create_providers(RunnerConfig(model_path=""))},
    "torch bfloat16": TorchProvider(torch.bfloat16),
    "torch by row": TorchProvider(batch_invariant=True),
}
REFERENCE = TorchProvider()
# products of which both factors are 16-bit, at least once in a row
BFLOAT16_TOLERANCE = 3e-2


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("name", CASES)
def test_equals_reference(name: str, provider: str) -> None:
    case = CASES[name]
    site, attention = case.site, None
    if case.attention is not None:
        attention, kv_dtype = backend_of(provider, case)
        site = replace(site, params={**site.params, "attention": attention.name, "kv_dtype": kv_dtype})
    reason = PROVIDERS[provider].supports(site)
    if reason is not None:
        assert provider != "torch", f"the reference serves everything, but: {reason}"
        assert len(reason) > 5
        pytest.skip(f"{provider} refuses: {reason}")
    expected = run_op(REFERENCE.pick(case.site), case, PagedAttention())
    with poisoned_memory():
        actual = run_op(PROVIDERS[provider].pick(site), case._replace(site=site), attention)
    tolerance = max(case.tolerance, BFLOAT16_TOLERANCE) if provider == "torch bfloat16" else case.tolerance
    assert len(actual) == len(expected)
    for ours, reference in zip(actual, expected, strict=True):
        assert ours.shape == reference.shape
        assert ours.dtype == reference.dtype
        assert error(ours, reference) <= tolerance


def backend_of(provider: str, case: OpCase) -> tuple[AttentionBackend, torch.dtype]:
    """The backend whose plans the provider's layer gets."""
    assert case.attention is not None
    if not provider.startswith("torch"):
        try:
            choice = choose_backend((provider,), case.attention.limits(torch.float32), "auto", False)
        except UnsupportedError as refusal:
            pytest.skip(str(refusal))
        return choice.backend, choice.limits.kv_dtype
    return PagedAttention(), torch.float32


def error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """RMS of the difference over RMS of the reference."""
    if reference.numel() == 0:
        return 0.0
    difference = (ours.double() - reference.double()).pow(2).mean().sqrt()
    assert not torch.isnan(difference), "NaN: memory was read that nobody had written"
    return float(difference / reference.double().pow(2).mean().sqrt())


@pytest.mark.parametrize("format", ["float32", "q8_0", "q4_1", "q6_k"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_tied_table_serves_both(provider: str, format: str) -> None:
    """What embed packs of a tied table, with a norm, is what the same provider's logits op is bound to."""
    case = CASES[f"logits {format} 9 softcap"]
    norm, table = case.parts
    embed_params = {"vocab": 130, "hidden": 256, "scale": None, "tied": True}
    embed_site = replace(case.site, op="embed", params=embed_params)
    logits_site = replace(case.site, params={**case.site.params, "tied": True})
    one = PROVIDERS[provider]
    if one.supports(embed_site) is not None or one.supports(logits_site) is not None:
        pytest.skip(f"{provider} does not serve both")
    embed, logits = one.pick(embed_site), one.pick(logits_site)
    assert embed.pack is not None
    assert embed.bind is not None
    assert logits.pack is not None
    assert logits.bind is not None
    packed = {**embed.pack([table]), **logits.pack([norm])}
    ids = torch.arange(130, dtype=torch.int32)
    lookup = case._replace(site=embed_site, args=lambda: (ids,), parts=(table,))
    rows = run_op(REFERENCE.pick(embed_site), lookup)[0]
    assert error(embed.run(ids, embed.bind(packed)), rows) <= (1e-2 if "16" in provider else 1e-6)
    actual = logits.run(*case.args(), logits.bind(packed))
    assert error(actual, run_op(REFERENCE.pick(case.site), case)[0]) <= max(case.tolerance, 3e-2 * ("16" in provider))
