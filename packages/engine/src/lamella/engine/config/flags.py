"""Command-line flags derived from the option dataclasses: one flag per field, with help, choices and default."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from lamella.engine.config.env import names_in_environment, option_from_environment
from lamella.engine.config.schema import REMOVED, EngineOptions, ServeOptions, flag, format_size, nearest, parse_size
from lamella.engine.errors import StartError

T = TypeVar("T")

GROUP_TITLES = {
    "model": "the model",
    "machine": "the machine",
    "memory": "memory",
    "scheduling": "scheduling",
    "server": "the server",
}


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are one clear line, which takes no abbreviations, and which knows options that no longer
    exist."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(allow_abbrev=False, **keywords)

    def error(self, message: str) -> NoReturn:
        raise StartError(f"{_short(message, 400)}\n  see: {self.prog} --help")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, but an unknown option is named together with its reason or its nearest known neighbour."""
        parsed, unknown = self.parse_known_args(args, namespace)
        for word in unknown:
            name = word.split("=")[0].lstrip("-").replace("-", "_")
            if word.startswith("--") and name in REMOVED:
                raise StartError(f"{word.split('=')[0]} does not exist: {REMOVED[name]}")
        for word in (word for word in unknown if word != "--"):
            known = [o for action in self._actions for o in action.option_strings]
            name = word.split("=")[0]
            if name in known:
                raise StartError(f"{_short(name)} stands behind '--', where no options are read")
            if word.startswith("-"):
                raise StartError(f"unknown option {_short(name)!r}{nearest(name, known)}")
            raise StartError(f"unexpected argument {_short(word)!r}\n  see: {self.prog} --help")
        return parsed


def _short(text: str, limit: int = 100) -> str:
    """What a person typed, or pasted."""
    return text if len(text) <= limit else text[:limit] + "..."


def add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL, the first word of most commands."""
    parser.add_argument("model", metavar="MODEL", help=EngineOptions.__dataclass_fields__["model"].metadata["help"])


def add_flags(parser: argparse.ArgumentParser, options: type[Any], *, skip: tuple[str, ...] = ()) -> None:
    """One flag per field of the dataclass, in the groups that the fields name. skip: those that have no effect on what
    the command does."""
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        if field.name in skip:
            continue
        meta = field.metadata
        group = groups.get(meta["group"]) or groups.setdefault(
            meta["group"], parser.add_argument_group(GROUP_TITLES[meta["group"]])
        )
        text = meta["help"].replace("%", "%%") + _default_text(field)
        keywords: dict[str, Any] = {"dest": field.name, "default": None, "help": text}
        if meta["kind"] == "bool":
            group.add_argument(flag(field.name), action=argparse.BooleanOptionalAction, **keywords)
            continue
        if meta["kind"] in ("list", "texts"):
            keywords.update(action="append", metavar=meta["metavar"] or field.name.upper().split("_")[-1])
        elif meta["kind"] == "ints":
            keywords.update(action="extend", type=_converter("ints"), metavar=meta["metavar"])
        else:
            keywords["type"] = _converter(meta["kind"])
            if meta["choices"]:
                keywords["choices"] = meta["choices"]
            else:
                keywords["metavar"] = meta["metavar"] or _METAVARS.get(meta["kind"], field.name.upper().split("_")[-1])
        group.add_argument(flag(field.name), **keywords)
    parser.epilog = _about_environment(parser)


def _about_environment(parser: argparse.ArgumentParser) -> str:
    titles = [group.title for group in parser._action_groups if group.title in GROUP_TITLES.values()]
    return (
        f"Options under {', '.join(map(str, titles))} can also be given\n"
        "as environment variables: LAMELLA_MAX_NUM_SEQS=8 stands for --max-num-seqs 8. A flag wins."
    )


def misspelt_variables() -> list[str]:
    """One line for each LAMELLA_ variable that is nothing's name but is close to an option's."""
    fields = (*dataclasses.fields(EngineOptions), *dataclasses.fields(ServeOptions))
    known = {field.name.upper() for field in fields} | {"CACHE"}
    return [
        f"the environment variable LAMELLA_{name} is no option and has no effect{guess}"
        for name in names_in_environment()
        if name not in known and (guess := nearest(name, known))
    ]


_METAVARS = {"int": "N", "float": "X", "size": "SIZE", "json": "JSON"}


def _default_text(field: Any) -> str:
    default = field.default
    if default in (None, "", dataclasses.MISSING):
        return ""
    if field.metadata["kind"] == "bool":
        return f" (default: {'on' if default else 'off'})"
    return f" (default: {format_size(default) if field.metadata['kind'] == 'size' else default})"


def _converter(kind: str) -> Any:
    def convert(text: str) -> Any:
        try:
            return convert_text(kind, text)
        except StartError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    convert.__name__ = kind
    return convert


def number(kind: str, low: float = -math.inf, high: float = math.inf) -> Any:
    """An argparse type: an int or a float in [low, high], and never a nan."""
    read = _converter(kind)

    def convert(text: str) -> Any:
        value = read(text)
        if math.isnan(value):
            raise argparse.ArgumentTypeError("must be a number, got nan")
        if not low <= value <= high:
            bound = f"at least {low}" if value < low else f"at most {high}"
            raise argparse.ArgumentTypeError(f"must be {bound}, got {_short(text)}")
        return value

    return convert


def output_file(*suffixes: str) -> Any:
    """An argparse type: a file that can be written, with one of the suffixes if any are given. Checked when the command
    starts, so that a mistake does not cost a run."""

    def convert(text: str) -> str:
        path = Path(text)
        if suffixes and path.suffix.lower() not in suffixes:
            raise argparse.ArgumentTypeError(f"{_short(text)!r} must end in {', '.join(suffixes)}")
        try:
            path.stat()
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            raise argparse.ArgumentTypeError(f"{_short(text)!r} is no file name: {error}") from None
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{_short(text)!r} is a folder")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r}")
        return text

    return convert


def convert_text(kind: str, text: str) -> Any:
    """The value that a flag's or an environment variable's text stands for."""
    try:
        if kind == "int":
            return int(text)
        if kind == "float":
            return float(text)
        if kind == "size":
            return parse_size(text)
        if kind == "bool":
            return {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}[text.lower()]
        if kind == "texts":
            return [text]
        if kind == "ints":
            return [int(part) for part in text.split(",")]
        if kind == "list":
            return [part for part in text.split(",") if part]
        if kind == "json":
            value = json.loads(text)
            if not isinstance(value, dict):
                raise StartError(f"{text!r} is not a JSON object")
            return value
    except (ValueError, KeyError, RecursionError):
        meant = "list of whole numbers" if kind == "ints" else kind
        raise StartError(f"{_short(text)!r} is not a valid {meant}") from None
    return text


def options_from(parsed: argparse.Namespace, options: type[T], **fixed: Any) -> T:
    """The dataclass from parsed flags; what was not given comes from LAMELLA_<NAME>, then from the default."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        if field.name in fixed:
            values[field.name] = fixed[field.name]
            continue
        given = getattr(parsed, field.name, None)
        if given is None:
            text = option_from_environment(field.name)
            if text is not None:
                try:
                    given = convert_text(field.metadata["kind"], text)
                except StartError as error:
                    raise StartError(f"environment variable LAMELLA_{field.name.upper()}: {error}") from None
        if given is not None:
            values[field.name] = given
    return options(**values)
