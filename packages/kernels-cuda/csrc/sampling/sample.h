// Choosing tokens: greedy, or min-p / top-k / top-p with Gumbel noise, without sorting the vocabulary; log-probabilities
// of the best tokens. Rows of at most 262,144 logits, float32 or bfloat16, `stride` elements apart, of any alignment.
#pragma once

#include <cstdint>

#include "device/status.h"

// Bytes that the functions below need at `workspace` (aligned to 16), whatever the values.
LAMELLA_API int64_t lamella_sampling_workspace_bytes(int64_t num_rows, int64_t vocab_size);

// Null pointers: off for all rows. Off values: temperature 0 or less (greedy), top_k 0 or less, top_p 1 or more, min_p 0.
struct LamellaSample {
  const void* logits;
  int64_t stride;
  int64_t num_rows, vocab_size;
  const int32_t* rows;  // [num_rows] where the parameters of each row lie; negative: padding, gives id 0. null: in order
  const float* temperature;
  const int32_t* top_k;
  const double* top_p;
  const double* min_p;
  const uint64_t* seeds;
  const int32_t* positions;  // [num_rows] per row of logits
  uint32_t salt;
  int32_t* ids;  // [num_rows]
  uint8_t* status;  // [num_rows] 0, 1: NaN, 2: +inf, 3: nothing but -inf; the id is 0 then. May be null
  float* logprobs;  // [num_rows] of the chosen tokens, at temperature 1, NaN where the row failed. May be null
  void* workspace;
  int elem;
};

LAMELLA_API int lamella_sample(const LamellaSample* what, void* stream);

struct LamellaTopLogprobs {
  const void* logits;
  int64_t stride;
  int64_t num_rows, vocab_size;
  int64_t num_best;  // at most 1,024 and vocab_size
  int32_t* best_ids;  // [num_rows, num_best], larger first, lower id first among equals
  float* best;  // [num_rows, num_best]
  const int32_t* token_ids;  // [num_rows], may be null: then chosen and ranks are, too
  float* chosen;  // [num_rows] log-probability of token_ids
  int32_t* ranks;  // [num_rows] how many logits are >= that of token_ids
  float* logsumexp;  // [num_rows], may be null
  void* workspace;
  int elem;
};

// NaN, and ids and ranks 0, where a row has NaN, +inf or nothing finite.
LAMELLA_API int lamella_top_logprobs(const LamellaTopLogprobs* what, void* stream);
