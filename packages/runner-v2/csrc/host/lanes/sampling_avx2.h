// Sampling's vectors on AVX2.
#pragma once

#include <immintrin.h>

#include "host/sampling_lanes.h"

namespace lamella::host::sampling {
namespace {

constexpr int32_t kWidth = 8;

using Vec = __m256;
struct Sum {
  __m256d low, high;
};

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec spread(float x) { return _mm256_set1_ps(x); }
inline Vec larger(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline float highest(Vec v) {
  __m128 a = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  a = _mm_max_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}
inline Vec smaller(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline float least(Vec v) { return -highest(_mm256_xor_ps(v, _mm256_set1_ps(-0.0f))); }
inline uint32_t from(Vec a, Vec b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)));
}
inline uint32_t unordered(Vec a, Vec b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)));
}
inline Vec rounded(Vec v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec floored(Vec v) { return _mm256_floor_ps(v); }
inline Vec power(Vec n, int32_t bias) {
  const __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(bias));
  return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
}
inline void add(Sum& sum, Vec v) {
  sum.low = _mm256_add_pd(sum.low, _mm256_cvtps_pd(_mm256_castps256_ps128(v)));
  sum.high = _mm256_add_pd(sum.high, _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)));
}
// One bit per float, spread to whole floats.
inline Vec where(Vec v, uint32_t marked) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i hit = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int32_t>(marked)), bit), bit);
  return _mm256_and_ps(v, _mm256_castsi256_ps(hit));
}
inline void add_where(Sum& sum, Vec v, uint32_t marked) { add(sum, where(v, marked)); }
inline double total(const Sum& sum) {
  double lane[4];
  _mm256_storeu_pd(lane, _mm256_add_pd(sum.low, sum.high));
  return (lane[0] + lane[1]) + (lane[2] + lane[3]);
}
// Row m: the places of the bits that are set in m, in order.
struct Places {
  uint8_t of[256][8];
  constexpr Places() : of() {
    for (int m = 0; m < 256; ++m)
      for (int j = 0, n = 0; j < 8; ++j)
        if (m >> j & 1) of[m][n++] = static_cast<uint8_t>(j);
  }
};
constexpr Places places;

inline int32_t compress(Vec v, int32_t first, uint32_t marked, float* values, int32_t* ids) {
  const __m256i order = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(places.of[marked])));
  _mm256_storeu_ps(values, _mm256_permutevar8x32_ps(v, order));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(ids), _mm256_add_epi32(order, _mm256_set1_epi32(first)));
  return __builtin_popcount(marked);
}

inline __m256i all(uint64_t x) { return _mm256_set1_epi64x(static_cast<int64_t>(x)); }

// The words of four tokens, one per 64-bit lane. Only the low halves count: a product reads nothing else.
inline __m256i words(const Noise& noise, __m256i id) {
  const __m256i mul0 = all(kMul0), mul1 = all(kMul1);
  const __m256i even1 = _mm256_mul_epu32(_mm256_xor_si256(all(noise.first0), id), mul0);
  const __m256i odd2 = _mm256_mul_epu32(_mm256_xor_si256(_mm256_srli_epi64(even1, 32), all(noise.add1)), mul1);
  __m256i c0 = _mm256_xor_si256(_mm256_srli_epi64(odd2, 32), all(noise.add2)), c1 = odd2;
  __m256i c2 = _mm256_xor_si256(even1, all(noise.mix2)), c3 = all(noise.last2);
  for (int i = 3; i < 9; ++i) {
    const __m256i even = _mm256_mul_epu32(c0, mul0), odd = _mm256_mul_epu32(c2, mul1);
    c0 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(odd, 32), c1), all(noise.key0[i]));
    c1 = odd;
    c2 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(even, 32), c3), all(noise.key1[i]));
    c3 = even;
  }
  const __m256i odd = _mm256_mul_epu32(c2, mul1);
  const __m256i last = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(odd, 32), c1), all(noise.key0[9]));
  return _mm256_and_si256(last, all(0xFFFFFFFFu));
}

inline uint32_t below(const Noise& noise, int32_t first, const int32_t* ids, uint32_t wanted,
                             uint32_t limit) {
  const __m256i top = _mm256_set1_epi64x(limit);
  __m256i low = _mm256_add_epi64(_mm256_set1_epi64x(first), _mm256_setr_epi64x(0, 1, 2, 3));
  __m256i high = _mm256_add_epi64(low, _mm256_set1_epi64x(4));
  if (ids != nullptr) {
    const auto* halves = reinterpret_cast<const __m128i*>(ids);
    low = _mm256_cvtepi32_epi64(_mm_loadu_si128(halves));
    high = _mm256_cvtepi32_epi64(_mm_loadu_si128(halves + 1));
  }
  const __m256i a = _mm256_cmpgt_epi64(words(noise, low), top), b = _mm256_cmpgt_epi64(words(noise, high), top);
  const int above = _mm256_movemask_pd(_mm256_castsi256_pd(a)) | _mm256_movemask_pd(_mm256_castsi256_pd(b)) << 4;
  return wanted & ~static_cast<uint32_t>(above);
}

}  // namespace
}  // namespace lamella::host::sampling
