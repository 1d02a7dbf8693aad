// First pass over the logits, at memory speed: the maxima of the chunks (NaN where a chunk has NaN), and, on demand, per
// tile its maximum and the sum of exp(x - maximum).
#pragma once

#include "device/launch.cuh"
#include "device/reduce.cuh"
#include "sampling/row.cuh"

namespace lamella::sampling {

constexpr int kScanWarps = 4;

struct ScanParams {
  const void* logits;
  int64_t stride;
  int vocab_size, num_tiles;
  float* maxima;  // [rows, num_tiles * 32]
  float2* sums;  // [rows, num_tiles]; null: not wanted
};

template <class T>
__global__ void __launch_bounds__(kScanWarps * 32) scan_kernel(const ScanParams p, int blocks_per_row) {
  using R = Row<T>;
  const unsigned row_idx = blockIdx.x / blocks_per_row;
  const int tile = static_cast<int>(blockIdx.x - row_idx * blocks_per_row) * kScanWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (tile >= p.num_tiles) return;
  const R row(static_cast<const T*>(p.logits) + row_idx * p.stride, p.vocab_size);
  wait_predecessor();
  launch_successor();
  Vec<T> held[R::kPieces];
  const int first = row.first_id(R::piece(tile, 0, 0));
  if (first >= 0 && first + kTile <= p.vocab_size) {
#pragma unroll
    for (int i = 0; i < R::kPieces; ++i) held[i] = load_vec(row.aligned + int64_t{R::piece(tile, i, lane)} * R::kSize);
  } else {
#pragma unroll
    for (int i = 0; i < R::kPieces; ++i) held[i] = row.raw(R::piece(tile, i, lane));
  }
  float most = -INFINITY;
#pragma unroll
  for (int i = 0; i < R::kPieces; ++i) {
#pragma unroll
    for (int j = 0; j < R::kSize; ++j) most = max_or_nan(most, to_float(held[i].at[j]));
  }
  p.maxima[(int64_t{row_idx} * p.num_tiles + tile) * 32 + lane] = most;
  if (p.sums == nullptr) return;
  const float top = warp_max(most);  // rows with NaN are refused anyway
  const float base = top == -INFINITY ? 0.f : top;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < R::kPieces; ++i) {
#pragma unroll
    for (int j = 0; j < R::kSize; ++j) sum += exp2f((to_float(held[i].at[j]) - base) * 1.4426950408889634f);
  }
  sum = warp_sum(sum);
  if (lane == 0) p.sums[int64_t{row_idx} * p.num_tiles + tile] = make_float2(top, sum);
}

}  // namespace lamella::sampling
