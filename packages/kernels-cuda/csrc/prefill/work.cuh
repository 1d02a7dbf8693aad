// How the work of prefill is cut, for both kernels.
//
// A tile is pack * tokens rows: the `pack` query heads of one kv head (all of them, where they fit) for some
// neighbouring tokens of one sequence, so that short extensions fill a tile and its keys are read once for all heads.
//
//   row r of a tile   token r / pack, head r % pack
#pragma once

#include <cstdint>

#include "device/dtype.cuh"

namespace lamella::prefill {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

struct PrefillParams {
  void* out;
  float* lse;
  const void* q;
  const void* k_cache;
  const void* v_cache;
  const int32_t* block_table;
  const int32_t* cu_q;
  const int32_t* seq_lens;
  const float* sinks;
  const float* k_scale;
  const float* v_scale;
  int64_t out_strides[2], q_strides[2], k_strides[3], v_strides[3], table_stride;  // elements
  int batch, num_heads, heads_per_kv, pack, tile_tokens, head_groups, block_size, window;
  int k_scale_stride, v_scale_stride;
  float scale, softcap;
  bool causal;
};

// Heads of a tile: the largest divisor of a kv head's query heads that fits the rows.
inline int heads_per_tile(int heads_per_kv, int rows) {
  int pack = heads_per_kv < rows ? heads_per_kv : rows;
  while (heads_per_kv % pack != 0) --pack;
  return pack;
}

// One tile's tokens and the keys that any of them sees.
struct Tile {
  int sequence, token, count;  // first token, in the batch; tokens
  int position;                // of the first token among the sequence's keys; may be negative
  int seq_len;
  int begin, end;              // keys

  __device__ __forceinline__ void set(const PrefillParams& p, int b, int tile) {
    sequence = b;
    const int first = p.cu_q[b], n = p.cu_q[b + 1] - first;
    seq_len = max(p.seq_lens[b], 0);
    token = first + tile * p.tile_tokens;
    count = min(n - tile * p.tile_tokens, p.tile_tokens);
    position = seq_len - n + tile * p.tile_tokens;
    end = p.causal ? min(position + count, seq_len) : seq_len;
    begin = p.window > 0 ? max(position - p.window + 1, 0) : 0;
  }
};

__device__ __forceinline__ int tiles_of(const PrefillParams& p, int b) {
  return b < p.batch ? max(p.cu_q[b + 1] - p.cu_q[b] + p.tile_tokens - 1, 0) / p.tile_tokens : 0;
}

// Keys that the token at a position sees are [first_key, last_key].
__device__ __forceinline__ int last_key(const PrefillParams& p, const Tile& tile, int position) {
  return p.causal ? min(position, tile.seq_len - 1) : tile.seq_len - 1;
}
__device__ __forceinline__ int first_key(const PrefillParams& p, int position) {
  return p.window > 0 ? position - p.window + 1 : 0;
}

// What a row's sum of P V is multiplied with, the sink and v_scale included; lse (natural). most: base 2.
__device__ __forceinline__ float settle(const PrefillParams& p, int head, float most, float sum, float v_scale,
                                        float* lse) {
  *lse = -INFINITY;
  if (sum == 0.f) return 0.f;  // NaN goes on
  float kept = 1.f;
  if (p.sinks != nullptr) {
    const float sink = p.sinks[head] * kLog2E, higher = fmaxf(most, sink);
    kept = exp2f(most - higher);
    sum = sum * kept + exp2f(sink - higher);
    most = higher;
  }
  *lse = (most + log2f(sum)) * kLn2;
  return kept / sum * v_scale;
}

// c tanh(x / c), with x / c given: exact enough near 0, where 1 - 2 / (1 + e^2x) cancels to an absolute error of 1e-7.
__device__ __forceinline__ float cap(float x_over_c, float c) {
  const float power = x_over_c * (2.f * kLog2E);
  return c - 2.f * c * __fdividef(1.f, 1.f + exp2f(power > 120.f ? 120.f : power));  // NaN goes on
}

}  // namespace lamella::prefill
