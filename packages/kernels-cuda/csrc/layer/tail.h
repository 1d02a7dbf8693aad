// A dense layer's tail for a few tokens, as one kernel: what lies between a layer's attention and the next layer's.
//
//   residual += attended @ w_o^T
//   inner     = silu(gate) * up,   gate and up = rms_norm(residual, mlp_norm) @ w_gate_up^T
//   residual += inner @ w_down^T
//   qkv       = rms_norm(residual, next_norm) @ w_qkv^T          with w_qkv
//
// Products are summed in float32 and rounded where separate kernels would write them; norms as lamella_rms_norm. A row
// does not depend on the other rows or on their number.
#pragma once

#include <cstdint>

#include "device/status.h"

typedef struct LamellaLayerTail {
  const void* attended;   // [M, A]
  const void* w_o;        // [H, A]
  void* residual;         // [M, H]
  const void* mlp_norm;   // [H]
  const void* w_gate_up;  // [2 I, H], gate rows first
  const void* w_down;     // [H, I]
  const void* next_norm;  // [H] with w_qkv
  const void* w_qkv;      // [Q, H] or null
  void* qkv;              // [M, Q] with w_qkv
  int64_t m, a, h, i, q;
  int64_t attended_stride, residual_stride, qkv_stride;  // of rows, in elements
  int elem;                // f16 or bf16, of everything
  float eps;
  const void* prefetch;    // null, or memory to bring into L2 when the last weights are on their way
  int64_t prefetch_bytes;
} LamellaLayerTail;

// Most rows that the current device's kernel takes for these widths; 0: it has none. A, H and I are multiples of 512, A
// and H up to 4,096.
LAMELLA_API int64_t lamella_layer_tail_rows(int64_t a, int64_t h, int64_t i, int64_t q);

// Bytes of workspace; the first lamella_layer_tail_zeroed() of them start as zeros, and belong to the kernel from then
// on.
LAMELLA_API int64_t lamella_layer_tail_workspace(int64_t i);
LAMELLA_API int64_t lamella_layer_tail_zeroed(void);

// One launch of one block per multiprocessor, which wait for each other: one launch at a time on a device.
LAMELLA_API int lamella_layer_tail(const LamellaLayerTail* tail, void* workspace, int64_t workspace_bytes, void* stream);
