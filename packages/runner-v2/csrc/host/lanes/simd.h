// Vectors for the kernels that are compiled once per instruction set.
//
//   Floats      16 floats, whatever the registers' width
//   Part        the share of a panel's 16 rows that one register holds: kParts registers make a panel
//   PartFloats  a float for each row of a part
//   PartBytes   four bytes for each row of a part
//
// Everything is in an unnamed namespace, and nothing from the standard library that could be emitted as a shared inline
// function may be used here: a linker would be free to keep the copy built for the newest processor.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "host/lanes/simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "host/lanes/simd_avx2.h"
#else
#include "host/lanes/simd_plain.h"
#define LAMELLA_UNROLL
#endif

// Before a loop of fixed length whose arrays are to live in registers.
#if !defined(LAMELLA_UNROLL) && defined(__clang__)
#define LAMELLA_UNROLL _Pragma("unroll")
#elif !defined(LAMELLA_UNROLL)
#define LAMELLA_UNROLL _Pragma("GCC unroll 32")
#endif

namespace lamella::host {
namespace {

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

constexpr float kLog2e = 1.44269504088896341f;

// 2^x to about one unit in the last place; 0 below 2^-127, 2^127 above; NaN stays NaN.
inline Floats exp2(Floats x) {
  x = min(splat(127.0f), max(splat(-127.0f), x));
  const Floats whole = round_even(x);
  const Floats f = sub(x, whole);
  Floats p = splat(0x1.41fbbcp-13f);
  p = fma(p, f, splat(0x1.5f3e54p-10f));
  p = fma(p, f, splat(0x1.3b2d4cp-7f));
  p = fma(p, f, splat(0x1.c6aee8p-5f));
  p = fma(p, f, splat(0x1.ebfbdcp-3f));
  p = fma(p, f, splat(0x1.62e430p-1f));
  p = fma(p, f, splat(1.0f));
  return mul(p, power_of_two(whole));
}

inline Floats sigmoid(Floats x) {
  return div(splat(1.0f), add(splat(1.0f), exp2(mul(x, splat(-kLog2e)))));
}

inline Floats tanh(Floats x) {
  const Floats e = exp2(mul(abs(x), splat(-2.0f * kLog2e)));
  return with_sign_of(div(sub(splat(1.0f), e), add(splat(1.0f), e)), x);
}

// Abramowitz and Stegun 7.1.26: absolute error below 1.5e-7.
inline Floats erf(Floats x) {
  const Floats y = abs(x);
  const Floats t = div(splat(1.0f), fma(y, splat(0.3275911f), splat(1.0f)));
  Floats p = splat(1.061405429f);
  p = fma(p, t, splat(-1.453152027f));
  p = fma(p, t, splat(1.421413741f));
  p = fma(p, t, splat(-0.284496736f));
  p = fma(p, t, splat(0.254829592f));
  p = mul(mul(p, t), exp2(mul(mul(y, y), splat(-kLog2e))));
  return with_sign_of(sub(splat(1.0f), p), x);
}

}  // namespace
}  // namespace lamella::host
