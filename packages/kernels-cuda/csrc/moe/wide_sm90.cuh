// Grouped products on Hopper with many tokens per expert: two thread blocks of a cluster share the weights.
//
// A block of the list has up to kWideRows pairs of one expert. Both thread blocks of a cluster take it, half of its
// pairs each, with the same 256 weight rows: each asks for half of those and has them delivered to both ("multicast"),
// so L2 gives 32 KB of weights per unit of 128 bytes of K to two multiprocessors. What L2 can give is what bounds these
// products; a pair of thread blocks asks for a third less than two alone.
//
//   warps 0 .. 7   consumers: two warpgroups, each two sets of 64 weight rows (see gemm.cuh) x the tokens of its half
//   warp 8         loads weights (tensor memory accelerator) and, in the second product, rows of h
//   warps 9, 10    first product: gather the tokens' rows of x with cp.async
//   warp 11        completes the warpgroup of those who load, which gives registers to the consumers
//
// Tokens are the narrow side of wgmma, in some eight widths: an expert's last pairs cost little more than they are. The
// list cuts an expert's pairs into equal blocks for that reason.
#pragma once

#include <type_traits>

#include "device/cluster.cuh"
#include "moe/gemm_sm90.h"
#include "moe/tile_sm90.cuh"
#include "moe/wgmma_widths.cuh"

namespace lamella {

constexpr int kWideRows = kMoeWideRows, kWideHalf = kWideRows / 2;

template <bool kFirst>
struct WideShape {
  static constexpr int kConsumers = 256, kThreads = kConsumers + 128;
  static constexpr int kWeightBytes = 32768, kStageBytes = kWeightBytes + kWideHalf * 128, kStages = 4;
  static constexpr int kSlice = 32;                       // tokens finished at a time
  static constexpr int kPitch = (kFirst ? 64 : 128) + 8;  // elements; rows start in different banks
  static constexpr int kSliceBytes = kSlice * kPitch * 2;
  static constexpr int kShared = 1024 + kStages * kStageBytes + 2 * kSliceBytes + 256;
  static_assert(kShared <= 227 * 1024, "more than a thread block may have");
};

struct WideMaps {
  CUtensorMap w, h64, h16;  // rows of h in boxes of 64 and of 16
};

// A tile as one thread block sees it.
struct WideTile {
  int block, part;  // part: of the expert's tiles
  int half, mine;   // pairs of the first thread block, a multiple of 8; of this one
  int64_t place;    // of this one's first pair among the sorted ones

  __device__ __forceinline__ static int size_of(int tile, const MoeGemm& g) {
    return __ldcg(g.blocks.block_sizes + tile / g.num_tiles);
  }
  __device__ __forceinline__ WideTile(int tile, int size, const MoeGemm& g, uint32_t rank) {
    block = tile / g.num_tiles;
    part = tile % g.num_tiles;
    half = ((size + 1) / 2 + 7) / 8 * 8;
    mine = rank == 0 ? min(size, half) : max(size - half, 0);
    place = int64_t{block} * kWideRows + (rank == 0 ? 0 : half);
  }
};

// Sums of the two sets of weight rows of this warpgroup over num_k units, for kN tokens.
template <bool kFirst, class T, int kN>
__device__ __forceinline__ void wide_multiply(float (&gate)[kN / 2], float (&up)[kN / 2], const char* stages,
                                              uint64_t* full, uint64_t* empty, uint32_t peer_empty,
                                              Ring<WideShape<kFirst>::kStages>& ring, int group, int num_k) {
  using Shape = WideShape<kFirst>;
  const bool leader = threadIdx.x % 32 == 0;
  const auto release = [&](int stage) {
    if (leader) {
      barrier_arrive(empty + stage);
      pair::arrive(peer_empty + stage * 8);
    }
  };
  // zeros, not a first product that ignores them: registers that are read before they are written would live through
  // the loop over tiles, those of all widths at once
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) gate[i] = up[i] = 0.f;
  int before = 0;
#pragma unroll 1
  for (int unit = 0; unit < num_k; ++unit) {
    barrier_wait(full + ring.stage, ring.parity);
    const char* here = stages + ring.stage * Shape::kStageBytes;
    const uint64_t a = wgmma_tile(here + group * 16384), b = wgmma_tile(here + Shape::kWeightBytes);
    wgmma_hold(gate);
    wgmma_hold(up);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      Wgmma<T, kN>::run(gate, a + 2 * k, b + 2 * k, true);
      Wgmma<T, kN>::run(up, a + 512 + 2 * k, b + 2 * k, true);
    }
    wgmma_commit();
    wgmma_wait<1>();  // the stage before this one has been read
    if (unit > 0) release(before);
    before = ring.stage;
    ring.advance();
  }
  wgmma_wait<0>();
  wgmma_hold(gate);
  wgmma_hold(up);
  if (num_k > 0) release(before);
}

// registers -> [token][column] in shared memory -> eight columns of one token per thread. pairs: lane l has those of
// tokens l, l + 32, ...
template <bool kFirst, class T, int kN>
__device__ __forceinline__ void wide_store(float (&gate)[kN / 2], float (&up)[kN / 2], char* slice, int group,
                                           const WideTile& t, const int (&pairs)[kWideHalf / 32], const MoeGemm& g) {
  using Shape = WideShape<kFirst>;
  constexpr int kSlice = Shape::kSlice, kPieces = kFirst ? 8 : 16, kItems = kSlice * kPieces / 128;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, thread = threadIdx.x % 128;
  const uint32_t corner = shared_address(slice);
  const int column = (t.part * 2 + group) * (kFirst ? 64 : 128) + thread % kPieces * 8;
  T* out = static_cast<T*>(g.out) + column;
#pragma unroll
  for (int from = 0; from < kN; from += kSlice) {
    if (from >= t.mine) break;
    sync_some(1 + group, 128);
#pragma unroll
    for (int j = 0; j < kSlice / 8; j += 2) {
      if (from + 8 * j >= kN) continue;
      // lane l names row l % 8 of piece l / 8: pieces are (tokens 8 j, rows 0), (.., rows 8), (8 j + 8, 0), (.., 8)
      const int at = (from / 8 + j) * 4;
      const uint32_t to =
          corner + ((8 * j + lane % 8 + 8 * (lane / 16)) * Shape::kPitch + 16 * (warp % 4) + 8 * (lane / 8 % 2)) * 2;
      const auto put = [&](const float(&d)[kN / 2], uint32_t where) {
        store_transposed(where, pack_pair<T>(d[at], d[at + 1]), pack_pair<T>(d[at + 2], d[at + 3]),
                         pack_pair<T>(d[at + 4], d[at + 5]), pack_pair<T>(d[at + 6], d[at + 7]));
      };
      if constexpr (kFirst) {
#pragma unroll
        for (int i = 0; i < 8; ++i) gate[at + i] = silu_mul(gate[at + i], up[at + i]);
        put(gate, to);
      } else {
        put(gate, to);
        put(up, to + 128);
      }
    }
    sync_some(1 + group, 128);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int token = thread / kPieces + 128 / kPieces * i;
      int64_t row = t.place + from + token;
      if constexpr (!kFirst) row = __shfl_sync(0xffffffffu, pairs[from / 32], token);
      if (from + token >= t.mine || column >= g.num_out) continue;
      const Vec<T> values =
          *reinterpret_cast<const Vec<T>*>(slice + (token * Shape::kPitch + thread % kPieces * 8) * 2);
      store_vec(out + row * g.num_out, values);
    }
  }
}

template <class T, bool kFirst>
__global__ void __launch_bounds__(WideShape<kFirst>::kThreads, 1)
    moe_wide_kernel(const __grid_constant__ WideMaps maps, const __grid_constant__ MoeGemm g) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = WideShape<kFirst>;
  constexpr int kStages = Shape::kStages, kWidth = 64;
  extern __shared__ char raw[];
  char* stages = raw + (1024 - shared_address(raw) % 1024) % 1024;
  char* slices = stages + kStages * Shape::kStageBytes;
  uint64_t* full = reinterpret_cast<uint64_t*>(slices + 2 * Shape::kSliceBytes);
  uint64_t* empty = full + kStages;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t rank = pair::rank();

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + i, kFirst ? 3 : 1);
      barrier_init(empty + i, 16);  // the consumers' warps of both thread blocks
    }
    barrier_init_done();
  }
  pair::sync();
  // The list of blocks is complete when the second product starts, see moe_sm90_kernel().
  if (kFirst) {
    wait_predecessor();
    launch_successor();
  }
  const int num_tiles = __ldcg(g.blocks.num_rows) / kWideRows * g.num_tiles;
  const int first_tile = static_cast<int>(blockIdx.x / 2), step = static_cast<int>(gridDim.x / 2);

  if (warp >= 8) {
    give_registers<72>();
    if (warp == 8) {
      if (lane == 0) {
        prefetch_map(&maps.w);
        const int rows_of_expert = static_cast<int>(g.rows);
        const uint64_t policy = normal_policy();
        const auto first_row = [&](const WideTile& t) {
          return __ldcg(g.blocks.block_experts + t.block) * rows_of_expert + t.part * (kFirst ? 128 : 256);
        };
        // rows of h come in whole boxes; what is behind the last pair is not used
        const auto token_bytes = [&](const WideTile& t) { return kFirst ? 0 : (t.mine + 15) / 16 * 16 * 128; };
        const auto weights = [&](int stage, int row, int unit, int more_bytes) {
          char* to = stages + stage * Shape::kStageBytes;
          barrier_expect(full + stage, Shape::kWeightBytes + more_bytes);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int set = 2 * static_cast<int>(rank) + i;
            const int from = kFirst ? row + set / 2 * 64 + set % 2 * (rows_of_expert / 2) : row + set * 64;
            pair::load_box(to + set * 8192, &maps.w, full + stage, unit * kWidth, from, policy);
          }
        };
        const auto rows = [&](int stage, const WideTile& t, int unit) {
          char* to = stages + stage * Shape::kStageBytes + Shape::kWeightBytes;
          const int place = static_cast<int>(t.place);
          int r = 0;
          for (; r + 64 <= t.mine; r += 64)
            load_box(to + r * 128, &maps.h64, full + stage, unit * kWidth, place + r, policy);
          for (; r < t.mine; r += 16)
            load_box(to + r * 128, &maps.h16, full + stage, unit * kWidth, place + r, policy);
        };
        if (!kFirst) {
          prefetch_map(&maps.h64);
          prefetch_map(&maps.h16);
          // fill the buffers with weights while the first product ends, then add the rows that it wrote
          int filled = 0;
          for (int tile = first_tile; filled < kStages && tile < num_tiles; tile += step) {
            const WideTile t(tile, WideTile::size_of(tile, g), g, rank);
            const int row = first_row(t), bytes = token_bytes(t);
            for (int k = 0; k < g.num_k && filled < kStages; ++k) weights(filled++, row, k, bytes);
          }
          wait_predecessor();
          launch_successor();
          asm volatile("fence.proxy.async;" ::: "memory");  // h was written by ordinary stores
        }
        Ring<kStages> ring(1);
        int count = 0;
        for (int tile = first_tile; tile < num_tiles; tile += step) {
          const WideTile t(tile, WideTile::size_of(tile, g), g, rank);
          const int row = first_row(t), bytes = token_bytes(t);
          for (int k = 0; k < g.num_k; ++k, ++count) {
            if (kFirst || count >= kStages) {
              barrier_wait(empty + ring.stage, ring.parity);
              weights(ring.stage, row, k, bytes);
            }
            if (!kFirst) rows(ring.stage, t, k);
            ring.advance();
          }
        }
      }
    } else if (kFirst && warp < 11) {
      // thread t has chunk t % 8 of rows t / 8, t / 8 + 8, ...
      constexpr uint32_t kNoRow = 0xffffffffu;
      constexpr int kRows = kWideHalf / 8;
      const int t = threadIdx.x - 32 * 9, chunk = t % 8;
      const uint32_t place = static_cast<uint32_t>(t / 8 * 128 + ((chunk ^ (t / 8)) << 4));
      const uint32_t row_steps = static_cast<uint32_t>(g.x_stride / 8);
      const int64_t k_bytes = g.k * 2;
      const char* x = static_cast<const char*>(g.x);
      Ring<kStages> ring(1);
      int ready = 0;
      bool pending = false;
      // copies are made visible to the tensor cores by who made them, when those of the next unit are on their way
      const auto raise = [&] {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) barrier_arrive(full + ready);
        if (++ready == kStages) ready = 0;
      };
      for (int tile = first_tile; tile < num_tiles; tile += step) {
        const WideTile here(tile, WideTile::size_of(tile, g), g, rank);
        uint32_t rows[kRows];  // where they start, in steps of 16 bytes
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const int r = t / 8 + 8 * i;
          rows[i] = kNoRow;
          if (r < here.mine)
            rows[i] = __ldcg(g.blocks.sorted_ids + here.place + r) / g.blocks.top_k * row_steps;
        }
        for (int k = 0; k < g.num_k; ++k) {
          barrier_wait(empty + ring.stage, ring.parity);
          const uint32_t to = shared_address(stages + ring.stage * Shape::kStageBytes + Shape::kWeightBytes) + place;
          const int64_t at = int64_t{k} * 128 + chunk * 16;
          const bool have = at < k_bytes;
          const char* from = have ? x + at : x;
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            asm volatile("" : "+r"(rows[i]));  // or their 64-bit forms are kept, and there is no room for those
            // behind K zeros, since they are summed; behind the last pair anything: columns do not meet
            if (rows[i] != kNoRow) gather_chunk(to + i * 1024, from + (have ? uint64_t{rows[i]} * 16 : 0), have);
          }
          asm volatile("cp.async.commit_group;" ::: "memory");
          if (pending) {
            asm volatile("cp.async.wait_group 1;" ::: "memory");
            raise();
          }
          pending = true;
          ring.advance();
        }
      }
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      if (pending) raise();
    }
  } else {
    take_registers<216>();
    if (!kFirst) wait_predecessor();
    const int group = warp / 4;
    const uint32_t peer_empty = pair::address_in(rank ^ 1, empty);
    char* slice = slices + group * Shape::kSliceBytes;
    Ring<kStages> ring(0);
    int next_size = first_tile < num_tiles ? WideTile::size_of(first_tile, g) : 0;
    for (int tile = first_tile; tile < num_tiles; tile += step) {
      const WideTile t(tile, next_size, g, rank);
      // asked for now, so that nobody waits for it between two tiles
      if (tile + step < num_tiles) next_size = WideTile::size_of(tile + step, g);
      int pairs[kWideHalf / 32];
#pragma unroll
      for (int i = 0; i < kWideHalf / 32; ++i) {
        const int r = lane + 32 * i;
        pairs[i] = !kFirst && r < t.mine ? __ldcg(g.blocks.sorted_ids + t.place + r) : 0;
      }
      const auto work = [&](auto n) {
        constexpr int kN = decltype(n)::value;
        float gate[kN / 2], up[kN / 2];
        wide_multiply<kFirst, T, kN>(gate, up, stages, full, empty, peer_empty, ring, group, g.num_k);
        wide_store<kFirst, T, kN>(gate, up, slice, group, t, pairs, g);
      };
      if (t.half <= 32) work(std::integral_constant<int, 32>{});
      else if (t.half <= 64) work(std::integral_constant<int, 64>{});
      else if (t.half <= 80) work(std::integral_constant<int, 80>{});
      else if (t.half <= 96) work(std::integral_constant<int, 96>{});
      else if (t.half <= 128) work(std::integral_constant<int, 128>{});
      else if (t.half <= 144) work(std::integral_constant<int, 144>{});
      else work(std::integral_constant<int, 160>{});
    }
  }
  // the other one may still deliver to this one, or arrive at its barriers
  pair::sync();
#endif
}

// ---- host --------------------------------------------------------------------------------------------------------

template <class T, bool kFirst>
int launch_moe_wide(const MoeGemm& product, int64_t places, void* stream) {
  using Shape = WideShape<kFirst>;
  MoeGemm g = product;
  WideMaps maps;
  constexpr CUtensorMapDataType kType =
      std::is_same_v<T, bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const int64_t rows = g.rows * g.blocks.num_experts;
  if (rows > INT32_MAX || places > INT32_MAX) return kUnsupported;
  if (kFirst && (g.x_stride % 8 != 0 || g.blocks.num_ids * (g.x_stride / 8) >= UINT32_MAX)) return kUnsupported;
  if (!map_rows(&maps.w, kType, 2, g.w, rows, g.k, g.k * 2, 64)) return kUnsupported;
  maps.h64 = maps.h16 = maps.w;
  if (!kFirst && (!map_rows(&maps.h64, kType, 2, g.x, places, g.k, g.k * 2, 64) ||
                  !map_rows(&maps.h16, kType, 2, g.x, places, g.k, g.k * 2, 16)))
    return kUnsupported;
  const int columns = kFirst ? 128 : 256;
  g.num_tiles = (g.num_out + columns - 1) / columns;
  if (places / kWideRows * g.num_tiles > INT32_MAX) return kUnsupported;
  const Launch how{dim3(static_cast<unsigned>(device_facts().num_sms / 2 * 2)), dim3(Shape::kThreads), Shape::kShared,
                   static_cast<cudaStream_t>(stream), true, 2};
  return launch(moe_wide_kernel<T, kFirst>, how, maps, g);
}

}  // namespace lamella
