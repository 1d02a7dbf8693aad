// Attention over parts of the keys -> attention over all of them.
#pragma once

#include <cstdint>

#include "device/status.h"

// States s of num_states: o at first (s = 0) or at rest + (s - 1) * state_stride, rows row_stride apart, lse likewise;
// strides in elements. out = sum_s e^(lse_s - lse) o_s, lse = log sum_s e^lse_s (null: not wanted). States whose lse is
// -inf (or +inf, as some libraries say) count nothing whatever their o holds; a row with no other gives 0 and -inf.
// elem: of o and out. width * size of elem % 16 == 0.
LAMELLA_API int lamella_merge_states(void* out, float* lse, const void* first, const float* first_lse, const void* rest,
                                     const float* rest_lse, int64_t num_states, int64_t state_stride,
                                     int64_t lse_state_stride, int64_t num_rows, int64_t width, int64_t out_stride,
                                     int64_t first_stride, int64_t rest_stride, int elem, void* stream);
