"""Draft heads as their papers and formats define them: tiny random checkpoints, and what they must compute.

Each head is a module with the same two functions. They share no code with the networks of the product: plain numpy in
float64, one token at a time, every row from all rows before it, without a KV cache.

    write_checkpoint(folder, seed, **variant) -> Path           config.json and weights, the same for the same seed
    reference_logits(folder, ...) -> [num_rows, vocab_size]     in the target's vocabulary, float64

| module | head, formats | rows of reference_logits |
|---|---|---|
| `eagle3` | EAGLE-3; of speculators, of its authors | the target's rows, then one for each draft id fed back |
| `mtp` | MTP with one module, inside a target's checkpoint; `mtp.*`, `model.layers.N.*` | as `eagle3` |
| `dflash` | DFlash; of speculators, of its authors | one for each draft of a block |
| `dspark` | DSpark; of speculators, of its authors | one for each draft, behind those before |
| `dflash2` | DFlash2; of speculators, of its authors | the same |
| `draft_model` | a small language model; of transformers | one for each token |

Widths are by default those of `testing/tiny_models.py`, so that a head can be put on a tiny target of any family.
What `speculators` computes on the same checkpoints is in tests/testing/draft_heads/golden (`hatch run oracle:golden`).
"""
