// Packed matrices times blocks of activations.
//
// Each output is one chain of fused multiply-adds over the inputs (dense) or groups (quantised) in order, whatever the
// number of rows or panels that are computed together: a row gets the same bits alone and in any batch.
#pragma once

#include "host/kernels.h"
#include "host/lanes/simd.h"

namespace lamella::host {
namespace {

inline float read_float(const uint8_t* p) {
  float x;
  __builtin_memcpy(&x, p, 4);
  return x;
}

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// The codes of 32 inputs for the rows of a part.
template <int kBits>
inline void load_codes(const uint8_t* group, PartBytes sets[8]) {
  if constexpr (kBits == 8) {
    for (int s = 0; s < 8; ++s) sets[s] = load_bytes(group + 64 * s);
    return;
  }
  for (int j = 0; j < 4; ++j) {
    const PartBytes pair = load_bytes(group + 64 * j);
    sets[j] = bits_and(pair, 15);
    sets[4 + j] = bits_and(shift<4>(pair), 15);
  }
  if constexpr (kBits == 5) {
    const PartBytes plane = load_bytes(group + 256);
    sets[0] = bits_or(sets[0], bits_and(shift<-4>(plane), 16));
    sets[1] = bits_or(sets[1], bits_and(shift<-3>(plane), 16));
    sets[2] = bits_or(sets[2], bits_and(shift<-2>(plane), 16));
    sets[3] = bits_or(sets[3], bits_and(shift<-1>(plane), 16));
    sets[4] = bits_or(sets[4], bits_and(plane, 16));
    sets[5] = bits_or(sets[5], bits_and(shift<1>(plane), 16));
    sets[6] = bits_or(sets[6], bits_and(shift<2>(plane), 16));
    sets[7] = bits_or(sets[7], bits_and(shift<3>(plane), 16));
  }
  if constexpr (kBits == 6) {
    for (int h = 0; h < 2; ++h) {
      const PartBytes plane = load_bytes(group + 256 + 64 * h);
      sets[4 * h] = bits_or(sets[4 * h], bits_and(shift<-4>(plane), 48));
      sets[4 * h + 1] = bits_or(sets[4 * h + 1], bits_and(shift<-2>(plane), 48));
      sets[4 * h + 2] = bits_or(sets[4 * h + 2], bits_and(plane, 48));
      sets[4 * h + 3] = bits_or(sets[4 * h + 3], bits_and(shift<2>(plane), 48));
    }
  }
}

// How a format's scales are read; kHalves: two scales for the two halves of a group (q6_k).
template <Format kFormat>
struct Traits {
  static constexpr int kBits = kFormat == Format::q8_0                                ? 8
                               : kFormat == Format::q6_k                              ? 6
                               : kFormat == Format::q5_0 || kFormat == Format::q5_1 || kFormat == Format::q5_k ? 5
                                                                                      : 4;
  static constexpr bool kMinimum = kFormat == Format::q4_1 || kFormat == Format::q5_1;
  static constexpr bool kSuperMinimum = kFormat == Format::q4_k || kFormat == Format::q5_k;
  static constexpr bool kHalves = kFormat == Format::q6_k;
  static constexpr bool kIsSuper = kSuperMinimum || kHalves;
  static constexpr float kZero = kBits == 8 ? 128.0f : kBits == 6 ? 32.0f : kBits == 5 ? 16.0f : 8.0f;
  static constexpr size_t kCodeBytes = code_bytes(kBits);
  static constexpr size_t kGroupBytes = kCodeBytes + (kMinimum ? 64 : 32);
  static constexpr size_t kSuperBytes = kSuperMinimum ? 64 : kHalves ? 32 : 0;
};

// Bytes that a single row's walk asks for ahead of itself: DRAM latency times a core's share of its bandwidth.
constexpr size_t kAhead = 3072;

template <Format kFormat, int kRows>
void multiply_quantised(const Matrix& matrix, int64_t first, int64_t count, const Block& block, float* out, int64_t ld) {
  using T = Traits<kFormat>;
  const int64_t groups = matrix.cols / kGroup;
  for (int64_t panel = 0; panel < count; ++panel)
    for (int part = 0; part < kParts; ++part) {
      const int row = part * kPartRows;  // first row of the part
      const uint8_t* p = matrix.panels + static_cast<size_t>(first + panel) * matrix.panel_stride;
      const uint8_t* records = block.records;
      PartFloats total[kRows];
      for (int t = 0; t < kRows; ++t) total[t] = part_splat(0.0f);
      PartFloats super_scale = part_splat(0.0f), super_minimum = part_splat(0.0f);
      for (int64_t g = 0; g < groups; ++g) {
        if constexpr (kRows <= 2) {
          if (part == 0)
            for (size_t line = 0; line < T::kGroupBytes; line += 64) prefetch(p + kAhead + line);
        }
        if constexpr (T::kIsSuper) {
          if (g % 8 == 0) {
            super_scale = part_load_half(reinterpret_cast<const uint16_t*>(p) + row);
            if constexpr (T::kSuperMinimum)
              super_minimum = mul(part_load_half(reinterpret_cast<const uint16_t*>(p + 32) + row), part_splat(-1.0f));
            p += T::kSuperBytes;
          }
        }
        PartBytes sets[8];
        load_codes<T::kBits>(p + 4 * row, sets);
        const uint8_t* scales = p + T::kCodeBytes;
        if constexpr (T::kHalves) {
          const PartFloats low = mul(super_scale, part_load_signed(reinterpret_cast<const int8_t*>(scales) + row));
          const PartFloats high = mul(super_scale, part_load_signed(reinterpret_cast<const int8_t*>(scales) + 16 + row));
          const PartFloats low_zero = mul(low, part_splat(-T::kZero)), high_zero = mul(high, part_splat(-T::kZero));
          for (int t = 0; t < kRows; ++t) {
            const uint8_t* record = records + static_cast<size_t>(t) * kRecordBytes;
            const PartFloats scale = part_splat(read_float(record));
            total[t] = fma(low_zero, part_splat(read_float(record + 8)), total[t]);
            total[t] = fma(high_zero, part_splat(read_float(record + 12)), total[t]);
            total[t] = fma(mul(low, scale), dot<T::kBits, 4>(sets, record + 16), total[t]);
            total[t] = fma(mul(high, scale), dot<T::kBits, 4>(sets + 4, record + 32), total[t]);
          }
        } else {
          PartFloats scale, minimum;
          if constexpr (T::kSuperMinimum) {
            scale = mul(super_scale, part_load_unsigned(scales + row));
            minimum = mul(super_minimum, part_load_unsigned(scales + 16 + row));
          } else {
            scale = part_load_half(reinterpret_cast<const uint16_t*>(scales) + row);
            if constexpr (T::kMinimum)
              minimum = part_load_half(reinterpret_cast<const uint16_t*>(scales + 32) + row);
            else
              minimum = mul(scale, part_splat(-T::kZero));
          }
          for (int t = 0; t < kRows; ++t) {
            const uint8_t* record = records + static_cast<size_t>(t) * kRecordBytes;
            total[t] = fma(minimum, part_splat(read_float(record + 4)), total[t]);
            total[t] = fma(mul(scale, part_splat(read_float(record))), dot<T::kBits, 8>(sets, record + 16), total[t]);
          }
        }
        p += T::kGroupBytes;
        records += static_cast<size_t>(kRows) * kRecordBytes;
      }
      for (int t = 0; t < kRows; ++t) part_store(out + t * ld + panel * kPanelRows + row, total[t]);
    }
}

template <Format kFormat>
struct DenseElement {
  using Type = uint16_t;
  static PartFloats load(const Type* p) { return kFormat == Format::f16 ? part_load_half(p) : part_load_bfloat(p); }
};
template <>
struct DenseElement<Format::f32> {
  using Type = float;
  static PartFloats load(const float* p) { return part_load(p); }
};

// kPanels neighbouring panels at once, so that few rows still keep enough chains in flight.
template <Format kFormat, int kRows, int kPanels>
void multiply_panels(const Matrix& matrix, int64_t panel, const Block& block, float* out, int64_t ld) {
  using Element = DenseElement<kFormat>;
  using Type = typename Element::Type;
  const Type* panels = reinterpret_cast<const Type*>(matrix.panels + static_cast<size_t>(panel) * matrix.panel_stride);
  const int64_t stride = matrix.cols * kPanelRows;  // elements
  for (int part = 0; part < kParts; ++part) {
    const int row = part * kPartRows;
    PartFloats total[kRows][kPanels];
    for (int t = 0; t < kRows; ++t)
      for (int i = 0; i < kPanels; ++i) total[t][i] = part_splat(0.0f);
    const float* x = block.columns;
    for (int64_t k = 0; k < matrix.cols; ++k, x += kRows) {
      PartFloats w[kPanels];
      for (int i = 0; i < kPanels; ++i) w[i] = Element::load(panels + i * stride + k * kPanelRows + row);
      for (int t = 0; t < kRows; ++t)
        for (int i = 0; i < kPanels; ++i) total[t][i] = fma(w[i], part_splat(x[t]), total[t][i]);
    }
    for (int t = 0; t < kRows; ++t)
      for (int i = 0; i < kPanels; ++i) part_store(out + t * ld + i * kPanelRows + row, total[t][i]);
  }
}

template <Format kFormat, int kRows>
void multiply_dense(const Matrix& matrix, int64_t first, int64_t count, const Block& block, float* out, int64_t ld) {
  constexpr int kPanels = kRows == 1 ? 4 : kRows <= 4 ? 2 : 1;
  int64_t i = 0;
  for (; i + kPanels <= count; i += kPanels)
    multiply_panels<kFormat, kRows, kPanels>(matrix, first + i, block, out + i * kPanelRows, ld);
  for (; i < count; ++i) multiply_panels<kFormat, kRows, 1>(matrix, first + i, block, out + i * kPanelRows, ld);
}

using Multiply = void (*)(const Matrix&, int64_t, int64_t, const Block&, float*, int64_t);

template <Format kFormat, int kRows>
constexpr Multiply multiply_of() {
  if constexpr (kFormat <= Format::bf16)
    return multiply_dense<kFormat, kRows>;
  else
    return multiply_quantised<kFormat, kRows>;
}

template <int kRows>
constexpr Multiply multiply_rows(Format format) {
  constexpr Multiply table[kNumFormats] = {
      multiply_of<Format::f32, kRows>(),  multiply_of<Format::f16, kRows>(),  multiply_of<Format::bf16, kRows>(),
      multiply_of<Format::q8_0, kRows>(), multiply_of<Format::q4_0, kRows>(), multiply_of<Format::q4_1, kRows>(),
      multiply_of<Format::q5_0, kRows>(), multiply_of<Format::q5_1, kRows>(), multiply_of<Format::q4_k, kRows>(),
      multiply_of<Format::q5_k, kRows>(), multiply_of<Format::q6_k, kRows>()};
  return table[static_cast<int>(format)];
}

// block.rows is what next_block() deals out: max_block, or at most 8.
void multiply(const Matrix& matrix, int64_t first, int64_t count, const Block& block, float* out, int64_t ld) {
  switch (block.rows) {
    case 1:
      return multiply_rows<1>(matrix.format)(matrix, first, count, block, out, ld);
    case 2:
      return multiply_rows<2>(matrix.format)(matrix, first, count, block, out, ld);
    case 3:
      return multiply_rows<3>(matrix.format)(matrix, first, count, block, out, ld);
    case 4:
      return multiply_rows<4>(matrix.format)(matrix, first, count, block, out, ld);
    default:
      break;
  }
  if constexpr (kMaxBlock > 4) {
    switch (block.rows) {
      case 5:
        return multiply_rows<5>(matrix.format)(matrix, first, count, block, out, ld);
      case 6:
        return multiply_rows<6>(matrix.format)(matrix, first, count, block, out, ld);
      case 7:
        return multiply_rows<7>(matrix.format)(matrix, first, count, block, out, ld);
      case 8:
        return multiply_rows<8>(matrix.format)(matrix, first, count, block, out, ld);
      default:
        break;
    }
    if constexpr (kMaxBlock > 8) multiply_rows<kMaxBlock>(matrix.format)(matrix, first, count, block, out, ld);
  }
}

}  // namespace
}  // namespace lamella::host
