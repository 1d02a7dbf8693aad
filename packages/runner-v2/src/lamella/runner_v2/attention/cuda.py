"""Attention over the paged cache with the CUDA kernels.

    rows     | 0 .. num_single: one token each | num_single .. num_rows: chunks and drafts |
    kernel   | paged_decode, by a schedule     | paged_prefill                             |

Everything that a plan holds lies on the device, made by kernels on the current stream: nothing is read back, so that a
plan can be captured in a graph together with the layers that use it. Schedules are written into buffers that were
allocated by bind(), one per group and lane.

One chunk of few tokens behind a long prefix leaves most of the device idle: its keys are then cut, and the parts are
computed as sequences of their own and merged.

    keys       [ part 0 ) [ part 1 ) ... [ part S - 1: the rest, with the chunk's own keys )
    queries      all        all            all, causal
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lamella.runner_v2.attention.metadata import AttentionLimits
from lamella.runner_v2.inputs import InputBatch, LayerCache

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
_BLOCK_MULTIPLE = 16


_FEW_BLOCKS = 66
"""Thread blocks of a prefill that leave half of a large device idle."""
_MAX_PARTS = 16
_MIN_PART = 1024
"""Keys of a part: shorter ones are not worth the merging."""
_ROWS = 128
"""Query rows that a thread block of the prefill kernel takes."""


class Parts(NamedTuple):
    """How the keys of the only chunk of a step are cut. C = S - 1 parts lie before the last."""

    table: torch.Tensor  # [C, part_len / block_size] int32
    seq_lens: torch.Tensor  # [C] int32, all of part_len
    query_start: torch.Tensor  # [C + 1] int32
    last_table: torch.Tensor  # [1, ..] int32
    last_len: torch.Tensor  # [1] int32


class CudaPlan(NamedTuple):
    """A step as the kernels take it, for one group. S rows with one token each, P rows behind them."""

    positions: torch.Tensor  # [T] int32
    slots: torch.Tensor  # [T] int64, -1: write nothing
    window: int
    """0: full attention."""
    num_single: int
    """S"""
    max_query_len: int
    single_table: torch.Tensor  # [S, max_blocks] int32
    single_lens: torch.Tensor  # [S] int32
    schedule: torch.Tensor | None  # int32, None: S is 0
    table: torch.Tensor  # [P, max_blocks] int32
    seq_lens: torch.Tensor  # [P] int32
    query_start: torch.Tensor | None  # [P + 1] int32 behind the single rows' tokens, None: P is 0
    workspace: torch.Tensor
    """Of the plan's lane."""
    parts: Parts | None = None


class _Lane(NamedTuple):
    """Buffers of the steps of one lane."""

    schedules: tuple[torch.Tensor, ...]  # per group, for max_num_rows
    workspace: torch.Tensor


class CudaAttention:
    """AttentionBackend over the kernels. Its plans borrow the batch's tensors.

    Not batch invariant: how the keys of a decoding row are cut into parts, whose results are summed, depends on the
    lengths of the other rows; and a token is computed by another kernel in a chunk than alone.
    """

    name = "cuda"
    batch_invariant = False

    def __init__(self, kernels: Any, device_type: str = "cuda") -> None:
        """kernels: the namespace of lamella.kernels_cuda. device_type: where they run."""
        self._kernels = kernels
        self._device_type = device_type
        self._limits: AttentionLimits | None = None
        self._lanes: dict[int, _Lane] = {}

    def supports(self, limits: AttentionLimits) -> str | None:
        if torch.device(limits.device).type != self._device_type:
            return f"device {limits.device}"
        if limits.dtype not in (torch.bfloat16, torch.float16):
            return f"activations are {limits.dtype}, not bfloat16 or float16"
        if limits.kv_dtype not in (limits.dtype, torch.float8_e4m3fn):
            return f"cache of {limits.kv_dtype}, not of {limits.dtype} or float8_e4m3fn"
        if limits.head_dim not in HEAD_DIMS:
            return f"head_dim {limits.head_dim}, not one of {', '.join(map(str, HEAD_DIMS))}"
        if limits.num_heads % limits.num_kv_heads:
            return f"{limits.num_heads} heads are no multiple of {limits.num_kv_heads} KV heads"
        if limits.block_size % _BLOCK_MULTIPLE:
            return f"block_size {limits.block_size} is no multiple of {_BLOCK_MULTIPLE}"
        return None

    def bind(self, limits: AttentionLimits) -> None:
        self._limits = limits
        self._lanes = {0: self._make_lane()}

    def plan(self, batch: InputBatch, group_idx: int, lane: int = 0) -> CudaPlan:
        """The batch's tensors must stay as they are while the plan is used. The first plan of a lane other than 0
        allocates its buffers."""
        limits = self._bound
        if lane not in self._lanes:
            self._lanes[lane] = self._make_lane()
        buffers = self._lanes[lane]
        num_single, num_rows = batch.num_single, batch.num_rows
        if batch.max_query_len <= 1 and batch.num_tokens == num_rows:
            num_single = num_rows
        window = limits.windows[group_idx] or 0
        table, seq_lens = batch.block_tables[group_idx], batch.seq_lens
        single_lens = seq_lens[:num_single]
        schedule = query_start = None
        if num_single:
            schedule = self._kernels.decode_schedule(
                single_lens,
                limits.num_heads,
                limits.num_kv_heads,
                window=window,
                out=buffers.schedules[group_idx][: self._schedule_size(num_single)],
            )
        if num_single < num_rows:
            query_start = batch.query_start
            if num_single:
                query_start = query_start[num_single:] - num_single
        return CudaPlan(
            positions=batch.positions,
            slots=batch.slot_mapping[group_idx],
            window=window,
            num_single=num_single,
            max_query_len=batch.max_query_len,
            single_table=table[:num_single],
            single_lens=single_lens,
            schedule=schedule,
            table=table[num_single:],
            seq_lens=seq_lens[num_single:],
            query_start=query_start,
            workspace=buffers.workspace,
            parts=self._parts(batch, num_single, table, window) if num_rows - num_single == 1 else None,
        )

    def write(self, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, plan: CudaPlan) -> None:
        self._kernels.kv_write(k, v, cache.k, cache.v, plan.slots)

    def run(
        self,
        q: torch.Tensor,  # [T, num_heads, head_dim]
        k: torch.Tensor | None,  # [T, num_kv_heads, head_dim]
        v: torch.Tensor | None,
        cache: LayerCache,
        plan: CudaPlan,
        out: torch.Tensor,  # [T, num_heads, head_dim]
        lse: torch.Tensor | None = None,  # [T, num_heads]
    ) -> None:
        limits = self._bound
        if k is not None and v is not None:
            self.write(k, v, cache, plan)
        softcap = limits.softcap or 0.0
        split = plan.num_single
        if plan.schedule is not None:
            self._kernels.paged_decode(
                q[:split].unsqueeze(1),
                cache.k,
                cache.v,
                plan.single_table,
                plan.single_lens,
                limits.scale,
                window=plan.window,
                softcap=softcap,
                schedule=plan.schedule,
                # layers call this right behind the kernel that writes the step's keys
                follows_write=True,
                workspace=plan.workspace,
                out=out[:split].unsqueeze(1),
                lse=None if lse is None else lse[:split].unsqueeze(1),
            )
        if plan.query_start is None:
            return
        rest, rest_lse = out[split:], None if lse is None else lse[split:]
        if plan.parts is not None:
            self._run_parts(q[split:], cache, plan, plan.parts, rest, rest_lse)
            return
        self._kernels.paged_prefill(
            q[split:],
            cache.k,
            cache.v,
            plan.table,
            plan.query_start,
            plan.seq_lens,
            plan.max_query_len,
            limits.scale,
            window=plan.window,
            softcap=softcap,
            out=rest,
            lse=rest_lse,
        )

    def _parts(self, batch: InputBatch, num_single: int, table: torch.Tensor, window: int) -> Parts | None:
        """None where the chunk fills the device, or its prefix is short, or there are other rows: then max_seq_len may
        be one of theirs. Drafts that were rejected make the true length shorter, by less than what the last part
        holds."""
        limits = self._bound
        query_len, seq_len = batch.num_tokens - num_single, batch.max_seq_len
        group = limits.num_heads // limits.num_kv_heads
        num_blocks = limits.num_kv_heads * -(-query_len * group // _ROWS)
        num_parts = min(_MAX_PARTS, 2 * _FEW_BLOCKS // num_blocks, (seq_len - query_len) // _MIN_PART)
        if window or batch.num_rows > 1 or num_blocks > _FEW_BLOCKS or num_parts < 2:
            return None
        per_part = (seq_len - query_len) // num_parts // limits.block_size
        count, part_len = num_parts - 1, per_part * limits.block_size
        row = table[num_single:]
        device = row.device
        return Parts(
            table=row[:, : count * per_part].view(count, per_part),
            seq_lens=torch.full((count,), part_len, dtype=torch.int32, device=device),
            query_start=torch.arange(count + 1, dtype=torch.int32, device=device) * query_len,
            last_table=row[:, count * per_part :],
            last_len=batch.seq_lens[num_single:] - count * part_len,
        )

    def _run_parts(
        self,
        q: torch.Tensor,  # [N, num_heads, head_dim]
        cache: LayerCache,
        plan: CudaPlan,
        parts: Parts,
        out: torch.Tensor,  # [N, num_heads, head_dim]
        lse: torch.Tensor | None,  # [N, num_heads]
    ) -> None:
        limits, kernels = self._bound, self._kernels
        num_tokens, count = q.shape[0], parts.table.shape[0]
        options = {"softcap": limits.softcap or 0.0}
        states = torch.empty(count + 1, *q.shape, dtype=out.dtype, device=q.device)
        sums = torch.empty(count + 1, num_tokens, limits.num_heads, dtype=torch.float32, device=q.device)
        kernels.paged_prefill(
            q.repeat(count, 1, 1),
            cache.k,
            cache.v,
            parts.table,
            parts.query_start,
            parts.seq_lens,
            num_tokens,
            limits.scale,
            causal=False,
            out=states[:count].view(count * num_tokens, *q.shape[1:]),
            lse=sums[:count].view(count * num_tokens, -1),
            **options,
        )
        kernels.paged_prefill(
            q,
            cache.k,
            cache.v,
            parts.last_table,
            plan.query_start,
            parts.last_len,
            num_tokens,
            limits.scale,
            out=states[count],
            lse=sums[count],
            **options,
        )
        kernels.merge_many_states(states, sums, out=out, out_lse=lse)

    @property
    def _bound(self) -> AttentionLimits:
        assert self._limits is not None, "bind() comes before plan() and run()"
        return self._limits

    @property
    def _device_idx(self) -> int:
        return torch.device(self._bound.device).index or 0

    def _schedule_size(self, num_rows: int) -> int:
        limits = self._bound
        size: int = self._kernels.decode_schedule_size(
            num_rows, limits.num_heads, limits.num_kv_heads, device=self._device_idx
        )
        return size

    def _make_lane(self) -> _Lane:
        limits = self._bound
        size = self._schedule_size(limits.max_num_rows)
        num_bytes = self._kernels.paged_decode_workspace_size(
            limits.num_heads, limits.num_kv_heads, limits.head_dim, device=self._device_idx
        )
        return _Lane(
            tuple(torch.empty(size, dtype=torch.int32, device=limits.device) for _ in limits.windows),
            torch.empty(num_bytes, dtype=torch.uint8, device=limits.device),
        )
