"""Checkpoint folders: what is read equals what was written, and damage is named."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lamella.runner_v2.errors import CheckpointError, UnsupportedError
from lamella.runner_v2.testing.tiny_models import (
    TINY_CONFIGS,
    TinyModel,
    names_of,
    save_with_transformers,
    tiny_config,
    write_folder,
)
from lamella.runner_v2.weights.files import FolderCheckpoint
from lamella.runner_v2.weights.loader import check
from lamella.runner_v2.weights.rules import parts_of

INDEX = "model.safetensors.index.json"


def assert_reads_as(checkpoint: FolderCheckpoint, state: dict[str, torch.Tensor], names: dict[str, str]) -> None:
    """Every weight equals that of the state, no tensor is left over."""
    parts = parts_of(checkpoint.config)
    check(checkpoint, list(parts.values()))
    assert {names[key] for key in parts} == set(state)
    for key, part in parts.items():
        raw = checkpoint.read(part, 0, 1)
        assert raw.shape == part.shape
        assert torch.equal(raw.data.float(), state[names[key]]), key


@pytest.fixture
def llama(tmp_path: Path) -> TinyModel:
    return write_folder(tmp_path / "llama", "llama", num_shards=3)


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_a_folder_by_transformers_reads_as_its_state_dict(family: str, tmp_path: Path) -> None:
    model = save_with_transformers(tmp_path, family, dtype="bfloat16")
    checkpoint = FolderCheckpoint(tmp_path)
    assert checkpoint.config.family == family
    assert checkpoint.config.dtype == "bfloat16"
    assert checkpoint.format_of("embed").name == "bfloat16"
    assert_reads_as(checkpoint, model.state, names_of(model.config))


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_both_writers_agree(family: str, tmp_path: Path) -> None:
    ours = write_folder(tmp_path / "ours", family, num_shards=2)
    theirs = save_with_transformers(tmp_path / "theirs", family)
    first, second = FolderCheckpoint(ours.path), FolderCheckpoint(theirs.path)
    assert first.config == second.config
    assert_reads_as(first, theirs.state, names_of(ours.config))


def test_shards_read_like_one_file(llama: TinyModel) -> None:
    assert len(list(llama.path.glob("*.safetensors"))) == 3
    checkpoint = FolderCheckpoint(llama.path)
    assert_reads_as(checkpoint, llama.state, names_of(llama.config))
    places = [checkpoint.place_of(key) for key in parts_of(checkpoint.config)]
    assert len(set(places)) == len(places)
    assert {file for file, _ in places} == {0, 1, 2}


def test_consolidated_and_adapter_files_are_left_alone(tmp_path: Path) -> None:
    model = write_folder(tmp_path, "mistral")
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    (tmp_path / "consolidated.safetensors").write_bytes(b"in another naming")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no part of the model")
    assert_reads_as(FolderCheckpoint(tmp_path), model.state, names_of(model.config))


def test_a_tensor_in_two_shards_counts_where_the_index_says(llama: TinyModel) -> None:
    last = llama.path / "model-00003-of-00003.safetensors"
    tensors = load_file(last)
    tensors["model.norm.weight"] = torch.full((64,), 7.0)  # the index places it in the first file
    save_file(tensors, last)
    assert_reads_as(FolderCheckpoint(llama.path), llama.state, names_of(llama.config))
    (llama.path / INDEX).unlink()
    with pytest.raises(CheckpointError, match="model.norm.weight is in several files"):
        FolderCheckpoint(llama.path)


def test_a_tied_copy_of_the_head_is_ignored(llama: TinyModel) -> None:
    save_file(
        {**llama.state, "lm_head.weight": llama.state["model.embed_tokens.weight"].clone()},
        llama.path / "model.safetensors",
    )
    (llama.path / INDEX).unlink()
    checkpoint = FolderCheckpoint(llama.path)
    assert checkpoint.unread(parts_of(checkpoint.config)) == []


def test_old_buffers_are_ignored(llama: TinyModel) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(llama.state | extra, llama.path / "model.safetensors")
    (llama.path / INDEX).unlink()
    assert FolderCheckpoint(llama.path).unread(parts_of(FolderCheckpoint(llama.path).config)) == []


@pytest.mark.parametrize(
    ("prefix", "head", "vision"),
    [
        ("language_model.model.", "language_model.", "vision_tower.encoder.weight"),
        ("model.language_model.", "", "model.vision_tower.encoder.weight"),
    ],
)
def test_the_text_of_a_multimodal_checkpoint(
    prefix: str, head: str, vision: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = write_folder(tmp_path, "gemma3_text", tie_word_embeddings=False)
    moved = {
        f"{head}{name}" if name.startswith("lm_head") else name.replace("model.", prefix, 1): tensor
        for name, tensor in text.state.items()
    }
    save_file(moved | {vision: torch.ones(3)}, tmp_path / "model.safetensors")
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "tie_word_embeddings": False}
    inner = {key: value for key, value in text.config.items() if key not in ("architectures", "tie_word_embeddings")}
    (tmp_path / "config.json").write_text(json.dumps({**outer, "text_config": inner, "vision_config": {}}))
    with caplog.at_level(logging.WARNING):
        checkpoint = FolderCheckpoint(tmp_path)
    assert [record.message for record in caplog.records] == [
        f"{tmp_path.name}: only the text model is used; its other modalities are left out"
    ]
    assert not checkpoint.config.tie_embeddings
    assert_reads_as(checkpoint, text.state, names_of(text.config))


def test_generation_config_gives_sampling_defaults(llama: TinyModel) -> None:
    sampling = {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "max_new_tokens": 99}
    (llama.path / "generation_config.json").write_text(json.dumps({**sampling, "eos_token_id": [7], "pad_token_id": 0}))
    assert FolderCheckpoint(llama.path).config.generation == sampling
    (llama.path / "generation_config.json").unlink()
    assert FolderCheckpoint(llama.path).config.generation == {}


def test_without_dtype_the_files_decide(llama: TinyModel) -> None:
    edit_config(llama.path, dtype=None)
    assert FolderCheckpoint(llama.path).config.dtype == "float32"


def edit_config(folder: Path, **changes: Any) -> None:
    values = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps({name: v for name, v in values.items() if v is not None}))


@pytest.mark.parametrize("keep", [0, 5, 100, 20000])
def test_truncated_file_is_named(llama: TinyModel, keep: int) -> None:
    shard = llama.path / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="model-00002-of-00003.safetensors: damaged or truncated"):
        FolderCheckpoint(llama.path)


def test_missing_shard_is_named(llama: TinyModel) -> None:
    (llama.path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00003.safetensors is missing, which .*index.json lists"):
        FolderCheckpoint(llama.path)


def test_tensor_absent_from_its_shard_is_named(llama: TinyModel) -> None:
    index = json.loads((llama.path / INDEX).read_text())
    index["weight_map"]["model.layers.9.extra"] = "model-00001-of-00003.safetensors"
    (llama.path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003.safetensors: tensor model.layers.9.extra"):
        FolderCheckpoint(llama.path)


@pytest.mark.parametrize("weight_map", [{}, {"a": "../other.safetensors"}, {"a": 3}, None])
def test_senseless_index(llama: TinyModel, weight_map: Any) -> None:
    (llama.path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="index.json"):
        FolderCheckpoint(llama.path)


@pytest.mark.parametrize(("text", "words"), [("{", "not readable as JSON"), ("[1]", "no JSON object")])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
def test_broken_json_is_named(llama: TinyModel, name: str, text: str, words: str) -> None:
    (llama.path / name).write_text(text)
    with pytest.raises(CheckpointError, match=f"{name}: .*{words}"):
        FolderCheckpoint(llama.path)


def test_unknown_dtype_is_named(llama: TinyModel) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    save_file(llama.state | {name: llama.state[name].to(torch.float8_e4m3fn)}, llama.path / "model.safetensors")
    (llama.path / INDEX).unlink()
    checkpoint = FolderCheckpoint(llama.path)
    with pytest.raises(UnsupportedError, match=f"{name} has type F8_E4M3; supported in safetensors: F32, F16, BF16"):
        checkpoint.format_of("layers.1.q")


def test_missing_tensor_and_wrong_shape_are_named_when_read(llama: TinyModel) -> None:
    checkpoint = FolderCheckpoint(llama.path)
    parts = parts_of(checkpoint.config)
    with pytest.raises(CheckpointError, match=r"model.layers.0.mlp.up_proj.weight is \[128, 64\], needed \[64, 64\]"):
        checkpoint.read(parts["layers.0.q"].__class__("layers.0.up", (64, 64)), 0, 1)
    assert not checkpoint.has("layers.7.q")
    with pytest.raises(CheckpointError, match="no tensor model.layers.7.self_attn.q_proj.weight"):
        checkpoint.format_of("layers.7.q")
    with pytest.raises(CheckpointError, match="no tensor layers.0.shortcut"):
        checkpoint.shape_of("layers.0.shortcut")


def test_a_rank_reads_its_piece(llama: TinyModel) -> None:
    checkpoint = FolderCheckpoint(llama.path)
    part = parts_of(checkpoint.config)["layers.2.q"]
    whole = llama.state["model.layers.2.self_attn.q_proj.weight"]
    assert torch.equal(checkpoint.read(part, 1, 2).data, whole[32:])


def test_configs_that_this_build_does_not_know(llama: TinyModel) -> None:
    edit_config(llama.path, architectures=["MambaForCausalLM"])
    with pytest.raises(UnsupportedError, match=r"config.json: architecture MambaForCausalLM .* LlamaForCausalLM"):
        FolderCheckpoint(llama.path)
    assert tiny_config("llama")["architectures"] == ["LlamaForCausalLM"]
