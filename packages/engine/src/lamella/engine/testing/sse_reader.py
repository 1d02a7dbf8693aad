"""Server-sent events of a streamed answer, read back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec


def read_events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The JSON of each event in front of the end mark. Asserts the framing: each line is empty, a comment or data, and
    the end mark is last."""
    done = False
    for line in lines:
        if not line or line.startswith(":"):
            continue
        assert not done, f"behind [DONE]: {line}"
        assert line.startswith("data: "), line
        if line == "data: [DONE]":
            done = True
        else:
            yield msgspec.json.decode(line[len("data: ") :])
    assert done, "the stream has no [DONE]"


def joined_text(events: Iterable[dict[str, Any]], choice: int = 0) -> str:
    """The text of one choice, of a completion or a chat completion."""
    parts = []
    for event in events:
        for entry in event["choices"]:
            if entry["index"] == choice:
                parts.append(entry["text"] if "text" in entry else entry["delta"].get("content", ""))
    return "".join(parts)
