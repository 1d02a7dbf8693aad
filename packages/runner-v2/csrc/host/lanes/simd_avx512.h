// AVX-512 F, BW, VL, DQ; with VNNI where the compiler flags say so.
#pragma once

#include <immintrin.h>

namespace lamella::host {
namespace {

#if defined(__AVX512VNNI__)
constexpr const char* kIsaName = "avx512vnni";
constexpr int kMaxBlock = 12;
constexpr int kProductRows = 6;
#else
constexpr const char* kIsaName = "avx512";
constexpr int kMaxBlock = 8;
constexpr int kProductRows = 4;
#endif
constexpr int kProductParts = 2;
constexpr int kDenseRows = 8;  // times two parts
constexpr int kTileRows = 6;  // query rows and vectors of an attention tile
constexpr int kTileVecs = 4;

struct Floats {
  __m512 v;
};

inline Floats splat(float x) { return {_mm512_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x.v); }
inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
inline Floats load_part(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
inline void store_part(float* p, Floats x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x.v); }
inline Floats add(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats sub(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats mul(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats div(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// b where either is NaN
inline Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Floats abs(Floats x) { return {_mm512_abs_ps(x.v)}; }
inline Floats with_sign_of(Floats magnitude, Floats sign) {
  return {_mm512_or_ps(magnitude.v, _mm512_and_ps(sign.v, _mm512_set1_ps(-0.0f)))};
}
inline Floats round_even(Floats x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// 2^x of whole x in [-127, 127]; 0 for -127
inline Floats power_of_two(Floats x) {
  const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(x.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(biased, 23))};
}
// lanes outside [begin, end) become other
inline Floats keep(Floats x, int begin, int end, float other) {
  const __mmask16 kept = static_cast<__mmask16>(first_lanes(end) & ~first_lanes(begin));
  return {_mm512_mask_blend_ps(kept, _mm512_set1_ps(other), x.v)};
}
inline bool has_nan(Floats x) { return _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q) != 0; }
inline Floats load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Floats load_bfloat(const uint16_t* p) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))};
}
inline void store_half(uint16_t* p, Floats x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// x is whole and in [-127, 127]
inline void store_bytes(int8_t* p, Floats x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x.v)));
}
// of 16 bytes
inline int sum_bytes(const int8_t* p) {
  const __m128i biased = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), _mm_set1_epi8(-128));
  const __m128i sums = _mm_sad_epu8(biased, _mm_setzero_si128());
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 16 * 128;
}
inline float sum(Floats x) {
  const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
inline float largest(Floats x) {
  const __m256 a = _mm256_max_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}

// Columns of 16 rows become 16 vectors: rows[k] is row k.
inline void transpose(Floats rows[16]) {
  __m512 a[16], b[16];
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_ps(rows[2 * i].v, rows[2 * i + 1].v);
    a[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i].v, rows[2 * i + 1].v);
  }
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 2; ++j) {
      const __m512d x = _mm512_castps_pd(a[4 * i + j]), y = _mm512_castps_pd(a[4 * i + 2 + j]);
      b[4 * i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
      b[4 * i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
    }
  for (int j = 0; j < 4; ++j) {
    const __m512 x = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88), y = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xDD);
    const __m512 z = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x88), w = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xDD);
    rows[j].v = _mm512_shuffle_f32x4(x, z, 0x88);
    rows[8 + j].v = _mm512_shuffle_f32x4(x, z, 0xDD);
    rows[4 + j].v = _mm512_shuffle_f32x4(y, w, 0x88);
    rows[12 + j].v = _mm512_shuffle_f32x4(y, w, 0xDD);
  }
}

constexpr int kParts = 1;
constexpr int kPartRows = 16;
using PartFloats = Floats;
struct PartBytes {
  __m512i v;
};

inline PartFloats part_splat(float x) { return splat(x); }
inline PartFloats part_load(const float* p) { return load(p); }
inline PartFloats part_load_half(const uint16_t* p) { return load_half(p); }
inline PartFloats part_load_bfloat(const uint16_t* p) { return load_bfloat(p); }
inline PartFloats part_load_unsigned(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline PartFloats part_load_signed(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline void part_store(float* p, PartFloats x) { store(p, x); }
inline PartBytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
// the same four bytes for every row
inline PartBytes splat_bytes(const uint8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return {_mm512_set1_epi32(word)};
}
inline void store_bytes(uint8_t* p, PartBytes x) { _mm512_storeu_si512(p, x.v); }
inline PartBytes bits_and(PartBytes x, int mask) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(static_cast<char>(mask)))}; }
inline PartBytes bits_or(PartBytes x, PartBytes y) { return {_mm512_or_si512(x.v, y.v)}; }
// Each byte shifted right (left where negative); bits of neighbours may come in, so mask afterwards.
template <int kBy>
inline PartBytes shift(PartBytes x) {
  if constexpr (kBy > 0) return {_mm512_srli_epi16(x.v, kBy)};
  if constexpr (kBy < 0) return {_mm512_slli_epi16(x.v, -kBy)};
  return x;
}

// Running sum of codes * activations over up to eight sets of four inputs, for each row; codes < 2^kBits.
template <int kBits>
struct DotSum {
#if defined(__AVX512VNNI__)
  __m512i total = _mm512_setzero_si512();

  // set number s of the group
  void add(int, PartBytes codes, PartBytes activations) { total = _mm512_dpbusd_epi32(total, codes.v, activations.v); }
  PartFloats value() const { return {_mm512_cvtepi32_ps(total)}; }
#else
  // products are summed in 16 bits while they fit; of 8-bit codes the two nibbles are summed apart
  static constexpr int kSafe = kBits == 4 || kBits == 8 ? 8 : kBits == 5 ? 4 : 2;
  __m512i part = _mm512_setzero_si512(), high = _mm512_setzero_si512(), total = _mm512_setzero_si512();

  void add(int s, PartBytes codes, PartBytes activations) {
    const __m512i a = activations.v;
    if constexpr (kBits == 8) {
      const __m512i mask = _mm512_set1_epi8(15);
      part = _mm512_add_epi16(part, _mm512_maddubs_epi16(_mm512_and_si512(codes.v, mask), a));
      high = _mm512_add_epi16(high, _mm512_maddubs_epi16(_mm512_and_si512(_mm512_srli_epi16(codes.v, 4), mask), a));
    } else {
      const __m512i product = _mm512_maddubs_epi16(codes.v, a);
      part = s % kSafe == 0 ? product : _mm512_add_epi16(part, product);
      if (s % kSafe == kSafe - 1) flush();
    }
  }
  PartFloats value() {
    if constexpr (kBits == 8)
      total = _mm512_add_epi32(_mm512_madd_epi16(part, _mm512_set1_epi16(1)), _mm512_madd_epi16(high, _mm512_set1_epi16(16)));
    return {_mm512_cvtepi32_ps(total)};
  }

 private:
  void flush() { total = _mm512_add_epi32(total, _mm512_madd_epi16(part, _mm512_set1_epi16(1))); }
#endif
};

}  // namespace
}  // namespace lamella::host
