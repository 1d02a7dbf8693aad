// Changes to logits before tokens are chosen, in place: penalties and masks of allowed tokens.
#pragma once

#include <cstdint>

#include "device/status.h"

// Of the rows r of logits with parameters at q = rows[r] (null: r; negative: none): for tokens with counts[q, i] > 0 or
// the prompt's bit i % 32 of prompt[q, i / 32], x > 0 ? x / repetition[q] : x * repetition[q]; then minus frequency[q] *
// count; then minus presence[q] where the count is not 0. Null parameters are off. float32 arithmetic, rounded once.
LAMELLA_API int lamella_apply_penalties(void* logits, int64_t stride, int64_t num_rows, int64_t vocab_size,
                                        const int32_t* rows, const int32_t* counts, int64_t counts_stride,
                                        const int32_t* prompt, int64_t prompt_stride, const float* repetition,
                                        const float* frequency, const float* presence, int elem, void* stream);

// Row rows[m] (null: m; negative: skipped) of logits keeps token i only where bit i % 32 of words[m, i / 32] is set; the
// others become -inf.
LAMELLA_API int lamella_apply_bitmask(void* logits, int64_t stride, int64_t num_masks, int64_t vocab_size,
                                      const int32_t* rows, const int32_t* words, int64_t words_stride, int elem,
                                      void* stream);
