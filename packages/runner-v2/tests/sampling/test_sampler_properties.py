"""Random lives of rows: the sampler always chooses what the definitions say of the rows' own histories."""

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lamella.runner_v2.sampling.host import pick_kernels
from lamella.runner_v2.sampling.kernels import TorchKernels
from lamella.runner_v2.sampling.params import RowParams
from lamella.runner_v2.sampling.rows import LogitsRows, SampleResult
from lamella.runner_v2.sampling.sampler import Sampler
from lamella.runner_v2.step import Mask
from lamella.runner_v2.testing import sampling_oracle as oracle

VOCAB = 23
NUM_ROWS = 5

ids = st.integers(0, VOCAB - 1)
few_ids = st.lists(ids, max_size=4)
off_or = st.sampled_from


@st.composite
def row_params(draw: st.DrawFn) -> RowParams:
    return RowParams(
        temperature=draw(off_or([0.0, 0.0, 0.7, 1.0, 3.0])),
        top_k=draw(off_or([0, 1, 4, VOCAB, VOCAB + 5])),
        top_p=draw(off_or([1.0, 1.0, 0.3, 0.9])),
        min_p=draw(off_or([0.0, 0.0, 0.1])),
        repetition_penalty=draw(off_or([1.0, 1.0, 1.5, 0.8])),
        frequency_penalty=draw(off_or([0.0, 0.0, 0.5, -0.5])),
        presence_penalty=draw(off_or([0.0, 0.0, 1.0])),
        logit_bias=tuple(draw(st.dictionaries(ids, st.sampled_from([-3.0, 2.0]), max_size=3)).items()),
        bad_words=tuple(draw(st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=3))),
        allowed_ids=draw(st.none() | st.lists(ids, min_size=3, max_size=12).map(tuple)),
        min_tokens=draw(st.sampled_from([0, 0, 3])),
        stop_ids=tuple(draw(few_ids)),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        num_logprobs=draw(st.sampled_from([None, None, 0, 2, -1])),
    )


class Lives(RuleBasedStateMachine):
    """Rows enter, leave, change owner and sample, with and without drafts and masks, on both kernel sets at once."""

    def __init__(self) -> None:
        super().__init__()
        kernel_sets = {k.name: k for k in (TorchKernels(), pick_kernels("cpu"))}
        self.samplers = [Sampler(VOCAB, NUM_ROWS, "cpu", 2, k) for k in kernel_sets.values()]
        self.owners: dict[int, tuple[RowParams, list[int], list[int]]] = {}

    @rule(
        row=st.integers(0, NUM_ROWS - 1),
        params=row_params(),
        prompt=st.lists(ids, min_size=1, max_size=6),
        output=few_ids,
    )
    def add(self, row: int, params: RowParams, prompt: list[int], output: list[int]) -> None:
        for sampler in self.samplers:
            sampler.add(row, params, prompt, output)
        self.owners[row] = (params, list(prompt), list(output))

    @rule(row=st.integers(0, NUM_ROWS - 1))
    def remove(self, row: int) -> None:
        for sampler in self.samplers:
            sampler.remove(row)
        self.owners.pop(row, None)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), seed=st.integers(0, 1000), with_masks=st.booleans())
    def step(self, data: st.DataObject, seed: int, with_masks: bool) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.owners)), min_size=1, unique=True))
        drafts = [data.draw(st.lists(ids, max_size=2)) for _ in rows]
        rng = np.random.default_rng(seed)
        first = [len(self.owners[row][1]) + len(self.owners[row][2]) for row in rows]
        layout = LogitsRows.of(rows, first, drafts)
        raw = np.round(rng.standard_normal((len(layout.rows), VOCAB)) * 3, 1).astype(np.float32)
        allowed = rng.random(raw.shape) < 0.8
        masked = rng.random(len(raw)) < 0.5 if with_masks else np.zeros(len(raw), bool)
        masks = [
            Mask(int(layout.rows[i]), int(layout.draft_idx[i]), _packed(allowed[i])) for i in np.flatnonzero(masked)
        ]
        edited = [raw.copy() for _ in self.samplers]
        results = [s.sample(torch.from_numpy(x), layout, masks) for s, x in zip(self.samplers, edited)]
        for result, x in zip(results[1:], edited[1:]):
            assert torch.equal(result.ids, results[0].ids)
            assert torch.equal(result.status, results[0].status)
            np.testing.assert_array_equal(x, edited[0])
        for i in range(len(raw)):
            self._check(results[0], i, layout, raw[i], edited[0][i], allowed[i] if masked[i] else None)

        accepted = [data.draw(st.integers(0, len(d))) for d in drafts]
        emitted = [[*d[:a], data.draw(ids)] for d, a in zip(drafts, accepted)]
        for row, new in zip(rows, emitted):
            self.owners[row][2].extend(new)
        for sampler in self.samplers:
            sampler.advance(rows, [len(new) for new in emitted], [t for new in emitted for t in new])

    def _check(
        self,
        result: SampleResult,
        i: int,
        layout: LogitsRows,
        raw: np.ndarray,
        edited: np.ndarray,
        allowed: np.ndarray | None,
    ) -> None:
        params, prompt, output = self.owners[int(layout.rows[i])]
        expected = oracle.transformed(raw.tolist(), params, prompt, output + layout.prefix(i), allowed)
        np.testing.assert_allclose(edited, expected, rtol=1e-5, atol=1e-5)
        failed = dict(result.failed)
        if max(expected) == float("-inf"):
            assert i in failed
            return
        assert i not in failed
        token_id = int(result.ids[i])
        assert token_id in oracle.choices(edited.tolist(), params, int(layout.positions[i]))
        entry = None if result.logprobs is None else result.logprobs[i]
        assert (entry is None) == (params.num_logprobs is None)
        if entry is not None and params.num_logprobs is not None:
            assert entry.token_ids[0] == token_id
            k = VOCAB if params.num_logprobs < 0 else params.num_logprobs
            assert len(entry.token_ids) == len(entry.logprobs) == 1 + k
            assert abs(entry.logprobs[0] - oracle.logprobs(raw.tolist())[token_id]) < 1e-5
            assert entry.rank == int((raw >= raw[token_id]).sum())

    @invariant()
    def nothing_is_kept_of_free_rows(self) -> None:
        for sampler in self.samplers:
            assert all(t.num_active <= len(self.owners) for t in sampler._transforms)


def _packed(allowed: np.ndarray) -> bytes:
    bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
    bits[:VOCAB] = allowed
    return np.packbits(bits, bitorder="little").tobytes()


Lives.TestCase.settings = settings(
    max_examples=30, stateful_step_count=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestLives = Lives.TestCase
