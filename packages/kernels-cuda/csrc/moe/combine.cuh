// What surrounds the grouped products: the weighted sum over a token's experts, and quantisation of rows for fp8.
#pragma once

#include "moe/gemm.cuh"

namespace lamella {

struct CombineParams {
  void* out;
  const void* y;  // [T k, H]
  const int32_t *ids, *expert_map;
  const float* weights;
  int64_t map_size, hidden, out_stride;
  int num_experts, top_k;
};

constexpr int kCombineThreads = 128;

// One block per token and 1,024 columns: eight columns per thread, sums over j in float32 and in the order of j.
template <class T>
__global__ void __launch_bounds__(kCombineThreads) moe_combine_kernel(const CombineParams p) {
  const int64_t token = blockIdx.x;
  const int64_t column = (int64_t{blockIdx.y} * kCombineThreads + threadIdx.x) * Vec<T>::kSize;
  wait_predecessor();
  launch_successor();
  if (column >= p.hidden) return;
  const T* y = static_cast<const T*>(p.y) + token * p.top_k * p.hidden + column;
  float sums[8] = {};
  constexpr int kBatch = 8;
  for (int from = 0; from < p.top_k; from += kBatch) {
    Vec<T> rows[kBatch];
    float weight[kBatch];
    bool have[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64_t pair = token * p.top_k + from + b;
      have[b] = from + b < p.top_k && local_expert(p.ids[pair], p.expert_map, p.map_size, p.num_experts) >= 0;
      if (have[b]) {
        rows[b] = load_vec(y + int64_t{from + b} * p.hidden);
        weight[b] = p.weights[pair];
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (!have[b]) continue;
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i] += weight[b] * to_float(rows[b].at[i]);
    }
  }
  Vec<T> result;
#pragma unroll
  for (int i = 0; i < 8; ++i) result.at[i] = from_float<T>(sums[i]);
  store_vec(static_cast<T*>(p.out) + token * p.out_stride + column, result);
}

// One warp per 128 values: q = e4m3(x / scale), scale = max|x| / 448. num_rows: null, or how many rows hold something.
template <class T>
__global__ void __launch_bounds__(128)
    moe_quantise_kernel(f8* q, float* scales, const T* x, int64_t x_stride, int64_t groups, int64_t most_rows,
                        const int32_t* num_rows) {
  const int lane = threadIdx.x % 32;
  const int64_t item = int64_t{blockIdx.x} * 4 + threadIdx.x / 32, row = item / groups, group = item % groups;
  wait_predecessor();
  launch_successor();
  if (row >= most_rows || (num_rows != nullptr && row >= *num_rows)) return;
  struct alignas(8) Four {
    T at[4];
  };
  const Four held = *reinterpret_cast<const Four*>(x + row * x_stride + group * 128 + lane * 4);
  float values[4], most = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[i] = to_float(held.at[i]);
    most = fmaxf(most, fabsf(values[i]));
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
  const float scale = fmaxf(most, 1e-10f) / 448.f;
  struct alignas(4) Packed {
    f8 at[4];
  } packed;
#pragma unroll
  for (int i = 0; i < 4; ++i) packed.at[i] = from_float<f8>(values[i] / scale);
  *reinterpret_cast<Packed*>(q + row * groups * 128 + group * 128 + lane * 4) = packed;
  if (lane == 0) scales[row * groups + group] = scale;
}

}  // namespace lamella
