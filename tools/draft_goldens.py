"""Compute with the package `speculators` what tiny random draft heads put out, and keep it for the default tests.

    hatch run oracle:golden [--check] [HEAD ...]      all heads if none is named

It writes packages/runner-v2/tests/testing/draft_heads/golden/HEAD.safetensors. With --check it writes nothing and says
how far the files are from what is computed now; exit status 1 if further than rounding. Models run in float64, apart
from what transformers does in float32 whatever it is told (norms, rotation).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speculators.config import SpeculatorModelConfig
from speculators.convert import convert_model
from speculators.model import SpeculatorModel

ROOT = Path(__file__).resolve().parent.parent
# this environment holds the package's requirements, not the package, which would bring another transformers
sys.path.insert(0, str(ROOT / "packages/runner-v2/src"))

from lamella.runner_v2.testing.draft_heads import checkpoint, eagle3, goldens, mtp, target  # noqa: E402
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


WRITERS: dict[str, Callable[..., Path]] = {"eagle3": eagle3.write_checkpoint, "mtp": mtp.write_checkpoint}
RUNNERS: dict[str, Callable[[Path, Path, dict[str, Any]], Array]] = {"eagle3": run_eagle3, "mtp": run_mtp}


def golden_of(head: str) -> goldens.Golden:
    """Run all cases of a head."""
    results, digests = {}, {}
    for case, variant in goldens.CASES[head].items():
        with tempfile.TemporaryDirectory() as name:
            scratch = Path(name)
            target.write_ends(scratch / "target", goldens.SEED, **goldens.SIZES)
            # the digest is of a folder without the path of its target
            digests[case] = checkpoint.digest(WRITERS[head](scratch / "nameless", goldens.SEED, **variant))
            own_target = {} if head == "mtp" else {"target_path": str(scratch / "target")}
            folder = WRITERS[head](scratch / "head", goldens.SEED, **variant, **own_target)
            results[case] = RUNNERS[head](folder, scratch, variant)
    versions = {name: importlib.metadata.version(name) for name in ("speculators", "transformers", "torch")}
    return goldens.Golden(results, digests, versions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", nargs="*", metavar="HEAD", choices=[[], *RUNNERS], help=", ".join(RUNNERS))
    parser.add_argument("--check", action="store_true", help="compare with the files instead of writing them")
    args = parser.parse_args()
    far = False
    for head in args.heads or RUNNERS:
        made, path = golden_of(head), FOLDER / f"{head}.safetensors"
        if not args.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            goldens.save(path, made)
            print(f"{path.relative_to(ROOT)}: {len(made.results)} cases, {path.stat().st_size} bytes")
            continue
        kept = goldens.load(path)
        for case, result in made.results.items():
            known = case in kept.results and kept.digests[case] == made.digests[case]
            distance = float(np.max(np.abs(result - kept.results[case]))) if known else np.inf
            far |= not distance <= ROUNDING
            print(f"{head} {case}: " + (f"{distance:.1e}" if known else "not of this checkpoint"))
    sys.exit(1 if far else 0)


if __name__ == "__main__":
    main()
