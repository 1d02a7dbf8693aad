// Prefill on Hopper: persistent, one warp loads, two warpgroups compute 64 of a tile's 128 rows each.
//
//   keys            tile n           tile n - 1        ...        the last ones first: masks and zeros come first
//   loading warp    K n | K n-1  V n | K n-2  V n-1 | ...         tensor memory accelerator, kStages of each
//   warpgroup 0     S n | S n-1  PV n   softmax n-1 | S n-2  PV n-1   softmax n-2 | ...
//   warpgroup 1                    S n | S n-1  PV n   softmax n-1 | ...
//
// The warpgroups take turns in giving the tensor cores their products, so that one's softmax runs beside the other's
// products; within a warpgroup the softmax of a tile runs beside the product with the values of the tile before.
// Scores and results stay in registers; probabilities go from accumulators to operands without leaving them.
//
// Shared memory, chunks of 64 columns = rows of 128 bytes with the 128-byte swizzle:
//   q [D / 64][128 rows]   K [kStages][D / 64][kKeys]   V [kStages][D / 64][kKeys]
#pragma once

#include "attention/fragments.cuh"
#include "device/launch.cuh"
#include "prefill/roster.cuh"
#include "prefill/wgmma_registers.cuh"

namespace lamella::prefill {

using lamella::attention::exp2_fast;
using lamella::attention::pack_pair;

constexpr int kSm90Rows = 128, kSm90Threads = 384;

template <int D>
struct Sm90Shape {
  static constexpr int kKeys = D > 128 ? 64 : 128, kChunks = D / 64, kStages = D == 64 ? 4 : 2;
  static constexpr int kQueryBytes = kSm90Rows * D * 2, kTileBytes = kKeys * D * 2;
  static constexpr int kShared = 1024 + kQueryBytes + 2 * kStages * kTileBytes + 256;
  static constexpr int kRegisters = D > 128 ? 232 : 224, kLoaderRegisters = D > 128 ? 40 : 56;  // per thread
  static constexpr bool kTurns = D <= 128;  // wide heads have little softmax to hide
};

struct Sm90Plan {
  CUtensorMap q, k, v;
  PrefillParams p;
  int piece_keys;  // keys that lie together in one block: what one box holds
};

// One tile of work, from the loading warp to the others.
struct Sm90Item {
  Tile tile;  // sequence -1: there is no more work
  int head0;
};

struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  template <int kStages>
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <int kCount>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

__device__ __forceinline__ void load_box_3d(uint32_t to, const CUtensorMap* map, uint64_t* barrier, int x, int y,
                                            int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void load_box_4d(uint32_t to, const CUtensorMap* map, uint64_t* barrier, int x, int y, int z,
                                            int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

template <int D>
__device__ __forceinline__ int first_tile(const Tile& tile) {
  return tile.begin / Sm90Shape<D>::kKeys;
}
template <int D>
__device__ __forceinline__ int num_key_tiles(const Tile& tile) {
  constexpr int kKeys = Sm90Shape<D>::kKeys;
  return tile.end > tile.begin ? (tile.end + kKeys - 1) / kKeys - first_tile<D>(tile) : 0;
}

// The loading warp. Lane i loads box i of each tile of keys: chunk i / pieces, piece i % pieces.
template <int D>
__device__ __forceinline__ void load_items(const Sm90Plan& plan, uint32_t q_tile, uint32_t k_tiles, uint32_t v_tiles,
                                           uint64_t* q_full, uint64_t* q_empty, uint64_t* k_full, uint64_t* k_empty,
                                           uint64_t* v_full, uint64_t* v_empty, volatile Sm90Item* slot) {
  using Shape = Sm90Shape<D>;
  constexpr int kKeys = Shape::kKeys;
  const PrefillParams& p = plan.p;
  const int lane = threadIdx.x % 32;
  if (lane == 0) {
    prefetch_map(&plan.q);
    prefetch_map(&plan.k);
    prefetch_map(&plan.v);
  }
  const int pieces = kKeys / plan.piece_keys, chunk = lane / pieces, piece = lane % pieces;
  const uint32_t place = chunk * (kKeys * 128) + piece * plan.piece_keys * 128, piece_bytes = plan.piece_keys * 128;
  const bool mine = chunk < Shape::kChunks;
  asm volatile("fence.proxy.async;" ::: "memory");  // queries and keys were written by ordinary stores

  Roster roster;
  roster.start(p, D * 4);
  uint32_t q_parity = 1;
  Ring k_ring, v_ring;
  k_ring.parity = v_ring.parity = 1;
  for (;;) {
    Sm90Item item;
    int sequence, which, group;
    const bool more = roster.next(p, sequence, which, group);
    barrier_wait(q_empty, q_parity);
    q_parity ^= 1;
    if (!more) {
      if (lane == 0) {
        slot->tile.sequence = -1;
        barrier_arrive(q_full);
      }
      return;
    }
    item.tile.set(p, sequence, which);
    item.head0 = group * p.pack;
    const Tile& tile = item.tile;
    if (lane == 0) {
      slot->tile.sequence = tile.sequence;
      slot->tile.token = tile.token;
      slot->tile.count = tile.count;
      slot->tile.position = tile.position;
      slot->tile.seq_len = tile.seq_len;
      slot->tile.begin = tile.begin;
      slot->tile.end = tile.end;
      slot->head0 = item.head0;
      barrier_expect(q_full, Shape::kChunks * p.pack * p.tile_tokens * 128);
    }
    __syncwarp();
    if (lane < Shape::kChunks)
      load_box_3d(q_tile + lane * (kSm90Rows * 128), &plan.q, q_full, lane * 64, item.head0, tile.token);

    const int kv_head = item.head0 / p.heads_per_kv;
    const int num_tiles = num_key_tiles<D>(tile), first = first_tile<D>(tile);
    const int32_t* table = p.block_table + sequence * p.table_stride;
    // block of this lane's piece of key tile t; -1: no key of it is read
    const auto look_up = [&](int t) {
      const int key = t * kKeys + piece * plan.piece_keys;
      return mine && key < tile.seq_len && key + plan.piece_keys > tile.begin ? __ldg(table + key / p.block_size) : -1;
    };
    const auto load = [&](int t, int block, uint32_t tiles, const CUtensorMap* map, uint64_t* full, uint64_t* empty,
                          Ring& ring) {
      const int boxes = __popc(__ballot_sync(0xffffffffu, block >= 0));
      barrier_wait(empty + ring.stage, ring.parity);
      if (lane == 0) barrier_expect(full + ring.stage, boxes * piece_bytes);
      __syncwarp();
      if (block >= 0)
        load_box_4d(tiles + ring.stage * Shape::kTileBytes + place, map, full + ring.stage, chunk * 64,
                    (t * kKeys + piece * plan.piece_keys) % p.block_size, kv_head, block);
      ring.advance<Shape::kStages>();
    };
    int block = look_up(first + num_tiles - 1), before = -1;
    for (int t = first + num_tiles - 1; t >= first; --t) {
      const int next = t > first ? look_up(t - 1) : -1;
      load(t, block, k_tiles, &plan.k, k_full, k_empty, k_ring);
      if (t != first + num_tiles - 1) load(t + 1, before, v_tiles, &plan.v, v_full, v_empty, v_ring);
      before = block;
      block = next;
    }
    if (num_tiles > 0) load(first, before, v_tiles, &plan.v, v_full, v_empty, v_ring);
  }
}

// Zeros for keys of a tile of V that no query may see: what lies there may be NaN, and 0 * NaN is no zero. By both
// warpgroups.
template <int D>
__device__ __forceinline__ void clear_values(uint32_t values, const Tile& tile, int key0) {
  using Shape = Sm90Shape<D>;
  constexpr int kKeys = Shape::kKeys;
  for (int row = threadIdx.x / 8; row < kKeys; row += 32) {
    if (key0 + row >= tile.begin && key0 + row < tile.seq_len) continue;
#pragma unroll
    for (int chunk = 0; chunk < Shape::kChunks; ++chunk)
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(values + chunk * (kKeys * 128) + row * 128 +
                                                                    threadIdx.x % 8 * 16),
                   "r"(0)
                   : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  sync_some(3, 256);
}

// Four registers of four neighbouring lanes, transposed.
__device__ __forceinline__ void transpose_quad(uint32_t (&u)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? u[i] : u[i + 1], 1);
    u[i] = odd ? got : u[i];
    u[i + 1] = odd ? u[i + 1] : got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? u[i] : u[i + 2], 2);
    u[i] = upper ? got : u[i];
    u[i + 2] = upper ? u[i + 2] : got;
  }
}

// What a thread knows of its two rows, 8 apart.
struct RowState {
  int low[2], high[2];  // first and last key
  float most[2], sum[2];
};

// Scores of kKeys keys from key0 on -> probabilities (not yet divided by their sum), in place; kept: what sums so far
// are multiplied with.
template <int kKeys>
__device__ __forceinline__ void soften(float (&s)[kKeys / 2], RowState& rows, float (&kept)[2], const PrefillParams& p,
                                       float inner_scale, float scale, int key0, bool masked) {
  if (p.softcap > 0.f) {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) s[i] = cap(s[i] * inner_scale, p.softcap);
  }
  if (masked) {
    const int corner = key0 + threadIdx.x % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int low = rows.low[h] - corner, high = rows.high[h] - corner;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (8 * j + c < low || 8 * j + c > high) s[4 * j + 2 * h + c] = -INFINITY;
      }
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float higher = rows.most[h];
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) higher = fmaxf(higher, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
    higher = fmaxf(higher, __shfl_xor_sync(0xffffffffu, higher, 1));
    higher = fmaxf(higher, __shfl_xor_sync(0xffffffffu, higher, 2));
    const float safe = higher == -INFINITY ? 0.f : higher * scale;
    kept[h] = exp2_fast(rows.most[h] * scale - safe);
    rows.most[h] = higher;
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int i = 4 * j + 2 * h + c;
        s[i] = exp2_fast(s[i] * scale - safe);
        sum += s[i];
      }
    }
    rows.sum[h] = rows.sum[h] * kept[h] + sum;
  }
}

template <class T, int D>
__device__ __forceinline__ void multiply_queries(float (&s)[Sm90Shape<D>::kKeys / 2], uint64_t q, uint64_t k) {
  using Shape = Sm90Shape<D>;
  wgmma_hold(s);
  wgmma_begin();
#pragma unroll
  for (int chunk = 0; chunk < Shape::kChunks; ++chunk) {
#pragma unroll
    for (int step = 0; step < 4; ++step)
      Wgmma<T, Shape::kKeys>::run(s, q + chunk * (kSm90Rows * 8) + step * 2, k + chunk * (Shape::kKeys * 8) + step * 2,
                                  chunk + step > 0);
  }
  wgmma_commit();
}

template <class T, int D>
__device__ __forceinline__ void multiply_values(float (&o)[D / 2], uint32_t (&weights)[Sm90Shape<D>::kKeys / 16][4],
                                                uint64_t v) {
  wgmma_hold(o);
#pragma unroll
  for (int k = 0; k < Sm90Shape<D>::kKeys / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(weights[k][i])::"memory");
  }
  wgmma_begin();
#pragma unroll
  for (int k = 0; k < Sm90Shape<D>::kKeys / 16; ++k) WgmmaRegisters<T, D>::run(o, weights[k], v + k * 128);
  wgmma_commit();
}

template <class T, int kKeys>
__device__ __forceinline__ void pack_weights(uint32_t (&weights)[kKeys / 16][4], const float (&s)[kKeys / 2]) {
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) weights[k][i] = pack_pair<T>(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
  }
}

// o / sum -> out, 16 bytes per lane; lse.
template <class T, int D>
__device__ __forceinline__ void store_rows(float (&o)[D / 2], RowState& rows, const PrefillParams& p, const Tile& tile,
                                           int head0, float scale, float v_scale) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = rows.sum[h];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const int row = threadIdx.x / 32 * 16 + lane / 4 + 8 * h;
    const bool valid = row < tile.count * p.pack;
    const int64_t token = tile.token + row / p.pack;
    const int head = head0 + row % p.pack;
    float factor = 0.f;
    if (valid) {
      float lse;
      factor = settle(p, head, rows.most[h] * scale, sum, v_scale, &lse);
      if (p.lse != nullptr && lane % 4 == 0) p.lse[token * p.num_heads + head] = lse;
    }
    T* out = static_cast<T*>(p.out) + token * p.out_strides[0] + head * p.out_strides[1] + lane % 4 * 8;
#pragma unroll
    for (int quad = 0; quad < D / 32; ++quad) {
      uint32_t u[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (4 * quad + i) + 2 * h;
        u[i] = pack_pair<T>(o[at] * factor, o[at + 1] * factor);
      }
      transpose_quad(u);
      if (valid) *reinterpret_cast<uint4*>(out + quad * 32) = make_uint4(u[0], u[1], u[2], u[3]);
    }
  }
}

template <class T, int D>
__global__ void __launch_bounds__(kSm90Threads, 1) prefill_sm90_kernel(const __grid_constant__ Sm90Plan plan) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = Sm90Shape<D>;
  constexpr int kKeys = Shape::kKeys, kStages = Shape::kStages;
  extern __shared__ char raw[];
  __shared__ Sm90Item slot;
  char* base = raw + (1024 - shared_address(raw) % 1024) % 1024;
  const uint32_t q_tile = shared_address(base), k_tiles = q_tile + Shape::kQueryBytes;
  const uint32_t v_tiles = k_tiles + kStages * Shape::kTileBytes;
  uint64_t* q_full = reinterpret_cast<uint64_t*>(base + Shape::kQueryBytes + 2 * kStages * Shape::kTileBytes);
  uint64_t *q_empty = q_full + 1, *k_full = q_full + 2, *k_empty = k_full + kStages;
  uint64_t *v_full = k_empty + kStages, *v_empty = v_full + kStages;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    barrier_init(q_full, 1);
    barrier_init(q_empty, 8);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(k_full + i, 1);
      barrier_init(v_full + i, 1);
      barrier_init(k_empty + i, 8);
      barrier_init(v_empty + i, 8);
    }
    barrier_init_done();
  }
  __syncthreads();
  launch_successor();
  wait_predecessor();

  if (warp >= 8) {
    give_registers<Shape::kLoaderRegisters>();
    if (warp == 8)
      load_items<D>(plan, q_tile, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty, &slot);
  } else {
    take_registers<Shape::kRegisters>();
    const PrefillParams& p = plan.p;
    const int group = warp / 4;
    const auto release = [&](uint64_t* barrier) {
      __syncwarp();
      if (lane == 0) barrier_arrive(barrier);
    };
    // turns: barrier 1 + group lets a warpgroup go
    const auto wait_turn = [&] {
      if (Shape::kTurns) sync_some(1 + group, 256);
    };
    const auto give_turn = [&] {
      if (Shape::kTurns) asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory");
    };
    if (group == 1) give_turn();
    const uint64_t q = wgmma_tile(base + group * 8192);
    uint32_t q_parity = 0;
    Ring k_ring, v_ring;
    for (;;) {
      barrier_wait(q_full, q_parity);
      q_parity ^= 1;
      const Tile tile = slot.tile;
      const int head0 = slot.head0;
      if (tile.sequence < 0) break;
      const int kv_head = head0 / p.heads_per_kv;
      const float k_scale = p.k_scale != nullptr ? p.k_scale[kv_head * p.k_scale_stride] : 1.f;
      const float v_scale = p.v_scale != nullptr ? p.v_scale[kv_head * p.v_scale_stride] : 1.f;
      const float inner_scale = p.softcap > 0.f ? p.scale * k_scale / p.softcap : 1.f;
      const float scale = p.softcap > 0.f ? kLog2E : p.scale * k_scale * kLog2E;  // of scores, to base 2
      RowState rows;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int position = tile.position + (warp * 16 + lane / 4 + 8 * h) / p.pack;
        rows.low[h] = first_key(p, position);
        rows.high[h] = last_key(p, tile, position);
        rows.most[h] = -INFINITY;
        rows.sum[h] = 0.f;
      }
      // keys that all rows see need no mask
      const int clear_begin = first_key(p, tile.position + tile.count - 1);
      const int clear_end = last_key(p, tile, tile.position) + 1;
      float o[D / 2];
#pragma unroll
      for (int i = 0; i < D / 2; ++i) o[i] = 0.f;

      const int num_tiles = num_key_tiles<D>(tile);
      int key0 = (first_tile<D>(tile) + num_tiles - 1) * kKeys;
      if (num_tiles == 0) {
        release(q_empty);
      } else {
        float s[kKeys / 2], kept[2];
        uint32_t weights[kKeys / 16][4];
        const auto has_foreign_keys = [&](int from) { return from < tile.begin || from + kKeys > tile.seq_len; };
        const auto values = [&] { return base + Shape::kQueryBytes + (kStages + v_ring.stage) * Shape::kTileBytes; };
        const auto keys = [&] { return wgmma_tile(base + Shape::kQueryBytes + k_ring.stage * Shape::kTileBytes); };

        barrier_wait(k_full + k_ring.stage, k_ring.parity);
        multiply_queries<T, D>(s, q, keys());
        wgmma_wait<0>();
        wgmma_hold(s);
        release(k_empty + k_ring.stage);
        k_ring.advance<kStages>();
        if (num_tiles == 1) release(q_empty);
        soften<kKeys>(s, rows, kept, p, inner_scale, scale, key0, key0 < clear_begin || key0 + kKeys > clear_end);
        pack_weights<T, kKeys>(weights, s);
        // outside of the turns: the other warpgroup may wait for one
        if (num_tiles > 1 && has_foreign_keys(key0)) {
          barrier_wait(v_full + v_ring.stage, v_ring.parity);
          clear_values<D>(shared_address(values()), tile, key0);
        }
#pragma unroll 1
        for (int n = 1; n < num_tiles; ++n) {
          key0 -= kKeys;
          barrier_wait(k_full + k_ring.stage, k_ring.parity);
          wait_turn();
          multiply_queries<T, D>(s, q, keys());
          barrier_wait(v_full + v_ring.stage, v_ring.parity);
          multiply_values<T, D>(o, weights, columns_tile(values(), kKeys * 128));
          give_turn();
          wgmma_wait<1>();
          wgmma_hold(s);
          release(k_empty + k_ring.stage);
          k_ring.advance<kStages>();
          soften<kKeys>(s, rows, kept, p, inner_scale, scale, key0, key0 < clear_begin || key0 + kKeys > clear_end);
          // all of the softmax before the wait; it takes a branch to keep the assembler from waiting first
          wgmma_hold(s);
          wgmma_hold(kept);
          if (n == num_tiles - 1) release(q_empty);
          wgmma_wait<0>();
          wgmma_hold(o);
          release(v_empty + v_ring.stage);
          v_ring.advance<kStages>();
#pragma unroll
          for (int i = 0; i < D / 2; ++i) o[i] *= kept[i / 2 % 2];
          pack_weights<T, kKeys>(weights, s);
        }
        barrier_wait(v_full + v_ring.stage, v_ring.parity);
        if (has_foreign_keys(key0)) clear_values<D>(shared_address(values()), tile, key0);
        multiply_values<T, D>(o, weights, columns_tile(values(), kKeys * 128));
        wgmma_wait<0>();
        wgmma_hold(o);
        release(v_empty + v_ring.stage);
        v_ring.advance<kStages>();
      }
      store_rows<T, D>(o, rows, p, tile, head0, scale, v_scale);
    }
  }
#endif
}

}  // namespace lamella::prefill
