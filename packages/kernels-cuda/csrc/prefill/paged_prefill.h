// Attention of many new tokens per sequence (prefill, extend) over a paged KV cache that holds them and a prefix.
#pragma once

#include <cstdint>

#include "device/status.h"

// All strides in elements.
struct LamellaPagedPrefill {
  void* out;                   // [num_tokens, num_heads, head_dim], type of q
  float* lse;                  // [num_tokens, num_heads], natural logarithm; null: not wanted
  const void* q;               // [num_tokens, num_heads, head_dim]
  const void* k_cache;         // element (block, head, key, d) at block * s[0] + head * s[1] + key * s[2] + d
  const void* v_cache;
  const int32_t* block_table;  // [batch, max_blocks]
  const int32_t* cu_q;         // [batch + 1]: tokens of sequence b are [cu_q[b], cu_q[b + 1])
  const int32_t* seq_lens;     // [batch], the new tokens included
  const float* sinks;          // [num_heads], null: none
  const float* k_scale;        // [1] or [num_kv_heads], null: 1
  const float* v_scale;
  int64_t batch, num_tokens, num_heads, num_kv_heads, head_dim, block_size, num_blocks, max_q_len, window;
  int64_t out_strides[2], q_strides[2], k_strides[3], v_strides[3], table_stride;
  int32_t k_scale_stride, v_scale_stride;  // 0 for one scale, 1 for one per kv head
  float scale, softcap;                    // softcap 0: none
  int32_t causal;
  int32_t q_elem, cache_elem;  // f16 or bf16; the same, or f8e4m3
  int32_t kernel;              // 0: the fastest that serves, 1: the portable one, 2: Hopper's or kUnsupported
};

// out = softmax(scale * q k) v over the keys that a query sees: with causal, query i of n up to key seq_len - n + i,
// with a window that many of them; else all seq_len. A query that sees none gives 0 and lse -inf. Rows of out beyond
// cu_q[batch] are left alone. max_q_len: no sequence has more new tokens. scale > 0. Head dims 64, 80, 96, 128, 192,
// 256; block_size % 16 == 0.
LAMELLA_API int lamella_paged_prefill(const LamellaPagedPrefill* what, void* stream);
