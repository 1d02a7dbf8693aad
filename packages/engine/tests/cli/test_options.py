"""No option is accepted and ignored: each command's list is written down here, and what it offers is seen to be read.

An option that is new must be put into the lists of the commands that it has an effect on, and left out of the flags of
the others (`skip` of add_flags); then it must be read where that command runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamella.engine.cli.main import COMMANDS
from lamella.engine.cli.sampling_flags import NAMES, add_sampling_flags
from lamella.engine.compose import server as compose_server
from lamella.engine.compose.build import build_core
from lamella.engine.compose.core_config import CoreConfig
from lamella.engine.config.flags import Parser, options_from
from lamella.engine.config.schema import EngineOptions, ServeOptions
from lamella.engine.errors import StartError
from lamella.engine.request import SamplingParams
from lamella.engine.server import run as server_run
from lamella.runner_v2.testing.tiny_models import write_folder

LOADING = {
    "revision", "dtype", "max_model_len", "generation_config", "load_format", "device", "threads", "providers",
    "batch_invariant", "kv_cache_memory", "kv_cache_dtype", "block_size", "max_num_seqs", "max_num_batched_tokens",
    "speculative_config", "kv_tier", "gpu_memory_utilization", "enforce_eager", "cuda_graph_sizes",
}  # fmt: skip
"""Seen by whatever loads a model and runs steps on it."""

ENGINE = {
    "demo": set(),
    "pull": set(),
    "run": LOADING | {"chat_template"},
    "chat": LOADING | {"chat_template", "enable_prefix_caching"},
    "serve": LOADING | {"chat_template", "enable_prefix_caching", "scheduling_policy", "seed", "max_logprobs"},
    "inspect": LOADING | {"enable_prefix_caching", "scheduling_policy"},
    "tiers": set(),
    "top": set(),
    "bench_latency": LOADING | {"enable_prefix_caching"},
    "bench_throughput": LOADING | {"enable_prefix_caching"},
    "bench_serve": set(),
    "bench_spec": LOADING - {"speculative_config"} | {"chat_template", "enable_prefix_caching"},
}
SERVER = {"serve": {field.name for field in dataclasses.fields(ServeOptions)}}
"""All of them belong to the one command that has a server."""

OWN = {
    "demo": {"message", *NAMES},
    "pull": {"revision"},
    "run": {"prompt", "message", "system", "json", *NAMES},
    "chat": {"system", *NAMES},
    "serve": set(),
    "inspect": {"json"},
    "tiers": set(),
    "top": {"base_url", "api_key", "interval", "count"},
    "bench_latency": {"input_len", "output_len", "batch_size", "num_iters_warmup", "num_iters"},
    "bench_throughput": {"num_prompts", "input_len", "output_len", "spread"},
    "bench_serve": {
        "base_url", "model", "api_key", "num_prompts", "max_concurrency", "request_rate", "input_len", "output_len",
        "stream", "seed",
    },
    "bench_spec": {
        "workload", "methods", "config", "num_speculative_tokens", "output_len", "rounds", "apart", "target",
        "synthetic_acceptance_rates", "synthetic_acceptance_length",
    },
}  # fmt: skip
"""Those that belong to one command; a model's seed and a request's share a flag."""


def parser_of(command: str) -> Parser:
    parser = Parser(prog=command)
    importlib.import_module(f"lamella.engine.cli.{command}").add_arguments(parser)
    return parser


def flags_of(command: str) -> set[str]:
    return {action.dest for action in parser_of(command)._actions if action.option_strings} - {"help"}


def test_every_command_has_its_lists() -> None:
    benches = {name for name in ENGINE if name.startswith("bench_")}
    assert set(ENGINE) - benches == set(COMMANDS) - {"bench"}
    assert benches == {f"bench_{what}" for what in importlib.import_module("lamella.engine.cli.bench").WHAT}
    assert ENGINE["serve"] == {field.name for field in dataclasses.fields(EngineOptions)} - {"model"}


@pytest.mark.parametrize("command", ENGINE)
def test_a_command_offers_what_has_an_effect_on_it(command: str) -> None:
    assert flags_of(command) == ENGINE[command] | SERVER.get(command, set()) | OWN[command]


class Reads:
    """Names of options that were read from the objects that `watch` gives."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def watch(self, given: Any) -> Any:
        """The same options, which note what is read of them."""
        names = self.names

        class Watched(type(given)):  # type: ignore[misc]
            def __getattribute__(self, name: str) -> Any:
                names.add(name)
                return super().__getattribute__(name)

        watched = object.__new__(Watched)
        watched.__dict__.update(given.__dict__)
        return watched


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    """Of the options of commands that run here. Checks and copies of the whole do not count."""
    reads = Reads()
    for command in ENGINE:
        module = importlib.import_module(f"lamella.engine.cli.{command}")
        if hasattr(module, "options_from"):
            monkeypatch.setattr(module, "options_from", lambda *a, **k: reads.watch(options_from(*a, **k)))
    monkeypatch.setattr(CoreConfig, "to_wire", lambda self: {})
    return reads


def run(command: str, *words: str) -> set[str]:
    """Run it; the names of its flags whose values it read."""
    names: set[str] = set()

    class Watched(argparse.Namespace):
        def __getattribute__(self, name: str) -> Any:
            names.add(name)
            return super().__getattribute__(name)

    module = importlib.import_module(f"lamella.engine.cli.{command}")
    args = argparse.Namespace(json=None, plot=None)
    parser_of(command).parse_known_args(list(words), args)
    watched = Watched()
    object.__getattribute__(watched, "__dict__").update(vars(args))
    names.clear()
    assert module.run(watched) == 0
    return names


SMALL = ("--threads", "1", "--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--kv-cache-memory", "4MiB")
WORDS = {
    "run": ("--message", "hello", "--system", "be kind", "--max-tokens", "2"),
    "chat": ("--max-tokens", "2"),
    "inspect": (),
    "bench_latency": ("--input-len", "4", "--output-len", "2", "--num-iters", "1", "--num-iters-warmup", "0"),
    "bench_throughput": ("--num-prompts", "2", "--input-len", "4", "--output-len", "2"),
    "bench_spec": ("--workload", "WORKLOAD", "--output-len", "2", "--rounds", "1", "--methods", "ngram"),
}


@pytest.mark.parametrize("command", WORDS)
def test_what_a_command_offers_is_read_when_it_runs(
    command: str, tiny: str, reads: Reads, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workload = tmp_path / "w.jsonl"
    workload.write_text('{"messages": [{"role": "user", "content": "hello"}]}')
    lines = iter(["hello", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    words = [str(workload) if word == "WORKLOAD" else word for word in WORDS[command]]
    read = run(command, tiny, *words, *SMALL, "--max-model-len", "64")
    assert ENGINE[command] - reads.names == set()
    assert OWN[command] - read == set()


def test_what_the_server_offers_is_read_by_it_or_its_core(
    tiny: str, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[CoreConfig] = []

    class Link:
        def __init__(self, factory: str, config: Any) -> None:
            pass

    def run_server(make_client: Any, *given: Any, sock: Any, **more: Any) -> int:
        make_client()
        sock.close()
        return 0

    real = CoreConfig.__init__
    monkeypatch.setattr(CoreConfig, "__init__", lambda self, **k: real(self, **k) or made.append(self))
    monkeypatch.setattr(compose_server, "ProcessLink", Link)
    monkeypatch.setattr(server_run, "run_server", run_server)
    run("serve", tiny, "--port", "0", *SMALL)
    (config,) = made
    build_core(config, lambda text: None).close()
    assert (ENGINE["serve"] | SERVER["serve"]) - reads.names == set()


def test_an_option_that_nobody_reads_is_found(tiny: str, reads: Reads) -> None:
    run("inspect", tiny, *SMALL)
    assert "max_logprobs" not in reads.names, "read by no one here, so the watch sees through the copies"
    assert "load_format" in reads.names


def test_each_sampling_flag_is_a_field_of_the_parameters() -> None:
    parser = argparse.ArgumentParser()
    add_sampling_flags(parser, max_tokens=1)
    assert {action.dest for action in parser._actions} - {"help"} == set(NAMES)
    assert set(NAMES) <= set(SamplingParams.__struct_fields__)


def test_the_models_limit_holds_where_no_flag_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "tiny", "llama")
    (tmp_path / "tiny" / "generation_config.json").write_text('{"max_new_tokens": 3}')
    for words, count in (((), 3), (("--max-tokens", "5"), 5), (("--min-tokens", "2"), 3)):
        run("run", str(tmp_path / "tiny"), "--prompt", "x", "--ignore-eos", "--json", *words, *SMALL)
        assert len(json.loads(capsys.readouterr().out)["output_token_ids"]) == count


def test_a_chat_template_without_a_chat_is_refused(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(StartError, match="--chat-template goes with --message; --prompt is raw text"):
        run("run", tiny, "--prompt", "x", "--chat-template", str(tmp_path / "t.jinja"))
