"""Writes a random tiny checkpoint of any supported family in a real file format, with a tokenizer.

python tools/tiny_checkpoint.py llama /tmp/tiny-llama                      folder of safetensors
python tools/tiny_checkpoint.py qwen3 /tmp/tiny-qwen3 --shards 3 --dtype bfloat16
python tools/tiny_checkpoint.py gemma3_text /tmp/tiny.gguf --format q4_1   GGUF
python tools/tiny_checkpoint.py qwen2 /tmp/tiny.gguf --format q4_k         blocks of 256: wider matrices
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lamella.runner_v2.quant.scheme import FORMATS
from lamella.runner_v2.testing.tiny_gguf import write_gguf
from lamella.runner_v2.testing.tiny_models import TINY_CONFIGS, WIDE, write_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=list(TINY_CONFIGS))
    parser.add_argument("path", type=Path, help="a folder, or a file that ends in .gguf")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"], help="of a folder")
    parser.add_argument("--shards", type=int, default=1, help="safetensors files of a folder")
    parser.add_argument("--format", default="float32", choices=list(FORMATS), help="of a GGUF file's matrices")
    parser.add_argument("--no-tokenizer", action="store_true")
    args = parser.parse_args()
    tokenizer = not args.no_tokenizer
    if args.path.suffix == ".gguf":
        wide = dict(WIDE, moe_intermediate_size=256) if FORMATS[args.format].block_len == 256 else {}
        model = write_gguf(args.path, args.family, seed=args.seed, formats=args.format, tokenizer=tokenizer, **wide)
    else:
        model = write_folder(
            args.path, args.family, seed=args.seed, dtype=args.dtype, num_shards=args.shards, tokenizer=tokenizer
        )
    num_weights = sum(weight.numel() for weight in model.state.values())
    print(f"{model.path}: {args.family}, {num_weights:,} weights")


if __name__ == "__main__":
    main()
