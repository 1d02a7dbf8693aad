// Grouped products on Hopper: weights are the 64-row side of wgmma, the tokens of a block its narrow side.
//
//   warps 0 ..    consumers: kGroups warpgroups, each two sets of 64 weight rows (see gemm.cuh)
//   next warp     loads weights (tensor memory accelerator) and, in the second product, the block's rows of h
//   two warps     first product: gather the tokens' rows of x with cp.async
//   last warp     completes the warpgroup of those who load, which gives registers to the consumers
//
// Units of 128 bytes of K pass through kStages buffers. Work of few tokens (kWhole false) lies in one line of units
// (block, tile, K); thread block b takes the b-th equal part, so that all end together however many experts were hit:
//
//   tile          |      0      |      1      |      2      |
//   blocks     [  0  ) [   1   ) [   2  ) [   3   ) ...
//
// Who enters a tile in its middle leaves its sums in the workspace and raises its flag; who has the tile's beginning
// comes to it last and adds them in their order. With many tokens per expert (kWhole) tiles are dealt out in turn, so
// that what runs at one time shares weights and tokens in L2.
#pragma once

#include "moe/tile_sm90.cuh"
#include "moe/wgmma_widths.cuh"

namespace lamella {

struct MoeMaps {
  CUtensorMap w, h;
};

template <class T, class O, int kTokens, int kGroups, bool kWhole, bool kFirst>
__global__ void __launch_bounds__(MoeShape<T, kTokens, kGroups, kFirst>::kThreads, 1)
    moe_sm90_kernel(const __grid_constant__ MoeMaps maps, const __grid_constant__ MoeGemm g) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = MoeShape<T, kTokens, kGroups, kFirst>;
  constexpr bool kScaled = sizeof(T) == 1;
  constexpr int kStages = Shape::kStages, kWidth = 128 / sizeof(T);
  extern __shared__ char raw[];
  __shared__ DirectBlocks direct;
  char* stages = raw + (1024 - shared_address(raw) % 1024) % 1024;
  char* slices = stages + kStages * Shape::kStageBytes;
  uint64_t* full = reinterpret_cast<uint64_t*>(slices + kGroups * Shape::kSliceBytes);
  uint64_t* empty = full + kStages;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kLoader = 4 * kGroups;
  const bool aligned = g.blocks.num_rows != nullptr;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + i, kFirst ? 3 : 1);
      barrier_init(empty + i, 4 * kGroups);
    }
    barrier_init_done();
  }
  // The list of blocks: the first product's predecessor makes it. The second product is started by the first one's
  // launch_successor(), which comes after its wait: the list is complete by then, and weights may be asked for at once.
  // It is read past L1, which may hold what lay there before.
  if (kFirst) wait_predecessor();
  if constexpr (kTokens == 8) {
    if (!aligned && g.blocks.route.logits != nullptr) {
      const bool write = kFirst && blockIdx.x == 0;
      if (warp < static_cast<int>(g.blocks.route.num_tokens)) {
        if (g.blocks.num_experts <= 128) route_direct<4>(direct, g.blocks, write);
        else route_direct<8>(direct, g.blocks, write);
      }
    } else if (!aligned && warp == 0) {
      list_direct(direct, g.blocks);
    }
  }
  __syncthreads();
  if (kFirst) launch_successor();
  const int num_blocks = aligned ? __ldcg(g.blocks.num_rows) / kTokens : direct.count;
  MoeWalk<kWhole> walk(num_blocks * g.num_tiles, g.num_k);
  int tile = 0, k = 0, k_end = 0;

  if (warp >= kLoader) {
    if (kGroups == 2) give_registers<72>();
    if (warp == kLoader) {
      if (lane == 0) {
        prefetch_map(&maps.w);
        const int rows_of_expert = static_cast<int>(g.rows);
        const uint64_t once = kWhole ? normal_policy() : evict_first_policy();
        const uint64_t often = kWhole ? normal_policy() : evict_last_policy();
        // first weight row of a tile; read once per tile
        const auto first_row = [&](int of) {
          const int block = of / g.num_tiles, part = of % g.num_tiles;
          const int expert = aligned ? __ldcg(g.blocks.block_experts + block) : direct.expert[block];
          return expert * rows_of_expert + part * kGroups * (kFirst ? 64 : 128);
        };
        const auto weights = [&](int stage, int row, int unit) {
          char* to = stages + stage * Shape::kStageBytes;
          barrier_expect(full + stage, Shape::kWeightBytes + (kFirst ? 0 : kTokens * 128));
#pragma unroll
          for (int set = 0; set < 2 * kGroups; ++set) {
            const int step = kFirst ? set / 2 * 64 + set % 2 * (rows_of_expert / 2) : set * 64;
            load_box(to + set * 8192, &maps.w, full + stage, unit * kWidth, row + step, once);
          }
        };
        const auto rows = [&](int stage, int block, int unit) {
          if (!kFirst)
            load_box(stages + stage * Shape::kStageBytes + Shape::kWeightBytes, &maps.h, full + stage, unit * kWidth,
                     block * kTokens, often);
        };
        Ring<kStages> ring(1);
        if (!kFirst) {
          // fill the buffers with weights while the first product ends, then add the rows that it wrote
          MoeWalk<kWhole> ahead = walk;
          int filled = 0;
          while (filled < kStages && ahead.next(tile, k, k_end)) {
            const int row = first_row(tile);
            for (; k < k_end && filled < kStages; ++k) weights(filled++, row, k);
          }
          wait_predecessor();
          launch_successor();
          asm volatile("fence.proxy.async;" ::: "memory");  // h was written by ordinary stores
        }
        int count = 0;
        while (walk.next(tile, k, k_end)) {
          const int block = tile / g.num_tiles, row = first_row(tile);
          for (; k < k_end; ++k, ++count) {
            if (kFirst || count >= kStages) {
              barrier_wait(empty + ring.stage, ring.parity);
              weights(ring.stage, row, k);
            }
            rows(ring.stage, block, k);
            ring.advance();
          }
        }
      }
    } else if (kFirst && warp < kLoader + 3) {
      // thread t has chunk t % 8 of rows t / 8, t / 8 + 8, ...
      constexpr uint32_t kNoRow = 0xffffffffu;
      constexpr int kRows = kTokens / 8, kLag = kStages < 6 ? kStages - 2 : 4;
      const int t = threadIdx.x - 32 * (kLoader + 1), chunk = t % 8;
      const uint32_t place = static_cast<uint32_t>(t / 8 * 128 + ((chunk ^ (t / 8)) << 4));
      constexpr int64_t kSize = sizeof(T);
      const int64_t row_bytes = g.x_stride * kSize, k_bytes = g.k * kSize;
      const char* x = static_cast<const char*>(g.x);
      Ring<kStages> ring(1);
      int ready = 0, pending = 0;
      // copies are made visible to the tensor cores by who made them, kLag units after they were started
      const auto raise = [&] {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) barrier_arrive(full + ready);
        if (++ready == kStages) ready = 0;
      };
      while (walk.next(tile, k, k_end)) {
        const int block = tile / g.num_tiles;
        const int size = aligned ? __ldcg(g.blocks.block_sizes + block) : 1;
        uint32_t rows[kRows];  // where they start, in steps of 16 bytes
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const int r = t / 8 + 8 * i;
          rows[i] = kNoRow;
          if (r >= size) continue;
          const int pair = aligned ? __ldcg(g.blocks.sorted_ids + block * kTokens + r) : direct.pair[block];
          rows[i] = pair / g.blocks.top_k * static_cast<uint32_t>(row_bytes / 16);
        }
        for (; k < k_end; ++k) {
          barrier_wait(empty + ring.stage, ring.parity);
          const uint32_t to = shared_address(stages + ring.stage * Shape::kStageBytes + Shape::kWeightBytes) + place;
          const int64_t at = int64_t{k} * 128 + chunk * 16;
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            const bool have = rows[i] != kNoRow && at < k_bytes;
            gather_chunk(to + i * 1024, have ? x + uint64_t{rows[i]} * 16 + at : x, have);
          }
          asm volatile("cp.async.commit_group;" ::: "memory");
          if (pending == kLag) {
            asm volatile("cp.async.wait_group %0;" ::"n"(kLag) : "memory");
            raise();
          } else {
            ++pending;
          }
          ring.advance();
        }
      }
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      for (; pending > 0; --pending) raise();
    }
  } else {
    if (kGroups == 2) take_registers<216>();
    if (!kFirst) wait_predecessor();
    const int group = warp / 4;
    char* slice = slices + group * Shape::kSliceBytes;
    Ring<kStages> ring(0);
    MoeTile t;
    while (walk.next(t.tile, t.k, t.k_end)) {
      t.block = t.tile / g.num_tiles;
      t.part = t.tile % g.num_tiles;
      t.size = aligned ? __ldcg(g.blocks.block_sizes + t.block) : 1;
      const auto work = [&](auto n) {
        constexpr int kN = decltype(n)::value;
        float gate[kN / 2], up[kN / 2];
        if constexpr (kScaled)
          moe_multiply_scaled<Shape, T, kN, kGroups, kFirst>(gate, up, stages, full, empty, ring, group, t, g, direct);
        else
          moe_multiply<Shape, T, kN>(gate, up, stages, full, empty, ring, group, t.k_end - t.k);
        if constexpr (!kWhole)
          if (!moe_gather_sums(gate, up, t, g, num_blocks * g.num_tiles * g.num_k)) return;
        moe_store<Shape, O, kTokens, kN, kGroups, kFirst>(gate, up, slice, group, t, g, direct);
      };
      work(std::integral_constant<int, kTokens>{});
    }
  }
#endif
}

// ---- host --------------------------------------------------------------------------------------------------------

template <class T, class O, int kTokens, int kGroups, bool kWhole, bool kFirst>
int launch_moe_sm90(const MoeGemm& product, int64_t places, void* stream) {
  using Shape = MoeShape<T, kTokens, kGroups, kFirst>;
  MoeGemm g = product;
  MoeMaps maps;
  constexpr int kSize = sizeof(T);
  constexpr CUtensorMapDataType kType = kSize == 1                  ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                        : std::is_same_v<T, bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                  : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const int64_t rows = g.rows * g.blocks.num_experts;
  if (rows > INT32_MAX || places > INT32_MAX) return kUnsupported;
  if (kFirst && (g.x_stride * kSize % 16 != 0 || g.blocks.num_ids * (g.x_stride * kSize / 16) >= UINT32_MAX))
    return kUnsupported;
  if (!map_rows(&maps.w, kType, kSize, g.w, rows, g.k, g.k * kSize, 64)) return kUnsupported;
  if (kFirst) maps.h = maps.w;
  else if (!map_rows(&maps.h, kType, kSize, g.x, places, g.k, g.k * kSize, kTokens)) return kUnsupported;
  const int columns = kGroups * (kFirst ? 64 : 128);
  g.num_tiles = (g.num_out + columns - 1) / columns;
  if (places / kTokens * g.num_tiles * g.num_k > INT32_MAX) return kUnsupported;
  const Launch how{dim3(static_cast<unsigned>(device_facts().num_sms)), dim3(Shape::kThreads), Shape::kShared,
                   static_cast<cudaStream_t>(stream)};
  return launch(moe_sm90_kernel<T, O, kTokens, kGroups, kWhole, kFirst>, how, maps, g);
}

// Those of moe_sm90_rows() but the widest.
template <class T, class O, bool kFirst>
int moe_sm90_by_rows(const MoeGemm& g, int block_rows, int64_t places, void* stream) {
  constexpr bool kFp8 = sizeof(T) == 1;
  switch (block_rows) {
    case 8:
      return launch_moe_sm90<T, O, 8, 1, false, kFirst>(g, places, stream);
    case 16:
      return launch_moe_sm90<T, O, 16, 1, false, kFirst>(g, places, stream);
    case 32:
      return launch_moe_sm90<T, O, 32, 1, false, kFirst>(g, places, stream);
    case 64:
      return launch_moe_sm90<T, O, 64, kFp8 ? 2 : 1, kFp8, kFirst>(g, places, stream);
    case 96:
      if constexpr (!kFp8) return launch_moe_sm90<T, O, 96, 1, false, kFirst>(g, places, stream);
      break;
    case 128:
      if constexpr (!kFp8) return launch_moe_sm90<T, O, 128, 1, false, kFirst>(g, places, stream);
      break;
  }
  return kUnsupported;
}

}  // namespace lamella
