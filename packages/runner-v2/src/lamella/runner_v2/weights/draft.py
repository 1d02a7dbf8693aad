"""Opens networks that draft, and finds out what they are."""

from __future__ import annotations

from lamella.runner_v2.config import ModelConfig, RunnerConfig
from lamella.runner_v2.errors import UnsupportedError
from lamella.runner_v2.models.draft import DraftSource, decoder_source
from lamella.runner_v2.weights.dummy import DummyCheckpoint
from lamella.runner_v2.weights.open import open_checkpoint, read_config
from lamella.runner_v2.weights.rules import parts_of
from lamella.runner_v2.weights.slots import Checkpoint

METHODS = ("draft_model",)


def open_draft(config: RunnerConfig, target: ModelConfig) -> DraftSource:
    """The network that config.draft names, for a target. Its checkpoint is open; weights stay on disk until they are
    read.

    RunnerError if it cannot be used, or does not go with the target.
    """
    draft = config.draft
    assert draft is not None
    if draft.method not in METHODS:
        raise UnsupportedError(f"there is no drafting network {draft.method!r}; there are {', '.join(METHODS)}")
    checkpoint: Checkpoint
    if config.dummy_weights:
        checkpoint = DummyCheckpoint(read_config(draft.model_path), device=config.device)
    else:
        checkpoint = open_checkpoint(draft.model_path)
    try:
        return decoder_source(checkpoint, parts_of(checkpoint.config), target.vocab_size)
    except BaseException:
        checkpoint.close()
        raise
