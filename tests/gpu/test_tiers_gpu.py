"""KV tiers below a GPU, in process: the same bits as with a device cache that is never short.

One request at a time, so that every step has the shape that it has in the other engine: what was evicted and came back
from the host or from the disk then gives the bits of what had stayed.
"""

from __future__ import annotations

import logging
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lamella.engine import LLM, SamplingParams
from lamella.engine.adapters.block_copier import block_copiers
from lamella.engine.compose import tiers as compose_tiers
from lamella.engine.scheduler.cost import FLAT
from lamella.kvtier.data import cuda_mover
from lamella.kvtier.data.pinning import SlabPinner, _cuda_register
from lamella.runner_v2.testing.assembled import KERNEL_SIZES
from lamella.runner_v2.testing.tiny_models import TINY_CONFIGS, write_folder

pytestmark = pytest.mark.gpu

ROUNDS, SESSIONS, TURN_LEN = 3, 5, 130
BLOCK_SIZE = 16
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1, detokenize=False)
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "max_num_seqs": 2,
    "max_model_len": 256,
    "max_num_batched_tokens": 128,
    "block_size": BLOCK_SIZE,
}
ROOMY, TIGHT = 400, 19
"""Blocks for all sessions, and for little more than one."""


@pytest.fixture(autouse=True)
def loads_always_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models compute faster than a disk reads, and the cost model would say so."""
    monkeypatch.setattr(compose_tiers, "token_cost", lambda *chunks: (0.0, FLAT))
    monkeypatch.setattr(compose_tiers, "LEAST_PATIENCE_S", 20.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in TINY_CONFIGS:
        write_folder(folder / family, family, seed=3, dtype="bfloat16", **KERNEL_SIZES)
    return folder


class Told(NamedTuple):
    """What an engine said."""

    answers: list[tuple[list[int], list[float]]]
    """(ids, log-probabilities) of each turn of each session."""
    cached: list[int]
    stats: Any
    moved: dict[str, Any]


@cache
def block_bytes(model: Path) -> int:
    """Of all groups."""
    with LLM(str(model), kv_cache_memory=64 << 20, enforce_eager=True, **OPTIONS) as probe:
        head, *rows = probe.info.report["KV groups"]
    return sum(int(row[head.index("bytes per block")]) for row in rows)


def engine(model: Path, num_blocks: int, **options: Any) -> LLM:
    return LLM(str(model), kv_cache_memory=num_blocks * block_bytes(model) + (1 << 16), **{**OPTIONS, **options})


def chats(llm: LLM) -> Told:
    """Turns of several conversations, one request at a time."""
    answers, cached = [], []
    prompts = [[(7 * s + 3 * n) % 200 + 20 for n in range(TURN_LEN)] for s in range(SESSIONS)]
    for turn in range(ROUNDS):
        for prompt in prompts:
            output = llm.generate({"prompt_token_ids": list(prompt)}, PARAMS)[0]
            settle(llm)
            answer = output.outputs[0]
            assert output.error is None
            answers.append((list(answer.token_ids), [entry.chosen.logprob for entry in answer.logprobs or []]))
            cached.append(output.num_cached_tokens)
            prompt += [*answer.token_ids, *[(turn + n) % 200 + 20 for n in range(16)]]
    core: Any = llm._core
    mover = core._executor._mover
    return Told(answers, cached, llm.stats(), {} if mover is None else mover._attached.stats()["host"])


def settle(llm: LLM) -> None:
    """Let copies end."""
    while llm._core.has_work:
        llm._core.run_once()


def check_same(got: Told, expected: Told) -> None:
    assert got.cached == expected.cached, "other prefixes were found, so that steps had other shapes"
    for n, (one, other) in enumerate(zip(got.answers, expected.answers)):
        assert one == other, f"turn {n // SESSIONS} of session {n % SESSIONS}, {got.cached[n]} tokens cached"
    assert all(tier.failures == {} for tier in got.stats.tiers.values())


def check_close(got: Told, expected: Told) -> None:
    """The same bits in the first turn. Behind it this engine has blocks that it computed anew, beside those that the
    folder holds under the same keys, and a step of another shape rounds otherwise."""
    assert got.answers[:SESSIONS] == expected.answers[:SESSIONS]
    assert got.cached[:SESSIONS] == expected.cached[:SESSIONS]
    for (ids, logprobs), (other_ids, other_logprobs) in zip(got.answers, expected.answers):
        for n, (one, other) in enumerate(zip(logprobs, other_logprobs)):
            assert abs(one - other) < 0.2
            if ids[n] != other_ids[n]:
                break
    assert all(tier.failures == {} for tier in got.stats.tiers.values())


@pytest.mark.parametrize("family", sorted(TINY_CONFIGS))
def test_what_comes_back_gives_the_same_bits(models: Path, tmp_path: Path, family: str) -> None:
    """From the host, and from a folder through a host tier that holds little more than a session; then by an engine
    that begins with what the folder holds. With recorded steps, prompts in chunks."""
    with engine(models / family, ROOMY) as llm:
        first, second = chats(llm), chats(llm)
        assert llm.info.report["device"].get("recorded batches"), "steps are not recorded"
    with engine(models / family, TIGHT, kv_tier="ram=64MiB") as llm:
        told = chats(llm)
        again = chats(llm)
    if family != "mistral":  # windows alone fit always
        assert told.stats.tiers["host"].hit_tokens > 0
    check_same(told, first)
    check_same(again, second)
    assert told.moved["bytes_staged"] == 0
    blocks = told.stats.tiers["host"].bytes_in // max(1, told.stats.tiers["host"].num_blocks)
    small = f"ram={max(8, 14 * blocks // 2**20 + 1)}MiB,disk={tmp_path / 'kv'}:256MiB"
    with engine(models / family, TIGHT, kv_tier=small) as llm:
        check_same(chats(llm), first)
    warm = []
    for _ in range(2):
        with engine(models / family, TIGHT, kv_tier=small) as llm:
            warm.append(chats(llm))
    check_close(warm[0], second)
    check_same(*warm)
    assert warm[0].stats.tiers["disk"].hit_tokens > 0


@pytest.mark.parametrize("name", ["copy engines", "kernel"])
def test_every_way_to_copy(models: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also the one that measuring at start did not choose."""
    copiers = [copier for copier in block_copiers("cuda") if copier.name == name]
    if not copiers:
        pytest.skip(f"{name}: not here")
    with engine(models / "llama", ROOMY) as llm:
        first = chats(llm)
    monkeypatch.setattr(compose_tiers, "block_copiers", lambda device: copiers)
    with engine(models / "llama", TIGHT, kv_tier="ram=64MiB") as llm:
        told = chats(llm)
    assert told.moved["copied_by"] == (name, name)
    assert told.moved["bytes_in"] > 0
    check_same(told, first)


def test_requests_are_served_while_slots_are_pinned(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores wait for their slots, and what they bring gives the same bits."""

    def slowly(address: int, num_bytes: int) -> int:
        time.sleep(0.05)
        return _cuda_register(address, num_bytes)

    made: list[SlabPinner] = []

    def pinner(buffer: Any, **_: Any) -> SlabPinner:
        made.append(SlabPinner(buffer, slowly, None, slab_bytes=2 << 20))
        return made[-1]

    with engine(models / "llama", ROOMY) as llm:
        first = chats(llm)
    monkeypatch.setattr(cuda_mover, "SlabPinner", pinner)
    with engine(models / "llama", TIGHT, kv_tier="ram=64MiB") as llm:
        assert not made[0].ended, "all was pinned before the first request"
        told = chats(llm)
    check_same(told, first)
    assert told.stats.tiers["host"].hit_tokens > 0


@pytest.mark.parametrize("slabs", [0, 1])
def test_a_slab_that_cannot_be_pinned_is_told_and_served(
    models: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, slabs: int
) -> None:
    count = iter(range(1000))
    monkeypatch.setattr(
        cuda_mover,
        "SlabPinner",
        lambda buffer, **_: SlabPinner(
            buffer, lambda a, n: _cuda_register(a, n) if next(count) < slabs else 2, None, slab_bytes=1 << 18
        ),
    )
    with engine(models / "llama", ROOMY) as llm:
        first = chats(llm)
    with (
        caplog.at_level(logging.WARNING, logger="lamella.kvtier"),
        engine(models / "llama", TIGHT, kv_tier="ram=64MiB") as llm,
    ):
        told = chats(llm)
    check_same(told, first)
    assert told.moved["bytes_staged"] > 0
    assert "of 0.06 GiB of the KV tier's host memory are pinned: CUDA error 2" in caplog.text


def test_rows_that_decode_go_on_while_a_prefix_comes_back(models: Path) -> None:
    """A sequence that enters behind a prefix in the host does not join the others' steps before its copies have ended;
    its answer is right, and so are theirs."""
    long = [(3 * n) % 200 + 20 for n in range(200)]
    with engine(models / "llama", 34, kv_tier="ram=64MiB", max_num_seqs=4) as llm:
        alone = llm.generate({"prompt_token_ids": list(long)}, PARAMS)[0].outputs[0].token_ids
        for s in range(4):
            llm.generate({"prompt_token_ids": [(s + 7 * n) % 200 + 20 for n in range(200)]}, PARAMS)
        settle(llm)
        before = llm.stats().tiers["host"].hit_tokens
        many = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False)
        entries = llm._submit([llm._ask([5 + i, 6, 7], many) for i in range(2)])
        for _ in range(5):
            llm._step()
        (late,) = llm._submit([llm._ask(list(long), PARAMS)])
        while llm._core.has_work:
            llm._step()
        assert llm.stats().tiers["host"].hit_tokens > before
        outputs = [entry.output() for entry in (*entries, late)]
        assert [output.error for output in outputs] == [None] * 3
        assert [len(output.outputs[0].token_ids) for output in outputs] == [60, 60, 20]
        agreed = sum(a == b for a, b in zip(outputs[-1].outputs[0].token_ids, alone))
        assert agreed > 0, "nothing of the answer is that of the request alone"
