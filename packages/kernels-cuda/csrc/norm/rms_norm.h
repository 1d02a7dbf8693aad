// RMSNorm over rows, with or without the residual sum before it and fp8 quantisation behind it.
#pragma once

#include <cstdint>

#include "device/status.h"

// out[r] = norm(x[r]) with norm(y) = round(y * rsqrt(mean(y^2) + eps)) * weight, or * (1 + weight) in float32 before
// rounding if plus_one. With residual: residual[r] = x[r] + residual[r], rounded to its type, and that is normalised.
// elem: of x, residual, weight and out. Strides of rows in elements. width % (16 / size of elem) == 0.
LAMELLA_API int lamella_rms_norm(void* out, const void* x, void* residual, const void* weight, int64_t num_rows,
                                 int64_t width, int64_t out_stride, int64_t x_stride, int64_t residual_stride,
                                 float eps, int plus_one, int elem, void* stream);

// As above, and then out = saturate(norm / scale) in e4m3 with one scale per row: scale[r] = max(|norm|) / 448, at least
// 1 / (448 * 512).
LAMELLA_API int lamella_rms_norm_fp8(void* out, float* scale, const void* x, void* residual, const void* weight,
                                     int64_t num_rows, int64_t width, int64_t out_stride, int64_t x_stride,
                                     int64_t residual_stride, float eps, int plus_one, int elem, void* stream);
