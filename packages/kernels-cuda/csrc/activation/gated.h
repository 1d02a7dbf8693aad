// Gated activations act(gate) * up over rows [gate | up], plain or quantised to fp8, and the quantisers alone.
#pragma once

#include <cstdint>

#include "device/status.h"

// Codes of act. none: x itself, for quantisers.
enum LamellaAct { kActNone = 0, kActSilu = 1, kActGelu = 2, kActGeluTanh = 3 };

// How gates and ups share a row of 2 * width: halves [gate | up], or 64 gates, their 64 ups, and so on.
enum LamellaGateLayout { kHalves = 0, kTile64 = 64 };

// out[r, i] = round(act(gate i of x[r])) * (up i of x[r]), i < width. Strides of rows in elements; everything starts at
// multiples of 16 bytes, width * size of elem as well; in tiles width % 64 == 0. act: not none.
LAMELLA_API int lamella_gated(void* out, const void* x, int64_t num_rows, int64_t width, int64_t out_stride,
                              int64_t x_stride, int layout, int act, int elem, void* stream);

// y as above, or x itself with act none (silu or none here); out[r] = saturate(y / scale) in e4m3,
// scale[r] = max(max|y|/448, 1 / (448 * 512)). elem: f16 or bf16.
LAMELLA_API int lamella_act_fp8_token(void* out, float* scale, const void* x, int64_t num_rows, int64_t width,
                                      int64_t out_stride, int64_t x_stride, int layout, int act, int elem,
                                      void* stream);

// One scale per 128 neighbours: max(max|y|, 1e-10) / 448, rounded up to a power of two if pow2, at
// scale[r * scale_row_stride + group * scale_group_stride]. width % 128 == 0.
LAMELLA_API int lamella_act_fp8_group(void* out, float* scale, const void* x, int64_t num_rows, int64_t width,
                                      int64_t out_stride, int64_t x_stride, int64_t scale_row_stride,
                                      int64_t scale_group_stride, int layout, int pow2, int act, int elem,
                                      void* stream);
