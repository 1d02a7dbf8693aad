#pragma once

#include "device/dtype.cuh"
#include "gemm/gemm.h"

namespace lamella {

// The wide kernel takes fp8 products of more rows than this that have at least so many tiles of 128 x 128: fewer leave
// most multiprocessors without work, where the kernel of gemm_sm90.cuh cuts along K too.
constexpr int64_t kWideF8Rows = 128, kWideF8Tiles = 16;

inline bool wide_f8_serves(const LamellaGemm& g) {
  return static_cast<Elem>(g.elem) == Elem::f8e4m3 && static_cast<Elem>(g.out_elem) == Elem::bf16 &&
         g.act == kActNone && g.residual == nullptr && g.squares_in == nullptr && g.squares_out == nullptr &&
         g.gain == nullptr && g.prefetch == nullptr && g.m > kWideF8Rows &&
         (g.m + 127) / 128 * ((g.n + 127) / 128) >= kWideF8Tiles;
}

// The product on Hopper, without a workspace; arguments were checked and wide_f8_serves() them.
int wide_f8_sm90(const LamellaGemm& gemm, void* stream);

}  // namespace lamella
