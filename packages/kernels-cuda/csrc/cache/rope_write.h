// What happens to q, k and v between their projection and attention: norm per head, rotation, the way into the cache.
#pragma once

#include <cstdint>

#include "device/status.h"

// Strides in elements. Null pointers leave a part out: q, k, v with their heads 0, weights, cos/sin, caches, scales.
struct LamellaRopeWrite {
  void* q;  // [num_tokens, num_q_heads, head_dim], changed in place
  void* k;  // [num_tokens, num_kv_heads, head_dim]
  const void* v;  // [num_tokens, num_kv_heads, head_dim]
  const void* q_weight;  // [head_dim] RMSNorm per head before the rotation
  const void* k_weight;
  const void* positions;  // [num_tokens] int32 or int64; outside of [0, num_positions): taken as the nearest one
  const float* cos;  // [num_positions, rotary_dim / 2], rows contiguous
  const float* sin;
  void* k_cache;  // element (block, head, place, i) at block * block_stride + head * head_stride + place * place_stride + i
  void* v_cache;
  const int64_t* slots;  // [num_tokens] block * block_size + place; negative: write nothing
  const float* k_scale;  // [1] or [num_kv_heads]: the cache holds k / scale; fp8 caches only
  const float* v_scale;
  int64_t num_tokens, num_q_heads, num_kv_heads, head_dim, rotary_dim, num_positions;
  int64_t q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride;
  int64_t k_block_stride, k_cache_head_stride, k_place_stride, v_block_stride, v_cache_head_stride, v_place_stride;
  int64_t block_size, num_blocks;
  int64_t scale_stride;  // 0: one scale for all heads
  float eps;
  int plus_one;  // the norm multiplies by (1 + weight)
  int interleaved;  // pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2)
  int keep_k;  // k is changed in place, too
  int wide_positions;  // int64
  int elem;  // of q, k, v and weights
  int cache_elem;  // the same or f8e4m3
  int aligned;  // every head of q, k, v and the caches, and the table's rows start at multiples of 16 bytes
};

LAMELLA_API int lamella_rope_write(const LamellaRopeWrite* what, void* stream);
