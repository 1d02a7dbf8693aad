#include "prefill/prefill_sm90.h"

#include <algorithm>
#include <numeric>

#include "prefill/prefill_sm90.cuh"

namespace lamella::prefill {
namespace {

// Boxes of 64 columns with the 128-byte swizzle. strides in elements, of dimensions 1 and up.
template <int kDims>
bool map_boxes(CUtensorMap* map, bool is_bf16, const void* base, const int64_t (&sizes)[kDims],
               const int64_t (&strides)[kDims - 1], const int (&box)[kDims]) {
  const EncodeTiled encode = tensor_map_encoder();
  if (encode == nullptr) return false;
  cuuint64_t shape[kDims], bytes[kDims - 1];
  cuuint32_t extent[kDims], steps[kDims];
  for (int i = 0; i < kDims; ++i) {
    shape[i] = static_cast<cuuint64_t>(sizes[i]);
    extent[i] = static_cast<cuuint32_t>(box[i]);
    steps[i] = 1;
    // the stride of a single element may be anything, the driver wants a multiple of 16
    if (i > 0) bytes[i - 1] = static_cast<cuuint64_t>(sizes[i] > 1 ? strides[i - 1] * 2 : sizes[0] * 2);
  }
  return encode(map, is_bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, kDims,
                const_cast<void*>(base), shape, bytes, extent, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class T, int D>
int launch_sm90(const LamellaPagedPrefill& w, const PrefillParams& p, void* stream) {
  using Shape = Sm90Shape<D>;
  constexpr bool kBf16 = std::is_same_v<T, bf16>;
  Sm90Plan plan;
  plan.p = p;
  plan.piece_keys = static_cast<int>(std::gcd(w.block_size, int64_t{Shape::kKeys}));
  const int64_t cache[4] = {D, w.block_size, w.num_kv_heads, w.num_blocks};
  const int64_t k_strides[3] = {w.k_strides[2], w.k_strides[1], w.k_strides[0]};
  const int64_t v_strides[3] = {w.v_strides[2], w.v_strides[1], w.v_strides[0]};
  const int piece[4] = {64, plan.piece_keys, 1, 1};
  if (!map_boxes<3>(&plan.q, kBf16, w.q, {D, w.num_heads, w.num_tokens}, {w.q_strides[1], w.q_strides[0]},
                    {64, p.pack, p.tile_tokens}) ||
      !map_boxes<4>(&plan.k, kBf16, w.k_cache, cache, k_strides, piece) ||
      !map_boxes<4>(&plan.v, kBf16, w.v_cache, cache, v_strides, piece))
    return kUnsupported;
  const int64_t num_tiles = std::min(w.num_tokens / p.tile_tokens + w.batch,
                                     w.batch * ((w.max_q_len + p.tile_tokens - 1) / p.tile_tokens));
  const int64_t blocks = std::min<int64_t>(num_tiles * p.head_groups, device_facts().num_sms);
  const Launch how{dim3(static_cast<unsigned>(blocks)), dim3(kSm90Threads), Shape::kShared,
                   static_cast<cudaStream_t>(stream)};
  return launch(prefill_sm90_kernel<T, D>, how, plan);
}

template <class T>
int by_width(const LamellaPagedPrefill& w, const PrefillParams& p, void* stream) {
  switch (w.head_dim) {
    case 64:
      return launch_sm90<T, 64>(w, p, stream);
    case 128:
      return launch_sm90<T, 128>(w, p, stream);
    case 256:
      return launch_sm90<T, 256>(w, p, stream);
    default:
      return kUnsupported;
  }
}

}  // namespace

bool serves_sm90(const LamellaPagedPrefill& w) {
  return (w.head_dim == 64 || w.head_dim == 128 || w.head_dim == 256) && w.q_elem == w.cache_elem;
}

int prefill_sm90(const LamellaPagedPrefill& w, PrefillParams p, void* stream) {
  p.pack = heads_per_tile(p.heads_per_kv, kSm90Rows);
  p.tile_tokens = kSm90Rows / p.pack;
  p.head_groups = p.num_heads / p.pack;
  switch (static_cast<Elem>(w.q_elem)) {
    case Elem::bf16:
      return by_width<bf16>(w, p, stream);
    case Elem::f16:
      return by_width<f16>(w, p, stream);
    default:
      return kUnsupported;
  }
}

}  // namespace lamella::prefill
