// Elementwise over rows, 16 bytes at a time:
//
//   x row [ gate vector i | .. || up vector i | .. ] ──> act(gate) * up ──> out vector i (or amax ──> fp8)
//
// or in tiles [ gate 0-63 | up 0-63 | gate 64-127 | .. ]: only where gate i stands and how far up is behind it differ.
#pragma once

#include "activation/gated.h"
#include "device/dtype.cuh"
#include "device/launch.cuh"
#include "device/reduce.cuh"

namespace lamella {

struct ActParams {
  void* out;
  float* scale;  // fp8 only
  const void* x;
  int64_t width, out_stride, x_stride, scale_row_stride, scale_group_stride;
  bool pow2;
  int up_distance;  // from a gate to its up: width, or the size of a tile
  int tile_mask;    // of i, what is added to it to get the place of gate i: the tiles before it held as many ups
};

// layout: 0 for [gate | up], else the size of a tile, a power of two.
inline void set_layout(ActParams& p, int layout) {
  p.up_distance = layout > 0 ? layout : static_cast<int>(p.width);
  p.tile_mask = layout > 0 ? -layout : 0;
}

__device__ __forceinline__ int gate_place(const ActParams& p, int i) { return i + (i & p.tile_mask); }

// Wide types keep the exact functions: their users compare against float32 references.
template <int kAct, class T>
__device__ __forceinline__ float activated(float x) {
  constexpr bool kExact = sizeof(T) == 4;
  const auto sigmoid_times = [&](float t) {  // x * sigmoid(t)
    return kExact ? x / (1.f + expf(-t)) : __fdividef(x, 1.f + __expf(-t));
  };
  if constexpr (kAct == kActSilu) {
    return sigmoid_times(x);
  } else if constexpr (kAct == kActGelu) {
    return 0.5f * x * (1.f + erff(x * 0.70710678118654752f));
  } else if constexpr (kAct == kActGeluTanh) {
    // (1 + tanh(t)) / 2 is sigmoid(2 t)
    return sigmoid_times(1.5957691216057308f * x * (1.f + 0.044715f * x * x));
  } else {
    return x;
  }
}

template <int kAct, class T>
__device__ __forceinline__ Vec<T> gate_up(const Vec<T>& gate, const Vec<T>& up) {
  Vec<T> y;
#pragma unroll
  for (int j = 0; j < Vec<T>::kSize; ++j) {
    // __fdividef(x, y) is 0 for y > 2^126, and so is silu there; for -inf it is NaN as the exact formula's
    const float act = to_float(from_float<T>(activated<kAct, T>(to_float(gate.at[j]))));
    y.at[j] = from_float<T>(act * to_float(up.at[j]));
  }
  return y;
}

template <int kAct, class T>
__device__ __forceinline__ Vec<T> load_act(const ActParams& p, const T* x, int place) {
  constexpr int kSize = Vec<T>::kSize;
  if constexpr (kAct == kActNone) return load_vec(x + int64_t{place} * kSize);
  const T* from = x + gate_place(p, place * kSize);
  const Vec<T> gate = load_vec(from), up = load_vec(from + p.up_distance);
  return gate_up<kAct, T>(gate, up);
}

constexpr int kGatedThreads = 128;

// A block takes kVecs * 128 neighbouring vectors of one row. kStream: larger than the caches, so do not keep the input.
template <int kAct, class T, int kVecs, bool kStream>
__global__ void __launch_bounds__(kGatedThreads) gated_kernel(const ActParams p, int blocks_per_row) {
  constexpr int kSize = Vec<T>::kSize;
  const unsigned row = blockIdx.x / blocks_per_row, part = blockIdx.x - row * blocks_per_row;
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  T* out = static_cast<T*>(p.out) + row * p.out_stride;
  const int num_vecs = static_cast<int>(p.width / kSize), first = part * (kVecs * kGatedThreads) + threadIdx.x;
  wait_predecessor();
  launch_successor();
  const auto load = [](const T* from) { return kStream ? load_stream(from) : load_vec(from); };
  Vec<T> gate[kVecs], up[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int place = first + i * kGatedThreads;
    if (place >= num_vecs) continue;
    const T* from = x + gate_place(p, place * kSize);
    gate[i] = load(from);
    up[i] = load(from + p.up_distance);
  }
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int place = first + i * kGatedThreads;
    if (place < num_vecs) store_vec(out + int64_t{place} * kSize, gate_up<kAct, T>(gate[i], up[i]));
  }
}

template <class T>
__device__ __forceinline__ void store_fp8(f8* to, const Vec<T>& y, float scale) {
  constexpr int kSize = Vec<T>::kSize;
  struct alignas(kSize) Packed {
    f8 at[kSize];
  } packed;
#pragma unroll
  for (int j = 0; j < kSize; ++j) packed.at[j] = from_float<f8>(to_float(y.at[j]) / scale);
  *reinterpret_cast<Packed*>(to) = packed;
}

template <class T>
__device__ __forceinline__ float largest(const Vec<T>& y, float most) {
#pragma unroll
  for (int j = 0; j < Vec<T>::kSize; ++j) most = fmaxf(most, fabsf(to_float(y.at[j])));
  return most;
}

// One block per row, which stays in registers between the maximum and the division.
template <int kAct, class T, int kThreads, int kVecs>
__global__ void __launch_bounds__(kThreads) act_fp8_token_kernel(const ActParams p) {
  constexpr int kSize = Vec<T>::kSize, kWarps = kThreads / 32;
  __shared__ float scratch[kWarps];
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  f8* out = static_cast<f8*>(p.out) + row * p.out_stride;
  const int num_vecs = static_cast<int>(p.width / kSize);
  wait_predecessor();
  launch_successor();
  Vec<T> y[kVecs];
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int place = threadIdx.x + i * kThreads;
    if (place >= num_vecs) continue;
    y[i] = load_act<kAct>(p, x, place);
    most = largest(y[i], most);
  }
  const float scale = fmaxf(block_max<kWarps>(most, scratch) / 448.f, 1.f / (448.f * 512.f));
  if (threadIdx.x == 0) p.scale[row] = scale;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int place = threadIdx.x + i * kThreads;
    if (place < num_vecs) store_fp8(out + int64_t{place} * kSize, y[i], scale);
  }
}

// The smallest power of two that is not less than a positive normal number.
__device__ __forceinline__ float power_of_two_from(float x) {
  const uint32_t bits = __float_as_uint(x);
  return __uint_as_float((bits + 0x007FFFFFu) & 0x7F800000u);
}

// 16 lanes per group of 128.
template <int kAct, class T>
__global__ void __launch_bounds__(kGatedThreads) act_fp8_group_kernel(const ActParams p, int blocks_per_row) {
  constexpr int kSize = Vec<T>::kSize;
  static_assert(kSize == 8, "a group is 16 lanes of 8 elements");
  const unsigned row = blockIdx.x / blocks_per_row, part = blockIdx.x - row * blocks_per_row;
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  f8* out = static_cast<f8*>(p.out) + row * p.out_stride;
  const int num_vecs = static_cast<int>(p.width / kSize), place = part * kGatedThreads + threadIdx.x;
  wait_predecessor();
  launch_successor();
  const bool inside = place < num_vecs;  // the same for all 16 lanes of a group
  Vec<T> y{};
  if (inside) y = load_act<kAct>(p, x, place);
  float most = largest(y, 0.f);
#pragma unroll
  for (int offset = 8; offset > 0; offset >>= 1) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
  if (!inside) return;
  float scale = fmaxf(most, 1e-10f) / 448.f;
  if (p.pow2) scale = power_of_two_from(scale);
  if (threadIdx.x % 16 == 0) p.scale[row * p.scale_row_stride + place / 16 * p.scale_group_stride] = scale;
  store_fp8(out + int64_t{place} * kSize, y, scale);
}

}  // namespace lamella
