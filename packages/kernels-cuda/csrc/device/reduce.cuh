// Sums and maxima over a warp or a block; every thread gets the result. The order of the additions is fixed.
#pragma once

namespace lamella {

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

// scratch: one float per warp, free for use again after the next __syncthreads().
template <int kWarps>
__device__ __forceinline__ float block_sum(float x, float* scratch) {
  x = warp_sum(x);
  if constexpr (kWarps == 1) return x;
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) total += scratch[i];
  return total;
}

template <int kWarps>
__device__ __forceinline__ float block_max(float x, float* scratch) {
  x = warp_max(x);
  if constexpr (kWarps == 1) return x;
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  float most = scratch[0];
#pragma unroll
  for (int i = 1; i < kWarps; ++i) most = fmaxf(most, scratch[i]);
  return most;
}

}  // namespace lamella
