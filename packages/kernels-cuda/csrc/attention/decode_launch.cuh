// Picks the instance for a head dim and number of rows.
#pragma once

#include "attention/paged_decode.cuh"

namespace lamella::attention {

template <class T, bool kFp8, int D, int kRowWarps>
int launch_decode_as(const DecodeParams& p, cudaStream_t stream) {
  const bool large = device_facts().capability >= 90;
  const Launch how{dim3(static_cast<unsigned>(p.num_parts)), dim3(kWarps * 32),
                   static_cast<size_t>(DecodeShape<kFp8, D, kRowWarps>::shared_bytes(large)), stream};
  if (static_cast<int>(how.shared) > device_facts().max_shared) return kUnsupported;
  return launch(paged_decode_kernel<T, kFp8, D, kRowWarps>, how, p);
}

template <class T, bool kFp8>
int launch_decode(const DecodeParams& p, int64_t head_dim, cudaStream_t stream) {
  const auto by_rows = [&](auto dim) {
    return p.group_rows <= 16 ? launch_decode_as<T, kFp8, dim.value, 1>(p, stream)
                              : launch_decode_as<T, kFp8, dim.value, 4>(p, stream);
  };
  switch (head_dim) {
    case 64:
      return by_rows(std::integral_constant<int, 64>{});
    case 80:
      return by_rows(std::integral_constant<int, 80>{});
    case 96:
      return by_rows(std::integral_constant<int, 96>{});
    case 128:
      return by_rows(std::integral_constant<int, 128>{});
    case 192:
      return by_rows(std::integral_constant<int, 192>{});
    case 256:
      return by_rows(std::integral_constant<int, 256>{});
    default:
      return kUnsupported;
  }
}

// One file each, so that they compile side by side.
int launch_decode_bf16(const DecodeParams& p, int64_t head_dim, cudaStream_t stream);
int launch_decode_f16(const DecodeParams& p, int64_t head_dim, cudaStream_t stream);
int launch_decode_f8(const DecodeParams& p, int64_t head_dim, cudaStream_t stream);

}  // namespace lamella::attention
