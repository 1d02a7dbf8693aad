// Picks the portable kernel's instance for a head dim.
#pragma once

#include "prefill/prefill.cuh"

namespace lamella::prefill {

template <class T, bool kFp8, int D>
int launch_portable_as(const PrefillParams& p, int64_t num_tiles, cudaStream_t stream) {
  const Launch how{dim3(static_cast<unsigned>(num_tiles), static_cast<unsigned>(p.head_groups)), dim3(kThreads),
                   static_cast<size_t>(PrefillShape<D>::kShared), stream};
  if (static_cast<int>(how.shared) > device_facts().max_shared) return kUnsupported;
  return launch(prefill_kernel<T, kFp8, D>, how, p);
}

template <class T, bool kFp8>
int launch_portable(const PrefillParams& p, int64_t head_dim, int64_t num_tiles, cudaStream_t stream) {
  switch (head_dim) {
    case 64:
      return launch_portable_as<T, kFp8, 64>(p, num_tiles, stream);
    case 80:
      return launch_portable_as<T, kFp8, 80>(p, num_tiles, stream);
    case 96:
      return launch_portable_as<T, kFp8, 96>(p, num_tiles, stream);
    case 128:
      return launch_portable_as<T, kFp8, 128>(p, num_tiles, stream);
    case 192:
      return launch_portable_as<T, kFp8, 192>(p, num_tiles, stream);
    case 256:
      return launch_portable_as<T, kFp8, 256>(p, num_tiles, stream);
    default:
      return kUnsupported;
  }
}

}  // namespace lamella::prefill
