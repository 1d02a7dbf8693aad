// The border between the code that is compiled once and the kernels that are compiled per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "host/format.h"

namespace lamella::host {

namespace sampling {
struct Lanes;
}

// Rows of activations are multiplied in blocks of at most Kernels::max_block.
//
// Quantised activations: per group of 32 inputs and row a record of 48 bytes, records of a group side by side:
//     f32 scale, f32 scale * sum, f32 scale * sum of the first 16, f32 scale * sum of the last 16, 32 x i8
// Dense activations: [cols][rows] floats.
constexpr size_t kRecordBytes = 48;

struct Block {
  int rows = 0;
  const uint8_t* records = nullptr;  // [cols / 32][rows] records; null if no matrix needs them
  const float* columns = nullptr;    // [cols][rows]; null if no matrix needs them
};

enum class Act : int32_t { silu = 0, gelu_tanh = 1, gelu = 2 };

// Where a KV head's keys or values lie: slot s of block b at data + b * block_stride + s * slot_stride (elements).
struct PagedHead {
  const void* data = nullptr;
  int64_t block_stride = 0;
  int64_t slot_stride = 0;
};

// Attention of consecutive tokens of one row, for the query heads that share a KV head.
//
// Keys are walked in tiles of 64 and spans of 256, both aligned at absolute positions. Each span has an online softmax
// of its own; the spans are merged in order. So a query's result does not depend on what is computed beside it.
struct AttentionTask {
  const float* q = nullptr;  // token t, head g at q + t * q_stride + g * head_dim
  int64_t q_stride = 0;
  int tokens = 0;
  int group = 0;  // query heads
  int head_dim = 0;
  int64_t position = 0;  // of the first token
  int64_t window = 0;    // 0: none
  float scale = 1.0f;
  float softcap = 0.0f;  // 0: none
  PagedHead k, v;
  bool half = true;  // f16 cache, else f32
  const int32_t* table = nullptr;
  int block_shift = 0;
  float* out = nullptr;  // as q
  int64_t out_stride = 0;
  float* lse = nullptr;  // token t, head g at lse + t * lse_stride + g; or null
  int64_t lse_stride = 0;
  // One span only, left unfinished: per row head_dim values rounded up to 16, then maximum and sum (see partial_floats).
  int64_t span = -1;
  float* partial = nullptr;
  float* scratch = nullptr;  // attention_scratch() floats
};

constexpr int64_t kTileKeys = 64;
constexpr int64_t kSpanKeys = 256;

inline int64_t padded_dim(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }
inline int64_t partial_floats(int64_t head_dim) { return padded_dim(head_dim) + 16; }
inline int64_t attention_scratch(int64_t query_rows, int64_t head_dim) {
  const int64_t dim = padded_dim(head_dim);
  return 2 * kTileKeys * dim + query_rows * (3 * dim + 16 + 4) + 8 * kTileKeys + 64;
}

inline size_t wide_bytes(const Matrix& matrix) {
  return static_cast<size_t>(matrix.cols / kGroup) * (matrix.format == Format::q6_k ? 768 : 640);
}

struct Kernels {
  const char* name;
  int max_block;

  // out[panel p of count][row] -> out + row * ld + 16 * p: `count` panels from `first` on times the block's rows
  void (*multiply)(const Matrix& matrix, int64_t first, int64_t count, const Block& block, float* out, int64_t ld);
  // Quantised panels with a byte for each code and scales as floats, wide_bytes() each, and products with them: the same
  // bits as multiply(), cheaper from a few blocks of rows on.
  void (*widen)(const Matrix& matrix, int64_t first, int64_t count, uint8_t* out);
  void (*multiply_wide)(const Matrix& matrix, const uint8_t* wide, int64_t count, const Block& block, float* out, int64_t ld);
  // n floats, a multiple of 32, into records `stride` bytes apart
  void (*quantise)(const float* x, int64_t n, uint8_t* records, size_t stride);
  // the same, and behind each record a second one of what rounding left over: their sum has about 16 bits
  void (*quantise_twice)(const float* x, int64_t n, uint8_t* records, size_t stride);
  void (*attend)(const AttentionTask& task);
  // merges `spans` partials of one query row, `stride` floats apart, in order
  void (*merge)(const float* partials, int64_t spans, int64_t stride, int64_t head_dim, float* out, float* lse);

  // out = x / rms(x) * weight; out may be x
  void (*norm)(const float* x, const float* weight, int64_t n, float eps, float* out);
  void (*add)(float* x, const float* y, int64_t n);                       // x += y
  void (*add_scaled)(float* x, const float* y, float factor, int64_t n);  // x += factor * y
  // rows x cols of a tile, plus bias if there is one, stored to out or added to what is there
  void (*put_tile)(const float* tile, int64_t tile_ld, int64_t rows, int64_t cols, const float* bias, bool accumulate,
                   float* out, int64_t ld);
  void (*activate)(Act kind, const float* gate, const float* up, int64_t n, float* out);
  void (*softcap)(float* x, int64_t n, float cap);
  // the first 2 * half values of a head, in place
  void (*rotate)(float* x, const float* cos, const float* sin, int64_t half, bool interleaved);
  void (*to_half)(const float* x, int64_t n, uint16_t* out);  // to nearest, saturating; NaN stays NaN
  void (*softmax)(float* x, int64_t n);
  const sampling::Lanes* sampling;  // see sampling_lanes.h
};

}  // namespace lamella::host
