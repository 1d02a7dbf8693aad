#include "host/linear.h"

#include <memory>

namespace lamella::host {

ReadyPanels::ReadyPanels(const Kernels& kernels, const Matrix& matrix, int64_t first, int64_t count, int64_t rows, int buffer)
    : kernels_(kernels), matrix_(matrix), first_(first), count_(count) {
  if (!widens(kernels, matrix, rows)) return;
  struct Buffer {
    std::unique_ptr<uint8_t[]> bytes;
    size_t size = 0;
  };
  static thread_local Buffer buffers[2];
  Buffer& mine = buffers[buffer];
  const size_t needed = static_cast<size_t>(count) * wide_bytes(matrix) + 64;
  if (mine.size < needed) {
    mine.bytes.reset(new uint8_t[needed]);
    mine.size = needed;
  }
  const uintptr_t address = reinterpret_cast<uintptr_t>(mine.bytes.get());
  uint8_t* wide = mine.bytes.get() + ((address + 63) / 64 * 64 - address);
  kernels.widen(matrix, first, count, wide);
  wide_ = wide;
}

void multiply_into(const Kernels& kernels, Lane& lane, const Linear& linear, const Inputs& inputs, float* out, int64_t ld,
                   bool accumulate) {
  constexpr int64_t tile_ld = kPanelRows * kTilePanels;
  multiply_share(kernels, linear, lane.share(linear.panels), inputs,
                 [&](size_t part, int64_t col, int64_t cols, int64_t row, int rows, float* tile) {
                   add_bias(linear.parts[part], col, cols, rows, tile);
                   for (int r = 0; r < rows; ++r) {
                     float* to = out + (row + r) * ld + linear.starts[part] + col;
                     const float* from = tile + r * tile_ld;
                     if (accumulate)
                       kernels.add(to, from, cols);
                     else
                       for (int64_t c = 0; c < cols; ++c) to[c] = from[c];
                   }
                 });
}

}  // namespace lamella::host
