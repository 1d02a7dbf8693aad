"""Draft heads as their papers and formats define them: tiny random checkpoints, and what they must compute.

Each head is a module with the same functions. They share no code with the networks of the product: plain numpy in
float64, one token at a time, every row from all rows before it, without a KV cache.

    write_checkpoint(folder, seed, **variant) -> Path        config.json and weights, the same for the same seed
    reference_logits(folder, hidden_states, …) -> [num_rows, vocab_size]     in the target's vocabulary, float64
    reference_drafts(folder, hidden_states, …, num_drafts) -> list[int]      greedy

| module | head | formats | rows of reference_logits |
|---|---|---|---|
| `eagle3` | EAGLE-3 | speculators, authors | the target's rows, then one for each draft id fed back |
| `eagle` | EAGLE, EAGLE-2 | authors | the same |
| `mtp` | MTP, one module | in a target's checkpoint: `mtp.*`, `model.layers.N.*` | the same |
| `dflash` | DFlash | speculators, authors | one for each draft of a block |
| `dspark` | DSpark | speculators, authors | the same, each behind the drafts before it |
| `dflash2` | DFlash2 | speculators, authors | the same: scores of candidates |
| `draft_model` | a small language model | transformers | one for each token |

Positions. In eagle, eagle3 and mtp a row is a hidden state and the token that follows it, at the position of the hidden
state; its logits are of the token after that. Block heads take all hidden states before the last token, and that token.

A head that shares its ends with the target takes them as `target.Ends`. Widths are by default those of
`testing/tiny_models.py`, so that a head can be put on a tiny target of any family. What the package speculators
computes on such checkpoints is kept in tests/testing/draft_heads/golden (`goldens`, `hatch run oracle:golden`).
"""
