"""The memory plan that `lamella inspect` prints adds up, and is what the core has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lamella.engine.cli.inspect import render
from lamella.engine.compose.build import build_core
from lamella.engine.compose.core_config import CoreConfig
from lamella.engine.config.schema import engine_options
from lamella.engine.wire import CoreInfo
from lamella.runner_v2.testing.tiny_models import write_folder


def info_of(path: Path, **options: Any) -> CoreInfo:
    given = engine_options(model=str(path), threads=1, max_num_seqs=2, max_num_batched_tokens=64, **options)
    core = build_core(CoreConfig(given, str(path), progress=False), lambda text: None)
    core.close()
    return core.info


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> CoreInfo:
    """Of a model with a full and a sliding group."""
    path = tmp_path_factory.mktemp("tiny") / "gemma"
    write_folder(path, "gemma3_text")
    return info_of(path, kv_cache_memory="2MiB", max_model_len=64)


def table(info: CoreInfo, section: str) -> list[dict[str, Any]]:
    names, *rows = info.report[section]
    return [dict(zip(names, row, strict=True)) for row in rows]


def test_each_group_says_what_it_holds(info: CoreInfo) -> None:
    groups = table(info, "KV groups")
    assert {row["group"].split()[0] for row in groups} >= {"full"}
    assert len(groups) == 2
    assert [row["blocks"] for row in groups] == info.num_blocks
    for row in groups:
        assert row["tokens"] == (row["blocks"] - 1) * row["tokens per block"]
        assert row["bytes"] == row["blocks"] * row["bytes per block"]
    (full,) = [row for row in groups if row["window"] == "-"]
    assert full["tokens"] == info.kv_tokens
    assert sum(row["bytes"] for row in groups) <= 2 << 20


def test_the_plan_names_weights_workspace_and_cache(info: CoreInfo) -> None:
    memory = {row[""]: row for row in table(info, "memory")}
    assert list(memory) == [
        "this machine",
        "available at start",
        "weights",
        "workspace of a step",
        "KV cache",
        "left free",
    ]
    assert memory["KV cache"]["bytes"] == sum(row["bytes"] for row in table(info, "KV groups"))
    assert memory["workspace of a step"]["what"] == "estimate for 64 tokens and 2 logits rows"
    sizes = {name: row["bytes"] for name, row in memory.items()}
    assert all(sizes.values())
    assert sizes["left free"] < sizes["this machine"]
    assert sizes["weights"] + sizes["workspace of a step"] + sizes["KV cache"] < sizes["available at start"]


def test_drafts_widen_the_workspace(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", "llama")
    drafts = {"method": "ngram", "num_speculative_tokens": 4}
    plain = {row[""]: row for row in table(info_of(tmp_path / "m"), "memory")}["workspace of a step"]
    wide = info_of(tmp_path / "m", speculative_config=drafts)
    drafting = {row[""]: row for row in table(wide, "memory")}["workspace of a step"]
    assert drafting["what"] == "estimate for 64 tokens and 10 logits rows"
    assert drafting["bytes"] > plain["bytes"]
    assert wide.report["speculation"] == {"most drafts": 4, "methods": "ngram", "rule": "standard", "output": "exact"}


def test_the_report_is_plain_data_and_reads_as_text(info: CoreInfo) -> None:
    assert json.loads(json.dumps(info.report)) == info.report
    text = render(info.report)
    for word in ("workspace of a step", "bytes per block", "max_num_batched_tokens", "why not others"):
        assert word in text
    assert not any(line != line.rstrip() for line in text.splitlines())
