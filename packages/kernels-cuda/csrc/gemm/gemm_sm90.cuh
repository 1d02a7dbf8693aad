// Hopper: weights stream through shared memory, every multiprocessor gets the same number of bytes.
//
// The weights are the 64-row side of wgmma, the tokens its narrow side, so one token costs what its bytes cost. Work is
// cut along K as well as along tiles ("stream-K"): the units (tile, 128 bytes of K) lie in one line, block b takes
// [b U / G, (b + 1) U / G).
//
//   tile          |      0      |      1      |      2      |
//   blocks     [  0  ) [   1   ) [   2  ) [   3   ) ...
//
// A block that enters a tile in its middle leaves its sums in the workspace and raises its flag; the block that has the
// tile's beginning is its owner, comes to it last, and adds the others' sums in their order: the result does not depend
// on timing. All blocks are resident at once (one per multiprocessor), so waiting ends.
//
// One thread of the third warpgroup loads (tensor memory accelerator, kStages in flight), two warpgroups multiply 64 rows
// each and have the registers. Weights of the first stages are asked for before the preceding kernel has ended.
#pragma once

#include "device/launch.cuh"
#include "device/reduce.cuh"
#include "device/wgmma.cuh"
#include "gemm/epilogue.cuh"

namespace lamella {

struct GemmPlan {
  CUtensorMap w, x;
  float* partials;   // [blocks][accumulators][256]
  unsigned* flags;   // [blocks]
  int num_k, num_n, num_m;  // units along K, tiles along N, tiles along M
};

template <class T, int kTokens, bool kScaled>
struct GemmShape {
  // For few tokens two blocks fit a multiprocessor: the next kernel's first weights arrive while this one ends.
  static constexpr bool kShares = kTokens <= 64 && !(kScaled && kTokens > 32);
  static constexpr int kConsumers = 256, kThreads = kConsumers + (kShares ? 32 : 128);
  static constexpr int kRoom = (kShares ? 110 : 224) * 1024;
  static constexpr int kWeightBytes = kGemmRows * 128, kTokenBytes = kTokens * 128;
  static constexpr int kStageBytes = kWeightBytes + kTokenBytes;
  static constexpr int kSlice = kTokens < 32 ? kTokens : 32;  // tokens finished at a time
  static constexpr int kPitch = kGemmRows + 4;
  static constexpr int kSliceBytes = kSlice * kPitch * 4;
  static constexpr int kFit = (kRoom - kSliceBytes - kTokens * 4) / kStageBytes;
  static constexpr int kStages = kFit < 12 ? kFit : 12;
  static constexpr int kShared = kStages * kStageBytes + kSliceBytes + kTokens * 4 + 1024 + 256;
  static constexpr int kSums = kTokens / 2;  // accumulators of a thread
};

template <class T, class O, int kTokens, bool kScaled>
__global__ void __launch_bounds__(GemmShape<T, kTokens, kScaled>::kThreads, GemmShape<T, kTokens, kScaled>::kShares ? 2 : 1)
    gemm_sm90_kernel(const __grid_constant__ GemmPlan plan, const __grid_constant__ LamellaGemm g) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = GemmShape<T, kTokens, kScaled>;
  constexpr int kStages = Shape::kStages, kSums = Shape::kSums;
  extern __shared__ char raw[];
  char* stages = raw + (1024 - shared_address(raw) % 1024) % 1024;
  float* slice = reinterpret_cast<float*>(stages + kStages * Shape::kStageBytes);
  float* factors = slice + Shape::kSliceBytes / 4;  // [kTokens]
  uint64_t* full = reinterpret_cast<uint64_t*>(factors + kTokens);
  uint64_t* empty = full + kStages;
  const int warp = threadIdx.x / 32;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, 2);
    }
    barrier_init_done();
  }
  __syncthreads();
  // all blocks are resident at once: the next kernel may take what room is left and ask for its weights
  launch_successor();

  const int64_t num_units = int64_t{plan.num_k} * plan.num_n * plan.num_m;
  const int64_t first = num_units * blockIdx.x / gridDim.x, end = num_units * (blockIdx.x + 1) / gridDim.x;

  if (warp >= 8) {
    if constexpr (!Shape::kShares) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x != Shape::kConsumers) return;
    prefetch_map(&plan.w);
    prefetch_map(&plan.x);
    const uint64_t once = evict_first_policy(), often = evict_last_policy();
    constexpr int kWidth = 128 / sizeof(T);
    // places are counted on, never divided out: this one thread's instructions are what the loads wait for
    struct Walk {
      int k, n, m;
      __device__ void step(const GemmPlan& plan) {
        if (++k == plan.num_k) {
          k = 0;
          if (++n == plan.num_n) {
            n = 0;
            ++m;
          }
        }
      }
    };
    const int64_t tile = first / plan.num_k;
    Walk at{static_cast<int>(first % plan.num_k), static_cast<int>(tile % plan.num_n),
            static_cast<int>(tile / plan.num_n)};
    Walk behind = at;
    const auto weights = [&](int stage) {
      barrier_expect(full + stage, Shape::kStageBytes);
      load_box(stages + stage * Shape::kStageBytes, &plan.w, full + stage, at.k * kWidth, at.n * kGemmRows, once);
      at.step(plan);
    };
    const auto tokens = [&](int stage) {
      load_box(stages + stage * Shape::kStageBytes + Shape::kWeightBytes, &plan.x, full + stage, behind.k * kWidth,
               behind.m * kTokens, often);
      behind.step(plan);
    };
    const int count = static_cast<int>(end - first), early = count < kStages ? count : kStages;
    // weights are nobody's output: do not wait for the kernel before to ask for them
    for (int i = 0; i < early; ++i) weights(i);
    wait_predecessor();
    for (int i = 0; i < early; ++i) tokens(i);
    int stage = 0;
    uint32_t parity = 0;
    for (int i = early; i < count; ++i) {
      barrier_wait(empty + stage, parity);
      weights(stage);
      tokens(stage);
      if (++stage == kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
    if (g.prefetch != nullptr) {
      constexpr int64_t kPiece = 16384;
      const char* from = static_cast<const char*>(g.prefetch);
      for (int64_t at = blockIdx.x * kPiece; at < g.prefetch_bytes; at += gridDim.x * kPiece) {
        const int64_t left = g.prefetch_bytes - at;
        prefetch_l2(from + at, static_cast<uint32_t>(left < kPiece ? left / 16 * 16 : kPiece));
      }
    }
    return;
  }

  if constexpr (!Shape::kShares) asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  wait_predecessor();
  const int group = warp / 4, lane = threadIdx.x % 32;
  int stage = 0;
  uint32_t parity = 0;
  int64_t factors_of = -1;
  for (int64_t unit = first; unit < end;) {
    const int64_t tile = unit / plan.num_k, tile_first = tile * plan.num_k, tile_end = tile_first + plan.num_k;
    const int64_t segment_end = end < tile_end ? end : tile_end;
    const int64_t row0 = tile % plan.num_n * kGemmRows, token0 = tile / plan.num_n * kTokens;
    const bool owner = unit == tile_first;

    if (owner && token0 != factors_of) {
      sync_some(1, 256);
      if (threadIdx.x < kTokens && token0 + threadIdx.x < g.m) factors[threadIdx.x] = norm_factor(g, token0 + threadIdx.x);
      factors_of = token0;  // visible behind the barriers before the sums are stored
    }

    float sums[kSums];
    if constexpr (!kScaled) {
      bool accumulate = false;
      int before = -1;
      for (; unit < segment_end; ++unit) {
        barrier_wait(full + stage, parity);
        const uint64_t a = wgmma_tile(stages + stage * Shape::kStageBytes + group * 8192);
        const uint64_t b = wgmma_tile(stages + stage * Shape::kStageBytes + Shape::kWeightBytes);
        wgmma_hold(sums);
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          Wgmma<T, kTokens>::run(sums, a + 2 * k, b + 2 * k, accumulate);
          accumulate = true;
        }
        wgmma_commit();
        wgmma_wait<1>();  // the stage before this one has been read
        if (before >= 0 && threadIdx.x % 128 == 0) barrier_arrive(empty + before);
        before = stage;
        if (++stage == kStages) {
          stage = 0;
          parity ^= 1;
        }
      }
      wgmma_wait<0>();
      wgmma_hold(sums);
      if (before >= 0 && threadIdx.x % 128 == 0) barrier_arrive(empty + before);
    } else {
      // e4m3 products are summed in 14 bits by the tensor cores: 128 of K at a time, then in float32, with the scales
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] = 0.f;
      for (; unit < segment_end; ++unit) {
        barrier_wait(full + stage, parity);
        const uint64_t a = wgmma_tile(stages + stage * Shape::kStageBytes + group * 8192);
        const uint64_t b = wgmma_tile(stages + stage * Shape::kStageBytes + Shape::kWeightBytes);
        float part[kSums];
        wgmma_hold(part);
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < 4; ++k) Wgmma<T, kTokens>::run(part, a + 2 * k, b + 2 * k, k > 0);
        wgmma_commit();
        float weight_scale = 1.f;
        const int64_t num_blocks = plan.num_k, block = unit - tile_first;
        if (g.scale_block != 0) weight_scale = __ldg(g.w_scale + row0 / 128 * num_blocks + block);
        float token_scale[kTokens / 4];
#pragma unroll
        for (int j = 0; j < kTokens / 8; ++j) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int64_t token = token0 + 8 * j + 2 * (lane % 4) + c;
            token_scale[2 * j + c] =
                g.scale_block != 0 && token < g.m ? __ldg(g.x_scale + token * num_blocks + block) * weight_scale : 1.f;
          }
        }
        wgmma_wait<0>();
        wgmma_hold(part);
        if (threadIdx.x % 128 == 0) barrier_arrive(empty + stage);
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[i] += part[i] * token_scale[i / 4 * 2 + i % 2];
        if (++stage == kStages) {
          stage = 0;
          parity ^= 1;
        }
      }
    }

    float* mine = plan.partials + int64_t{blockIdx.x} * kSums * 256 + threadIdx.x;
    if (!owner) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) mine[i * 256] = sums[i];
      __threadfence();
      sync_some(1, 256);
      if (threadIdx.x == 0) asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(plan.flags + blockIdx.x) : "memory");
      continue;
    }
    if (segment_end < tile_end) {
      // the last block with a part of this tile: the one whose range holds its last unit
      int64_t last = blockIdx.x + 1;
      while (num_units * (last + 1) / gridDim.x < tile_end) ++last;
      const int num_others = static_cast<int>(last - blockIdx.x);
      if (threadIdx.x < num_others) {
        unsigned raised = 0;
        while (raised == 0)
          asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                       : "=r"(raised)
                       : "l"(plan.flags + blockIdx.x + 1 + threadIdx.x)
                       : "memory");
      }
      sync_some(1, 256);
      const float* theirs = plan.partials + int64_t{blockIdx.x + 1} * kSums * 256 + threadIdx.x;
      constexpr int kBatch = kSums >= 32 ? 1 : 32 / kSums;
      for (int from = 0; from < num_others; from += kBatch) {
        float part[kBatch][kSums];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
#pragma unroll
          for (int i = 0; i < kSums; ++i)
            part[b][i] = from + b < num_others ? __ldcg(theirs + (int64_t{from + b} * kSums + i) * 256) : 0.f;
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
#pragma unroll
          for (int i = 0; i < kSums; ++i) sums[i] += part[b][i];
        }
      }
      sync_some(1, 256);
      if (threadIdx.x < num_others) plan.flags[blockIdx.x + 1 + threadIdx.x] = 0;
    }

    // registers -> [token][row] in shared memory -> eight rows of one token per thread
    const bool paired = g.act != kActNone;
    const int64_t num_out = g.n;
#pragma unroll
    for (int token_s = 0; token_s < kTokens; token_s += Shape::kSlice) {
      if (token0 + token_s >= g.m) break;
      sync_some(1, 256);
#pragma unroll
      for (int j = 0; j < Shape::kSlice / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = group * 64 + warp % 4 * 16 + lane / 4 + 8 * (i / 2), token = 8 * j + 2 * (lane % 4) + i % 2;
          slice[token * Shape::kPitch + row] = sums[(token_s / 8 + j) * 4 + i];
        }
      }
      sync_some(1, 256);
      const int per_token = paired ? 8 : 16;
      for (int item = threadIdx.x; item < Shape::kSlice * 16; item += 256) {
        const int token = item / per_token, piece = item % per_token;
        if (token >= Shape::kSlice) break;
        const int64_t m = token0 + token_s + token;
        const int64_t n = (paired ? row0 / 2 : row0) + piece * 8;
        float squares = 0.f;
        if (m < g.m && n < num_out) {
          const float factor = factors[token_s + token];
          float values[8], ups[8];
          const float* from = slice + token * Shape::kPitch + piece * 8;
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            values[j] = from[j];
            ups[j] = paired ? from[j + 64] : 0.f;
          }
          if (kScaled && g.scale_block == 0) {
            const float token_scale = g.x_scale[m];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
              values[j] *= token_scale * g.w_scale[row0 + piece * 8 + j];
              if (paired) ups[j] *= token_scale * g.w_scale[row0 + piece * 8 + j + 64];
            }
          }
          squares = finish_eight<O>(g, m, n, values, ups, factor);
        }
        if (g.squares_out != nullptr && !paired) {
          // the 16 pieces of a token are neighbours in a half warp
#pragma unroll
          for (int offset = 8; offset > 0; offset >>= 1) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
          if (piece == 0 && m < g.m) g.squares_out[row0 / kGemmRows * g.m + m] = squares;
        }
      }
    }
  }
#endif
}

}  // namespace lamella
