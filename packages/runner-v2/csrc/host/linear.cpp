#include "host/linear.h"

namespace lamella::host {

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
