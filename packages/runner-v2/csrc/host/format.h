// Weight formats and the one packed form that all of them take.
//
// A packed matrix is a row of panels; a panel holds 16 output rows, interleaved so that a vector lane is an output row:
//
//   dense       [cols][16] elements as they were in the file (f32, f16, bf16)
//   quantised   [cols / 32] groups of 32 inputs, each
//                 codes   256 bytes: word j, lane r holds the low nibbles of inputs 4j..4j+3 of row r in its low and
//                         those of inputs 16+4j..16+4j+3 in its high nibbles                 (4, 5 and 6 bit)
//                         or 512 bytes: word j, lane r = inputs 4j..4j+3 of row r, unsigned  (8 bit)
//                 high    64 bytes: byte (r, i), bit s = fifth bit of input 4s+i             (5 bit)
//                         or 128 bytes: two such planes of 2-bit fields, s < 4 and s >= 4    (6 bit)
//                 scales  16 x f16, for q4_1 and q5_1 followed by 16 x f16 minima
//                         or 16 x u8 and 16 x u8 (q4_k, q5_k), 2 x 16 x i8 (q6_k), which multiply the f16 scales
//                         (and minima) of a superblock of 256 inputs that stand before its first group
//
// A weight is scale * (code - zero) or scale * code + minimum; nothing is rounded in packing. Rows that pad the last
// panel have scale 0.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lamella::host {

constexpr int kPanelRows = 16;
constexpr int kGroup = 32;
constexpr int kSuper = 256;

// Values are part of packed tensors' metadata.
enum class Format : int32_t { f32 = 0, f16 = 1, bf16 = 2, q8_0 = 3, q4_0 = 4, q4_1 = 5, q5_0 = 6, q5_1 = 7, q4_k = 8, q5_k = 9, q6_k = 10 };
constexpr int kNumFormats = 11;

inline bool is_dense(Format format) { return format <= Format::bf16; }

struct FormatInfo {
  const char* name;
  int block_len;    // inputs per block in the file
  int block_bytes;  // of a block in the file
  int code_bits;
  bool minimum;     // adds a minimum instead of subtracting a zero point
  int zero;         // zero point of the codes
  bool super;       // sub-scales under superblock scales
};

inline const FormatInfo& info_of(Format format) {
  static const FormatInfo table[kNumFormats] = {
      {"float32", 1, 4, 32, false, 0, false},  {"float16", 1, 2, 16, false, 0, false},
      {"bfloat16", 1, 2, 16, false, 0, false}, {"q8_0", 32, 34, 8, false, 128, false},
      {"q4_0", 32, 18, 4, false, 8, false},    {"q4_1", 32, 20, 4, true, 0, false},
      {"q5_0", 32, 22, 5, false, 16, false},   {"q5_1", 32, 24, 5, true, 0, false},
      {"q4_k", 256, 144, 4, true, 0, true},    {"q5_k", 256, 176, 5, true, 0, true},
      {"q6_k", 256, 210, 6, false, 32, true},
  };
  return table[static_cast<int>(format)];
}

constexpr size_t code_bytes(int code_bits) {
  return code_bits == 8 ? 512 : code_bits == 4 ? 256 : code_bits == 5 ? 256 + 64 : 256 + 128;
}

// Bytes of one group of a panel, without what stands before a superblock.
inline size_t group_bytes(Format format) {
  const FormatInfo& info = info_of(format);
  return code_bytes(info.code_bits) + (info.super || !info.minimum ? 32 : 64);
}

inline size_t super_bytes(Format format) {
  const FormatInfo& info = info_of(format);
  return !info.super ? 0 : info.minimum ? 64 : 32;
}

inline size_t panel_bytes(Format format, int64_t cols) {
  if (is_dense(format)) return static_cast<size_t>(cols) * kPanelRows * static_cast<size_t>(info_of(format).block_bytes);
  const size_t groups = static_cast<size_t>(cols / kGroup);
  return groups * group_bytes(format) + (info_of(format).super ? groups / 8 * super_bytes(format) : 0);
}

inline int64_t num_panels(int64_t rows) { return (rows + kPanelRows - 1) / kPanelRows; }

// A packed matrix [rows, cols] that others own.
struct Matrix {
  Format format = Format::f32;
  int64_t rows = 0;
  int64_t cols = 0;
  const uint8_t* panels = nullptr;
  size_t panel_stride = 0;
  const float* bias = nullptr;  // [rows] or null
};

}  // namespace lamella::host
