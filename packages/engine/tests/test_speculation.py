"""Speculation through `LLM` on a generated checkpoint: mixed batches, lossy rules, synthetic acceptance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from lamella.engine import LLM, SamplingParams
from lamella.engine.errors import RequestError, StartError
from lamella.engine.outputs import RequestOutput

OPTIONS = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 128, "threads": 1, "seed": 3}
BOTH = {
    "method": "suffix",
    "num_speculative_tokens": 6,
    "suffix_decoding_max_spec_factor": 4,
    "fallback": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    "enable_adaptive_verification": False,
}
ARBITRARY = {"method": "arbitrary", "num_speculative_tokens": 3, "enable_adaptive_verification": False}
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_k=30, seed=5, max_tokens=40, ignore_eos=True)
LOUD = SamplingParams(temperature=0.3, top_p=0.9, seed=6, max_tokens=40, ignore_eos=True, logit_bias={40: 9.0, 41: 8.5})
"""Few ids come out, so that drafts are often right."""
CONTROLS: list[dict[str, Any]] = [
    {},
    {"disable_spec_decode": True},
    {"num_speculative_tokens": 0},
    {"num_speculative_tokens": 1},
    {"spec_method": "ngram"},
    {"spec_method": "suffix", "num_speculative_tokens": 100},
]


@pytest.fixture(scope="module")
def plain(tiny_llama: str) -> Iterator[LLM]:
    with LLM(tiny_llama, **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def both(tiny_llama: str) -> Iterator[LLM]:
    with LLM(tiny_llama, **OPTIONS, speculative_config=BOTH) as engine:
        yield engine


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("params", [GREEDY, SEEDED, LOUD], ids=["greedy", "seeded", "loud"])
def test_no_control_changes_a_token_in_one_mixed_batch(plain: LLM, both: LLM, params: SamplingParams) -> None:
    prompts = [[n + 40, 41, 42, 43] * 4 for n in range(len(CONTROLS))]
    several = [msgspec.structs.replace(params, **controls) for controls in CONTROLS]
    expected = ids(plain.generate(prompts, params))
    before = both.stats()
    outputs = both.generate(prompts, several)
    after = both.stats()
    assert ids(outputs) == expected
    told = [(o.accepted_prediction_tokens, o.rejected_prediction_tokens) for o in outputs]
    assert told[1] == told[2] == (0, 0)
    assert all(sum(told[i]) > 0 for i in (0, 3, 4, 5))
    assert sum(a for a, _ in told) == after.spec_accepted_tokens - before.spec_accepted_tokens
    drafted = after.spec_draft_tokens - before.spec_draft_tokens
    assert sum(r for _, r in told) == drafted - (after.spec_accepted_tokens - before.spec_accepted_tokens)
    assert {o.rejection_sample_method for o in outputs} == {"standard"}
    # one after the other, each control for each prompt
    for controls in CONTROLS[1:]:
        again = both.generate(prompts[:2], msgspec.structs.replace(params, **controls))
        assert ids(again) == expected[:2]
    assert after.spec_draft_seconds > 0
    assert after.spec_verify_seconds > 0
    assert min(after.spec_method_draft_tokens.values()) > 0


def test_sequences_of_one_request_share_its_controls(plain: LLM, both: LLM) -> None:
    params = msgspec.structs.replace(SEEDED, n=3, num_speculative_tokens=2)
    (expected,), (got,) = (engine.generate([[40, 41] * 8], params) for engine in (plain, both))
    assert [o.token_ids for o in got.outputs] == [o.token_ids for o in expected.outputs]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"num_speculative_tokens": -1}, "num_speculative_tokens", "must be in"),
        ({"num_speculative_tokens": "2"}, "num_speculative_tokens", "expected `int"),
        ({"num_speculative_tokens": 2, "disable_spec_decode": True}, "num_speculative_tokens", "leave one out"),
        ({"spec_method": "ngram", "disable_spec_decode": True}, "spec_method", "leave one out"),
        ({"spec_method": "eagle3"}, "spec_method", "drafts by suffix, ngram: name one of them"),
        ({"spec_method": 3}, "spec_method", "expected `str"),
        ({"disable_spec_decode": 1}, "disable_spec_decode", "expected `bool`"),
    ],
)
def test_mistakes_are_named(both: LLM, fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        both.generate("a", SamplingParams(**fields))
    assert caught.value.param == param


def test_an_engine_without_speculation_takes_limits_but_no_method(plain: LLM) -> None:
    for fields in ({"disable_spec_decode": True}, {"num_speculative_tokens": 5}):
        plain.generate("a", SamplingParams(max_tokens=1, **fields))
    with pytest.raises(RequestError, match="this engine has no speculation: leave it out, or start"):
        plain.generate("a", SamplingParams(spec_method="ngram"))
    assert plain.info.speculation is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_synthetic_rates_come_out(tiny_llama: str, temperature: float) -> None:
    rates = [0.8, 0.5, 0.2]
    config = {**ARBITRARY, "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    params = SamplingParams(temperature=temperature, max_tokens=200, ignore_eos=True)
    with LLM(tiny_llama, **OPTIONS, speculative_config=config) as llm:
        outputs = llm.generate([[n + 5, 6] for n in range(24)], params)
        stats = llm.stats()
    assert {len(o.outputs[0].token_ids) for o in outputs} == {200}
    assert {o.rejection_sample_method for o in outputs} == {"synthetic"}
    assert llm.info.speculation is not None
    assert (llm.info.speculation.rule, llm.info.speculation.exact) == ("synthetic", False)
    for rate, accepted in zip(rates, stats.spec_accepted_per_pos, strict=True):
        share, num = accepted / stats.spec_drafts, stats.spec_drafts
        assert abs(share - rate) <= 5 * (rate * (1 - rate) / num) ** 0.5 + 3 / 200  # a row's last steps are short


def test_synthetic_drafts_are_what_is_emitted_and_computed_on(tiny_llama: str, plain: LLM) -> None:
    """All drafts stand: the row says its own last ids again, and the ids behind them are what the model says there."""
    config = {**ARBITRARY, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 4}
    prompt = [5, 6, 7, 8]
    with LLM(tiny_llama, **OPTIONS, speculative_config=config) as llm:
        (output,) = llm.generate([prompt], msgspec.structs.replace(GREEDY, max_tokens=9))
        off = llm.generate([prompt], msgspec.structs.replace(GREEDY, disable_spec_decode=True))
    said = output.outputs[0].token_ids
    known = prompt + said[:1]
    assert said[1:4] == known[::-1][:3]
    known = prompt + said[:5]
    assert said[5:8] == known[::-1][:3]
    for place in (0, 4, 8):
        (behind,) = plain.generate([prompt + said[:place]], msgspec.structs.replace(GREEDY, max_tokens=1))
        assert behind.outputs[0].token_ids == said[place : place + 1]
    assert (output.accepted_prediction_tokens, output.rejected_prediction_tokens) == (6, 0)
    assert off[0].rejection_sample_method == "standard"
    assert ids(off) == ids(plain.generate([prompt], GREEDY))


@pytest.mark.parametrize(
    "rule",
    [
        {"rejection_sample_method": "typical", "posterior_threshold": 0.001, "posterior_alpha": 0.01},
        {"rejection_sample_method": "relaxed", "relaxed_topk": 50, "relaxed_delta": 20},
        {"rejection_sample_method": "threshold", "accept_threshold_acc": 0.001},
    ],
    ids=lambda rule: rule["rejection_sample_method"],
)
def test_lossy_rules_keep_more_are_labelled_and_leave_greedy_answers_alone(
    tiny_llama: str, plain: LLM, rule: dict[str, Any]
) -> None:
    prompts = [[n + 40, 41, 42, 43] * 6 for n in range(6)]
    with (
        LLM(tiny_llama, **OPTIONS, speculative_config=BOTH) as exact,
        LLM(tiny_llama, **OPTIONS, speculative_config={**BOTH, **rule}) as lossy,
    ):
        for engine in (exact, lossy):
            outputs = engine.generate(prompts, SEEDED)
        kept = [e.stats().spec_accepted_tokens / e.stats().spec_draft_tokens for e in (exact, lossy)]
        assert kept[1] > kept[0]
        assert {o.rejection_sample_method for o in outputs} == {rule["rejection_sample_method"]}
        assert ids(outputs) != ids(plain.generate(prompts, SEEDED))
        greedy = lossy.generate(prompts, GREEDY)
        assert ids(greedy) == ids(plain.generate(prompts, GREEDY))
        # log-probabilities are of what the model says, so such requests go without drafts
        scored = lossy.generate(prompts, msgspec.structs.replace(SEEDED, logprobs=0))
        assert ids(scored) == ids(plain.generate(prompts, SEEDED))
        assert {o.rejection_sample_method for o in scored} == {"standard"}
        assert lossy.stats().spec_off["logprobs"] > 0


def test_rules_that_cannot_be_end_the_start(tiny_llama: str) -> None:
    with pytest.raises(StartError, match='"synthetic" needs either synthetic_acceptance_rates'):
        LLM(tiny_llama, **OPTIONS, speculative_config={**ARBITRARY, "rejection_sample_method": "synthetic"})
