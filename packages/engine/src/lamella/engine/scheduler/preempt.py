"""Who gives way when blocks or rows run out. Preempting only marks: what is in flight commits first.

not in flight    blocks are free at once, the sequence waits for its turn again
in flight        DRAINING until its last step has committed; nobody else is preempted before that
"""

from __future__ import annotations

from lamella.engine.scheduler.books import Books
from lamella.engine.sequence import Sequence, State


def choose_victim(books: Books) -> Sequence | None:
    """The running sequence whose turn comes last."""
    running = [s for s in (*books.prefilling, *books.decoding) if s.state is State.RUNNING]
    return max(running, key=lambda s: s.key, default=None)


def preempt(books: Books, victim: Sequence) -> bool:
    """Take the victim's blocks away; True if they are free already, False once its steps in flight have committed."""
    books.stats.preemptions += 1
    if victim.last_step > books.committed_step:
        books.drain(victim)
        return False
    books.requeue(victim)
    return True


def make_room(books: Books, lacking: Sequence) -> bool:
    """Free blocks for a running sequence that cannot go on; True if some are free now.

    First what only rejected drafts hold, then a victim's. False: the blocks come when steps in flight have committed.
    """
    if _trim_all(books):
        return True
    if books.draining:
        return False
    victim = choose_victim(books)
    assert victim is not None, "a sequence that runs alone does not fit"
    if victim is lacking and victim.last_step > books.committed_step:
        return False  # its own step in flight may give back what slid out of a window
    return preempt(books, victim)


def displace(books: Books, head: Sequence) -> None:
    """Preempt the worst running sequence for the head of the queue, if the policy says so."""
    if books.draining:
        return
    victim = choose_victim(books)
    if victim is not None and books.policy.displaces(head.key, victim.key):
        preempt(books, victim)


def _trim_all(books: Books) -> bool:
    """Take back whole blocks behind what steps in flight and the next one may write."""
    lookahead = books.config.lookahead
    if not books.config.max_num_drafts:
        return False
    trimmed = False
    for sequence in books.decoding:
        if sequence.state is not State.RUNNING:
            continue
        kept = sequence.reach + 1 + sequence.drafts + lookahead  # what its next step needs
        if sequence.room + lookahead - kept >= books.manager.block_size:
            covered = books.manager.trim(sequence.id, sequence.computed_len, kept, sequence.last_step)
            trimmed = trimmed or covered < sequence.room + lookahead
            sequence.room = covered - lookahead
    return trimmed
