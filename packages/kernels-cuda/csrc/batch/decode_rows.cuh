// One thread block copies up to 2048 entries of one table of one row; the first of a row also writes its numbers, each
// with a warp of its own, so that their loads overlap with the copy.
#pragma once

#include "batch/decode_rows.h"
#include "device/launch.cuh"

namespace lamella {

constexpr int kPrepareThreads = 256, kPrepareEntries = 2048, kAdvanceThreads = 128;

__device__ __forceinline__ void copy_entries(int32_t* to, const int32_t* from, int count) {
  const bool aligned = (reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16 == 0;
  const int vecs = aligned ? count / 4 : 0;
  int4 held[kPrepareEntries / 4 / kPrepareThreads];
#pragma unroll
  for (int i = 0; i < kPrepareEntries / 4 / kPrepareThreads; ++i) {
    const int at = threadIdx.x + i * kPrepareThreads;
    if (at < vecs) held[i] = reinterpret_cast<const int4*>(from)[at];
  }
  if (!aligned) {
#pragma unroll 8
    for (int at = threadIdx.x; at < count; at += kPrepareThreads) to[at] = from[at];
  } else if (vecs * 4 + static_cast<int>(threadIdx.x) < count) {
    to[vecs * 4 + threadIdx.x] = from[vecs * 4 + threadIdx.x];
  }
#pragma unroll
  for (int i = 0; i < kPrepareEntries / 4 / kPrepareThreads; ++i) {
    const int at = threadIdx.x + i * kPrepareThreads;
    if (at < vecs) reinterpret_cast<int4*>(to)[at] = held[i];
  }
}

__global__ void __launch_bounds__(kPrepareThreads)
    prepare_decode_kernel(const __grid_constant__ LamellaPrepareDecode p) {
  const int64_t i = blockIdx.x;
  const int g = static_cast<int>(blockIdx.y);
  const int64_t first = static_cast<int64_t>(blockIdx.z) * kPrepareEntries;
  wait_predecessor();
  launch_successor();
  const int64_t row = p.rows[i];
  const bool known = row >= 0 && row < p.num_rows;
  const int position = known ? max(p.computed_len[row], 0) : 0;
  const uint32_t place = static_cast<uint32_t>(position) / static_cast<uint32_t>(p.block_size);
  const int32_t* table = p.tables[g] + (known ? row : 0) * p.table_strides[g];

  const int64_t needed = known ? min(static_cast<int64_t>(place) + 1, p.max_blocks[g]) : 0;
  if (first < needed)
    copy_entries(p.block_tables[g] + i * p.block_table_strides[g] + first, table + first,
                 static_cast<int>(min(needed - first, static_cast<int64_t>(kPrepareEntries))));
  if (first > 0) return;
  if (threadIdx.x == kPrepareThreads - 1) {
    const int64_t block = known && row != p.spare_row && place < p.max_blocks[g] ? table[place] : 0;
    const int64_t inner = position - static_cast<int64_t>(place) * p.block_size;
    p.slots[g][i] = block > 0 ? block * p.block_size + inner : -1;
  }
  if (g == 0 && threadIdx.x == kPrepareThreads - 33) {
    const int id = known && position < p.width ? p.token_ids[row * p.token_stride + position] : 0;
    p.ids[i] = max(id, 0);
    p.positions[i] = position;
    p.seq_lens[i] = known ? position + 1 : 0;
  }
}

__global__ void __launch_bounds__(kAdvanceThreads)
    advance_decode_kernel(const int32_t* rows, int32_t* computed_len, int32_t* token_ids, const int32_t* next_ids,
                          int64_t batch, int64_t num_rows, int64_t width, int64_t token_stride, int64_t spare_row) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kAdvanceThreads + threadIdx.x;
  wait_predecessor();
  launch_successor();
  if (i >= batch) return;
  const int64_t row = rows[i];
  const int id = next_ids[i];
  if (row == spare_row || row < 0 || row >= num_rows) return;
  const int length = computed_len[row] + 1;
  computed_len[row] = length;
  if (length >= 0 && length < width) token_ids[row * token_stride + length] = id;
}

}  // namespace lamella
