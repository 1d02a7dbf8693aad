#include "moe/gemm_portable.h"

#include "moe/gemm_portable.cuh"

namespace lamella {
namespace {

template <class T, class O, int kTokens>
int launch_product(const MoeGemm& g, bool first, int64_t max_blocks, void* stream) {
  constexpr size_t kShared = 3 * (128 + kTokens) * 128;
  if (max_blocks * g.num_tiles > INT32_MAX) return kUnsupported;
  const Launch how{dim3(static_cast<unsigned>(max_blocks * g.num_tiles)), dim3(128), kShared,
                   static_cast<cudaStream_t>(stream)};
  return first ? launch(moe_portable_kernel<T, O, kTokens, true>, how, g)
               : launch(moe_portable_kernel<T, O, kTokens, false>, how, g);
}

template <class T, class O>
int by_rows(const MoeGemm& g, bool first, int block_rows, int64_t max_blocks, void* stream) {
  if (block_rows == 16) return launch_product<T, O, 16>(g, first, max_blocks, stream);
  if (block_rows == 64) return launch_product<T, O, 64>(g, first, max_blocks, stream);
  return kUnsupported;
}

}  // namespace

int moe_portable_rows(int64_t rows_per_expert) { return rows_per_expert <= 12 ? 16 : 64; }

int moe_gemm_portable(const MoeGemm& product, bool first, int block_rows, int64_t max_blocks, int elem, int out_elem,
                      void* stream) {
  MoeGemm g = product;
  const int columns = first ? 64 : 128;
  g.num_tiles = (g.num_out + columns - 1) / columns;
  const Elem in = static_cast<Elem>(elem), out = static_cast<Elem>(out_elem);
  if (in == Elem::bf16 && out == Elem::bf16) return by_rows<bf16, bf16>(g, first, block_rows, max_blocks, stream);
  if (in == Elem::f16 && out == Elem::f16) return by_rows<f16, f16>(g, first, block_rows, max_blocks, stream);
  if (in == Elem::f8e4m3 && out == Elem::bf16) return by_rows<f8, bf16>(g, first, block_rows, max_blocks, stream);
  return kUnsupported;
}

}  // namespace lamella
