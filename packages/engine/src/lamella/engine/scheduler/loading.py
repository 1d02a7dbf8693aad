"""Sequences that wait for a tier below the host to bring part of their prompt.

    begin ─▶ LOADING ─▶ take_ended ─▶ WAITING        all copies have ended, or patience has
                    └─▶ abandon    ─▶ FINISHED

Whatever has arrived by then is a hit when the sequence is admitted; the rest is computed.
"""

from __future__ import annotations

from collections.abc import Callable

from lamella.engine.sequence import Sequence, State
from lamella.kvtier import LoadState, TierManager


class Loading:
    """Empty for good where the manager has no tier below the host."""

    __slots__ = ("_clock", "_manager", "_patience", "_sequences", "num_late")

    def __init__(self, manager: TierManager, clock: Callable[[], float], patience: Callable[[int], float]) -> None:
        """patience: seconds to wait for a prompt of so many tokens."""
        self._manager = manager
        self._clock = clock
        self._patience = patience
        self._sequences: dict[int, Sequence] = {}
        self.num_late = 0
        """Sequences whose patience ended before their copies."""

    def __len__(self) -> int:
        return len(self._sequences)

    def begin(self, sequence: Sequence) -> bool:
        """Ask the tiers for a waiting sequence's prefix. True: it is LOADING from now on, and in no queue.

        A sequence that could not begin for want of room is asked again when its turn comes.
        """
        manager = self._manager
        if sequence.chain is None or not manager.loads:
            sequence.tiers_asked = True
            return False
        entries = sequence.siblings.prompt_entries
        max_hit_len = None if entries is None or len(entries) >= sequence.prompt_len else len(entries) - 1
        state = manager.begin_load(sequence.id, sequence.packed, sequence.chain, max_hit_len)
        sequence.tiers_asked = state is not LoadState.LATER
        if state is not LoadState.STARTED:
            return False
        sequence.move_to(State.LOADING)
        sequence.load_from_s = self._clock()
        self._sequences[sequence.id] = sequence
        return True

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
            if sequence.first_step_s is None:
                sequence.load_s += now_s - sequence.load_from_s
            self._manager.add_wait(sequence.id, now_s - sequence.load_from_s)
        return ended

    def abandon(self, sequence: Sequence) -> None:
        """It has ended for its client. Moves it to FINISHED."""
        del self._sequences[sequence.id]
        self._manager.end_load(sequence.id)
        sequence.move_to(State.FINISHED)
