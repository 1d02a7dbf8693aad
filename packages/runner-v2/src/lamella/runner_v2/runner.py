"""Runs steps of a continuous batch on one rank.

    load ──> report ──> allocate ──> execute, execute, execute, ...

A step, top to bottom: row changes, batch, forward, sample, verify, advance, draft, output.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from lamella.runner_v2.assembly import Assembly, activation_bytes, assemble
from lamella.runner_v2.batch import BatchBuilder, BatchLayout
from lamella.runner_v2.block_tables import BlockTables
from lamella.runner_v2.config import RunnerConfig
from lamella.runner_v2.drafting import Drafting
from lamella.runner_v2.graphs import GraphCache, GraphKey, SamplingClass
from lamella.runner_v2.host_memory import available_bytes
from lamella.runner_v2.inputs import InputBatch, LayerCache, ModelInput
from lamella.runner_v2.kv_cache import allocate_caches, pool_bytes
from lamella.runner_v2.layers.decoder import Carried
from lamella.runner_v2.memory import Arena
from lamella.runner_v2.output_copy import HostResult, OutputCopy
from lamella.runner_v2.parallel.collectives import Collectives
from lamella.runner_v2.parallel.groups import SoloGroup
from lamella.runner_v2.prompt_scores import PromptScores
from lamella.runner_v2.protocols import KvMover, Speculator
from lamella.runner_v2.sampling.host import pick_kernels
from lamella.runner_v2.sampling.rows import NONE_ALLOWED, REASONS, SampleResult
from lamella.runner_v2.sampling.sampler import Sampler
from lamella.runner_v2.stack import Hooks
from lamella.runner_v2.state import SequenceState
from lamella.runner_v2.step import KvLayout, Mask, RankReport, Step, StepOutput, TokenLogprobs
from lamella.runner_v2.weights.dummy import DummyCheckpoint
from lamella.runner_v2.weights.open import open_checkpoint
from lamella.runner_v2.weights.slots import Checkpoint


class _Computed(NamedTuple):
    """What a step left on the device and for the output."""

    sample: SampleResult | None
    """None: no row sampled."""
    host: HostResult | None
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None


class ModelRunner:
    """One rank's model with its rows, caches and sampler.

    Not thread-safe: one thread loads and executes. Work that several ranks share is synchronised by the group.
    """

    def __init__(
        self,
        config: RunnerConfig,
        checkpoint: Checkpoint,
        speculator: Speculator | None = None,
        group: Collectives | None = None,
        mover: KvMover | None = None,
    ) -> None:
        """Build the model and load its weights from the checkpoint, which may be closed afterwards."""
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        group = SoloGroup() if group is None else group
        assert (group.rank, group.size) == (config.tp_rank, config.tp_size), "the group is not that of the config"
        self.config = config
        self._mover = mover
        keep_host_ids = speculator is not None and speculator.needs.host_ids
        self._state = SequenceState(
            config.max_num_rows, config.max_model_len, config.max_num_drafts, config.device, keep_host_ids
        )
        hooks = Hooks() if mover is None else Hooks(before=(mover.wait_layer,))
        with torch.no_grad():
            self._assembly = assemble(config, checkpoint, group, hooks, self._state.width)
        self._drafting = None if speculator is None else Drafting(speculator, self._state)
        self.model_config = self._assembly.config
        self._tables = BlockTables(
            len(self._assembly.groups),
            config.max_num_rows,
            self._state.width,
            config.block_size,
            config.device,
        )
        self._builder = BatchBuilder(self._state, self._tables, config.max_num_tokens, config.device)
        self._sampler = Sampler(
            self.model_config.vocab_size,
            config.max_num_rows,
            config.device,
            config.max_num_drafts,
            pick_kernels(config.device, config.providers),
        )
        self._prompt_scores = PromptScores(self._sampler, self._state)
        self._is_random = np.zeros(config.max_num_rows, dtype=np.bool_)
        self._graphs = GraphCache()
        self._output_copy = OutputCopy()
        self._kv_arena = Arena("kv", config.device)
        self._caches: tuple[LayerCache, ...] = ()

    @classmethod
    def load(
        cls,
        source: str | Path | RunnerConfig,
        *,
        speculator: Speculator | None = None,
        group: Collectives | None = None,
        mover: KvMover | None = None,
        **options: Any,
    ) -> ModelRunner:
        """A runner for a checkpoint folder, a .gguf file, or a whole RunnerConfig.

        With a path, options are fields of RunnerConfig; max_model_len is by default the model's, but 8192 at most.
        RunnerError if the checkpoint or an option cannot be used.
        """
        path = source.model_path if isinstance(source, RunnerConfig) else str(source)
        opened = open_checkpoint(path)
        try:
            if isinstance(source, RunnerConfig):
                config = source
            else:
                options.setdefault("max_model_len", min(opened.config.max_position, 8192))
                config = RunnerConfig(model_path=path, **options)
            checkpoint = DummyCheckpoint(opened.config) if config.dummy_weights else opened
            return cls(config, checkpoint, speculator, group, mover)
        finally:
            opened.close()

    @property
    def assembly(self) -> Assembly:
        """The model and every choice made for it: op table, attention backend, KV groups, weights."""
        return self._assembly

    @property
    def kv_bytes(self) -> int:
        """Memory of the allocated caches."""
        return pool_bytes(self._caches)

    def report(self) -> RankReport:
        """What the scheduler must know before KV is allocated. free_bytes leaves room for a step's activations."""
        drafting = self._drafting
        return RankReport(
            rank=self.config.tp_rank,
            groups=self._assembly.groups,
            free_bytes=max(0, available_bytes() - activation_bytes(self.config, self.model_config)),
            weight_bytes=self._assembly.store.total_bytes,
            vocab_size=self.model_config.vocab_size,
            device=self.config.device,
            lookahead=0 if drafting is None else drafting.needs.lookahead,
        )

    def allocate(self, layout: KvLayout) -> None:
        """Allocate the KV cache, in place of an earlier one. Rows must be free: their blocks would be lost."""
        assert not self._state.generations.any(), "the cache is allocated while no row is taken"
        self._caches = ()
        self._kv_arena.release()
        self._caches = allocate_caches(self._assembly.groups, layout, self._assembly.backend.limits, self._kv_arena)
        if self._mover is not None:
            self._mover.bind([group.layers for group in self._assembly.groups], [tuple(c) for c in self._caches])

    @torch.inference_mode()
    def execute(self, step: Step, masks: Sequence[Mask] = ()) -> StepOutput:
        """One step. Changes rows, tables and caches as the step says. masks: for every logits row of masked_rows."""
        started = time.perf_counter()
        assert self._caches, "allocate() comes before the first step"
        assert step.common.num_tokens == 0, "steps are not padded on this device"
        if self._mover is not None:
            self._mover.before_step(step.step_id)
        self._change_rows(step)
        layout = self._builder.layout(step.work)
        computed = _Computed(None, None, None)
        if layout.num_rows:
            key = GraphKey(layout.num_tokens, layout.num_rows, layout.max_query_len, self._class(layout, step))
            computed = self._graphs.run(key, partial(self._compute, layout, masks))
        output = self._output(step, layout, computed)
        if self._mover is not None:
            self._mover.after_step(step.step_id)
        return output._replace(seconds=time.perf_counter() - started)

    def _change_rows(self, step: Step) -> None:
        """Removed, added, new blocks: in this order."""
        forgotten = []
        for row, generation in step.removed:
            if self._state.remove(row, generation):
                self._sampler.remove(row)
                self._prompt_scores.remove(row)
                forgotten.append(row)
        for new in step.added:
            self._state.add(new)
            self._tables.reset(new.row, new.blocks)
            prompt, output = new.token_ids[: new.prompt_len], new.token_ids[new.prompt_len :]
            self._sampler.add(new.row, new.params, prompt, output)
            self._prompt_scores.add(new.row, new.params)
            self._is_random[new.row] = not new.params.greedy
        for blocks in step.new_blocks:
            self._tables.write(blocks.row, blocks.group, blocks.start, blocks.block_ids)
        if forgotten and self._drafting is not None:
            self._drafting.forget(forgotten)

    def _compute(self, layout: BatchLayout, masks: Sequence[Mask]) -> _Computed:
        """The device's work of a step, to the point where the rows are ready for the next one."""
        state = self._state
        batch = self._builder.build(layout)
        rows_of_logits = self._builder.logits_rows(layout, batch.drafts)
        carried = self._forward(batch.inputs, self._caches)
        scores = self._prompt_scores.compute(layout, carried, self._assembly.model)
        state.plan_ahead(layout.rows, layout.query_lens)

        if not len(layout.sampled):
            no_ids = layout.draft_tokens.new_empty(0, dtype=torch.int32)
            state.advance(layout.device_rows, layout.device_query_lens, layout.device_sampled, no_ids)
            return _Computed(None, None, scores)

        logits = self._assembly.model.finish(carried, batch.inputs.logits_idx)
        sample = self._sampler.sample(logits, rows_of_logits, masks)
        if self._drafting is not None and layout.max_verify_len:
            num_accepted, next_ids = self._drafting.verify(sample.ids, batch.drafts, layout)
            steps = layout.device_query_lens - layout.device_verify_lens
            steps[layout.device_sampled] += num_accepted
        else:
            num_accepted, next_ids = torch.zeros_like(sample.ids), sample.ids
            steps = layout.device_query_lens
        self._output_copy.start(sample.ids, num_accepted, next_ids)
        state.advance(layout.device_rows, steps, layout.device_sampled, next_ids)
        return _Computed(sample, self._output_copy.wait(), scores)

    def _forward(self, batch: InputBatch, caches: Sequence[LayerCache]) -> Carried:
        """All layers over the batch; writes its keys and values into the caches."""
        assembly = self._assembly
        plans = tuple(assembly.backend.backend.plan(batch, group_idx) for group_idx in range(len(assembly.groups)))
        inputs = ModelInput(batch.token_ids, batch.positions, plans, tuple(caches))
        return assembly.stack.run(assembly.model.embed(inputs), inputs)

    def _output(self, step: Step, layout: BatchLayout, computed: _Computed) -> StepOutput:
        """Tell sampler, state and drafter what was emitted, and write it down for the scheduler."""
        num_tokens = np.zeros(layout.num_rows, dtype=np.int64)
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] | None = None
        failed: dict[int, int] = {}
        if computed.sample is not None and computed.host is not None:
            sample, host = computed.sample, computed.host
            failed = _failures(sample, host, layout)
            lives = np.array([i not in failed for i in range(len(layout.sampled))]) if failed else True
            num_tokens[layout.sampled] = np.where(lives, host.num_accepted + 1, 0)
            emitted = layout.draft_idx < num_tokens[layout.logits_owner]  # [L]
            chosen = host.ids
            chosen[layout.sampled_start[:-1] + host.num_accepted] = host.next_ids
            token_ids = chosen[emitted].tolist()
            if sample.logprobs is not None:
                logprobs = [sample.logprobs[i] for i in np.flatnonzero(emitted)]
            sampled_rows = layout.rows[layout.sampled]
            if layout.max_verify_len:
                self._state.commit(sampled_rows, layout.verify_lens[layout.sampled] - host.num_accepted)
            self._sampler.advance(sampled_rows.tolist(), num_tokens[layout.sampled].tolist(), token_ids)
        counts = num_tokens.tolist()
        num_drafts = None
        if self._drafting is not None and layout.num_rows:
            num_drafts = self._drafting.draft(layout, counts, token_ids, skip=step.common.skip_drafts)
        by_row = [(int(layout.rows[layout.sampled[i]]), status) for i, status in sorted(failed.items())]
        return StepOutput(
            step_id=step.step_id,
            rows=layout.work.rows,
            generations=tuple(self._state.generations[layout.rows].tolist()),
            num_tokens=counts,
            token_ids=token_ids,
            num_drafts=num_drafts,
            logprobs=logprobs,
            prompt_logprobs=computed.prompt_logprobs,
            failed=tuple((row, REASONS[status]) for row, status in by_row),
            forbidden=tuple(row for row, status in by_row if status == NONE_ALLOWED),
        )

    def _class(self, layout: BatchLayout, step: Step) -> SamplingClass:
        if not len(layout.sampled):
            return "none"
        if step.masked_rows:
            return "masked"
        return "random" if self._is_random[layout.rows[layout.sampled]].any() else "greedy"


def _failures(sample: SampleResult, host: HostResult, layout: BatchLayout) -> dict[int, int]:
    """Sampling rows (by index) whose result is unusable -> status. What follows a rejected draft does not count."""
    failed: dict[int, int] = {}
    for logits_row, status in sample.statuses:
        place = int(np.searchsorted(layout.sampled_start, logits_row, side="right")) - 1
        if layout.draft_idx[logits_row] <= host.num_accepted[place]:
            failed.setdefault(place, status)
    return failed
