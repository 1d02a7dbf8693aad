#include "cache/rope_write.h"

#include <algorithm>

#include "cache/rope_write.cuh"

namespace lamella {
namespace {

template <class T, class C, int kLanes>
int launch_lanes(const LamellaRopeWrite& p, int num_heads, cudaStream_t stream) {
  constexpr int kGroups = kRopeThreads / kLanes;
  const int most = (num_heads + kGroups - 1) / kGroups;
  // few tokens: a head per group; many: a group goes through heads and keeps the cosines
  const int64_t wanted = (int64_t{device_facts().num_sms} * 8 + p.num_tokens - 1) / p.num_tokens;
  const int splits = static_cast<int>(std::clamp<int64_t>(wanted, 1, most));
  const int64_t blocks = p.num_tokens * splits;
  if (blocks > INT32_MAX) return kUnsupported;
  const Launch how{dim3(static_cast<unsigned>(blocks)), dim3(kRopeThreads), 0, stream};
  return p.interleaved ? launch(rope_write_kernel<T, C, kLanes, true>, how, p, splits)
                       : launch(rope_write_kernel<T, C, kLanes, false>, how, p, splits);
}

template <class T, class C>
int launch_elem(const LamellaRopeWrite& p, cudaStream_t stream) {
  constexpr int kSize = Vec<T>::kSize;
  const int64_t num_heads = p.num_q_heads + (p.k != nullptr ? p.num_kv_heads : 0) + (p.v != nullptr ? p.num_kv_heads : 0);
  if (p.num_tokens == 0 || num_heads == 0 || p.head_dim == 0) return kOk;
  if (num_heads > INT32_MAX || p.head_dim > 8192) return kUnsupported;
  const int64_t step = p.interleaved ? kSize : 2 * kSize;  // a table row of 4 floats at least
  // interleaved: a lane that turns two vectors starts at an even one, so an odd last one is fine
  if (p.aligned && p.head_dim % kSize == 0 && p.rotary_dim % step == 0 && (p.rotary_dim / 2) % 4 == 0) {
    const int64_t lanes = (p.head_dim / kSize + 1) / 2;
    const int heads = static_cast<int>(num_heads);
    if (lanes <= 4) return launch_lanes<T, C, 4>(p, heads, stream);
    if (lanes <= 8) return launch_lanes<T, C, 8>(p, heads, stream);
    if (lanes <= 16) return launch_lanes<T, C, 16>(p, heads, stream);
    if (lanes <= 32) return launch_lanes<T, C, 32>(p, heads, stream);
  }
  const int64_t blocks = p.num_tokens * num_heads;
  if (blocks > INT32_MAX) return kUnsupported;
  const Launch how{dim3(static_cast<unsigned>(blocks)), dim3(32), static_cast<size_t>(p.head_dim) * 4, stream};
  return launch(rope_write_any_kernel<T, C>, how, p, static_cast<int>(num_heads));
}

template <class T>
int launch_cache(const LamellaRopeWrite& p, cudaStream_t stream) {
  if (p.cache_elem == p.elem) return launch_elem<T, T>(p, stream);
  if (static_cast<Elem>(p.cache_elem) == Elem::f8e4m3) return launch_elem<T, f8>(p, stream);
  return kUnsupported;
}

}  // namespace
}  // namespace lamella

LAMELLA_API int lamella_rope_write(const LamellaRopeWrite* what, void* stream) {
  using namespace lamella;
  const auto s = static_cast<cudaStream_t>(stream);
  switch (static_cast<Elem>(what->elem)) {
    case Elem::f32:
      return launch_cache<float>(*what, s);
    case Elem::f16:
      return launch_cache<f16>(*what, s);
    case Elem::bf16:
      return launch_cache<bf16>(*what, s);
    default:
      return kUnsupported;
  }
}
