// A block of four warps takes its part of the schedule: pairs of (sequence, kv head and up to 64 of its query rows), 64
// keys at a time, loaded some stages ahead across the borders of pairs. After a kernel that writes the step's new keys
// the first stages are loaded while it runs still, all but the tiles with new keys.
//
//   rows <= 16: each warp has all the rows and its own 16 keys of a chunk, its own softmax and its own pace; the warps'
//               sums meet at the end of a pair
//   rows <= 64: each warp has 16 rows and all the keys; the block goes in step
//
//   Q (registers) x K (ldmatrix) -> S -> P (the registers of S are those of A) x V (ldmatrix.trans) -> O
//
// fp8 caches are widened to f16 after ldmatrix, exactly. That leaves lane (g, t) with four elements 4t..4t+3 of a row
// where f16 would give it two: Q is loaded in the same order, and of O's tiles 2j and 2j+1 the first has the even
// columns.
#pragma once

#include "attention/decode_output.cuh"
#include "device/launch.cuh"

namespace lamella::attention {

template <bool kFp8, int D, int kRowWarps>
struct DecodeShape {
  using Ring = Loader<kFp8 ? D : 2 * D>;
  // Q and O of wide heads together need more registers than there are: Q waits in shared memory. The four warps of one
  // row tile write the same bytes there.
  static constexpr bool kParked = D == 256 && kRowWarps == 1;
  static constexpr int kParkedBytes = kParked ? D / 16 * 512 : 0;
  static constexpr int kMergeFloats = kWarps * 16 * 40, kStatsFloats = kWarps * 16 * 2;
  // Two blocks per SM of Hopper and later; fewer stages where a block may have 99 KiB only.
  static constexpr int stages(bool large) {
    const int fit = (large ? 104 * 1024 - 1536 : 86 * 1024) / Ring::kStageBytes;
    return fit < 2 ? (large ? 3 : 2) : fit > 6 ? 6 : fit;
  }
  static constexpr int shared_bytes(bool large) {
    return stages(large) * Ring::kStageBytes + kParkedBytes + (kMergeFloats + kStatsFloats) * 4 + 16;
  }
};

// One warp's query rows g and g + 8 of its tile, and their running sums.
template <class T, bool kFp8, int D, int kRowWarps>
struct RowTile {
  static constexpr int kSteps = D / 16;
  using Shape = DecodeShape<kFp8, D, kRowWarps>;
  using Ring = typename Shape::Ring;

  uint32_t q[kSteps][4];
  const uint4* parked;  // q again, if Shape::kParked, and then q is not kept
  float o[D / 8][4];
  float most[2], sum[2], scale[2];  // scale: of scores, before the soft cap or in base 2
  int limit[2], low[2];             // sees keys [low, limit)

  __device__ __forceinline__ void begin(const DecodeParams& p, const Walk& walk, int tile, uint4* park) {
    const int t = threadIdx.x % 4, rows = rows_of(p, walk.group);
    const float* k_scale = p.k_scale;
    const float by = (k_scale != nullptr ? k_scale[walk.group / p.groups_per_kv * p.k_scale_stride] : 1.f) * p.scale *
                     (p.softcap > 0.f ? 1.f / p.softcap : kLog2E);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile * 16 + half * 8 + threadIdx.x % 32 / 4;
      const bool valid = row < rows;
      const RowPlace place(p, walk.group, valid ? row : 0);
      limit[half] = valid ? walk.keys.end - p.num_queries + place.query + 1 : 0;
      low[half] = p.window > 0 ? limit[half] - p.window : 0;
      most[half] = -INFINITY;
      sum[half] = 0.f;
      scale[half] = by;
      const T* from = static_cast<const T*>(p.q) + walk.sequence * p.q_strides[0] + place.query * p.q_strides[1] +
                      place.head * p.q_strides[2];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if constexpr (kFp8) {
          const uint2 four = valid ? *reinterpret_cast<const uint2*>(from + 16 * i + 4 * t) : make_uint2(0, 0);
          q[i][half] = four.x;
          q[i][half + 2] = four.y;
        } else {
          q[i][half] = valid ? *reinterpret_cast<const uint32_t*>(from + 16 * i + 2 * t) : 0;
          q[i][half + 2] = valid ? *reinterpret_cast<const uint32_t*>(from + 16 * i + 8 + 2 * t) : 0;
        }
      }
      if constexpr (kFp8) {
        if (p.q_bf16) narrow(half);
      }
    }
    if constexpr (Shape::kParked) {
      parked = park + threadIdx.x % 32;
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
        park[i * 32 + threadIdx.x % 32] = make_uint4(q[i][0], q[i][1], q[i][2], q[i][3]);
    }
#pragma unroll
    for (int i = 0; i < D / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) o[i][j] = 0.f;
  }

  // 16 keys: K and V of the tile at k and v, the first key of it. edge: some row does not see all of them.
  __device__ __forceinline__ void add(const DecodeParams& p, uint32_t k, uint32_t v, int key, bool edge) {
    const int lane = threadIdx.x % 32, t = lane % 4;
    float s[2][4] = {};
    scores(s, k, lane);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) s[n][j] *= scale[j / 2];
    if (p.softcap > 0.f) {
      const float cap = p.softcap * kLog2E;
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j)  // tanh.approx has 11 bits: too few times the cap
          s[n][j] = cap - 2.f * cap * __frcp_rn(exp2_fast(s[n][j] * (2.f * kLog2E)) + 1.f);
    }
    if (edge) {
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = key + 8 * n + 2 * t + j % 2;
          if (at >= limit[j / 2] || at < low[j / 2]) s[n][j] = -INFINITY;
        }
    }
    float kept[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float higher = fmaxf(fmaxf(s[0][2 * half], s[0][2 * half + 1]), fmaxf(s[1][2 * half], s[1][2 * half + 1]));
      higher = fmaxf(higher, __shfl_xor_sync(0xffffffffu, higher, 1));
      higher = fmaxf(higher, __shfl_xor_sync(0xffffffffu, higher, 2));
      higher = fmaxf(higher, most[half]);
      const float safe = higher == -INFINITY ? 0.f : higher;
      kept[half] = exp2_fast(most[half] - safe);
      most[half] = higher;
      float added = 0.f;
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int j = 2 * half; j < 2 * half + 2; ++j) {
          s[n][j] = exp2_fast(s[n][j] - safe);
          added += s[n][j];
        }
      sum[half] = sum[half] * kept[half] + added;
    }
    if (__any_sync(0xffffffffu, kept[0] != 1.f || kept[1] != 1.f)) {
#pragma unroll
      for (int i = 0; i < D / 8; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) o[i][j] *= kept[j / 2];
    }
    const uint32_t a[4] = {pack_pair<T>(s[0][0], s[0][1]), pack_pair<T>(s[0][2], s[0][3]),
                           pack_pair<T>(s[1][0], s[1][1]), pack_pair<T>(s[1][2], s[1][3])};
    values(a, v, lane);
  }

  // Column of value j of O's tiles 2i and 2i+1 taken together: fp8 has four neighbours, else two and two.
  static __device__ __forceinline__ int column(int pair, int t) { return 16 * pair + (kFp8 ? 4 : 2) * t; }

  __device__ __forceinline__ void finish() {  // each lane has its own part of the sum
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
    }
  }

 private:
  __device__ __forceinline__ void query(uint32_t (&a)[4], int i) const {
    if constexpr (Shape::kParked) {
      const uint4 four = load_shared(parked + i * 32);
      a[0] = four.x, a[1] = four.y, a[2] = four.z, a[3] = four.w;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) a[j] = q[i][j];
    }
  }

  // bf16 queries in f16: times a power of two per row, so that the largest is near 256 and no underflow matters.
  __device__ __forceinline__ void narrow(int half) {
    const auto low_part = [](uint32_t pair) { return __uint_as_float(pair << 16); };
    const auto high_part = [](uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); };
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
#pragma unroll
      for (int j = half; j < 4; j += 2)
        largest = fmaxf(largest, fmaxf(fabsf(low_part(q[i][j])), fabsf(high_part(q[i][j]))));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    const int exponent = min(max(static_cast<int>(__float_as_uint(largest) >> 23), 27), 254);
    const float factor = __uint_as_float(static_cast<uint32_t>(127 + 8 + 127 - exponent) << 23);
    scale[half] *= __uint_as_float(static_cast<uint32_t>(exponent - 8) << 23);
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
#pragma unroll
      for (int j = half; j < 4; j += 2)
        q[i][j] = pack_pair<f16>(low_part(q[i][j]) * factor, high_part(q[i][j]) * factor);
  }

  __device__ __forceinline__ void scores(float (&s)[2][4], uint32_t k, int lane) {
    const uint32_t from = k + ((lane >> 4) * 8 + (lane & 7)) * Ring::kStride + ((lane >> 3) & 1) * 16;
    if constexpr (!kFp8) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        uint32_t a[4], b[4];
        query(a, i);
        load_matrix_x4(b, from + i * 32);
        multiply_add<T>(s[0], a, b[0], b[1]);
        multiply_add<T>(s[1], a, b[2], b[3]);
      }
    } else {
#pragma unroll
      for (int i = 0; i + 1 < kSteps; i += 2) {
        uint32_t a[4], after[4], b[4];
        query(a, i);
        query(after, i + 1);
        load_matrix_x4(b, from + i * 16);
        multiply_add<T>(s[0], a, widen_pair(b[0]), widen_pair(b[0] >> 16));
        multiply_add<T>(s[1], a, widen_pair(b[2]), widen_pair(b[2] >> 16));
        multiply_add<T>(s[0], after, widen_pair(b[1]), widen_pair(b[1] >> 16));
        multiply_add<T>(s[1], after, widen_pair(b[3]), widen_pair(b[3] >> 16));
      }
      if constexpr (kSteps % 2 != 0) {
        uint32_t a[4], b0, b1;
        query(a, kSteps - 1);
        load_matrix_x2(b0, b1, k + (lane & 15) * Ring::kStride + (kSteps - 1) * 16);
        multiply_add<T>(s[0], a, widen_pair(b0), widen_pair(b0 >> 16));
        multiply_add<T>(s[1], a, widen_pair(b1), widen_pair(b1 >> 16));
      }
    }
  }

  // 16 columns from keys 0-7 (low) and 8-15 (high), each register with two columns of two keys.
  __device__ __forceinline__ void widen_and_add(const uint32_t (&a)[4], int pair, uint32_t low_keys,
                                                uint32_t high_keys) {
    low_keys = __byte_perm(low_keys, 0, 0x3120);
    high_keys = __byte_perm(high_keys, 0, 0x3120);
    multiply_add<T>(o[2 * pair], a, widen_pair(low_keys), widen_pair(high_keys));
    multiply_add<T>(o[2 * pair + 1], a, widen_pair(low_keys >> 16), widen_pair(high_keys >> 16));
  }

  __device__ __forceinline__ void values(const uint32_t (&a)[4], uint32_t v, int lane) {
    const uint32_t from = v + (lane & 15) * Ring::kStride + (lane >> 4) * 16;
    if constexpr (!kFp8) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        uint32_t b[4];
        load_matrix_x4_transposed(b, from + i * 32);
        multiply_add<T>(o[2 * i], a, b[0], b[1]);
        multiply_add<T>(o[2 * i + 1], a, b[2], b[3]);
      }
    } else {
#pragma unroll
      for (int i = 0; i + 1 < kSteps; i += 2) {
        uint32_t b[4];
        load_matrix_x4_transposed(b, from + i * 16);
        widen_and_add(a, i, b[0], b[1]);
        widen_and_add(a, i + 1, b[2], b[3]);
      }
      if constexpr (kSteps % 2 != 0) {
        uint32_t b0, b1;
        load_matrix_x2_transposed(b0, b1, v + (lane & 15) * Ring::kStride + (kSteps - 1) * 16);
        widen_and_add(a, kSteps - 1, b0, b1);
      }
    }
  }
};

// Sums of the four warps, kColumns at a time through shared memory; each thread ends with four columns of one row.
template <int kColumns, class T, bool kFp8, int D>
__device__ __forceinline__ void merge_warps(const DecodeParams& p, const Walk& walk, RowTile<T, kFp8, D, 1>& tile,
                                            int rows, int slot, float* buffer, float2* stats) {
  constexpr int kRows = 512 / kColumns, kPitch = kColumns + 8;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int row = threadIdx.x / (kColumns / 4), quad = threadIdx.x % (kColumns / 4);
  float most = -INFINITY, sum = 0.f, weight[kWarps];
#pragma unroll
  for (int w = 0; w < kWarps; ++w) most = fmaxf(most, stats[w * 16 + row].x);
  const float safe = most == -INFINITY ? 0.f : most;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    weight[w] = exp2_fast(stats[w * 16 + row].x - safe);
    sum += weight[w] * stats[w * 16 + row].y;
  }
  const bool mine = row < rows;
  const RowPlace place(p, walk.group, mine ? row : 0);
  float factor = 0.f;
  if (mine && slot < 0) factor = settle(p, walk.sequence, place, most, sum, quad == 0);
  if (mine && slot >= 0 && quad == 0)
    p.partial_stats[static_cast<int64_t>(slot) * p.group_rows + row] = make_float2(most, sum);
#pragma unroll
  for (int first = 0; first < D; first += kColumns) {
    float* mine_to = buffer + warp * kRows * kPitch;
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i) {
      const int pair = first / 16 + i;
      if (pair >= D / 16) continue;
      const int column = tile.column(i, t);
      const auto& even = tile.o[2 * pair];
      const auto& odd = tile.o[2 * pair + 1];
#pragma unroll
      for (int half = 0; half < kRows / 8; ++half) {
        float* to = mine_to + (g + 8 * half) * kPitch + column;
        if constexpr (kFp8) {
          *reinterpret_cast<float4*>(to) =
              make_float4(even[2 * half], odd[2 * half], even[2 * half + 1], odd[2 * half + 1]);
        } else {
          *reinterpret_cast<float2*>(to) = make_float2(even[2 * half], even[2 * half + 1]);
          *reinterpret_cast<float2*>(to + 8) = make_float2(odd[2 * half], odd[2 * half + 1]);
        }
      }
    }
    __syncthreads();
    if (mine && first + quad * 4 < D) {
      float total[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float4 part = *reinterpret_cast<const float4*>(buffer + (w * kRows + row) * kPitch + quad * 4);
        total[0] += weight[w] * part.x;
        total[1] += weight[w] * part.y;
        total[2] += weight[w] * part.z;
        total[3] += weight[w] * part.w;
      }
      store_result<T, kFp8, D, 4>(p, walk.sequence, place, row, first + quad * 4, total, factor, slot);
    }
    __syncthreads();
  }
}

// Each warp has rows of its own.
template <class T, bool kFp8, int D>
__device__ __forceinline__ void store_tile(const DecodeParams& p, const Walk& walk, RowTile<T, kFp8, D, 4>& tile,
                                           int rows, int slot) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = threadIdx.x / 32 * 16 + half * 8 + threadIdx.x % 32 / 4;
    if (row >= rows) continue;
    const RowPlace place(p, walk.group, row);
    float factor = 0.f;
    if (slot < 0) factor = settle(p, walk.sequence, place, tile.most[half], tile.sum[half], t == 0);
    if (slot >= 0 && t == 0)
      p.partial_stats[static_cast<int64_t>(slot) * p.group_rows + row] = make_float2(tile.most[half], tile.sum[half]);
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      const auto& even = tile.o[2 * i];
      const auto& odd = tile.o[2 * i + 1];
      const int column = tile.column(i, t);
      if constexpr (kFp8) {
        float four[4] = {even[2 * half], odd[2 * half], even[2 * half + 1], odd[2 * half + 1]};
        store_result<T, kFp8, D, 4>(p, walk.sequence, place, row, column, four, factor, slot);
      } else {
        float first[2] = {even[2 * half], even[2 * half + 1]}, second[2] = {odd[2 * half], odd[2 * half + 1]};
        store_result<T, kFp8, D, 2>(p, walk.sequence, place, row, column, first, factor, slot);
        store_result<T, kFp8, D, 2>(p, walk.sequence, place, row, column + 8, second, factor, slot);
      }
    }
  }
}

// Returns what was counted before. What the block wrote before its last barrier is seen by whom the count tells of it,
// and one fence of one thread does it: each costs a way to the L2 cache.
__device__ __forceinline__ int count_one(int* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// kRowWarps: 1 or 4 of the four warps share the rows, the others the keys.
template <class T, bool kFp8, int D, int kRowWarps>
__global__ void __launch_bounds__(kWarps * 32) paged_decode_kernel(const __grid_constant__ DecodeParams p) {
  using Shape = DecodeShape<kFp8, D, kRowWarps>;
  using Ring = typename Shape::Ring;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  constexpr int kStages = Shape::stages(false);
#else
  constexpr int kStages = Shape::stages(true);
#endif
  extern __shared__ __align__(16) unsigned char shared[];
  uint4* park = reinterpret_cast<uint4*>(shared + kStages * Ring::kStageBytes);
  float* buffer = reinterpret_cast<float*>(shared + kStages * Ring::kStageBytes + Shape::kParkedBytes);
  float2* stats = reinterpret_cast<float2*>(buffer + Shape::kMergeFloats);
  int* is_last = reinterpret_cast<int*>(stats + kWarps * 16);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  if (!p.follows_write) {
    wait_predecessor();
    launch_successor();
  }
  const int4* parts = reinterpret_cast<const int4*>(p.schedule);
  const int4 begin = __ldcg(parts + blockIdx.x), end = __ldcg(parts + blockIdx.x + 1);
  const int4 behind = __ldcg(parts + p.num_parts);
  if (begin.x >= p.batch) return;

  const uint32_t ring = shared_offset(shared), own = ring + warp * Ring::kTileBytes;
  Ring loader;
  loader.start(p, begin, end);
#pragma unroll 1  // less code to fetch before the first load
  for (int i = 0; i < kStages - 1; ++i) loader.template issue<true>(p, end, own + i * Ring::kStageBytes);
  if (p.follows_write) {  // only now, so that a successor may rely on all that is older than this kernel
    wait_predecessor();
    launch_successor();
  }

  uint32_t stage = 0, free_stage = (kStages - 1) * Ring::kStageBytes;  // offsets in the ring
  Walk walk;
  walk.start(p, begin, end);
  for (int skipped = begin.z; !walk.done; walk.next(p, end), skipped = 0) {
    RowTile<T, kFp8, D, kRowWarps> tile;
    const int rows = rows_of(p, walk.group), row_tile = kRowWarps == 1 ? 0 : warp;
    tile.begin(p, walk, row_tile, park);
    const int first_masked = walk.keys.end - p.num_queries + 1;  // the first query does not see this key
    const int last_masked = p.window > 0 ? walk.keys.end - p.window : 0;  // the last one sees none before this
    for (int chunk = walk.chunk; chunk < walk.stop; ++chunk) {
      copy_wait<kStages - 2>();
      if constexpr (kRowWarps == 1) {
        __syncwarp();  // all lanes' copies are there, and all have read the stage that is filled next
      } else {
        __syncthreads();
      }
      loader.issue(p, end, own + free_stage);
      if (row_tile * 16 < rows) {
#pragma unroll 1
        for (int i = 0; i < kRowWarps; ++i) {
          const int part = kRowWarps == 1 ? warp : i, key = chunk * kChunkKeys + part * kTileKeys;
          if (key >= walk.keys.end || key + kTileKeys <= walk.keys.begin) continue;
          const uint32_t k = ring + stage + part * Ring::kTileBytes;
          tile.add(p, k, k + kWarps * Ring::kTileBytes, key, key + kTileKeys > first_masked || key < last_masked);
        }
      }
      free_stage = stage;
      stage = stage + Ring::kStageBytes == kStages * Ring::kStageBytes ? 0 : stage + Ring::kStageBytes;
    }
    tile.finish();

    const int num_chunks = walk.keys.num_chunks(), taken = walk.stop - walk.keys.first_chunk();
    const bool cut = skipped > 0 || taken < num_chunks;
    const int slot = cut ? slot_of(blockIdx.x, skipped) : -1;
    if constexpr (kRowWarps == 1) {
      if (lane % 4 == 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          stats[warp * 16 + half * 8 + lane / 4] = make_float2(tile.most[half], tile.sum[half]);
      }
      __syncthreads();
      if (rows <= 8) {
        merge_warps<64>(p, walk, tile, rows, slot, buffer, stats);
      } else {
        merge_warps<32>(p, walk, tile, rows, slot, buffer, stats);
      }
    } else {
      store_tile(p, walk, tile, rows, slot);
    }
    if (cut) {
      const Cut how({static_cast<uint32_t>(behind.w), static_cast<uint32_t>(behind.y)}, blockIdx.x, skipped, taken,
                    num_chunks);
      __syncthreads();
      if (threadIdx.x == 0) {
        int* counter = p.schedule + 4 * (static_cast<int64_t>(p.num_parts) + 1) +
                       static_cast<int64_t>(walk.sequence) * p.num_groups + walk.group;
        const bool last = count_one(counter) == how.splits - 1;
        *is_last = last;
        if (last) *counter = 0;  // for the next kernel
      }
      __syncthreads();
      if (*is_last) combine<T, kFp8, D>(p, walk.sequence, walk.group, how);
      __syncthreads();
    }
  }
}

}  // namespace lamella::attention
