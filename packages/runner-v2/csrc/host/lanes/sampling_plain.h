// Sampling's vectors as arrays: the compiler makes of them what the machine has (SSE2, NEON).
#pragma once

#include "host/sampling_lanes.h"

namespace lamella::host::sampling {
namespace {

constexpr int32_t kWidth = 8;

struct Vec {
  float lane[kWidth];
};
struct Sum {
  double lane[kWidth];
};

#define LAMELLA_EACH for (int32_t j = 0; j < kWidth; ++j)
inline Vec operator+(Vec a, Vec b) {
  LAMELLA_EACH a.lane[j] = a.lane[j] + b.lane[j];
  return a;
}
inline Vec operator-(Vec a, Vec b) {
  LAMELLA_EACH a.lane[j] = a.lane[j] - b.lane[j];
  return a;
}
inline Vec operator*(Vec a, Vec b) {
  LAMELLA_EACH a.lane[j] = a.lane[j] * b.lane[j];
  return a;
}
inline Vec load(const float* p) {
  Vec v;
  __builtin_memcpy(v.lane, p, sizeof v.lane);
  return v;
}
inline void store(float* p, Vec v) { __builtin_memcpy(p, v.lane, sizeof v.lane); }
inline Vec spread(float x) {
  Vec v;
  LAMELLA_EACH v.lane[j] = x;
  return v;
}
inline Vec larger(Vec a, Vec b) {
  LAMELLA_EACH a.lane[j] = a.lane[j] > b.lane[j] ? a.lane[j] : b.lane[j];
  return a;
}
inline Vec smaller(Vec a, Vec b) {
  LAMELLA_EACH a.lane[j] = a.lane[j] < b.lane[j] ? a.lane[j] : b.lane[j];
  return a;
}
inline float least(Vec v) {
  float best = v.lane[0];
  LAMELLA_EACH best = v.lane[j] < best ? v.lane[j] : best;
  return best;
}
inline float highest(Vec v) {
  float best = v.lane[0];
  LAMELLA_EACH best = v.lane[j] > best ? v.lane[j] : best;
  return best;
}
inline uint32_t from(Vec a, Vec b) {
  uint32_t bits = 0;
  LAMELLA_EACH bits |= static_cast<uint32_t>(a.lane[j] >= b.lane[j]) << j;
  return bits;
}
inline uint32_t unordered(Vec a, Vec b) {
  uint32_t bits = 0;
  LAMELLA_EACH bits |= static_cast<uint32_t>(a.lane[j] != a.lane[j]) | static_cast<uint32_t>(b.lane[j] != b.lane[j]);
  return bits;
}
inline Vec rounded(Vec v) {
  // of |x| < 2^22: the sum has no bits behind the point
  LAMELLA_EACH v.lane[j] = (v.lane[j] + 12582912.0f) - 12582912.0f;
  return v;
}
inline Vec floored(Vec v) {
  LAMELLA_EACH {
    const float x = v.lane[j];
    const float small = x < 8388608.0f ? x : 0.0f;
    const float whole = static_cast<float>(static_cast<int32_t>(small));
    v.lane[j] = x < 8388608.0f ? whole : x;
  }
  return v;
}
inline Vec power(Vec n, int32_t bias) {
  LAMELLA_EACH {
    const int32_t bits = (static_cast<int32_t>(n.lane[j]) + bias) << 23;
    __builtin_memcpy(&n.lane[j], &bits, 4);
  }
  return n;
}
inline void add(Sum& sum, Vec v) { LAMELLA_EACH sum.lane[j] += static_cast<double>(v.lane[j]); }
inline void add_where(Sum& sum, Vec v, uint32_t marked) {
  LAMELLA_EACH sum.lane[j] += marked >> j & 1u ? static_cast<double>(v.lane[j]) : 0.0;
}
inline double total(const Sum& sum) {
  double all = 0.0;
  LAMELLA_EACH all += sum.lane[j];
  return all;
}
inline int32_t compress(Vec v, int32_t first, uint32_t marked, float* values, int32_t* ids) {
  int32_t n = 0;
  for (; marked; marked &= marked - 1, ++n) {
    const int32_t j = __builtin_ctz(marked);
    values[n] = v.lane[j];
    ids[n] = first + j;
  }
  return n;
}
inline uint32_t below(const Noise& noise, int32_t first, const int32_t* ids, uint32_t wanted,
                             uint32_t limit) {
  uint32_t bits = 0;
  for (; wanted; wanted &= wanted - 1) {
    const int32_t j = __builtin_ctz(wanted);
    bits |= static_cast<uint32_t>(word_of(noise, ids != nullptr ? ids[j] : first + j) <= limit) << j;
  }
  return bits;
}
#undef LAMELLA_EACH

}  // namespace
}  // namespace lamella::host::sampling
