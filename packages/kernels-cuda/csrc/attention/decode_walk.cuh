// What one block of paged decode works through: its part of the schedule, pair after pair, and loads that run ahead.
#pragma once

#include "attention/chunks.cuh"
#include "attention/fragments.cuh"
#include "device/launch.cuh"

namespace lamella::attention {

constexpr int kMaxRows = 64;  // query rows of one group
constexpr int kWarps = 4;
constexpr int kTileKeys = kChunkKeys / kWarps;

struct DecodeParams {
  void* out;
  float* lse;
  const void* q;
  const char* k_cache;
  const char* v_cache;
  const int32_t* block_table;
  const int32_t* seq_lens;
  const float* sinks;
  const float* k_scale;
  const float* v_scale;
  int32_t* schedule;
  float* partial_out;    // [2 * num_parts, group_rows, D]
  float2* partial_stats;  // [2 * num_parts, group_rows]: maximum (base 2), sum
  int64_t out_strides[3], q_strides[3];                           // elements
  int64_t k_block_bytes, k_head_bytes, v_block_bytes, v_head_bytes, table_stride;
  uint32_t k_key_bytes, v_key_bytes;
  int batch, num_queries, num_heads, heads_per_kv, groups_per_kv, num_groups, rows, group_rows, block_size, num_parts;
  int window;
  int64_t num_blocks;
  int k_scale_stride, v_scale_stride;
  float scale, softcap;
  bool q_bf16, follows_write;
};

// The pairs of a part. Both the loads and the arithmetic walk it, the loads some chunks ahead.
struct Walk {
  int sequence, group;
  int chunk, stop;  // chunks [chunk, stop) of this pair are ours, counted from key 0
  KeyRange keys;
  bool done;

  __device__ __forceinline__ void start(const DecodeParams& p, const int4& begin, const int4& end) {
    sequence = begin.x;
    group = begin.y;
    keys = visible_keys(begin.w, p.num_queries, p.window);
    enter(p, begin.z, end, false);
  }
  __device__ __forceinline__ void next(const DecodeParams& p, const int4& end) {
    const bool wraps = ++group == p.num_groups;
    if (wraps) {
      group = 0;
      ++sequence;
    }
    enter(p, 0, end, wraps);
  }

 private:
  __device__ __forceinline__ void enter(const DecodeParams& p, int skipped, const int4& end, bool other_sequence) {
    const bool last = sequence == end.x && group == end.y;
    done = sequence > end.x || (sequence == end.x && group > end.y) || (last && end.z == 0) || sequence >= p.batch;
    if (done) return;
    // from L2: what a block reads before wait_predecessor() may lie in L1 as an earlier kernel found it
    if (other_sequence) keys = visible_keys(__ldcg(p.seq_lens + sequence), p.num_queries, p.window);
    chunk = keys.first_chunk() + skipped;
    stop = keys.first_chunk() + (last ? end.z : keys.num_chunks());
  }
};

// Loads tile `warp` (16 keys) of each chunk into a ring of stages. kRowBytes: of a key. Rows are kStride apart, an odd
// number of 16-byte units, so that the 8 rows of an ldmatrix lie in different banks.
template <int kRowBytes>
struct Loader {
  static constexpr int kUnits = kRowBytes / 16, kStride = (kUnits | 1) * 16;
  static constexpr int kTileBytes = kTileKeys * kStride;
  static constexpr int kStageBytes = 2 * kWarps * kTileBytes;  // K tiles, then V tiles

  Walk walk;
  int base;   // chunk whose block lane 0 holds
  int block;  // lane i: of this warp's tile of chunk base + i
  int inner;  // and the tile's first key in it

  __device__ __forceinline__ void start(const DecodeParams& p, const int4& begin, const int4& end) {
    walk.start(p, begin, end);
    skip_empty(p, end);
    if (!walk.done) look_up(p);
  }

  // The next chunk into the stage at `stage` (this warp's K tile; V lies kWarps tiles on). Always commits one group.
  // kAhead: wait_predecessor() may be still to come, and comes here if the predecessor writes some of these keys.
  template <bool kAhead = false>
  __device__ __forceinline__ void issue(const DecodeParams& p, const int4& end, uint32_t stage) {
    if (!walk.done) {
      const int from = walk.chunk - base;
      const int64_t block_now = __shfl_sync(0xffffffffu, block, from);
      const int inner_now = __shfl_sync(0xffffffffu, inner, from);
      const int key = first_key(walk.chunk);
      if (key < walk.keys.end && key + kTileKeys > walk.keys.begin) {
        if (kAhead && p.follows_write && key + kTileKeys > walk.keys.end - p.num_queries) wait_predecessor();
        const int head = walk.group / p.groups_per_kv;
        const char* k = p.k_cache + block_now * p.k_block_bytes + head * p.k_head_bytes +
                        static_cast<int64_t>(inner_now) * p.k_key_bytes;
        const char* v = p.v_cache + block_now * p.v_block_bytes + head * p.v_head_bytes +
                        static_cast<int64_t>(inner_now) * p.v_key_bytes;
        const bool whole = key >= walk.keys.begin && key + kTileKeys <= walk.keys.end;
        copy_tile<false>(stage, k, p.k_key_bytes, 0, kTileKeys);
        if (whole) {
          copy_tile<false>(stage + kWarps * kTileBytes, v, p.v_key_bytes, 0, kTileKeys);
        } else {  // what lies there may be NaN, and 0 * NaN is no zero
          copy_tile<true>(stage + kWarps * kTileBytes, v, p.v_key_bytes, walk.keys.begin - key, walk.keys.end - key);
        }
      }
      if (++walk.chunk == walk.stop) {
        walk.next(p, end);
        skip_empty(p, end);
        if (!walk.done) look_up(p);
      } else if (walk.chunk == base + 32) {
        look_up(p);
      }
    }
    copy_commit();
  }

 private:
  static __device__ __forceinline__ int first_key(int chunk) {
    return chunk * kChunkKeys + static_cast<int>(threadIdx.x / 32) * kTileKeys;
  }

  __device__ __forceinline__ void skip_empty(const DecodeParams& p, const int4& end) {
    while (!walk.done && walk.chunk >= walk.stop) walk.next(p, end);
  }

  // Blocks of the next 32 chunks; needed only at the next issue().
  __device__ __forceinline__ void look_up(const DecodeParams& p) {
    base = walk.chunk;
    const int mine = base + static_cast<int>(threadIdx.x % 32), key = first_key(mine);
    block = inner = 0;
    if (mine < walk.stop && key < walk.keys.end && key + kTileKeys > walk.keys.begin) {
      const int place = key / p.block_size;
      inner = key - place * p.block_size;
      block = __ldcg(p.block_table + walk.sequence * p.table_stride + place);
    }
  }

  // kGuard: zeros instead of rows outside [low, high).
  template <bool kGuard>
  static __device__ __forceinline__ void copy_tile(uint32_t to, const char* from, uint32_t key_bytes, int low,
                                                   int high) {
    constexpr int kVecs = kTileKeys * kUnits;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < (kVecs + 31) / 32; ++j) {
      const int vec = lane + 32 * j;
      if (kVecs % 32 != 0 && vec >= kVecs) continue;
      const int row = vec / kUnits, unit = vec % kUnits;
      const char* source = from + (row * key_bytes + unit * 16);
      if constexpr (kGuard) {
        copy_async_or_zero(to + row * kStride + unit * 16, source, row >= low && row < high);
      } else {
        copy_async(to + row * kStride + unit * 16, source);
      }
    }
  }
};

}  // namespace lamella::attention
