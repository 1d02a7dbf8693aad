"""Flags, environment and Python keywords give the same options, and mistakes are named."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from lamella.engine.config.flags import Parser, add_flags, options_from
from lamella.engine.config.schema import (
    REMOVED,
    EngineOptions,
    ServeOptions,
    engine_options,
    flag,
    format_size,
    parse_size,
)
from lamella.engine.errors import StartError


def parse(*words: str) -> EngineOptions:
    parser = Parser(prog="lamella serve")
    add_flags(parser, EngineOptions, skip=("model",))
    return options_from(parser.parse_args(list(words)), EngineOptions, model="m")


SAMPLES = {
    "int": ("64", 64),
    "float": ("2.5", 2.5),
    "size": ("2GiB", 2 << 30),
    "json": ('{"method": "ngram"}', {"method": "ngram"}),
    "str": ("text", "text"),
}


@pytest.mark.parametrize("options", [EngineOptions, ServeOptions])
def test_every_field_has_a_working_flag(options: type) -> None:
    for field in dataclasses.fields(options):
        if field.name == "model":
            continue
        parser = Parser(prog="x")
        add_flags(parser, options, skip=("model",))
        kind = field.metadata["kind"]
        if kind == "bool":
            parsed = parser.parse_args(["--no-" + field.name.replace("_", "-")])
            assert getattr(options_from(parsed, options), field.name) is False
            continue
        if kind == "list":
            parsed = parser.parse_args([flag(field.name), "a", flag(field.name), "b"])
            assert getattr(options_from(parsed, options), field.name) == ["a", "b"]
            continue
        text, value = SAMPLES[kind]
        if field.metadata["choices"]:
            text = value = field.metadata["choices"][-1]
        if field.name == "max_num_batched_tokens":
            text, value = "4096", 4096
        parsed = parser.parse_args([flag(field.name), text])
        assert getattr(options_from(parsed, options), field.name) == value


def test_every_flag_is_explained() -> None:
    parser = Parser(prog="x")
    add_flags(parser, EngineOptions)
    add_flags(parser, ServeOptions)
    for action in parser._actions:
        assert action.help
        assert len(action.help) > 10
    text = parser.format_help()
    assert "--kv-cache-memory SIZE" in text
    assert "(default: 64)" in text


def test_environment_stands_behind_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMELLA_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("LAMELLA_ENABLE_PREFIX_CACHING", "off")
    options = parse()
    assert (options.max_num_seqs, options.enable_prefix_caching) == (7, False)
    assert parse("--max-num-seqs", "9").max_num_seqs == 9
    monkeypatch.setenv("LAMELLA_MAX_NUM_SEQS", "many")
    with pytest.raises(StartError, match="LAMELLA_MAX_NUM_SEQS.*'many'"):
        parse()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-num-seqs", "x"], "max-num-seqs"),
        (["--max-num-seqs", "0"], "at least 1"),
        (["--max-num-seq", "3", "--bogus"], "did you mean .--max-num-seqs."),
        (["--kv-cache-memory", "3 parsecs"], "not a size"),
        (["--dtype", "int3"], "int3"),
        (["--speculative-config", "[1]"], "not a JSON object"),
        (["--speculative-config", "{"], "not a valid json"),
        (["--block-size", "24"], "power of two"),
        (["--max-num-batched-tokens", "8"], "below --max-num-seqs"),
        (["--max-model-length", "8"], "did you mean '--max-model-len'"),
        (["stray"], "unexpected argument 'stray'"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str) -> None:
    with pytest.raises(StartError, match=message):
        parse(*words)


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_options_that_no_longer_exist_say_why(name: str) -> None:
    with pytest.raises(StartError, match="does not exist: ") as flagged:
        parse(flag(name))
    assert REMOVED[name][:20] in str(flagged.value)
    with pytest.raises(StartError, match="does not exist: "):
        engine_options(**{name: True})


def test_python_keywords() -> None:
    assert engine_options(model="m", kv_cache_memory="1GiB").kv_cache_memory == 1 << 30
    with pytest.raises(StartError, match="unknown option 'max_seqs'"):
        engine_options(model="m", max_seqs=3)
    with pytest.raises(StartError, match="did you mean 'max_num_seqs'"):
        engine_options(model="m", max_num_seq=3)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1024", 1024), ("1KiB", 1024), ("1k", 1000), ("1.5GB", 1_500_000_000), ("2 MiB", 2 << 20), ("1TiB", 1 << 40)],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_size(text) == value


def test_sizes_print_short() -> None:
    assert [format_size(n) for n in (12, 2048, 3 << 30)] == ["12 B", "2.0 KiB", "3.0 GiB"]


def test_booleans_have_both_spellings() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, ServeOptions)
    assert parser.parse_args(["--log-stats"]).log_stats is True
    assert parser.parse_args(["--no-log-stats"]).log_stats is False
