// Between a checkpoint's rows and packed panels.
#pragma once

#include "host/format.h"

namespace lamella::host {

// Rows as they lie in the file ([rows] of row_stride bytes each) into panels (num_panels(rows) * panel_bytes). On all
// threads of the pool.
void pack_rows(Format format, int64_t rows, int64_t cols, const uint8_t* source, size_t row_stride, uint8_t* panels);

// One row of a packed matrix, dequantised and multiplied by scale. row in [0, matrix.rows).
void read_row(const Matrix& matrix, int64_t row, float scale, float* out);

float half_to_float(uint16_t half);
float bfloat_to_float(uint16_t bfloat);

}  // namespace lamella::host
