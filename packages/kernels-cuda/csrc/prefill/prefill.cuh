// Prefill for any device from sm_80 on: mma.m16n8k16 on 64 query rows, 16 of them per warp.
//
//   keys of a tile |  tile t       |  tile t + 1
//   K buffer       | S = Q K       | loads while softmax and P V of tile t run
//   V buffer       | loads, P V    | loads while S of tile t + 1 runs
//
// Rows of shared memory lie an odd number of 16-byte units apart, so that the 8 rows of an ldmatrix are in different
// banks. e4m3 caches are widened while they are copied.
#pragma once

#include <type_traits>

#include "attention/fragments.cuh"
#include "device/launch.cuh"
#include "prefill/work.cuh"

namespace lamella::prefill {

using namespace lamella::attention;

constexpr int kRows = 64, kThreads = 128;

template <int D>
struct PrefillShape {
  static constexpr int kKeys = D <= 128 ? 64 : 32;
  static constexpr int kUnits = D / 8;  // of 16 bytes, per row
  static constexpr int kStride = (kUnits | 1) * 16;
  static constexpr int kShared = (kRows + 2 * kKeys) * kStride;
};

// The tile that this block works on; the sequences' tiles lie one behind the other, each with its last (longest) first.
// False: there is none.
__device__ __forceinline__ bool find_tile(const PrefillParams& p, Tile& tile) {
  const int lane = threadIdx.x % 32, wanted = blockIdx.x;
  int before = 0;
  for (int base = 0; base < p.batch; base += 32) {
    const int mine = tiles_of(p, base + lane);
    int upto = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, upto, step);
      if (lane >= step) upto += other;
    }
    const unsigned holds = __ballot_sync(0xffffffffu, wanted < before + upto);
    if (holds != 0) {
      const int at = __ffs(holds) - 1;
      tile.set(p, base + at, before + __shfl_sync(0xffffffffu, upto, at) - 1 - wanted);
      return true;
    }
    before += __shfl_sync(0xffffffffu, upto, 31);
  }
  return false;
}

// Where the 16-key pieces of a key tile lie: lane i holds piece i.
struct Pieces {
  int block, inner;
};

template <int kKeys>
__device__ __forceinline__ Pieces find_pieces(const PrefillParams& p, const Tile& tile, int key0) {
  const int lane = threadIdx.x % 32, key = key0 + lane * 16;
  Pieces found{0, 0};
  if (lane < kKeys / 16 && key < tile.seq_len && key + 16 > tile.begin) {
    const int place = key / p.block_size;
    found.inner = key - place * p.block_size;
    found.block = p.block_table[tile.sequence * p.table_stride + place];
  }
  return found;
}

// Eight e4m3 -> eight T.
template <class T>
__device__ __forceinline__ uint4 widen(uint2 bytes) {
  uint4 r{widen_pair(bytes.x), widen_pair(bytes.x >> 16), widen_pair(bytes.y), widen_pair(bytes.y >> 16)};
  if constexpr (!std::is_same_v<T, f16>) {
    uint32_t* words = reinterpret_cast<uint32_t*>(&r);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(words + i));
      words[i] = pack_pair<T>(pair.x, pair.y);
    }
  }
  return r;
}

// Keys [key0, key0 + kKeys) of K or V into shared memory; zeros for keys that no query may see: what lies there may be
// NaN, and 0 * NaN is no zero.
template <class T, bool kFp8, int D>
__device__ __forceinline__ void load_keys(const PrefillParams& p, const Tile& tile, const void* cache,
                                          const int64_t (&strides)[3], int kv_head, int key0, const Pieces& pieces,
                                          uint32_t to) {
  using Shape = PrefillShape<D>;
  using C = std::conditional_t<kFp8, f8, T>;
  const C* from = static_cast<const C*>(cache) + kv_head * strides[1];
#pragma unroll 2
  for (int vec = threadIdx.x; vec < Shape::kKeys * Shape::kUnits; vec += kThreads) {
    const int row = vec / Shape::kUnits, unit = vec % Shape::kUnits;
    const int block = __shfl_sync(0xffffffffu, pieces.block, row / 16);
    const int inner = __shfl_sync(0xffffffffu, pieces.inner, row / 16);
    const bool valid = key0 + row >= tile.begin && key0 + row < tile.seq_len;
    const C* source = valid ? from + block * strides[0] + (inner + row % 16) * strides[2] + unit * 8 : from;
    const uint32_t place = to + row * Shape::kStride + unit * 16;
    if constexpr (!kFp8) {
      copy_async_or_zero(place, source, valid);
    } else {
      const uint2 bytes = valid ? __ldg(reinterpret_cast<const uint2*>(source)) : make_uint2(0, 0);
      const uint4 wide = widen<T>(bytes);
      asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(place), "r"(wide.x), "r"(wide.y), "r"(wide.z),
                   "r"(wide.w)
                   : "memory");
    }
  }
  copy_commit();
}

// grid: (tiles, head groups)
template <class T, bool kFp8, int D>
__global__ void __launch_bounds__(kThreads, D > 128 || kFp8 ? 2 : 3) prefill_kernel(const PrefillParams p) {
  using Shape = PrefillShape<D>;
  constexpr int kKeys = Shape::kKeys, kStride = Shape::kStride;
  extern __shared__ __align__(16) char raw[];
  const uint32_t q_tile = shared_offset(raw), k_tile = q_tile + kRows * kStride, v_tile = k_tile + kKeys * kStride;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  wait_predecessor();
  launch_successor();
  Tile tile;
  if (!find_tile(p, tile)) return;
  const int head0 = blockIdx.y * p.pack, kv_head = head0 / p.heads_per_kv, num_rows = tile.count * p.pack;
  const int t_begin = tile.begin / kKeys, t_end = tile.end > tile.begin ? (tile.end + kKeys - 1) / kKeys : t_begin;

  const T* q = static_cast<const T*>(p.q);
  for (int vec = threadIdx.x; vec < kRows * Shape::kUnits; vec += kThreads) {
    const int row = vec / Shape::kUnits, unit = vec % Shape::kUnits;
    const bool valid = row < num_rows;
    const int64_t token = tile.token + row / p.pack, head = head0 + row % p.pack;
    copy_async_or_zero(q_tile + row * kStride + unit * 16,
                       valid ? q + token * p.q_strides[0] + head * p.q_strides[1] + unit * 8 : q, valid);
  }
  const float k_scale = p.k_scale != nullptr ? p.k_scale[kv_head * p.k_scale_stride] : 1.f;
  const float v_scale = p.v_scale != nullptr ? p.v_scale[kv_head * p.v_scale_stride] : 1.f;
  const float inner_scale = p.softcap > 0.f ? p.scale * k_scale / p.softcap : 1.f;
  const float scale = p.softcap > 0.f ? kLog2E : p.scale * k_scale * kLog2E;  // of scores, to base 2

  // of this thread's rows lane / 4 and lane / 4 + 8
  int low[2], high[2];
  float most[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int position = tile.position + (warp * 16 + lane / 4 + 8 * h) / p.pack;
    low[h] = first_key(p, position);
    high[h] = last_key(p, tile, position);
  }
  // keys that all rows see need no mask
  const int clear_begin = first_key(p, tile.position + tile.count - 1);
  const int clear_end = last_key(p, tile, tile.position) + 1;
  float o[D / 8][4];
#pragma unroll
  for (int j = 0; j < D / 8; ++j) o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0.f;

  Pieces now = find_pieces<kKeys>(p, tile, t_begin * kKeys), next{};
  load_keys<T, kFp8, D>(p, tile, p.k_cache, p.k_strides, kv_head, t_begin * kKeys, now, k_tile);
  for (int t = t_begin; t < t_end; ++t) {
    const int key0 = t * kKeys;
    copy_wait<0>();
    __syncthreads();  // K has come, P V of the tile before is done
    load_keys<T, kFp8, D>(p, tile, p.v_cache, p.v_strides, kv_head, key0, now, v_tile);
    next = find_pieces<kKeys>(p, tile, key0 + kKeys);

    float s[kKeys / 8][4];
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.f;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      uint32_t a[4];
      load_matrix_x4(a, q_tile + (warp * 16 + lane % 16) * kStride + k * 32 + lane / 16 * 16);
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) {
        uint32_t b[4];
        load_matrix_x4(b, k_tile + (j * 16 + lane % 8 + lane / 16 * 8) * kStride + k * 32 + lane / 8 % 2 * 16);
        multiply_add<T>(s[2 * j], a, b[0], b[1]);
        multiply_add<T>(s[2 * j + 1], a, b[2], b[3]);
      }
    }
    copy_wait<0>();
    __syncthreads();  // V has come, K has been read
    if (t + 1 < t_end) load_keys<T, kFp8, D>(p, tile, p.k_cache, p.k_strides, kv_head, key0 + kKeys, next, k_tile);
    now = next;

    if (p.softcap > 0.f) {
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[j][i] = cap(s[j][i] * inner_scale, p.softcap);
      }
    }
    if (key0 < clear_begin || key0 + kKeys > clear_end) {
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = key0 + j * 8 + lane % 4 * 2 + i % 2;
          if (key < low[i / 2] || key > high[i / 2]) s[j][i] = -INFINITY;
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float higher = most[h];
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) higher = fmaxf(higher, fmaxf(s[j][2 * h], s[j][2 * h + 1]));
      higher = fmaxf(higher, __shfl_xor_sync(0xffffffffu, higher, 1));
      higher = fmaxf(higher, __shfl_xor_sync(0xffffffffu, higher, 2));
      const float safe = higher == -INFINITY ? 0.f : higher * scale;
      const float kept = exp2_fast(most[h] * scale - safe);
      most[h] = higher;
      sum[h] *= kept;
#pragma unroll
      for (int j = 0; j < D / 8; ++j) {
        o[j][2 * h] *= kept;
        o[j][2 * h + 1] *= kept;
      }
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; ++i) {
          s[j][i] = exp2_fast(s[j][i] * scale - safe);
          sum[h] += s[j][i];
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      const uint32_t a[4] = {pack_pair<T>(s[2 * k][0], s[2 * k][1]), pack_pair<T>(s[2 * k][2], s[2 * k][3]),
                             pack_pair<T>(s[2 * k + 1][0], s[2 * k + 1][1]),
                             pack_pair<T>(s[2 * k + 1][2], s[2 * k + 1][3])};
#pragma unroll
      for (int j = 0; j < D / 16; ++j) {
        uint32_t b[4];
        load_matrix_x4_transposed(b, v_tile + (k * 16 + lane % 16) * kStride + j * 32 + lane / 16 * 16);
        multiply_add<T>(o[2 * j], a, b[0], b[1]);
        multiply_add<T>(o[2 * j + 1], a, b[2], b[3]);
      }
    }
  }

  copy_wait<0>();
  __syncthreads();  // q has come even where there was no key
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
    sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
    const int row = warp * 16 + lane / 4 + 8 * h;
    const int64_t token = tile.token + row / p.pack;
    const int head = head0 + row % p.pack;
    float factor = 0.f, lse;
    if (row < num_rows) {
      factor = settle(p, head, most[h] * scale, sum[h], v_scale, &lse);
      if (p.lse != nullptr && lane % 4 == 0) p.lse[token * p.num_heads + head] = lse;
    }
    // the warp's rows of q, which only it reads, become those of the result
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      const uint32_t pair = pack_pair<T>(o[j][2 * h] * factor, o[j][2 * h + 1] * factor);
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(q_tile + row * kStride + j * 16 + lane % 4 * 4), "r"(pair)
                   : "memory");
    }
  }
  __syncwarp();
  T* out = static_cast<T*>(p.out);
#pragma unroll 4
  for (int vec = lane; vec < 16 * Shape::kUnits; vec += 32) {
    const int row = warp * 16 + vec / Shape::kUnits, unit = vec % Shape::kUnits;
    if (row >= num_rows) continue;
    const int64_t token = tile.token + row / p.pack, head = head0 + row % p.pack;
    *reinterpret_cast<uint4*>(out + token * p.out_strides[0] + head * p.out_strides[1] + unit * 8) =
        load_shared(reinterpret_cast<const uint4*>(raw + row * kStride + unit * 16));
  }
}

}  // namespace lamella::prefill
