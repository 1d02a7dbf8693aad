// The tail of a layer with a mixture of experts for a few tokens, as one kernel: what lies between the layer's attention
// and the next layer's.
//
//   residual += attended @ w_o^T
//   x         = rms_norm(residual, mlp_norm)
//   ids, weights: the top_k of softmax(x @ router^T), as lamella_moe_route() without bias and groups
//   residual += sum over j of weights[j] * w2[e] @ (silu(gate) * up),   gate and up = w13[e] @ x, e = ids[j]
//   qkv       = rms_norm(residual, next_norm) @ w_qkv^T                 with w_qkv
//
// Products are summed in float32, the experts' with their weights too, and rounded where separate kernels would write
// them; norms as lamella_rms_norm. A row does not depend on the other rows or on their number.
#pragma once

#include <cstdint>

#include "device/status.h"

typedef struct LamellaExpertsTail {
  const void* attended;   // [M, A]
  const void* w_o;        // [H, A]
  void* residual;         // [M, H]
  const void* mlp_norm;   // [H]
  const void* router;     // [E, H]
  const void* w13;        // [E, 2 I, H], gate rows first
  const void* w2;         // [E, H, I]
  const void* next_norm;  // [H] with w_qkv
  const void* w_qkv;      // [Q, H] or null
  void* qkv;              // [M, Q] with w_qkv
  int64_t m, a, h, i, q;
  int64_t attended_stride, residual_stride, qkv_stride;  // of rows, in elements
  int num_experts, top_k, renormalize;
  int elem;                // f16 or bf16, of everything
  float eps;
  const void* prefetch;    // null, or memory to bring into L2 when the last weights are on their way
  int64_t prefetch_bytes;
} LamellaExpertsTail;

// Most rows that the current device's kernel takes for these sizes; 0: it has none. A, H and I are multiples of 256, A
// and H up to 4,096, E is a multiple of 16 up to 256, top_k up to 8.
LAMELLA_API int64_t lamella_experts_tail_rows(int64_t a, int64_t h, int64_t i, int64_t q, int64_t num_experts,
                                              int64_t top_k);

// Bytes of workspace; the first lamella_layer_tail_zeroed() of them start as zeros, and belong to the kernel from then
// on.
LAMELLA_API int64_t lamella_experts_tail_workspace(int64_t i, int64_t num_experts, int64_t top_k);

// One launch of one block per multiprocessor, which wait for each other: one launch at a time on a device.
LAMELLA_API int lamella_experts_tail(const LamellaExpertsTail* tail, void* workspace, int64_t workspace_bytes,
                                     void* stream);
