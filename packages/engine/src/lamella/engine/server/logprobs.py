"""Log-probabilities in the three shapes that clients read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lamella.engine.text.logprobs import PositionLogprobs, TokenLogprob

FLOOR = -9999.0
"""JSON has no minus infinity."""


def chat_logprobs(positions: Sequence[PositionLogprobs], *, num_top: int | None, as_ids: bool) -> dict[str, Any]:
    """A chat choice's `logprobs`. num_top None: all that there are."""
    return {
        "content": [
            {
                **_chat_token(position.chosen, as_ids),
                "top_logprobs": [_chat_token(token, as_ids) for token in position.top[:num_top]],
            }
            for position in positions
        ]
    }


def completion_logprobs(
    positions: Sequence[PositionLogprobs | None],
    offsets: Sequence[int],
    *,
    as_ids: bool,
    shift: int = 0,
    first: TokenLogprob | None = None,
) -> dict[str, list[Any]]:
    """A completion choice's `logprobs`. shift: characters in front of the text that the offsets count in.

    A position None is that of a prompt's first token, which `first` names: it has no log-probability.
    """
    result: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for position, offset in zip(positions, offsets):
        result["text_offset"].append(offset + shift)
        if position is None:
            assert first is not None
            result["tokens"].append(_name(first, as_ids))
            result["token_logprobs"].append(None)
            result["top_logprobs"].append(None)
            continue
        result["tokens"].append(_name(position.chosen, as_ids))
        result["token_logprobs"].append(max(position.chosen.logprob, FLOOR))
        best = {_key(token, as_ids): max(token.logprob, FLOOR) for token in position.top}
        best.setdefault(_key(position.chosen, as_ids), max(position.chosen.logprob, FLOOR))
        result["top_logprobs"].append(best)
    return result


def prompt_logprobs(positions: Sequence[PositionLogprobs | None]) -> list[dict[str, Any] | None]:
    """The extra field `prompt_logprobs`: token id -> its figures."""
    result: list[dict[str, Any] | None] = []
    for position in positions:
        if position is None:
            result.append(None)
            continue
        entries = {str(token.token_id): _entry(token, rank) for rank, token in enumerate(position.top, 1)}
        entries[str(position.chosen.token_id)] = _entry(position.chosen, position.rank)
        result.append(entries)
    return result


def _chat_token(token: TokenLogprob, as_ids: bool) -> dict[str, Any]:
    return {"token": _name(token, as_ids), "logprob": max(token.logprob, FLOOR), "bytes": list(token.bytes)}


def _entry(token: TokenLogprob, rank: int) -> dict[str, Any]:
    return {"logprob": max(token.logprob, FLOOR), "rank": rank, "decoded_token": token.text}


def _name(token: TokenLogprob, as_ids: bool) -> str:
    return f"token_id:{token.token_id}" if as_ids else token.text


def _key(token: TokenLogprob, as_ids: bool) -> str:
    """A name that differs between tokens: parts of characters have no text of their own, so their bytes are told."""
    if as_ids or token.text.encode() == token.bytes:
        return _name(token, as_ids)
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)
