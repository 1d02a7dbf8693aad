// Work on single rows of activations: norms, activations, rotation, conversion, quantisation.
#pragma once

#include "host/kernels.h"
#include "host/lanes/simd.h"

namespace lamella::host {
namespace {

constexpr float kHalfLimit = 65504.0f;

// f(i, n) for every vector [i, i + n) of [0, length)
template <class F>
inline void each_vector(int64_t length, F f) {
  int64_t i = 0;
  for (; i + 16 <= length; i += 16) f(i, 16);
  if (i < length) f(i, static_cast<int>(length - i));
}

inline Floats load_some(const float* p, int n) { return n == 16 ? load(p) : load_part(p, n); }
inline void store_some(float* p, Floats x, int n) {
  if (n == 16)
    store(p, x);
  else
    store_part(p, x, n);
}

void norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
  Floats squares[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
  int64_t i = 0;
  for (; i + 64 <= n; i += 64)
    for (int j = 0; j < 4; ++j) {
      const Floats v = load(x + i + 16 * j);
      squares[j] = fma(v, v, squares[j]);
    }
  for (; i < n; i += 16) {
    const Floats v = load_some(x + i, n - i < 16 ? static_cast<int>(n - i) : 16);
    squares[0] = fma(v, v, squares[0]);
  }
  const float total = sum(add(add(squares[0], squares[1]), add(squares[2], squares[3])));
  const Floats factor = splat(1.0f / __builtin_sqrtf(total / static_cast<float>(n) + eps));
  each_vector(n, [&](int64_t k, int count) {
    store_some(out + k, mul(mul(load_some(x + k, count), factor), load_some(weight + k, count)), count);
  });
}

void add_rows(float* x, const float* y, int64_t n) {
  each_vector(n, [&](int64_t k, int count) { store_some(x + k, add(load_some(x + k, count), load_some(y + k, count)), count); });
}

void add_scaled(float* x, const float* y, float factor, int64_t n) {
  each_vector(n, [&](int64_t k, int count) {
    store_some(x + k, fma(splat(factor), load_some(y + k, count), load_some(x + k, count)), count);
  });
}

void put_tile(const float* tile, int64_t tile_ld, int64_t rows, int64_t cols, const float* bias, bool accumulate, float* out,
              int64_t ld) {
  for (int64_t r = 0; r < rows; ++r, tile += tile_ld, out += ld)
    each_vector(cols, [&](int64_t c, int n) {
      Floats x = load_some(tile + c, n);
      if (bias != nullptr) x = add(x, load_some(bias + c, n));
      if (accumulate) x = add(load_some(out + c, n), x);
      store_some(out + c, x, n);
    });
}

template <Act kKind>
inline Floats activated(Floats x) {
  if constexpr (kKind == Act::silu) return mul(x, sigmoid(x));
  if constexpr (kKind == Act::gelu)
    return mul(mul(x, splat(0.5f)), add(splat(1.0f), erf(mul(x, splat(0.70710678118654752f)))));
  // 0.5 x (1 + tanh(u)) = x sigmoid(2 u)
  const Floats u = mul(mul(x, splat(0.79788456080286536f)), fma(mul(x, x), splat(0.044715f), splat(1.0f)));
  return mul(x, sigmoid(mul(u, splat(2.0f))));
}

template <Act kKind>
void activate_kind(const float* gate, const float* up, int64_t n, float* out) {
  each_vector(n, [&](int64_t k, int count) {
    store_some(out + k, mul(activated<kKind>(load_some(gate + k, count)), load_some(up + k, count)), count);
  });
}

void activate(Act kind, const float* gate, const float* up, int64_t n, float* out) {
  switch (kind) {
    case Act::silu:
      return activate_kind<Act::silu>(gate, up, n, out);
    case Act::gelu_tanh:
      return activate_kind<Act::gelu_tanh>(gate, up, n, out);
    case Act::gelu:
      return activate_kind<Act::gelu>(gate, up, n, out);
  }
}

void softcap(float* x, int64_t n, float cap) {
  const Floats factor = splat(cap), inverse = splat(1.0f / cap);
  each_vector(n, [&](int64_t k, int count) {
    store_some(x + k, mul(tanh(mul(load_some(x + k, count), inverse)), factor), count);
  });
}

void rotate(float* x, const float* cos, const float* sin, int64_t half, bool interleaved) {
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cos[i] - b * sin[i];
      x[2 * i + 1] = b * cos[i] + a * sin[i];
    }
    return;
  }
  each_vector(half, [&](int64_t k, int count) {
    const Floats a = load_some(x + k, count), b = load_some(x + half + k, count);
    const Floats c = load_some(cos + k, count), s = load_some(sin + k, count);
    store_some(x + k, sub(mul(a, c), mul(b, s)), count);
    store_some(x + half + k, add(mul(b, c), mul(a, s)), count);
  });
}

void to_half(const float* x, int64_t n, uint16_t* out) {
  each_vector(n, [&](int64_t k, int count) {
    const Floats v = min(splat(kHalfLimit), max(splat(-kHalfLimit), load_some(x + k, count)));
    if (count == 16) return store_half(out + k, v);
    uint16_t last[16];
    store_half(last, v);
    for (int i = 0; i < count; ++i) out[k + i] = last[i];
  });
}

void softmax(float* x, int64_t n) {
  float most = x[0];
  for (int64_t i = 1; i < n; ++i) most = x[i] > most ? x[i] : most;
  Floats sums = splat(0.0f);
  each_vector(n, [&](int64_t k, int count) {
    const Floats e = exp2(mul(sub(load_some(x + k, count), splat(most)), splat(kLog2e)));
    store_some(x + k, e, count);
    sums = add(sums, keep(e, 0, count, 0.0f));
  });
  const Floats inverse = splat(1.0f / sum(sums));
  each_vector(n, [&](int64_t k, int count) { store_some(x + k, mul(load_some(x + k, count), inverse), count); });
}

// 32 values into a record; a and b become what rounding left over. Scale 1/127 of the largest magnitude, codes to nearest.
// A NaN makes the group's scales NaN, and so the row's results, but no other row's.
inline void quantise_group(Floats& a, Floats& b, uint8_t* record) {
  const float most = largest(max(abs(a), abs(b)));
  const float inverse = most > 1e-30f ? 127.0f / most : 0.0f;
  const float scale = has_nan(add(a, b)) ? __builtin_nanf("") : most * (1.0f / 127.0f);
  const Floats low = min(splat(127.0f), max(splat(-127.0f), round_even(mul(a, splat(inverse)))));
  const Floats high = min(splat(127.0f), max(splat(-127.0f), round_even(mul(b, splat(inverse)))));
  int8_t* codes = reinterpret_cast<int8_t*>(record + 16);
  store_bytes(codes, low);
  store_bytes(codes + 16, high);
  const float low_sum = static_cast<float>(sum_bytes(codes)), high_sum = static_cast<float>(sum_bytes(codes + 16));
  const float head[4] = {scale, scale * (low_sum + high_sum), scale * low_sum, scale * high_sum};
  __builtin_memcpy(record, head, sizeof head);
  a = fma(splat(-scale), low, a);
  b = fma(splat(-scale), high, b);
}

void quantise(const float* x, int64_t n, uint8_t* records, size_t stride) {
  for (int64_t g = 0; g < n / kGroup; ++g, records += stride) {
    Floats a = load(x + g * kGroup), b = load(x + g * kGroup + 16);
    quantise_group(a, b, records);
  }
}

void quantise_twice(const float* x, int64_t n, uint8_t* records, size_t stride) {
  for (int64_t g = 0; g < n / kGroup; ++g, records += stride) {
    Floats a = load(x + g * kGroup), b = load(x + g * kGroup + 16);
    quantise_group(a, b, records);
    quantise_group(a, b, records + kRecordBytes);
  }
}

}  // namespace
}  // namespace lamella::host
