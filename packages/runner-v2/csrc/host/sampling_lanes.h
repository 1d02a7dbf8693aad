// The inner loops of sampling, compiled once per instruction set, and the scalar arithmetic that they share.
//
// A row is worked on in chunks of 64 tokens whose maxima are kept: later passes skip every chunk that cannot matter.
#pragma once

#include <cstdint>

namespace lamella::host::sampling {

constexpr int32_t kChunk = 64;

// Philox4x32-10 of one row, with counter (position, token id, salt, 0); the first word of the result is used. What does
// not depend on the token id is worked out ahead, so rounds 0 to 2 shrink to two products and a few constants.
// 32-bit numbers in 64-bit words, as vectors of 64-bit lanes load them.
struct Noise {
  uint64_t key0[10], key1[10];
  uint64_t first0;  // c0 after round 0 is first0 ^ id
  uint64_t add1;    // c2 after round 1 is high(kMul0 · c0) ^ add1
  uint64_t add2;    // c0 after round 2 is high(kMul1 · c2) ^ add2
  uint64_t mix2;    // c2 after round 2 is low(kMul0 · c0 of round 0) ^ mix2
  uint64_t last2;   // c3 after round 2
};

// What a row keeps: tokens with x > value, and of those with x == value the ids up to last_tie.
struct Cut {
  float value;
  int32_t last_tie;
};

// The best score = x / T + noise so far, and whose it is.
struct Winner {
  int32_t id;
  double score;
};

// How to weigh tokens: floor(2^bits · exp((x - top) · inverse)), 0 from `clamp` down. See top_k_top_p.py.
struct Mass {
  float top;
  float inverse;
  float clamp;
  int32_t bits;
};

struct Lanes {
  // Maxima of the chunks and of the row; true if it has NaN (the maxima are then worth nothing).
  bool (*scan)(const float* x, int32_t vocab_size, float* chunk_tops, float* top);
  // Sum of the masses of a row.
  double (*mass_sum)(const float* x, int32_t vocab_size, const float* chunk_tops, const Mass& mass);
  // Masses of n values.
  void (*masses)(const float* values, int32_t n, const Mass& mass, float* out);
  // The numbers in [low, high) and their places, in order; returns how many. chunk_tops may be null. The arrays have room
  // for n + kChunk.
  int32_t (*collect)(const float* x, int32_t n, const float* chunk_tops, float low, float high, float* values,
                     int32_t* places);
  // How many of n numbers are >= value.
  int32_t (*count_from)(const float* x, int32_t n, float value);
  // Sum of the masses that belong to the n numbers >= value, and how many those are.
  double (*mass_from)(const float* x, const float* masses, int32_t n, float value, int32_t* count);
  // The least of n numbers.
  float (*lowest)(const float* x, int32_t n);
  // Improves on `winner`, a kept token. ids null: number i is token i.
  void (*search)(const float* x, const int32_t* ids, int32_t n, const float* chunk_tops, const Cut& cut,
                 double temperature, const Noise& noise, Winner& winner);
};

// Internal to each file: code of several instruction sets includes this, and must not share the compiled functions.
namespace {

constexpr uint64_t kMul0 = 0xD2511F53u, kMul1 = 0xCD9E8D57u;

inline int32_t num_chunks(int32_t n) { return (n + kChunk - 1) / kChunk; }

inline uint64_t high(uint64_t product) { return product >> 32; }
inline uint64_t low(uint64_t product) { return product & 0xFFFFFFFFu; }

inline Noise noise_of(uint64_t key, uint32_t position, uint32_t salt) {
  Noise noise;
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int i = 0; i < 10; ++i, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    noise.key0[i] = k0;
    noise.key1[i] = k1;
  }
  const uint64_t even0 = kMul0 * position, odd0 = kMul1 * salt;
  noise.first0 = high(odd0) ^ noise.key0[0];
  noise.add1 = low(even0) ^ noise.key1[1];
  const uint64_t odd1 = kMul1 * (high(even0) ^ noise.key1[0]);
  noise.add2 = low(odd1) ^ noise.key0[2];
  const uint64_t even2 = kMul0 * (high(odd1) ^ low(odd0) ^ noise.key0[1]);
  noise.mix2 = high(even2) ^ noise.key1[2];
  noise.last2 = low(even2);
  return noise;
}

inline uint32_t word_of(const Noise& noise, int32_t id) {
  const uint64_t even1 = kMul0 * (noise.first0 ^ static_cast<uint32_t>(id));
  const uint64_t odd2 = kMul1 * (high(even1) ^ noise.add1);
  uint64_t c0 = high(odd2) ^ noise.add2, c1 = low(odd2), c2 = low(even1) ^ noise.mix2, c3 = noise.last2;
  for (int i = 3; i < 9; ++i) {
    const uint64_t even = kMul0 * c0, odd = kMul1 * c2;
    c0 = high(odd) ^ c1 ^ noise.key0[i];
    c1 = low(odd);
    c2 = high(even) ^ c3 ^ noise.key1[i];
    c3 = low(even);
  }
  return static_cast<uint32_t>(high(kMul1 * c2) ^ c1 ^ noise.key0[9]);
}

// Natural logarithm of a positive normal number, operation by operation as in seeds.py.
inline double exact_log(double x) {
  uint64_t bits;
  __builtin_memcpy(&bits, &x, 8);
  double e = static_cast<double>(static_cast<int64_t>(bits >> 52) - 1022);
  bits = (bits & 0x000FFFFFFFFFFFFFull) | 0x3FE0000000000000ull;  // m in [1/2, 1)
  double m;
  __builtin_memcpy(&m, &bits, 8);
  if (m < 0.7071067811865476) {
    m *= 2.0;
    e -= 1.0;
  }
  const double s = (m - 1.0) / (m + 1.0);
  const double z = s * s;
  double series = 2.0 / 23.0;
  for (int n = 10; n > 0; --n) series = series * z + 2.0 / (2 * n + 1);
  return e * 0.6931471803691238 + (2.0 * s + (s * (z * series) + e * 1.9082149292705877e-10));
}

// The noise of a token with this word: u = (word + 1/2) / 2^32, -log(-log(1 - u)).
inline double gumbel(uint32_t word) {
  const double u = (static_cast<double>(word) + 0.5) * 0x1p-32;
  return -exact_log(-exact_log(1.0 - u));
}

inline Mass mass_of_row(float top, float inverse, int32_t bits) {
  return {top, inverse, static_cast<float>(-(bits + 1.4) * 0.6931471805599453), bits};
}

// No token of a chunk with this maximum weighs anything.
inline bool massless(const Mass& mass, float chunk_top) { return (chunk_top - mass.top) * mass.inverse <= mass.clamp; }

}  // namespace

}  // namespace lamella::host::sampling
