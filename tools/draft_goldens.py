"""Compute with the package `speculators` what tiny random draft heads put out, and keep it for the default tests.

    hatch run oracle:golden [--check] [HEAD ...]      all heads if none is named

It writes packages/runner-v2/tests/testing/draft_heads/golden/HEAD.safetensors. With --check it writes nothing and says
how far the files are from what is computed now; exit status 1 if further than rounding. Models run in float64, apart
from what transformers does in float32 whatever it is told (norms, rotation).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
# this environment holds the package's requirements, not the package, which would bring another transformers
sys.path.insert(0, str(ROOT / "packages/runner-v2/src"))
# speculators requires them and nothing here needs them: builds for GPUs do not load beside a torch without them
sys.modules |= {"torchvision": None, "torchaudio": None}  # type: ignore[dict-item]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from loguru import logger  # noqa: E402
from speculators.config import SpeculatorModelConfig  # noqa: E402
from speculators.convert import convert_model  # noqa: E402
from speculators.model import SpeculatorModel  # noqa: E402

from lamella.runner_v2.testing.draft_heads import (  # noqa: E402
    checkpoint,
    dflash,
    dflash2,
    dspark,
    eagle3,
    goldens,
    mtp,
    target,
)
from lamella.runner_v2.testing.draft_heads.checkpoint import Array  # noqa: E402

FOLDER = ROOT / "packages/runner-v2/tests/testing/draft_heads/golden"
ROUNDING = 1e-5


def load(folder: Path) -> Any:
    """The model that speculators makes of a checkpoint, with attention that is written out."""
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model: Any = SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float64).eval()
    # what a checkpoint leaves to its target is taken from there if it is NaN, but loading leaves what memory held
    if hasattr(model, "verifier_lm_head"):  # MTP's model sees to it itself, once
        with torch.no_grad():
            for name in {"embed_tokens.weight", "lm_head.weight"} - checkpoint.read(folder).tensors.keys():
                model.get_parameter(name).fill_(torch.nan)
        model.load_verifier_weights()
    assert not any(parameter.isnan().any() for parameter in model.parameters()), f"{folder}: tensors were not loaded"
    return model


def outputs_of(module: torch.nn.Module) -> list[Array]:
    """A list to which every later call of the module appends its output, without the batch."""
    kept: list[Array] = []
    module.register_forward_hook(lambda _module, _inputs, output: kept.append(output.detach()[0].numpy()))
    return kept


def run_eagle3(folder: Path, scratch: Path, variant: dict[str, Any]) -> Array:
    """[NUM_STEPS, NUM_ROWS, draft_vocab_size]: entry [s, i] follows on s drafts behind row i, which are the next ids of
    the sequence."""
    if variant.get("style") == "authors":
        target_path = scratch / "target"
        convert_model(str(folder), str(target_path), "eagle3", str(scratch / "converted"))
        folder = scratch / "converted"
    model = load(folder)
    logits = outputs_of(model.lm_head)
    ids = goldens.token_ids()
    hidden = torch.from_numpy(goldens.hidden_states(model.fc.in_features))
    with torch.no_grad():
        model(
            hidden[None],
            torch.tensor([ids]),
            torch.zeros(1, len(ids), dtype=torch.long),
            position_ids=torch.arange(len(ids))[None],
            ttt_steps=goldens.NUM_STEPS,
        )
    return np.stack(logits)


def run_mtp(folder: Path, scratch: Path, variant: dict[str, Any]) -> Array:
    """[NUM_STEPS, NUM_ROWS - 1 - NUM_STEPS, vocab_size]: in each pass, row i is fed with row i of the pass before and
    with the id that lies one further on."""
    convert_model(str(folder), str(folder), "mtp", str(scratch / "module"), num_speculative_steps=goldens.NUM_STEPS)
    model = load(scratch / "module")
    hidden = torch.from_numpy(goldens.hidden_states(goldens.SIZES["hidden_size"]))
    with torch.no_grad():
        logits, *_ = model(input_ids=torch.tensor([goldens.token_ids()]), hidden_states=hidden[None])
    return np.stack([rows[0].numpy() for rows in logits])


class BlockRun(NamedTuple):
    """One pass of a block drafter over all blocks."""

    model: Any
    hidden: torch.Tensor  # [num_anchors * block_size, hidden_size], normed
    given: inspect.BoundArguments  # what the head gives to its losses: the logits, and what follows from them

    def blocks(self, values: torch.Tensor) -> Array:
        """[1, num_anchors * block_size, width] -> [num_anchors, block_size, width]"""
        return np.asarray(values.reshape(len(goldens.ANCHORS), self.model.block_size, -1).numpy())


def run_block(folder: Path, scratch: Path, variant: dict[str, Any]) -> BlockRun:
    """Run the head's forward; its losses, which need Triton, are not computed."""
    if variant.get("style") == "authors":
        convert_model(str(folder), str(scratch / "target"), "dflash", str(scratch / "converted"))
        folder = scratch / "converted"
    model = load(folder)
    module = sys.modules[type(model).__module__]
    signature, given = inspect.signature(module.compute_metrics), []

    def keep(*args: Any, **kwargs: Any) -> tuple[None, None]:
        given.append(signature.bind(*args, **kwargs))
        return None, None

    hidden = []
    model.norm.register_forward_hook(lambda _module, _inputs, output: hidden.append(output[0]))
    num_rows = len(goldens.BLOCK_IDS)
    chosen = torch.zeros(1, num_rows)
    chosen[0, list(goldens.ANCHORS)] = 1
    with torch.no_grad(), mock.patch.object(module, "compute_metrics", keep):
        model(
            torch.from_numpy(goldens.block_hidden_states(model.fc.in_features))[None],
            torch.tensor([goldens.BLOCK_IDS]),
            chosen,
            torch.zeros(1, num_rows, goldens.SIZES["hidden_size"], dtype=torch.float64),
            torch.zeros(1, num_rows, dtype=torch.long),
            max_anchors=len(goldens.ANCHORS),
        )
    return BlockRun(model, hidden[0], given[0])


def run_dflash(folder: Path, scratch: Path, variant: dict[str, Any]) -> Array:
    """[num_anchors, block_size, draft_vocab_size], the anchor's slot too."""
    run = run_block(folder, scratch, variant)
    return run.blocks(run.given.arguments["logits"])


def run_dspark(folder: Path, scratch: Path, variant: dict[str, Any]) -> Array:
    """[num_anchors, block_size, draft_vocab_size + 1], behind the sequence's own ids; the last column is the logit of
    the confidence."""
    run = run_block(folder, scratch, variant)
    confidences = run.blocks(run.given.arguments["confidence_logits"])
    return np.concatenate([run.blocks(run.given.arguments["logits"]), confidences], axis=2)


def run_dflash2(folder: Path, scratch: Path, variant: dict[str, Any]) -> Array:
    """[2, num_anchors, block_size, vocab_size]: logits of slots alone, and scores of candidates behind the sequence's
    own ids, -inf for all others."""
    run = run_block(folder, scratch, variant)
    unary = run.given.arguments["unary_logits"]
    indices = torch.tensor(goldens.ANCHORS)[:, None] + torch.arange(run.model.block_size)
    before = run.model._predecessor_ids(torch.tensor([goldens.BLOCK_IDS]), indices.flatten()).reshape(1, -1)
    with torch.no_grad():
        candidates, scores = run.model.candidate_selector.select(unary, run.hidden[None], before)
    spread = torch.full_like(unary, -torch.inf).scatter(-1, candidates, scores)
    return np.stack([run.blocks(unary), run.blocks(spread)])


class Head(NamedTuple):
    """How a head's checkpoints are written and run."""

    write: Callable[..., Path]
    run: Callable[[Path, Path, dict[str, Any]], Array]


HEADS = {
    "eagle3": Head(eagle3.write_checkpoint, run_eagle3),
    "mtp": Head(mtp.write_checkpoint, run_mtp),
    "dflash": Head(dflash.write_checkpoint, run_dflash),
    "dspark": Head(dspark.write_checkpoint, run_dspark),
    "dflash2": Head(dflash2.write_checkpoint, run_dflash2),
}


def golden_of(head: str) -> goldens.Golden:
    """Run all cases of a head."""
    results, digests = {}, {}
    for case, variant in goldens.CASES[head].items():
        with tempfile.TemporaryDirectory() as name:
            scratch = Path(name)
            target.write_ends(scratch / "target", goldens.SEED, **goldens.SIZES)
            # the digest is of a folder without the path of its target
            digests[case] = checkpoint.digest(HEADS[head].write(scratch / "nameless", goldens.SEED, **variant))
            own_target = {} if head == "mtp" else {"target_path": str(scratch / "target")}
            folder = HEADS[head].write(scratch / "head", goldens.SEED, **variant, **own_target)
            results[case] = HEADS[head].run(folder, scratch, variant)
    versions = {name: importlib.metadata.version(name) for name in ("speculators", "transformers", "torch")}
    return goldens.Golden(results, digests, versions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", nargs="*", metavar="HEAD", choices=[[], *HEADS], help=", ".join(HEADS))
    parser.add_argument("--check", action="store_true", help="compare with the files instead of writing them")
    args = parser.parse_args()
    logger.disable("speculators")
    far = False
    for head in args.heads or HEADS:
        made, path = golden_of(head), FOLDER / f"{head}.safetensors"
        if not args.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            goldens.save(path, made)
            print(f"{path.relative_to(ROOT)}: {len(made.results)} cases, {path.stat().st_size} bytes")
            continue
        kept = goldens.load(path)
        for case, result in made.results.items():
            known = case in kept.results and kept.digests[case] == made.digests[case]
            with np.errstate(invalid="ignore"):  # -inf on both sides is no distance
                distance = float(np.nanmax(np.abs(result - kept.results[case]))) if known else np.inf
            far |= not distance <= ROUNDING
            print(f"{head} {case}: " + (f"{distance:.1e}" if known else "not of this checkpoint"))
    sys.exit(1 if far else 0)


if __name__ == "__main__":
    main()
