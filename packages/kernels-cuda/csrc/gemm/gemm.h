// Matrix product of activations and weights with what surrounds it in a transformer fused to both ends.
//
//   sum[m, n]  = sum over k of x[m, k] * w[n, k]
//   sum[m, n] *= 1 / sqrt(sum over p of squares_in[p, m] / K + eps)           with squares_in: RMSNorm of x
//   sum[m, n] *= x_scale[m] * w_scale[n]   or block scales                     fp8
//   y[m, n]    = sum + bias[n]
//   gate_up:     y[m, n] = act(sum of gate row n) * (sum of up row n); w's rows are packed, see lamella_gemm_gate_row
//   out[m, n]  = y, or round(y) + residual[m, n] with residual (out may be residual)
//   scaled_out[m, n] = out[m, n] * gain[n]                                     with gain: the next RMSNorm's weight
//   squares_out[p, m] = sum over the columns n of tile p of out[m, n]^2        with squares_out, [N / 128, M]
//
// RMSNorm thus costs no kernel of its own: who writes the residual stream writes it times the next norm's weight and
// leaves sums of squares, and the next product scales its result. Rounding is that of the norm rounded once.
#pragma once

#include <cstdint>

#include "device/status.h"

enum LamellaGemmAct { kActNone = 0, kActSilu = 1, kActGeluTanh = 2, kActGelu = 3 };

typedef struct LamellaGemm {
  const void* x;  // [M, K]
  const void* w;  // [N, K]; [2 N, K] packed with act
  void* out;      // [M, N]
  int64_t m, n, k;
  int64_t x_stride, w_stride, out_stride;  // of rows, in elements
  int elem;      // of x and w: f16, bf16 or e4m3 (codes of device/dtype.cuh)
  int out_elem;  // of out, bias, residual, gain and scaled_out: f16 or bf16
  int act;       // LamellaGemmAct; not none: gate_up
  const void* bias;      // [N] or null
  const void* residual;  // [M, N] or null
  int64_t residual_stride;
  const float* squares_in;  // [num_squares_in, M] or null
  int64_t num_squares_in;
  float eps;
  const void* gain;  // [N] or null
  void* scaled_out;  // [M, N] with gain
  int64_t scaled_out_stride;
  float* squares_out;        // [ceil(N / 128), M] or null
  const float* x_scale;      // fp8: [M], or [M, ceil(K / 128)] with w_scale_block
  const float* w_scale;      // fp8: [N] (packed as w), or [ceil(N / 128), ceil(K / 128)] with w_scale_block
  int scale_block;           // 0 or 128
  const void* prefetch;      // null, or memory to bring into L2 when the last weights are on their way
  int64_t prefetch_bytes;
  int portable;              // 1: not the Hopper kernel
} LamellaGemm;

// Row of the packed weight in which row n of the gate lies; the up row lies 64 rows behind it. Tiles of 128 rows hold 64
// gate rows and their 64 up rows.
LAMELLA_API int64_t lamella_gemm_gate_row(int64_t n);

// Bytes of workspace for products of up to m rows on the current device. It starts as zeros and is left as zeros.
LAMELLA_API int64_t lamella_gemm_workspace(int64_t m);

// One launch. workspace: used by this stream only while the kernel runs.
LAMELLA_API int lamella_gemm(const LamellaGemm* gemm, void* workspace, int64_t workspace_bytes, void* stream);
