// One block per row. Each thread keeps its part of the row in registers: the row is read once and written once.
//
//   x (+ residual) ──> registers ──> sum of squares ──> scale ──> out (or amax ──> fp8)
#pragma once

#include "device/dtype.cuh"
#include "device/launch.cuh"
#include "device/reduce.cuh"

namespace lamella {

struct NormParams {
  void* out;
  float* scale;  // fp8 only
  const void* x;
  void* residual;  // null: none
  const void* weight;
  int64_t width, out_stride, x_stride, residual_stride;
  float eps;
  bool plus_one;
};

// kVecs: 16-byte vectors that a thread holds.
template <class T, int kThreads, int kVecs, bool kFp8>
__global__ void __launch_bounds__(kThreads) rms_norm_kernel(const NormParams p) {
  constexpr int kSize = Vec<T>::kSize, kWarps = kThreads / 32;
  __shared__ float scratch[2][kWarps];
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  const T* weight = static_cast<const T*>(p.weight);
  const int64_t num_vecs = p.width / kSize;

  launch_successor();
  // the weight belongs to the model, no kernel writes it
  Vec<T> gain[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int64_t place = threadIdx.x + int64_t{i} * kThreads;
    if (place < num_vecs) gain[i] = load_vec(weight + place * kSize);
  }
  wait_predecessor();

  Vec<T> held[kVecs];
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int64_t place = threadIdx.x + int64_t{i} * kThreads;
    if (place < num_vecs) held[i] = load_vec(x + place * kSize);
  }
  if (p.residual != nullptr) {
    T* residual = static_cast<T*>(p.residual) + row * p.residual_stride;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int64_t place = threadIdx.x + int64_t{i} * kThreads;
      if (place >= num_vecs) continue;
      const Vec<T> other = load_vec(residual + place * kSize);
#pragma unroll
      for (int j = 0; j < kSize; ++j) held[i].at[j] = from_float<T>(to_float(held[i].at[j]) + to_float(other.at[j]));
      store_vec(residual + place * kSize, held[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    if (threadIdx.x + int64_t{i} * kThreads >= num_vecs) continue;
#pragma unroll
    for (int j = 0; j < kSize; ++j) squares += to_float(held[i].at[j]) * to_float(held[i].at[j]);
  }
  const float inverse = rsqrtf(block_sum<kWarps>(squares, scratch[0]) / static_cast<float>(p.width) + p.eps);

  const auto normed = [&](int i, int j) {
    const float y = to_float(held[i].at[j]) * inverse, g = to_float(gain[i].at[j]);
    // as the models were trained: llama rounds before the weight, gemma multiplies by (1 + weight) and rounds once
    return p.plus_one ? y * (1.f + g) : to_float(from_float<T>(y)) * g;
  };
  if constexpr (!kFp8) {
    T* out = static_cast<T*>(p.out) + row * p.out_stride;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int64_t place = threadIdx.x + int64_t{i} * kThreads;
      if (place >= num_vecs) continue;
      Vec<T> result;
#pragma unroll
      for (int j = 0; j < kSize; ++j) result.at[j] = from_float<T>(normed(i, j));
      store_vec(out + place * kSize, result);
    }
  } else {
    f8* out = static_cast<f8*>(p.out) + row * p.out_stride;
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      if (threadIdx.x + int64_t{i} * kThreads >= num_vecs) continue;
#pragma unroll
      for (int j = 0; j < kSize; ++j) most = fmaxf(most, fabsf(to_float(from_float<T>(normed(i, j)))));
    }
    const float scale = fmaxf(block_max<kWarps>(most, scratch[1]) / 448.f, 1.f / (448.f * 512.f));
    if (threadIdx.x == 0) p.scale[row] = scale;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int64_t place = threadIdx.x + int64_t{i} * kThreads;
      if (place >= num_vecs) continue;
      struct alignas(kSize) Packed {
        f8 at[kSize];
      } result;
#pragma unroll
      for (int j = 0; j < kSize; ++j) result.at[j] = from_float<f8>(to_float(from_float<T>(normed(i, j))) / scale);
      *reinterpret_cast<Packed*>(out + place * kSize) = result;
    }
  }
}

}  // namespace lamella
