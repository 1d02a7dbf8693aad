#include "prefill/portable.h"
#include "prefill/prefill_launch.cuh"

namespace lamella::prefill {

int portable_bf16(const PrefillParams& p, int64_t head_dim, int64_t num_tiles, void* stream) {
  return launch_portable<bf16, false>(p, head_dim, num_tiles, static_cast<cudaStream_t>(stream));
}

}  // namespace lamella::prefill
