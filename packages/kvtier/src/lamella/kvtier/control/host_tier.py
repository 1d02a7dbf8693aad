"""The host tier's slots of one group: which content each has, who needs it, what hangs on it.

              reserve            ready
    FREE ───────────────▶ FILLING ─────▶ READY ── picked by the eviction policy ──▶ FREE
     ▲ ▲                     │ failed      │ dropped, with all that hangs on it
     │ └── last pin gone ── DOOMED ◀───────┘ (straight to FREE if nobody has pinned it)
     │ reserve_passing
     └──────────────── PASSING               until its last pin is gone

A slot hangs on the slot of the block before it, which cannot go first: only leaves are evicted. A slot is listed, and
can be hit, when it is READY and what it hangs on is listed: copies may end in any order. Slot 0 is nobody; slot n is
location n - 1. Groups that are not chained (sliding windows, states) have slots that hang on nothing. A PASSING slot
has content on its way to a slower tier, behind blocks that are there already and not here: it cannot be hit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from lamella.kvtier.control.eviction.registry import POLICIES
from lamella.kvtier.control.prefix_index import first_missing
from lamella.kvtier.keys import Key

FREE: Final = 0
FILLING: Final = 1
READY: Final = 2
DOOMED: Final = 3
PASSING: Final = 4


class HostSlots:
    """Books of one group's slots."""

    def __init__(self, num_slots: int, eviction: str, chained: bool, slot_bytes: int) -> None:
        """eviction: a name of the registry. slot_bytes: of one slot, for tenants' quotas."""
        size = num_slots + 1
        self.num_slots = num_slots
        self.chained = chained
        self.slot_bytes = slot_bytes
        self.state = bytearray(size)
        self.pins = [0] * size
        self.key_of: list[Key | None] = [None] * size
        self.parent_key_of: list[Key | None] = [None] * size
        self.parent_of = [0] * size
        self.ticket_of = [-1] * size
        """FILLING slots: whose end makes them ready."""
        self.slot_of: dict[Key, int] = {}
        """FILLING and READY slots; in a chained group what a slot hangs on is here too."""
        self.listed: dict[Key, int] = {}
        self.passing: dict[Key, int] = {}
        """PASSING slots."""
        self.num_evicted = 0
        self.on_freed: Callable[[str, int], None] | None = None
        """Told (tenant, bytes) when a tenant's slot is free again."""
        self._tenant_of: dict[int, str] = {}
        self._children: list[set[int]] = [set() for _ in range(size)]
        self._empty = list(range(num_slots, 0, -1))
        self._policy = POLICIES[eviction](size, self.parent_of)

    # ---- what is here ----------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[Key], max_blocks: int) -> int:
        """How many of keys[:max_blocks] can be hit, up to the first that cannot. Chained groups only."""
        return first_missing(keys, max_blocks, self.listed)

    def __contains__(self, key: Key) -> bool:
        """Whether it can be hit."""
        return key in self.listed

    def __len__(self) -> int:
        """Slots in use."""
        return self.num_slots - len(self._empty)

    def __iter__(self) -> Iterator[Key]:
        return iter(self.listed)

    @property
    def num_empty(self) -> int:
        return len(self._empty)

    @property
    def num_available(self) -> int:
        """Slots that reserve() can hand out now; more when leaves have gone."""
        return len(self._empty) + len(self._policy)

    def children(self, slot: int) -> Iterable[int]:
        return self._children[slot]

    # ---- life of a slot --------------------------------------------------------------------------------------------

    def reserve(self, key: Key, parent: Key | None, tenant: str | None = None) -> int:
        """A slot for content that is about to be copied here, FILLING, with one pin; 0: all are needed.

        What it hangs on must be in slot_of. May evict a leaf.
        """
        assert key not in self.slot_of
        above = self.slot_of[parent] if self.chained and parent is not None else 0
        if self._empty:
            slot = self._empty.pop()
        else:
            slot = self._make_room(above)
            if not slot:
                return 0
        self._fill(slot, FILLING, key, parent, tenant)
        self.slot_of[key] = slot
        if above:
            self.parent_of[slot] = above
            siblings = self._children[above]
            if not siblings and not self.pins[above]:
                self._policy.withhold(above)
            siblings.add(slot)
        return slot

    def reserve_chain(self, keys: Sequence[Key], first: int, end: int) -> list[int]:
        """reserve() for keys[first:end], each hanging on the one before it, for no tenant; as many as there is room
        for. Chained groups only."""
        state, pins, key_of, parent_key_of = self.state, self.pins, self.key_of, self.parent_key_of
        slot_of, parent_of, children, empty = self.slot_of, self.parent_of, self._children, self._empty
        parent = keys[first - 1] if first else None
        above = slot_of[parent] if parent is not None else 0
        slots: list[int] = []
        for n in range(first, end):
            slot = empty.pop() if empty else self._make_room(above)
            if not slot:
                break
            key = keys[n]
            assert pins[slot] == 0, f"slot {slot} was handed out while pinned"
            assert key not in slot_of
            state[slot] = FILLING
            pins[slot] = 1
            key_of[slot] = key
            parent_key_of[slot] = parent
            slot_of[key] = slot
            if above:
                parent_of[slot] = above
                siblings = children[above]
                if not siblings and not pins[above]:
                    self._policy.withhold(above)
                siblings.add(slot)
            slots.append(slot)
            parent, above = key, slot
        return slots

    def reserve_passing(self, key: Key, parent: Key, tenant: str | None = None) -> int:
        """A slot for content that is only passed on to a slower tier, PASSING, with one pin; 0: all are needed. May
        evict a leaf."""
        assert key not in self.passing
        slot = self._empty.pop() if self._empty else self._make_room(0)
        if slot:
            self._fill(slot, PASSING, key, parent, tenant)
            self.passing[key] = slot
        return slot

    def ready(self, slot: int) -> bool:
        """The copy that fills the slot has ended well; its pin is the caller's from now on. False: the content was
        dropped meanwhile, and so is the pin."""
        state = self.state[slot]
        if state != FILLING:
            if state == PASSING:
                return True
            assert state == DOOMED, f"slot {slot} is filled twice"
            self.unpin(slot)
            return False
        key = self.key_of[slot]
        assert key is not None
        self.state[slot] = READY
        self._policy.insert(slot, key)
        above = self.parent_of[slot]
        if not above or self.key_of[above] in self.listed:
            self.listed[key] = slot
            for child in self._children[slot]:
                if self.state[child] == READY:  # it has overtaken this one
                    self._list_children(slot)
                    break
        return True

    def failed(self, slot: int) -> None:
        """The copy that fills the slot has failed; its pin goes, and with it all that hangs on it."""
        if self.state[slot] != DOOMED:
            self._drop(slot)
        self.unpin(slot)

    def drop(self, key: Key) -> None:
        """This content, and all that hangs on it, cannot be hit any more. Nothing happens if it is not here."""
        for slot in (self.slot_of.get(key), self.passing.get(key)):
            if slot is not None:
                self._drop(slot)

    def drop_all(self) -> None:
        for key in [*self.slot_of, *self.passing]:
            self.drop(key)

    def pin(self, slot: int) -> None:
        """It is read, or must stay; in a chained group all that it hangs on stays as well, unless dropped."""
        assert self.state[slot] in (FILLING, READY, PASSING), f"slot {slot} is pinned in state {self.state[slot]}"
        if not self.pins[slot] and not self._children[slot]:
            self._policy.withhold(slot)
        self.pins[slot] += 1

    def pin_all(self, slots: Sequence[int]) -> None:
        """pin() of each."""
        state, pins, children = self.state, self.pins, self._children
        for slot in slots:
            assert state[slot] in (FILLING, READY, PASSING), f"slot {slot} is pinned in state {state[slot]}"
            if not pins[slot] and not children[slot]:
                self._policy.withhold(slot)
            pins[slot] += 1

    def unpin_all(self, slots: Sequence[int]) -> None:
        """unpin() of each."""
        state, pins, children = self.state, self.pins, self._children
        for slot in slots:
            # what hangs on a slot keeps it, so that its last pin changes nothing
            if pins[slot] > 1 or (pins[slot] and state[slot] == READY and children[slot]):
                pins[slot] -= 1
            else:
                self.unpin(slot)

    def unpin(self, slot: int) -> None:
        pins = self.pins[slot] - 1
        assert pins >= 0, f"slot {slot} has no pin to drop"
        self.pins[slot] = pins
        if not pins:
            if self.state[slot] == PASSING:
                self._drop(slot)
            elif self.state[slot] == DOOMED:
                self._free(slot)
            elif not self._children[slot]:
                self._settle(slot)

    def use(self, slot: int) -> None:
        """A hit ended here."""
        if self.state[slot] == READY:
            self._policy.use(slot)

    def candidates(self) -> list[int]:
        """Slots that may be evicted, by the policy's order. Only for checks."""
        return list(self._policy)

    def tenants(self) -> Iterator[tuple[str, int]]:
        """(tenant, bytes) of each slot that belongs to one."""
        return ((tenant, self.slot_bytes) for tenant in self._tenant_of.values())

    # ---- private ---------------------------------------------------------------------------------------------------

    def _fill(self, slot: int, state: int, key: Key, parent: Key | None, tenant: str | None) -> None:
        assert self.pins[slot] == 0, f"slot {slot} was handed out while pinned"
        self.state[slot] = state
        self.pins[slot] = 1
        self.key_of[slot] = key
        self.parent_key_of[slot] = parent
        if tenant is not None:
            self._tenant_of[slot] = tenant

    def _make_room(self, above: int) -> int:
        """Evict a leaf, but not the slot on which the newcomer is to hang; 0 if there is none."""
        policy = self._policy
        if above:
            policy.withhold(above)
        slot = policy.pick() if len(policy) else 0
        if slot:
            self._evict(slot)
        if above:
            self._settle(above)
        return slot

    def _settle(self, slot: int) -> None:
        if self.state[slot] == READY and not self.pins[slot] and not self._children[slot]:
            self._policy.offer(slot)

    def _list_children(self, slot: int) -> None:
        front = [*self._children[slot]]
        while front:
            child = front.pop()
            if self.state[child] == READY:
                key_of_child = self.key_of[child]
                assert key_of_child is not None
                self.listed[key_of_child] = child
                front.extend(self._children[child])

    def _evict(self, slot: int) -> None:
        """The policy has let go of it already."""
        self.num_evicted += 1
        key = self.key_of[slot]
        assert key is not None
        assert not self._children[slot], f"slot {slot} was evicted before what hangs on it"
        del self.slot_of[key]
        self.listed.pop(key, None)
        self._detach(slot)
        self._disown(slot)

    def _drop(self, slot: int) -> None:
        if self.state[slot] == PASSING:
            del self.passing[self.key_of[slot]]  # type: ignore[arg-type]
            self.state[slot] = DOOMED
            if not self.pins[slot]:
                self._free(slot)
            return
        self._detach(slot)
        front = [slot]
        while front:
            slot = front.pop()
            front.extend(self._children[slot])
            self._children[slot].clear()
            key = self.key_of[slot]
            assert key is not None
            if self.state[slot] == READY:
                self._policy.forget(slot)
            del self.slot_of[key]
            self.listed.pop(key, None)
            self.parent_of[slot] = 0
            self.state[slot] = DOOMED
            if not self.pins[slot]:
                self._free(slot)

    def _detach(self, slot: int) -> None:
        above = self.parent_of[slot]
        if above:
            self._children[above].remove(slot)
            self.parent_of[slot] = 0
            self._settle(above)

    def _free(self, slot: int) -> None:
        self.state[slot] = FREE
        self._empty.append(slot)
        self._disown(slot)

    def _disown(self, slot: int) -> None:
        self.key_of[slot] = self.parent_key_of[slot] = None
        self.ticket_of[slot] = -1
        tenant = self._tenant_of.pop(slot, None)
        if tenant is not None and self.on_freed is not None:
            self.on_freed(tenant, self.slot_bytes)

    def check(self) -> None:
        """Assert every invariant of the slots."""
        policy = self._policy
        empty = set(self._empty)
        assert len(empty) == len(self._empty), "a slot is twice in the list of empty ones"
        offered = list(policy)
        assert len(set(offered)) == len(offered) == len(policy)
        for slot in range(1, self.num_slots + 1):
            state, key, pins, above = self.state[slot], self.key_of[slot], self.pins[slot], self.parent_of[slot]
            assert pins >= 0
            assert (state == FREE) == (slot in empty) == (key is None), f"slot {slot}: state {state}"
            assert state not in (FILLING, DOOMED, PASSING) or pins, (
                f"slot {slot} is in state {state} and pinned by nobody"
            )
            open_ = state == READY and not pins and not self._children[slot]
            assert (slot in policy) == open_, f"slot {slot} is offered for eviction, or should be"
            assert (state == PASSING) == (key is not None and self.passing.get(key) == slot)
            if state in (FREE, DOOMED, PASSING):
                assert not above
                assert not self._children[slot]
                continue
            assert key is not None
            assert self.slot_of[key] == slot
            parent = self.parent_key_of[slot]
            if self.chained and parent is not None:
                assert self.slot_of[parent] == above, f"slot {slot} hangs on another one than its parent's"
                assert slot in self._children[above]
            listed = state == READY and (not above or self.key_of[above] in self.listed)
            assert (self.listed.get(key) == slot) == listed
        assert sum(map(len, self._children)) == sum(1 for above in self.parent_of if above)
        assert len(self.slot_of) == sum(1 for state in self.state if state in (FILLING, READY))
        assert len(self.passing) == sum(1 for state in self.state if state == PASSING)
        assert self.listed.keys() <= self.slot_of.keys()
