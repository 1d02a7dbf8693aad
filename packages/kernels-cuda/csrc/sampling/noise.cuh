// Noise and masses of tokens, the same bits as on every other path of the engine: Philox4x32-10 with key = seed and
// counter (position, token id, salt, 0), float64 logarithms spelled out, integer masses from a fixed polynomial. No
// operation here may be contracted into a fused multiply-add, hence the intrinsics.
#pragma once

#include <cstdint>

namespace lamella::sampling {

struct Noise {
  uint32_t k0, k1, position, salt;

  __device__ Noise(uint64_t key, uint32_t position, uint32_t salt)
      : k0(static_cast<uint32_t>(key)), k1(static_cast<uint32_t>(key >> 32)), position(position), salt(salt) {}

  // The first of the four words.
  __device__ uint32_t word(int id) const {
    constexpr uint32_t kMul0 = 0xD2511F53u, kMul1 = 0xCD9E8D57u;
    uint32_t c0 = position, c1 = static_cast<uint32_t>(id), c2 = salt, c3 = 0;
#pragma unroll
    for (uint32_t i = 0; i < 10; ++i) {
      const uint64_t even = static_cast<uint64_t>(c0) * kMul0, odd = static_cast<uint64_t>(c2) * kMul1;
      c0 = static_cast<uint32_t>(odd >> 32) ^ c1 ^ (k0 + i * 0x9E3779B9u);
      c1 = static_cast<uint32_t>(odd);
      c2 = static_cast<uint32_t>(even >> 32) ^ c3 ^ (k1 + i * 0xBB67AE85u);
      c3 = static_cast<uint32_t>(even);
    }
    return c0;
  }
};

// Natural logarithm of a positive normal number.
__device__ __forceinline__ double exact_log(double x) {
  uint64_t bits = static_cast<uint64_t>(__double_as_longlong(x));
  double e = static_cast<double>(static_cast<int>(bits >> 52) - 1022);
  bits = (bits & 0x000FFFFFFFFFFFFFull) | 0x3FE0000000000000ull;
  double m = __longlong_as_double(static_cast<int64_t>(bits));  // in [1/2, 1)
  if (m < 0.7071067811865476) {
    m = __dmul_rn(m, 2.0);
    e = __dsub_rn(e, 1.0);
  }
  const double s = __ddiv_rn(__dsub_rn(m, 1.0), __dadd_rn(m, 1.0));
  const double z = __dmul_rn(s, s);
  double series = 2.0 / 23.0;
#pragma unroll
  for (int n = 10; n > 0; --n) series = __dadd_rn(__dmul_rn(series, z), 2.0 / (2 * n + 1));
  const double tail = __dadd_rn(__dmul_rn(s, __dmul_rn(z, series)), __dmul_rn(e, 1.9082149292705877e-10));
  return __dadd_rn(__dmul_rn(e, 0.6931471803691238), __dadd_rn(__dmul_rn(2.0, s), tail));
}

// u = (word + 1/2) / 2^32, -log(-log(1 - u)).
__device__ __forceinline__ double gumbel(uint32_t word) {
  const double u = __dmul_rn(__dadd_rn(static_cast<double>(word), 0.5), 0x1p-32);
  return -exact_log(-exact_log(__dsub_rn(1.0, u)));
}

constexpr float kGumbelMost = 22.8740f, kGumbelLeast = -3.1300f;  // bounds of the noise
constexpr float kGumbelError = 1e-3f;  // more than rough_gumbel is off

__device__ __forceinline__ float rough_gumbel(uint32_t word) {
  float rare;  // -log(1 - u)
  if (word < (1u << 25)) {
    const float u = (static_cast<float>(word) + 0.5f) * 0x1p-32f;
    rare = u * (1.f + u * (0.5f + u * (0.33333333f + u * 0.25f)));
  } else {
    rare = -__logf((static_cast<float>(~word) + 0.5f) * 0x1p-32f);
  }
  return -__logf(rare);
}

inline __host__ __device__ int mass_bits(int vocab_size) {
  int length = 0;
  for (int rest = vocab_size; rest > 0; rest >>= 1) ++length;
  return 53 - length;
}

// How to weigh tokens: floor(2^bits * exp((x - top) * inverse)), 0 from `clamp` down.
struct Mass {
  float top, inverse, clamp;
  int bits;

  __device__ Mass(float top, float inverse, int bits)
      : top(top), inverse(inverse), clamp(static_cast<float>(-(bits + 1.4) * 0.6931471805599453)), bits(bits) {}

  __device__ float exponent(float x) const { return x == top ? 0.f : __fmul_rn(__fsub_rn(x, top), inverse); }

  __device__ uint64_t of(float x) const {
    const float d = fmaxf(exponent(x), clamp);
    const float n = rintf(__fmul_rn(d, 1.4426950408889634f));
    const float r = __fsub_rn(__fsub_rn(d, __fmul_rn(n, 0.693359375f)), __fmul_rn(n, -2.12194440e-4f));
    float value = 1.0f / 720.0f;
    value = __fadd_rn(__fmul_rn(value, r), 1.0f / 120.0f);
    value = __fadd_rn(__fmul_rn(value, r), 1.0f / 24.0f);
    value = __fadd_rn(__fmul_rn(value, r), 1.0f / 6.0f);
    value = __fadd_rn(__fmul_rn(value, r), 0.5f);
    value = __fadd_rn(__fmul_rn(value, r), 1.0f);
    value = __fadd_rn(__fmul_rn(value, r), 1.0f);
    const float scale = __uint_as_float(static_cast<uint32_t>(static_cast<int>(n) + bits + 127) << 23);
    return static_cast<uint64_t>(__fmul_rn(value, scale));  // rounds down: it is not negative
  }
};

}  // namespace lamella::sampling
