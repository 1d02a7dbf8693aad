"""Sequences that wait for a tier below the host to bring part of their prompt.

    begin ─▶ LOADING ─▶ take_ended ─▶ WAITING        all copies have ended, or patience has
                    └─▶ abandon    ─▶ FINISHED

Whatever has arrived by then is a hit when the sequence is admitted; the rest is computed. Tiers are asked when a
sequence arrives, and again at its turn if what it found then may have left the device or the host since. Room for loads
is limited: whose turn has come and finds none waits for those that load, and nobody behind him begins meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from lamella.engine.sequence import NEVER, Sequence, State
from lamella.kvtier import LoadState, TierManager


class Turn(Enum):
    """What becomes of a sequence at the head of the queue."""

    ENTERS = "enters"
    """It takes what device and host have of its prefix."""
    LOADS = "loads"
    """It is LOADING from now on, and has to leave the queue."""
    WAITS = "waits"
    """It stays at the head: the loads of others have the room that it needs."""


class Loading:
    """Empty for good where the manager has no tier below the host."""

    __slots__ = ("_clock", "_manager", "_patience", "_sequences", "_short", "num_late")

    def __init__(self, manager: TierManager, clock: Callable[[], float], patience: Callable[[int], float]) -> None:
        """patience: seconds to wait for a prompt of so many tokens."""
        self._manager = manager
        self._clock = clock
        self._patience = patience
        self._sequences: dict[int, Sequence] = {}
        self._short: Sequence | None = None
        """Who waits for room at the head of the queue."""
        self.num_late = 0
        """Sequences whose patience ended before their copies."""

    def __len__(self) -> int:
        return len(self._sequences)

    def begin(self, sequence: Sequence) -> bool:
        """Ask the tiers for the prefix of a sequence that has arrived. True: it is LOADING, and goes into no queue."""
        if self._short is not None:
            if self._short.state is State.WAITING:
                return False
            self._short = None
        return self._ask(sequence) is LoadState.STARTED

    def turn(self, sequence: Sequence, can_enter: bool) -> Turn:
        """The turn of a WAITING sequence has come. can_enter: there is a row for it."""
        if sequence.tiers_settled or sequence.asked_at == self._manager.num_lost:
            return Turn.ENTERS
        state = self._ask(sequence)
        if state is LoadState.STARTED:
            return Turn.LOADS
        if state is LoadState.NONE or not can_enter:
            return Turn.ENTERS
        now_s = self._clock()
        if sequence.room_from_s == NEVER:
            sequence.room_from_s = now_s
        if self._sequences and now_s - sequence.room_from_s <= self._patience(len(sequence.ids)):
            self._short = sequence
            return Turn.WAITS
        self._settle(sequence, now_s, sequence.room_from_s)
        self.num_late += 1
        return Turn.ENTERS

    def take_ended(self) -> list[Sequence]:
        """Who waits for a row from now on. Moves them to WAITING."""
        ended = [self._sequences.pop(sequence_id) for sequence_id in self._manager.take_loaded()]
        now_s = self._clock()
        for sequence in list(self._sequences.values()):
            if now_s - sequence.load_from_s > self._patience(len(sequence.ids)):
                self._manager.end_load(sequence.id)
                self.num_late += 1
                ended.append(self._sequences.pop(sequence.id))
        for sequence in ended:
            sequence.move_to(State.WAITING)
            from_s = sequence.load_from_s if sequence.room_from_s == NEVER else sequence.room_from_s
            self._settle(sequence, now_s, from_s)
        return ended

    def abandon(self, sequence: Sequence) -> None:
        """It has ended for its client. Moves it to FINISHED."""
        del self._sequences[sequence.id]
        self._manager.end_load(sequence.id)
        sequence.move_to(State.FINISHED)

    # ---- private ---------------------------------------------------------------------------------------------------

    def _ask(self, sequence: Sequence) -> LoadState:
        """What begin_load() says; STARTED: the sequence is LOADING."""
        manager = self._manager
        request = sequence.siblings.request
        if sequence.chain is None or not manager.loads or not request.use_kv_tiers:
            sequence.tiers_settled = True
            return LoadState.NONE
        entries = sequence.siblings.prompt_entries
        max_hit_len = None if entries is None or len(entries) >= sequence.prompt_len else len(entries) - 1
        state = manager.begin_load(sequence.id, sequence.packed, sequence.chain, max_hit_len, tenant=request.cache_salt)
        if state is LoadState.NONE:
            sequence.asked_at = manager.num_lost
        elif state is LoadState.STARTED:
            sequence.move_to(State.LOADING)
            sequence.load_from_s = self._clock()
            self._sequences[sequence.id] = sequence
        return state

    def _settle(self, sequence: Sequence, now_s: float, from_s: float) -> None:
        """It is not asked about again, and has waited since from_s."""
        sequence.tiers_settled = True
        if sequence.first_step_s is None:
            sequence.load_s += now_s - from_s
        self._manager.add_wait(sequence.id, now_s - from_s)
