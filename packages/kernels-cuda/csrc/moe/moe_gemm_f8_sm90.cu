#include "moe/gemm_sm90.cuh"
#include "moe/gemm_sm90.h"

namespace lamella {

int moe_gemm_sm90_f8(const MoeGemm& g, bool first, int block_rows, int64_t places, int out_elem, void* stream) {
  if (static_cast<Elem>(out_elem) != Elem::bf16) return kUnsupported;
  return first ? moe_sm90_by_rows<f8, bf16, true>(g, block_rows, places, stream)
               : moe_sm90_by_rows<f8, bf16, false>(g, block_rows, places, stream);
}

}  // namespace lamella
