"""Runs steps of a continuous batch on one rank.

    load ──> report ──> allocate ──> execute, execute, execute, ...
                                     launch, launch, finish, launch, finish ...      where the device runs behind

A step, top to bottom: row changes, batch, forward, sample, verify, advance ─ launch ends here ─ output, draft.
What a launch needs of the steps before it lies on the device, with one exception: rows whose logits are edited by what
they emitted (penalties, bad words) wait for the results before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lamella.runner_v2.assembly import Assembly, activation_bytes, assemble
from lamella.runner_v2.batch import BatchBuilder, BatchLayout, StepBatch
from lamella.runner_v2.block_tables import BlockTables
from lamella.runner_v2.config import RunnerConfig
from lamella.runner_v2.decode_batch import DecodeBatches, DecodeStep
from lamella.runner_v2.draft_pass import DraftPass
from lamella.runner_v2.drafting import Drafting
from lamella.runner_v2.graphs import GraphCache, GraphKey
from lamella.runner_v2.hidden_states import HiddenStates
from lamella.runner_v2.in_flight import Pending, failures, in_order_of_work
from lamella.runner_v2.inputs import InputBatch, LayerCache, ModelInput
from lamella.runner_v2.kv_cache import allocate_caches, pool_bytes
from lamella.runner_v2.layers.decoder import Carried
from lamella.runner_v2.memory import Arena
from lamella.runner_v2.models.draft import DraftSource
from lamella.runner_v2.output_copy import OutputCopy
from lamella.runner_v2.parallel.collectives import Collectives
from lamella.runner_v2.parallel.groups import SoloGroup
from lamella.runner_v2.platforms import Platform, pick_platform
from lamella.runner_v2.profiling import profile_prefill
from lamella.runner_v2.prompt_scores import PromptScores
from lamella.runner_v2.protocols import KvMover, Speculator
from lamella.runner_v2.sampling.cuda import CudaKernels
from lamella.runner_v2.sampling.device_choice import DeviceChoice
from lamella.runner_v2.sampling.host import pick_kernels
from lamella.runner_v2.sampling.rows import NONE_ALLOWED, REASONS
from lamella.runner_v2.sampling.sampler import Sampler
from lamella.runner_v2.stack import Hooks
from lamella.runner_v2.state import SequenceState
from lamella.runner_v2.step import KvLayout, Mask, RankReport, Step, StepOutput, TokenLogprobs
from lamella.runner_v2.weights.draft import open_draft
from lamella.runner_v2.weights.dummy import DummyCheckpoint
from lamella.runner_v2.weights.open import open_checkpoint, read_config
from lamella.runner_v2.weights.slots import Checkpoint


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
        platform: Platform | None = None,
        draft: DraftSource | None = None,
    ) -> None:
        """Build the model and load its weights from the checkpoint, which may be closed afterwards.

        platform: None: that of config.device. draft: the network that config.draft names.
        """
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        group = SoloGroup() if group is None else group
        assert (group.rank, group.size) == (config.tp_rank, config.tp_size), "the group is not that of the config"
        self.config = config
        self.platform = pick_platform(config) if platform is None else platform
        self._mover = mover
        keep_host_ids = speculator is not None and speculator.needs.host_ids
        self._writes = self.platform.writes
        self._state = SequenceState(
            config.max_num_rows,
            config.max_model_len,
            config.max_num_drafts,
            config.device,
            keep_host_ids,
            self._writes,
        )
        self._hidden = HiddenStates(() if speculator is None else speculator.needs.hidden_layers)
        hooks = Hooks(
            before=() if mover is None else (mover.wait_layer,),
            after=(self._hidden.keep,) if self._hidden.layers else (),
        )
        with torch.no_grad():
            self._assembly = assemble(config, checkpoint, group, hooks, self._state.width, draft)
        self.model_config = self._assembly.config
        self._hidden.check(self.model_config.num_layers)
        self._tables = BlockTables(
            len(self._assembly.groups),
            config.max_num_rows,
            self._state.width,
            config.block_size,
            config.device,
            self._writes,
        )
        self._draft_pass: DraftPass | None = None
        if self._assembly.draft is not None:
            self._draft_pass = DraftPass(self._assembly.draft, self._tables, self._writes)
        self._drafting = None if speculator is None else Drafting(speculator, self._state, self._draft_pass)
        self._builder = BatchBuilder(
            self._state, self._tables, config.max_num_tokens, config.device, self._writes, self.platform.runs_behind
        )
        kernels = self.platform.kernels
        vocab_size = self.model_config.vocab_size
        self._sampler = Sampler(
            vocab_size,
            config.max_num_rows,
            config.device,
            config.max_num_drafts,
            pick_kernels(config.device, config.providers) if kernels is None else CudaKernels(kernels),
        )
        self._choice: DeviceChoice | None = None
        self._decode: DecodeBatches | None = None
        if kernels is not None:
            num_rows = config.max_num_rows + 1
            most = max(config.max_num_rows * (1 + config.max_num_drafts), *config.graph_rows, 1)
            self._choice = DeviceChoice(kernels, vocab_size, num_rows, most, config.device, self._writes)
            if config.graph_rows and not self._hidden.layers:  # steps that keep hidden states run eagerly
                fused = kernels if hasattr(kernels, "prepare_decode") else None
                self._decode = DecodeBatches(
                    self._state, self._tables, self._writes, config.graph_rows, config.max_model_len, fused
                )
        self._prompt_scores = PromptScores(self._sampler, self._state)
        self._graphs = GraphCache(self.platform.recorder)
        self._in_flight: deque[Pending] = deque()
        self._told: dict[int, StepOutput] = {}
        """step_id -> output of a step in flight that had to be read early."""
        self._finished = 0.0
        """When the last step's output was read."""
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
        platform: Platform | None = None,
        **options: Any,
    ) -> ModelRunner:
        """A runner for a checkpoint folder, a .gguf file, or a whole RunnerConfig.

        With a path, options are fields of RunnerConfig; max_model_len is by default the model's, but 8192 at most.
        RunnerError if the checkpoint or an option cannot be used.
        """
        path = source.model_path if isinstance(source, RunnerConfig) else str(source)
        if isinstance(source, RunnerConfig):
            config = source
        else:
            options.setdefault("max_model_len", min(read_config(path).max_position, 8192))
            config = RunnerConfig(model_path=path, **options)
        with ExitStack() as opened:
            checkpoint: Checkpoint
            if config.dummy_weights:
                checkpoint = DummyCheckpoint(read_config(path), device=config.device)
            else:
                checkpoint = open_checkpoint(path)
            opened.callback(checkpoint.close)
            draft = None
            if config.draft is not None:
                draft = open_draft(config, checkpoint.config)
                opened.callback(draft.checkpoint.close)
            return cls(config, checkpoint, speculator, group, mover, platform, draft)

    @property
    def assembly(self) -> Assembly:
        """The model and every choice made for it: op table, attention backend, KV groups, weights."""
        return self._assembly

    @property
    def kv_bytes(self) -> int:
        """Memory of the allocated caches."""
        return pool_bytes(self._caches)

    def device_facts(self) -> dict[str, str]:
        """What was recorded on the device, by name; nothing on a CPU."""
        nodes = self._graphs.num_nodes("logits")
        if not nodes:
            return {}
        return {
            "recorded batches": ", ".join(str(size) for size in sorted(nodes)),
            "graph nodes per step": ", ".join(f"{size}: {nodes[size]}" for size in sorted(nodes)),
        }

    def report(self) -> RankReport:
        """What the scheduler must know before KV is allocated. free_bytes leaves room for a step's activations."""
        drafting = self._drafting
        return RankReport(
            rank=self.config.tp_rank,
            groups=self._assembly.groups,
            free_bytes=self.platform.free_bytes(self._largest_step, activation_bytes(self.config, self.model_config)),
            weight_bytes=self._assembly.store.total_bytes,
            vocab_size=self.model_config.vocab_size,
            device=self.config.device,
            lookahead=0 if drafting is None else drafting.needs.lookahead,
        )

    def allocate(self, layout: KvLayout) -> None:
        """Allocate the KV cache, in place of an earlier one, and record graphs over it. Rows must be free: their blocks
        would be lost."""
        assert not self._state.generations.any(), "the cache is allocated while no row is taken"
        self._graphs.clear()
        self._caches = ()
        self._kv_arena.release()
        assembly = self._assembly
        self._caches = allocate_caches(
            assembly.groups, layout, assembly.backend.limits, self._kv_arena, assembly.draft_rows
        )
        if self._draft_pass is not None:
            self._draft_pass.bind(self._caches[self.model_config.num_layers :])
        if self._mover is not None:
            self._mover.bind([group.layers for group in assembly.groups], [tuple(c) for c in self._caches])
        if self._decode is not None and self._graphs.records:
            self._record(self._decode)

    def execute(self, step: Step, masks: Sequence[Mask] = ()) -> StepOutput:
        """One step, from launch to finish. masks: for every logits row of masked_rows."""
        assert not self._in_flight, "steps are in flight"
        self.launch(step, masks)
        return self.finish()

    @torch.inference_mode()
    def launch(self, step: Step, masks: Sequence[Mask] = ()) -> None:
        """Start a step. Changes rows, tables and caches as the step says; where the device runs behind, does not wait
        for it."""
        started = time.perf_counter()
        assembly = self._assembly
        assert self._caches, "allocate() comes before the first step"
        assert step.common.num_tokens == 0, "steps are not padded on this device"
        assert not self._in_flight or self._drafting is None, "drafts of a step in flight are not made yet"
        if self._mover is not None:
            self._mover.before_step(step.step_id, step.waits_for_copies)
        self._change_rows(step)
        layout = self._builder.layout(step.work)
        pending = Pending(step, layout, self._state.generations[layout.rows].tolist(), None, None, None, started)
        if layout.num_rows:
            size = self._decode_size(layout)
            if size is not None:
                pending = self._launch_decode(pending, size, masks)
            else:
                self._writes.flush()
                pending = self._compute(pending, masks)
        else:
            self._writes.flush()
        self._in_flight.append(pending)
        if self._mover is not None:
            if step.waits_for_copies:
                for n in range(len(assembly.draft_rows)):  # read when the step is finished
                    self._mover.wait_layer(assembly.config.num_layers + n)
            self._mover.after_step(step.step_id)

    @torch.inference_mode()
    def finish(self) -> StepOutput:
        """The output of the oldest step in flight, once it is there."""
        pending = self._in_flight.popleft()
        output = self._told.pop(pending.step.step_id, None)
        if output is None:
            output = self._output(pending)
        now = time.perf_counter()
        seconds, self._finished = now - max(pending.started, self._finished), now
        return output._replace(seconds=seconds)

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
            if self._drafting is not None:
                self._drafting.add(new)
            if self._choice is not None:
                self._choice.add(new.row, new.params)
        for blocks in step.new_blocks:
            self._tables.write(blocks.row, blocks.group, blocks.start, blocks.block_ids)
        if forgotten and self._drafting is not None:
            self._drafting.forget(forgotten)

    def _decode_size(self, layout: BatchLayout) -> int | None:
        """The size of recorded batch that fits; None: the step runs eagerly."""
        if self._decode is None or layout.num_single < layout.num_rows or self._prompt_scores.wanted:
            return None
        if len(layout.sampled) < layout.num_rows:  # a prompt whose last chunk but one has one token
            return None
        return self._decode.size_for(layout.num_rows)

    def _launch_decode(self, pending: Pending, size: int, masks: Sequence[Mask]) -> Pending:
        """A step of one token a row, from recordings as far as there are any."""
        layout, decode = pending.layout, self._decode
        assert decode is not None
        assert self._choice is not None
        decode.place(layout.rows, size)
        self._writes.flush()
        if self._mover is not None and pending.step.waits_for_copies and len(self._graphs):
            for layer_idx in range(self.model_config.num_layers):
                self._mover.wait_layer(layer_idx)  # a recording does not stop between layers
        batch, logits = self._graphs.run(GraphKey("logits", size), partial(self._decode_logits, size))
        rows_of_logits = self._builder.logits_rows(layout, layout.draft_tokens)
        self._state.plan_ahead(layout.rows, layout.query_lens)
        if not masks and self._sampler.is_plain(rows_of_logits.rows):
            ids, status = self._graphs.run(GraphKey("sample", size), partial(self._decode_sample, batch, logits))
            ids, status = ids[: layout.num_rows], status[: layout.num_rows]
            return pending._replace(copy=OutputCopy(ids, status))
        self._settle()
        sample = self._sampler.sample(logits[: layout.num_rows].float(), rows_of_logits, masks)
        steps, sampled = layout.device_query_lens, layout.device_sampled
        self._state.advance(layout.device_rows, steps, sampled, sample.ids)
        return pending._replace(copy=OutputCopy(sample.ids, sample.status), logprobs=sample.logprobs)

    def _decode_logits(self, size: int) -> tuple[DecodeStep, torch.Tensor]:
        """The first part of a recorded step."""
        assert self._decode is not None
        batch = self._decode.build(size)
        carried = self._forward(batch.inputs, self._caches)
        return batch, self._assembly.model.finish(carried, batch.inputs.logits_idx)

    def _decode_sample(self, batch: DecodeStep, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The second part."""
        assert self._decode is not None
        assert self._choice is not None
        ids, status = self._choice.sample(logits, batch.inputs.rows, batch.next_positions)
        self._decode.advance(batch.inputs.rows, ids)
        return ids, status

    @torch.inference_mode()
    def _record(self, decode: DecodeBatches) -> None:
        """Record both parts for every size. The rows are spare ones, so nothing is changed."""
        sizes = [size for size in sorted(decode.sizes, reverse=True) if size <= self.config.max_num_tokens]
        for size in sizes:
            decode.place(np.empty(0, np.int64), size)
            self._writes.flush()
            self._decode_sample(*self._decode_logits(size))  # what is loaded or allocated once is, before recording
        with self.platform.recording():
            for size in sizes:
                self._graphs.record(GraphKey("logits", size), partial(self._decode_logits, size))
                batch, logits = self._graphs.run(GraphKey("logits", size), partial(self._decode_logits, size))
                self._graphs.record(GraphKey("sample", size), partial(self._decode_sample, batch, logits))

    def _largest_step(self) -> None:
        """Compute a prompt chunk of as many tokens as a step may have, and logits of as many rows."""
        limits = self._assembly.backend.limits
        num_tokens = min(limits.max_num_tokens, limits.max_model_len)
        profile_prefill(self._assembly, num_tokens, self.config.device, num_runs=1)
        hidden = torch.zeros(
            min(limits.max_num_tokens, limits.max_num_rows * (1 + self.config.max_num_drafts)),
            self.model_config.hidden_size,
            dtype=limits.dtype,
            device=self.config.device,
        )
        with torch.inference_mode():
            self._assembly.model.finish(Carried(hidden), torch.arange(len(hidden), device=hidden.device)).float()

    def _settle(self) -> None:
        """Read the results of all steps in flight: the host must know what rows have emitted."""
        for pending in self._in_flight:
            if pending.step.step_id not in self._told:
                self._told[pending.step.step_id] = self._output(pending)

    def _compute(self, pending: Pending, masks: Sequence[Mask]) -> Pending:
        """The device's work of a step, to the point where the rows are ready for the next one."""
        state, layout = self._state, pending.layout
        batch = self._builder.build(layout)
        inputs = batch.inputs
        carried = self._forward(inputs, self._caches)
        pending = pending._replace(hidden=self._hidden.take())
        pending = pending._replace(prompt_logprobs=self._prompt_scores.compute(layout, carried, self._assembly.model))
        if not len(layout.sampled):
            state.plan_ahead(layout.rows, layout.query_lens)
            no_ids = layout.draft_tokens.new_empty(0, dtype=torch.int32)
            state.advance(layout.device_rows, layout.device_query_lens, layout.device_sampled, no_ids)
            # nothing to bring, but the step has not ended before this is there: who hears that it has copies its blocks
            return pending._replace(copy=OutputCopy(no_ids, no_ids.to(torch.uint8)))

        logits = self._assembly.model.finish(carried, inputs.logits_idx)
        checker = self._drafting if layout.max_verify_len else None
        with_law = checker is not None and checker.needs.probs
        ids, status, logprobs, law = self._sample(logits, layout, batch, masks, with_law=with_law)
        state.plan_ahead(layout.rows, layout.query_lens)
        if checker is not None:
            num_accepted, next_ids, ids = checker.verify(ids, law, batch, layout)
            steps = layout.device_query_lens - layout.device_verify_lens
            steps[layout.device_sampled] += num_accepted
            copy = OutputCopy(ids, status, num_accepted, next_ids)
        else:
            next_ids, steps = ids, layout.device_query_lens
            copy = OutputCopy(ids, status)
        state.advance(layout.device_rows, steps, layout.device_sampled, next_ids)
        return pending._replace(copy=copy, logprobs=logprobs)

    def _sample(
        self, logits: torch.Tensor, layout: BatchLayout, batch: StepBatch, masks: Sequence[Mask], *, with_law: bool
    ) -> tuple[torch.Tensor, torch.Tensor, list[TokenLogprobs | None] | None, torch.Tensor | None]:
        """(ids [L], status [L], log-probabilities, the law [L, V] that the ids were sampled from if it is wanted).
        Before plan_ahead(): positions are counted from what is planned."""
        rows = layout.rows[layout.logits_owner].astype(np.int32)
        if self._choice is not None and not masks and self._sampler.is_plain(rows):
            positions = batch.inputs.positions.index_select(0, layout.logits_idx) + 1
            ids, status = self._choice.sample(logits, layout.logits_rows, positions)
            law = None
            if with_law:
                law = self._sampler.law(logits.float(), self._builder.logits_rows(layout, batch.drafts), ids)
            return ids, status, None, law
        self._settle()
        logits = logits.float()  # edited in place
        rows_of_logits = self._builder.logits_rows(layout, batch.drafts)
        sample = self._sampler.sample(logits, rows_of_logits, masks)
        law = self._sampler.law(logits, rows_of_logits, sample.ids) if with_law else None
        return sample.ids, sample.status, sample.logprobs, law

    def _forward(self, batch: InputBatch, caches: Sequence[LayerCache]) -> Carried:
        """All layers over the batch; writes its keys and values into the caches."""
        assembly = self._assembly
        plans = tuple(assembly.backend.backend.plan(batch, group_idx) for group_idx in range(len(assembly.groups)))
        inputs = ModelInput(batch.token_ids, batch.positions, plans, tuple(caches))
        embedded = assembly.model.embed(inputs)
        self._hidden.start(embedded)
        return assembly.stack.run(embedded, inputs)

    def _output(self, pending: Pending) -> StepOutput:
        """Tell sampler, state and drafter what was emitted, and write it down for the scheduler."""
        step, layout = pending.step, pending.layout
        num_tokens = np.zeros(layout.num_rows, dtype=np.int64)
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] | None = None
        failed: dict[int, int] = {}
        host = None if pending.copy is None else pending.copy.wait()
        if host is not None and len(layout.sampled):
            failed = failures(host, layout)
            lives = np.array([i not in failed for i in range(len(layout.sampled))]) if failed else True
            num_tokens[layout.sampled] = np.where(lives, host.num_accepted + 1, 0)
            emitted = layout.draft_idx < num_tokens[layout.logits_owner]  # [L]
            chosen = host.ids
            chosen[layout.sampled_start[:-1] + host.num_accepted] = host.next_ids
            token_ids = chosen[emitted].tolist()
            if pending.logprobs is not None:
                logprobs = [pending.logprobs[i] for i in np.flatnonzero(emitted)]
            sampled_rows = layout.rows[layout.sampled]
            if layout.max_verify_len:
                self._state.commit(sampled_rows, layout.verify_lens[layout.sampled] - host.num_accepted)
            self._tell(pending, num_tokens, token_ids)
        counts = num_tokens.tolist()
        held, draft_seconds = None, 0.0
        if self._drafting is not None and layout.num_rows:
            started = time.perf_counter()
            places = [int(layout.sampled[i]) for i in failed]
            held = self._drafting.draft(
                layout, counts, token_ids, step.common.skip_drafts, hidden=pending.hidden, failed=places
            )
            draft_seconds = time.perf_counter() - started
        by_row = [(int(layout.rows[layout.sampled[i]]), status) for i, status in sorted(failed.items())]
        output = StepOutput(
            step_id=step.step_id,
            rows=layout.work.rows,
            generations=tuple(pending.generations),
            num_tokens=counts,
            token_ids=token_ids,
            num_drafts=None if held is None else held.lens,
            draft_ids=None if held is None else held.ids,
            logprobs=logprobs,
            prompt_logprobs=pending.prompt_logprobs,
            failed=tuple((row, REASONS[status]) for row, status in by_row),
            forbidden=tuple(row for row, status in by_row if status == NONE_ALLOWED),
            draft_methods=None if held is None else held.methods,
            draft_seconds=draft_seconds,
        )
        return output if layout.order is None else in_order_of_work(output, layout.order)

    def _tell(self, pending: Pending, num_tokens: npt.NDArray[np.int64], token_ids: list[int]) -> None:
        """Let the sampler know what rows emitted, as far as they still have the owner that they had."""
        if not self._sampler.listens:
            return
        layout = pending.layout
        rows, counts = layout.rows[layout.sampled], num_tokens[layout.sampled]
        owned = self._state.generations[rows] == np.asarray(pending.generations)[layout.sampled]
        if not owned.all():
            kept = np.repeat(owned, counts)
            token_ids = [token for token, keep in zip(token_ids, kept) if keep]
            rows, counts = rows[owned], counts[owned]
        self._sampler.advance(rows.tolist(), counts.tolist(), token_ids)
