"""Every family against transformers: the same logits however the prompt is cut and whoever else is in the batch."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lamella.runner_v2.runner import ModelRunner
from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.testing.hand_scheduler import HandScheduler
from lamella.runner_v2.testing.poison import poison
from lamella.runner_v2.testing.tiny_gguf import write_gguf
from lamella.runner_v2.testing.tiny_models import TINY_CONFIGS, TinyModel, write_folder

FAMILIES = tuple(TINY_CONFIGS)
PROMPT_LEN = 75
SCORED = RowParams(temperature=0.0, num_prompt_logprobs=0)


class Recorder:
    """Keeps every row of logits that the runner makes."""

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logits: list[torch.Tensor] = []
        finish = runner.assembly.model.finish

        def record(carried, logits_idx):
            logits = finish(carried, logits_idx)
            self.logits.append(logits.clone())
            return logits

        monkeypatch.setattr(runner.assembly.model, "finish", record)

    def take(self) -> torch.Tensor:  # [rows since the last take, vocab]
        logits, self.logits = torch.cat(self.logits), []
        return logits


class Bench:
    """A family's tiny model, its reference and a prompt."""

    def __init__(self, family: str, folder: Path) -> None:
        self.model: TinyModel = write_folder(folder, family, seed=1)
        vocab_size = self.model.config["vocab_size"]
        self.prompts = torch.randint(0, vocab_size, (4, PROMPT_LEN), generator=torch.Generator().manual_seed(5))
        with torch.no_grad():
            self.expected = self.model.reference()(self.prompts).logits  # [4, PROMPT_LEN, vocab]
        self.runner = ModelRunner.load(self.model.path, providers=("torch",), max_num_rows=4, num_threads=1)
        self.prompt = self.prompts[0].tolist()

    def hand(self, num_blocks: int = 40) -> HandScheduler:
        hand = HandScheduler(self.runner.execute, self.runner.report().groups, num_blocks)
        self.runner.allocate(hand.layout)
        for cache in self.runner._caches:
            for pool in cache:
                poison(pool)  # what nobody has written must not be read
        return hand


@pytest.fixture(scope="module", params=FAMILIES)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def recorder(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(bench.runner, monkeypatch)


@pytest.fixture
def hand(bench: Bench) -> Iterator[HandScheduler]:
    hand = bench.hand()
    yield hand
    for row in list(hand.ids):
        hand.remove(row)
    hand.step({})


def assert_close(ours: torch.Tensor, reference: torch.Tensor) -> None:
    assert ours.shape == reference.shape
    # the tiny models' logits reach tens, so the bound is relative to them
    scale = max(1.0, float(reference.abs().max()) / 10)
    assert float((ours - reference).abs().max()) <= 1e-4 * scale


@pytest.mark.parametrize(
    "chunks", [[PROMPT_LEN], [40, 17, *[1] * 18], [1] * PROMPT_LEN], ids=["whole", "chunks", "single steps"]
)
def test_prompt_logits(bench: Bench, recorder: Recorder, hand: HandScheduler, chunks: list[int]) -> None:
    """The logits behind every prompt position, cut in any way."""
    row = hand.add(bench.prompt, SCORED)
    hand.prefill(row, chunks)
    assert_close(recorder.take(), bench.expected[0])


def test_mixed_batch(bench: Bench, recorder: Recorder, hand: HandScheduler) -> None:
    """Decoding rows, a chunk and a whole prompt in one step, in changing order; rows and blocks are reused."""
    for round_idx in range(2):
        prompts = bench.prompts.tolist()
        first = hand.add(prompts[0][:60])
        second = hand.add(prompts[1][:30])
        hand.step({second: 30, first: 37})
        hand.step({first: 23})
        recorder.take()
        # teacher forcing: what was sampled is replaced by the prompt's own ids
        force(hand, bench, first, prompts[0][60])
        force(hand, bench, second, prompts[1][30])
        third, fourth = hand.add(prompts[2][:44]), hand.add(prompts[3])
        order = {first: 1, third: 20, fourth: 75, second: 1}
        if round_idx:
            order = dict(reversed(order.items()))
        hand.step(order)
        place = {row: i for i, row in enumerate(row for row in order if row != third)}
        logits = recorder.take()
        assert_close(logits[place[first]], bench.expected[0, 60])
        assert_close(logits[place[second]], bench.expected[1, 30])
        assert_close(logits[place[fourth]], bench.expected[3, 74])
        hand.step({third: 24})
        assert_close(recorder.take()[0], bench.expected[2, 43])
        for row in (first, second, third, fourth):
            hand.remove(row)


def force(hand: HandScheduler, bench: Bench, row: int, token_id: int) -> None:
    """Replace the id that the row has just sampled."""
    state = bench.runner._state
    hand.ids[row][-1] = token_id
    state.all_token_ids[row, len(hand.ids[row]) - 1] = token_id


def test_greedy_ids(bench: Bench, hand: HandScheduler) -> None:
    """Generated ids are those of transformers, also after a preemption (the row computes its own output again)."""
    prompt = bench.prompt[:20]
    with torch.no_grad():
        ids = torch.tensor([prompt])
        reference = bench.model.reference()
        for _ in range(12):
            ids = torch.cat([ids, reference(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    expected = ids[0].tolist()
    row = hand.add(prompt)
    hand.prefill(row, [20])
    hand.decode([row], 5)
    known = hand.ids[row]
    hand.remove(row)
    row = hand.add(known, prompt_len=20)
    hand.prefill(row, [len(known)])
    hand.decode([row], 32 - len(hand.ids[row]))
    assert hand.ids[row] == expected


def test_prefix_hit(bench: Bench, recorder: Recorder, hand: HandScheduler) -> None:
    """A row that finds part of its prompt in blocks computes the rest."""
    first = hand.add(bench.prompt)
    hand.prefill(first, [PROMPT_LEN])
    recorder.take()
    blocks = [table[:3] for table in hand.tables[first]]
    second = hand.add(bench.prompt, SCORED, computed_len=48, tables=blocks)
    hand.prefill(second, [PROMPT_LEN - 48])
    assert_close(recorder.take(), bench.expected[0, 48:])
    for group in range(len(hand.groups)):
        del hand.tables[second][group][:3]  # they belong to the first row


MIXED = {"*": "q4_1", "embed": "q8_0", "k": "q5_0", "v": "q5_1", "up": "float16", "down": "q4_0"}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_gguf(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with types mixed inside one product: the reference ops work on exactly its dequantised weights."""
    model = write_gguf(tmp_path / "tiny.gguf", family, seed=2, formats=MIXED)
    runner = ModelRunner.load(model.path, dtype="float32", num_threads=1)
    hand = HandScheduler(runner.execute, runner.report().groups)
    runner.allocate(hand.layout)
    recorder = Recorder(runner, monkeypatch)
    prompt = torch.randint(0, model.config["vocab_size"], (40,), generator=torch.Generator().manual_seed(3))
    hand.prefill(hand.add(prompt.tolist(), SCORED), [23, 17])
    with torch.no_grad():
        assert_close(recorder.take(), model.reference()(prompt.unsqueeze(0)).logits[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_weights(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense 16-bit products stay near the float32 ones."""
    model = write_folder(tmp_path, "llama", dtype=dtype)
    runner = ModelRunner.load(model.path, dtype=dtype, num_threads=1)
    hand = HandScheduler(runner.execute, runner.report().groups)
    runner.allocate(hand.layout)
    recorder = Recorder(runner, monkeypatch)
    prompt = list(range(3, 43))
    hand.prefill(hand.add(prompt, SCORED), [40])
    with torch.no_grad():
        expected = model.reference()(torch.tensor([prompt])).logits[0]
    error = (recorder.take() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert 1e-6 < float(error) < (3e-2 if dtype == "bfloat16" else 4e-3)
