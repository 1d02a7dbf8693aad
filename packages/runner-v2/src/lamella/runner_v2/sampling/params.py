"""How one row samples: the part of a request's sampling parameters that the runner needs. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters of one device row. Values are already validated and resolved by the caller.

    Off values: top_k 0, top_p 1, min_p 0, penalties 1/0/0, temperature 0 means greedy.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not be completed."""
    allowed_ids: tuple[int, ...] | None = None
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    """End and stop ids: masked until min_tokens output tokens exist."""
    seed: int = 0
    """Key of the row's noise; 64 bit. The caller draws one where the user gave none."""
    num_logprobs: int | None = None
    """None: none; 0: of the sampled token only; k: and of the k best; -1: of the whole vocabulary."""
    num_prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5
