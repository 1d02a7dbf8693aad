#include "moe/gemm_sm90.cuh"
#include "moe/gemm_sm90.h"

namespace lamella {

int moe_gemm_sm90_bf16(const MoeGemm& g, bool first, int block_rows, int64_t places, void* stream) {
  return first ? moe_sm90_by_rows<bf16, bf16, true>(g, block_rows, places, stream)
               : moe_sm90_by_rows<bf16, bf16, false>(g, block_rows, places, stream);
}

}  // namespace lamella
