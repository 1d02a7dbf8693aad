"""The law that logits rows are sampled from, spelt out over the vocabulary: for who judges drafts by probabilities.

Behind all edits of the logits, min-p, top-k and top-p; a greedy row's is all on the id that it chose.
"""

from __future__ import annotations

import numpy as np
import torch

from lamella.runner_v2.sampling.choice import Choice
from lamella.runner_v2.sampling.kernels import kept


def sampled_law(
    logits: torch.Tensor,  # [L, V] float32, edited as they were sampled from
    ids: torch.Tensor,  # [L] int32 chosen
    choice: Choice,
) -> torch.Tensor:  # [L, V] float32
    """Probability of each id at each logits row; rows that failed have what falls out of their logits."""
    law = torch.zeros_like(logits)
    law.scatter_(1, ids.long()[:, None], 1.0)
    random = choice.temperature > 0
    limited = (choice.top_k > 0) | (choice.top_p < 1.0)
    for rows, narrow in ((np.flatnonzero(random & limited), True), (np.flatnonzero(random & ~limited), False)):
        if not len(rows):
            continue
        index = torch.as_tensor(rows, device=logits.device)
        values, token_ids, keep = kept(logits[index], choice, rows, narrow)
        temperature = torch.from_numpy(choice.temperature[rows]).to(logits.device)[:, None].double()
        scaled = torch.where(keep, values.double() / temperature, -torch.inf)
        probs = torch.zeros((len(rows), logits.shape[1]), dtype=torch.float64, device=logits.device)
        law[index] = probs.scatter_(1, token_ids.long(), torch.softmax(scaled, dim=1)).float()
    return law
