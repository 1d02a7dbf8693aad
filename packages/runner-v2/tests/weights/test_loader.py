"""Loading into slots: order, packing, storage that stays, and one error that names what does not fit."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lamella.runner_v2.errors import CheckpointError
from lamella.runner_v2.memory import Arena
from lamella.runner_v2.testing.tiny_gguf import write_gguf
from lamella.runner_v2.testing.tiny_models import TinyModel, write_folder
from lamella.runner_v2.weights.loader import load
from lamella.runner_v2.weights.open import open_checkpoint
from lamella.runner_v2.weights.rules import parts_of
from lamella.runner_v2.weights.slots import Checkpoint, Part, RawPart, Slot
from lamella.runner_v2.weights.store import WeightStore


class Bound:
    """Slots for every part of a model, one a part, and what they were given."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.order: list[str] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.slots = [self._slot(part) for part in parts_of(checkpoint.config).values()]

    def _slot(self, part: Part) -> Slot:
        def pack(raw: Sequence[RawPart]) -> Mapping[str, torch.Tensor]:
            self.order.append(raw[0].key)
            return {"raw": raw[0].data}

        def bind(packed: Mapping[str, torch.Tensor]) -> None:
            self.tensors[part.key] = packed["raw"]

        return Slot(f"slot.{part.key}", (part,), pack, bind)


@pytest.fixture
def llama(tmp_path: Path) -> TinyModel:
    return write_folder(tmp_path / "llama", "llama", num_shards=2)


def test_load_fills_the_store_in_file_order(llama: TinyModel) -> None:
    checkpoint = open_checkpoint(llama.path)
    bound, store = Bound(checkpoint), WeightStore(Arena("weights"))
    load(checkpoint, bound.slots, store)
    places = [checkpoint.place_of(key) for key in bound.order]
    assert places == sorted(places)
    assert set(store) == {f"slot.{key}.raw" for key in parts_of(checkpoint.config)}
    assert store.total_bytes == sum(t.nbytes for t in llama.state.values()) == store.arena.allocated_bytes
    embed = store["slot.embed.raw"]
    assert embed is bound.tensors["embed"]
    assert torch.equal(embed, llama.state["model.embed_tokens.weight"])
    checkpoint.close()
    assert torch.equal(embed, llama.state["model.embed_tokens.weight"]), "the store does not look into the files"


def test_a_second_load_writes_into_the_same_storage(llama: TinyModel, tmp_path: Path) -> None:
    store = WeightStore(Arena("weights"))
    first = Bound(open_checkpoint(llama.path))
    load(open_checkpoint(llama.path), first.slots, store)
    before = {name: store[name].data_ptr() for name in store}
    other = write_folder(tmp_path / "other", "llama", seed=1)
    load(open_checkpoint(other.path), first.slots, store)
    assert {name: store[name].data_ptr() for name in store} == before
    assert store.arena.num_tensors == len(store)
    assert torch.equal(first.tensors["layers.2.down"], other.state["model.layers.2.mlp.down_proj.weight"])


def test_storing_another_shape_under_a_name_is_a_bug() -> None:
    store = WeightStore(Arena("weights"))
    store.put("w", torch.ones(2, 3))
    assert "w" in store
    with pytest.raises(AssertionError, match=r"w: .*\(3, 2\)"):
        store.put("w", torch.ones(3, 2))
    with pytest.raises(AssertionError, match="float16"):
        store.put("w", torch.ones(2, 3, dtype=torch.float16))


def test_several_parts_reach_pack_in_order(llama: TinyModel) -> None:
    checkpoint = open_checkpoint(llama.path)
    parts = parts_of(checkpoint.config)
    qkv = tuple(parts.pop(f"layers.0.{name}") for name in "qkv")
    parts.pop("layers.1.attn_norm")
    seen: list[str] = []

    def pack(raw: Sequence[RawPart]) -> Mapping[str, torch.Tensor]:
        seen.extend(part.key for part in raw)
        return {"weight": torch.cat([part.data for part in raw])}

    rest = Bound(checkpoint)
    slots = [slot for slot in rest.slots if slot.parts[0].key not in {part.key for part in qkv}]
    bias = Part("layers.0.q_bias", (64,), optional=True)
    store = WeightStore(Arena("weights"))
    load(checkpoint, [*slots, Slot("qkv", (*qkv, bias), pack, lambda packed: None)], store, tp_rank=1, tp_size=2)
    assert seen == ["layers.0.q", "layers.0.k", "layers.0.v"], "an optional part that is absent is left out"
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    assert torch.equal(store["qkv.weight"], torch.cat([llama.state[name].chunk(2)[1] for name in names]))


def test_quantised_parts_arrive_as_blocks(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", "qwen2", formats="q4_1")
    checkpoint = open_checkpoint(model.path)
    bound, store = Bound(checkpoint), WeightStore(Arena("weights"))
    load(checkpoint, bound.slots, store)
    assert bound.tensors["layers.0.gate"].dtype == torch.uint8
    assert bound.tensors["layers.0.gate"].shape == (128, 2 * 20)


def test_parts_are_on_the_device_before_they_are_packed(llama: TinyModel) -> None:
    checkpoint = open_checkpoint(llama.path)
    bound, store = Bound(checkpoint), WeightStore(Arena("weights", "meta"))
    load(checkpoint, bound.slots, store, device="meta")
    assert {tensor.device.type for tensor in bound.tensors.values()} == {"meta"}
    assert store.total_bytes == sum(t.nbytes for t in llama.state.values())


def test_misfits_are_named_in_one_error(llama: TinyModel) -> None:
    state = dict(llama.state)
    for idx in range(3):
        for name in ("q", "k", "v"):
            del state[f"model.layers.{idx}.self_attn.{name}_proj.weight"]
    state["model.layers.0.mlp.up_proj.weight"] = torch.zeros(64, 128)
    state["model.layers.3.mlp.up_proj.weight"] = torch.zeros(128, 64)
    save_file(state, llama.path / "model.safetensors")
    (llama.path / "model.safetensors.index.json").unlink()
    checkpoint = open_checkpoint(llama.path)
    bound, store = Bound(checkpoint), WeightStore(Arena("weights"))
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint, bound.slots, store)
    message = str(caught.value)
    assert "does not fit model family llama" in message
    assert "missing: model.layers.0.self_attn.q_proj.weight, " in message
    assert message.count("self_attn") == 8
    assert "and 1 more" in message
    assert "of the wrong shape: model.layers.0.mlp.up_proj.weight is [64, 128], needed [128, 64]" in message
    assert "unknown to this model: model.layers.3.mlp.up_proj.weight" in message
    assert len(store) == 0, "nothing was read"
    assert bound.order == []


def test_progress_goes_to_standard_error_and_only_if_asked(
    llama: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = open_checkpoint(llama.path)
    load(checkpoint, Bound(checkpoint).slots, WeightStore(Arena("weights")))
    assert capsys.readouterr() == ("", "")
    load(checkpoint, Bound(checkpoint).slots, WeightStore(Arena("weights")), progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "weights: 100%" in err
