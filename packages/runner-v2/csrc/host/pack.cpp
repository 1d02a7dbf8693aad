#include "host/pack.h"

#include <cstring>

#include "host/pool.h"

namespace lamella::host {
namespace {

uint16_t load16(const uint8_t* p) {
  uint16_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

void store16(uint8_t* p, uint16_t value) { std::memcpy(p, &value, sizeof value); }

// Where group g of a panel begins, and its superblock's scales if it has any.
size_t group_offset(Format format, int64_t group) {
  const size_t g = static_cast<size_t>(group);
  return g * group_bytes(format) + (info_of(format).super ? (g / 8 + 1) * super_bytes(format) : 0);
}

size_t super_offset(Format format, int64_t group) {
  return group_offset(format, group / 8 * 8) - super_bytes(format);
}

// Codes of 32 inputs, one byte each, into lane r of a group.
void put_nibbles(const uint8_t* codes, int lane, uint8_t* group) {
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < 4; ++i)
      group[64 * j + 4 * lane + i] = static_cast<uint8_t>((codes[4 * j + i] & 15) | (codes[16 + 4 * j + i] & 15) << 4);
}

void put_fifth_bits(const uint8_t* codes, int lane, uint8_t* plane) {
  for (int i = 0; i < 4; ++i) {
    unsigned byte = 0;
    for (int s = 0; s < 8; ++s) byte |= static_cast<unsigned>(codes[4 * s + i] >> 4 & 1) << s;
    plane[4 * lane + i] = static_cast<uint8_t>(byte);
  }
}

void put_high_pairs(const uint8_t* codes, int lane, uint8_t* planes) {
  for (int half = 0; half < 2; ++half)
    for (int i = 0; i < 4; ++i) {
      unsigned byte = 0;
      for (int s = 0; s < 4; ++s) byte |= static_cast<unsigned>(codes[16 * half + 4 * s + i] >> 4 & 3) << (2 * s);
      planes[64 * half + 4 * lane + i] = static_cast<uint8_t>(byte);
    }
}

// One block of 32 of the formats without superblocks.
void pack_block(Format format, const uint8_t* block, int lane, uint8_t* group) {
  const FormatInfo& info = info_of(format);
  uint8_t* scales = group + code_bytes(info.code_bits);
  store16(scales + 2 * lane, load16(block));
  const uint8_t* rest = block + 2;
  if (info.minimum) {
    store16(scales + 32 + 2 * lane, load16(block + 2));
    rest += 2;
  }
  if (info.code_bits == 8) {
    for (int j = 0; j < 8; ++j)
      for (int i = 0; i < 4; ++i) group[64 * j + 4 * lane + i] = static_cast<uint8_t>(rest[4 * j + i] ^ 0x80);
    return;
  }
  if (info.code_bits == 5) {
    uint32_t high;
    std::memcpy(&high, rest, sizeof high);
    rest += 4;
    for (int i = 0; i < 4; ++i) {
      unsigned byte = 0;
      for (int s = 0; s < 8; ++s) byte |= (high >> (4 * s + i) & 1u) << s;
      group[256 + 4 * lane + i] = static_cast<uint8_t>(byte);
    }
  }
  // the file's nibbles already pair input b with input b + 16
  for (int j = 0; j < 4; ++j) std::memcpy(group + 64 * j + 4 * lane, rest + 4 * j, 4);
}

// Sub-scale and sub-minimum of group g of a q4_k or q5_k block: 6 bits each, in 12 bytes.
void read_sub_scales(const uint8_t* packed, int g, uint8_t& scale, uint8_t& minimum) {
  if (g < 4) {
    scale = packed[g] & 63;
    minimum = packed[g + 4] & 63;
  } else {
    scale = static_cast<uint8_t>((packed[g + 4] & 15) | (packed[g - 4] >> 6) << 4);
    minimum = static_cast<uint8_t>((packed[g + 4] >> 4) | (packed[g] >> 6) << 4);
  }
}

void pack_super_45(Format format, const uint8_t* block, int lane, int64_t first_group, uint8_t* panel) {
  const bool five = format == Format::q5_k;
  uint8_t* super = panel + super_offset(format, first_group);
  store16(super + 2 * lane, load16(block));
  store16(super + 32 + 2 * lane, load16(block + 2));
  const uint8_t* sub = block + 4;
  const uint8_t* high = block + 16;
  const uint8_t* low = high + (five ? 32 : 0);
  for (int g = 0; g < 8; ++g) {
    uint8_t* group = panel + group_offset(format, first_group + g);
    uint8_t codes[kGroup];
    for (int b = 0; b < kGroup; ++b) {
      const unsigned nibble = (g & 1) != 0 ? low[32 * (g / 2) + b] >> 4 : low[32 * (g / 2) + b] & 15;
      codes[b] = static_cast<uint8_t>(nibble | (five ? (high[b] >> g & 1u) << 4 : 0u));
    }
    put_nibbles(codes, lane, group);
    if (five) put_fifth_bits(codes, lane, group + 256);
    uint8_t* scales = group + code_bytes(five ? 5 : 4);
    read_sub_scales(sub, g, scales[lane], scales[16 + lane]);
  }
}

void pack_super_6(const uint8_t* block, int lane, int64_t first_group, uint8_t* panel) {
  store16(panel + super_offset(Format::q6_k, first_group) + 2 * lane, load16(block + 208));
  for (int g = 0; g < 8; ++g) {
    uint8_t* group = panel + group_offset(Format::q6_k, first_group + g);
    // 128 inputs share 64 low and 32 high bytes; quarter q of them uses nibble q / 2 and bit pair q
    const int half = g / 4, quarter = g % 4;
    const uint8_t* low = block + 64 * half + 32 * (quarter & 1);
    const uint8_t* high = block + 128 + 32 * half;
    uint8_t codes[kGroup];
    for (int b = 0; b < kGroup; ++b) {
      const unsigned nibble = quarter >= 2 ? low[b] >> 4 : low[b] & 15;
      codes[b] = static_cast<uint8_t>(nibble | (high[b] >> (2 * quarter) & 3u) << 4);
    }
    put_nibbles(codes, lane, group);
    put_high_pairs(codes, lane, group + 256);
    uint8_t* scales = group + code_bytes(6);
    scales[lane] = block[192 + 2 * g];
    scales[16 + lane] = block[192 + 2 * g + 1];
  }
}

template <class Element>
void interleave(const uint8_t* source, size_t row_stride, int64_t rows, int64_t cols, uint8_t* panel) {
  Element* out = reinterpret_cast<Element*>(panel);
  for (int64_t lane = 0; lane < rows; ++lane) {
    const Element* row = reinterpret_cast<const Element*>(source + static_cast<size_t>(lane) * row_stride);
    for (int64_t k = 0; k < cols; ++k) out[k * kPanelRows + lane] = row[k];
  }
}

void pack_panel(Format format, int64_t rows, int64_t cols, const uint8_t* source, size_t row_stride, uint8_t* panel) {
  if (rows < kPanelRows) std::memset(panel, 0, panel_bytes(format, cols));
  if (format == Format::f32) return interleave<uint32_t>(source, row_stride, rows, cols, panel);
  if (is_dense(format)) return interleave<uint16_t>(source, row_stride, rows, cols, panel);
  const FormatInfo& info = info_of(format);
  const int64_t blocks = cols / info.block_len;
  for (int64_t b = 0; b < blocks; ++b)
    for (int lane = 0; lane < static_cast<int>(rows); ++lane) {
      const uint8_t* block =
          source + static_cast<size_t>(lane) * row_stride + static_cast<size_t>(b) * static_cast<size_t>(info.block_bytes);
      if (!info.super)
        pack_block(format, block, lane, panel + group_offset(format, b));
      else if (format == Format::q6_k)
        pack_super_6(block, lane, 8 * b, panel);
      else
        pack_super_45(format, block, lane, 8 * b, panel);
    }
}

// Code of input i in [0, 32) of a lane.
int code_of(int code_bits, const uint8_t* group, int lane, int i) {
  const int s = i / 4, byte = 4 * lane + i % 4;
  if (code_bits == 8) return group[64 * s + byte];
  const int nibble = s < 4 ? group[64 * s + byte] & 15 : group[64 * (s - 4) + byte] >> 4;
  if (code_bits == 5) return nibble | (group[256 + byte] >> s & 1) << 4;
  if (code_bits == 6) return nibble | (group[256 + 64 * (s / 4) + byte] >> (2 * (s % 4)) & 3) << 4;
  return nibble;
}

void read_group(Format format, const uint8_t* panel, int64_t g, int lane, float factor, float* out) {
  const FormatInfo& info = info_of(format);
  const uint8_t* group = panel + group_offset(format, g);
  const uint8_t* scales = group + code_bytes(info.code_bits);
  float first, second, minimum = 0.0f;  // scales of the two halves
  if (!info.super) {
    first = second = half_to_float(load16(scales + 2 * lane));
    if (info.minimum) minimum = half_to_float(load16(scales + 32 + 2 * lane));
  } else {
    const uint8_t* super = panel + super_offset(format, g);
    const float d = half_to_float(load16(super + 2 * lane));
    if (format == Format::q6_k) {
      first = d * static_cast<float>(static_cast<int8_t>(scales[lane]));
      second = d * static_cast<float>(static_cast<int8_t>(scales[16 + lane]));
    } else {
      first = second = d * static_cast<float>(scales[lane]);
      minimum = -half_to_float(load16(super + 32 + 2 * lane)) * static_cast<float>(scales[16 + lane]);
    }
  }
  for (int i = 0; i < kGroup; ++i) {
    const float code = static_cast<float>(code_of(info.code_bits, group, lane, i) - info.zero);
    out[i] = ((i < 16 ? first : second) * code + minimum) * factor;
  }
}

}  // namespace

float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = half >> 10 & 31u, mantissa = half & 1023u;
  uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7F800000u | mantissa << 13;
  } else if (exponent != 0) {
    bits = sign | (exponent + 112) << 23 | mantissa << 13;
  } else {
    const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
    std::memcpy(&bits, &magnitude, sizeof bits);
    bits |= sign;
  }
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float bfloat_to_float(uint16_t bfloat) {
  const uint32_t bits = static_cast<uint32_t>(bfloat) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

void pack_rows(Format format, int64_t rows, int64_t cols, const uint8_t* source, size_t row_stride, uint8_t* panels) {
  const size_t stride = panel_bytes(format, cols);
  Pool::get().parallel_for(num_panels(rows), [=](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t left = rows - p * kPanelRows;
      pack_panel(format, left < kPanelRows ? left : kPanelRows, cols,
                 source + static_cast<size_t>(p * kPanelRows) * row_stride, row_stride,
                 panels + static_cast<size_t>(p) * stride);
    }
  });
}

void read_row(const Matrix& matrix, int64_t row, float scale, float* out) {
  const uint8_t* panel = matrix.panels + static_cast<size_t>(row / kPanelRows) * matrix.panel_stride;
  const int lane = static_cast<int>(row % kPanelRows);
  if (matrix.format == Format::f32) {
    const float* elements = reinterpret_cast<const float*>(panel);
    for (int64_t k = 0; k < matrix.cols; ++k) out[k] = elements[k * kPanelRows + lane] * scale;
  } else if (is_dense(matrix.format)) {
    const uint16_t* elements = reinterpret_cast<const uint16_t*>(panel);
    const auto convert = matrix.format == Format::f16 ? half_to_float : bfloat_to_float;
    for (int64_t k = 0; k < matrix.cols; ++k) out[k] = convert(elements[k * kPanelRows + lane]) * scale;
  } else {
    for (int64_t g = 0; g < matrix.cols / kGroup; ++g)
      read_group(matrix.format, panel, g, lane, scale, out + g * kGroup);
  }
}

}  // namespace lamella::host
