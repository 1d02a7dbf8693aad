"""Storage formats of weights, and what a format can say about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a matrix [out, in] lies in the checkpoint.

    Dense formats: float32, float16, bfloat16. GGUF block formats: q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k.
    Blocks run along the input dimension.
    """

    name: str
    block_len: int = 1
    """Weights per block; a shard along the input dimension is a multiple of it."""
    block_bytes: int = 4

    @property
    def quantised(self) -> bool:
        return self.block_len > 1


FORMATS: dict[str, WeightFormat] = {
    f.name: f
    for f in (
        WeightFormat("float32", 1, 4),
        WeightFormat("float16", 1, 2),
        WeightFormat("bfloat16", 1, 2),
        WeightFormat("q8_0", 32, 34),
        WeightFormat("q4_0", 32, 18),
        WeightFormat("q4_1", 32, 20),
        WeightFormat("q5_0", 32, 22),
        WeightFormat("q5_1", 32, 24),
        WeightFormat("q4_k", 256, 144),
        WeightFormat("q5_k", 256, 176),
        WeightFormat("q6_k", 256, 210),
    )
}
