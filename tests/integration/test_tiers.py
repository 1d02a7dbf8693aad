"""KV tiers in the engine: answers are the same with and without them, and less is computed."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamella.engine import LLM, SamplingParams
from lamella.engine.compose import tiers as compose_tiers
from lamella.engine.errors import StartError
from lamella.engine.scheduler.cost import FLAT
from lamella.runner_v2.testing.tiny_models import TINY_CONFIGS, write_folder

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1, detokenize=False)
ROUNDS, SESSIONS, TURN_LEN = 3, 5, 40


@pytest.fixture(autouse=True)
def loads_always_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models compute faster than anything could be copied, and the cost model would say so."""
    monkeypatch.setattr(compose_tiers, "token_cost", lambda *chunks: (0.0, FLAT))


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    write_folder(tmp_path / "model", request.param)
    return str(tmp_path / "model")


def chats(model: str, **options: Any) -> tuple[list[Any], Any]:
    """Turns of several conversations over a device pool for about one of them: (ids and log-probabilities, stats)."""
    told: list[Any] = []
    with LLM(
        model,
        threads=1,
        max_num_seqs=2,
        max_model_len=256,
        max_num_batched_tokens=64,
        kv_cache_memory=options.pop("pool"),
        **options,
    ) as llm:
        prompts = [[(7 * s + 3 * n) % 200 + 20 for n in range(TURN_LEN)] for s in range(SESSIONS)]
        for turn in range(ROUNDS):
            outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], PARAMS)
            settle(llm)
            for prompt, output in zip(prompts, outputs):
                answer = output.outputs[0]
                told.append((list(answer.token_ids), [entry.chosen.logprob for entry in answer.logprobs]))
                prompt += [*answer.token_ids, *[(turn + n) % 200 + 20 for n in range(16)]]
        return told, llm.stats()


def settle(llm: LLM) -> None:
    """Let copies end: tiny models are done before anything has reached a tier."""
    while llm._core.has_work:
        llm._core.run_once()


def pool_of(model: str) -> int:
    """Bytes for little more than one conversation."""
    with LLM(model, threads=1, max_num_seqs=1, max_model_len=256, max_num_batched_tokens=64) as llm:
        rows = llm.info.report["KV groups"]
    head = rows[0]
    return sum(17 * int(row[head.index("bytes per block")]) for row in rows[1:]) + (1 << 16)


@pytest.mark.parametrize("folder", sorted(TINY_CONFIGS), indirect=True)
def test_every_family_answers_the_same_on_tiers(folder: str) -> None:
    pool = pool_of(folder)
    expected, without = chats(folder, pool=pool)
    told, stats = chats(folder, pool=pool, kv_tier="ram=64MiB")
    assert told == expected
    host = stats.tiers["host"]
    assert host.num_blocks > 0
    assert host.failures == {}
    if (
        "mistral" not in json.loads((Path(folder) / "config.json").read_text())["model_type"]
    ):  # windows alone fit always
        assert host.hit_tokens > 0
        assert stats.computed_prompt_tokens < without.computed_prompt_tokens


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
@pytest.mark.parametrize("text", ["ram=64MiB,policy=s3fifo", "ram=64MiB,admission=reused", "ram=1MiB"])
def test_policies_and_sizes_change_no_answer(folder: str, text: str) -> None:
    pool = pool_of(folder)
    assert chats(folder, pool=pool, kv_tier=text)[0] == chats(folder, pool=pool)[0]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The example's store on loopback; yields the text for --kv-tier."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "external_store"))
    for name in ("manager", "server"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import server as example

    running = example.BlobServer()
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield f'external=manager:HttpManager,{{"url": "{running.url}"}}'
    running.shutdown()
    running.server_close()
    thread.join()


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_an_external_manager_keeps_prefixes_over_a_restart(folder: str, store: str) -> None:
    pool = pool_of(folder)
    expected, _ = chats(folder, pool=pool)
    small = ["ram=1MiB", store]
    assert chats(folder, pool=pool, kv_tier=small)[0] == expected
    told, stats = chats(folder, pool=pool, kv_tier=small)  # another engine: its device and host begin empty
    assert told == expected
    assert stats.tiers["HttpManager"].hit_tokens > 0
    assert stats.tiers["HttpManager"].failures == {}


@pytest.mark.parametrize("folder", sorted(TINY_CONFIGS), indirect=True)
def test_every_family_starts_warm_from_its_folder(folder: str, tmp_path: Path) -> None:
    pool = pool_of(folder)
    expected, _ = chats(folder, pool=pool)
    text = f"ram=8MiB,disk={tmp_path / 'kv'}:64MiB"
    assert chats(folder, pool=pool, kv_tier=text)[0] == expected
    told, stats = chats(folder, pool=pool, kv_tier=text)  # another engine: its device and host begin empty
    assert told == expected
    disk = stats.tiers["disk"]
    assert disk.hit_tokens > 0
    assert disk.failures == {}
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_another_models_folder_is_no_hit(folder: str, tmp_path: Path) -> None:
    text = f"ram=1MiB,disk={tmp_path / 'kv'}:64MiB"
    pool = pool_of(folder)
    chats(folder, pool=pool, kv_tier=text)
    write_folder(tmp_path / "other", "llama", seed=1)
    told, stats = chats(str(tmp_path / "other"), pool=pool, kv_tier=text)
    assert told == chats(str(tmp_path / "other"), pool=pool)[0]
    assert stats.tiers["disk"].failures == {}


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_two_engines_share_a_folder(folder: str, tmp_path: Path) -> None:
    options = {"threads": 1, "max_num_seqs": 1, "max_model_len": 256, "max_num_batched_tokens": 64}
    text = f"ram=1MiB,disk={tmp_path / 'kv'}:64MiB"
    prompts = [{"prompt_token_ids": [(s + 3 * n) % 200 + 20 for n in range(100)]} for s in range(4)]
    with LLM(folder, **options) as alone:
        expected = [list(o.outputs[0].token_ids) for o in alone.generate(prompts, PARAMS)]
    with LLM(folder, kv_tier=text, **options) as one, LLM(folder, kv_tier=text, **options) as two:
        for _ in range(2):
            for engine in (one, two):
                assert [list(o.outputs[0].token_ids) for o in engine.generate(prompts, PARAMS)] == expected
                settle(engine)
    with LLM(folder, kv_tier=text, **options) as third:
        assert [list(o.outputs[0].token_ids) for o in third.generate(prompts, PARAMS)] == expected
        assert third.stats().tiers["disk"].hit_tokens > 0


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_folder_that_goes_away_ends_nothing(folder: str, tmp_path: Path) -> None:
    options = {"threads": 1, "max_num_seqs": 1, "max_model_len": 256, "max_num_batched_tokens": 64}
    prompts = [{"prompt_token_ids": [(s + 3 * n) % 200 + 20 for n in range(100)]} for s in range(4)]
    with LLM(folder, **options) as alone:
        expected = [list(o.outputs[0].token_ids) for o in alone.generate(prompts, PARAMS)]
    with LLM(folder, kv_tier=f"ram=1MiB,disk={tmp_path / 'kv'}:64MiB", **options) as llm:
        for _ in range(2):
            assert [list(o.outputs[0].token_ids) for o in llm.generate(prompts, PARAMS)] == expected
            shutil.rmtree(tmp_path / "kv", ignore_errors=True)


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_request_may_keep_out_of_tiers_and_caches(folder: str) -> None:
    """Its own blocks go nowhere, and nobody else's serve it."""
    ids = list(range(20, 84))
    with LLM(
        folder, threads=1, max_num_seqs=1, max_model_len=128, max_num_batched_tokens=64, kv_tier="ram=8MiB"
    ) as llm:

        def computed(**fields: Any) -> int:
            before = llm.stats().computed_prompt_tokens
            llm.generate({"prompt_token_ids": ids, **fields}, PARAMS)
            settle(llm)
            return llm.stats().computed_prompt_tokens - before

        def held() -> int:
            return llm.stats().tiers["host"].num_blocks

        assert (computed(use_kv_tiers=False), held()) == (64, 0)
        assert computed() < 64, "the device's cache is not a tier below it"
        assert computed(use_prefix_cache=False) == 64
        assert computed(cache_salt="a", use_kv_tiers=False) == 64
        assert held() > 0
        before = held()
        assert computed(cache_salt="b") == 64
        assert computed(cache_salt="b") < 64
        assert held() > before


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_salt_takes_no_more_than_its_share_of_the_host(folder: str) -> None:
    options = {"threads": 1, "max_num_seqs": 1, "max_model_len": 256, "max_num_batched_tokens": 64}
    with LLM(folder, kv_tier="ram=1MiB,tenant_share=0.25", **options) as llm:
        for start in range(8):
            prompt = [(start + 3 * n) % 200 + 20 for n in range(200)]
            llm.generate({"prompt_token_ids": prompt, "cache_salt": "one"}, PARAMS)
            settle(llm)
        host = llm.stats().tiers["host"]
        assert 0 < host.num_blocks <= host.capacity // 4
        assert host.refused["quota"] > 0


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_reset_forgets_all_tiers(folder: str) -> None:
    prompt = {"prompt_token_ids": list(range(20, 84))}
    with LLM(
        folder, threads=1, max_num_seqs=1, max_model_len=128, max_num_batched_tokens=64, kv_tier="ram=8MiB"
    ) as llm:
        llm.generate(prompt, PARAMS)
        llm.reset_prefix_cache()
        before = llm.stats().computed_prompt_tokens
        llm.generate(prompt, PARAMS)
        assert llm.stats().computed_prompt_tokens - before == 64


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ram=much", "'much'"),
        ("disk=/tmp:1GiB", "add ram=SIZE"),
        ("rum=1GiB", "no key 'rum'"),
        ("ram=1GiB,external=no.such.module:Class", "no.such.module"),
        ("ram=1KiB", "not even one block"),
        ("ram=900TiB", "make it smaller"),
    ],
)
@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_wrong_text_is_one_clear_line(folder: str, text: str, said: str) -> None:
    with pytest.raises(StartError) as error:
        LLM(folder, threads=1, max_num_seqs=1, max_model_len=64, max_num_batched_tokens=64, kv_tier=text)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_tiers_without_prefix_cache_are_refused(folder: str) -> None:
    with pytest.raises(StartError, match="leave one out"):
        LLM(folder, kv_tier="ram=1MiB", enable_prefix_caching=False)
