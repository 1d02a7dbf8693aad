#include "attention/decode_launch.cuh"

namespace lamella::attention {

int launch_decode_f8(const DecodeParams& p, int64_t head_dim, cudaStream_t stream) {
  return launch_decode<f16, true>(p, head_dim, stream);
}

}  // namespace lamella::attention
