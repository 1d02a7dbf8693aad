"""One rank as the executor sees it: load, allocate, step, and calls between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from lamella.runner_v2.config import RunnerConfig
from lamella.runner_v2.errors import ConfigError, UnsupportedError
from lamella.runner_v2.memory import allocating
from lamella.runner_v2.parallel.collectives import Collectives
from lamella.runner_v2.platforms import Platform
from lamella.runner_v2.profiling import profile_prefill
from lamella.runner_v2.protocols import KvMover, Speculator
from lamella.runner_v2.runner import ModelRunner
from lamella.runner_v2.step import KvLayout, Mask, RankReport, Step, StepOutput


class Worker:
    """Owns a ModelRunner from open() to close(). One thread uses it.

    A step with masked_rows runs once provide() has brought its masks, before or after step() was called: step() then
    needs them already, since this worker does not run behind its caller's back.
    """

    def __init__(
        self,
        config: RunnerConfig,
        speculator: Speculator | None = None,
        group: Collectives | None = None,
        mover: KvMover | None = None,
        platform: Platform | None = None,
    ) -> None:
        """platform: None: that of config.device."""
        self.config = config
        self._platform = platform
        self._speculator = speculator
        self._group = group
        self._mover = mover
        self._runner: ModelRunner | None = None
        self._masks: dict[int, tuple[Mask, ...]] = {}
        self._totals = {"steps": 0, "emitted": 0, "seconds": 0.0}
        self._calls: dict[str, Callable[..., Any]] = {
            "stats": self._stats,
            "explain": self._explain,
            "profile": self._profile,
            "measure_prefill": self._measure_prefill,
        }

    @property
    def runner(self) -> ModelRunner:
        assert self._runner is not None, "open() comes first"
        return self._runner

    def open(self) -> RankReport:
        """Load the model. RunnerError if it cannot be run."""
        with allocating(f"loading {self.config.model_path}"):
            self._runner = ModelRunner.load(
                self.config,
                speculator=self._speculator,
                group=self._group,
                mover=self._mover,
                platform=self._platform,
            )
        return self._runner.report()

    def allocate(self, layout: KvLayout) -> None:
        """Allocate the KV cache."""
        self.runner.allocate(layout)

    def step(self, step: Step) -> StepOutput:
        """Run a step to its end. UnsupportedError if it has masked rows whose masks were not provided."""
        return self._count(self.runner.execute(step, self._take_masks(step)))

    @property
    def runs_behind(self) -> bool:
        """Whether steps can be launched while others run."""
        return self.runner.platform.runs_behind

    def launch(self, step: Step) -> None:
        """Start a step; several may be in flight. UnsupportedError as in step()."""
        self.runner.launch(step, self._take_masks(step))

    def finish(self) -> StepOutput:
        """Wait for the oldest step in flight."""
        return self._count(self.runner.finish())

    def provide(self, step_id: int, masks: Sequence[Mask]) -> None:
        """Masks of the logits rows of a step that is yet to come; several calls add up."""
        self._masks[step_id] = (*self._masks.get(step_id, ()), *masks)

    def call(self, op: str, **arguments: Any) -> Any:
        """An operation between steps; results are plain data.

        stats()                       totals since open, and memory
        explain()                     op table, attention backend, KV groups, what the device recorded
        profile(num_tokens)           seconds of a prompt chunk, by part
        measure_prefill(num_tokens, context_len, num_logits)
                                      seconds of a prompt chunk behind so many tokens, with the logits of its last
                                      num_logits tokens

        ConfigError for an unknown operation.
        """
        if op not in self._calls:
            raise ConfigError(f"a worker knows no operation {op!r}; it knows {', '.join(self._calls)}")
        return self._calls[op](**arguments)

    def close(self) -> None:
        """Let go of the model and its memory."""
        self._runner = None
        self._masks.clear()
        if self._mover is not None:
            self._mover.close()

    def _take_masks(self, step: Step) -> tuple[Mask, ...]:
        masks = self._masks.pop(step.step_id, ())
        missing = set(step.masked_rows) - {mask.row for mask in masks}
        if missing:
            raise UnsupportedError(f"step {step.step_id} needs masks for rows {sorted(missing)} before it starts")
        return masks

    def _count(self, output: StepOutput) -> StepOutput:
        self._totals["steps"] += 1
        self._totals["emitted"] += len(output.token_ids)
        self._totals["seconds"] += output.seconds
        return output

    def _stats(self) -> dict[str, Any]:
        weights = self.runner.assembly.store
        return {**self._totals, "weight_bytes": weights.total_bytes, "kv_bytes": self.runner.kv_bytes}

    def _explain(self) -> dict[str, Any]:
        assembly = self.runner.assembly
        backend = assembly.backend
        return {
            "model": asdict(assembly.config),
            "ops": [choice._asdict() for choice in assembly.table.explain()],
            "attention": {"backend": backend.backend.name, "refused": dict(backend.refused)},
            "groups": [group._asdict() for group in assembly.groups],
            "device": self.runner.device_facts(),
        }

    def _profile(self, num_tokens: int = 512) -> dict[str, Any]:
        return profile_prefill(self.runner.assembly, num_tokens, self.config.device)._asdict()

    def _measure_prefill(self, num_tokens: int = 512, context_len: int = 0, num_logits: int = 1) -> float:
        assembly, device = self.runner.assembly, self.config.device
        return profile_prefill(assembly, num_tokens, device, context_len=context_len, num_logits=num_logits).seconds
