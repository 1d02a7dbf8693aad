// Sampling's vectors on AVX-512 F, BW, VL, DQ.
#pragma once

#include <immintrin.h>

#include "host/sampling_lanes.h"

namespace lamella::host::sampling {
namespace {

constexpr int32_t kWidth = 16;

using Vec = __m512;
struct Sum {
  __m512d low, high;
};

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec spread(float x) { return _mm512_set1_ps(x); }
inline Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline float highest(Vec v) { return _mm512_reduce_max_ps(v); }
inline Vec smaller(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline float least(Vec v) { return _mm512_reduce_min_ps(v); }
inline uint32_t from(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline uint32_t unordered(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
inline Vec rounded(Vec v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec floored(Vec v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
inline Vec power(Vec n, int32_t bias) {
  const __m512i bits = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(bias));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 23));
}
inline void add(Sum& sum, Vec v) {
  sum.low = _mm512_add_pd(sum.low, _mm512_cvtps_pd(_mm512_castps512_ps256(v)));
  sum.high = _mm512_add_pd(sum.high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)));
}
inline void add_where(Sum& sum, Vec v, uint32_t marked) {
  add(sum, _mm512_maskz_mov_ps(static_cast<__mmask16>(marked), v));
}
inline double total(const Sum& sum) { return _mm512_reduce_add_pd(_mm512_add_pd(sum.low, sum.high)); }
inline int32_t compress(Vec v, int32_t first, uint32_t marked, float* values, int32_t* ids) {
  const __mmask16 mask = static_cast<__mmask16>(marked);
  const __m512i iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  // into a register, then a whole store: masked compressing stores are slow on some machines
  _mm512_storeu_ps(values, _mm512_maskz_compress_ps(mask, v));
  _mm512_storeu_si512(ids, _mm512_maskz_compress_epi32(mask, _mm512_add_epi32(iota, _mm512_set1_epi32(first))));
  return __builtin_popcount(marked);
}

inline __m512i all(uint64_t x) { return _mm512_set1_epi64(static_cast<int64_t>(x)); }

// The words of eight tokens, one per 64-bit lane. Only the low halves count: a product reads nothing else.
inline __m512i words(const Noise& noise, __m512i id) {
  const __m512i mul0 = all(kMul0), mul1 = all(kMul1);
  const __m512i even1 = _mm512_mul_epu32(_mm512_xor_si512(all(noise.first0), id), mul0);
  const __m512i odd2 = _mm512_mul_epu32(_mm512_xor_si512(_mm512_srli_epi64(even1, 32), all(noise.add1)), mul1);
  __m512i c0 = _mm512_xor_si512(_mm512_srli_epi64(odd2, 32), all(noise.add2)), c1 = odd2;
  __m512i c2 = _mm512_xor_si512(even1, all(noise.mix2)), c3 = all(noise.last2);
  for (int i = 3; i < 9; ++i) {
    const __m512i even = _mm512_mul_epu32(c0, mul0), odd = _mm512_mul_epu32(c2, mul1);
    c0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(odd, 32), c1, all(noise.key0[i]), 0x96);
    c1 = odd;
    c2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(even, 32), c3, all(noise.key1[i]), 0x96);
    c3 = even;
  }
  const __m512i odd = _mm512_mul_epu32(c2, mul1);
  const __m512i last = _mm512_ternarylogic_epi64(_mm512_srli_epi64(odd, 32), c1, all(noise.key0[9]), 0x96);
  return _mm512_and_si512(last, all(0xFFFFFFFFu));
}

inline uint32_t below(const Noise& noise, int32_t first, const int32_t* ids, uint32_t wanted,
                             uint32_t limit) {
  const __m512i top = _mm512_set1_epi64(limit);
  __m512i low = _mm512_add_epi64(_mm512_set1_epi64(first), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
  __m512i high = _mm512_add_epi64(low, _mm512_set1_epi64(8));
  if (ids != nullptr) {
    const auto* halves = reinterpret_cast<const __m256i*>(ids);
    low = _mm512_cvtepi32_epi64(_mm256_loadu_si256(halves));
    high = _mm512_cvtepi32_epi64(_mm256_loadu_si256(halves + 1));
  }
  const uint32_t a = _mm512_cmple_epu64_mask(words(noise, low), top), b = _mm512_cmple_epu64_mask(words(noise, high), top);
  return wanted & (a | b << 8);
}

}  // namespace
}  // namespace lamella::host::sampling
