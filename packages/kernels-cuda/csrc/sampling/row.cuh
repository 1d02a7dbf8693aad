// A row of logits as the kernels walk over it.
//
// Pieces of 16 bytes, aligned in memory whatever the row's address: position = token id + head, where head is what the
// row's first element is off from 16 bytes. A tile is 2,048 positions, one warp's work; in it, lane l owns a chunk:
//
//   tile t     piece t * kPieces * 32 + i * 32 + l    for i < kPieces      -> chunk t * 32 + l, 64 positions
//
// The maxima of the chunks are kept, so that later passes read only chunks that matter.
#pragma once

#include <cfloat>

#include "device/dtype.cuh"

namespace lamella::sampling {

constexpr int kTile = 2048;
constexpr unsigned kAll = 0xffffffffu;

// Of shapes alone, for rows of any alignment.
inline __host__ __device__ int num_tiles(int vocab_size, int elem_bytes) {
  return (vocab_size + 16 / elem_bytes - 1 + kTile - 1) / kTile;
}

template <class T>
struct Row {
  static constexpr int kSize = Vec<T>::kSize;  // elements of a piece
  static constexpr int kPieces = kTile / kSize / 32;  // pieces of a chunk

  const T* aligned;
  int head;
  int vocab_size;

  __device__ Row(const T* data, int vocab_size) : vocab_size(vocab_size) {
    head = static_cast<int>(reinterpret_cast<uintptr_t>(data) % 16 / sizeof(T));
    aligned = data - head;
  }
  __device__ bool has(int id) const { return static_cast<unsigned>(id) < static_cast<unsigned>(vocab_size); }
  __device__ static int piece(int tile, int i, int lane) { return (tile * kPieces + i) * 32 + lane; }
  __device__ int first_id(int piece) const { return piece * kSize - head; }
  __device__ float at(int id) const { return to_float(aligned[id + head]); }

  // -inf where there is no token.
  __device__ Vec<T> raw(int piece) const {
    const int first = first_id(piece);
    if (first >= 0 && first + kSize <= vocab_size) return load_vec(aligned + int64_t{piece} * kSize);
    Vec<T> some;
#pragma unroll
    for (int j = 0; j < kSize; ++j)
      some.at[j] = has(first + j) ? aligned[int64_t{piece} * kSize + j] : from_float<T>(-INFINITY);
    return some;
  }
};

// Order of floats as unsigned numbers; -0 and +0 are one.
__device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float of_key(uint32_t key) {
  return __uint_as_float(key >> 31 ? key & 0x7FFFFFFFu : ~key);
}

// What a row keeps: tokens with x > value, and of those with x == value the ids up to last_tie.
struct Cut {
  float value;
  int last_tie;
  __device__ bool keeps(float x, int id) const { return x > value || (x == value && id <= last_tie); }
};

constexpr int kAnyTie = 0x7fffffff;

__device__ __forceinline__ float max_or_nan(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}

}  // namespace lamella::sampling
