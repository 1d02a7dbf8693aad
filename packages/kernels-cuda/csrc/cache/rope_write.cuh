// A few lanes per head: each holds two vectors of it, so that both halves of the rotating pairs meet in one thread.
//
//   head     [ first half of the pairs | second half | the rest, which does not rotate ]
//   lane u     vector u                  vector u + half          (interleaved, or the rest: two neighbouring vectors)
//
// A group of lanes takes head after head of one token, with the token's cosines in registers. Heads are numbered
// q 0 .. Hq | k .. | v .. ; v goes to the cache as it is.
#pragma once

#include "cache/rope_write.h"
#include "device/dtype.cuh"
#include "device/launch.cuh"

namespace lamella {

struct HeadPlace {
  const void* from;
  void* in_place;  // null: the head itself stays as it is
  void* cached;  // null: not written to the cache
  const void* weight;
  float inverse_scale;
  bool rotates;
};

__device__ __forceinline__ int64_t position_of(const LamellaRopeWrite& p, int64_t token) {
  if (p.positions == nullptr) return 0;
  const int64_t position = p.wide_positions ? static_cast<const int64_t*>(p.positions)[token]
                                            : static_cast<const int32_t*>(p.positions)[token];
  return position < 0 ? 0 : position < p.num_positions ? position : p.num_positions - 1;
}

// The slot's block and place in it; false: nothing is to be written.
__device__ __forceinline__ bool slot_of(const LamellaRopeWrite& p, int64_t token, int64_t& block, int64_t& place) {
  block = place = 0;
  if (p.slots == nullptr) return false;
  const int64_t slot = p.slots[token];
  if (slot < 0) return false;
  if (slot <= INT32_MAX && p.block_size <= INT32_MAX) {  // the short division is several times faster
    const uint32_t s = static_cast<uint32_t>(slot), size = static_cast<uint32_t>(p.block_size);
    block = s / size;
    place = s - static_cast<uint32_t>(block) * size;
  } else {
    block = slot / p.block_size;
    place = slot - block * p.block_size;
  }
  return block < p.num_blocks;
}

template <class T, class C>
__device__ __forceinline__ HeadPlace place_of(const LamellaRopeWrite& p, int64_t token, int head, bool writes,
                                              int64_t block, int64_t place) {
  const int num_q = static_cast<int>(p.num_q_heads), num_kv = p.k != nullptr ? static_cast<int>(p.num_kv_heads) : 0;
  if (head < num_q) {
    T* at = static_cast<T*>(p.q) + token * p.q_token_stride + head * p.q_head_stride;
    return {at, at, nullptr, p.q_weight, 1.f, p.cos != nullptr};
  }
  head -= num_q;
  if (head < num_kv) {
    T* at = static_cast<T*>(p.k) + token * p.k_token_stride + head * p.k_head_stride;
    C* cached = static_cast<C*>(p.k_cache) + block * p.k_block_stride + head * p.k_cache_head_stride +
                place * p.k_place_stride;
    return {at,
            p.keep_k ? at : nullptr,
            writes && p.k_cache != nullptr ? cached : nullptr,
            p.k_weight,
            p.k_scale != nullptr ? 1.f / p.k_scale[head * p.scale_stride] : 1.f,
            p.cos != nullptr};
  }
  head -= num_kv;
  const T* at = static_cast<const T*>(p.v) + token * p.v_token_stride + head * p.v_head_stride;
  C* cached = static_cast<C*>(p.v_cache) + block * p.v_block_stride + head * p.v_cache_head_stride +
              place * p.v_place_stride;
  return {at, nullptr, writes ? cached : nullptr, nullptr,
          p.v_scale != nullptr ? 1.f / p.v_scale[head * p.scale_stride] : 1.f, false};
}

template <class C>
__device__ __forceinline__ C to_cache(float x, float inverse_scale) {
  if constexpr (sizeof(C) == 1) return from_float<C>(x * inverse_scale);
  return from_float<C>(x);
}

template <class C, class T>
__device__ __forceinline__ void store_cached(C* to, const Vec<T>& value, float inverse_scale) {
  if constexpr (sizeof(C) == sizeof(T)) {
    store_vec(reinterpret_cast<T*>(to), value);
  } else {
    struct alignas(Vec<T>::kSize) Packed {
      C at[Vec<T>::kSize];
    } packed;
#pragma unroll
    for (int j = 0; j < Vec<T>::kSize; ++j) packed.at[j] = to_cache<C>(to_float(value.at[j]), inverse_scale);
    *reinterpret_cast<Packed*>(to) = packed;
  }
}

template <class T>
__device__ __forceinline__ T normed(T x, T weight, float inverse, bool plus_one) {
  // as the models were trained: see RMSNorm
  const float y = to_float(x) * inverse, g = to_float(weight);
  return from_float<T>(plus_one ? y * (1.f + g) : to_float(from_float<T>(y)) * g);
}

constexpr int kRopeThreads = 128;

// kLanes: lanes per head, a power of two. The rotating part is a multiple of two vectors (interleaved: of one).
template <class T, class C, int kLanes, bool kInterleaved>
__global__ void __launch_bounds__(kRopeThreads) rope_write_kernel(const LamellaRopeWrite p, int splits) {
  constexpr int kSize = Vec<T>::kSize, kGroups = kRopeThreads / kLanes;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const int64_t token = blockIdx.x / splits;
  const int part = static_cast<int>(blockIdx.x - token * splits);
  const int num_vecs = static_cast<int>(p.head_dim) / kSize, turning = static_cast<int>(p.rotary_dim) / kSize;
  int first = 2 * lane, second = 2 * lane + 1;  // vectors of this lane
  if (!kInterleaved && first < turning) {
    first = lane;
    second = lane + turning / 2;
  }
  const bool has_first = first < num_vecs, has_second = second < num_vecs;
  wait_predecessor();
  launch_successor();  // not before the wait: paged decode behind this one may read what is older (its follows_write)

  int64_t block, place;
  const bool writes = slot_of(p, token, block, place);
  // cosines of the pairs: of `first` and `second` together, or (interleaved) half of them of each
  float cosine[kSize], sine[kSize];
  const bool turns = p.cos != nullptr && first < turning, second_turns = p.cos != nullptr && second < turning;
  if (turns) {
    const int64_t row = position_of(p, token) * (p.rotary_dim / 2);
    const float* cos = p.cos + row + (kInterleaved ? first * kSize / 2 : first * kSize);
    const float* sin = p.sin + row + (kInterleaved ? first * kSize / 2 : first * kSize);
#pragma unroll
    for (int j = 0; j < kSize; j += 4) {
      if (kInterleaved && 2 * j >= kSize && !second_turns) continue;
      const float4 c = *reinterpret_cast<const float4*>(cos + j), s = *reinterpret_cast<const float4*>(sin + j);
      cosine[j] = c.x, cosine[j + 1] = c.y, cosine[j + 2] = c.z, cosine[j + 3] = c.w;
      sine[j] = s.x, sine[j + 1] = s.y, sine[j + 2] = s.z, sine[j + 3] = s.w;
    }
  }
  const int num_kv = (p.k != nullptr ? p.num_kv_heads : 0) + (p.v != nullptr ? p.num_kv_heads : 0);
  const int num_heads = static_cast<int>(p.num_q_heads) + num_kv;

  for (int head = part * kGroups + group; head < num_heads; head += splits * kGroups) {
    const HeadPlace at = place_of<T, C>(p, token, head, writes, block, place);
    if (at.in_place == nullptr && at.cached == nullptr) continue;  // the whole group agrees
    const T* from = static_cast<const T*>(at.from);
    Vec<T> a{}, b{};
    if (has_first) a = load_vec(from + first * kSize);
    if (has_second) b = load_vec(from + second * kSize);
    if (at.weight != nullptr) {
      const T* weight = static_cast<const T*>(at.weight);
      float squares = 0.f;
#pragma unroll
      for (int j = 0; j < kSize; ++j) squares += to_float(a.at[j]) * to_float(a.at[j]);
#pragma unroll
      for (int j = 0; j < kSize; ++j) squares += to_float(b.at[j]) * to_float(b.at[j]);
      const unsigned members = kLanes == 32 ? 0xffffffffu : ((1u << (kLanes & 31)) - 1) << (threadIdx.x % 32 / kLanes * kLanes);
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset >>= 1) squares += __shfl_xor_sync(members, squares, offset);
      const float inverse = rsqrtf(squares / static_cast<float>(p.head_dim) + p.eps);
      if (has_first) {
        const Vec<T> gain = load_vec(weight + first * kSize);
#pragma unroll
        for (int j = 0; j < kSize; ++j) a.at[j] = normed(a.at[j], gain.at[j], inverse, p.plus_one != 0);
      }
      if (has_second) {
        const Vec<T> gain = load_vec(weight + second * kSize);
#pragma unroll
        for (int j = 0; j < kSize; ++j) b.at[j] = normed(b.at[j], gain.at[j], inverse, p.plus_one != 0);
      }
    }
    if (at.rotates && turns) {
      if constexpr (kInterleaved) {
#pragma unroll
        for (int j = 0; j < kSize; j += 2) {
          const float x = to_float(a.at[j]), y = to_float(a.at[j + 1]);
          a.at[j] = from_float<T>(x * cosine[j / 2] - y * sine[j / 2]);
          a.at[j + 1] = from_float<T>(y * cosine[j / 2] + x * sine[j / 2]);
        }
        if (second_turns) {
#pragma unroll
          for (int j = 0; j < kSize; j += 2) {
            const float x = to_float(b.at[j]), y = to_float(b.at[j + 1]);
            const float c = cosine[kSize / 2 + j / 2], s = sine[kSize / 2 + j / 2];
            b.at[j] = from_float<T>(x * c - y * s);
            b.at[j + 1] = from_float<T>(y * c + x * s);
          }
        }
      } else {
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          const float x = to_float(a.at[j]), y = to_float(b.at[j]);
          a.at[j] = from_float<T>(x * cosine[j] - y * sine[j]);
          b.at[j] = from_float<T>(y * cosine[j] + x * sine[j]);
        }
      }
    }
    if (at.in_place != nullptr) {
      T* to = static_cast<T*>(at.in_place);
      if (has_first) store_vec(to + first * kSize, a);
      if (has_second) store_vec(to + second * kSize, b);
    }
    if (at.cached != nullptr) {
      C* to = static_cast<C*>(at.cached);
      if (has_first) store_cached<C>(to + first * kSize, a, at.inverse_scale);
      if (has_second) store_cached<C>(to + second * kSize, b, at.inverse_scale);
    }
  }
}

// Any head size and alignment: one warp per head, element by element, through shared memory.
template <class T, class C>
__global__ void __launch_bounds__(32) rope_write_any_kernel(const LamellaRopeWrite p, int num_heads) {
  extern __shared__ float held[];  // [head_dim]
  const int64_t token = blockIdx.x / num_heads;
  const int head = static_cast<int>(blockIdx.x - token * num_heads);
  const int width = static_cast<int>(p.head_dim), half = static_cast<int>(p.rotary_dim) / 2;
  wait_predecessor();
  int64_t block, place;
  const bool writes = slot_of(p, token, block, place);
  const HeadPlace at = place_of<T, C>(p, token, head, writes, block, place);
  if (at.in_place == nullptr && at.cached == nullptr) return;
  const T* from = static_cast<const T*>(at.from);
  float squares = 0.f;
  for (int i = threadIdx.x; i < width; i += 32) {
    held[i] = to_float(from[i]);
    squares += held[i] * held[i];
  }
  if (at.weight != nullptr) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
    const float inverse = rsqrtf(squares / static_cast<float>(width) + p.eps);
    for (int i = threadIdx.x; i < width; i += 32)
      held[i] = to_float(normed(from[i], static_cast<const T*>(at.weight)[i], inverse, p.plus_one != 0));
  }
  __syncwarp();
  const int64_t row = position_of(p, token) * half;
  for (int i = threadIdx.x; i < width; i += 32) {
    float x = held[i];
    if (at.rotates && i < 2 * half) {
      const bool leads = p.interleaved ? i % 2 == 0 : i < half;
      const int pair = p.interleaved ? i / 2 : leads ? i : i - half;
      const float other = held[p.interleaved ? i ^ 1 : leads ? i + half : i - half];
      const float c = p.cos[row + pair], s = p.sin[row + pair];
      x = leads ? x * c - other * s : x * c + other * s;
    }
    const T result = from_float<T>(x);
    if (at.in_place != nullptr) static_cast<T*>(at.in_place)[i] = result;
    if (at.cached != nullptr) static_cast<C*>(at.cached)[i] = to_cache<C>(to_float(result), at.inverse_scale);
  }
}

}  // namespace lamella
