"""One token stream and the request it belongs to, as the core sees them.

Lengths of a running sequence, as half-open ranges of tokens:

    [0, computed_len)    KV written by steps that have committed
    [0, committed_len)   ids that the host knows: len(ids)
    [0, reach)           KV slots that steps in flight may write: the upper bound of the device's own computed length
    [0, planned_len)     max(committed_len, reach + 1): every draft in flight counted as accepted
    [0, room)            slots that the block tables cover, less what a drafter may dirty behind them

While the known ids are not all computed (a prompt, or a sequence that comes back after a preemption), steps take chunks
of [reach, committed_len). From then on each step takes the newest id and its drafts, and planned_len = reach + 1.

Planning reads reach, committing moves computed_len and the ids: no value of a step in flight is needed to plan.
"""

from __future__ import annotations

from array import array
from enum import Enum
from typing import Final

from lamella.engine.packed import pack
from lamella.engine.request import Logprob, Request
from lamella.kvtier import Extras, KeyChain
from lamella.runner_v2.sampling.params import RowParams

NO_ROW: Final = -1
NO_STEP: Final = -1
NEVER: Final = float("-inf")
"""Before any time."""


class State(Enum):
    """Where a sequence is.

    LOADING ─────────────────┐         a lower tier brings part of its prompt
       ▲ │                   │
       │ ▼                   ▼
    WAITING ──▶ RUNNING ──▶ FINISHED
       ▲         │   │          ▲
       └─────────┘   ▼          │
       └────────── DRAINING ────┘      preempted or aborted while steps are in flight
    """

    WAITING = "waiting"
    """Holds nothing."""
    LOADING = "loading"
    """Holds slots of the host tier that are being filled, and is in no queue."""
    RUNNING = "running"
    """Holds blocks and a device row."""
    DRAINING = "draining"
    """Holds blocks and a row until its last step in flight has committed."""
    FINISHED = "finished"
    """Holds nothing."""


_NEXT: Final = {
    State.WAITING: (State.RUNNING, State.LOADING, State.FINISHED),
    State.LOADING: (State.WAITING, State.FINISHED),
    State.RUNNING: (State.WAITING, State.DRAINING, State.FINISHED),
    State.DRAINING: (State.WAITING, State.FINISHED),
    State.FINISHED: (),
}


class Siblings:
    """A request and the n sequences that it owns. The first computes the prompt; the others wait for its blocks."""

    __slots__ = ("arrival_s", "num_live", "packed", "parked", "prompt_done", "prompt_entries", "request", "sequences")

    def __init__(self, request: Request, arrival_s: float, packed: array[int] | None = None) -> None:
        self.request = request
        self.packed = pack(request.prompt_ids) if packed is None else packed
        """The prompt's ids. Shared: never changed."""
        self.arrival_s = arrival_s
        """By the core's clock."""
        self.sequences: list[Sequence] = []
        self.parked: list[Sequence] = []
        """Sequences that wait until a sibling has computed the prompt; in no queue."""
        self.num_live = request.params.n
        """Sequences that are not finished."""
        self.prompt_done = False
        """A sibling has computed the whole prompt."""
        self.prompt_entries: list[Logprob | None] | None = None
        """Log-probabilities of the prompt's first tokens, as far as computed; None: not asked for."""
        if request.params.prompt_logprobs is not None:
            self.prompt_entries = [None]


class Sequence:
    """One token stream: prompt and output, lengths, and what it holds. Scheduler and commit move it."""

    __slots__ = (
        "asked_at",
        "asked_drafts",
        "cached_len",
        "chain",
        "computed_len",
        "draft_ids",
        "draft_method",
        "drafts",
        "eos_ids",
        "first_step_s",
        "generation",
        "ghost",
        "held_drafts",
        "held_method",
        "id",
        "ids",
        "index",
        "key",
        "last_step",
        "load_from_s",
        "load_s",
        "max_drafts",
        "max_len",
        "never_drafts",
        "num_logprobs",
        "params",
        "plain",
        "prompt_len",
        "reach",
        "request_id",
        "restored_len",
        "room",
        "room_from_s",
        "row",
        "seal_at",
        "siblings",
        "started",
        "state",
        "stops",
        "streak",
        "suspect",
        "tiers_settled",
    )

    def __init__(
        self, siblings: Siblings, index: int, sequence_id: int, key: tuple[int, ...], seed: int, max_model_len: int
    ) -> None:
        request = siblings.request
        self.siblings = siblings
        self.request_id = request.request_id
        self.index = index
        self.id = sequence_id
        """Name towards the block manager."""
        self.key = key
        """Order of the policy: less is sooner."""
        self.params = row_params(request, index, seed)
        self.ids = list(request.prompt_ids)
        self.prompt_len = len(request.prompt_ids)
        self.max_len = min(self.prompt_len + request.max_tokens, max_model_len)
        """Ids at which it ends; the prompt's own length where only the prompt is scored."""
        self.eos_ids = frozenset(end_ids(request))
        self.stops = self.eos_ids.union(request.params.stop_token_ids)
        self.num_logprobs = request.params.logprobs
        self.chain: KeyChain | None = None
        """Keys of the full blocks; made when first needed, None for good where the cache is not used."""

        self.state = State.WAITING
        self.row = NO_ROW
        self.generation = 0
        self.computed_len = 0
        self.reach = 0
        self.room = 0
        self.seal_at = 0
        """computed_len at which a block is full and gets its key."""
        self.drafts = 0
        """Most drafts that the row can hold when the next step begins."""
        self.held_drafts = 0
        """Drafts that it really held after the last committed step."""
        self.draft_ids: list[int] = []
        """Their ids, where lengths are adaptive and the runner told them."""
        self.held_method = 0
        """Place of the drafter that they came from."""
        self.asked_drafts = 0
        """Drafts that its last step was asked to make."""
        self.max_drafts = 0
        """Most drafts of it in one step."""
        self.never_drafts: str | None = None
        """Why there are none, if the request itself is the reason."""
        self.draft_method = -1
        """Place of the one drafter that the request wants; -1: any."""
        self.streak = 0
        """How many of its latest drafts in a row were what the target said, verified or not."""
        self.last_step = NO_STEP
        """Last step it was planned into."""
        self.ghost = False
        """Ended for the client: what steps in flight still compute is discarded."""
        self.started = False
        """The first delta went out."""
        self.plain = False
        """Started, and a delta is nothing but ids."""
        self.cached_len = 0
        """Prompt tokens that the prefix cache gave at the first admission."""
        self.restored_len = 0
        """Those of them that came from a tier below the device."""
        self.first_step_s: float | None = None
        self.tiers_settled = False
        """Since it last began to wait, the tiers below the host have brought what they could, or too late."""
        self.asked_at = -1
        """TierManager.num_lost when they had nothing to bring."""
        self.room_from_s = NEVER
        """When it began to wait for the loads of others, by the core's clock."""
        self.load_from_s = 0.0
        """When it began to load, by the core's clock."""
        self.load_s = 0.0
        """Time it spent LOADING before it was first admitted."""
        self.suspect = False
        """It reads a block whose copy from the host failed: what steps in flight say of it is not true."""

    @property
    def packed(self) -> array[int]:
        """ids, for who reads all of them. Not to be changed."""
        return self.siblings.packed if len(self.ids) == self.prompt_len else pack(self.ids)

    @property
    def committed_len(self) -> int:
        return len(self.ids)

    @property
    def planned_len(self) -> int:
        return max(len(self.ids), self.reach + 1)

    def move_to(self, state: State) -> None:
        """Change the state; asserts that the life of a sequence allows it."""
        assert state in _NEXT[self.state], f"sequence {self.request_id}[{self.index}]: {self.state} to {state}"
        self.state = state

    def enter(self, row: int, generation: int, cached_len: int, room: int) -> None:
        """WAITING → RUNNING on a device row, with blocks up to `room`, the first cached_len tokens computed."""
        self.move_to(State.RUNNING)
        self.row = row
        self.generation = generation
        self.computed_len = self.reach = cached_len
        self.room = room
        self.drafts = self.held_drafts = self.asked_drafts = self.streak = 0
        self.draft_ids = []

    def leave(self, state: State) -> None:
        """Row and blocks are gone; ids stay."""
        self.move_to(state)
        self.row = NO_ROW
        self.computed_len = self.reach = self.room = 0
        self.drafts = self.held_drafts = self.asked_drafts = self.streak = 0
        self.draft_ids = []
        self.tiers_settled = self.suspect = False
        self.asked_at = -1
        self.room_from_s = NEVER


def make_chain(request: Request, block_size: int, lookahead: int) -> KeyChain:
    """Keys for a sequence of this request. lookahead: ids behind a block that its KV depends on."""
    return KeyChain(block_size, Extras(adapter=request.adapter, salt=request.cache_salt), lookahead)


def end_ids(request: Request) -> list[int]:
    """The model's end-of-sequence ids, as far as the request lets them end it."""
    return [] if request.params.ignore_eos else request.eos_ids


def row_params(request: Request, index: int, seed: int) -> RowParams:
    """What the runner needs of a request to sample its index-th sequence. seed: drawn by the caller, for requests that
    gave none."""
    params = request.params
    if params.seed is not None:
        seed = params.seed + index
    return RowParams(
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=tuple((params.logit_bias or {}).items()),
        bad_words=tuple(tuple(ids) for ids in request.bad_words_ids),
        allowed_ids=None if params.allowed_token_ids is None else tuple(params.allowed_token_ids),
        min_tokens=params.min_tokens,
        stop_ids=tuple(dict.fromkeys([*end_ids(request), *params.stop_token_ids])),
        seed=seed % (1 << 64),
        num_logprobs=params.logprobs,
        num_prompt_logprobs=params.prompt_logprobs,
    )
