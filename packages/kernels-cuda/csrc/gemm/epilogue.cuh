// What happens to sums before they are stored; shared by the kernels for all devices. gemm.h has the formulas.
#pragma once

#include "device/dtype.cuh"
#include "gemm/gemm.h"

namespace lamella {

constexpr int kGemmRows = 128;  // weight rows of a tile

__device__ __forceinline__ float activate(float x, int act) {
  if (act == kActSilu) return x / (1.f + __expf(-x));
  if (act == kActGeluTanh) return 0.5f * x * (1.f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
  return 0.5f * x * (1.f + erff(x * 0.7071067811865476f));
}

// Eight neighbouring results of one token: columns [n, n + 8) of row m. sums: of the (gate) rows, ups: of the up rows.
// Returns the sum of their squares as stored.
template <class O>
__device__ __forceinline__ float finish_eight(const LamellaGemm& g, int64_t m, int64_t n, const float (&sums)[8],
                                              const float (&ups)[8], float factor) {
  Vec<O> result;
  float squares = 0.f;
  Vec<O> bias, residual, gain;
  if (g.bias != nullptr) bias = load_vec(static_cast<const O*>(g.bias) + n);
  if (g.residual != nullptr) residual = load_vec(static_cast<const O*>(g.residual) + m * g.residual_stride + n);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float y = sums[j] * factor;
    if (g.bias != nullptr) y += to_float(bias.at[j]);
    if (g.act != kActNone) y = activate(to_float(from_float<O>(y)), g.act) * to_float(from_float<O>(ups[j] * factor));
    if (g.residual != nullptr) y = to_float(from_float<O>(y)) + to_float(residual.at[j]);
    result.at[j] = from_float<O>(y);
    squares += to_float(result.at[j]) * to_float(result.at[j]);
  }
  store_vec(static_cast<O*>(g.out) + m * g.out_stride + n, result);
  if (g.gain != nullptr) {
    gain = load_vec(static_cast<const O*>(g.gain) + n);
#pragma unroll
    for (int j = 0; j < 8; ++j) result.at[j] = from_float<O>(to_float(result.at[j]) * to_float(gain.at[j]));
    store_vec(static_cast<O*>(g.scaled_out) + m * g.scaled_out_stride + n, result);
  }
  return squares;
}

// 1 / sqrt(mean of squares + eps) of row m's input, or 1.
__device__ __forceinline__ float norm_factor(const LamellaGemm& g, int64_t m) {
  if (g.squares_in == nullptr) return 1.f;
  float total = 0.f;
#pragma unroll 8
  for (int64_t p = 0; p < g.num_squares_in; ++p) total += g.squares_in[p * g.m + m];
  return rsqrtf(total / static_cast<float>(g.k) + g.eps);
}

}  // namespace lamella
