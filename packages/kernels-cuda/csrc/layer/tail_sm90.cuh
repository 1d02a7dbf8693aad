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

#include "device/dtype.cuh"
#include "device/launch.cuh"
#include "device/tma.cuh"
#include "layer/tail.h"

namespace lamella {

constexpr int kTailWarps = 16, kTailConsumers = kTailWarps * 32, kTailThreads = kTailConsumers + 32;
constexpr int kTailRows = 16, kTailK = 512, kTailHeld = 8;  // of a stage; stages of tokens that are held
constexpr int kTailPitch = kTailK * 2 + 64;                 // bytes; rows g and g + 1 then use different banks
constexpr int kTailStageBytes = kTailRows * kTailPitch;
constexpr int kTailPair = 2;  // tiles of down at a time

template <int kTiles>
struct TailShape {
  static constexpr int kSums = kTailPair * kTiles * 128;  // of a warp
  static constexpr int kSumBytes = kTailWarps * kSums * 4;
  static constexpr int kSquareBytes = kTailWarps * kTiles * 8 * 4;
  static constexpr int kFit = (226 * 1024 - kSumBytes - kSquareBytes - 256) / kTailStageBytes;
  static constexpr int kStages = kFit < 12 ? kFit : 12;
  static constexpr int kShared = kStages * kTailStageBytes + kSumBytes + kSquareBytes + 2 * kStages * 8;
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

__device__ __forceinline__ void load_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier,
                                           uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// The tiles of one product: block b has tiles b, b + grid, ..; row r of a tile is row (r / 8) * apart + r % 8 of it.
struct TailProduct {
  const char* w;
  int64_t row_bytes;
  int num_tiles, rows_per_tile;
  int64_t apart;  // rows between a tile's first and second 8
  int num_k;      // stages along K
};

template <class T, int kTiles>
__global__ void __launch_bounds__(kTailThreads, 1)
    layer_tail_kernel(const __grid_constant__ LamellaLayerTail p, unsigned long long* met, T* inner) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = TailShape<kTiles>;
  constexpr int kStages = Shape::kStages;
  extern __shared__ __align__(128) char shared[];
  float* sums = reinterpret_cast<float*>(shared + kStages * kTailStageBytes);
  float* squares = sums + Shape::kSumBytes / 4;
  uint64_t* full = reinterpret_cast<uint64_t*>(squares + Shape::kSquareBytes / 4);
  uint64_t* empty = full + kStages;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, kTailWarps);
    }
    barrier_init_done();
  }
  __syncthreads();

  const int hidden_tiles = static_cast<int>(p.h / kTailRows);
  const auto weights = [&](const void* w, int64_t width, int tiles, int rows, int64_t apart) {
    return TailProduct{static_cast<const char*>(w), width * 2, tiles, rows, apart, static_cast<int>(width / kTailK)};
  };
  const TailProduct o = weights(p.w_o, p.a, hidden_tiles, 16, 8);
  const TailProduct gate_up = weights(p.w_gate_up, p.h, static_cast<int>(p.i / 8), 8, p.i);
  const TailProduct down = weights(p.w_down, p.i, hidden_tiles, 16, 8);
  const TailProduct qkv = weights(p.w_qkv, p.h, p.w_qkv != nullptr ? static_cast<int>(p.q / kTailRows) : 0, 16, 8);
  int stage = 0;
  uint32_t parity = 0;
  const auto next_stage = [&] {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  };

  if (warp == kTailWarps) {
    const uint64_t once = evict_first_policy();
    const auto load = [&](const TailProduct& w, int pair) {
      for (int first = blockIdx.x; first < w.num_tiles; first += pair * gridDim.x) {
        const int count = pair == 1 || first + static_cast<int>(gridDim.x) >= w.num_tiles ? 1 : pair;
        const char* from = w.w + (int64_t{first} * w.rows_per_tile + (lane % 16 / 8) * w.apart + lane % 8) * w.row_bytes;
        const int64_t ahead = int64_t{gridDim.x} * w.rows_per_tile * w.row_bytes;
        for (int k = 0; k < w.num_k; ++k) {
          for (int t = 0; t < count; ++t) {
            barrier_wait(empty + stage, parity ^ 1);
            if (lane == 0) barrier_expect(full + stage, kTailRows * kTailK * 2);
            __syncwarp();
            if (lane < kTailRows)
              load_bytes(shared_address(shared + stage * kTailStageBytes + lane * kTailPitch), from + t * ahead,
                         kTailK * 2, shared_address(full + stage), once);
            next_stage();
          }
          from += kTailK * 2;
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
      for (int64_t at = blockIdx.x * 32 + lane; at < pieces; at += gridDim.x * 32) prefetch_l2(from + at * kPiece, kPiece);
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
    sync_some(1, kTailConsumers);
    if (threadIdx.x == 0) {
      before += blocks;
      __threadfence();
      asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(met) : "memory");
      unsigned long long seen;
      do {
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(met) : "memory");
      } while (seen < before);
    }
    sync_some(1, kTailConsumers);
  };

  uint4 tokens[kTailHeld][kTiles];
  const auto read_tokens = [&](uint4 (&to)[kTiles], const T* from, int64_t stride, int k) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int token = n * 8 + g;
      to[n] = token < p.m ? load_shared_by_blocks(from + token * stride + k * kTailK + warp * 32 + kq * 8)
                          : uint4{0, 0, 0, 0};
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
      for (int n = 0; n < kTiles; ++n) {
        const Vec<T> x = *reinterpret_cast<const Vec<T>*>(&tokens[k][n]);
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
    sync_some(1, kTailConsumers);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float total = 0.f;
#pragma unroll
      for (int w = 0; w < kTailWarps; ++w) total += squares[w * kTiles * 8 + n * 8 + g];
      inverse[n] = rsqrtf(total / static_cast<float>(p.h) + p.eps);
    }
#pragma unroll
    for (int k = 0; k < kTailHeld; ++k) {
      if (k >= num_k) continue;
      const Vec<T> gain = load_vec(static_cast<const T*>(weight) + k * kTailK + warp * 32 + kq * 8);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        Vec<T> x = *reinterpret_cast<const Vec<T>*>(&tokens[k][n]);
#pragma unroll
        for (int j = 0; j < 8; ++j)
          x.at[j] = from_float<T>(to_float(from_float<T>(to_float(x.at[j]) * inverse[n])) * to_float(gain.at[j]));
        tokens[k][n] = *reinterpret_cast<const uint4*>(&x);
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
            const char* at = shared + stage * kTailStageBytes + g * kTailPitch + warp * 64 + kq * 16;
            const uint4 low = *reinterpret_cast<const uint4*>(at);
            const uint4 high = *reinterpret_cast<const uint4*>(at + 8 * kTailPitch);
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + stage);
            next_stage();
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
              mma_16x8x16<T>(c[t][n], low.x, high.x, low.y, high.y, tokens[j][n].x, tokens[j][n].y);
              mma_16x8x16<T>(c[t][n], low.z, high.z, low.w, high.w, tokens[j][n].z, tokens[j][n].w);
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
      sync_some(1, kTailConsumers);
      // one thread per token and pair of rows g, g + 8
      const int which = threadIdx.x / 64, t = which / kTiles, n = which % kTiles;
      const int token = n * 8 + kq * 2 + threadIdx.x % 64 / 32;
      if (t < count && token < p.m) {
        const float* from = sums + (which * 4 + threadIdx.x % 64 / 32) * 32 + lane;
        float low = 0.f, high = 0.f;
#pragma unroll
        for (int i = 0; i < kTailWarps; ++i) {
          low += from[i * Shape::kSums];
          high += from[i * Shape::kSums + 64];
        }
        write(first + t * static_cast<int>(gridDim.x), low, high, token);
      }
      sync_some(1, kTailConsumers);  // the sums may be written over
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

template <class T>
int layer_tail(const LamellaLayerTail& p, void* workspace, int64_t zeroed, void* stream) {
  auto* met = static_cast<unsigned long long*>(workspace);
  T* inner = reinterpret_cast<T*>(static_cast<char*>(workspace) + zeroed);
  Launch how{dim3(static_cast<unsigned>(device_facts().num_sms)), dim3(kTailThreads), 0,
             static_cast<cudaStream_t>(stream)};
  if (p.m <= 8) {
    how.shared = TailShape<1>::kShared;
    return launch(layer_tail_kernel<T, 1>, how, p, met, inner);
  }
  how.shared = TailShape<2>::kShared;
  return launch(layer_tail_kernel<T, 2>, how, p, met, inner);
}

}  // namespace lamella
