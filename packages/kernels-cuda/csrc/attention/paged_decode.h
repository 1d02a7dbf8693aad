// Attention of a few new tokens per sequence over a paged KV cache, split over the keys so that every SM has as much to
// do whatever the lengths are.
#pragma once

#include <cstdint>

#include "device/status.h"

// All strides in elements.
struct LamellaPagedDecode {
  void* out;                   // [batch, num_queries, num_heads, head_dim], type of q
  float* lse;                  // [batch, num_queries, num_heads], natural logarithm; null: not wanted
  const void* q;               // [batch, num_queries, num_heads, head_dim]
  const void* k_cache;         // element (block, head, key, d) at block * s[0] + head * s[1] + key * s[2] + d
  const void* v_cache;
  const int32_t* block_table;  // [batch, max_blocks]
  const int32_t* seq_lens;     // [batch]
  const float* sinks;          // [num_heads], null: none
  const float* k_scale;        // [1] or [num_kv_heads], null: 1
  const float* v_scale;
  int32_t* schedule;           // of lamella_decode_schedule() for the same seq_lens, num_queries and window
  float* workspace;            // lamella_paged_decode_workspace() bytes, any content
  int64_t batch, num_queries, num_heads, num_kv_heads, head_dim, block_size, num_blocks, num_parts, window;
  int64_t out_strides[3], q_strides[3], k_strides[3], v_strides[3], table_stride;
  int32_t k_scale_stride, v_scale_stride;  // 0 for one scale, 1 for one per kv head
  float scale, softcap;        // softcap 0: none
  int32_t q_elem, cache_elem;  // f16 or bf16; the same, or f8e4m3
  // Not 0: the kernel before this one on the stream is lamella_rope_write() of this step, and what is read beside q and
  // the num_queries newest keys of each sequence was written before that one. Reading then begins while it runs.
  int32_t follows_write;
};

// out = softmax(scale * q k) v over the keys that a query sees. A query that sees none gives 0 and lse -inf. Head dims
// 64, 80, 96, 128, 192, 256; block_size % 16 == 0. Two kernels must not use one schedule at the same time.
LAMELLA_API int lamella_paged_decode(const LamellaPagedDecode* what, void* stream);

// (sequence, group) pairs per sequence, as lamella_decode_schedule() wants them.
LAMELLA_API int64_t lamella_decode_groups(int64_t num_queries, int64_t num_heads, int64_t num_kv_heads);

LAMELLA_API int64_t lamella_paged_decode_workspace(int64_t num_queries, int64_t num_heads, int64_t num_kv_heads,
                                                   int64_t head_dim, int64_t num_parts);
