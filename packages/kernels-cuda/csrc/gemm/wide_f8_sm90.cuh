// e4m3 products of many rows on Hopper: tokens are wgmma's 64-row side, sums are promoted to float32 every 128 of K.
//
// A tile is kRows tokens x 128 weight rows; a pair of thread blocks takes two tiles of the same tokens, side by side.
// Each asks for its weights and for half of the tokens, which are delivered to both: L2 could not give every
// multiprocessor its whole tile at the rate of the tensor cores.
//
//   warps 0 .. 7   consumers: two warpgroups, each kSets sets of 64 tokens x 128 weight rows
//   warp 8         loads tokens and weights (tensor memory accelerator)
//   warps 9, 10    bring the block scales, x_scale * w_scale, for 8 units of 128 of K at a time
//
// The tensor cores sum e4m3 products in 14 bits. So a unit of one set has sums of its own (four wgmma), which are then
// added to the set's in float32, times the scale of the token. A warpgroup cannot multiply while it adds: the other one
// does, half a turn behind. Two sets of 64 tokens per warpgroup ask for less from L2 and shared memory per product, one
// set makes more tiles; the launch chooses.
#pragma once

#include "device/launch.cuh"
#include "device/wgmma.cuh"
#include "device/cluster.cuh"
#include "device/ring.cuh"
#include "gemm/gemm.h"

namespace lamella {

constexpr int kWideF8Columns = 128;  // of a tile
constexpr int kWideF8Band = 8;       // tiles along M that are worked on together, so that L2 serves what they share

template <int kSets>
struct WideF8Shape {
  static constexpr int kConsumers = 256, kThreads = kConsumers + 128;
  static constexpr int kRows = 128 * kSets;
  static constexpr int kTokenBytes = kRows * 128, kWeightBytes = kWideF8Columns * 128;
  static constexpr int kStageBytes = kTokenBytes + kWeightBytes, kStages = 196608 / kStageBytes;
  static constexpr int kUnits = 8;           // units whose scales come together: 32 bytes of a row of x_scale
  static constexpr int kPitch = kRows + 4;   // floats; the scales of a token's units lie in different banks
  static constexpr int kScaleBytes = kUnits * kPitch * 4, kScaleBuffers = 2;
  static constexpr int kSliceBytes = 16 * 128;  // what a warp stores at a time: 16 tokens x 64 columns
  static constexpr int kShared = 1024 + kStages * kStageBytes + 8 * kSliceBytes + kScaleBuffers * kScaleBytes + 256;
  static_assert(kShared <= 227 * 1024, "more than a thread block may have");
};

struct WideF8Plan {
  CUtensorMap x, w;
  int num_m, num_n, num_k;  // tiles along M, pairs of tiles along N, units along K
};

// Where a tile starts, for the thread block of this rank.
template <int kSets>
struct WideF8Tile {
  int row, column;

  __device__ __forceinline__ WideF8Tile(int tile, const WideF8Plan& plan, uint32_t rank) {
    const int band = tile / (kWideF8Band * plan.num_n), first = band * kWideF8Band;
    const int rest = tile - first * plan.num_n, height = min(kWideF8Band, plan.num_m - first);
    row = (first + rest % height) * WideF8Shape<kSets>::kRows;
    column = (rest / height * 2 + static_cast<int>(rank)) * kWideF8Columns;
  }
};

__device__ __forceinline__ void store_matrices(uint32_t to, const uint32_t (&d)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(d[0]), "r"(d[1]),
               "r"(d[2]), "r"(d[3])
               : "memory");
}

// One unit of one set: 64 tokens x 128 weight rows x 128 of K, from zero. Ends when the sums are there.
template <class Meanwhile>
__device__ __forceinline__ void wide_f8_multiply(float (&part)[64], uint64_t a, uint64_t b,
                                                 const Meanwhile& meanwhile) {
  wgmma_hold(part);
  wgmma_begin();
#pragma unroll
  for (int k = 0; k < 4; ++k) Wgmma<f8, kWideF8Columns>::run(part, a + 2 * k, b + 2 * k, k > 0);
  wgmma_commit();
  meanwhile();
  wgmma_wait<0>();
  wgmma_hold(part);
}

// registers -> 16 tokens x 64 columns of this warp in shared memory -> 16 bytes of one token per thread. sums: as wgmma
// leaves them, of 16 tokens from row on per warp.
template <bool kBlocks>
__device__ __forceinline__ void wide_f8_store(const float (&sums)[64], char* slice, int64_t row, int64_t column,
                                              const LamellaGemm& g) {
  const int lane = threadIdx.x % 32;
  const uint32_t corner = shared_address(slice) + lane % 16 * 128;
  const bf16* bias = static_cast<const bf16*>(g.bias);
  float row_scale[2] = {1.f, 1.f};
  if constexpr (!kBlocks) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t m = row + lane / 4 + 8 * h;
      if (m < g.m) row_scale[h] = __ldcg(g.x_scale + m);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (column + 64 * half >= g.n) break;
    __syncwarp();  // what was there has been read
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int group = 8 * half + j + i;  // of eight columns
        const int64_t n = column + 8 * group + 2 * (lane % 4);
        float2 more = {0.f, 0.f}, scale = {1.f, 1.f};
        if (bias != nullptr && n < g.n) more = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(bias + n));
        if (!kBlocks && n < g.n) scale = {__ldg(g.w_scale + n), __ldg(g.w_scale + n + 1)};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float low = sums[4 * group + 2 * h], high = sums[4 * group + 2 * h + 1];
          if constexpr (!kBlocks) {
            low *= row_scale[h] * scale.x;
            high *= row_scale[h] * scale.y;
          }
          const __nv_bfloat162 two = __floats2bfloat162_rn(low + more.x, high + more.y);
          packed[2 * i + h] = *reinterpret_cast<const uint32_t*>(&two);
        }
      }
      // lane l names token l % 16 of columns 8 (j + l / 16); chunks of 16 bytes are turned by the token, for the banks
      store_matrices(corner + (((j + lane / 16) ^ (lane % 8)) << 4), packed);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 4 * i + lane / 8;
      const int64_t m = row + token, n = column + 64 * half + lane % 8 * 8;
      const uint4 values = *reinterpret_cast<const uint4*>(slice + token * 128 + ((lane ^ token) % 8 << 4));
      if (m < g.m && n < g.n)
        *reinterpret_cast<uint4*>(static_cast<bf16*>(g.out) + m * g.out_stride + n) = values;
    }
  }
}

template <int kSets, bool kBlocks>
__global__ void __launch_bounds__(WideF8Shape<kSets>::kThreads, 1)
    wide_f8_kernel(const __grid_constant__ WideF8Plan plan, const __grid_constant__ LamellaGemm g) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = WideF8Shape<kSets>;
  using Tile = WideF8Tile<kSets>;
  constexpr int kStages = Shape::kStages;
  extern __shared__ char raw[];
  char* stages = raw + (1024 - shared_address(raw) % 1024) % 1024;
  char* slices = stages + kStages * Shape::kStageBytes;
  float* scales = reinterpret_cast<float*>(slices + 8 * Shape::kSliceBytes);
  uint64_t* full = reinterpret_cast<uint64_t*>(scales + Shape::kScaleBuffers * Shape::kScaleBytes / 4);
  uint64_t* empty = full + kStages;
  uint64_t* scales_full = empty + kStages;
  uint64_t* scales_empty = scales_full + Shape::kScaleBuffers;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t rank = pair::rank();

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, 16);  // the consumers' warps of both thread blocks
    }
    for (int i = 0; i < Shape::kScaleBuffers; ++i) {
      barrier_init(scales_full + i, 2);
      barrier_init(scales_empty + i, 8);
    }
    barrier_init_done();
  }
  pair::sync();
  launch_successor();
  const int num_tiles = plan.num_m * plan.num_n;
  const int first_tile = static_cast<int>(blockIdx.x / 2), step = static_cast<int>(gridDim.x / 2);

  if (warp >= 8) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (warp == 8 && lane == 0) {
      prefetch_map(&plan.w);
      prefetch_map(&plan.x);
      const uint64_t policy = pair::normal_policy();
      const auto weights = [&](int stage, const Tile& t, int k) {
        barrier_expect(full + stage, Shape::kStageBytes);
        load_box(stages + stage * Shape::kStageBytes + Shape::kTokenBytes, &plan.w, full + stage, k * 128, t.column,
                 policy);
      };
      const auto tokens = [&](int stage, const Tile& t, int k) {
        const int half = static_cast<int>(rank);
        pair::load_box(stages + stage * Shape::kStageBytes + half * Shape::kTokenBytes / 2, &plan.x, full + stage,
                       k * 128, t.row + half * Shape::kRows / 2, policy);
      };
      // weights are nobody's output: do not wait for the kernel before to ask for them
      const int early = min(plan.num_k, kStages);
      {
        const Tile t(first_tile, plan, rank);
        for (int k = 0; k < early; ++k) weights(k, t, k);
      }
      wait_predecessor();
      Ring<kStages> ring(1);
      int left = early;
      for (int tile = first_tile; tile < num_tiles; tile += step) {
        const Tile t(tile, plan, rank);
        for (int k = 0; k < plan.num_k; ++k) {
          if (left > 0) {
            --left;
          } else {
            barrier_wait(empty + ring.stage, ring.parity);
            weights(ring.stage, t, k);
          }
          tokens(ring.stage, t, k);
          ring.advance();
        }
      }
    } else if (kBlocks && (warp == 9 || warp == 10)) {
      // eight lanes have the units of a token, which lie side by side; a warp has four tokens at once
      constexpr int kBatch = 16;
      const int unit = lane % 8, token = (warp - 9) * 4 + lane / 8;
      const int64_t row_step = int64_t{8} * plan.num_k;
      const int last_row = static_cast<int>((g.n + 127) / 128) - 1;
      Ring<Shape::kScaleBuffers> ring(1);
      wait_predecessor();
      for (int tile = first_tile; tile < num_tiles; tile += step) {
        const Tile t(tile, plan, rank);
        // the second tile of a pair may lie behind the last weight: any scale will do, nothing is stored
        const float* w_scale = g.w_scale + int64_t{min(t.column / 128, last_row)} * plan.num_k + unit;
        const float* x_scale = g.x_scale + int64_t{t.row + token} * plan.num_k + unit;
        for (int k = 0; k < plan.num_k; k += Shape::kUnits) {
          const bool have = k + unit < plan.num_k;
          const float weight = have ? __ldg(w_scale + k) : 0.f;
          const int rows = have ? static_cast<int>(min(g.m - t.row - token, int64_t{Shape::kRows})) : 0;
          const float* from = x_scale + k;
          float* to = scales + ring.stage * (Shape::kScaleBytes / 4) + unit * Shape::kPitch + token;
          barrier_wait(scales_empty + ring.stage, ring.parity);
#pragma unroll 1
          for (int r = 0; r < Shape::kRows; r += 8 * kBatch) {
            float values[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
              values[i] = r + 8 * i < rows ? __ldcg(from) : 0.f;
              from += row_step;
              asm volatile("" : "+l"(from));  // one pointer: there is no room for one per load
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) to[r + 8 * i] = values[i] * weight;
          }
          __syncwarp();
          if (lane == 0) barrier_arrive(scales_full + ring.stage);
          ring.advance();
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    wait_predecessor();
    // by a shuffle: the compiler sees that a warp agrees on it, and keeps descriptors in uniform registers
    const int group = __shfl_sync(0xffffffffu, warp / 4, 0);
    const uint32_t other_empty = pair::address_in(rank ^ 1, empty);
    const int first_token = group * 64 * kSets + warp % 4 * 16;  // of this warp's first set, in the tile
    char* slice = slices + warp * Shape::kSliceBytes;
    Ring<kStages> ring(0);
    Ring<Shape::kScaleBuffers> scale_ring(0);
    // The second warpgroup starts when the first has its first sums: from then on one multiplies while the other adds.
    bool leads = group == 0;
    if (!leads) sync_some(1, 256);
    for (int tile = first_tile; tile < num_tiles; tile += step) {
      const Tile t(tile, plan, rank);
      float sums[kSets][64];
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
#pragma unroll
        for (int i = 0; i < 64; ++i) sums[set][i] = 0.f;
      }
#pragma unroll 1
      for (int k = 0; k < plan.num_k; ++k) {
        if (kBlocks && k % Shape::kUnits == 0) barrier_wait(scales_full + scale_ring.stage, scale_ring.parity);
        const float* scale = scales + scale_ring.stage * (Shape::kScaleBytes / 4) + k % Shape::kUnits * Shape::kPitch +
                             first_token + lane / 4;
        barrier_wait(full + ring.stage, ring.parity);
        const char* here = stages + ring.stage * Shape::kStageBytes;
        const uint64_t a = wgmma_tile(here + group * kSets * 8192), b = wgmma_tile(here + Shape::kTokenBytes);
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
          float part[64], factor[2] = {1.f, 1.f};
          wide_f8_multiply(part, a + 512 * set, b, [&] {
            if constexpr (kBlocks) {
              factor[0] = scale[64 * set];
              factor[1] = scale[64 * set + 8];
            }
          });
          if (set == kSets - 1 && lane == 0) {
            barrier_arrive(empty + ring.stage);
            pair::arrive(other_empty + ring.stage * 8);
          }
          if (leads) {
            asm volatile("bar.arrive 1, 256;" ::: "memory");
            leads = false;
          }
#pragma unroll
          for (int i = 0; i < 64; ++i) {
            if constexpr (kBlocks) sums[set][i] += part[i] * factor[i / 2 % 2];
            else sums[set][i] += part[i];
          }
        }
        ring.advance();
        if (kBlocks && (k % Shape::kUnits == Shape::kUnits - 1 || k == plan.num_k - 1)) {
          __syncwarp();  // all lanes have read
          if (lane == 0) barrier_arrive(scales_empty + scale_ring.stage);
          scale_ring.advance();
        }
      }
#pragma unroll
      for (int set = 0; set < kSets; ++set)
        wide_f8_store<kBlocks>(sums[set], slice, t.row + first_token + 64 * set, t.column, g);
    }
  }
  // the other one may still deliver to this one, or arrive at its barriers
  pair::sync();
#endif
}

}  // namespace lamella
