"""Copies from the device to the host: as blocks are sealed, as long as tier, tenant and queue have room.

A holding's blocks go down in order, and stop at the first that is refused: what hangs on it could not be kept anyway.
The next seal goes on from there. If the host has evicted some meanwhile, it goes on behind what a slower tier has of
them, through slots that only pass content on; without that, from the first that is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lamella.kvtier.control.admission import make_admission
from lamella.kvtier.control.host_tier import HostSlots
from lamella.kvtier.control.prefix_index import first_missing
from lamella.kvtier.control.stores import Stores
from lamella.kvtier.control.transfers import Descent, Shared
from lamella.kvtier.jobs import TicketId, TicketResult
from lamella.kvtier.keys import Key
from lamella.kvtier.layout import NULL_BLOCK


class Demotion:
    """All copies to the host that are in flight, and who waits for his turn."""

    def __init__(self, shared: Shared, stores: Stores, unpin: Callable[[int, int], None]) -> None:
        """unpin(group, block) of the device."""
        self._shared = shared
        self._stores = stores
        self._unpin = unpin
        self._stats = shared.stats["host"]
        self._max_copies = shared.plan.max_demoting
        self._judges = shared.plan.admission.mode != "all"
        self._admission = make_admission(shared.plan.admission)
        self.copies: dict[TicketId, tuple[int, int, int]] = {}
        """(group, host slot, device block)."""
        self.waiting: dict[int, None] = {}
        """Sequences that were stopped by a full queue, oldest first."""
        self._held_bytes: dict[str, int] = {}
        """By tenant."""
        total = sum(host.num_slots * host.slot_bytes for host in shared.host)
        self._max_tenant_bytes = shared.plan.admission.max_tenant_share * total
        for host in shared.host:
            host.on_freed = self._give_back
        alone = len(shared.host) == 1 and shared.host[0].chained and not self._judges
        self._only_chain = shared.host[0] if alone else None
        """Set where a sequence's blocks go down as they come: there is one group, and admission refuses nothing."""
        # the group whose slots say whether there is room: the one that has the fewest bytes' worth of prefix
        self._scarce = min(shared.host, key=lambda host: host.num_slots)

    @property
    def has_room(self) -> bool:
        return len(self.copies) < self._max_copies

    @property
    def num_copies(self) -> int:
        return len(self.copies)

    def advance(self, descent: Descent, keys: Sequence[Key], sealed: int, tables: Sequence[Sequence[int]]) -> None:
        """Start what can be started of blocks [0, sealed) of a sequence with these tables."""
        if descent.pending:
            return
        n = self.kept_len(keys, descent.done)
        if self._only_chain is not None and descent.tenant is None and not self._only_chain.passing:
            n = self._start_chain(self._only_chain, keys, n, tables[0][:sealed])
        while n < sealed and self._go_down(descent, keys, n, tables):
            n += 1
        descent.done = n
        if descent.barred:
            for later in range(descent.noted, sealed):
                self._admission.note(keys[later])
            descent.noted = max(descent.noted, sealed)

    def kept_len(self, keys: Sequence[Key], num_blocks: int) -> int:
        """How many of keys[:num_blocks] need not go down: the host has them, or a slower tier."""
        n = num_blocks
        for idx, host in enumerate(self._shared.host):
            if n and host.chained and keys[n - 1] not in host.slot_of and keys[n - 1] not in host.passing:
                n = max(first_missing(keys, n, host.slot_of), self._stores.kept_len(idx, keys, n))
        return n

    def start(self, idx: int, key: Key, parent: Key | None, block: int, tenant: str | None) -> str | None:
        """Copy one device block to a host slot. The reason why not, or None."""
        shared = self._shared
        if len(self.copies) >= self._max_copies:
            return "queue"
        host = shared.host[idx]
        passing = host.chained and parent is not None and parent not in host.slot_of
        if passing and not self._stores.has_room(idx):
            return "room"
        num_bytes = host.slot_bytes
        if tenant is not None and not self.charge(tenant, num_bytes):
            return "quota"
        if passing:
            assert parent is not None
            slot = host.reserve_passing(key, parent, tenant)
        else:
            slot = host.reserve(key, parent, tenant)
        if not slot:
            self._give_back(tenant, num_bytes)
            return "room"
        shared.groups[idx].pool.pin(block)
        source, target = shared.device_places[idx][block], shared.host_places[idx][slot]
        ticket = host.ticket_of[slot] = shared.copy(key, source, target, num_bytes, -1, parent)
        self.copies[ticket] = (idx, slot, block)
        return None

    def complete(self, result: TicketResult) -> tuple[int, int]:
        """One of the copies has ended. (group, host slot that is ready now; 0: it is not)."""
        idx, slot, block = self.copies.pop(result.ticket)
        host = self._shared.host[idx]
        self._unpin(idx, block)
        if not result.ok:
            self._shared.count_failure("host", result)
            host.failed(slot)
            return idx, 0
        self._stats.bytes_in += host.slot_bytes
        return (idx, slot) if host.ready(slot) else (idx, 0)

    def complete_well(self, results: Sequence[TicketResult]) -> None:
        """complete() of copies that all ended well; what is ready now goes on to slower tiers."""
        shared, copies, hosts, want = self._shared, self.copies, self._shared.host, self._stores.want
        blocks: list[list[int]] = [[] for _ in hosts]
        for result in results:
            idx, slot, block = copies.pop(result.ticket)
            blocks[idx].append(block)
            if hosts[idx].ready(slot):
                want(idx, slot)
        for idx, ended in enumerate(blocks):
            self._stats.bytes_in += hosts[idx].slot_bytes * len(ended)
            for block in shared.groups[idx].pool.unpin_held(ended):
                self._unpin(idx, block)

    def charge(self, tenant: str | None, num_bytes: int) -> bool:
        """Count bytes for a tenant; False, and nothing counted, if that is beyond his quota."""
        if tenant is None:
            return True
        held = self._held_bytes.get(tenant, 0) + num_bytes
        if held > self._max_tenant_bytes:
            return False
        self._held_bytes[tenant] = held
        return True

    def refund(self, tenant: str | None, num_bytes: int) -> None:
        """Take back what was charged for a slot that was not to be had."""
        self._give_back(tenant, num_bytes)

    def held_bytes(self, tenant: str) -> int:
        """Of the host tier, by this tenant's blocks."""
        return self._held_bytes.get(tenant, 0)

    def add_pins(self, host: Sequence[list[int]], device: Sequence[list[int]]) -> None:
        """Count its pins, for checks."""
        for idx, slot, block in self.copies.values():
            host[idx][slot] += 1
            device[idx][block] += 1

    def check(self) -> None:
        """What tenants are charged for is what they hold."""
        held: dict[str, int] = {}
        for host in self._shared.host:
            for tenant, num_bytes in host.tenants():
                held[tenant] = held.get(tenant, 0) + num_bytes
        assert held == self._held_bytes, f"tenants hold {held}, but are charged {self._held_bytes}"

    # ---- private ---------------------------------------------------------------------------------------------------

    def _go_down(self, descent: Descent, keys: Sequence[Key], n: int, tables: Sequence[Sequence[int]]) -> bool:
        shared, key = self._shared, keys[n]
        parent = keys[n - 1] if n else None
        for idx, host in enumerate(shared.host):
            if key in host.slot_of or key in host.passing:
                continue
            block: int | None = tables[idx][n] if idx < len(tables) else NULL_BLOCK
            if block == NULL_BLOCK:
                # left of the window, or a snapshot if there is one here: perhaps nobody's, but still there
                block = shared.groups[idx].index.find(key)
                if block is None:
                    continue
            assert block is not None
            if self._judges and n >= descent.noted:
                if descent.barred:
                    return False
                descent.noted = n + 1
                empty_share = self._scarce.num_empty / self._scarce.num_slots
                if not self._admission.wants(key, n, n < descent.hit, empty_share):
                    descent.barred = True
            if descent.barred:
                self._stats.refuse("admission")
                return False
            reason = self.start(idx, key, parent, block, descent.tenant)
            if reason is not None:
                self._stats.refuse(reason)
                if reason == "queue":
                    self.waiting[descent.sequence] = None
                return False
        return True

    def _start_chain(self, host: HostSlots, keys: Sequence[Key], first: int, table: Sequence[int]) -> int:
        """_go_down() of many blocks of the only group, as far as there is room. Where it ended."""
        shared = self._shared
        if first < len(table) and keys[first] in host.slot_of:  # another sequence was here
            first = first_missing(keys, len(table), host.slot_of)
        if first == len(table) or (first and keys[first - 1] not in host.slot_of):
            return first
        end = min(len(table), first + self._max_copies - len(self.copies))
        slots = host.reserve_chain(keys, first, end)
        blocks = table[first : first + len(slots)]
        shared.groups[0].pool.pin_all(blocks)
        sources, targets = shared.device_places[0], shared.host_places[0]
        tickets = shared.copy_chain(
            keys, first, [sources[b] for b in blocks], [targets[s] for s in slots], host.slot_bytes
        )
        for ticket, slot, block in zip(tickets, slots, blocks):
            host.ticket_of[slot] = ticket
            self.copies[ticket] = (0, slot, block)
        return first + len(slots)

    def _give_back(self, tenant: str | None, num_bytes: int) -> None:
        if tenant is not None:
            left = self._held_bytes[tenant] - num_bytes
            if left:
                self._held_bytes[tenant] = left
            else:
                del self._held_bytes[tenant]
