"""The engines that the CPU bench compares with, behind one face.

A peer prefills a prompt and decodes greedily; both return seconds. All compute the logits of the last row only, and all
use the same number of threads. Ids are given, so no tokenizer is in the way.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

import lamella.engine as lamella
from lamella.runner_v2.testing.reference import load_reference


class Peer(Protocol):
    """An engine with a loaded model."""

    name: str

    def run(self, prompts: Sequence[Sequence[int]], num_new: int) -> tuple[float, float]:
        """Seconds for the prompts (to the first token of each) and for the num_new - 1 tokens that follow."""

    def close(self) -> None: ...


class Lamella:
    """The whole engine through its Python face: scheduler, sampling and stop rules included."""

    name = "lamella"

    def __init__(self, path: Path, threads: int, batch: int, length: int) -> None:
        self._llm = lamella.LLM(
            str(path),
            threads=threads,
            max_num_seqs=batch,
            max_model_len=length,
            max_num_batched_tokens=max(4096, batch * length),
            enable_prefix_caching=False,
        )

    def run(self, prompts: Sequence[Sequence[int]], num_new: int) -> tuple[float, float]:
        params = lamella.SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        outputs = self._llm.generate([list(p) for p in prompts], params)
        total = time.perf_counter() - start
        first = max(output.ttft_s for output in outputs)
        return first, total - first

    def close(self) -> None:
        self._llm.close()


class Transformers:
    """transformers' forward pass with its cache, bfloat16 or float32 weights from the same file."""

    def __init__(self, path: Path, threads: int, dtype: str) -> None:
        torch.set_num_threads(threads)
        self.name = f"transformers {'bf16' if dtype == 'bfloat16' else 'fp32'}"
        self._model = load_reference(path, getattr(torch, dtype))

    def run(self, prompts: Sequence[Sequence[int]], num_new: int) -> tuple[float, float]:
        with torch.inference_mode():
            ids = torch.tensor([list(p) for p in prompts])
            start = time.perf_counter()
            out = self._model(input_ids=ids, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            first = time.perf_counter() - start
            for _ in range(num_new - 1):
                out = self._model(
                    input_ids=token, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1
                )
                token = out.logits[:, -1].argmax(-1, keepdim=True)
            return first, time.perf_counter() - start - first

    def close(self) -> None:
        del self._model


class LlamaCpp:
    """llama.cpp through llama-cpp-python's low-level calls."""

    name = "llama.cpp"

    def __init__(self, path: Path, threads: int, batch: int, length: int) -> None:
        import llama_cpp
        import numpy

        self._c, self._np = llama_cpp, numpy
        self._llm = llama_cpp.Llama(
            str(path),
            n_ctx=batch * (length + 8),
            n_seq_max=batch,
            n_batch=max(512, batch * length),
            n_ubatch=512,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )

    def run(self, prompts: Sequence[Sequence[int]], num_new: int) -> tuple[float, float]:
        c, context = self._c, self._llm._ctx.ctx
        c.llama_memory_clear(c.llama_get_memory(context), True)
        start = time.perf_counter()
        batch = c.llama_batch_init(sum(map(len, prompts)), 0, 1)
        last = []
        for seq, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                self._put(batch, token, position, seq, position == len(prompt) - 1)
            last.append(batch.n_tokens - 1)
        tokens = self._decode(batch, last)
        first = time.perf_counter() - start
        for step in range(num_new - 1):
            batch.n_tokens = 0
            for seq, token in enumerate(tokens):
                self._put(batch, token, len(prompts[seq]) + step, seq, True)
            tokens = self._decode(batch, list(range(len(prompts))))
        c.llama_batch_free(batch)
        return first, time.perf_counter() - start - first

    def _put(self, batch: Any, token: int, position: int, seq: int, logits: bool) -> None:
        i = batch.n_tokens
        batch.token[i], batch.pos[i], batch.logits[i] = token, position, logits
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = seq
        batch.n_tokens = i + 1

    def _decode(self, batch: Any, rows: list[int]) -> list[int]:
        context = self._llm._ctx.ctx
        code = self._c.llama_decode(context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        vocab = self._llm.n_vocab()
        out = []
        for row in rows:
            logits = self._np.ctypeslib.as_array(self._c.llama_get_logits_ith(context, row), shape=(vocab,))
            out.append(int(logits.argmax()))
        return out

    def close(self) -> None:
        self._llm.close()


def have_llama_cpp() -> bool:
    """Is llama-cpp-python installed? It is no dependency: building it takes minutes."""
    return importlib.util.find_spec("llama_cpp") is not None
