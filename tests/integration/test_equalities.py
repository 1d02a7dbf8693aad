"""What must not change an answer: cached prefixes, preemption, the rest of the batch, chunks, speculation.

Bit-exact where kernels are declared batch-invariant: the native host kernels always are, the reference ops with
batch_invariant. Without it they give the same ids here, and log-probabilities that differ in their last bits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lamella.engine import LLM, SamplingParams
from lamella.runner_v2.testing.prompts import PROMPTS
from lamella.runner_v2.testing.tiny_models import write_folder

SEEDED = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=7, max_tokens=24, ignore_eos=True, logprobs=2)
EDITED = SamplingParams(
    temperature=0.4, min_p=0.02, repetition_penalty=1.02, presence_penalty=0.02, frequency_penalty=0.01, seed=8,
    logit_bias={260: 1.5}, bad_words=["facts"], min_tokens=20, max_tokens=24, logprobs=2,
)  # fmt: skip
"""Logits depend on the drafts before a position."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
LONG = "The following is a list of facts about the sea. " * 8

ALL_DRAFTS = {"enable_adaptive_verification": False}
"""Every draft is verified, whatever steps take here: so the tests judge the same ones each time."""
every_drafter = pytest.mark.parametrize(
    "drafts",
    [
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1, **ALL_DRAFTS},
        {"method": "suffix", "num_speculative_tokens": 8, **ALL_DRAFTS},
        {
            "method": "suffix",
            "num_speculative_tokens": 8,
            "fallback": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
            **ALL_DRAFTS,
        },
    ],
    ids=["ngram", "suffix", "both"],
)


def answers(
    llm: LLM, prompts: Sequence[str | list[int]], params: SamplingParams
) -> list[tuple[list[int], list[float]]]:
    """Token ids and the chosen tokens' log-probabilities, which show any difference of the logits."""
    return [
        (o.outputs[0].token_ids, [entry.chosen.logprob for entry in o.outputs[0].logprobs])
        for o in llm.generate(prompts, params)
    ]


@pytest.fixture(scope="module")
def llm(smollm2_path: Path):
    with LLM(str(smollm2_path), max_model_len=512, max_num_seqs=8, threads=2) as engine:
        yield engine


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_prefix_hit_equals_cold_run(llm: LLM, params: SamplingParams) -> None:
    prompts = [LONG + PROMPTS[0], LONG + PROMPTS[4]]
    llm.reset_prefix_cache()
    cold = answers(llm, prompts, params)
    before = llm.stats().prefix_hits
    warm = answers(llm, prompts, params)
    assert llm.stats().prefix_hits - before >= 2 * 64
    assert warm == cold


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_answer_does_not_depend_on_the_batch(llm: LLM, params: SamplingParams) -> None:
    llm.reset_prefix_cache()
    together = answers(llm, list(PROMPTS), params)
    shuffled = list(range(len(PROMPTS)))
    random.Random(1).shuffle(shuffled)
    for i in shuffled[:6]:
        llm.reset_prefix_cache()
        assert answers(llm, [PROMPTS[i]], params)[0] == together[i]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_preempted_equals_not_preempted(smollm2_path: Path, llm: LLM, params: SamplingParams) -> None:
    prompts = [p + " " + LONG for p in PROMPTS[:6]]
    expected = answers(llm, prompts, params)
    # blocks for about three of the six sequences
    with LLM(str(smollm2_path), max_model_len=256, max_num_seqs=6, threads=2, kv_cache_memory=11_000_000) as small:
        assert answers(small, prompts, params) == expected
        assert small.stats().preemptions > 0


def test_chunks_do_not_change_the_answer(smollm2_path: Path, llm: LLM) -> None:
    expected = answers(llm, [LONG], GREEDY)
    with LLM(str(smollm2_path), max_model_len=512, max_num_seqs=4, threads=2, max_num_batched_tokens=16) as chunked:
        assert answers(chunked, [LONG], GREEDY) == expected


@every_drafter
@pytest.mark.parametrize("params", [GREEDY, SEEDED, EDITED], ids=["greedy", "seeded", "edited"])
def test_speculation_does_not_change_the_answer(
    smollm2_path: Path, llm: LLM, params: SamplingParams, drafts: dict[str, Any]
) -> None:
    prompts = [LONG, PROMPTS[2], PROMPTS[10], "one two three one two three one two three one two"]
    expected = [ids for ids, _ in answers(llm, prompts, params)]
    with LLM(
        str(smollm2_path),
        max_model_len=512,
        max_num_seqs=4,
        threads=2,
        speculative_config=drafts,
    ) as speculating:
        assert [ids for ids, _ in answers(speculating, prompts, params)] == expected
        stats = speculating.stats()
        assert stats.spec_draft_tokens > 0
        assert 0 < stats.spec_accepted_tokens <= stats.spec_draft_tokens
        assert [ids for ids, _ in answers(speculating, prompts, params)] == expected  # drafted from the first answers


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_lengths_that_follow_the_clock_do_not_change_the_answer(
    smollm2_path: Path, llm: LLM, params: SamplingParams
) -> None:
    prompts = [LONG, PROMPTS[2], "one two three one two three one two three one two"]
    expected = [ids for ids, _ in answers(llm, prompts, params)]
    drafts = {"method": "suffix", "num_speculative_tokens": 16, "suffix_decoding_max_spec_factor": 4}
    with LLM(str(smollm2_path), max_model_len=512, max_num_seqs=4, threads=2, speculative_config=drafts) as adaptive:
        for _ in range(2):
            assert [ids for ids, _ in answers(adaptive, prompts, params)] == expected


@every_drafter
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_speculation_beside_prefix_hits_chunks_and_preemption(
    smollm2_path: Path, llm: LLM, params: SamplingParams, drafts: dict[str, Any]
) -> None:
    prompts = [p + " " + LONG for p in PROMPTS[:5]] + ["one two three one two three one two three one two"]
    params = msgspec.structs.replace(params, max_tokens=60)
    expected = [ids for ids, _ in answers(llm, prompts, params)]
    with LLM(
        str(smollm2_path),
        max_model_len=256,
        max_num_seqs=6,
        threads=2,
        max_num_batched_tokens=48,  # chunks beside drafts
        kv_cache_memory=11_000_000,  # for about three of the six
        speculative_config=drafts,
    ) as small:
        assert [ids for ids, _ in answers(small, prompts, params)] == expected
        for i in (4, 4):  # behind a cached prefix, at least the second time
            assert answers(small, [prompts[i]], params)[0][0] == expected[i]
        stats = small.stats()
        assert stats.preemptions > 0
        assert stats.prefix_hits > 0
        assert stats.spec_accepted_tokens > 0


@every_drafter
def test_a_sequence_ends_inside_its_drafts(smollm2_path: Path, llm: LLM, drafts: dict[str, Any]) -> None:
    """Stop ids, stop strings, min_tokens and the length, at every place of a text that repeats itself."""
    prompt = "one two three one two three one two three one two"
    (ids, _), *_ = answers(llm, [prompt], GREEDY)
    limits: list[dict[str, Any]] = [{"ignore_eos": True, "max_tokens": end} for end in range(7, 12)]
    limits += [{"max_tokens": 24, "stop_token_ids": [ids[end]], "min_tokens": end - 2} for end in range(7, 12)]
    limits += [{"max_tokens": 24, "stop": [" three one two"], "min_tokens": end} for end in (6, 9)]
    params = [SamplingParams(temperature=0.0, **limit) for limit in limits]

    def ends(engine: LLM) -> list[tuple[str, str | None, list[int]]]:
        results = engine.generate([prompt] * len(params), params)
        return [(o.outputs[0].text, o.outputs[0].finish_reason, o.outputs[0].token_ids) for o in results]

    with LLM(str(smollm2_path), max_model_len=256, max_num_seqs=8, threads=2, speculative_config=drafts) as drafting:
        assert ends(drafting) == ends(llm)
        assert drafting.stats().spec_accepted_tokens > 0


def test_sequences_of_a_request_are_those_of_single_requests(llm: LLM) -> None:
    together = llm.generate([PROMPTS[3]], SamplingParams(n=3, seed=11, temperature=1.0, max_tokens=12))[0]
    for index, completion in enumerate(together.outputs):
        alone = llm.generate([PROMPTS[3]], SamplingParams(seed=11 + index, temperature=1.0, max_tokens=12))[0]
        assert completion.token_ids == alone.outputs[0].token_ids


class TestReferenceOps:
    """The same on the reference ops in float32, with a tiny model; one family has sliding layers and their group."""

    PARAMS = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])

    @pytest.fixture(scope="class", params=["llama", "gemma3_text"])
    def tiny(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_folder(tmp_path_factory.mktemp("tiny"), request.param).path

    @pytest.fixture(scope="class")
    def roomy(self, tiny: Path) -> Iterator[LLM]:
        with self.engine(tiny) as engine:
            yield engine

    @staticmethod
    def engine(path: Path, **options: Any) -> LLM:
        common = {"max_model_len": 160, "max_num_seqs": 8, "threads": 1, "max_num_batched_tokens": 256}
        return LLM(str(path), dtype="float32", batch_invariant=True, **{**common, **options})

    @pytest.fixture(scope="class")
    def prompts(self) -> list[list[int]]:
        """Of 44 to 50 tokens, of which the first 34 are the same in each."""
        rng = random.Random(5)
        shared = [rng.randrange(5, 300) for _ in range(34)]
        return [shared + [rng.randrange(5, 300) for _ in range(10 + 2 * n)] for n in range(4)]

    def test_the_reference_serves(self, roomy: LLM) -> None:
        header, *ops = roomy.info.report["ops"]
        assert header[1] == "provider"
        assert {op[1] for op in ops} <= {"torch", "(smaller ops)"}

    @PARAMS
    def test_prefix_hit_equals_cold_run(self, roomy: LLM, prompts: list[list[int]], params: SamplingParams) -> None:
        cold = []
        for prompt in prompts:
            roomy.reset_prefix_cache()
            cold += answers(roomy, [prompt], params)
        before = roomy.stats().prefix_hits
        assert answers(roomy, prompts, params) == cold
        assert roomy.stats().prefix_hits - before >= 4 * 32

    @PARAMS
    def test_answer_does_not_depend_on_the_batch(
        self, roomy: LLM, prompts: list[list[int]], params: SamplingParams
    ) -> None:
        roomy.reset_prefix_cache()
        together = answers(roomy, prompts, params)
        for n in (2, 0):
            roomy.reset_prefix_cache()
            assert answers(roomy, [prompts[n]], params)[0] == together[n]

    @PARAMS
    def test_preempted_equals_not_preempted(
        self, tiny: Path, roomy: LLM, prompts: list[list[int]], params: SamplingParams
    ) -> None:
        prompts = [prompt[-14:] for prompt in prompts]  # they grow: all are let in before blocks run out
        before = roomy.stats().preemptions
        expected = answers(roomy, prompts, params)
        assert roomy.stats().preemptions == before
        memory = self.bytes_of(roomy, num_tokens=6 * 16)
        with self.engine(tiny, max_model_len=40, kv_cache_memory=memory, enable_prefix_caching=False) as small:
            assert answers(small, prompts, params) == expected
            assert small.stats().preemptions > 0

    @staticmethod
    def bytes_of(llm: LLM, num_tokens: int) -> int:
        """Of KV in every group; the null block takes one of them."""
        header, *groups = llm.info.report["KV groups"]
        of_a_block, per_block = header.index("bytes per block"), header.index("tokens per block")
        return sum(-(-num_tokens // group[per_block]) * group[of_a_block] for group in groups)

    def test_chunks_do_not_change_the_answer(self, tiny: Path, roomy: LLM, prompts: list[list[int]]) -> None:
        expected = answers(roomy, prompts, SEEDED)
        with self.engine(tiny, max_num_batched_tokens=19) as chunked:
            assert answers(chunked, prompts, SEEDED) == expected
