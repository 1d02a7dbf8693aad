// Parts of the Hopper kernels of gemm_sm90.cuh: which work is whose, and what a consumer does with a tile.
#pragma once

#include "device/ring.cuh"
#include "device/wgmma.cuh"
#include "moe/gemm.cuh"

namespace lamella {

template <class T, int kTokens, int kGroups, bool kFirst>
struct MoeShape {
  static constexpr int kConsumers = 128 * kGroups, kThreads = kConsumers + 128;
  static constexpr int kWeightBytes = kGroups * 16384, kStageBytes = kWeightBytes + kTokens * 128;
  static constexpr int kSlice = kTokens < 32 ? kTokens : 32;  // tokens finished at a time
  static constexpr int kPitch = (kFirst ? 64 : 128) + 8;      // elements; rows start in different banks
  static constexpr int kSliceBytes = kSlice * kPitch * 2;
  // All of a multiprocessor for one thread block: with half as many stages, to have two of them, weights come slower.
  static constexpr int kRoom = 222 * 1024 - kGroups * kSliceBytes;
  static constexpr int kStages = kRoom / kStageBytes < 12 ? kRoom / kStageBytes : 12;
  static constexpr int kShared = 1024 + kStages * kStageBytes + kGroups * kSliceBytes + 256;
};

// The stretches [k, k_end) of tiles that a thread block works on.
template <bool kWhole>
struct MoeWalk {
  int at, end, num_k;

  __device__ MoeWalk(int num_tiles, int num_k) : num_k(num_k) {
    if (kWhole) {
      at = blockIdx.x;
      end = num_tiles;
    } else {
      at = start_of(blockIdx.x, num_tiles * num_k);
      end = start_of(blockIdx.x + 1, num_tiles * num_k);
    }
  }
  // First unit of a thread block.
  __device__ static int start_of(unsigned block, int num_units) {
    return static_cast<int>(int64_t{num_units} * block / gridDim.x);
  }
  __device__ bool next(int& tile, int& k, int& k_end) {
    if (at >= end) return false;
    if (kWhole) {
      tile = at;
      k = 0;
      k_end = num_k;
      at += gridDim.x;
    } else {
      tile = at / num_k;
      k = at % num_k;
      k_end = end - at < num_k - k ? k + end - at : num_k;
      at += k_end - k;
    }
    return true;
  }
};

__device__ __forceinline__ void gather_chunk(uint32_t to, const void* from, bool have) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(have ? 16 : 0) : "memory");
}

__device__ __forceinline__ uint64_t normal_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

template <int kCount>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Stores 8x8 pieces of packed pairs of columns so that columns become rows of memory.
__device__ __forceinline__ void store_transposed(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}
__device__ __forceinline__ void store_transposed(uint32_t to, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(a), "r"(b) : "memory");
}

template <class O>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  struct alignas(4) Pair {
    O at[2];
  } pair{{from_float<O>(low), from_float<O>(high)}};
  return *reinterpret_cast<uint32_t*>(&pair);
}

// A stretch of a tile as its consumers see it.
struct MoeTile {
  int tile, block, part;  // part: of the expert's tiles
  int k, k_end, size;     // units; pairs of the block
};

// Sums of the two sets of weight rows of this warpgroup over units [k, k_end), for the first kN tokens of the block.
template <class Shape, class T, int kN, class Ring>
__device__ __forceinline__ void moe_multiply(float (&gate)[kN / 2], float (&up)[kN / 2], const char* stages,
                                             uint64_t* full, uint64_t* empty, Ring& ring, int group, int units) {
  const bool leader = threadIdx.x % 32 == 0;
  // zeros, not a first product that ignores them: registers that are read before they are written live from the start
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) gate[i] = up[i] = 0.f;
  int before = -1;
  for (int unit = 0; unit < units; ++unit) {
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
    if (before >= 0 && leader) barrier_arrive(empty + before);
    before = ring.stage;
    ring.advance();
  }
  wgmma_wait<0>();
  wgmma_hold(gate);
  wgmma_hold(up);
  if (before >= 0 && leader) barrier_arrive(empty + before);
}

// The same for e4m3. Its products are summed in 14 bits by the tensor cores: 128 of K at a time, then in float32 with
// the scales.
template <class Shape, class T, int kN, int kGroups, bool kFirst, class Ring>
__device__ __forceinline__ void moe_multiply_scaled(float (&gate)[kN / 2], float (&up)[kN / 2], const char* stages,
                                                    uint64_t* full, uint64_t* empty, Ring& ring, int group,
                                                    const MoeTile& t, const MoeGemm& g, const DirectBlocks& direct) {
  const bool aligned = g.blocks.num_rows != nullptr;
  const int lane = threadIdx.x % 32;
  const int64_t expert = aligned ? __ldcg(g.blocks.block_experts + t.block) : direct.expert[t.block];
  const int row = (t.part * kGroups + group) * (kFirst ? 64 : 128);
  // rows beyond the matrix are not stored; any scale will do for them
  const int last = static_cast<int>(g.rows) / 128 - 1;
  const int gate_row = min(row / 128, last);
  const int up_row = kFirst ? min((row + static_cast<int>(g.rows) / 2) / 128, last) : gate_row;
  const float* scales = g.w_scale + expert * (last + 1) * g.num_k;
  int scale_row[kN / 4];
#pragma unroll
  for (int j = 0; j < kN / 4; ++j) {
    const int r = 8 * (j / 2) + 2 * (lane % 4) + j % 2;
    scale_row[j] = -1;
    if (r >= t.size) continue;
    const int place = t.block * kN + r;
    const int pair = aligned ? __ldcg(g.blocks.sorted_ids + place) : direct.pair[t.block];
    scale_row[j] = kFirst ? pair / g.blocks.top_k : place;
  }
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) gate[i] = up[i] = 0.f;
  for (int unit = t.k; unit < t.k_end; ++unit) {
    barrier_wait(full + ring.stage, ring.parity);
    const char* here = stages + ring.stage * Shape::kStageBytes;
    const uint64_t a = wgmma_tile(here + group * 16384), b = wgmma_tile(here + Shape::kWeightBytes);
    float part_gate[kN / 2], part_up[kN / 2];
    wgmma_hold(part_gate);
    wgmma_hold(part_up);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Wgmma<T, kN>::run(part_gate, a + 2 * i, b + 2 * i, i > 0);
      Wgmma<T, kN>::run(part_up, a + 512 + 2 * i, b + 2 * i, i > 0);
    }
    wgmma_commit();
    const float gate_scale = scales[gate_row * g.num_k + unit], up_scale = scales[up_row * g.num_k + unit];
    float x_scale[kN / 4];
#pragma unroll
    for (int j = 0; j < kN / 4; ++j)
      x_scale[j] = scale_row[j] >= 0 ? g.x_scale[int64_t{scale_row[j]} * g.num_k + unit] : 0.f;
    wgmma_wait<0>();
    wgmma_hold(part_gate);
    wgmma_hold(part_up);
    if (lane == 0) barrier_arrive(empty + ring.stage);
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      gate[i] += part_gate[i] * (x_scale[i / 4 * 2 + i % 2] * gate_scale);
      up[i] += part_up[i] * (x_scale[i / 4 * 2 + i % 2] * up_scale);
    }
    ring.advance();
  }
}

// Sums of a tile that several thread blocks worked on. False: this one's are left for the owner of the tile.
template <int kSums>
__device__ __forceinline__ bool moe_gather_sums(float (&gate)[kSums], float (&up)[kSums], const MoeTile& t,
                                                const MoeGemm& g, int num_units) {
  constexpr int64_t kLeft = 2 * kSums * 128;
  const int thread = threadIdx.x % 128;
  if (t.k != 0) {
    float* mine = g.partials + blockIdx.x * kLeft + thread;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      mine[i * 128] = gate[i];
      mine[(kSums + i) * 128] = up[i];
    }
    __threadfence();
    sync_some(1, 128);
    if (thread == 0) asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(g.flags + blockIdx.x) : "memory");
    return false;
  }
  const int tile_end = (t.tile + 1) * g.num_k;
  int have = t.tile * g.num_k + t.k_end;
  for (unsigned other = blockIdx.x + 1; have < tile_end; ++other) {
    const int next = MoeWalk<false>::start_of(other + 1, num_units);
    if (next == have) continue;  // a thread block without work
    have = next;
    if (thread == 0) {
      unsigned raised = 0;
      while (raised == 0)
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(raised) : "l"(g.flags + other) : "memory");
    }
    sync_some(1, 128);
    const float* theirs = g.partials + int64_t{other} * kLeft + thread;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      gate[i] += __ldcg(theirs + i * 128);
      up[i] += __ldcg(theirs + (kSums + i) * 128);
    }
    sync_some(1, 128);
    if (thread == 0) g.flags[other] = 0;
  }
  return true;
}

// registers -> [token][column] in shared memory -> eight columns of one token per thread
template <class Shape, class O, int kTokens, int kN, int kGroups, bool kFirst>
__device__ __forceinline__ void moe_store(float (&gate)[kN / 2], float (&up)[kN / 2], char* slice, int group,
                                          const MoeTile& t, const MoeGemm& g, const DirectBlocks& direct) {
  const bool aligned = g.blocks.num_rows != nullptr;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, thread = threadIdx.x % 128;
  constexpr int kSlice = Shape::kSlice, kPieces = kFirst ? 8 : 16, kItems = kSlice * kPieces;
  const uint32_t corner = shared_address(slice);
  O* out = static_cast<O*>(g.out);
  const int column0 = (t.part * kGroups + group) * (kFirst ? 64 : 128);
#pragma unroll
  for (int from = 0; from < kN; from += kSlice) {
    if (from >= t.size) break;
    sync_some(1 + group, 128);
#pragma unroll
    for (int j = 0; j < kSlice / 8; j += 2) {
      // lane l names row l % 8 of piece l / 8: pieces are (tokens 8 j, rows 0), (.., rows 8), (8 j + 8, 0), (.., 8)
      const int at = (from / 8 + j) * 4;
      const uint32_t to =
          corner + ((8 * j + lane % 8 + 8 * (lane / 16)) * Shape::kPitch + 16 * (warp % 4) + 8 * (lane / 8 % 2)) * 2;
      const auto put = [&](const float(&d)[kN / 2], uint32_t where) {
        const uint32_t a = pack_pair<O>(d[at], d[at + 1]), b = pack_pair<O>(d[at + 2], d[at + 3]);
        if constexpr (kSlice == 8) store_transposed(where, a, b);
        else store_transposed(where, a, b, pack_pair<O>(d[at + 4], d[at + 5]), pack_pair<O>(d[at + 6], d[at + 7]));
      };
      if constexpr (kFirst) {
#pragma unroll
        for (int i = 0; i < (kSlice == 8 ? 4 : 8); ++i) gate[at + i] = silu_mul(gate[at + i], up[at + i]);
        put(gate, to);
      } else {
        put(gate, to);
        put(up, to + 128);
      }
    }
    sync_some(1 + group, 128);
#pragma unroll
    for (int i = 0; i < (kItems + 127) / 128; ++i) {
      const int item = thread + 128 * i, token = item / kPieces, piece = item % kPieces;
      const int column = column0 + piece * 8;
      if (token >= kSlice || from + token >= t.size || column >= g.num_out) continue;
      const int place = t.block * kTokens + from + token;
      const int64_t row = kFirst ? place : (aligned ? __ldcg(g.blocks.sorted_ids + place) : direct.pair[t.block]);
      const Vec<O> values = *reinterpret_cast<const Vec<O>*>(slice + (token * Shape::kPitch + piece * 8) * 2);
      store_vec(out + row * g.num_out + column, values);
    }
  }
}

}  // namespace lamella
