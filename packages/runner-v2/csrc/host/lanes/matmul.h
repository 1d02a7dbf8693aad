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

// Set s of a group's codes: inputs 4s..4s+3 for the rows of a part, one code a byte.
template <int kBits>
inline PartBytes code_set(const uint8_t* group, int s) {
  if constexpr (kBits == 8) return load_bytes(group + 64 * s);
  const PartBytes pair = load_bytes(group + 64 * (s % 4));
  const PartBytes low = bits_and(s < 4 ? pair : shift<4>(pair), 15);
  if constexpr (kBits == 5) {
    const PartBytes plane = load_bytes(group + 256);
    const PartBytes moved = s == 0   ? shift<-4>(plane)
                            : s == 1 ? shift<-3>(plane)
                            : s == 2 ? shift<-2>(plane)
                            : s == 3 ? shift<-1>(plane)
                            : s == 4 ? plane
                            : s == 5 ? shift<1>(plane)
                            : s == 6 ? shift<2>(plane)
                                     : shift<3>(plane);
    return bits_or(low, bits_and(moved, 16));
  }
  if constexpr (kBits == 6) {
    const PartBytes plane = load_bytes(group + 256 + 64 * (s / 4));
    const PartBytes moved = s % 4 == 0   ? shift<-4>(plane)
                            : s % 4 == 1 ? shift<-2>(plane)
                            : s % 4 == 2 ? plane
                                         : shift<2>(plane);
    return bits_or(low, bits_and(moved, 48));
  }
  return low;
}

// How a format lies in a panel. kHalves: a scale for each half of a group (q6_k).
template <Format kFormat>
struct Traits {
  static constexpr bool kFive = kFormat == Format::q5_0 || kFormat == Format::q5_1 || kFormat == Format::q5_k;
  static constexpr int kBits = kFormat == Format::q8_0 ? 8 : kFormat == Format::q6_k ? 6 : kFive ? 5 : 4;
  static constexpr bool kMinimum = kFormat == Format::q4_1 || kFormat == Format::q5_1;
  static constexpr bool kSuperMinimum = kFormat == Format::q4_k || kFormat == Format::q5_k;
  static constexpr int kHalves = kFormat == Format::q6_k ? 2 : 1;
  static constexpr bool kIsSuper = kSuperMinimum || kHalves == 2;
  static constexpr float kZero = kBits == 8 ? 128.0f : kBits == 6 ? 32.0f : kBits == 5 ? 16.0f : 8.0f;
  static constexpr size_t kCodeBytes = code_bytes(kBits);
  static constexpr size_t kGroupBytes = kCodeBytes + (kMinimum ? 64 : 32);
  static constexpr size_t kSuperBytes = kSuperMinimum ? 64 : kHalves == 2 ? 32 : 0;
};

// Scales and minima of a group for the rows of a part; one for each half of the group's inputs where they differ.
template <int kHalves>
struct Scales {
  PartFloats scale[kHalves], minimum[kHalves];
};

// A walk over the groups of one part of a panel, as it is stored.
template <Format kFormat>
class StoredGroups {
  using T = Traits<kFormat>;

 public:
  static constexpr int kBits = T::kBits;
  static constexpr int kHalves = T::kHalves;
  // Bytes that a single row's walk asks for ahead of itself: DRAM latency times a core's share of its bandwidth.
  static constexpr size_t kAhead = 3072;

  void start(const uint8_t* panel, int part) {
    p_ = panel;
    row_ = part * kPartRows;
  }
  void enter(int64_t group) {
    if constexpr (T::kIsSuper) {
      if (group % 8 != 0) return;
      super_scale_ = part_load_half(reinterpret_cast<const uint16_t*>(p_) + row_);
      if constexpr (T::kSuperMinimum)
        super_minimum_ = mul(part_load_half(reinterpret_cast<const uint16_t*>(p_ + 32) + row_), part_splat(-1.0f));
      p_ += T::kSuperBytes;
    }
  }
  void ask_ahead() const {
    if (row_ == 0)
      for (size_t line = 0; line < T::kGroupBytes; line += 64) prefetch(p_ + kAhead + line);
  }
  PartBytes codes(int s) const { return code_set<kBits>(p_ + 4 * row_, s); }
  Scales<kHalves> scales() const {
    Scales<kHalves> out;
    const uint8_t* p = p_ + T::kCodeBytes;
    if constexpr (kHalves == 2) {
      for (int half = 0; half < 2; ++half) {
        out.scale[half] = mul(super_scale_, part_load_signed(reinterpret_cast<const int8_t*>(p) + 16 * half + row_));
        out.minimum[half] = mul(out.scale[half], part_splat(-T::kZero));
      }
    } else if constexpr (T::kSuperMinimum) {
      out.scale[0] = mul(super_scale_, part_load_unsigned(p + row_));
      out.minimum[0] = mul(super_minimum_, part_load_unsigned(p + 16 + row_));
    } else {
      out.scale[0] = part_load_half(reinterpret_cast<const uint16_t*>(p) + row_);
      if constexpr (T::kMinimum)
        out.minimum[0] = part_load_half(reinterpret_cast<const uint16_t*>(p + 32) + row_);
      else
        out.minimum[0] = mul(out.scale[0], part_splat(-T::kZero));
    }
    return out;
  }
  void leave() { p_ += T::kGroupBytes; }

 private:
  const uint8_t* p_ = nullptr;
  int row_ = 0;
  PartFloats super_scale_, super_minimum_;
};

// A walk over a widened panel: a byte for each code, scales as floats. See widen().
template <int kCodeBits, int kNumHalves>
class WideGroups {
 public:
  static constexpr int kBits = kCodeBits;
  static constexpr int kHalves = kNumHalves;
  static constexpr size_t kGroupBytes = 512 + 128 * kHalves;

  void start(const uint8_t* panel, int part) {
    p_ = panel;
    row_ = part * kPartRows;
  }
  void enter(int64_t) {}
  void ask_ahead() const {}
  PartBytes codes(int s) const { return load_bytes(p_ + 64 * s + 4 * row_); }
  Scales<kHalves> scales() const {
    Scales<kHalves> out;
    const float* p = reinterpret_cast<const float*>(p_ + 512) + row_;
    for (int half = 0; half < kHalves; ++half) {
      out.scale[half] = part_load(p + 16 * half);
      out.minimum[half] = part_load(p + 16 * (kHalves + half));
    }
    return out;
  }
  void leave() { p_ += kGroupBytes; }

 private:
  const uint8_t* p_ = nullptr;
  int row_ = 0;
};

// kRows rows of activations times kCols parts of panels. The rows and parts take turns set by set, so that their chains
// of additions run side by side and what is loaded serves several of them.
template <class Groups, int kRows, int kCols>
void multiply_groups(const uint8_t* panels, size_t panel_stride, int first_part, int64_t groups, const uint8_t* records,
                     size_t pitch, float* out, int64_t ld) {
  constexpr int kTiles = kRows * kCols, kHalves = Groups::kHalves, kSets = 8 / kHalves;
  Groups walk[kCols];
  PartFloats total[kTiles];
  LAMELLA_UNROLL
  for (int c = 0; c < kCols; ++c)
    walk[c].start(panels + static_cast<size_t>((first_part + c) / kParts) * panel_stride, (first_part + c) % kParts);
  LAMELLA_UNROLL
  for (int i = 0; i < kTiles; ++i) total[i] = part_splat(0.0f);
  for (int64_t g = 0; g < groups; ++g) {
    LAMELLA_UNROLL
    for (int c = 0; c < kCols; ++c) {
      walk[c].enter(g);
      if constexpr (kRows == 1) walk[c].ask_ahead();
    }
    LAMELLA_UNROLL
    for (int half = 0; half < kHalves; ++half) {
      DotSum<Groups::kBits> sums[kTiles];
      LAMELLA_UNROLL
      for (int s = 0; s < kSets; ++s) {
        PartBytes codes[kCols];
        LAMELLA_UNROLL
        for (int c = 0; c < kCols; ++c) codes[c] = walk[c].codes(half * kSets + s);
        LAMELLA_UNROLL
        for (int t = 0; t < kRows; ++t) {
          const PartBytes a = splat_bytes(records + t * kRecordBytes + 16 + 4 * (half * kSets + s));
          LAMELLA_UNROLL
          for (int c = 0; c < kCols; ++c) sums[t * kCols + c].add(s, codes[c], a);
        }
      }
      Scales<kHalves> scales[kCols];
      LAMELLA_UNROLL
      for (int c = 0; c < kCols; ++c) scales[c] = walk[c].scales();
      LAMELLA_UNROLL
      for (int t = 0; t < kRows; ++t) {
        const uint8_t* record = records + t * kRecordBytes;
        const PartFloats scale = part_splat(read_float(record));
        const PartFloats sum = part_splat(read_float(record + (kHalves == 2 ? 8 + 4 * half : 4)));
        LAMELLA_UNROLL
        for (int c = 0; c < kCols; ++c) {
          PartFloats& x = total[t * kCols + c];
          x = fma(scales[c].minimum[half], sum, x);
          x = fma(mul(scales[c].scale[half], scale), sums[t * kCols + c].value(), x);
        }
      }
    }
    LAMELLA_UNROLL
    for (int c = 0; c < kCols; ++c) walk[c].leave();
    records += pitch;
  }
  LAMELLA_UNROLL
  for (int i = 0; i < kTiles; ++i) part_store(out + i / kCols * ld + i % kCols * kPartRows, total[i]);
}

// All parts of `count` panels for kRows rows of a block.
template <class Groups, int kRows>
void multiply_rows(const uint8_t* panels, size_t panel_stride, int64_t count, int64_t groups, const uint8_t* records,
                   size_t pitch, float* out, int64_t ld) {
  const int parts = static_cast<int>(count) * kParts;
  int part = 0;
  for (; part + kProductParts <= parts; part += kProductParts)
    multiply_groups<Groups, kRows, kProductParts>(panels, panel_stride, part, groups, records, pitch, out + part * kPartRows, ld);
  for (; part < parts; ++part)
    multiply_groups<Groups, kRows, 1>(panels, panel_stride, part, groups, records, pitch, out + part * kPartRows, ld);
}

// The instance for `rows` <= kRows rows.
template <class Groups, int kRows>
inline void multiply_some_rows(int rows, const uint8_t* panels, size_t panel_stride, int64_t count, int64_t groups,
                               const uint8_t* records, size_t pitch, float* out, int64_t ld) {
  if (rows == kRows) return multiply_rows<Groups, kRows>(panels, panel_stride, count, groups, records, pitch, out, ld);
  // five rows go as three and two
  if constexpr (kRows > 1)
    multiply_some_rows<Groups, kRows == 6 ? 4 : kRows - 1>(rows, panels, panel_stride, count, groups, records, pitch, out, ld);
}

// No remainder so small that loads would outweigh the products.
inline int rows_at_once(int left) {
  if (left == 5 && kProductRows > 4) return 3;
  if ((left == 7 || left == 8) && kProductRows > 4) return 4;
  return left < kProductRows ? left : kProductRows;
}

template <class Groups>
void multiply_block(const uint8_t* panels, size_t panel_stride, int64_t count, int64_t groups, const Block& block, float* out,
                    int64_t ld) {
  const size_t pitch = static_cast<size_t>(block.rows) * kRecordBytes;
  for (int row = 0; row < block.rows;) {
    const int rows = rows_at_once(block.rows - row);
    multiply_some_rows<Groups, kProductRows>(rows, panels, panel_stride, count, groups,
                                             block.records + static_cast<size_t>(row) * kRecordBytes, pitch, out + row * ld, ld);
    row += rows;
  }
}

template <Format kFormat>
void multiply_stored(const Matrix& matrix, int64_t first, int64_t count, const Block& block, float* out, int64_t ld) {
  multiply_block<StoredGroups<kFormat>>(matrix.panels + static_cast<size_t>(first) * matrix.panel_stride, matrix.panel_stride,
                                        count, matrix.cols / kGroup, block, out, ld);
}

template <Format kFormat>
void widen_format(const Matrix& matrix, int64_t first, int64_t count, uint8_t* out) {
  using T = Traits<kFormat>;
  using Wide = WideGroups<T::kBits, T::kHalves>;
  const int64_t groups = matrix.cols / kGroup;
  for (int64_t panel = 0; panel < count; ++panel)
    for (int part = 0; part < kParts; ++part) {
      StoredGroups<kFormat> walk;
      walk.start(matrix.panels + static_cast<size_t>(first + panel) * matrix.panel_stride, part);
      uint8_t* to = out + static_cast<size_t>(panel * groups) * Wide::kGroupBytes;
      for (int64_t g = 0; g < groups; ++g, to += Wide::kGroupBytes) {
        walk.enter(g);
        walk.ask_ahead();
        LAMELLA_UNROLL
        for (int s = 0; s < 8; ++s) store_bytes(to + 64 * s + 4 * kPartRows * part, walk.codes(s));
        const Scales<T::kHalves> scales = walk.scales();
        float* floats = reinterpret_cast<float*>(to + 512) + kPartRows * part;
        for (int half = 0; half < T::kHalves; ++half) {
          part_store(floats + 16 * half, scales.scale[half]);
          part_store(floats + 16 * (T::kHalves + half), scales.minimum[half]);
        }
        walk.leave();
      }
    }
}

template <Format kFormat>
void multiply_widened(const Matrix& matrix, const uint8_t* wide, int64_t count, const Block& block, float* out, int64_t ld) {
  using T = Traits<kFormat>;
  using Wide = WideGroups<T::kBits, T::kHalves>;
  const int64_t groups = matrix.cols / kGroup;
  multiply_block<Wide>(wide, static_cast<size_t>(groups) * Wide::kGroupBytes, count, groups, block, out, ld);
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

// kCols parts of panels at once, so that few rows still keep enough chains in flight.
template <Format kFormat, int kRows, int kCols>
void multiply_columns(const Matrix& matrix, int64_t panel, int first_part, const float* x, int pitch, float* out, int64_t ld) {
  using Element = DenseElement<kFormat>;
  using Type = typename Element::Type;
  const Type* from[kCols];
  PartFloats total[kRows * kCols];
  LAMELLA_UNROLL
  for (int c = 0; c < kCols; ++c) {
    const int part = first_part + c;
    from[c] = reinterpret_cast<const Type*>(matrix.panels + static_cast<size_t>(panel + part / kParts) * matrix.panel_stride) +
              part % kParts * kPartRows;
  }
  LAMELLA_UNROLL
  for (int t = 0; t < kRows * kCols; ++t) total[t] = part_splat(0.0f);
  for (int64_t k = 0; k < matrix.cols; ++k, x += pitch) {
    PartFloats w[kCols];
    LAMELLA_UNROLL
    for (int c = 0; c < kCols; ++c) w[c] = Element::load(from[c] + k * kPanelRows);
    LAMELLA_UNROLL
    for (int t = 0; t < kRows; ++t) {
      const PartFloats a = part_splat(x[t]);
      LAMELLA_UNROLL
      for (int c = 0; c < kCols; ++c) total[t * kCols + c] = fma(w[c], a, total[t * kCols + c]);
    }
  }
  LAMELLA_UNROLL
  for (int t = 0; t < kRows * kCols; ++t) part_store(out + t / kCols * ld + t % kCols * kPartRows, total[t]);
}

template <Format kFormat, int kRows>
void multiply_dense_rows(const Matrix& matrix, int64_t first, int64_t count, const float* x, int pitch, float* out, int64_t ld) {
  constexpr int kCols = kRows == 1 ? 2 * kProductParts : kProductParts;
  const int parts = static_cast<int>(count) * kParts;
  int part = 0;
  for (; part + kCols <= parts; part += kCols)
    multiply_columns<kFormat, kRows, kCols>(matrix, first, part, x, pitch, out + part * kPartRows, ld);
  for (; part < parts; ++part)
    multiply_columns<kFormat, kRows, 1>(matrix, first, part, x, pitch, out + part * kPartRows, ld);
}

template <Format kFormat>
void multiply_dense(const Matrix& matrix, int64_t first, int64_t count, const Block& block, float* out, int64_t ld) {
  int row = 0;
  for (; row + kDenseRows <= block.rows; row += kDenseRows)
    multiply_dense_rows<kFormat, kDenseRows>(matrix, first, count, block.columns + row, block.rows, out + row * ld, ld);
  if constexpr (kDenseRows > 4)
    for (; row + 4 <= block.rows; row += 4)
      multiply_dense_rows<kFormat, 4>(matrix, first, count, block.columns + row, block.rows, out + row * ld, ld);
  if constexpr (kDenseRows > 2)
    for (; row + 2 <= block.rows; row += 2)
      multiply_dense_rows<kFormat, 2>(matrix, first, count, block.columns + row, block.rows, out + row * ld, ld);
  for (; row < block.rows; ++row)
    multiply_dense_rows<kFormat, 1>(matrix, first, count, block.columns + row, block.rows, out + row * ld, ld);
}

void multiply(const Matrix& matrix, int64_t first, int64_t count, const Block& block, float* out, int64_t ld) {
  constexpr void (*table[kNumFormats])(const Matrix&, int64_t, int64_t, const Block&, float*, int64_t) = {
      multiply_dense<Format::f32>,   multiply_dense<Format::f16>,   multiply_dense<Format::bf16>,  multiply_stored<Format::q8_0>,
      multiply_stored<Format::q4_0>, multiply_stored<Format::q4_1>, multiply_stored<Format::q5_0>, multiply_stored<Format::q5_1>,
      multiply_stored<Format::q4_k>, multiply_stored<Format::q5_k>, multiply_stored<Format::q6_k>};
  table[static_cast<int>(matrix.format)](matrix, first, count, block, out, ld);
}

// q8_0 .. q6_k only.
void widen(const Matrix& matrix, int64_t first, int64_t count, uint8_t* out) {
  constexpr void (*table[])(const Matrix&, int64_t, int64_t, uint8_t*) = {
      widen_format<Format::q8_0>, widen_format<Format::q4_0>, widen_format<Format::q4_1>, widen_format<Format::q5_0>,
      widen_format<Format::q5_1>, widen_format<Format::q4_k>, widen_format<Format::q5_k>, widen_format<Format::q6_k>};
  table[static_cast<int>(matrix.format) - static_cast<int>(Format::q8_0)](matrix, first, count, out);
}

void multiply_wide(const Matrix& matrix, const uint8_t* wide, int64_t count, const Block& block, float* out, int64_t ld) {
  constexpr void (*table[])(const Matrix&, const uint8_t*, int64_t, const Block&, float*, int64_t) = {
      multiply_widened<Format::q8_0>, multiply_widened<Format::q4_0>, multiply_widened<Format::q4_1>,
      multiply_widened<Format::q5_0>, multiply_widened<Format::q5_1>, multiply_widened<Format::q4_k>,
      multiply_widened<Format::q5_k>, multiply_widened<Format::q6_k>};
  table[static_cast<int>(matrix.format) - static_cast<int>(Format::q8_0)](matrix, wide, count, block, out, ld);
}

}  // namespace
}  // namespace lamella::host
