// Sampling over whole vocabularies: argmax, min-p / top-k / top-p with Gumbel noise, log-probabilities, edits.
//
// A row of logits is read from memory once; a threshold search on float values replaces the sort. Ids are those of the
// torch reference (runner_v2/sampling/kernels.py), bit for bit: same order of tokens, same integer masses, same noise.
#pragma once

#include <cstdint>

namespace lamella::host::sampling {

enum Status : uint8_t { kOk = 0, kNotANumber = 1, kInfinite = 2, kNoneAllowed = 3 };

// count rows of vocab_size floats, `stride` floats apart.
struct Logits {
  float* data;
  int64_t stride;
  int64_t count;
  int32_t vocab_size;
  float* row(int64_t i) const { return data + i * stride; }
};

// Parameters of each row. Off values: temperature 0 (greedy), log_min_p -inf, top_k 0, top_p 1.
struct Choice {
  const float* temperature;
  const float* inverse_temperature;
  const double* log_min_p;
  const int32_t* top_k;
  const double* top_p;
  const uint64_t* keys;
  const int32_t* positions;
  uint32_t salt;
};

// Penalised tokens of `count` rows: row logits_rows[j] has the entries [start[j], start[j + 1]).
struct Penalties {
  int64_t count;
  const int32_t* logits_rows;
  const int64_t* start;
  const int32_t* token_ids;
  const int32_t* counts;
  const float* repetition;
  const float* frequency;
  const float* presence;
};

// The lowest id among the largest logits; id 0 and a status where a row failed.
void greedy(const Logits& logits, int32_t* ids, uint8_t* status);

void choose(const Logits& logits, const Choice& choice, int32_t* ids, uint8_t* status);

// Of the n rows `rows`: log-probability of token_ids[j] and its rank (how many logits are >= its own), and the k best
// in order, [n, k]. NaN where a row has NaN, +inf or nothing finite.
void logprobs(const Logits& logits, int64_t n, const int32_t* rows, const int32_t* token_ids, int32_t k, float* chosen,
              int32_t* ranks, int32_t* best_ids, float* best);

void penalise(const Logits& logits, const Penalties& penalties);

// Row rows[j] keeps token i only where bit i % 32 of words[j][i / 32] is set.
void mask(const Logits& logits, int64_t n, const int32_t* rows, const uint32_t* words);

}  // namespace lamella::host::sampling
