// Element types on the device: conversion to and from float, and 16-byte vectors of them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace lamella {

// Codes that cross the C boundary. fp8 tensors cross Python's as uint8.
enum class Elem : int { f32 = 0, f16 = 1, bf16 = 2, f8e4m3 = 3 };

using bf16 = __nv_bfloat16;
using f16 = __half;
using f8 = __nv_fp8_e4m3;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(f16 x) { return __half2float(x); }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(f8 x) { return static_cast<float>(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ f16 from_float<f16>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
  return __float2bfloat16_rn(x);
}
// Saturates at 448; NaN stays NaN.
template <>
__device__ __forceinline__ f8 from_float<f8>(float x) {
  return f8(x);
}

// 16 bytes of T, loaded and stored at once.
template <class T>
struct alignas(16) Vec {
  static constexpr int kSize = 16 / sizeof(T);
  T at[kSize];
};

template <class T>
__device__ __forceinline__ Vec<T> load_vec(const T* from) {
  return *reinterpret_cast<const Vec<T>*>(from);
}

template <class T>
__device__ __forceinline__ void store_vec(T* to, const Vec<T>& value) {
  *reinterpret_cast<Vec<T>*>(to) = value;
}

// Read once: do not keep it in L1, drop it from L2 first.
template <class T>
__device__ __forceinline__ Vec<T> load_stream(const T* from) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  uint4 raw;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
               : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
               : "l"(from), "l"(policy));
  return *reinterpret_cast<Vec<T>*>(&raw);
}

}  // namespace lamella
