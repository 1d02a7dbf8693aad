"""The whole language between a scheduler and the runner. Plain data: no torch, no clock.

A device row belongs to one sequence at a time; its generation is raised when it changes owner. A step carries only
what changed. Three lengths of a sequence:

    [0, computed_len)            in the KV cache
    [0, committed_len)           ids that the host knows
    [0, planned_len)             every draft in flight counted as accepted (host's upper bound)

The runner derives ids, positions and slots of a step from its own rows; the scheduler only says how many tokens of
each row the step computes. So a step in which no row changes is `Step(step_id)`: constant size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from lamella.runner_v2.sampling.params import RowParams

GroupKind = Literal["full", "sliding", "compressed", "state"]


class KvGroup(NamedTuple):
    """Caches that share block table, tokens per block, row format and retention."""

    name: str
    kind: GroupKind
    block_size: int
    """Tokens per block."""
    bytes_per_block: int
    """Over all layers of the group, all tensors of this rank."""
    layers: tuple[int, ...]
    window: int | None = None
    """Sliding groups: a query at position p reads [p - window + 1, p]."""
    row_format: str = "float32"


class RankReport(NamedTuple):
    """What a rank says after loading, before KV is allocated."""

    rank: int
    groups: tuple[KvGroup, ...]
    free_bytes: int
    """Memory that the KV cache could take on this rank."""
    weight_bytes: int
    vocab_size: int
    device: str
    lookahead: int = 0
    """Slots beyond planned_len that a drafter may write."""


class KvLayout(NamedTuple):
    """How many blocks of each group to allocate, in the order of RankReport.groups. Block 0 of a group is the null
    block: never handed out, read only where a mask hides it."""

    num_blocks: tuple[int, ...]


class NewRow(NamedTuple):
    """A sequence enters a device row (first time, or again after a preemption)."""

    row: int
    generation: int
    token_ids: Sequence[int]
    """Prompt and committed output: a list, or an array of 32-bit numbers, which is read at once."""
    prompt_len: int
    computed_len: int
    """Tokens whose KV already lies in blocks (prefix hit)."""
    params: RowParams
    blocks: tuple[list[int], ...]
    """Block table so far, per group; 0 stands for blocks left of a sliding window."""
    adapter_id: int = 0
    draft_method: int = -1
    """Place of the one drafting method that may propose for it; -1: each."""


class NewBlocks(NamedTuple):
    """Blocks that join a row's table in one group: table[start : start + len(block_ids)] = block_ids.

    start is where the table ends for the scheduler, which may lie left of what it sent before: blocks that held only
    rejected drafts can have been taken back.
    """

    row: int
    group: int
    block_ids: list[int]
    start: int


class Work(NamedTuple):
    """What a step computes, as parallel tuples in batch order.

    query_lens[i] tokens of row rows[i] from its computed_len on; the last verify_lens[i] of them are drafts
    (so a decode row has query_len 1 + verify_len). They are the first verify_lens[i] drafts that the row holds; where
    it holds fewer (a step planned before the count was known), the missing ones are -1 and count as rejected. At the
    end of the step up to propose_lens[i] drafts are made.
    """

    rows: tuple[int, ...]
    query_lens: tuple[int, ...]
    verify_lens: tuple[int, ...]
    propose_lens: tuple[int, ...]


class Common(NamedTuple):
    """What replicas in lock-step have agreed on."""

    num_tokens: int = 0
    """Padded number of tokens; 0: no padding."""
    skip_drafts: bool = False
    dummy: bool = False


class Step(NamedTuple):
    """One round of work. Order of effects: removed, added, new_blocks, then the work."""

    step_id: int
    removed: tuple[tuple[int, int], ...] = ()
    """(row, generation) of rows that become free."""
    added: tuple[NewRow, ...] = ()
    new_blocks: tuple[NewBlocks, ...] = ()
    work: Work | None = None
    """None: same rows and lengths as the step before."""
    masked_rows: tuple[int, ...] = ()
    """Rows whose sampling waits for a mask given by provide()."""
    common: Common = Common()
    waits_for_copies: bool = False
    """Some row reads blocks that are on their way from the host tier."""


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position; the sampled (or given prompt) token comes first, then the best ones."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """1-based rank of the first token."""


class StepOutput(NamedTuple):
    """Result of a step, in the order of its Work."""

    step_id: int
    rows: tuple[int, ...]
    generations: tuple[int, ...]
    num_tokens: list[int]
    """Tokens emitted per row: 0 for an unfinished prompt chunk, else accepted drafts + 1."""
    token_ids: list[int]
    """Emitted ids of all rows, one after another."""
    num_drafts: list[int] | None = None
    """Drafts that each row now holds for its next step; None: none anywhere."""
    draft_ids: list[int] | None = None
    """Their ids, row after row, where the drafter works on the host; None: not known here."""
    logprobs: list[TokenLogprobs | None] | None = None
    """Per emitted id."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None
    """Row -> entries for the prompt tokens whose predecessor was computed in this step, in order."""
    failed: tuple[tuple[int, str], ...] = ()
    """(row, reason): rows whose result is unusable (NaN logits, no token allowed); the others are good."""
    seconds: float = 0.0
    """Time that the runner worked on it."""
    forbidden: tuple[int, ...] = ()
    """Rows of `failed` that have no token to choose: every logit is -inf."""
    draft_methods: list[int] | None = None
    """Place of the drafting method that each row's drafts come from; None: there is but one."""
    draft_seconds: float = 0.0
    """Of `seconds`, what drafting took: to follow the rows and to propose."""


class Mask(NamedTuple):
    """Allowed tokens of one logits row of a step: a bit mask of ceil(vocab / 32) int32 words, bit 1 = allowed."""

    row: int
    draft_idx: int
    words: bytes
