// Work is cut into pieces of 16 KiB; the thread blocks go through all pieces of all copies in turn. A piece is one round
// of four 16-byte loads per thread, all in flight before the first store: with 32 blocks that is 512 KiB, several times
// what the link to the host holds.
#pragma once

#include "copy/copy_blocks.h"
#include "device/dtype.cuh"
#include "device/launch.cuh"

namespace lamella {

constexpr int kCopyThreads = 256, kCopyVecs = 4;
constexpr int64_t kCopyPiece = kCopyThreads * kCopyVecs * 16;

struct Span {
  const char* from;  // null: skip
  char* to;
  int64_t bytes;
};

struct CopyList {
  const int64_t* sources;
  const int64_t* targets;
  const int64_t* sizes;
  int64_t bytes;

  __device__ Span at(int64_t i) const {
    const int64_t from = sources[i], to = targets[i];
    const int64_t size = sizes != nullptr ? sizes[i] : bytes;
    return {to != 0 ? reinterpret_cast<const char*>(from) : nullptr, reinterpret_cast<char*>(to),
            size < bytes ? size : bytes};
  }
};

struct CopyPairs {
  const char* source;
  char* target;
  const longlong2* pairs;
  int64_t bytes, source_stride, target_stride;

  __device__ Span at(int64_t i) const {
    const longlong2 pair = pairs[i];
    if (pair.x < 0 || pair.y < 0) return {nullptr, nullptr, 0};
    return {source + pair.x * source_stride, target + pair.y * target_stride, bytes};
  }
};

// The host may have written the source while the device ran before: not through the read-only cache.
__device__ __forceinline__ uint4 load_once(const void* from, uint64_t policy) {
  uint4 raw;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
               : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
               : "l"(from), "l"(policy));
  return raw;
}

__device__ __forceinline__ void store_once(void* to, const uint4& raw, uint64_t policy) {
  asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1,%2,%3,%4}, %5;" ::"l"(to), "r"(raw.x), "r"(raw.y), "r"(raw.z),
               "r"(raw.w), "l"(policy)
               : "memory");
}

template <class Word>
__device__ __forceinline__ void copy_words(const char* from, char* to, int64_t bytes) {
  const int64_t count = bytes / static_cast<int64_t>(sizeof(Word));
  for (int64_t i = threadIdx.x; i < count; i += kCopyThreads)
    reinterpret_cast<Word*>(to)[i] = reinterpret_cast<const volatile Word*>(from)[i];
  const int64_t done = count * static_cast<int64_t>(sizeof(Word));
  if (done + threadIdx.x < bytes) to[done + threadIdx.x] = from[done + threadIdx.x];
}

template <class Copies>
__global__ void __launch_bounds__(kCopyThreads) copy_kernel(const Copies copies, int64_t num_copies, int64_t pieces) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  wait_predecessor();
  launch_successor();
  const int64_t total = num_copies * pieces;
  for (int64_t item = blockIdx.x; item < total; item += gridDim.x) {
    const int64_t copy = pieces == 1 ? item : item / pieces, first = (item - copy * pieces) * kCopyPiece;
    const Span span = copies.at(copy);
    if (span.from == nullptr || first >= span.bytes) continue;
    const char* from = span.from + first;
    char* to = span.to + first;
    const int64_t bytes = span.bytes - first < kCopyPiece ? span.bytes - first : kCopyPiece;
    const uintptr_t off = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to);
    if (off % 16 != 0) {
      if (off % 4 == 0) {
        copy_words<uint32_t>(from, to, bytes);
      } else {
        copy_words<uint8_t>(from, to, bytes);
      }
      continue;
    }
    uint4 held[kCopyVecs];
    const int vecs = static_cast<int>(bytes / 16);
#pragma unroll
    for (int i = 0; i < kCopyVecs; ++i) {
      const int place = threadIdx.x + i * kCopyThreads;
      if (place < vecs) held[i] = load_once(from + place * 16, policy);
    }
#pragma unroll
    for (int i = 0; i < kCopyVecs; ++i) {
      const int place = threadIdx.x + i * kCopyThreads;
      if (place < vecs) store_once(to + place * 16, held[i], policy);
    }
    const int rest = vecs * 16 + threadIdx.x;
    if (rest < bytes) to[rest] = from[rest];
  }
}

}  // namespace lamella
