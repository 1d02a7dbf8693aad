"""What commands print besides their result: always on standard error, plain where that is no terminal."""

from __future__ import annotations

import io
import sys

from lamella.engine.config.env import no_color
from lamella.engine.errors import StartError


def note(text: str) -> None:
    """One line of information."""
    print(text, file=sys.stderr, flush=True)


def note_without_bar(text: str) -> None:
    """One line of information, unless standard error is a terminal, where a bar tells the same."""
    if not sys.stderr.isatty():
        note(text)


def refuse_broken_text() -> None:
    """Reading standard input raises UnicodeDecodeError for bytes that are no text; some locales would pass them on."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")


def read_input() -> str:
    """All of standard input. Raises StartError if it is no text."""
    refuse_broken_text()
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise StartError(
            f"standard input is not valid {error.encoding}: {error.reason} at byte {error.start}"
        ) from None


def dim(text: str) -> str:
    """Greyed out, where the terminal shows colours."""
    if no_color() or not sys.stderr.isatty():
        return text
    return f"\x1b[2m{text}\x1b[0m"
