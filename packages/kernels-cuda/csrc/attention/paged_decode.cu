#include "attention/paged_decode.h"

#include "attention/decode_launch.cuh"

namespace lamella::attention {
namespace {

int64_t group_rows(int64_t num_queries, int64_t num_heads, int64_t num_kv_heads) {
  const int64_t rows = num_queries * (num_heads / num_kv_heads);
  return rows < kMaxRows ? rows : kMaxRows;
}

DecodeParams params_of(const LamellaPagedDecode& w) {
  const int64_t bytes = static_cast<Elem>(w.cache_elem) == Elem::f8e4m3 ? 1 : 2;
  DecodeParams p = {};
  p.out = w.out;
  p.lse = w.lse;
  p.q = w.q;
  p.k_cache = static_cast<const char*>(w.k_cache);
  p.v_cache = static_cast<const char*>(w.v_cache);
  p.block_table = w.block_table;
  p.seq_lens = w.seq_lens;
  p.sinks = w.sinks;
  p.k_scale = w.k_scale;
  p.v_scale = w.v_scale;
  p.schedule = w.schedule;
  for (int i = 0; i < 3; ++i) {
    p.out_strides[i] = w.out_strides[i];
    p.q_strides[i] = w.q_strides[i];
  }
  p.k_block_bytes = w.k_strides[0] * bytes;
  p.k_head_bytes = w.k_strides[1] * bytes;
  p.k_key_bytes = static_cast<uint32_t>(w.k_strides[2] * bytes);
  p.v_block_bytes = w.v_strides[0] * bytes;
  p.v_head_bytes = w.v_strides[1] * bytes;
  p.v_key_bytes = static_cast<uint32_t>(w.v_strides[2] * bytes);
  p.table_stride = w.table_stride;
  p.batch = static_cast<int>(w.batch);
  p.num_queries = static_cast<int>(w.num_queries);
  p.num_heads = static_cast<int>(w.num_heads);
  p.heads_per_kv = static_cast<int>(w.num_heads / w.num_kv_heads);
  p.rows = p.num_queries * p.heads_per_kv;
  p.group_rows = static_cast<int>(group_rows(w.num_queries, w.num_heads, w.num_kv_heads));
  p.groups_per_kv = (p.rows + kMaxRows - 1) / kMaxRows;
  p.num_groups = static_cast<int>(w.num_kv_heads) * p.groups_per_kv;
  p.block_size = static_cast<int>(w.block_size);
  p.num_parts = static_cast<int>(w.num_parts);
  p.window = static_cast<int>(w.window < INT32_MAX / 2 ? w.window : 0);
  p.num_blocks = w.num_blocks;
  p.k_scale_stride = w.k_scale_stride;
  p.v_scale_stride = w.v_scale_stride;
  p.scale = w.scale;
  p.softcap = w.softcap;
  p.q_bf16 = static_cast<Elem>(w.q_elem) == Elem::bf16;
  p.follows_write = w.follows_write != 0;
  const int64_t slots = 2 * w.num_parts;
  p.partial_out = w.workspace;
  p.partial_stats = reinterpret_cast<float2*>(w.workspace + slots * p.group_rows * w.head_dim);
  return p;
}

}  // namespace
}  // namespace lamella::attention

LAMELLA_API int64_t lamella_decode_groups(int64_t num_queries, int64_t num_heads, int64_t num_kv_heads) {
  const int64_t rows = num_queries * (num_heads / num_kv_heads);
  return num_kv_heads * ((rows + lamella::attention::kMaxRows - 1) / lamella::attention::kMaxRows);
}

LAMELLA_API int64_t lamella_paged_decode_workspace(int64_t num_queries, int64_t num_heads, int64_t num_kv_heads,
                                                   int64_t head_dim, int64_t num_parts) {
  return 2 * num_parts * lamella::attention::group_rows(num_queries, num_heads, num_kv_heads) * (head_dim + 2) * 4;
}

LAMELLA_API int lamella_paged_decode(const LamellaPagedDecode* what, void* stream) {
  using namespace lamella;
  const LamellaPagedDecode& w = *what;
  if (w.batch == 0 || w.num_queries == 0 || w.num_heads == 0) return kOk;
  const Elem q = static_cast<Elem>(w.q_elem), cache = static_cast<Elem>(w.cache_elem);
  const int64_t most_stride = (int64_t{1} << 27);  // 16 keys of it stay within 32 bits
  if (w.num_queries > 8 || w.num_heads % w.num_kv_heads != 0 || w.block_size <= 0 || w.block_size % 16 != 0 ||
      w.num_parts < 1 || w.k_strides[2] < 0 || w.v_strides[2] < 0 || w.k_strides[2] > most_stride / 2 ||
      w.v_strides[2] > most_stride / 2 || w.batch > INT32_MAX / 2 || w.block_size > INT32_MAX / 2 ||
      w.num_heads > 65536)
    return kUnsupported;
  const attention::DecodeParams p = attention::params_of(w);
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  if (cache == Elem::f8e4m3 && (q == Elem::bf16 || q == Elem::f16))
    return attention::launch_decode_f8(p, w.head_dim, on);
  if (cache != q) return kUnsupported;
  if (q == Elem::bf16) return attention::launch_decode_bf16(p, w.head_dim, on);
  if (q == Elem::f16) return attention::launch_decode_f16(p, w.head_dim, on);
  return kUnsupported;
}
