"""A second, naive account of the same rules as TierManager's: plain lists, linear searches, no block ids.

Content is compared as token ids themselves, never as hashes, so that a fault in the keys shows too. Every method
mirrors one of the manager's and returns what the manager must return.
"""

from __future__ import annotations

from collections.abc import Sequence

from lamella.kvtier.layout import Layout

Content = tuple[object, ...]
"""(salt, token ids from 0 to the block's end)."""


class Place:
    """One block of memory."""

    def __init__(self) -> None:
        self.content: Content | None = None
        self.listed = 0
        """When it became possible to hit it; 0: it is not."""
        self.refs = 0


class NaiveGroup:
    """All places of one group; `cached` in the order of reuse."""

    def __init__(self, window: int | None, num_blocks: int, block_size: int) -> None:
        self.window = window
        self.size = block_size
        self.places = [Place() for _ in range(num_blocks - 1)]
        self.cached: list[Place] = []

    def num_free(self) -> int:
        return sum(1 for place in self.places if place.refs == 0)

    def holders(self, content: Content) -> list[Place]:
        found = [place for place in self.places if place.listed and place.content == content]
        return sorted(found, key=lambda place: place.listed)

    def first_read(self, length: int) -> int:
        """First block that a token at this position reads."""
        return 0 if self.window is None else max(0, length - self.window + 1) // self.size

    def take(self) -> Place:
        for place in self.places:
            if place.refs == 0 and place not in self.cached:
                break
        else:
            place = self.cached.pop(0)
            place.listed = 0
        place.refs = 1
        place.content = None
        return place

    def drop(self, place: Place) -> None:
        place.refs -= 1
        if place.refs or not place.listed:
            return
        others = [other for other in self.holders(place.content or ()) if other is not place]
        if others:
            place.listed = 0
            for other in others:
                if other in self.cached:
                    self.cached.remove(other)
                    self.cached.append(other)
        else:
            self.cached.append(place)


class NaiveSequence:
    def __init__(self, salt: object, cached: bool, tables: list[list[Place | None]], sealed: int) -> None:
        self.salt = salt
        self.cached = cached
        self.tables = tables
        self.sealed = sealed


class NaiveTiers:
    """The oracle: same calls as TierManager, with the salt in place of the key chain (None there: not cached)."""

    def __init__(self, layout: Layout) -> None:
        self.size = layout.groups[0].block_size
        self.groups = [NaiveGroup(g.window, n, self.size) for g, n in zip(layout.groups, layout.num_blocks)]
        self.sequences: dict[int, NaiveSequence] = {}
        self._num_listed = 0

    def acquire(
        self, sequence: int, token_ids: Sequence[int], salt: object, cached: bool, chunk_len: int, headroom: int
    ) -> int | None:
        """The length of the hit, or None."""
        hit = 0
        if cached:
            for blocks in range((len(token_ids) - 1) // self.size, 0, -1):
                if all(self._readable(group, salt, token_ids, blocks) for group in self.groups):
                    hit = blocks
                    break
        plans: list[tuple[list[Place | None], int]] = []
        for group in self.groups:
            table: list[Place | None] = []
            for n in range(hit):
                if n < group.first_read(hit * self.size):
                    table.append(None)
                    continue
                holders = group.holders(self._content(salt, token_ids, n))
                table.append(next((place for place in holders if place.refs), holders[0]))
            end = len(token_ids) if group.window is None else min(len(token_ids), hit * self.size + chunk_len)
            new = max(0, -(-end // self.size) - hit)
            leaving = sum(1 for place in table if place is not None and place.refs == 0)
            if group.num_free() - leaving - new < headroom:
                return None
            plans.append((table, new))
        for group, (table, new) in zip(self.groups, plans):
            for place in table:
                if place is not None:
                    if place in group.cached:
                        group.cached.remove(place)
                    place.refs += 1
            table += [group.take() for _ in range(new)]
        self.sequences[sequence] = NaiveSequence(salt, cached, [table for table, _ in plans], hit)
        return hit * self.size

    def extend(self, rows: Sequence[tuple[int, int]]) -> int:
        """How many of the rows fit."""
        for done, (sequence, new_len) in enumerate(rows):
            tables = self.sequences[sequence].tables
            wanted = -(-new_len // self.size)
            if any(wanted - len(table) > group.num_free() for group, table in zip(self.groups, tables)):
                return done
            for group, table in zip(self.groups, tables):
                while len(table) < wanted:
                    table.append(group.take())
        return len(rows)

    def seal(self, sequence: int, token_ids: Sequence[int], computed_len: int) -> None:
        books = self.sequences[sequence]
        if not books.cached:
            return
        for n in range(books.sealed, computed_len // self.size):
            for table in books.tables:
                place = table[n]
                assert place is not None
                place.content = self._content(books.salt, token_ids, n)
                self._num_listed += 1
                place.listed = self._num_listed
        books.sealed = max(books.sealed, computed_len // self.size)

    def slide(self, sequence: int, computed_len: int) -> None:
        for group, table in zip(self.groups, self.sequences[sequence].tables):
            for n in reversed(range(min(group.first_read(computed_len), len(table)))):
                place = table[n]
                if place is not None:
                    group.drop(place)
                    table[n] = None

    def trim(self, sequence: int, planned_len: int) -> None:
        for group, table in zip(self.groups, self.sequences[sequence].tables):
            while len(table) > -(-planned_len // self.size):
                place = table.pop()
                assert place is not None
                group.drop(place)

    def release(self, sequence: int) -> None:
        for group, table in zip(self.groups, self.sequences.pop(sequence).tables):
            for place in reversed(table):
                if place is not None:
                    group.drop(place)

    def reset(self) -> None:
        for group in self.groups:
            group.cached.clear()
            for place in group.places:
                place.listed = 0
        for books in self.sequences.values():
            books.cached = False

    def cached_contents(self, group: int) -> list[Content | None]:
        """In the order of reuse."""
        return [place.content for place in self.groups[group].cached]

    def _readable(self, group: NaiveGroup, salt: object, token_ids: Sequence[int], blocks: int) -> bool:
        first = group.first_read(blocks * self.size)
        return all(group.holders(self._content(salt, token_ids, n)) for n in range(first, blocks))

    def _content(self, salt: object, token_ids: Sequence[int], block: int) -> Content:
        return (salt, *token_ids[: (block + 1) * self.size])


class NaiveHost:
    """A host tier of one full group: contents with the moment of their last use. Copies take no time here."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.used: dict[Content, int] = {}
        self.parents: dict[Content, Content | None] = {}

    def use(self, content: Content | None, now: int) -> None:
        """And all that it hangs on."""
        while content is not None:
            self.used[content] = now
            content = self.parents[content]

    def add(self, content: Content, parent: Content | None, now: int) -> bool:
        """Evicts the leaf that was used longest ago, if that is needed; False if there is none but the parent."""
        if len(self.used) == self.num_slots:
            above = set(self.parents.values()) | {parent}
            leaves = [other for other in self.used if other not in above]
            if not leaves:
                return False
            victim = min(leaves, key=lambda other: self.used[other])
            del self.used[victim], self.parents[victim]
        self.parents[content] = parent
        self.use(content, now)
        return True


class NaiveLowerTiers(NaiveTiers):
    """The same with a host tier: lru, everything admitted, full groups only.

    Copies end at once and well: what a manager does whose jobs are all done between any two calls.
    """

    def __init__(self, layout: Layout, host_slots: Sequence[int]) -> None:
        super().__init__(layout)
        assert all(group.window is None for group in layout.groups)
        self.hosts = [NaiveHost(slots) for slots in host_slots]
        self.done: dict[int, int] = {}
        self.now = 0

    def acquire(
        self, sequence: int, token_ids: Sequence[int], salt: object, cached: bool, chunk_len: int, headroom: int
    ) -> int | None:
        hit = 0
        while cached and hit < (len(token_ids) - 1) // self.size and self._anywhere(salt, token_ids, hit):
            hit += 1
        plans: list[tuple[list[Place | None], int]] = []
        for group in self.groups:
            holders = [group.holders(self._content(salt, token_ids, n)) for n in range(hit)]
            table = [next((p for p in held if p.refs), held[0]) if held else None for held in holders]
            new = -(-len(token_ids) // self.size) - hit + table.count(None)
            leaving = sum(1 for place in table if place is not None and place.refs == 0)
            if group.num_free() - leaving - new < headroom:
                return None
            plans.append((table, new))
        any_restored = any(None in table for table, _ in plans)
        for group, host, (table, new) in zip(self.groups, self.hosts, plans):
            for place in table:
                if place is not None:
                    if place in group.cached:
                        group.cached.remove(place)
                    place.refs += 1
            taken = [group.take() for _ in range(new)]
            for n, place in enumerate(table):
                if place is None:
                    restored = table[n] = taken.pop(0)
                    restored.content = self._content(salt, token_ids, n)
                    self._num_listed += 1
                    restored.listed = self._num_listed
            table += taken
            there = 0
            while there < hit and self._content(salt, token_ids, there) in host.used:
                there += 1
            if there:
                self.now += 1
                host.use(self._content(salt, token_ids, there - 1), self.now)
            self.done[sequence] = min(self.done.get(sequence, hit), there)
        self.sequences[sequence] = NaiveSequence(salt, cached, [table for table, _ in plans], hit)
        if any_restored:
            self.demote(sequence, token_ids)  # the copies have ended: what another group's host lacks goes down
        return hit * self.size

    def seal(self, sequence: int, token_ids: Sequence[int], computed_len: int) -> None:
        before = self.sequences[sequence].sealed
        super().seal(sequence, token_ids, computed_len)
        if self.sequences[sequence].sealed > before:
            self.demote(sequence, token_ids)

    def demote(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Call it before release(), too."""
        books = self.sequences[sequence]
        contents = [self._content(books.salt, token_ids, n) for n in range(books.sealed)]
        n = self.done[sequence]
        if not books.cached or n >= books.sealed:
            return
        for host in self.hosts:
            n = next((i for i in range(n) if contents[i] not in host.used), n)
        while n < books.sealed:
            parent = contents[n - 1] if n else None
            for host in self.hosts:
                if contents[n] not in host.used:
                    self.now += 1
                    if not host.add(contents[n], parent, self.now):
                        self.done[sequence] = n
                        return
            n += 1
        self.done[sequence] = n

    def reset(self) -> None:
        super().reset()
        for host in self.hosts:
            host.used.clear()
            host.parents.clear()

    def _anywhere(self, salt: object, token_ids: Sequence[int], block: int) -> bool:
        content = self._content(salt, token_ids, block)
        return all(g.holders(content) or content in h.used for g, h in zip(self.groups, self.hosts))
