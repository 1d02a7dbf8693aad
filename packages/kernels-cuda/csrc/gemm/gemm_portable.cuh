// Devices other than Hopper: mma.sync, weights straight from memory to registers.
//
// A block has 16 weight rows (16 gate and 16 up rows if paired) and up to kTokens tokens; its warps share out K. The order
// of K within a block of 32 does not matter as long as both operands agree, so a thread takes 16 contiguous bytes of a
// row: elements 8 t .. 8 t + 7 of the block for lane t of four, and uses them as the fragments of two instructions.
#pragma once

#include "device/launch.cuh"
#include "gemm/epilogue.cuh"

namespace lamella {

template <class T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, bf16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

constexpr int kPortableWarps = 8;

template <class T>
__device__ __forceinline__ uint4 load_or_zero(const T* row, int64_t k, int64_t width, bool exists) {
  if (!exists || k >= width) return make_uint4(0, 0, 0, 0);
  return __ldg(reinterpret_cast<const uint4*>(row + k));
}

template <class T, int kTokens, bool kPaired>
__global__ void __launch_bounds__(kPortableWarps * 32) gemm_portable_kernel(const LamellaGemm g) {
  constexpr int kTiles = kTokens / 8, kHalves = kPaired ? 2 : 1;
  __shared__ float parts[kPortableWarps][kHalves][kTokens][17];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, t = lane % 4;
  const int64_t out0 = int64_t{blockIdx.x} * 16, token0 = int64_t{blockIdx.y} * kTokens;
  const int64_t num_rows = kPaired ? 2 * g.n : g.n;
  const T* w = static_cast<const T*>(g.w);
  const T* x = static_cast<const T*>(g.x);

  float sums[kHalves][kTiles][4] = {};
  wait_predecessor();
  for (int64_t k0 = int64_t{warp} * 32; k0 < g.k; k0 += kPortableWarps * 32) {
    const int64_t k = k0 + 8 * t;
    uint4 low[kHalves], high[kHalves];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int64_t row = kPaired ? out0 / 64 * 128 + out0 % 64 + 64 * half : out0;
      low[half] = load_or_zero(w + (row + quad) * g.w_stride, k, g.k, row + quad < num_rows);
      high[half] = load_or_zero(w + (row + quad + 8) * g.w_stride, k, g.k, row + quad + 8 < num_rows);
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int64_t token = token0 + 8 * tile + quad;
      const uint4 b = load_or_zero(x + token * g.x_stride, k, g.k, token < g.m);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        mma_16x8x16<T>(sums[half][tile], {low[half].x, high[half].x, low[half].y, high[half].y}, {b.x, b.y});
        mma_16x8x16<T>(sums[half][tile], {low[half].z, high[half].z, low[half].w, high[half].w}, {b.z, b.w});
      }
    }
  }
  launch_successor();
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        parts[warp][half][8 * tile + 2 * t + i % 2][quad + 8 * (i / 2)] = sums[half][tile][i];
    }
  }
  __syncthreads();
  for (int item = threadIdx.x; item < kTokens * 2; item += kPortableWarps * 32) {
    const int token = item / 2, piece = item % 2;
    const int64_t m = token0 + token, n = out0 + piece * 8;
    if (m >= g.m || n >= g.n) continue;
    float values[8] = {}, ups[8] = {};
    for (int from = 0; from < kPortableWarps; ++from) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        values[j] += parts[from][0][token][piece * 8 + j];
        if constexpr (kPaired) ups[j] += parts[from][kHalves - 1][token][piece * 8 + j];
      }
    }
    finish_eight<T>(g, m, n, values, ups, norm_factor(g, m));
  }
}

// squares_out of what was stored: a block per tile of 128 columns and token.
template <class T>
__global__ void __launch_bounds__(32) gemm_squares_kernel(const LamellaGemm g) {
  wait_predecessor();
  const int64_t tile = blockIdx.x, m = blockIdx.y;
  float squares = 0.f;
  for (int64_t n = tile * kGemmRows + threadIdx.x; n < g.n && n < (tile + 1) * kGemmRows; n += 32) {
    const float y = to_float(static_cast<const T*>(g.out)[m * g.out_stride + n]);
    squares += y * y;
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
  if (threadIdx.x == 0) g.squares_out[tile * g.m + m] = squares;
}

}  // namespace lamella
