#include "attention/decode_launch.cuh"

namespace lamella::attention {

int launch_decode_bf16(const DecodeParams& p, int64_t head_dim, cudaStream_t stream) {
  return launch_decode<bf16, false>(p, head_dim, stream);
}

}  // namespace lamella::attention
