"""Models from a hub: what is fetched, and what is said when it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants as hub_constants

from lamella.engine.errors import StartError
from lamella.engine.models import ModelSource, resolve_model

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"x",
    "model-00001-of-00002.safetensors": b"a" * 5000,
    "model-00002-of-00002.safetensors": b"b" * 5000,
    "model.safetensors.index.json": b"{}",
    "tokenizer.model": b"m",
    "additional_chat_templates/tool_use.jinja": b"t",
    "README.md": b"readme",
    "pytorch_model.bin": b"p",
    "consolidated.safetensors": b"c",
    "onnx/model.json": b"{}",
    "original/params.json": b"{}",
}
FETCHED = {
    "config.json", "tokenizer.json", "chat_template.jinja", "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.model",
    "additional_chat_templates/tool_use.jinja",
}  # fmt: skip


@pytest.fixture
def resolve(hub: Any, tmp_path: Path) -> Any:
    def call(name: str, **options: Any) -> ModelSource:
        return resolve_model(name, endpoint=hub.endpoint, hub_cache_dir=tmp_path / "hub", progress=False, **options)

    return call


def test_repository(hub: Any, resolve: Any) -> None:
    hub.repos["org/model"] = FILES
    source = resolve("org/model")
    assert (source.name, source.kind) == ("org/model", "folder")
    found = {file.relative_to(source.path).as_posix() for file in source.path.rglob("*") if file.is_file()}
    assert found == FETCHED
    assert (source.path / "model-00002-of-00002.safetensors").read_bytes() == b"b" * 5000


@pytest.mark.parametrize("name", ["org/model", "org/model:q4.gguf"])
def test_without_a_terminal_a_pull_says_when_it_begins_and_ends(
    hub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    hub.repos["org/model"] = {**FILES, "q4.gguf": b"GGUF"}
    path = resolve_model(name, endpoint=hub.endpoint, hub_cache_dir=tmp_path).path
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("pull ")]
    assert told == [f"pull {name}: fetching from the hub what is not in its cache", f"pull {name}: done, {path}"]


def test_is_fetched_once(hub: Any, resolve: Any) -> None:
    hub.repos["org/model"] = FILES
    path = resolve("org/model").path
    hub.requests.clear()
    assert resolve("org/model").path == path
    assert not [request for request in hub.requests if request[0] == "GET" and "/resolve/" in request[1]]


def test_one_gguf_file(hub: Any, resolve: Any) -> None:
    hub.repos["org/model-GGUF"] = {"a/model-Q4_K_M.gguf": b"GGUF4", "model-Q8_0.gguf": b"GGUF8"}
    source = resolve("org/model-GGUF:model-Q8_0.gguf")
    assert source.kind == "gguf"
    assert source.path.read_bytes() == b"GGUF8"
    assert resolve("org/model-GGUF:a/model-Q4_K_M.gguf").path.read_bytes() == b"GGUF4"


def test_repository_with_gguf_files_only(hub: Any, resolve: Any) -> None:
    hub.repos["org/model-GGUF"] = {"config.json": b"{}", **{f"m-Q{n}.gguf": b"GGUF" for n in range(3)}}
    message = (
        r"org/model-GGUF has GGUF files only; name one of them, as in org/model-GGUF:m-Q0.gguf; it has m-Q0.gguf, m-Q1"
    )
    with pytest.raises(StartError, match=message):
        resolve("org/model-GGUF")


def test_repository_without_safetensors(hub: Any, resolve: Any) -> None:
    hub.repos["org/old"] = {"config.json": b"{}", "pytorch_model.bin": b"p"}
    with pytest.raises(StartError, match="org/old has no .safetensors files; other weight formats are not read"):
        resolve("org/old")


def test_file_that_is_not_there(hub: Any, resolve: Any) -> None:
    hub.repos["org/model"] = {"m-Q4.gguf": b"GGUF"}
    with pytest.raises(StartError, match=r"org/model has no file 'm-Q5.gguf'; it has m-Q4.gguf"):
        resolve("org/model:m-Q5.gguf")


def test_repository_that_is_not_there(resolve: Any) -> None:
    with pytest.raises(
        StartError, match="org/none was not found on the hub; check the name, and if it is private"
    ) as raised:
        resolve("org/none")
    assert "\n" not in str(raised.value)


def test_revision(hub: Any, resolve: Any) -> None:
    hub.repos["org/model"] = FILES
    assert resolve("org/model", revision="main").path.is_dir()
    with pytest.raises(StartError, match="org/model has no revision 'v9'"):
        resolve("org/model", revision="v9")


def test_gated_repository(hub: Any, resolve: Any) -> None:
    hub.repos["org/gated"] = FILES
    hub.gated.add("org/gated")
    with pytest.raises(StartError, match="org/gated is gated: accept its conditions on its page, then set HF_TOKEN"):
        resolve("org/gated")
    hub.token = "hf_right"
    assert resolve("org/gated", token="hf_right").kind == "folder"


def test_offline_takes_what_is_in_the_cache(hub: Any, resolve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/model"] = FILES
    path = resolve("org/model").path
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert resolve("org/model").path == path
    assert hub.requests == []
    for missing in ("org/other", "org/other:m.gguf"):
        with pytest.raises(
            StartError, match=f"{missing} is not in the local cache, and the hub cannot be reached"
        ) as raised:
            resolve(missing)
        assert "\n" not in str(raised.value)


def test_no_network(tmp_path: Path, hub: Any) -> None:
    hub.close()
    with pytest.raises(StartError, match="org/model is not in the local cache, and the hub cannot be reached"):
        resolve_model("org/model", endpoint=hub.endpoint, hub_cache_dir=tmp_path, progress=False)


def test_server_that_fails(hub: Any, resolve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_respond", lambda *_: (418, {}, b"{}"))
    with pytest.raises(StartError, match="org/model") as raised:
        resolve("org/model:m.gguf")
    assert "\n" not in str(raised.value)
