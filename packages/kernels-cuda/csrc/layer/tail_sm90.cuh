// Hopper: one block per multiprocessor stays for the whole tail, and its weights never stop streaming.
//
//   loading warp     o tiles | gate_up tiles      | down tiles | qkv tiles     as far ahead as kStages reach
//   16 other warps   o tiles | gate_up tiles      | down tiles | qkv tiles
//                            ^ all blocks meet    ^            ^
//
// What a block waits for at a border are the other blocks' sums: a microsecond or two, in which the stages fill. Weights
// do not depend on anything, so the first ones arrive while attention still runs.
//
// A tile is 16 rows of weights over all of K, in stages of 512: of each, every warp multiplies 32 elements of K by the
// tokens (mma m16n8k16, the weights as its 16 rows) and the warps' sums are added at the tile's end, in their order. A
// gate_up tile holds 8 gate rows and their 8 up rows, which meet in one thread. The elements of K are taken in an order
// in which each thread reads 16 bytes of weights and of tokens at once; a sum over K allows any.
//
// Tokens stay in registers where K is the hidden size: 8 stages of 16 bytes for each 8 tokens. For down (K = I) they
// are read 8 stages ahead of use, for two tiles at a time.
#pragma once

#include <cstdlib>
#include <type_traits>

#include "device/dtype.cuh"
#include "device/launch.cuh"
#include "device/tma.cuh"
#include "layer/tail.h"

namespace lamella {

constexpr int kTailRows = 16, kTailK = 512, kTailHeld = 8;  // of a stage; stages of tokens that are held
constexpr int kTailBoxBytes = 8 * kTailK * 2;               // 8 rows: what is loaded at once
constexpr int kTailStageBytes = 2 * kTailBoxBytes;
constexpr int kTailPair = 2;  // tiles of down at a time

template <int kTiles, int kWarps>
struct TailShape {
  static constexpr int kConsumers = kWarps * 32, kThreads = kConsumers + 32;
  static constexpr int kPieces = 16 / kWarps;  // of 32 elements of K, of a stage and warp
  static constexpr int kSums = kTailPair * kTiles * 128;  // of a warp
  static constexpr int kSumBytes = kWarps * kSums * 4;
  static constexpr int kSquareBytes = kWarps * kTiles * 8 * 4;
  static constexpr int kFit = (225 * 1024 - kSumBytes - kSquareBytes - 256) / kTailStageBytes;
  static constexpr int kStages = kFit < 12 ? kFit : 12;
  static constexpr int kShared = kStages * kTailStageBytes + kSumBytes + kSquareBytes + 2 * kStages * 8 + 1024;
};

template <class T>
__device__ __forceinline__ void mma_16x8x16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                            uint32_t b0, uint32_t b1) {
  if constexpr (sizeof(T) == 2 && std::is_same<T, bf16>::value) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// Past L1: other blocks have written it while this kernel runs.
__device__ __forceinline__ uint4 load_shared_by_blocks(const void* from) {
  uint4 raw;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
               : "l"(from)
               : "memory");
  return raw;
}

// 8 rows of 512 elements: lines of 64 elements (128 bytes), 8 rows of the first, 8 rows of the second, .., swizzled.
__device__ __forceinline__ void load_rows(uint32_t to, const CUtensorMap* map, uint32_t barrier, int k_line, int row,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, "
      "%5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(0), "r"(row), "r"(k_line), "l"(policy)
      : "memory");
}

// The tiles of one product: block b has tiles b, b + grid, ..; the second 8 rows of a tile lie apart from the first 8.
struct TailProduct {
  const CUtensorMap* map;
  int num_tiles, rows_per_tile, apart;
  int num_k;  // stages along K
};

struct TailMaps {
  CUtensorMap o, gate_up, down, qkv;
};

template <class T, int kTiles, int kWarps>
__global__ void __launch_bounds__(kWarps * 32 + 32, 1)
    layer_tail_kernel(const __grid_constant__ LamellaLayerTail p, const __grid_constant__ TailMaps maps,
                      unsigned long long* met, T* inner, int flags) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = TailShape<kTiles, kWarps>;
  constexpr int kStages = Shape::kStages, kPieces = Shape::kPieces, kConsumers = Shape::kConsumers;
  extern __shared__ char raw[];
  char* shared = raw + (1024 - shared_address(raw) % 1024) % 1024;
  float* sums = reinterpret_cast<float*>(shared + kStages * kTailStageBytes);
  float* squares = sums + Shape::kSumBytes / 4;
  uint64_t* full = reinterpret_cast<uint64_t*>(squares + Shape::kSquareBytes / 4);
  uint64_t* empty = full + kStages;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, kWarps);
    }
    barrier_init_done();
  }
  __syncthreads();

  const int hidden_tiles = static_cast<int>(p.h / kTailRows);
  const auto weights = [&](const CUtensorMap& map, int64_t width, int tiles, int rows, int64_t apart) {
    return TailProduct{&map, tiles, rows, static_cast<int>(apart), static_cast<int>(width / kTailK)};
  };
  const TailProduct o = weights(maps.o, p.a, hidden_tiles, 16, 8);
  const TailProduct gate_up = weights(maps.gate_up, p.h, static_cast<int>(p.i / 8), 8, p.i);
  const TailProduct down = weights(maps.down, p.i, hidden_tiles, 16, 8);
  const TailProduct qkv = weights(maps.qkv, p.h, p.w_qkv != nullptr ? static_cast<int>(p.q / kTailRows) : 0, 16, 8);
  int stage = 0;
  uint32_t parity = 0;
  const auto next_stage = [&] {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  };

  if (warp == kWarps) {
    if (lane != 0) return;
    const uint64_t once = evict_first_policy();
    const auto load = [&](const TailProduct& w, int pair) {
      prefetch_map(w.map);
      for (int first = blockIdx.x; first < w.num_tiles; first += pair * gridDim.x) {
        const int count = pair == 1 || first + static_cast<int>(gridDim.x) >= w.num_tiles ? 1 : pair;
        for (int k = 0; k < w.num_k; ++k) {
          for (int t = 0; t < count; ++t) {
            const int row = (first + t * static_cast<int>(gridDim.x)) * w.rows_per_tile;
            barrier_wait(empty + stage, parity ^ 1);
            barrier_expect(full + stage, kTailStageBytes);
            const uint32_t to = shared_address(shared + stage * kTailStageBytes), done = shared_address(full + stage);
            load_rows(to, w.map, done, k * (kTailK / 64), row, once);
            load_rows(to + kTailBoxBytes, w.map, done, k * (kTailK / 64), row + w.apart, once);
            next_stage();
          }
        }
      }
    };
    load(o, 1);
    load(gate_up, 1);
    load(down, kTailPair);
    load(qkv, 1);
    if (p.prefetch != nullptr) {
      constexpr int64_t kPiece = 8192;
      const char* from = static_cast<const char*>(p.prefetch);
      const int64_t pieces = p.prefetch_bytes / kPiece;
      for (int64_t at = blockIdx.x; at < pieces; at += gridDim.x) prefetch_l2(from + at * kPiece, kPiece);
    }
    return;
  }

  const int g = lane / 4, kq = lane % 4;
  wait_predecessor();
  const unsigned long long blocks = gridDim.x;
  unsigned long long before = 0;  // of the block's first thread
  if (threadIdx.x == 0) {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(before) : "l"(met) : "memory");
    before -= before % blocks;  // this block has not met the others yet, so they have not gone on from here
  }
  const auto meet = [&] {
    if (flags & 2) return;
    sync_some(1, kConsumers);
    if (threadIdx.x == 0) {
      before += blocks;
      __threadfence();
      asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(met) : "memory");
      unsigned long long seen;
      do {
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(met) : "memory");
      } while (seen < before);
    }
    sync_some(1, kConsumers);
  };

  uint4 tokens[kTailHeld][kPieces][kTiles];
  const auto read_tokens = [&](uint4 (&to)[kPieces][kTiles], const T* from, int64_t stride, int k) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int token = n * 8 + g;
      const T* at = from + token * stride + k * kTailK + warp * kPieces * 32 + kq * 8;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) to[i][n] = token < p.m ? load_shared_by_blocks(at + i * 32) : uint4{0, 0, 0, 0};
    }
  };
  const auto hold_tokens = [&](const T* from, int64_t stride, int num_k) {
#pragma unroll
    for (int k = 0; k < kTailHeld; ++k)
      if (k < num_k) read_tokens(tokens[k], from, stride, k);
  };
  const T* residual = static_cast<const T*>(p.residual);
  const auto hold_normed = [&](const void* weight) {
    const int num_k = static_cast<int>(p.h / kTailK);
    hold_tokens(residual, p.residual_stride, num_k);
    float sum[kTiles] = {};
#pragma unroll
    for (int k = 0; k < kTailHeld; ++k) {
      if (k >= num_k) continue;
#pragma unroll
      for (int i = 0; i < kPieces * kTiles; ++i) {
        const int n = i % kTiles;
        const Vec<T> x = *reinterpret_cast<const Vec<T>*>(&tokens[k][i / kTiles][n]);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[n] += to_float(x.at[j]) * to_float(x.at[j]);
      }
    }
    float inverse[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      sum[n] += __shfl_xor_sync(0xffffffffu, sum[n], 1);
      sum[n] += __shfl_xor_sync(0xffffffffu, sum[n], 2);
      if (kq == 0) squares[warp * kTiles * 8 + n * 8 + g] = sum[n];
    }
    sync_some(1, kConsumers);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float total = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total += squares[w * kTiles * 8 + n * 8 + g];
      inverse[n] = rsqrtf(total / static_cast<float>(p.h) + p.eps);
    }
#pragma unroll
    for (int k = 0; k < kTailHeld; ++k) {
      if (k >= num_k) continue;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const Vec<T> gain =
            load_vec(static_cast<const T*>(weight) + k * kTailK + (warp * kPieces + i) * 32 + kq * 8);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          Vec<T> x = *reinterpret_cast<const Vec<T>*>(&tokens[k][i][n]);
#pragma unroll
          for (int j = 0; j < 8; ++j)
            x.at[j] = from_float<T>(to_float(from_float<T>(to_float(x.at[j]) * inverse[n])) * to_float(gain.at[j]));
          tokens[k][i][n] = *reinterpret_cast<const uint4*>(&x);
        }
      }
    }
  };

  // count tiles at a time; write(tile of the pass, sum of the lower row's, of the upper row's, row 0-7, token)
  const auto multiply = [&](const TailProduct& w, auto pair_of, const T* streamed, auto&& write) {
    constexpr int kPair = decltype(pair_of)::value;
    constexpr bool kStreams = kPair > 1;
    for (int first = blockIdx.x; first < w.num_tiles; first += kPair * gridDim.x) {
      const int count = kPair == 1 || first + static_cast<int>(gridDim.x) >= w.num_tiles ? 1 : kPair;
      float c[kPair][kTiles][4] = {};
      if constexpr (kStreams) hold_tokens(streamed, p.i, w.num_k);
      for (int k0 = 0; k0 < w.num_k; k0 += kTailHeld) {
#pragma unroll
        for (int j = 0; j < kTailHeld; ++j) {
          const int k = k0 + j;
          if (k >= w.num_k) break;
#pragma unroll
          for (int t = 0; t < kPair; ++t) {
            if (t >= count) break;
            barrier_wait(full + stage, parity);
            if (flags & 1) {
              __syncwarp();
              if (lane == 0) barrier_arrive(empty + stage);
              next_stage();
              continue;
            }
            uint4 low[kPieces], high[kPieces];
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
              const int piece = warp * kPieces + i;
              const char* at =
                  shared + stage * kTailStageBytes + piece / 2 * 1024 + g * 128 + ((piece % 2 * 4 + kq) ^ g) * 16;
              low[i] = *reinterpret_cast<const uint4*>(at);
              high[i] = *reinterpret_cast<const uint4*>(at + kTailBoxBytes);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + stage);
            next_stage();
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
#pragma unroll
              for (int n = 0; n < kTiles; ++n) {
                const uint4 x = tokens[j][i][n];
                mma_16x8x16<T>(c[t][n], low[i].x, high[i].x, low[i].y, high[i].y, x.x, x.y);
                mma_16x8x16<T>(c[t][n], low[i].z, high[i].z, low[i].w, high[i].w, x.z, x.w);
              }
            }
          }
          if constexpr (kStreams) {
            if (k + kTailHeld < w.num_k) read_tokens(tokens[j], streamed, p.i, k + kTailHeld);
          }
        }
      }
      float* mine = sums + warp * Shape::kSums + lane;
#pragma unroll
      for (int t = 0; t < kPair; ++t)
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) mine[((t * kTiles + n) * 4 + e) * 32] = c[t][n][e];
      sync_some(1, kConsumers);
      // one thread per token and pair of rows g, g + 8
      const int which = threadIdx.x / 64, t = which / kTiles, n = which % kTiles;
      const int token = n * 8 + kq * 2 + threadIdx.x % 64 / 32;
      if (t < count && token < p.m) {
        const float* from = sums + (which * 4 + threadIdx.x % 64 / 32) * 32 + lane;
        float low = 0.f, high = 0.f;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) {
          low += from[i * Shape::kSums];
          high += from[i * Shape::kSums + 64];
        }
        write(first + t * static_cast<int>(gridDim.x), low, high, token);
      }
      sync_some(1, kConsumers);  // the sums may be written over
    }
  };
  const auto add = [&](int tile, float low, float high, int token) {
    T* at = static_cast<T*>(p.residual) + token * p.residual_stride + tile * kTailRows + g;
    const auto grow = [](T* to, float by) {
      uint16_t raw;
      asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(raw) : "l"(to) : "memory");
      *to = from_float<T>(to_float(*reinterpret_cast<const T*>(&raw)) + to_float(from_float<T>(by)));
    };
    grow(at, low);
    grow(at + 8, high);
  };

  using One = std::integral_constant<int, 1>;
  using Pair = std::integral_constant<int, kTailPair>;
  hold_tokens(static_cast<const T*>(p.attended), p.attended_stride, o.num_k);
  multiply(o, One{}, nullptr, add);
  meet();
  hold_normed(p.mlp_norm);
  multiply(gate_up, One{}, nullptr, [&](int tile, float low, float high, int token) {
    const float gate = to_float(from_float<T>(low)), up = to_float(from_float<T>(high));
    const float act = to_float(from_float<T>(__fdividef(gate, 1.f + __expf(-gate))));
    inner[token * p.i + tile * 8 + g] = from_float<T>(act * up);
  });
  meet();
  multiply(down, Pair{}, inner, add);
  launch_successor();
  if (p.w_qkv == nullptr) return;
  meet();
  hold_normed(p.next_norm);
  multiply(qkv, One{}, nullptr, [&](int tile, float low, float high, int token) {
    T* at = static_cast<T*>(p.qkv) + token * p.qkv_stride + tile * kTailRows + g;
    at[0] = from_float<T>(low);
    at[8] = from_float<T>(high);
  });
#endif
}

// A map of [rows, width] as lines of 64 elements, read 8 rows of 512 elements at a time.
template <class T>
bool map_lines(CUtensorMap* map, const void* base, int64_t rows, int64_t width) {
  const EncodeTiled encode = tensor_map_encoder();
  if (encode == nullptr) return false;
  const cuuint64_t sizes[3] = {64, static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(width / 64)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(width * 2), 128};
  const cuuint32_t box[3] = {64, 8, kTailK / 64}, steps[3] = {1, 1, 1};
  return encode(map, sizeof(T) == 2 && std::is_same<T, bf16>::value ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                3, const_cast<void*>(base), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class T>
int layer_tail(const LamellaLayerTail& p, void* workspace, int64_t zeroed, void* stream) {
  auto* met = static_cast<unsigned long long*>(workspace);
  T* inner = reinterpret_cast<T*>(static_cast<char*>(workspace) + zeroed);
  TailMaps maps = {};
  if (!map_lines<T>(&maps.o, p.w_o, p.h, p.a) || !map_lines<T>(&maps.gate_up, p.w_gate_up, 2 * p.i, p.h) ||
      !map_lines<T>(&maps.down, p.w_down, p.h, p.i) ||
      (p.w_qkv != nullptr && !map_lines<T>(&maps.qkv, p.w_qkv, p.q, p.h)))
    return kUnsupported;
  const char* env = getenv("TAIL_FLAGS");
  const int flags = env ? atoi(env) : 0;
  const auto run = [&](auto shape, auto kernel) {
    using Shape = decltype(shape);
    const Launch how{dim3(static_cast<unsigned>(device_facts().num_sms)), dim3(Shape::kThreads), Shape::kShared,
                     static_cast<cudaStream_t>(stream)};
    return launch(kernel, how, p, maps, met, inner, flags);
  };
  if (p.m <= 8 && (flags & 4)) return run(TailShape<1, 8>{}, layer_tail_kernel<T, 1, 8>);
  if (p.m <= 8) return run(TailShape<1, 16>{}, layer_tail_kernel<T, 1, 16>);
  return run(TailShape<2, 8>{}, layer_tail_kernel<T, 2, 8>);
}

}  // namespace lamella
