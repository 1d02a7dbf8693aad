"""What commands print besides their result: always on standard error, quiet where that is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lamella.engine.config.env import no_color


def note(text: str) -> None:
    """One line of information."""
    print(text, file=sys.stderr, flush=True)


def dim(text: str) -> str:
    """Greyed out, where the terminal shows colours."""
    if no_color() or not sys.stderr.isatty():
        return text
    return f"\x1b[2m{text}\x1b[0m"


@contextmanager
def timed(text: str) -> Iterator[None]:
    """Print the text with the seconds that the block took."""
    start = time.perf_counter()
    yield
    note(dim(f"{text} in {time.perf_counter() - start:.1f} s"))
