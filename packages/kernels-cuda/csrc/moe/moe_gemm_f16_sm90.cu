#include "moe/gemm_sm90.cuh"
#include "moe/gemm_sm90.h"

namespace lamella {

int moe_gemm_sm90_f16(const MoeGemm& g, bool first, int block_rows, int64_t places, void* stream) {
  return first ? moe_sm90_by_rows<f16, f16, true>(g, block_rows, places, stream)
               : moe_sm90_by_rows<f16, f16, false>(g, block_rows, places, stream);
}

}  // namespace lamella
