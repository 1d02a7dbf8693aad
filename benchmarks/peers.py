"""The engines that the CPU bench compares with, behind one face.

A peer prefills a prompt and decodes greedily; both return seconds. All compute the logits of the last row only, and all
use the same number of threads. Ids are given, so no tokenizer is in the way.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
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
    """llama.cpp through llama-cpp-python's low-level calls, one sequence."""

    name = "llama.cpp"

    def __init__(self, path: Path, threads: int, length: int) -> None:
        self._c = importlib.import_module("llama_cpp")
        self._llm = self._c.Llama(
            str(path),
            n_ctx=length + 8,
            n_batch=length,
            n_ubatch=512,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )
        self._context = self._llm._ctx.ctx
        self._vocab = self._llm.n_vocab()

    def run(self, prompts: Sequence[Sequence[int]], num_new: int) -> tuple[float, float]:
        (prompt,) = prompts
        c = self._c
        c.llama_memory_clear(c.llama_get_memory(self._context), True)
        batch = c.llama_batch_init(len(prompt), 0, 1)
        start = time.perf_counter()
        for position, token in enumerate(prompt):
            self._put(batch, token, position, position == len(prompt) - 1)
        token = self._decode(batch, len(prompt) - 1)
        first = time.perf_counter() - start
        for step in range(num_new - 1):
            batch.n_tokens = 0
            self._put(batch, token, len(prompt) + step, True)
            token = self._decode(batch, 0)
        total = time.perf_counter() - start
        c.llama_batch_free(batch)
        return first, total - first

    def _put(self, batch: Any, token: int, position: int, logits: bool) -> None:
        i = batch.n_tokens
        batch.token[i], batch.pos[i], batch.logits[i] = token, position, logits
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = 0
        batch.n_tokens = i + 1

    def _decode(self, batch: Any, row: int) -> int:
        code = self._c.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        logits = np.ctypeslib.as_array(self._c.llama_get_logits_ith(self._context, row), shape=(self._vocab,))
        return int(logits.argmax())

    def close(self) -> None:
        self._llm.close()


def have_llama_cpp() -> bool:
    """Is llama-cpp-python installed? It is no dependency: building it takes minutes."""
    return importlib.util.find_spec("llama_cpp") is not None
