"""Copies from the host to the device, for sequences that enter.

Their targets are listed at once: every step submitted later waits for the copies. So whoever enters meanwhile and hits
them, or what was computed from them, reads the copies too. If one fails, all these sequences are suspect:

    position     0 ……… first ………………… hit
    on device    [ there  | copies in flight | computed by readers …     a reader: its chain runs through `first`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat

from lamella.kvtier.control.transfers import Descent, Shared
from lamella.kvtier.jobs import TicketId, TicketResult
from lamella.kvtier.keys import Key, KeyChain

Wanted = tuple[int, Sequence[int], Sequence[int]]
"""(group, places in the table, device blocks for them)."""


class Restore:
    """The copies of one sequence's entry."""

    __slots__ = ("failed", "first", "first_key", "num_left", "readers")

    def __init__(self, first: int, first_key: Key) -> None:
        self.first = first
        self.first_key = first_key
        self.num_left = 0
        self.failed = False
        self.readers: list[tuple[int, Descent | None, KeyChain]] = []
        """(sequence, its descent if it has one, its keys)."""

    def concerns(self, keys: Sequence[Key], num_blocks: int) -> bool:
        """Whether the first num_blocks of these keys were copied by it, or computed from what it copied."""
        return num_blocks > self.first and keys[self.first] == self.first_key

    def readers_of(self, place: int) -> list[tuple[int, KeyChain]]:
        """Those whose chains run through the block copied to this place, the sequence that it was copied for first."""
        key = self.readers[0][2].keys[place]
        return [(s, chain) for s, _, chain in self.readers if len(chain.keys) > place and chain.keys[place] == key]


class Restores:
    """All restores in flight."""

    def __init__(
        self, shared: Shared, unpin: Callable[[int, int], None], suspect: Callable[[Sequence[KeyChain], int, int], None]
    ) -> None:
        """unpin(group, block) of the device. suspect(chains, group, place): what the key at this place of the chains,
        the same in all, names, and all that hangs on it, must not be hit any more."""
        self._shared = shared
        self._unpin = unpin
        self._suspect = suspect
        self.active: list[Restore] = []
        self.copies: dict[TicketId, tuple[int, int, int, int, Restore]] = {}
        """(group, host slot, device block, place, restore)."""
        self.poisoned: dict[int, None] = {}
        """Sequences to be taken."""

    def begin(self, chain: KeyChain, wanted: Sequence[Wanted]) -> None:
        """Start the copies of a sequence that enters. The blocks are sealed and listed; their sources are host hits."""
        shared, keys = self._shared, chain.keys
        first = min(places[0] for _, places, _ in wanted if places)
        restore = Restore(first, keys[first])
        copies = self.copies
        for idx, places, blocks in wanted:
            host, pool = shared.host[idx], shared.groups[idx].pool
            num_bytes = host.slot_bytes
            sources, targets = shared.host_places[idx], shared.device_places[idx]
            listed, last_step = host.listed, pool.last_step
            wanted_keys = [keys[n] for n in places]
            slots = [listed[key] for key in wanted_keys]
            host.pin_all(slots)
            pool.pin_all(blocks)
            tickets = shared.copy_all(
                wanted_keys,
                [sources[slot] for slot in slots],
                [targets[block] for block in blocks],
                num_bytes,
                [last_step[block] for block in blocks],
            )
            copies.update(zip(tickets, zip(repeat(idx), slots, blocks, places, repeat(restore))))
            restore.num_left += len(places)
            shared.queued_bytes["host"] += num_bytes * len(places)
        self.active.append(restore)

    def join(self, sequence: int, descent: Descent | None, chain: KeyChain, hit: int) -> None:
        """A sequence entered with a hit of so many blocks: it reads every restore that they go back to."""
        for restore in self.active:
            if restore.concerns(chain.keys, hit):
                restore.readers.append((sequence, descent, chain))
                if descent is not None:
                    descent.pending += 1

    def readers(self) -> set[int]:
        """Sequences that read what has not ended, or what was computed from it."""
        return {sequence for restore in self.active for sequence, _, _ in restore.readers}

    def trusted_len(self, keys: Sequence[Key], num_blocks: int) -> int:
        """Leading blocks that do not depend on a copy in flight."""
        for restore in self.active:
            if restore.concerns(keys, num_blocks):
                num_blocks = restore.first
        return num_blocks

    def complete(self, result: TicketResult) -> list[Descent]:
        """One of the copies has ended. The readers whose blocks may go down from now on."""
        idx, slot, block, n, restore = self.copies.pop(result.ticket)
        shared = self._shared
        num_bytes = shared.host[idx].slot_bytes
        shared.queued_bytes["host"] -= num_bytes
        restore.num_left -= 1
        if result.ok:
            shared.count_load("host", num_bytes, result.seconds)
        else:
            shared.count_failure("host", result)
            restore.failed = True
            readers = restore.readers_of(n)
            self._suspect([chain for _, chain in readers], idx, n)
            for sequence, _ in readers:
                self.poisoned[sequence] = None
        shared.host[idx].unpin(slot)
        self._unpin(idx, block)
        return [] if restore.num_left else self._finish(restore)

    def complete_well(self, results: Sequence[TicketResult]) -> list[Descent]:
        """complete() of copies that all ended well: a sequence has hundreds, and they end together."""
        copies, shared = self.copies, self._shared
        ended: dict[int, tuple[list[int], list[int], list[float]]] = {}
        descents: list[Descent] = []
        for result in results:
            idx, slot, block, _, restore = copies.pop(result.ticket)
            restore.num_left -= 1
            entry = ended.get(idx)
            if entry is None:
                entry = ended[idx] = [], [], []
            entry[0].append(slot)
            entry[1].append(block)
            entry[2].append(result.seconds)
            if not restore.num_left:
                descents += self._finish(restore)
        for idx, (slots, blocks, seconds) in ended.items():
            host, pool = shared.host[idx], shared.groups[idx].pool
            num_bytes = host.slot_bytes * len(slots)
            shared.queued_bytes["host"] -= num_bytes
            shared.count_load("host", num_bytes, sum(seconds), len(slots))
            host.unpin_all(slots)
            for block in pool.unpin_held(blocks):
                self._unpin(idx, block)
        return descents

    def _finish(self, restore: Restore) -> list[Descent]:
        """All its copies have ended. The readers whose blocks may go down from now on."""
        self.active.remove(restore)
        descents = [descent for _, descent, _ in restore.readers if descent is not None]
        for descent in descents:
            descent.pending -= 1
        return [] if restore.failed else descents

    def add_pins(self, host: Sequence[list[int]], device: Sequence[list[int]]) -> None:
        """Count its pins, for checks."""
        for idx, slot, block, _, _ in self.copies.values():
            host[idx][slot] += 1
            device[idx][block] += 1

    @property
    def num_copies(self) -> int:
        return len(self.copies)
