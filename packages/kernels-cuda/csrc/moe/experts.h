// The experts of a mixture: out[t] = sum over j of weights[t, j] * expert(ids[t, j])(x[t]), with
// expert(e)(v) = w2[e] (silu(gate) * up), where gate = w13[e, :I] v and up = w13[e, I:] v.
#pragma once

#include <cstdint>

#include "device/status.h"

typedef struct LamellaMoe {
  void* out;             // [T, H]
  const void* x;         // [T, H]
  const void* w13;       // [E, 2 I, H], gate rows first
  const void* w2;        // [E, H, I]
  int32_t* ids;    // [T, k]; -1 or outside of the map: left out
  float* weights;  // [T, k]
  const int32_t* expert_map;  // [map_size]: id -> expert of w13 and w2, or -1; null: ids are theirs
  const float* w13_scale;     // fp8: [E, 2 I / 128, H / 128]
  const float* w2_scale;      // fp8: [E, H / 128, I / 128]
  int64_t num_tokens, hidden, inner;  // T, H, I
  int64_t num_experts, map_size;
  int64_t x_stride, out_stride;  // of rows, in elements
  int top_k;
  int elem;         // of x and out: f16 or bf16; bf16 with fp8
  int weight_elem;  // that, or e4m3 with scales of 128 x 128 blocks: x and silu(gate) * up are then quantised, too, by
                    // token and 128 columns
  int portable;     // 1: not the Hopper kernels
  void* residual;   // [T, H] or null; with it out is not written: residual = out + residual, both rounded
  void* normed;     // [T, H] with next_norm: norm(residual) as lamella_rms_norm() computes it, weight next_norm
  const void* next_norm;  // [H] or null: no norm
  int64_t residual_stride, normed_stride;
  float eps;
  const void* logits;  // [T, E or map_size] or null; with it ids and weights are written first, as lamella_moe_route()
                       // does with softmax and no groups
  int64_t logits_stride;
  int logits_elem, renormalize;
} LamellaMoe;

// Widest H with a residual.
LAMELLA_API int64_t lamella_moe_residual_width(void);

// Bytes of workspace on the current device, whatever the ids; the first lamella_moe_zeroed() of them start as zeros and
// are left as zeros, the rest may hold anything. More tokens can need less, where they take other tiles:
// lamella_moe_workspace_up_to() serves num_tokens and any number below.
LAMELLA_API int64_t lamella_moe_workspace(int64_t num_tokens, int64_t top_k, int64_t num_experts, int64_t map_size,
                                          int64_t hidden, int64_t inner, int fp8, int portable);
LAMELLA_API int64_t lamella_moe_workspace_up_to(int64_t num_tokens, int64_t top_k, int64_t num_experts,
                                                int64_t map_size, int64_t hidden, int64_t inner, int fp8, int portable);
LAMELLA_API int64_t lamella_moe_zeroed(void);

// Four launches: sort the pairs (left out for one or two tokens), two grouped products, weighted sum; fp8 has two more,
// logits one more (none for one or two tokens and up to 256 experts, all of them here).
// H and I are multiples of 8, with fp8 weights of 128. The result does not depend on timing.
LAMELLA_API int lamella_moe(const LamellaMoe* moe, void* workspace, int64_t workspace_bytes, void* stream);
