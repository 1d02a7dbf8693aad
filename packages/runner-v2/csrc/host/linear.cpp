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
  multiply_share(kernels, linear, lane.share(linear.panels), inputs,
                 [&](size_t part, int64_t col, int64_t cols, int64_t row, int rows, float* tile) {
                   const Matrix& matrix = linear.parts[part];
                   kernels.put_tile(tile, kPanelRows * kTilePanels, rows, cols, matrix.bias != nullptr ? matrix.bias + col : nullptr,
                                    accumulate, out + row * ld + linear.starts[part] + col, ld);
                 });
}

}  // namespace lamella::host
