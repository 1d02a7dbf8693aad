"""A draft model through `LLM`: answers are those without it, and its KV is there wherever the model's is.

The model drafting for itself is the sharpest judge of the latter: as long as its KV is right, every draft stands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lamella.engine import LLM, SamplingParams
from lamella.engine.errors import StartError
from lamella.engine.outputs import RequestOutput
from lamella.runner_v2.testing.tiny_models import write_folder

OPTIONS: dict[str, Any] = {
    "max_model_len": 256, "max_num_seqs": 6, "max_num_batched_tokens": 24, "threads": 1, "seed": 3, "block_size": 8,
}  # fmt: skip
"""Prompts are cut into chunks."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_k=30, seed=5, max_tokens=40, ignore_eos=True)
SHARED = [(7 * n) % 200 + 5 for n in range(50)]
PROMPTS = [SHARED[: 20 + 6 * n] + [n + 40, 41, 42] for n in range(8)]
FAMILIES = ("llama", "qwen3", "gemma3_text", "mistral")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny models of one vocabulary; head counts, head_dim and windows differ."""
    folder = tmp_path_factory.mktemp("models")
    return {name: str(write_folder(folder / name, name, seed=n).path) for n, name in enumerate(FAMILIES)}


def drafting(model: str, num_drafts: int = 4, **more: Any) -> dict[str, Any]:
    return {
        "method": "draft_model",
        "model": model,
        "num_speculative_tokens": num_drafts,
        "enable_adaptive_verification": False,
        **more,
    }


def little_memory(model: str, config: dict[str, Any]) -> dict[str, Any]:
    """For a cache that holds one sequence of the longest, and not many of the test's."""
    with LLM(model, **OPTIONS, speculative_config=config) as llm:
        groups = llm.info.report["KV groups"][1:]
    blocks = [36 if window == "-" else 36 // len(groups) for _, _, window, *_ in groups]
    return {"kv_cache_memory": sum(group[5] * count for group, count in zip(groups, blocks))}


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("llama", "qwen3"),
        ("qwen3", "gemma3_text"),
        ("gemma3_text", "llama"),
        ("mistral", "llama"),
        ("llama", "mistral"),
    ],
)
def test_answers_are_those_without(models: dict[str, str], target: str, draft: str, params: SamplingParams) -> None:
    """Twice each: the second time prefixes are cached. Few blocks: sequences are preempted."""
    with LLM(models[target], **OPTIONS) as plain:
        expected = ids(plain.generate(PROMPTS, params))
        assert ids(plain.generate(PROMPTS, params)) == expected
    config = drafting(models[draft])
    with LLM(models[target], **OPTIONS, **little_memory(models[target], config), speculative_config=config) as llm:
        assert ids(llm.generate(PROMPTS, params)) == expected
        assert ids(llm.generate(PROMPTS, params)) == expected
        stats = llm.stats()
    assert stats.spec_draft_tokens > 200
    assert stats.prefix_hits > 0
    assert stats.preemptions > 0


@pytest.mark.parametrize(
    ("name", "few"), [*((name, False) for name in FAMILIES), *((name, True) for name in FAMILIES[:3])]
)
def test_a_model_that_drafts_for_itself_is_always_right(models: dict[str, str], name: str, few: bool) -> None:
    """Through chunks, cached prefixes and preemptions: its KV is never missing and never another's."""
    config = drafting(models[name], 3)
    memory = little_memory(models[name], config) if few else {}
    with LLM(models[name], **OPTIONS, **memory, speculative_config=config) as llm:
        for _ in range(2):
            llm.generate(PROMPTS, GREEDY)
        stats = llm.stats()
    assert stats.spec_draft_tokens > 200
    assert stats.spec_accepted_tokens == stats.spec_draft_tokens
    assert stats.prefix_hits > 0
    assert (stats.preemptions > 0) == few


def test_prefixes_from_a_lower_tier_bring_the_drafters_part(models: dict[str, str], tmp_path: Path) -> None:
    """A restarted engine finds them on disk; another drafter, or none, does not."""
    tiers = {"kv_tier": [f"ram=16MiB,disk={tmp_path}:64MiB"]}
    few = {**OPTIONS, "kv_cache_memory": 1_000_000}
    for restored in (False, True):
        with LLM(models["llama"], **few, **tiers, speculative_config=drafting(models["llama"], 3)) as llm:
            llm.generate(PROMPTS, GREEDY)
            stats = llm.stats()
        assert stats.spec_accepted_tokens == stats.spec_draft_tokens > 0
        assert (stats.tiers["disk"].hit_tokens > 0) == restored
    for config in (None, drafting(models["qwen3"])):
        with LLM(models["llama"], **few, **tiers, speculative_config=config) as llm:
            llm.generate(PROMPTS[-1:], GREEDY)
            assert llm.stats().tiers["disk"].hit_tokens == 0


def test_it_stands_beside_drafters_without_a_network(models: dict[str, str]) -> None:
    """Each row drafts by who fares best in it; requests may name one."""
    both = {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 1,
        "enable_adaptive_verification": False,
    }
    fallback = {"method": "draft_model", "model": models["llama"], "num_speculative_tokens": 3}
    with LLM(models["llama"], **OPTIONS) as plain:
        expected = ids(plain.generate(PROMPTS, GREEDY))
    with LLM(models["llama"], **OPTIONS, speculative_config={**both, "fallback": fallback}) as llm:
        assert ids(llm.generate(PROMPTS, GREEDY)) == expected
        before = llm.stats()
        assert before.spec_method_accepted_tokens["draft_model"] > 0
        named = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, spec_method="draft_model")
        assert ids(llm.generate(PROMPTS, named)) == expected
        after = llm.stats()
        drafted = after.spec_draft_tokens - before.spec_draft_tokens
        assert after.spec_accepted_tokens - before.spec_accepted_tokens == drafted > 0
        none = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, disable_spec_decode=True)
        assert ids(llm.generate(PROMPTS, none)) == expected
        assert llm.stats().spec_draft_tokens == after.spec_draft_tokens


def test_what_it_is_stands_in_the_report(models: dict[str, str]) -> None:
    with LLM(models["llama"], **OPTIONS, speculative_config=drafting(models["qwen3"])) as llm:
        report = llm.info.report
    assert report["speculation"]["methods"] == "draft_model"
    assert ["drafting network", models["qwen3"], "given"] in report["options"]
    (group,) = report["KV groups"][1:]
    assert group[1] == 6  # layers of both


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vocab_size": 2048}, "has 2048 token ids, the model .*: a draft model must have the tokenizer"),
        ({"architectures": ["OtherForCausalLM"]}, "architecture OtherForCausalLM is not supported"),
    ],
)
def test_models_that_cannot_draft_are_refused(
    models: dict[str, str], tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    if "vocab_size" in change:
        path = write_folder(tmp_path, "llama", tokenizer=False, **change).path
    else:
        path = write_folder(tmp_path, "llama", tokenizer=False).path
        config = (path / "config.json").read_text()
        (path / "config.json").write_text(config.replace("LlamaForCausalLM", "OtherForCausalLM"))
    with pytest.raises(StartError, match=said):
        LLM(models["llama"], **OPTIONS, speculative_config=drafting(str(path)))


def test_a_draft_model_that_is_nowhere_is_named(models: dict[str, str]) -> None:
    with pytest.raises(StartError, match="no-such-draft"):
        LLM(models["llama"], **OPTIONS, speculative_config=drafting("./no-such-draft"))


def test_rows_of_several_shapes_have_no_8_bit_form(models: dict[str, str], tmp_path: Path) -> None:
    tiers = {"kv_tier": [f"ram=16MiB,disk={tmp_path}:64MiB,store_dtype=fp8"]}
    with pytest.raises(StartError, match="store_dtype=fp8 needs layers of one shape"):
        LLM(models["llama"], **OPTIONS, **tiers, speculative_config=drafting(models["qwen3"]))
