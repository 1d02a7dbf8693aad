#include "prefill/paged_prefill.h"

#include <algorithm>

#include "device/launch.cuh"
#include "prefill/portable.h"
#include "prefill/prefill_sm90.h"

namespace lamella::prefill {
namespace {

PrefillParams params_of(const LamellaPagedPrefill& w) {
  PrefillParams p = {};
  p.out = w.out;
  p.lse = w.lse;
  p.q = w.q;
  p.k_cache = w.k_cache;
  p.v_cache = w.v_cache;
  p.block_table = w.block_table;
  p.cu_q = w.cu_q;
  p.seq_lens = w.seq_lens;
  p.sinks = w.sinks;
  p.k_scale = w.k_scale;
  p.v_scale = w.v_scale;
  for (int i = 0; i < 2; ++i) {
    p.out_strides[i] = w.out_strides[i];
    p.q_strides[i] = w.q_strides[i];
  }
  for (int i = 0; i < 3; ++i) {
    p.k_strides[i] = w.k_strides[i];
    p.v_strides[i] = w.v_strides[i];
  }
  p.table_stride = w.table_stride;
  p.batch = static_cast<int>(w.batch);
  p.num_heads = static_cast<int>(w.num_heads);
  p.heads_per_kv = static_cast<int>(w.num_heads / w.num_kv_heads);
  p.block_size = static_cast<int>(w.block_size);
  p.window = static_cast<int>(w.window);
  p.k_scale_stride = w.k_scale_stride;
  p.v_scale_stride = w.v_scale_stride;
  p.scale = w.scale;
  p.softcap = w.softcap;
  p.causal = w.causal != 0;
  return p;
}

int portable(const LamellaPagedPrefill& w, PrefillParams p, void* stream) {
  p.pack = heads_per_tile(p.heads_per_kv, kPortableRows);
  p.tile_tokens = kPortableRows / p.pack;
  p.head_groups = p.num_heads / p.pack;
  // an upper bound: every sequence rounds up once
  const int64_t num_tiles = std::min(w.num_tokens / p.tile_tokens + w.batch,
                                     w.batch * ((w.max_q_len + p.tile_tokens - 1) / p.tile_tokens));
  if (num_tiles > INT32_MAX || p.head_groups > 65535) return kUnsupported;
  const bool fp8 = static_cast<Elem>(w.cache_elem) == Elem::f8e4m3;
  if (!fp8 && w.cache_elem != w.q_elem) return kUnsupported;
  switch (static_cast<Elem>(w.q_elem)) {
    case Elem::bf16:
      return fp8 ? portable_bf16_f8(p, w.head_dim, num_tiles, stream) : portable_bf16(p, w.head_dim, num_tiles, stream);
    case Elem::f16:
      return fp8 ? portable_f16_f8(p, w.head_dim, num_tiles, stream) : portable_f16(p, w.head_dim, num_tiles, stream);
    default:
      return kUnsupported;
  }
}

}  // namespace
}  // namespace lamella::prefill

LAMELLA_API int lamella_paged_prefill(const LamellaPagedPrefill* what, void* stream) {
  using namespace lamella::prefill;
  const LamellaPagedPrefill& w = *what;
  if (w.batch == 0 || w.num_tokens == 0 || w.max_q_len == 0 || w.num_heads == 0) return kOk;
  if (w.num_kv_heads == 0 || w.num_heads % w.num_kv_heads != 0 || w.block_size % 16 != 0 || w.num_tokens > INT32_MAX ||
      w.window > INT32_MAX || w.batch > INT32_MAX)
    return kUnsupported;
  if (w.kernel == 1) return portable(w, params_of(w), stream);
  int status = lamella::device_facts().capability == 90 && serves_sm90(w) ? prefill_sm90(w, params_of(w), stream)
                                                                          : static_cast<int>(kUnsupported);
  // also where the driver has no tensor map for these strides; nothing was launched then
  if (status == kUnsupported && w.kernel == 0) status = portable(w, params_of(w), stream);
  return status;
}
