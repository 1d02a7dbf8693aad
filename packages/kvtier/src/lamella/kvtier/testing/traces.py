"""Requests as prefix caches meet them, by seed: chats of agents, and a scan of one-off prompts through them."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random


def agent_trace(seed: int, num_requests: int, num_sessions: int = 40, system_len: int = 512) -> Iterator[list[int]]:
    """Sessions share one of three system prompts; each request is a session's history and a new turn.

    A few sessions are much busier than the others; one that has become long ends, and a new one takes its place.
    """
    rng = Random(seed)
    systems = [[1000 * n + token for token in range(system_len)] for n in range(3)]
    histories = [list(systems[n % 3]) for n in range(num_sessions)]
    fresh = 1 << 20
    for _ in range(num_requests):
        session = int(num_sessions * rng.random() ** 2.5)
        history = histories[session]
        turn = rng.randint(40, 240)
        history += range(fresh, fresh + turn)
        fresh += turn
        yield list(history)
        reply = rng.randint(20, 160)
        history += range(fresh, fresh + reply)
        fresh += reply
        if len(history) > 6000:
            histories[session] = list(systems[rng.randrange(3)])


def scan_trace(seed: int, num_requests: int) -> Iterator[list[int]]:
    """The agents' requests, among twice as many long prompts that never come again (documents read once)."""
    rng = Random(seed + 1)
    fresh = 1 << 30
    for request in agent_trace(seed, num_requests // 3, num_sessions=16):
        yield request
        for _ in range(2):
            length = rng.randint(1000, 3000)
            yield list(range(fresh, fresh + length))
            fresh += length


TRACES = {"agents": agent_trace, "scan": scan_trace}
