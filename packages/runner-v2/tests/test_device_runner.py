"""The runner of a device that runs behind the host, played on a CPU: several steps in flight, recorded steps, staged
writes, rows of one token first. What it emits is what the same kernels emit step by step."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lamella.runner_v2.output_copy import HostResult, OutputCopy
from lamella.runner_v2.runner import ModelRunner
from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.step import Mask, NewBlocks, NewRow, Step, StepOutput, Work
from lamella.runner_v2.testing.fake_device import FAKE_DEVICE, FakeDevice, fake_device
from lamella.runner_v2.testing.hand_scheduler import GREEDY, HandScheduler
from lamella.runner_v2.testing.tiny_models import TinyModel, write_folder
from lamella.runner_v2.writes import DirectWrites, StagedWrites

PARAMS = [
    GREEDY,
    RowParams(temperature=0.8, seed=11, top_k=20),
    RowParams(temperature=1.0, seed=12, top_p=0.9),
    RowParams(temperature=0.7, seed=13, frequency_penalty=0.5, repetition_penalty=1.3),
    RowParams(temperature=0.0, num_logprobs=3),
    RowParams(temperature=0.9, seed=5, min_p=0.05, bad_words=((7,), (3, 4))),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_folder(tmp_path_factory.mktemp("llama"), "llama", seed=3)


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with fake_device() as platform:
        yield platform


def load(
    model: TinyModel, device: FakeDevice, graph_rows: tuple[int, ...] = (1, 2, 4, 8), **options: Any
) -> ModelRunner:
    options = {"max_num_rows": 8, "num_threads": 1, "graph_rows": graph_rows, **FAKE_DEVICE, **options}
    return ModelRunner.load(model.path, platform=device, **options)


class Books:
    """Plans steps some way ahead of what it has read, as a scheduler does, and writes down what rows emit."""

    def __init__(self, runner: ModelRunner, depth: int, num_blocks: int = 96) -> None:
        self.runner = runner
        self.depth = depth
        (group,) = runner.report().groups
        self.block_size = group.block_size
        hand = HandScheduler(runner.execute, runner.report().groups, num_blocks)
        runner.allocate(hand.layout)
        self.free = list(range(1, num_blocks))
        self.rows: dict[int, dict[str, Any]] = {}
        self.done: dict[str, list[int]] = {}
        self.in_flight: deque[tuple[Step, list[str]]] = deque()
        self.generations = [0] * 8
        self.added: list[NewRow] = []
        self.removed: list[tuple[int, int]] = []
        self.step_id = 0
        self.last: Work | None = None

    def add(self, name: str, prompt: list[int], params: RowParams, output_len: int) -> None:
        row = next(r for r in range(8) if r not in self.rows)
        self.generations[row] += 1
        self.rows[row] = {"name": name, "ids": list(prompt), "planned": 0, "end": len(prompt) + output_len, "table": []}
        self.rows[row]["prompt"] = len(prompt)
        self.added.append(NewRow(row, self.generations[row], list(prompt), len(prompt), 0, params, ([],)))

    def step(self, query_lens: dict[int, int]) -> None:
        """Launch a step; read the oldest one if there are `depth` in flight."""
        new_blocks = []
        for row, n in query_lens.items():
            books = self.rows[row]
            books["planned"] += n
            start = len(books["table"])
            while len(books["table"]) * self.block_size < books["planned"]:
                books["table"].append(self.free.pop())
            if len(books["table"]) > start:
                new_blocks.append(NewBlocks(row, 0, books["table"][start:], start))
        zeros = (0,) * len(query_lens)
        work = Work(tuple(query_lens), tuple(query_lens.values()), zeros, zeros)
        self.step_id += 1
        same = work == self.last
        step = Step(self.step_id, tuple(self.removed), tuple(self.added), tuple(new_blocks), None if same else work)
        self.last = work
        self.removed, self.added = [], []
        self.runner.launch(step)
        self.in_flight.append((step, [self.rows[row]["name"] for row in query_lens]))
        if len(self.in_flight) >= self.depth:
            self.read()

    def read(self) -> StepOutput:
        step, names = self.in_flight.popleft()
        output = self.runner.finish()
        assert output.step_id == step.step_id
        end = 0
        for name, count in zip(names, output.num_tokens, strict=True):
            start, end = end, end + count
            for books in self.rows.values():
                if books["name"] == name:
                    books["ids"] += output.token_ids[start:end]
        return output

    def retire(self) -> None:
        """Rows whose last token is planned leave; later steps in flight may still compute them."""
        for row, books in list(self.rows.items()):
            if len(books["ids"]) >= books["end"]:
                self.removed.append((row, self.generations[row]))
                self.done[books["name"]] = books["ids"][: books["end"]]
                self.free += books["table"]
                del self.rows[row]


def serve(
    model: TinyModel, device: FakeDevice, depth: int, graph_rows: tuple[int, ...], seed: int
) -> dict[str, list[int]]:
    """Sequences come and go; chunks and decoding rows mix in any order."""
    rng = random.Random(seed)
    books = Books(load(model, device, graph_rows), depth)
    waiting = []
    for i in range(14):
        params = PARAMS[i % len(PARAMS)]
        waiting.append((f"{i}", [rng.randrange(200) for _ in range(rng.randint(1, 40))], params, rng.randint(1, 12)))
    schedule = random.Random(seed + 1)
    while waiting or books.rows or books.in_flight:
        while waiting and len(books.rows) < 6 and schedule.random() < 0.7:
            books.add(*waiting.pop())
        work: dict[int, int] = {}
        for row, row_books in books.rows.items():
            left = row_books["prompt"] - row_books["planned"]
            if left > 0:
                work[row] = min(left, schedule.choice((1, 3, 16)))
            elif row_books["planned"] < row_books["end"] + depth:
                work[row] = 1
        if work:
            books.step(work)
        while books.in_flight and (not work or schedule.random() < 0.1):
            books.read()
        books.retire()
    return books.done


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_steps_in_flight_emit_what_single_steps_emit(model: TinyModel, device: FakeDevice, depth: int) -> None:
    """The schedules differ with the depth, and so do batches and chunks: what every sequence gets is the same."""
    alone = {}
    for name, ids in serve(model, FakeDevice(), depth, (), seed=1).items():
        alone[name] = ids
    together = serve(model, device, depth, (1, 2, 4, 8), seed=1)
    assert len(together) == 14
    assert together == alone
    assert device.recorder is not None
    assert device.recorder.num_recorded == 8
    assert device.recorder.num_replayed > 20


def test_depth_does_not_matter(model: TinyModel, device: FakeDevice) -> None:
    assert serve(model, device, 3, (8,), seed=7) == serve(model, FakeDevice(), 1, (8,), seed=7)


def test_padding_writes_nothing(model: TinyModel, device: FakeDevice) -> None:
    runner = load(model, device, (8,))
    hand = HandScheduler(runner.execute, runner.report().groups, 64)
    runner.allocate(hand.layout)
    rows = [hand.add([5, 6, 7 + i]) for i in range(3)]
    hand.step(dict.fromkeys(rows, 3))
    before = [tensor.clone() for cache in runner._caches for tensor in cache]
    hand.decode(rows, 4)
    used = {block for row in rows for block in hand.tables[row][0]}
    spared = [block for block in range(64) if block not in used]
    for old, new in zip(before, (tensor for cache in runner._caches for tensor in cache), strict=True):
        assert torch.equal(old[spared], new[spared])
    assert int(runner._state.computed_len[-1]) == 0


def test_steady_steps_move_nothing(model: TinyModel, device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in which no row changes and no block joins uploads nothing."""
    books = Books(load(model, device), 2)
    for i in range(3):
        books.add(str(i), [3 + i, 4], GREEDY, 40)
    books.step({0: 2, 1: 2, 2: 2})
    books.step({0: 1, 1: 1, 2: 1})
    books.step({0: 1, 1: 1, 2: 1})
    uploads = []
    original = StagedWrites.upload
    monkeypatch.setattr(StagedWrites, "upload", lambda self, arrays: uploads.append(1) or original(self, arrays))
    for _ in range(5):
        books.step({0: 1, 1: 1, 2: 1})
    assert not uploads
    for _ in range(20):
        books.step({0: 1, 1: 1, 2: 1})
    assert len(uploads) == 1, "one block for each row, all at once"


def test_masks_on_recorded_steps(model: TinyModel, device: FakeDevice) -> None:
    runner = load(model, device)
    hand = HandScheduler(runner.execute, runner.report().groups, 64)
    runner.allocate(hand.layout)
    row = hand.add([1, 2, 3])
    hand.step({row: 3})
    words = np.zeros(-(-runner.model_config.vocab_size // 32), "<i4")
    words[2] = 1 << 5
    hand.execute = lambda step: runner.execute(step, (Mask(row, 0, words.tobytes()),))
    output = hand.step({row: 1}, masked=(row,))
    assert output.token_ids == [69]
    hand.execute = runner.execute
    hand.step({row: 1})
    assert hand.ids[row][4] == 69


def test_output_is_in_the_order_of_work(model: TinyModel, device: FakeDevice) -> None:
    """Rows of one token are computed first, and the scheduler does not see it."""
    runner = load(model, device)
    hand = HandScheduler(runner.execute, runner.report().groups, 64)
    runner.allocate(hand.layout)
    chunk, decoding, last = hand.add(list(range(10))), hand.add([1, 2]), hand.add([9, 8, 7, 6])
    hand.step({decoding: 2})
    output = hand.step({chunk: 6, decoding: 1, last: 4})
    assert output.rows == (chunk, decoding, last)
    assert output.num_tokens == [0, 1, 1]
    alone = load(model, FakeDevice(), ())
    twin = HandScheduler(alone.execute, alone.report().groups, 64)
    alone.allocate(twin.layout)
    row = twin.add([9, 8, 7, 6])
    assert twin.step({row: 4}).token_ids == output.token_ids[1:]


class TestWrites:
    @pytest.mark.parametrize("writes", [DirectWrites(), StagedWrites("cpu")])
    def test_later_writes_win(self, writes: DirectWrites | StagedWrites) -> None:
        a, b = torch.zeros(4, 5, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
        writes.put(a, 3, [1, 2, 3, 4])
        writes.put(b, 1, np.array([9, 8]))
        writes.put(a, 5, [7, 7, 7, 7])
        writes.put(a, 19, [5])
        writes.put(a, 0, [])
        writes.flush()
        assert a.view(-1).tolist() == [0, 0, 0, 1, 2, 7, 7, 7, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5]
        assert b.tolist() == [0, 9, 8]
        writes.flush()
        assert b.tolist() == [0, 9, 8]

    @pytest.mark.parametrize("span_from", [1024, 6])
    def test_random_writes_equal_numpy(self, monkeypatch: pytest.MonkeyPatch, span_from: int) -> None:
        monkeypatch.setattr("lamella.runner_v2.writes._SPAN_FROM", span_from)
        rng = np.random.default_rng(0)
        expected, tensor, writes = np.zeros(200, np.int32), torch.zeros(200, dtype=torch.int32), StagedWrites("cpu")
        for _ in range(50):
            for _ in range(rng.integers(1, 6)):
                start = int(rng.integers(0, 190))
                values = rng.integers(0, 1000, int(rng.integers(1, 10))).astype(np.int32)
                expected[start : start + len(values)] = values
                writes.put(tensor, start, values)
            writes.flush()
            assert tensor.numpy().tolist() == expected.tolist()

    def test_uploads_keep_types_and_shapes(self) -> None:
        arrays = [
            np.arange(3, dtype=np.int64),
            np.ones((2, 3), np.bool_),
            np.zeros((4, 0), np.int64),
            np.arange(5, dtype=np.int32),
        ]
        for array, tensor in zip(arrays, StagedWrites("cpu").upload(arrays), strict=True):
            assert tensor.numpy().dtype == array.dtype
            assert tensor.shape == array.shape
            assert np.array_equal(tensor.numpy(), array)


def test_no_step_is_told_before_the_device_has_ended_it(
    model: TinyModel, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of a prompt bring no ids, and yet whoever hears of them copies what they wrote."""
    waited: list[int] = []

    class Watched(OutputCopy):
        def wait(self) -> HostResult:
            waited.append(len(self._copies[0]))
            return super().wait()

    monkeypatch.setattr("lamella.runner_v2.runner.OutputCopy", Watched)
    runner = load(model, device)
    hand = HandScheduler(runner.execute, runner.report().groups, 96)
    runner.allocate(hand.layout)
    row = hand.add([5 + n % 90 for n in range(50)])
    for length in (20, 20, 10):
        hand.step({row: length})
    assert waited == [0, 0, 1]
    assert [output.num_tokens for output in hand.outputs] == [[0], [0], [1]]
