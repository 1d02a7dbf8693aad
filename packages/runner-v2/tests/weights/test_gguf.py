"""GGUF files: what is read equals what the gguf library makes of the file, and damage is named."""

import contextlib
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from lamella.runner_v2.config import LayerConfig, RopeConfig
from lamella.runner_v2.errors import CheckpointError, UnsupportedError
from lamella.runner_v2.quant.gguf_blocks import dequantise
from lamella.runner_v2.quant.scheme import FORMATS
from lamella.runner_v2.testing.tiny_gguf import llama3_factors, write_gguf
from lamella.runner_v2.testing.tiny_models import TINY_CONFIGS, WIDE, TinyModel, model_config, names_of
from lamella.runner_v2.testing.tiny_tokenizer import vocabulary
from lamella.runner_v2.weights.gguf import GgufCheckpoint
from lamella.runner_v2.weights.gguf_file import GgufFile
from lamella.runner_v2.weights.loader import check
from lamella.runner_v2.weights.rules import parts_of

MIXED = {"*": "q4_1", "embed": "q8_0", "v": "q5_0", "down": "float16", "k": "bfloat16"}


def assert_reads_as(model: TinyModel) -> GgufCheckpoint:
    checkpoint = GgufCheckpoint(model.path)
    parts, names = parts_of(checkpoint.config), names_of(model.config)
    check(checkpoint, list(parts.values()))
    assert {names[key] for key in parts} == set(model.state)
    for key, part in parts.items():
        raw = checkpoint.read(part, 0, 1)
        values = dequantise(raw.data, raw.format)
        if checkpoint.config.family == "gemma3_text" and values.dim() == 1:
            values = values - 1  # the file holds the factor, the folder the factor minus one
        assert raw.shape == part.shape
        assert torch.equal(values, model.state[names[key]]), key
    return checkpoint


@pytest.mark.parametrize("formats", ["float32", MIXED], ids=["float32", "mixed"])
@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_every_family(family: str, formats: str | Mapping[str, str], tmp_path: Path) -> None:
    checkpoint = assert_reads_as(write_gguf(tmp_path / "tiny.gguf", family, formats=formats))
    if formats is MIXED:
        assert [checkpoint.format_of(f"layers.0.{n}").name for n in "qkv"] == ["q4_1", "bfloat16", "q5_0"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_every_format(family: str, name: str, tmp_path: Path) -> None:
    wide = dict(WIDE, hidden_size=256, intermediate_size=256, num_attention_heads=2, num_key_value_heads=1)
    wide |= {"moe_intermediate_size": 256, "num_experts": 4, "num_hidden_layers": 1}
    checkpoint = assert_reads_as(write_gguf(tmp_path / "tiny.gguf", family, formats=name, **wide))
    assert checkpoint.format_of("layers.0.q").name == name
    assert checkpoint.format_of("embed").name == name


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_config_is_that_of_the_folder(family: str, tmp_path: Path) -> None:
    """But for what GGUF stores in another way."""
    model = write_gguf(tmp_path / "tiny.gguf", family)
    ours, folder = GgufCheckpoint(model.path).config, model_config({**model.config, "dtype": "float32"})
    different = {"norm_eps", "attention_scale"}  # float32 in the file
    different |= {"mistral": {"family"}, "llama": {"ropes"}, "gemma3_text": {"norm_plus_one"}}.get(family, set())
    for name in ModelConfigFields:
        if name not in different:
            assert getattr(ours, name) == getattr(folder, name), name
    assert ours.norm_eps == pytest.approx(folder.norm_eps)
    assert ours.attention_scale == pytest.approx(folder.attention_scale)
    assert not ours.norm_plus_one


ModelConfigFields = tuple(model_config(TINY_CONFIGS["llama"]).__dataclass_fields__)


def test_llama3_scaling_comes_as_factors(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", "llama")
    rope = GgufCheckpoint(model.path).config.ropes[0]
    assert rope == RopeConfig(theta=10000.0, freq_factors=tuple(llama3_factors(model.config).tolist()))
    assert rope.freq_factors is not None
    assert len(set(rope.freq_factors)) > 2


def rewrite(path: Path, edit: Callable[[gguf.GGUFWriter], None]) -> GgufCheckpoint:
    """A file of architecture gemma3 or another with hand-made metadata and a one-row embedding."""
    writer = gguf.GGUFWriter(path, path.stem)
    writer.add_block_count(62 if path.stem == "gemma3" else 2)
    writer.add_context_length(1024)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    edit(writer)
    writer.add_tensor("token_embd.weight", np.zeros((1, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufCheckpoint(path)


def test_defaults_of_gemma3(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_key_length(32)
        writer.add_value_length(32)
        writer.add_sliding_window(128)
        writer.add_rope_freq_base(1e6)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)

    config = rewrite(tmp_path / "gemma3.gguf", edit).config
    assert config.attention_scale == 16**-0.5, "62 layers: by hidden / heads"
    assert config.layers[:6] == (LayerConfig(128, 1),) * 5 + (LayerConfig(None, 0),)
    assert config.ropes == (RopeConfig(1e6, "linear", 8.0), RopeConfig(10000.0))
    assert config.embed_scale == 8.0


def test_metadata_of_other_scalings(tmp_path: Path) -> None:
    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(512)
        writer.add_rope_scaling_attn_factors(0.5)
        writer.add_float32("general.sampling.temp", 0.5)

    config = rewrite(tmp_path / "qwen2.gguf", yarn).config
    rope = config.ropes[0]
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 512)
    assert rope.attention_factor == pytest.approx(0.5 * (1 + 0.1 * np.log(4)))
    assert config.max_position == 2048
    assert config.generation == {"temperature": 0.5}


def test_windows_and_plain_rope(tmp_path: Path) -> None:
    config = rewrite(tmp_path / "llama.gguf", lambda writer: writer.add_sliding_window(32)).config
    assert config.layers == (LayerConfig(32),) * 2
    assert config.ropes == (RopeConfig(),)
    assert (config.head_dim, config.num_kv_heads, config.tie_embeddings) == (16, 4, True)


@pytest.mark.parametrize(
    ("arch", "edit", "words"),
    [
        ("mamba", lambda w: None, "general.architecture = 'mamba'.*qwen3moe"),
        ("llama", lambda w: w.add_expert_count(8), "llama.expert_count = 8.*qwen3moe"),
        ("llama", lambda w: w.add_rope_dimension_count(8), "llama.rope.dimension_count = 8.*16"),
        ("qwen2", lambda w: w.add_value_length(8), "qwen2.attention.value_length = 8"),
        ("qwen2", lambda w: w.add_string("qwen2.rope.scaling.type", "spiral"), "scaling.type = 'spiral'"),
        ("llama", lambda w: w.add_uint16("split.count", 3), "one of 3 pieces; .*--merge"),
    ],
)
def test_unsupported_metadata_is_named(
    arch: str, edit: Callable[[gguf.GGUFWriter], None], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=words):
        rewrite(tmp_path / f"{arch}.gguf", edit)


def test_unsupported_tensor_type_is_named(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        blocks = np.zeros((64, 2 * 18), np.uint8)
        writer.add_tensor("blk.0.attn_q.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.IQ4_NL)

    checkpoint = rewrite(tmp_path / "llama.gguf", edit)
    with pytest.raises(UnsupportedError, match=r"blk\.0\.attn_q\.weight has GGUF type IQ4_NL"):
        checkpoint.format_of("layers.0.q")


def test_metadata_is_lazy_and_complete(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", "llama")
    metadata = GgufFile(model.path).metadata()
    tokens, merges = vocabulary()
    assert metadata["general.architecture"] == "llama"
    assert metadata["tokenizer.ggml.tokens"] == tokens
    assert metadata["tokenizer.ggml.merges"] == [" ".join(pair) for pair in merges]
    assert metadata["tokenizer.ggml.token_type"] == [3, 3, 3] + [1] * (len(tokens) - 3)
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert metadata["llama.rope.freq_base"] == 10000.0
    assert "GGUF.version" not in metadata
    reference: Any = gguf.GGUFReader(model.path).fields
    assert set(metadata) == {name for name in reference if not name.startswith("GGUF.")}
    assert all(metadata[name] == reference[name].contents() for name in metadata)


def test_large_vocabularies_open_fast(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list([f"token{idx}" for idx in range(50_000)])
        writer.add_token_scores([0.0] * 50_000)

    path = tmp_path / "llama.gguf"
    rewrite(path, edit)
    start = time.process_time()
    file = GgufFile(path)
    assert time.process_time() - start < 0.5, "the library alone takes seconds"
    assert len(file.metadata()["tokenizer.ggml.tokens"]) == 50_000


def test_reading_metadata_needs_no_torch(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", "llama")
    code = (
        "import sys; from lamella.runner_v2.weights.gguf_file import GgufFile; "
        f"assert GgufFile({str(model.path)!r}).metadata()['general.architecture'] == 'llama'; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bad_magic(tmp_path: Path) -> None:
    for content in (b"", b"GG", b"GGML\x03\x00\x00\x00" + bytes(100), b"\x7fELF" + bytes(100)):
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"bad\.gguf: not a GGUF file"):
            GgufFile(tmp_path / "bad.gguf")


def test_versions_and_byte_order(tmp_path: Path) -> None:
    path = tmp_path / "old.gguf"
    for version, words in ((1, "GGUF version 1"), (4, "GGUF version 4"), (3 << 24, "big-endian files")):
        path.write_bytes(b"GGUF" + struct.pack("<I", version) + bytes(100))
        with pytest.raises(UnsupportedError, match=words):
            GgufFile(path)


def test_truncation_anywhere_is_an_error(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", "qwen2", formats="q4_0", num_hidden_layers=1)
    content = model.path.read_bytes()
    damaged = tmp_path / "cut.gguf"
    for keep in [8, 12, 24, *range(40, len(content) - 1, 1499), len(content) - 256]:
        damaged.write_bytes(content[:keep])
        with pytest.raises(CheckpointError, match=r"cut\.gguf: (damaged or truncated|there is no tensor)"):
            GgufCheckpoint(damaged)


def test_garbage_in_the_header_is_an_error_or_harmless(tmp_path: Path) -> None:
    content = write_gguf(tmp_path / "tiny.gguf", "qwen2", num_hidden_layers=1, tokenizer=False).path.read_bytes()
    damaged = tmp_path / "bad.gguf"
    rng = np.random.default_rng(0)
    for _ in range(150):
        edited = bytearray(content)
        for at in rng.integers(8, 1500, 3):
            edited[at] = rng.integers(0, 256)
        damaged.write_bytes(edited)
        with contextlib.suppress(CheckpointError, UnsupportedError):
            checkpoint = GgufCheckpoint(damaged)
            check(checkpoint, list(parts_of(checkpoint.config).values()))


def test_a_start_without_a_version_is_a_truncation(tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03")
    with pytest.raises(CheckpointError, match=r"cut\.gguf: truncated GGUF file: it has 5 bytes"):
        GgufFile(tmp_path / "cut.gguf")


def test_strings_of_other_encodings_are_read(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", "qwen2", num_hidden_layers=1)
    content = model.path.read_bytes()
    key = b"tokenizer.ggml.pre"
    at = content.index(key) + len(key) + 4 + 8  # behind the value's type and length
    (tmp_path / "odd.gguf").write_bytes(content[:at] + b"\xff" + content[at + 1 :])
    assert GgufFile(tmp_path / "odd.gguf").metadata()["tokenizer.ggml.pre"].startswith("\udcff")


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.gguf: not readable"):
        GgufFile(tmp_path / "none.gguf")


def test_ranks_of_quantised_llama_rows(tmp_path: Path) -> None:
    """The permutation is undone head by head, so it commutes with the cut."""
    model = write_gguf(tmp_path / "tiny.gguf", "llama", formats="q8_0")
    checkpoint = GgufCheckpoint(model.path)
    part, whole = parts_of(checkpoint.config)["layers.1.q"], model.state["model.layers.1.self_attn.q_proj.weight"]
    for rank in range(4):
        raw = checkpoint.read(part, rank, 4)
        assert torch.equal(dequantise(raw.data, raw.format), whole[rank * 16 : (rank + 1) * 16])
