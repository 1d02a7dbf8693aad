// Grouped products with mma.sync: weights are the 16-row side of the instruction, tokens its 8-column side.
//
// Four warps; warp v has rows [16 v, 16 v + 16) of both sets of 64 weight rows and all kTokens tokens. Units of 128
// bytes of K pass through kStages buffers in shared memory: rows of 128 bytes, 16-byte chunk c of row r at c ^ (r % 8).
#pragma once

#include <type_traits>

#include "moe/gemm.cuh"

namespace lamella {

__device__ __forceinline__ void copy_chunk(void* to, const void* from, bool have) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(have ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void load_fragments(uint32_t (&r)[4], const char* from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(from)))
               : "memory");
}

template <class T>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, bf16>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two e4m3 of a 32-bit word -> two f16.
__device__ __forceinline__ uint32_t widen(uint32_t word, int half) {
  const auto two = static_cast<__nv_fp8x2_storage_t>(word >> (16 * half));
  const __half2_raw wide = __nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3);
  return static_cast<uint32_t>(wide.x) | static_cast<uint32_t>(wide.y) << 16;
}

// Address of byte `at` of row r in a buffer of 128-byte rows.
__device__ __forceinline__ int swizzled(int r, int at) { return r * 128 + (at ^ ((r & 7) << 4)); }

template <class T, class O, int kTokens, bool kFirst>
__global__ void __launch_bounds__(128) moe_portable_kernel(const MoeGemm g) {
  constexpr bool kScaled = sizeof(T) == 1;
  constexpr int kStages = 3, kStageBytes = 128 * 128 + kTokens * 128, kTiles = kTokens / 8;
  constexpr int kChunks = kTokens * 8 / 128;  // of a thread
  extern __shared__ __align__(1024) char stages[];
  __shared__ int pairs[kTokens];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  wait_predecessor();
  launch_successor();
  const int64_t block = blockIdx.x / g.num_tiles;
  const int tile = static_cast<int>(blockIdx.x % g.num_tiles);
  if (block >= *g.blocks.num_rows / kTokens) return;
  const int64_t expert = g.blocks.block_experts[block];
  const int size = g.blocks.block_sizes[block];
  if (threadIdx.x < kTokens)
    pairs[threadIdx.x] = static_cast<int>(threadIdx.x) < size ? g.blocks.sorted_ids[block * kTokens + threadIdx.x] : -1;
  __syncthreads();

  // rows of the two sets in the weight of the expert, and how many of them exist
  const int64_t row0 = int64_t{tile} * (kFirst ? 64 : 128);
  const int64_t set_step = kFirst ? g.rows / 2 : 64;
  const int64_t k_bytes = g.k * static_cast<int64_t>(sizeof(T));
  const char* w = static_cast<const char*>(g.w) + expert * g.rows * k_bytes;
  const char* sources[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int r = threadIdx.x / 8 + 16 * i, pair = pairs[r];
    const int64_t row = kFirst ? (pair >= 0 ? pair / g.blocks.top_k : 0) : block * kTokens + r;
    sources[i] = static_cast<const char*>(g.x) + row * g.x_stride * static_cast<int64_t>(sizeof(T));
  }
  const int chunk = threadIdx.x % 8 * 16;
  const auto load = [&](int unit) {
    if (unit < g.num_k) {
      char* to = stages + unit % kStages * kStageBytes;
      const int64_t at = int64_t{unit} * 128 + chunk;
      const bool inside = at < k_bytes;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int r = threadIdx.x / 8 + 16 * i;
        const int64_t row = row0 + r % 64 + (i >= 4 ? set_step : 0);
        const bool have = inside && (kFirst ? row0 + r % 64 < g.num_out : row < g.num_out);
        copy_chunk(to + swizzled(r, chunk), have ? w + row * k_bytes + at : w, have);
      }
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const int r = threadIdx.x / 8 + 16 * i;
        const bool have = inside && r < size;
        copy_chunk(to + 128 * 128 + swizzled(r, chunk), have ? sources[i] + at : static_cast<const char*>(g.x), have);
      }
    }
    copy_commit();
  };

  float sums[2][kTiles][4] = {};
  load(0);
  load(1);
  for (int unit = 0; unit < g.num_k; ++unit) {
    copy_wait<kStages - 2>();
    __syncthreads();  // this unit is here for all, and all have left the buffer that is filled next
    load(unit + 2);
    const char* a_rows = stages + unit % kStages * kStageBytes;
    const char* b_rows = a_rows + 128 * 128;
    if constexpr (!kScaled) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        uint32_t a[2][4];
#pragma unroll
        for (int s = 0; s < 2; ++s)
          load_fragments(a[s], a_rows + swizzled(64 * s + 16 * warp + lane % 16, 32 * k + 16 * (lane / 16)));
#pragma unroll
        for (int j = 0; j < kTiles; j += 2) {
          uint32_t b[4];  // tokens 8 j, k low and high; tokens 8 j + 8, k low and high
          load_fragments(b, b_rows + swizzled(8 * j + lane % 8 + 8 * (lane / 16), 32 * k + 16 * (lane / 8 % 2)));
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            multiply<T>(sums[s][j], a[s], b[0], b[1]);
            multiply<T>(sums[s][j + 1], a[s], b[2], b[3]);
          }
        }
      }
    } else {
      // K may be permuted as long as both sides agree: a thread's four e4m3 of a word stand for k, k + 1, k + 8, k + 9
      float part[2][kTiles][4] = {};
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int at = 16 * k + 4 * (lane % 4);
        uint32_t a[2][4];
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          const int r = 64 * s + 16 * warp + lane / 4;
          const uint32_t low = *reinterpret_cast<const uint32_t*>(a_rows + swizzled(r, at));
          const uint32_t high = *reinterpret_cast<const uint32_t*>(a_rows + swizzled(r + 8, at));
          a[s][0] = widen(low, 0);
          a[s][1] = widen(high, 0);
          a[s][2] = widen(low, 1);
          a[s][3] = widen(high, 1);
        }
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          const uint32_t word = *reinterpret_cast<const uint32_t*>(b_rows + swizzled(8 * j + lane / 4, at));
          const uint32_t b0 = widen(word, 0), b1 = widen(word, 1);
#pragma unroll
          for (int s = 0; s < 2; ++s) multiply<f16>(part[s][j], a[s], b0, b1);
        }
      }
      const float* w_scale = g.w_scale + expert * (g.rows / 128) * g.num_k + unit;
      const float of_set[2] = {w_scale[row0 / 128 * g.num_k], w_scale[(row0 + set_step) / 128 * g.num_k]};
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int r = 8 * j + 2 * (lane % 4) + c, pair = pairs[r];
          const int64_t row = kFirst ? pair / g.blocks.top_k : block * kTokens + r;
          const float scale = pair >= 0 ? g.x_scale[row * g.num_k + unit] : 0.f;
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            sums[s][j][c] += part[s][j][c] * (scale * of_set[s]);
            sums[s][j][2 + c] += part[s][j][2 + c] * (scale * of_set[s]);
          }
        }
      }
    }
  }

  O* out = static_cast<O*>(g.out);
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = 8 * j + 2 * (lane % 4) + i % 2, pair = pairs[r];
      if (pair < 0) continue;
      const int64_t n = row0 + 16 * warp + lane / 4 + 8 * (i / 2);
      if constexpr (kFirst) {
        if (n < g.num_out)
          out[(block * kTokens + r) * g.num_out + n] = from_float<O>(silu_mul(sums[0][j][i], sums[1][j][i]));
      } else {
#pragma unroll
        for (int s = 0; s < 2; ++s)
          if (n + 64 * s < g.num_out) out[int64_t{pair} * g.num_out + n + 64 * s] = from_float<O>(sums[s][j][i]);
      }
    }
  }
}

}  // namespace lamella
