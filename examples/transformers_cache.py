"""A plain transformers model gains a prefix cache on disk, through lamella-kvtier alone.

    python examples/transformers_cache.py FOLDER [MODEL]

MODEL is anything that AutoModelForCausalLM loads and that keeps full attention in a DynamicCache; without it a small
random llama is made. What was computed for one prompt is kept by blocks of 16 tokens under chained keys; later prompts
with the same beginning, in this process or the next, read it instead of computing it.

    prompt ids ──KeyChain──▶ keys ──▶ disk → host slots ──▶ past_key_values of [0, restored)
                                      model computes [restored, end)
                                      past_key_values ──▶ host slots → disk
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from lamella.kvtier import CopyJob, Group, KeyChain, Layout, Location, Presence, TicketResult
from lamella.kvtier.data.disk.store import DiskStore
from lamella.kvtier.data.host_buffer import HostBuffer
from lamella.kvtier.data.mover import TierMover

BLOCK_SIZE = 16
DISK = Location("disk", 0, 0)


class PrefixCache:
    """Blocks of past_key_values on disk.

    A block in a slot: [num_layers, 2 (keys, values), num_kv_heads, BLOCK_SIZE, head_dim].
    """

    def __init__(self, model: Any, folder: Path, num_slots: int = 64, capacity_bytes: int = 1 << 30) -> None:
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.dtype: torch.dtype = model.dtype
        self.shape = (config.num_hidden_layers, 2, config.num_key_value_heads, BLOCK_SIZE, head_dim)
        num_bytes = torch.Size(self.shape).numel() * self.dtype.itemsize
        group = Group("full", "full", BLOCK_SIZE, num_bytes, row_format=str(self.dtype))
        fingerprint = Layout((group,), (num_slots + 1,), model=identity(model)).fingerprint()
        self.buffer = HostBuffer([num_bytes], [num_slots])
        store = DiskStore(folder, fingerprint=fingerprint, capacity_bytes=capacity_bytes)
        self.mover = TierMover(self.buffer, fingerprint=fingerprint, store=store)
        self.known: set[bytes] = set()
        self._num_tickets = 0
        self.mover.wait_told(60.0)

    def restore(self, token_ids: Sequence[int]) -> tuple[DynamicCache, int]:
        """The longest beginning that is on disk, as past_key_values and its length. At least the last token is left to
        compute: its logits are not kept."""
        self._note_presence()
        keys = KeyChain(BLOCK_SIZE).extend(token_ids, len(token_ids) - 1)
        hit = next((n for n, key in enumerate(keys) if key not in self.known), len(keys))
        blocks: list[torch.Tensor] = []
        for start in range(0, hit, self.num_slots):
            wanted = keys[start : min(hit, start + self.num_slots)]
            done = self._copy([(key, None, DISK, Location("host", 0, slot)) for slot, key in enumerate(wanted)])
            for slot, ok in enumerate(done):
                if not ok:  # a failed load is a miss: what hangs on it is computed
                    self.known.difference_update(keys[start + slot :])
                    return self._joined(blocks)
                blocks.append(self._block(slot).clone())
        return self._joined(blocks)

    def save(self, token_ids: Sequence[int], cache: DynamicCache) -> int:
        """Keep the full blocks that are not on disk yet; how many there were."""
        keys = KeyChain(BLOCK_SIZE).extend(token_ids, cache.get_seq_length())
        new = [n for n, key in enumerate(keys) if key not in self.known]
        for start in range(0, len(new), self.num_slots):
            part = new[start : start + self.num_slots]
            for slot, n in enumerate(part):
                rows = slice(n * BLOCK_SIZE, (n + 1) * BLOCK_SIZE)
                self._block(slot).copy_(
                    torch.stack([torch.stack((at.keys[0, :, rows], at.values[0, :, rows])) for at in cache.layers])
                )
            copies = [
                (keys[n], keys[n - 1] if n else None, Location("host", 0, slot), DISK) for slot, n in enumerate(part)
            ]
            for n, ok in zip(part, self._copy(copies)):
                if not ok:  # full, say: its children could never be found
                    return n
                self.known.add(keys[n])
        return len(new)

    def close(self) -> None:
        self.mover.close()

    @property
    def num_slots(self) -> int:
        return self.buffer.num_slots[0]

    def _block(self, slot: int) -> torch.Tensor:
        return torch.frombuffer(self.buffer.view(0, slot), dtype=self.dtype).view(self.shape)

    def _joined(self, blocks: list[torch.Tensor]) -> tuple[DynamicCache, int]:
        cache = DynamicCache()
        if blocks:
            rows = torch.cat(blocks, 3)  # [num_layers, 2, num_kv_heads, tokens, head_dim]
            for layer, (keys, values) in enumerate(rows):
                cache.update(keys[None], values[None], layer)
        return cache, len(blocks) * BLOCK_SIZE

    def _copy(self, copies: Sequence[tuple[bytes, bytes | None, Location, Location]]) -> list[bool]:
        """Whether each went well."""
        first = self._num_tickets
        self._num_tickets += len(copies)
        self.mover.submit(
            [
                CopyJob(first + n, key, source, target, self.buffer.bytes_per_block[0], parent=parent)
                for n, (key, parent, source, target) in enumerate(copies)
            ]
        )
        ended: dict[int, bool] = {}
        while len(ended) < len(copies):
            self.mover.wait(1.0)
            ended |= self._note_presence()
        return [ended[first + n] for n in range(len(copies))]

    def _note_presence(self) -> dict[int, bool]:
        """Take what the mover says: what is on disk, and which copies ended how."""
        ended: dict[int, bool] = {}
        for event in self.mover.poll():
            if isinstance(event, Presence):
                self.known.update(key for _, key, _ in event.added)
                self.known.difference_update(key for _, key in event.removed)
            elif isinstance(event, TicketResult):
                ended[event.ticket] = event.ok
        return ended


def identity(model: Any) -> str:
    """Name of the weights: equal for equal ones only."""
    digest = hashlib.blake2b(repr(sorted(model.config.to_dict().items(), key=str)).encode(), digest_size=16)
    for name, weight in sorted(model.state_dict().items()):
        part = weight.detach().flatten()[:64].float()
        digest.update(name.encode() + part.numpy().tobytes() + weight.float().sum().numpy().tobytes())
    return digest.hexdigest()


@torch.inference_mode()
def generate(model: Any, prompt: Sequence[int], max_tokens: int, prefix: PrefixCache | None) -> tuple[list[int], int]:
    """Greedy answer, and how many tokens of the prompt were computed."""
    cache, restored = prefix.restore(prompt) if prefix is not None else (DynamicCache(), 0)
    ids = list(prompt)
    given = ids[restored:]
    for _ in range(max_tokens):
        logits = model(torch.tensor([given]), past_key_values=cache, use_cache=True).logits[0, -1]
        given = [int(logits.argmax())]
        ids += given
    if prefix is not None:
        prefix.save(ids, cache)
    return ids[len(prompt) :], len(prompt) - restored


def small_model() -> Any:
    """A llama with random weights, always the same."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=500, num_key_value_heads=2, **sizes)).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", nargs="?")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model).eval() if options.model else small_model()
    system = [(7 * n) % 499 + 1 for n in range(400)]
    prompts = [[*system, *((n * k) % 499 + 1 for k in range(1, 41))] for n in range(1, 5)]
    total = sum(map(len, prompts))
    plain = [generate(model, prompt, 16, None)[0] for prompt in prompts]
    for start in ("cold", "warm, after a restart"):
        prefix = PrefixCache(model, options.folder)
        answers, computed = zip(*(generate(model, prompt, 16, prefix) for prompt in prompts))
        prefix.close()
        print(f"{start}: {sum(computed)} of {total} prompt tokens computed, {total - sum(computed)} saved")
        print(f"  same answers as without the cache: {list(answers) == plain}")


if __name__ == "__main__":
    main()
