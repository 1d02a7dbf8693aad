"""Stop strings in a text that arrives in pieces.

    given to the client | held back: may be the beginning of a stop string | still to come

All strings are looked for at once by an automaton (Aho and Corasick's): one state is "the longest end of the text that
begins some stop string", so the text held back is as long as the state is deep, never longer.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class StopHit(NamedTuple):
    """What a piece of text led to."""

    text: str
    """Certain to belong to the output."""
    stop: str | None = None
    """The stop string that ended the output."""


class StopChecker:
    """Watches the text of one sequence for the stop string that completes first; of several that do, the longest.

    The output ends in front of the stop string, or behind it with include_stop_str. A stop string that completes
    before min_tokens tokens were produced is ordinary text.
    """

    def __init__(self, stops: Sequence[str], *, include_stop_str: bool = False, min_tokens: int = 0) -> None:
        self._automaton = _automaton(tuple(stops)) if stops else None
        self._include = include_stop_str
        self._min_tokens = min_tokens
        self._state = 0
        self._held = ""

    def push(self, text: str, num_tokens: int) -> StopHit:
        """Take the text that token number num_tokens (counted from 1) added.

        Give tokens one by one where min_tokens or the count of tokens at the stop matters. After a hit nothing more
        may be pushed.
        """
        automaton = self._automaton
        if automaton is None or not text:
            return StopHit(text)
        if self._state == 0 and automaton.first.isdisjoint(text):
            return StopHit(text)
        whole = self._held + text
        if num_tokens < self._min_tokens:
            self._state = automaton.walk(self._state, text)
        else:
            self._state, end, stop = automaton.search(self._state, text)
            if stop is not None:
                end += len(self._held)
                self._held = ""
                return StopHit(whole[: end if self._include else end - len(stop)], stop)
        cut = len(whole) - automaton.held_len[self._state]
        self._held = whole[cut:]
        return StopHit(whole[:cut])

    def flush(self) -> str:
        """The text held back, when the sequence ended for another reason."""
        held, self._held, self._state = self._held, "", 0
        return held


class _Automaton:
    """States are numbers, 0 the empty one; a state stands for the beginning of a stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._found: list[str | None] = [None]
        """The longest stop string that ends in this state."""
        self.held_len = [0]
        """Characters of the text's end that may still become a stop string."""
        self.first = frozenset(stop[0] for stop in stops)
        for stop in stops:
            self._insert(stop)
        self._link()

    def walk(self, state: int, text: str) -> int:
        """The state behind a text, whatever it holds."""
        for character in text:
            state = self._step(state, character)
        return state

    def search(self, state: int, text: str) -> tuple[int, int, str | None]:
        """The state behind a text, or where in it the first stop string completes: (state, end, stop)."""
        found = self._found
        for index, character in enumerate(text):
            state = self._step(state, character)
            if found[state] is not None:
                return state, index + 1, found[state]
        return state, len(text), None

    def _step(self, state: int, character: str) -> int:
        following = self._next[state].get(character)
        while following is None and state:
            state = self._fail[state]
            following = self._next[state].get(character)
        return following or 0

    def _insert(self, stop: str) -> None:
        state = 0
        for depth, character in enumerate(stop, 1):
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next[state][character] = following
                self._next.append({})
                self._fail.append(0)
                self._found.append(None)
                self.held_len.append(depth)
            state = following
        self._found[state] = stop

    def _link(self) -> None:
        """Breadth first, so that a shorter state is complete before a longer one refers to it."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            fail = self._fail[state]
            if self._found[state] is None:
                self._found[state] = self._found[fail]
            if not self._next[state]:
                self.held_len[state] = self.held_len[fail]
            for character, following in self._next[state].items():
                self._fail[following] = self._step(fail, character)
                waiting.append(following)


@functools.lru_cache(maxsize=64)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    return _Automaton(stops)
