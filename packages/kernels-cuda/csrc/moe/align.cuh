// Counting sort by one thread block. Warp w owns the w-th stretch of pairs: the table of counts [warp][expert] becomes,
// by sums over warps and then over experts, the rank of the warp's next pair among those of its expert. A rank's place:
// so many pairs to a block from the expert's first place on.
#pragma once

#include "device/launch.cuh"

namespace lamella {

struct AlignParams {
  int32_t *sorted_ids, *block_experts, *block_sizes, *num_rows;
  const int32_t *ids, *expert_map;
  int64_t num_ids, map_size, max_blocks;
  int num_experts, block_rows;
  bool fill, even;
};

__device__ __forceinline__ int local_expert(int id, const int32_t* map, int64_t map_size, int num_experts) {
  if (map != nullptr) id = id >= 0 && id < map_size ? map[id] : -1;
  return id >= 0 && id < num_experts ? id : -1;
}

template <int kWarps>
__global__ void __launch_bounds__(kWarps * 32) moe_align_kernel(const AlignParams p) {
  constexpr int kThreads = kWarps * 32, kBatch = 8, kPer = 1024 / kThreads;
  extern __shared__ int table[];  // [kWarps][num_experts]
  __shared__ int warp_rows[kWarps], starts[1024], shares[1024];  // of experts: first place, pairs of a block
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_experts = p.num_experts;
  int* mine = table + warp * num_experts;
  launch_successor();
  for (int e = threadIdx.x; e < kWarps * num_experts; e += kThreads) table[e] = 0;
  wait_predecessor();
  __syncthreads();

  const int64_t stretch = ((p.num_ids + kThreads - 1) / kThreads) * 32;
  const int64_t first = stretch * warp, end = first + stretch < p.num_ids ? first + stretch : p.num_ids;
  const auto load = [&](int64_t at, int (&experts)[kBatch]) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64_t i = at + b * 32 + lane;
      experts[b] = i < end ? p.ids[i] : -1;
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      experts[b] = local_expert(experts[b], p.expert_map, p.map_size, num_experts);
  };
  for (int64_t at = first; at < end; at += 32 * kBatch) {
    int experts[kBatch];
    load(at, experts);
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (experts[b] >= 0) atomicAdd(mine + experts[b], 1);
  }
  __syncthreads();

  // thread t has experts [t kPer, (t + 1) kPer)
  int counts[kPer], rows = 0;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int e = threadIdx.x * kPer + i;
    counts[i] = 0;
    if (e < num_experts)
#pragma unroll 4
      for (int w = 0; w < kWarps; ++w) counts[i] += table[w * num_experts + e];
    rows += (counts[i] + p.block_rows - 1) / p.block_rows * p.block_rows;
  }
  int before = rows;
#pragma unroll
  for (int offset = 1; offset < 32; offset <<= 1) {
    const int other = __shfl_up_sync(0xffffffffu, before, offset);
    if (lane >= offset) before += other;
  }
  if (lane == 31) warp_rows[warp] = before;
  before -= rows;
  __syncthreads();
  int total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += warp_rows[w];
    total += warp_rows[w];
  }
  if (threadIdx.x == 0) *p.num_rows = total;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int e = threadIdx.x * kPer + i;
    if (e >= num_experts) break;
    int rank = 0;
#pragma unroll 4
    for (int w = 0; w < kWarps; ++w) {
      const int count = table[w * num_experts + e];
      table[w * num_experts + e] = rank;
      rank += count;
    }
    const int blocks = (counts[i] + p.block_rows - 1) / p.block_rows;
    const int share = p.even && blocks > 0 ? (counts[i] + blocks - 1) / blocks : p.block_rows;
    starts[e] = before;
    shares[e] = share;
    for (int b = 0; b < blocks; ++b) {
      const int left = counts[i] - b * share, size = left < share ? left : share;
      p.block_experts[before / p.block_rows] = e;
      if (p.block_sizes != nullptr) p.block_sizes[before / p.block_rows] = size;
      else
        for (int r = size; r < p.block_rows; ++r) p.sorted_ids[before + r] = static_cast<int>(p.num_ids);
      before += p.block_rows;
    }
  }
  if (p.fill) {
    for (int64_t i = total + threadIdx.x; i < p.max_blocks * p.block_rows; i += kThreads)
      p.sorted_ids[i] = static_cast<int>(p.num_ids);
    for (int64_t i = total / p.block_rows + threadIdx.x; i < p.max_blocks; i += kThreads) {
      p.block_experts[i] = -1;
      if (p.block_sizes != nullptr) p.block_sizes[i] = 0;
    }
  }
  __syncthreads();

  for (int64_t at = first; at < end; at += 32 * kBatch) {
    int experts[kBatch];
    load(at, experts);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int e = experts[b];
      const unsigned same = __match_any_sync(0xffffffffu, e);
      const int earlier = __popc(same & ((1u << lane) - 1));
      int first = 0;
      if (e >= 0) {
        first = mine[e];
        const int rank = first + earlier, share = shares[e];
        // the other rows of a block have no pair
        const int place = starts[e] + rank + rank / share * (p.block_rows - share);
        p.sorted_ids[place] = static_cast<int>(at + b * 32 + lane);
      }
      __syncwarp();
      if (e >= 0 && earlier == 0) mine[e] = first + __popc(same);
      __syncwarp();
    }
  }
}

}  // namespace lamella
