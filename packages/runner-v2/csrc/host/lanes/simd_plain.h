// Loops of fixed length, which a compiler turns into whatever vectors the target has. The only intrinsics are Arm's dot
// product, where the compiler's target has it (every Apple processor).
#pragma once

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace lamella::host {
namespace {

constexpr const char* kIsaName = "generic";
constexpr int kMaxBlock = 2;
constexpr int kProductRows = 2;
constexpr int kProductParts = 1;
constexpr int kDenseRows = 2;
constexpr int kTileRows = 1;
constexpr int kTileVecs = 1;

struct Floats {
  float v[16];
};

#define LAMELLA_EACH(expression)        \
  Floats out;                           \
  for (int i = 0; i < 16; ++i) out.v[i] = (expression); \
  return out

inline float fused(float a, float b, float c) {
#if defined(__FP_FAST_FMAF) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;  // without the instruction, a true fma would be a library call
#endif
}
inline float from_bits(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t to_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}
inline float widen_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  // exponent and mantissa in place, then a multiplication that also makes subnormals right
  const float magnitude = from_bits(static_cast<uint32_t>(half & 0x7FFFu) << 13) * from_bits(0x77800000u);  // 2^112
  const uint32_t special = (half & 0x7C00u) == 0x7C00u ? 0x7F800000u : 0u;
  return from_bits(sign | to_bits(magnitude) | special);
}
inline uint16_t narrow_half(float x) {
  const uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7C00u);
  if (magnitude < 0x38800000u) {
    // subnormal or zero: adding 0.5 makes the float's own rounding fall on a half's last bit
    return static_cast<uint16_t>(sign | (to_bits(from_bits(magnitude) + 0.5f) - 0x3F000000u));
  }
  const uint32_t rounded = magnitude + 0xFFFu + (magnitude >> 13 & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

inline Floats splat(float x) { LAMELLA_EACH(x); }
inline Floats load(const float* p) { LAMELLA_EACH(p[i]); }
inline void store(float* p, Floats x) {
  for (int i = 0; i < 16; ++i) p[i] = x.v[i];
}
inline Floats load_part(const float* p, int n) {
  Floats out = splat(0.0f);
  for (int i = 0; i < n; ++i) out.v[i] = p[i];
  return out;
}
inline void store_part(float* p, Floats x, int n) {
  for (int i = 0; i < n; ++i) p[i] = x.v[i];
}
inline Floats add(Floats a, Floats b) { LAMELLA_EACH(a.v[i] + b.v[i]); }
inline Floats sub(Floats a, Floats b) { LAMELLA_EACH(a.v[i] - b.v[i]); }
inline Floats mul(Floats a, Floats b) { LAMELLA_EACH(a.v[i] * b.v[i]); }
inline Floats div(Floats a, Floats b) { LAMELLA_EACH(a.v[i] / b.v[i]); }
inline Floats fma(Floats a, Floats b, Floats c) { LAMELLA_EACH(fused(a.v[i], b.v[i], c.v[i])); }
// b where either is NaN
inline Floats max(Floats a, Floats b) { LAMELLA_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline Floats min(Floats a, Floats b) { LAMELLA_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline Floats abs(Floats x) { LAMELLA_EACH(from_bits(to_bits(x.v[i]) & 0x7FFFFFFFu)); }
inline Floats with_sign_of(Floats magnitude, Floats sign) {
  LAMELLA_EACH(from_bits(to_bits(magnitude.v[i]) | (to_bits(sign.v[i]) & 0x80000000u)));
}
// |x| < 2^22
inline Floats round_even(Floats x) { LAMELLA_EACH((x.v[i] + 12582912.0f) - 12582912.0f); }
// 2^x of whole x in [-127, 127]; 0 for -127. NaN gives some number.
inline Floats power_of_two(Floats x) {
  LAMELLA_EACH(from_bits((to_bits(x.v[i] + 12582912.0f) - 0x4B400000u + 127u) << 23));
}
// lanes outside [begin, end) become other
inline Floats keep(Floats x, int begin, int end, float other) { LAMELLA_EACH(i >= begin && i < end ? x.v[i] : other); }
inline bool has_nan(Floats x) {
  int found = 0;
  for (int i = 0; i < 16; ++i) found |= x.v[i] != x.v[i];
  return found != 0;
}
inline Floats load_half(const uint16_t* p) { LAMELLA_EACH(widen_half(p[i])); }
inline Floats load_bfloat(const uint16_t* p) { LAMELLA_EACH(from_bits(static_cast<uint32_t>(p[i]) << 16)); }
inline void store_half(uint16_t* p, Floats x) {
  for (int i = 0; i < 16; ++i) p[i] = narrow_half(x.v[i]);
}
// x is whole and in [-127, 127]
inline void store_bytes(int8_t* p, Floats x) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(to_bits(x.v[i] + 12582912.0f) - 0x4B400000u);
}
// of 16 bytes
inline int sum_bytes(const int8_t* p) {
  int total = 0;
  for (int i = 0; i < 16; ++i) total += p[i];
  return total;
}
inline float sum(Floats x) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x.v[i] += x.v[i + half];
  return x.v[0];
}
inline float largest(Floats x) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x.v[i] = x.v[i] > x.v[i + half] ? x.v[i] : x.v[i + half];
  return x.v[0];
}
// Columns of 16 rows become 16 vectors: rows[k] is row k.
inline void transpose(Floats rows[16]) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < i; ++j) {
      const float x = rows[i].v[j];
      rows[i].v[j] = rows[j].v[i];
      rows[j].v[i] = x;
    }
}

constexpr int kParts = 1;
constexpr int kPartRows = 16;
using PartFloats = Floats;
struct PartBytes {
  uint8_t v[64];
};

inline PartFloats part_splat(float x) { return splat(x); }
inline PartFloats part_load(const float* p) { return load(p); }
inline PartFloats part_load_half(const uint16_t* p) { return load_half(p); }
inline PartFloats part_load_bfloat(const uint16_t* p) { return load_bfloat(p); }
inline PartFloats part_load_unsigned(const uint8_t* p) { LAMELLA_EACH(static_cast<float>(p[i])); }
inline PartFloats part_load_signed(const int8_t* p) { LAMELLA_EACH(static_cast<float>(p[i])); }
inline void part_store(float* p, PartFloats x) { store(p, x); }
inline PartBytes load_bytes(const uint8_t* p) {
  PartBytes out;
  __builtin_memcpy(out.v, p, 64);
  return out;
}
// the same four bytes for every row; only the first row's are read
inline PartBytes splat_bytes(const uint8_t* p) {
  PartBytes out = {};
  __builtin_memcpy(out.v, p, 4);
  return out;
}
inline void store_bytes(uint8_t* p, const PartBytes& x) { __builtin_memcpy(p, x.v, 64); }
inline PartBytes bits_and(PartBytes x, int mask) {
  for (int i = 0; i < 64; ++i) x.v[i] &= static_cast<uint8_t>(mask);
  return x;
}
inline PartBytes bits_or(PartBytes x, PartBytes y) {
  for (int i = 0; i < 64; ++i) x.v[i] |= y.v[i];
  return x;
}
// Each byte shifted right (left where negative); mask afterwards.
template <int kBy>
inline PartBytes shift(PartBytes x) {
  if constexpr (kBy > 0)
    for (int i = 0; i < 64; ++i) x.v[i] = static_cast<uint8_t>(x.v[i] >> kBy);
  if constexpr (kBy < 0)
    for (int i = 0; i < 64; ++i) x.v[i] = static_cast<uint8_t>(x.v[i] << -kBy);
  return x;
}

// Running sum of codes * activations over up to eight sets of four inputs, for each row; codes < 2^kBits.
template <int kBits>
struct DotSum {
#if defined(__ARM_FEATURE_DOTPROD)
  int32x4_t total[4] = {vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)};
  int32x4_t shifted = vdupq_n_s32(0);  // 8-bit codes go in as code - 128: the sum of what they were multiplied by

  // set number s of the group
  void add(int, const PartBytes& codes, const PartBytes& activations) {
    int32_t word;
    __builtin_memcpy(&word, activations.v, 4);
    const int8x16_t a = vreinterpretq_s8_s32(vdupq_n_s32(word));
    for (int i = 0; i < 4; ++i) {
      uint8x16_t u = vld1q_u8(codes.v + 16 * i);
      if (kBits == 8) u = veorq_u8(u, vdupq_n_u8(0x80));
      total[i] = vdotq_s32(total[i], vreinterpretq_s8_u8(u), a);
    }
    if (kBits == 8) shifted = vdotq_s32(shifted, vdupq_n_s8(1), a);
  }
  PartFloats value() const {
    PartFloats out;
    for (int i = 0; i < 4; ++i) {
      const int32x4_t sum = kBits == 8 ? vaddq_s32(total[i], vshlq_n_s32(shifted, 7)) : total[i];
      vst1q_f32(out.v + 4 * i, vcvtq_f32_s32(sum));
    }
    return out;
  }
#else
  int32_t total[16] = {};

  // set number s of the group
  void add(int, const PartBytes& codes, const PartBytes& activations) {
    const int8_t* a = reinterpret_cast<const int8_t*>(activations.v);
    for (int r = 0; r < 16; ++r) {
      const uint8_t* u = codes.v + 4 * r;
      total[r] += u[0] * a[0] + u[1] * a[1] + u[2] * a[2] + u[3] * a[3];
    }
  }
  PartFloats value() const { LAMELLA_EACH(static_cast<float>(total[i])); }
#endif
};

#undef LAMELLA_EACH

}  // namespace
}  // namespace lamella::host
