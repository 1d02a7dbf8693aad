// Stacked matrices, rows of activations made ready for them, and the loop that multiplies the two.
#pragma once

#include <cstdint>
#include <vector>

#include "host/isa.h"
#include "host/kernels.h"
#include "host/pool.h"
#include "host/scratch.h"

namespace lamella::host {

// Matrices with the same input, their outputs side by side.
struct Linear {
  std::vector<Matrix> parts;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t panels = 0;
  std::vector<int64_t> starts;  // of each part's outputs
  bool quantised = false;  // some part is
  bool dense = false;

  void add(const Matrix& part) {
    parts.push_back(part);
    starts.push_back(rows);
    rows += part.rows;
    cols = part.cols;
    panels += num_panels(part.rows);
    (is_dense(part.format) ? dense : quantised) = true;
  }
};

// Rows of activations in the layouts that a Linear multiplies.
//
//   rows    |<- max_block ->|<- max_block ->| ... |<- 8 ->|<- rest ->|     each block lies on its own
//
// Fine inputs hold each row as two: rounded to 8 bits, and the rounded remainder. Their products are added. That is twice
// the work; where results react to it most (queries and keys, what attention gives, logits) it is worth it.
class Inputs {
 public:
  // Room for `rows` rows; what they hold is put in afterwards.
  static Inputs take(Scratch& scratch, const Kernels& kernels, int64_t rows, int64_t cols, bool quantised, bool dense) {
    Inputs inputs;
    inputs.rows_ = rows;
    inputs.cols_ = cols;
    inputs.max_block_ = kernels.max_block;
    if (quantised) inputs.records_ = scratch.take<uint8_t>(rows * (cols / kGroup) * static_cast<int64_t>(kRecordBytes));
    if (dense) inputs.columns_ = scratch.take<float>(rows * cols);
    return inputs;
  }
  static Inputs take(Scratch& scratch, const Kernels& kernels, int64_t rows, const Linear& linear) {
    return take(scratch, kernels, rows, linear.cols, linear.quantised, linear.dense);
  }
  static Inputs take_fine(Scratch& scratch, const Kernels& kernels, int64_t rows, const Linear& linear) {
    if (linear.dense) return take(scratch, kernels, rows, linear);
    Inputs inputs = take(scratch, kernels, 2 * rows, linear);
    inputs.fine_ = true;
    return inputs;
  }

  // `count` rows from `first` on, as inputs of their own. Only if these blocks were laid out by part().
  Inputs part(int64_t first, int64_t count) const {
    Inputs inputs = *this;
    inputs.rows_ = count;
    if (records_ != nullptr) inputs.records_ = records_ + first * (cols_ / kGroup) * static_cast<int64_t>(kRecordBytes);
    if (columns_ != nullptr) inputs.columns_ = columns_ + first * cols_;
    return inputs;
  }

  // Physical rows: two for each of fine inputs.
  int64_t rows() const { return rows_; }
  bool fine() const { return fine_; }
  int64_t cols() const { return cols_; }

  // First row of the block of a row, and how many rows that block has.
  void block_at(int64_t row, int64_t& first, int& count) const {
    const int64_t full = rows_ / max_block_ * max_block_;
    if (row < full) {
      first = row / max_block_ * max_block_;
      count = max_block_;
    } else if (rows_ - full > 8 && row < full + 8) {
      first = full;
      count = 8;
    } else {
      first = rows_ - full > 8 ? full + 8 : full;
      count = static_cast<int>(rows_ - first);
    }
  }

  Block block(int64_t first, int count) const {
    Block block;
    block.rows = count;
    if (records_ != nullptr) block.records = records_ + first * (cols_ / kGroup) * static_cast<int64_t>(kRecordBytes);
    if (columns_ != nullptr) block.columns = columns_ + first * cols_;
    return block;
  }

  // Columns [col, col + n) of a row. With quantised parts col and n are multiples of 32.
  void put(const Kernels& kernels, int64_t row, int64_t col, int64_t n, const float* x) {
    if (fine_) row *= 2;
    int64_t first;
    int count;
    block_at(row, first, count);
    if (records_ != nullptr)
      (fine_ ? kernels.quantise_twice : kernels.quantise)(
          x, n, record(row, first, count, col / kGroup), static_cast<size_t>(count) * kRecordBytes);
    if (columns_ != nullptr) {
      float* out = columns_ + first * cols_ + col * count + (row - first);
      for (int64_t k = 0; k < n; ++k) out[k * count] = x[k];
    }
  }

  // A row of other inputs of the same width.
  void copy(int64_t row, const Inputs& from, int64_t from_row) {
    int64_t first, from_first;
    int count, from_count;
    block_at(row, first, count);
    from.block_at(from_row, from_first, from_count);
    if (records_ != nullptr)
      for (int64_t g = 0; g < cols_ / kGroup; ++g)
        __builtin_memcpy(record(row, first, count, g), from.record(from_row, from_first, from_count, g), kRecordBytes);
    if (columns_ != nullptr)
      for (int64_t k = 0; k < cols_; ++k)
        columns_[first * cols_ + k * count + (row - first)] =
            from.columns_[from_first * cols_ + k * from_count + (from_row - from_first)];
  }

 private:
  uint8_t* record(int64_t row, int64_t first, int count, int64_t group) const {
    return records_ + (first * (cols_ / kGroup) + group * count + (row - first)) * static_cast<int64_t>(kRecordBytes);
  }

  int64_t rows_ = 0;
  int64_t cols_ = 0;
  int max_block_ = 1;
  bool fine_ = false;
  uint8_t* records_ = nullptr;
  float* columns_ = nullptr;
};

constexpr int64_t kTilePanels = 4;
constexpr int64_t kTileFloats = 16 * kPanelRows * kTilePanels;

// Some panels of a matrix, widened first if there are rows enough to pay for it. One of two buffers of the thread holds
// the widened ones.
class ReadyPanels {
 public:
  ReadyPanels(const Kernels& kernels, const Matrix& matrix, int64_t first, int64_t count, int64_t rows, int buffer);
  // As Kernels::multiply.
  void multiply(const Block& block, float* out, int64_t ld) const {
    if (wide_ != nullptr)
      kernels_.multiply_wide(matrix_, wide_, count_, block, out, ld);
    else
      kernels_.multiply(matrix_, first_, count_, block, out, ld);
  }
  // How many panels of a matrix are best taken at once.
  static int64_t at_once(const Kernels& kernels, const Matrix& matrix, int64_t rows) {
    return widens(kernels, matrix, rows) ? 2 : kTilePanels;
  }

 private:
  static bool widens(const Kernels& kernels, const Matrix& matrix, int64_t rows) {
    return !is_dense(matrix.format) && rows >= 2 * kernels.max_block;
  }

  const Kernels& kernels_;
  const Matrix& matrix_;
  int64_t first_;
  int64_t count_;
  const uint8_t* wide_ = nullptr;
};

// Panels [begin, end) of one matrix times all rows, a tile at a time:
// sink(col, cols, row, rows, tile) where tile[r * kPanelRows * kTilePanels + c] is output col + c of row + r, no bias.
template <class Sink>
void multiply_panels(const Kernels& kernels, const Matrix& matrix, int64_t begin, int64_t end, const Inputs& inputs, Sink&& sink) {
  alignas(64) float tile[kTileFloats];
  const int64_t step = ReadyPanels::at_once(kernels, matrix, inputs.rows());
  for (int64_t panel = begin; panel < end; panel += step) {
    const int64_t panels = end - panel < step ? end - panel : step;
    const int64_t col = panel * kPanelRows;
    const int64_t cols = matrix.rows - col < panels * kPanelRows ? matrix.rows - col : panels * kPanelRows;
    const ReadyPanels ready(kernels, matrix, panel, panels, inputs.rows(), 0);
    for (int64_t row = 0; row < inputs.rows();) {
      int64_t first;
      int count;
      inputs.block_at(row, first, count);
      ready.multiply(inputs.block(first, count), tile, kPanelRows * kTilePanels);
      row = first + count;
      if (inputs.fine()) {
        first /= 2;
        count /= 2;
        for (int r = 0; r < count; ++r) {
          float* to = tile + r * kPanelRows * kTilePanels;
          const float* pair = tile + 2 * r * kPanelRows * kTilePanels;
          if (r > 0)
            for (int64_t c = 0; c < cols; ++c) to[c] = pair[c];
          kernels.add(to, pair + kPanelRows * kTilePanels, cols);
        }
      }
      sink(col, cols, first, count, tile);
    }
  }
}

// Panels `share` of all parts' panels in a row; sink also gets the part's index.
template <class Sink>
void multiply_share(const Kernels& kernels, const Linear& linear, Span share, const Inputs& inputs, Sink&& sink) {
  int64_t base = 0;
  for (size_t i = 0; i < linear.parts.size(); ++i) {
    const Matrix& matrix = linear.parts[i];
    const int64_t panels = num_panels(matrix.rows);
    const int64_t begin = share.begin - base > 0 ? share.begin - base : 0;
    const int64_t end = share.end - base < panels ? share.end - base : panels;
    if (begin < end)
      multiply_panels(kernels, matrix, begin, end, inputs,
                      [&](int64_t col, int64_t cols, int64_t row, int rows, float* tile) { sink(i, col, cols, row, rows, tile); });
    base += panels;
  }
}

// A lane's share of linear(inputs) into out[rows][ld], the parts side by side; added to what is there if `accumulate`.
void multiply_into(const Kernels& kernels, Lane& lane, const Linear& linear, const Inputs& inputs, float* out, int64_t ld,
                   bool accumulate);

}  // namespace lamella::host
