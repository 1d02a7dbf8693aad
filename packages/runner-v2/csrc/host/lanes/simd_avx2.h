// AVX2, FMA and F16C: a logical vector is two registers, a panel two parts.
#pragma once

#include <immintrin.h>

namespace lamella::host {
namespace {

constexpr const char* kIsaName = "avx2";
constexpr int kMaxBlock = 4;
constexpr int kProductRows = 2;
constexpr int kProductParts = 2;
constexpr int kDenseRows = 4;
constexpr int kTileRows = 2;
constexpr int kTileVecs = 2;

struct Floats {
  __m256 lo, hi;
};

inline Floats splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Floats x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
inline __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Floats load_part(const float* p, int n) {
  return {_mm256_maskload_ps(p, first_lanes(n)), _mm256_maskload_ps(p + 8, first_lanes(n - 8))};
}
inline void store_part(float* p, Floats x, int n) {
  _mm256_maskstore_ps(p, first_lanes(n), x.lo);
  _mm256_maskstore_ps(p + 8, first_lanes(n - 8), x.hi);
}
inline Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Floats sub(Floats a, Floats b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Floats mul(Floats a, Floats b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Floats div(Floats a, Floats b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Floats fma(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
// b where either is NaN
inline Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Floats abs(Floats x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.lo), _mm256_andnot_ps(sign, x.hi)};
}
inline Floats with_sign_of(Floats magnitude, Floats sign) {
  const __m256 bit = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(magnitude.lo, _mm256_and_ps(sign.lo, bit)), _mm256_or_ps(magnitude.hi, _mm256_and_ps(sign.hi, bit))};
}
inline Floats round_even(Floats x) {
  return {_mm256_round_ps(x.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(x.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// 2^x of whole x in [-127, 127]; 0 for -127
inline Floats power_of_two(Floats x) {
  const __m256i bias = _mm256_set1_epi32(127);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(x.lo), bias), 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(x.hi), bias), 23))};
}
// lanes outside [begin, end) become other
inline Floats keep(Floats x, int begin, int end, float other) {
  const __m256 filler = _mm256_set1_ps(other);
  const __m256i lo = _mm256_andnot_si256(first_lanes(begin), first_lanes(end));
  const __m256i hi = _mm256_andnot_si256(first_lanes(begin - 8), first_lanes(end - 8));
  return {_mm256_blendv_ps(filler, x.lo, _mm256_castsi256_ps(lo)), _mm256_blendv_ps(filler, x.hi, _mm256_castsi256_ps(hi))};
}
inline bool has_nan(Floats x) {
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(x.lo, x.lo, _CMP_UNORD_Q), _mm256_cmp_ps(x.hi, x.hi, _CMP_UNORD_Q))) != 0;
}
inline __m256 load_half8(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline __m256 load_bfloat8(const uint16_t* p) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
inline Floats load_half(const uint16_t* p) { return {load_half8(p), load_half8(p + 8)}; }
inline Floats load_bfloat(const uint16_t* p) { return {load_bfloat8(p), load_bfloat8(p + 8)}; }
inline void store_half(uint16_t* p, Floats x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// x is whole and in [-127, 127]
inline void store_bytes(int8_t* p, Floats x) {
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi));
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xD8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
}
// of 16 bytes
inline int sum_bytes(const int8_t* p) {
  const __m128i biased = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), _mm_set1_epi8(-128));
  const __m128i sums = _mm_sad_epu8(biased, _mm_setzero_si128());
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 16 * 128;
}
inline float sum(Floats x) {
  const __m256 a = _mm256_add_ps(x.lo, x.hi);
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
inline float largest(Floats x) {
  const __m256 a = _mm256_max_ps(x.lo, x.hi);
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}

inline void transpose8(__m256 r[8]) {
  __m256 a[8], b[8];
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    a[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 2; ++j) {
      b[4 * i + 2 * j] = _mm256_shuffle_ps(a[4 * i + j], a[4 * i + 2 + j], 0x44);
      b[4 * i + 2 * j + 1] = _mm256_shuffle_ps(a[4 * i + j], a[4 * i + 2 + j], 0xEE);
    }
  for (int j = 0; j < 4; ++j) {
    r[j] = _mm256_permute2f128_ps(b[j], b[4 + j], 0x20);
    r[4 + j] = _mm256_permute2f128_ps(b[j], b[4 + j], 0x31);
  }
}

// Columns of 16 rows become 16 vectors: rows[k] is row k.
inline void transpose(Floats rows[16]) {
  __m256 a[8], b[8], c[8], d[8];
  for (int i = 0; i < 8; ++i) {
    a[i] = rows[i].lo;
    b[i] = rows[8 + i].lo;
    c[i] = rows[i].hi;
    d[i] = rows[8 + i].hi;
  }
  transpose8(a);
  transpose8(b);
  transpose8(c);
  transpose8(d);
  for (int i = 0; i < 8; ++i) {
    rows[i] = {a[i], b[i]};
    rows[8 + i] = {c[i], d[i]};
  }
}

constexpr int kParts = 2;
constexpr int kPartRows = 8;
struct PartFloats {
  __m256 v;
};
struct PartBytes {
  __m256i v;
};

inline PartFloats part_splat(float x) { return {_mm256_set1_ps(x)}; }
inline PartFloats part_load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline PartFloats part_load_half(const uint16_t* p) { return {load_half8(p)}; }
inline PartFloats part_load_bfloat(const uint16_t* p) { return {load_bfloat8(p)}; }
inline PartFloats part_load_unsigned(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
inline PartFloats part_load_signed(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
inline void part_store(float* p, PartFloats x) { _mm256_storeu_ps(p, x.v); }
inline PartFloats mul(PartFloats a, PartFloats b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline PartFloats fma(PartFloats a, PartFloats b, PartFloats c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline PartBytes load_bytes(const uint8_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
// the same four bytes for every row
inline PartBytes splat_bytes(const uint8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return {_mm256_set1_epi32(word)};
}
inline void store_bytes(uint8_t* p, PartBytes x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.v); }
inline PartBytes bits_and(PartBytes x, int mask) { return {_mm256_and_si256(x.v, _mm256_set1_epi8(static_cast<char>(mask)))}; }
inline PartBytes bits_or(PartBytes x, PartBytes y) { return {_mm256_or_si256(x.v, y.v)}; }
// Each byte shifted right (left where negative); bits of neighbours may come in, so mask afterwards.
template <int kBy>
inline PartBytes shift(PartBytes x) {
  if constexpr (kBy > 0) return {_mm256_srli_epi16(x.v, kBy)};
  if constexpr (kBy < 0) return {_mm256_slli_epi16(x.v, -kBy)};
  return x;
}

// Running sum of codes * activations over up to eight sets of four inputs, for each row; codes < 2^kBits. Products are
// summed in 16 bits while they fit; of 8-bit codes the two nibbles are summed apart.
template <int kBits>
struct DotSum {
  static constexpr int kSafe = kBits == 4 || kBits == 8 ? 8 : kBits == 5 ? 4 : 2;
  __m256i part = _mm256_setzero_si256(), high = _mm256_setzero_si256(), total = _mm256_setzero_si256();

  // set number s of the group
  void add(int s, PartBytes codes, PartBytes activations) {
    const __m256i a = activations.v;
    if constexpr (kBits == 8) {
      const __m256i mask = _mm256_set1_epi8(15);
      part = _mm256_add_epi16(part, _mm256_maddubs_epi16(_mm256_and_si256(codes.v, mask), a));
      high = _mm256_add_epi16(high, _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(codes.v, 4), mask), a));
    } else {
      const __m256i product = _mm256_maddubs_epi16(codes.v, a);
      part = s % kSafe == 0 ? product : _mm256_add_epi16(part, product);
      if (s % kSafe == kSafe - 1) total = _mm256_add_epi32(total, _mm256_madd_epi16(part, _mm256_set1_epi16(1)));
    }
  }
  PartFloats value() {
    if constexpr (kBits == 8)
      total = _mm256_add_epi32(_mm256_madd_epi16(part, _mm256_set1_epi16(1)), _mm256_madd_epi16(high, _mm256_set1_epi16(16)));
    return {_mm256_cvtepi32_ps(total)};
  }
};

}  // namespace
}  // namespace lamella::host
