"""What every copy below the device goes through: a ticket, a place in the queue, and the count of its tier."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count

from lamella.kvtier.control.groups import GroupBlocks
from lamella.kvtier.control.host_tier import HostSlots
from lamella.kvtier.control.plan import TierPlan
from lamella.kvtier.control.presence import PresenceBook
from lamella.kvtier.jobs import CopyJob, Job, Location, TicketId, TicketResult
from lamella.kvtier.keys import Key
from lamella.kvtier.stats import TierStats

_new = tuple.__new__


class Descent:
    """How far one holding's blocks have gone down: its first `done` blocks are in the host tier, or on their way."""

    __slots__ = ("barred", "done", "hit", "noted", "pending", "sequence", "tenant")

    def __init__(self, sequence: int, tenant: str | None, hit: int, done: int) -> None:
        self.sequence = sequence
        self.tenant = tenant
        self.hit = hit
        """Blocks it found when it entered."""
        self.done = done
        self.noted = 0
        """Blocks that admission has judged or noted."""
        self.barred = False
        """Admission has refused one, and so all that hang on it."""
        self.pending = 0
        """Restores in flight that it reads: until they have ended well, its own blocks are not to be trusted."""


class Shared:
    """What the parts of the books below the device share: tiers, figures, and the jobs that are to be taken."""

    def __init__(self, plan: TierPlan, groups: Sequence[GroupBlocks]) -> None:
        assert len(plan.host_slots) == len(groups), f"{len(plan.host_slots)} numbers of slots, {len(groups)} groups"
        self.plan = plan
        self.groups = groups
        self.block_size = groups[0].block_size
        self.host = tuple(
            HostSlots(slots, plan.eviction, group.chained, group.group.bytes_per_block)
            for slots, group in zip(plan.host_slots, groups)
        )
        self.books: Mapping[str, tuple[PresenceBook, ...]] = {
            name: tuple(PresenceBook(group.chained) for group in groups) for name in plan.slow_tiers
        }
        self.stats = {name: TierStats() for name in ("host", *plan.slow_tiers)}
        self.queued_bytes = dict.fromkeys(self.stats, 0)
        """Of copies from each tier towards the device that have not ended."""
        self.jobs: list[Job] = []
        self._told: dict[str, list[float]] = {name: [0.0, 0.0, 0] for name in self.stats}
        # made once: a copy would make two of them, and they are most of what a copy costs here
        self.host_places = [
            [Location("host", n, s - 1) for s in range(h.num_slots + 1)] for n, h in enumerate(self.host)
        ]
        self.device_places = [[Location("device", g.idx, b) for b in range(g.pool.num_blocks)] for g in groups]
        self._slow_places = {name: [_slow_place(name, g.idx) for g in groups] for name in plan.slow_tiers}
        self._tickets = count(1)

    def copy(
        self, key: Key, source: Location, target: Location, num_bytes: int, after_step: int, parent: Key | None
    ) -> TicketId:
        """One more job; its ticket."""
        ticket = next(self._tickets)
        # what CopyJob(…) does, in half the time
        self.jobs.append(_new(CopyJob, (ticket, key, source, target, num_bytes, after_step, parent)))
        return ticket

    def copy_chain(
        self, keys: Sequence[Key], first: int, sources: Iterable[Location], targets: Sequence[Location], num_bytes: int
    ) -> range:
        """copy() of the blocks of keys[first], keys[first + 1], … that hang on each other, to as many targets."""
        start = next(self._tickets)
        tickets = range(start, start + len(targets))
        self._tickets = count(tickets.stop)
        chain = keys[first : first + len(targets)]
        parents = [keys[first - 1] if first else None, *chain]
        self.jobs += [
            _new(CopyJob, (ticket, key, source, target, num_bytes, -1, parent))
            for ticket, key, source, target, parent in zip(tickets, chain, sources, targets, parents)
        ]
        return tickets

    def copy_all(
        self,
        keys: Sequence[Key],
        sources: Iterable[Location],
        targets: Sequence[Location],
        num_bytes: int,
        after_steps: Iterable[int],
    ) -> range:
        """copy() of each, without parents: towards the device."""
        start = next(self._tickets)
        tickets = range(start, start + len(targets))
        self._tickets = count(tickets.stop)
        self.jobs += [
            _new(CopyJob, (ticket, key, source, target, num_bytes, after_step, None))
            for ticket, key, source, target, after_step in zip(tickets, keys, sources, targets, after_steps)
        ]
        return tickets

    def ticket(self) -> TicketId:
        """Of a question."""
        return next(self._tickets)

    def count_load(self, name: str, num_bytes: int, seconds: float, loads: int = 1) -> None:
        """Copies from a tier have ended well; seconds that the tier was busy with them."""
        told = self._told[name]
        told[0] += num_bytes
        told[1] += seconds
        told[2] += loads

    def tell_loads(self) -> None:
        """Tell the cost model and the figures of the loads since the last time: a batch's speed says more than each
        copy's."""
        for name, told in self._told.items():
            num_bytes, seconds, loads = told
            if loads:
                stats = self.stats[name]
                stats.bytes_out += int(num_bytes)
                stats.load_seconds += seconds
                stats.loads += int(loads)
                self.plan.cost.observe(name, int(num_bytes), seconds)
                told[:] = 0.0, 0.0, 0

    def place(self, name: str, group: int) -> Location:
        """Where a slower tier keeps a group's records: the key says which."""
        return self._slow_places[name][group]

    def count_failure(self, name: str, result: TicketResult) -> None:
        """By kind: the first word of the error."""
        words = (result.error or "unknown").split(":")[0].split()
        self.stats[name].fail(words[0][:32] if words else "unknown")


def _slow_place(name: str, group: int) -> Location:
    return Location("disk", group, 0) if name == "disk" else Location("external", group, 0, name)
