// The keys of one sequence that a decode step reads, in chunks of 64, and how all chunks of the step are shared out.
#pragma once

#include <cstdint>

namespace lamella::attention {

constexpr int kChunkKeys = 64;

struct KeyRange {
  int begin;  // first key that any query sees
  int end;    // seq_len
  __device__ __forceinline__ int first_chunk() const { return begin / kChunkKeys; }
  __device__ __forceinline__ int num_chunks() const {
    return end > 0 ? (end + kChunkKeys - 1) / kChunkKeys - first_chunk() : 0;
  }
};

// Query i of n stands at position seq_len - n + i and sees (position - window, position].
__device__ __forceinline__ KeyRange visible_keys(int seq_len, int num_queries, int window) {
  const int end = seq_len > 0 ? seq_len : 0;
  const int begin = window > 0 ? end - num_queries + 1 - window : 0;
  return {begin > 0 ? begin : 0, end};
}

// The first `more` parts take each + 1 neighbouring chunks, the others `each`. 32 bits: 2^32 chunks are more than a
// step could read in seconds.
struct Share {
  uint32_t each, more;
  __device__ __forceinline__ uint32_t start(uint32_t part) const { return part * each + min(part, more); }
  __device__ __forceinline__ uint32_t part_of(uint32_t place) const {
    const uint32_t larger = more * (each + 1);
    return place < larger ? place / (each + 1) : more + (place - larger) / each;
  }
};

}  // namespace lamella::attention
