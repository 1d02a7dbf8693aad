"""Flags, environment and Python keywords give the same options, and mistakes are named."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

import pytest

from lamella.engine.config.flags import Parser, add_flags, misspelt_variables, number, options_from, output_file
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
SPECIAL = {
    "max_num_batched_tokens": ("4096", 4096),
    "device": ("cuda:1", "cuda:1"),
    "gpu_memory_utilization": ("0.5", 0.5),
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
        if kind in ("list", "texts"):
            parsed = parser.parse_args([flag(field.name), "a", flag(field.name), "b"])
            assert getattr(options_from(parsed, options), field.name) == ["a", "b"]
            continue
        if kind == "ints":
            parsed = parser.parse_args([flag(field.name), "1,2", flag(field.name), "8"])
            assert getattr(options_from(parsed, options), field.name) == [1, 2, 8]
            continue
        text, value = SAMPLES[kind]
        if field.metadata["choices"]:
            text = value = field.metadata["choices"][-1]
        if field.name in SPECIAL:
            text, value = SPECIAL[field.name]
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
    assert "(default: 1024)" in text


def test_a_variable_of_tiers_is_one_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMELLA_KV_TIER", 'ram=1GiB,external=a.b:C,{"x": [1, 2]}')
    assert parse().kv_tier == ['ram=1GiB,external=a.b:C,{"x": [1, 2]}']
    assert parse("--kv-tier", "ram=2GiB").kv_tier == ["ram=2GiB"]
    assert engine_options(model="m", kv_tier="ram=2GiB").kv_tier == ["ram=2GiB"]


def test_a_misspelt_variable_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LAMELLA_THRAEDS", "LAMELLA_THREADS", "LAMELLA_CACHE", "LAMELLA_PORT", "LAMELLA_CMAKE_DIR"):
        monkeypatch.setenv(name, "1")
    (line,) = misspelt_variables()
    assert "LAMELLA_THRAEDS is no option" in line
    assert "did you mean 'THREADS'" in line


def test_numbers_between_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMELLA_CUDA_GRAPH_SIZES", "1,2,8")
    assert parse().cuda_graph_sizes == [1, 2, 8]
    assert parse("--cuda-graph-sizes", "4").cuda_graph_sizes == [4]
    assert engine_options(model="m", cuda_graph_sizes=[16]).cuda_graph_sizes == [16]


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
        (["--max-num-batched-tokens", "8", "--max-num-seqs", "9"], "below --max-num-seqs"),
        (["--device", "gpu"], "--device must be auto, cpu, cuda or cuda:N; got 'gpu'"),
        (["--device", "cuda:"], "--device must be auto"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization must be at most 1"),
        (["--gpu-memory-utilization", "0"], "--gpu-memory-utilization must be at least 0.01"),
        (["--cuda-graph-sizes", "1,x"], "'1,x' is not a valid list of whole numbers"),
        (["--cuda-graph-sizes", "0"], "--cuda-graph-sizes must be numbers from 1 to 16384, got 0"),
        (["--cuda-graph-sizes", "4", "--enforce-eager"], "leave one out"),
        (["--max-num-seqs", "9" * 20], "--max-num-seqs must be at most 16384"),
        (["--threads", "9" * 20], "--threads must be at most 4096"),
        (["--block-size", "9" * 20], "--block-size must be at most 4096"),
        (["--max-num-batched-tokens", "9" * 20], "--max-num-batched-tokens must be at most"),
        (["--seed", "9" * 20], "--seed must be at most"),
        (["--seed", "9" * 9999], r"'9{100}\.\.\.' is not a valid int"),
        (["--kv-cache-memory", "inf"], "'inf' is not a size"),
        (["--kv-cache-memory", "1e400"], "'1e400' is not a size"),
        (["--kv-cache-memory", "nan"], "'nan' is not a size"),
        (["--speculative-config", '{"a":' * 9999], "is not a valid json"),
        (["--", "--seed", "3"], "--seed stands behind '--'"),
        (["--max-model-length", "8"], "did you mean '--max-model-len'"),
        (["stray"], "unexpected argument 'stray'"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str) -> None:
    with pytest.raises(StartError, match=message):
        parse(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "70000"], "--port must be at most 65535, got 70000"),
        (["--port", "-1"], "--port must be at least 0"),
        (["--drain-timeout", "nan"], "--drain-timeout must be at least 0, got nan"),
        (["--drain-timeout", "inf"], "--drain-timeout must be at most"),
        (["--max-body-size", "0"], "--max-body-size must be at least 1"),
        (["--max-num-queued-reqs", "-1"], "--max-num-queued-reqs must be at least 0"),
        (["--api-key", ""], "--api-key must not be empty"),
        (["--api-key", "good", "--api-key", "secret\n"], "--api-key has white space around it"),
        (["--served-model-name", ""], "--served-model-name must not be empty"),
    ],
)
def test_mistakes_about_the_server_are_named(words: list[str], message: str) -> None:
    parser = Parser(prog="lamella serve")
    add_flags(parser, ServeOptions)
    with pytest.raises(StartError, match=message) as raised:
        options_from(parser.parse_args(words), ServeOptions)
    assert "secret" not in str(raised.value)


def test_numbers_of_commands_have_bounds() -> None:
    parser = Parser(prog="x")
    parser.add_argument("--count", type=number("int", 1))
    parser.add_argument("--share", type=number("float", 0, 1))
    assert parser.parse_args(["--count", "3", "--share", "0.5"]) == argparse.Namespace(count=3, share=0.5)
    for words, message in (
        (["--count", "0"], "--count: must be at least 1, got 0"),
        (["--count", "1.5"], "--count: '1.5' is not a valid int"),
        (["--share", "2"], "--share: must be at most 1, got 2"),
        (["--share", "nan"], "--share: must be a number, got nan"),
        (["--share", "x"], "--share: 'x' is not a valid float"),
    ):
        with pytest.raises(StartError, match=message):
            parser.parse_args(words)


def test_output_files_are_checked_before_the_work(tmp_path: Path) -> None:
    parser = Parser(prog="x")
    parser.add_argument("--json", type=output_file())
    parser.add_argument("--plot", type=output_file(".png", ".html"))
    good = [str(tmp_path / "a.json"), str(tmp_path / "a.PNG")]
    assert list(vars(parser.parse_args(["--json", good[0], "--plot", good[1]])).values()) == good
    for words, message in (
        (["--json", str(tmp_path)], "is a folder"),
        (["--json", str(tmp_path / "none" / "a.json")], "there is no folder '.*none'"),
        (["--json", "x" * 9999], "is no file name"),
        (["--json", "a\0"], "is no file name"),
        (["--plot", "a.gif"], "'a.gif' must end in .png, .html"),
    ):
        with pytest.raises(StartError, match=message):
            parser.parse_args(words)


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_options_that_no_longer_exist_say_why(name: str) -> None:
    with pytest.raises(StartError, match="does not exist: ") as flagged:
        parse(flag(name))
    assert REMOVED[name][:20] in str(flagged.value)
    with pytest.raises(StartError, match="does not exist: "):
        engine_options(**{name: True})


def test_replacements_of_those_options_are_what_is_said_of_them() -> None:
    options = {flag(field.name): field for field in dataclasses.fields(EngineOptions)}
    for reason in REMOVED.values():
        names = re.findall(r"--[a-z-]+", reason)
        assert names
        assert set(names) <= set(options)
    assert "cached in floating-point types, which need no scales" in REMOVED["calculate_kv_scales"]
    assert set(options["--kv-cache-dtype"].metadata["choices"]) == {"auto", "float16", "float32", "bfloat16", "fp8"}


def test_python_keywords() -> None:
    assert engine_options(model="m", kv_cache_memory="1GiB").kv_cache_memory == 1 << 30
    with pytest.raises(StartError, match="unknown option 'max_seqs'"):
        engine_options(model="m", max_seqs=3)
    with pytest.raises(StartError, match="did you mean 'max_num_seqs'"):
        engine_options(model="m", max_num_seq=3)
    for field in dataclasses.fields(ServeOptions):
        message = f"{field.name} is an option of the HTTP server: .* `lamella serve` as {flag(field.name)}"
        with pytest.raises(StartError, match=message):
            engine_options(model="m", **{field.name: 3})


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"max_num_seqs": "8"}, "--max-num-seqs must be of the type int, got '8'"),
        ({"max_num_seqs": True}, "--max-num-seqs must be of the type int, got True"),
        ({"dtype": None}, "--dtype must be of the type str, got None"),
        ({"cuda_graph_sizes": ["1"]}, "--cuda-graph-sizes must hold whole numbers"),
        ({"cuda_graph_sizes": [True]}, "--cuda-graph-sizes must hold whole numbers"),
        ({"max_model_len": 1.5}, "--max-model-len must be of the type int"),
        ({"kv_cache_memory": 1.5}, "--kv-cache-memory must be of the type int"),
        ({"enable_prefix_caching": "no"}, "--enable-prefix-caching must be of the type bool"),
        ({"speculative_config": "ngram"}, "--speculative-config must be of the type dict"),
        ({"dtype": 3}, "--dtype must be of the type str"),
        ({"model": Path("m")}, "--model must be of the type str"),
    ],
)
def test_python_keywords_of_another_type_are_named(keywords: dict[str, object], message: str) -> None:
    with pytest.raises(StartError, match=message):
        engine_options(**{"model": "m", **keywords})


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


@pytest.mark.parametrize("value", [0.5, -1.0, float("nan"), 10.0**7])
def test_a_step_timeout_that_healthy_steps_would_miss_is_refused(value: float) -> None:
    with pytest.raises(StartError, match="--step-timeout must be"):
        ServeOptions(step_timeout=value)
    assert ServeOptions(step_timeout=0.0).step_timeout == 0.0
