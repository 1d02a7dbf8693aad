"""The reference of a draft model: transformers' model of the same folder, and its greedy continuation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from lamella.runner_v2.testing.draft_heads import draft_model

IDS = [5, 300, 17, 17, 0, 41]


@pytest.mark.parametrize(
    "variant", [{}, {"layer": "qwen3", "tied": False}, {"attention_bias": True, "num_layers": 3, "dtype": "bfloat16"}]
)
def test_transformers(tmp_path: Path, variant: dict[str, Any]) -> None:
    folder = draft_model.write_checkpoint(tmp_path, 3, **variant)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
        # no end of sequence is known to the model: it goes on
        prompt = {"input_ids": torch.tensor([IDS]), "attention_mask": torch.ones(1, len(IDS), dtype=torch.long)}
        continued = model.generate(**prompt, do_sample=False, max_new_tokens=5)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(draft_model.reference_logits(folder, IDS), expected, atol=3e-5)
    assert draft_model.reference_drafts(folder, IDS, 5) == continued[0, len(IDS) :].tolist()


def test_positions(tmp_path: Path) -> None:
    folder = draft_model.write_checkpoint(tmp_path)
    logits = draft_model.reference_logits(folder, IDS)
    np.testing.assert_allclose(draft_model.reference_logits(folder, IDS, range(9, 15)), logits, atol=1e-12)
    gap = draft_model.reference_logits(folder, IDS, [0, 1, 2, 4, 5, 6])
    assert np.array_equal(gap[:3], logits[:3])
    assert np.abs(gap[3] - logits[3]).max() > 1e-4
