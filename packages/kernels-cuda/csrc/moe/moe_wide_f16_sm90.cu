#include "moe/gemm_sm90.h"
#include "moe/wide_sm90.cuh"

namespace lamella {

int moe_wide_sm90_f16(const MoeGemm& g, bool first, int64_t places, void* stream) {
  return first ? launch_moe_wide<f16, true>(g, places, stream) : launch_moe_wide<f16, false>(g, places, stream);
}

}  // namespace lamella
