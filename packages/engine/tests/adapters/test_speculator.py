"""The adapter between the runner's Speculator and specdec."""

from __future__ import annotations

import json

import pytest
import torch

from lamella.engine.adapters.speculator import DrafterSpeculator, from_config
from lamella.engine.errors import StartError
from lamella.runner_v2.protocols import Speculator, SpecView
from lamella.specdec.testing import ScriptedDrafter, ScriptedModel

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 3}


def view(*rows: list[int], first_row: int = 0, generation: int = 0) -> SpecView:
    return SpecView(
        rows=list(range(first_row, first_row + len(rows))),
        generations=[generation] * len(rows),
        token_ids=rows,
        new_counts=[len(ids) for ids in rows],
    )


def test_needs_say_what_the_runner_must_give():
    speculator: Speculator = from_config(NGRAM)
    assert (speculator.needs.max_drafts, speculator.needs.host_ids, speculator.needs.one_hot) == (3, True, True)
    assert speculator.needs.lookahead == 0


def test_drafts_are_padded_to_one_width_whatever_the_lengths():
    speculator = from_config(json.dumps(NGRAM))
    rows = view([1, 2, 3, 1, 2], [4, 5, 6], [9, 9, 9])
    speculator.observe(rows)
    drafts = speculator.propose(rows, [3, 3, 1])
    assert drafts.ids.tolist() == [[3, 1, 2], [-1, -1, -1], [9, -1, -1]]
    assert drafts.ids.dtype == torch.int32
    assert list(drafts.lens) == [3, 0, 1]
    assert drafts.probs is None
    assert speculator.propose(rows, [0, 0, 0]).ids.tolist() == [[-1] * 3] * 3
    empty = view()
    assert speculator.propose(empty, []).ids.shape == (0, 3)


def test_forgotten_rows_and_new_generations_start_afresh():
    speculator = from_config(NGRAM)
    speculator.observe(view([1, 1, 1], [1, 1, 1]))
    speculator.forget([0])
    speculator.observe(view([2, 2], first_row=1, generation=1))
    assert speculator.propose(view([1, 1, 1]), [3]).lens == [0]
    assert speculator.propose(view([2, 2], first_row=1, generation=1), [3]).ids.tolist() == [[2, 2, 2]]


def test_verify_judges_each_kind_of_row():
    """Rows: all accepted; rejected at once; a prompt chunk without logits; decode without drafts; trimmed to 1."""
    speculator = DrafterSpeculator(ScriptedDrafter(lambda ids: [], 3))
    drafts = torch.tensor([[5, 6, -1], [5, 6, 7], [-1, -1, -1], [-1, -1, -1], [8, 8, 8]], dtype=torch.int32)
    starts = torch.tensor([0, 3, 7, 7, 8, 10], dtype=torch.int32)
    target = torch.tensor([5, 6, 1, 9, 6, 7, 2, 4, 8, 3], dtype=torch.int32)
    verdict = speculator.verify(target, None, drafts, None, starts)
    assert verdict.num_accepted.tolist() == [2, 0, 0, 0, 1]
    assert verdict.next_ids.tolist() == [1, 9, -1, 4, 3]


@pytest.mark.parametrize("config", [NGRAM, SUFFIX], ids=["ngram", "suffix"])
def test_batched_decoding_gives_each_row_its_own_plain_output(config):
    """A loop as the runner's: several rows, every logits row sampled, verified in one call."""
    model = ScriptedModel(5, seed=1, memory=1)
    speculator = from_config(config)
    prompts, goal = [[0, 1], [2], [3, 3, 3]], 30
    expected = []
    for seed, prompt in enumerate(prompts):
        ids = list(prompt)
        while len(ids) < goal:
            ids.append(model.sample(ids, seed))
        expected.append(ids)
    rows = [list(prompt) for prompt in prompts]
    num_accepted = 0
    while min(map(len, rows)) < goal:
        step = view(*rows)
        speculator.observe(step)
        drafts = speculator.propose(step, [3] * len(rows))
        starts, target = [0], []
        for seed, (ids, row_drafts, count) in enumerate(zip(rows, drafts.ids.tolist(), drafts.lens)):
            target += [model.sample([*ids, *row_drafts[:i]], seed) for i in range(count + 1)]
            starts.append(len(target))
        verdict = speculator.verify(torch.tensor(target), None, drafts.ids, None, torch.tensor(starts))
        for ids, row_drafts, accepted, next_id in zip(
            rows, drafts.ids.tolist(), verdict.num_accepted.tolist(), verdict.next_ids.tolist()
        ):
            ids += [*row_drafts[:accepted], next_id]
            num_accepted += accepted
    assert [ids[:goal] for ids in rows] == expected
    assert num_accepted > 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{nonsense", "not valid JSON"),
        ({**NGRAM, "method": "eagle3"}, "'eagle3'"),
        ({**NGRAM, "surprise": 1}, "'surprise'"),
        ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens"),
    ],
)
def test_mistakes_end_the_start_with_a_line_that_names_them(config, message):
    with pytest.raises(StartError, match=message):
        from_config(config)
