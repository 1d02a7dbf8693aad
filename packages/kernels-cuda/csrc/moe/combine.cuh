// What surrounds the grouped products: the weighted sum over a token's experts (and the residual sum and norm behind it),
// and quantisation of rows for fp8.
#pragma once

#include "device/reduce.cuh"
#include "moe/gemm.cuh"

namespace lamella {

struct CombineParams {
  void* out;
  const void* y;  // [T k, H]
  const int32_t *ids, *expert_map;
  const float* weights;
  int64_t map_size, hidden, out_stride;
  int num_experts, top_k;
  // instead of out: residual += sum, and normed = norm(residual) * gain if there is a gain
  void *residual, *normed;
  const void* gain;
  int64_t residual_stride, normed_stride;
  float eps;
};

constexpr int kCombineThreads = 128;

// 16 bytes as one value: elements of two bytes, loaded under a condition, would get a register each. Past L1.
__device__ __forceinline__ uint4 load_raw(const void* from) { return __ldcg(static_cast<const uint4*>(from)); }
template <class T>
__device__ __forceinline__ Vec<T> as_vec(const uint4& raw) {
  return *reinterpret_cast<const Vec<T>*>(&raw);
}

// One block per token and 1,024 columns: eight columns per thread, sums over j in float32 and in the order of j.
template <class T>
__global__ void __launch_bounds__(kCombineThreads) moe_combine_kernel(const CombineParams p) {
  const int64_t token = blockIdx.x;
  const int64_t column = (int64_t{blockIdx.y} * kCombineThreads + threadIdx.x) * Vec<T>::kSize;
  launch_successor();
  wait_predecessor();
  if (column >= p.hidden) return;
  const T* y = static_cast<const T*>(p.y) + token * p.top_k * p.hidden + column;
  float sums[8] = {};
  constexpr int kBatch = 8;
  for (int from = 0; from < p.top_k; from += kBatch) {
    uint4 rows[kBatch] = {};
    float weight[kBatch];
    bool have[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64_t pair = token * p.top_k + from + b;
      have[b] = from + b < p.top_k && local_expert(p.ids[pair], p.expert_map, p.map_size, p.num_experts) >= 0;
      if (have[b]) {
        rows[b] = load_raw(y + int64_t{from + b} * p.hidden);
        weight[b] = p.weights[pair];
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (!have[b]) continue;
      const Vec<T> row = as_vec<T>(rows[b]);
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i] += weight[b] * to_float(row.at[i]);
    }
  }
  Vec<T> result;
#pragma unroll
  for (int i = 0; i < 8; ++i) result.at[i] = from_float<T>(sums[i]);
  store_vec(static_cast<T*>(p.out) + token * p.out_stride + column, result);
}

constexpr int kCombineNormThreads = 256, kCombineNormVecs = 4;  // vectors of a thread, at most

// One block per token, which keeps its row in registers: the same sum, rounded, then as rms_norm() with a residual. Only
// y is the preceding kernel's: that one starts this after its own wait, so that all else has been written by then; it is
// read past L1, which may hold what lay there before.
template <class T, int kVecs>
__global__ void __launch_bounds__(kCombineNormThreads) moe_combine_norm_kernel(const CombineParams p) {
  constexpr int kSize = Vec<T>::kSize, kBatch = 8;
  __shared__ float scratch[kCombineNormThreads / 32];
  const int64_t token = blockIdx.x, num_vecs = p.hidden / kSize;
  const int lane = threadIdx.x % 32;
  launch_successor();
  T* residual = static_cast<T*>(p.residual) + token * p.residual_stride;
  const T* gains = static_cast<const T*>(p.gain);
  uint4 held[kVecs] = {}, gain[kVecs] = {};
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const int64_t place = threadIdx.x + int64_t{v} * kCombineNormThreads;
    if (place >= num_vecs) continue;
    held[v] = load_raw(residual + place * kSize);
    if (gains != nullptr) gain[v] = load_raw(gains + place * kSize);
  }
  // lane l has pair from + l
  unsigned valid;
  float weight;
  const auto look_up = [&](int from) {
    const int64_t pair = token * p.top_k + from + lane;
    const bool have =
        from + lane < p.top_k && local_expert(__ldcg(p.ids + pair), p.expert_map, p.map_size, p.num_experts) >= 0;
    weight = have ? __ldcg(p.weights + pair) : 0.f;
    valid = __ballot_sync(0xffffffffu, have);
  };
  look_up(0);
  int looked_up = 0;
  wait_predecessor();

  float squares = 0.f;
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const int64_t place = threadIdx.x + int64_t{v} * kCombineNormThreads;
    const T* y = static_cast<const T*>(p.y) + token * p.top_k * p.hidden + place * kSize;
    float sums[kSize] = {};
    for (int from = 0; from < p.top_k; from += kBatch) {
      if (from / 32 != looked_up) {
        looked_up = from / 32;
        look_up(looked_up * 32);
      }
      uint4 rows[kBatch] = {};
#pragma unroll
      for (int b = 0; b < kBatch; ++b)
        if ((valid >> (from % 32 + b) & 1) != 0 && place < num_vecs) rows[b] = load_raw(y + int64_t{from + b} * p.hidden);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if ((valid >> (from % 32 + b) & 1) == 0) continue;
        const float factor = __shfl_sync(0xffffffffu, weight, from % 32 + b);
        const Vec<T> row = as_vec<T>(rows[b]);
#pragma unroll
        for (int i = 0; i < kSize; ++i) sums[i] += factor * to_float(row.at[i]);
      }
    }
    if (looked_up != 0) {
      looked_up = 0;
      look_up(0);
    }
    if (place >= num_vecs) continue;
    Vec<T> row = as_vec<T>(held[v]);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      row.at[i] = from_float<T>(to_float(from_float<T>(sums[i])) + to_float(row.at[i]));
      squares += to_float(row.at[i]) * to_float(row.at[i]);
    }
    store_vec(residual + place * kSize, row);
    held[v] = *reinterpret_cast<const uint4*>(&row);
  }
  if (gains == nullptr) return;
  const float inverse =
      rsqrtf(block_sum<kCombineNormThreads / 32>(squares, scratch) / static_cast<float>(p.hidden) + p.eps);
  T* normed = static_cast<T*>(p.normed) + token * p.normed_stride;
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const int64_t place = threadIdx.x + int64_t{v} * kCombineNormThreads;
    if (place >= num_vecs) continue;
    const Vec<T> row = as_vec<T>(held[v]), factor = as_vec<T>(gain[v]);
    Vec<T> result;
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      result.at[i] = from_float<T>(to_float(from_float<T>(to_float(row.at[i]) * inverse)) * to_float(factor.at[i]));
    store_vec(normed + place * kSize, result);
  }
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
