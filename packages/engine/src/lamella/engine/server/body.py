"""Request bodies: read within the limit, decoded, checked against a schema. A mistake is a 4xx with a short message.

A body is one JSON object. Its fields are of three kinds:

    known        fields of the schema; null means absent
    unsupported  known to clients, not served yet: an error that names it, unless its value asks for nothing
    unknown      ignored; named in the log once and in the header x-lamella-ignored; those of objects inside, too
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, get_args

import msgspec
from starlette.requests import Request

from lamella.engine.errors import RequestError, TooLargeError, UnsupportedFieldError

T = TypeVar("T", bound=msgspec.Struct)
Unsupported = Mapping[str, Callable[[Any, Mapping[str, Any]], bool]]
"""Field -> does this value (never null; the whole body beside it) ask for nothing?"""

MAX_NAMED = 20
MAX_LOGGED = 1000

log = logging.getLogger("lamella.server")
_logged: set[str] = set()


class ClientGone(Exception):
    """The client closed the connection; nobody reads an answer."""


class Decoded(NamedTuple):
    """A checked body."""

    fields: Any
    ignored: tuple[str, ...]
    """Names of unknown fields, fit for a header."""

    @property
    def headers(self) -> dict[str, str]:
        """What the answer tells about them."""
        return {"x-lamella-ignored": ", ".join(self.ignored)} if self.ignored else {}


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises TooLargeError as soon as it is known to be over the limit, with a length or chunked."""
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise TooLargeError(f"the body has {declared[:20]} bytes, the limit is {max_bytes}")
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise TooLargeError(f"the body has more than {max_bytes} bytes, which is the limit")
        parts.append(part)
        more = message.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def decode(body: bytes, schema: type[T], unsupported: Unsupported, accepted: frozenset[str]) -> Decoded:
    """Check a body against a schema. Raises RequestError naming the field.

    `accepted`: fields that change nothing here and are no mistake, such as a name for the client's own books.
    """
    try:
        raw = msgspec.json.decode(body)
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except ValueError as error:  # msgspec's errors and broken UTF-8
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise RequestError("the body must be a JSON object")
    for name, asks_nothing in unsupported.items():
        value = raw.get(name)
        if value is not None and not asks_nothing(value, raw):
            raise UnsupportedFieldError(f"{name} is not supported yet", name)
    known = {field.encode_name for field in msgspec.structs.fields(schema)}
    ignored = [name for name in raw if name not in known and name not in unsupported and name not in accepted]
    ignored += _nested(raw, schema)
    try:
        fields = msgspec.convert(raw, schema)
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        message, param = _explain(str(error))
        raise RequestError(message, param) from None
    return Decoded(fields, _report(ignored))


def _nested(raw: Mapping[str, Any], schema: type[msgspec.Struct]) -> list[str]:
    """Unknown fields of the objects that the schema has inside, as `outer.inner`; at any depth, lists left out."""
    names: list[str] = []
    for field in msgspec.structs.fields(schema):
        value = raw.get(field.encode_name)
        if not isinstance(value, dict):
            continue
        for kind in (field.type, *get_args(field.type)):
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                known = {inner.encode_name for inner in msgspec.structs.fields(kind)}
                inside = [name for name in value if name not in known]
                names += [f"{field.encode_name}.{name}" for name in (*inside, *_nested(value, kind))]
    return names


def _explain(message: str) -> tuple[str, str | None]:
    """msgspec's "Expected `int`, got `str` - at `$.max_tokens`" with the field in front."""
    match = re.fullmatch(r"(.*?)(?: - at `(?:key in )?\$\.?([^`]*)`)?", message, re.DOTALL)
    if match is None or not match.group(2):
        missing = re.search(r"missing required field `(\w+)`", message)
        return (f"{missing.group(1)} is required", missing.group(1)) if missing else (message, None)
    text, path = match.group(1).replace(" | null", ""), match.group(2)
    return f"{path}: {text[:1].lower()}{text[1:]}", re.split(r"[.\[]", path)[0] or None


def _report(ignored: list[str]) -> tuple[str, ...]:
    """Log each name once; the names as a header may carry them."""
    named = tuple(re.sub(r"[^\w.\-]", "?", name, flags=re.ASCII)[:64] for name in ignored[:MAX_NAMED])
    for name in named:
        if name not in _logged and len(_logged) < MAX_LOGGED:
            _logged.add(name)
            log.warning("request field %s is unknown and was ignored (said once per name)", name)
    return named
