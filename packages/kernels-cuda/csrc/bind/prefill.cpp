#include "prefill/paged_prefill.h"

#include <optional>

#include <pybind11/stl.h>

#include "bind/families.h"
#include "bind/stream.h"

namespace py = pybind11;

namespace lamella::bind {
namespace {

using abi::DType;
using abi::TensorView;

const float* check_scale(const std::optional<TensorView>& scale, const char* name, int64_t num_kv_heads,
                         const TensorView& q, int32_t* stride) {
  *stride = 0;
  if (!scale) return nullptr;
  check_contiguous(*scale, name, {DType::f32}, {-1});
  require(scale->shape[0] == 1 || scale->shape[0] == num_kv_heads, name,
          "has shape " + shape_text(*scale) + ", needed [1] or [" + std::to_string(num_kv_heads) + "]");
  check_same_device(*scale, name, q);
  *stride = scale->shape[0] == 1 ? 0 : 1;
  return scale->as<float>();
}

// kernel: 0 the fastest that serves, 1 the portable one, 2 Hopper's.
void paged_prefill(const TensorView& out, const TensorView& q, const TensorView& k_cache, const TensorView& v_cache,
                   const TensorView& block_table, const TensorView& cu_q, const TensorView& seq_lens,
                   int64_t max_q_len, double scale, bool causal, int64_t window, double softcap,
                   const std::optional<TensorView>& sinks, const std::optional<TensorView>& k_scale,
                   const std::optional<TensorView>& v_scale, const std::optional<TensorView>& lse, int kernel) {
  check(q, "q", {DType::bf16, DType::f16}, {-1, -1, -1});
  check_aligned(q, "q");
  const int64_t num_tokens = q.shape[0], num_heads = q.shape[1], head_dim = q.shape[2];
  require(head_dim == 64 || head_dim == 80 || head_dim == 96 || head_dim == 128 || head_dim == 192 || head_dim == 256,
          "q", "has head_dim " + std::to_string(head_dim) + ", needed 64, 80, 96, 128, 192 or 256");
  check(k_cache, "k_cache", {q.dtype, DType::u8}, {-1, -1, -1, head_dim});
  check_aligned(k_cache, "k_cache");
  const int64_t num_kv_heads = k_cache.shape[1], block_size = k_cache.shape[2];
  check(v_cache, "v_cache", {k_cache.dtype}, {k_cache.shape[0], num_kv_heads, block_size, head_dim});
  check_aligned(v_cache, "v_cache");
  require(num_kv_heads >= 1 && num_heads >= 1 && num_heads % num_kv_heads == 0, "q",
          "has " + std::to_string(num_heads) + " heads, no multiple of the cache's " + std::to_string(num_kv_heads));
  require(block_size > 0 && block_size % 16 == 0, "k_cache",
          "has block size " + std::to_string(block_size) + ", needed a multiple of 16");
  check_contiguous(seq_lens, "seq_lens", {DType::i32}, {-1});
  const int64_t batch = seq_lens.shape[0];
  check(block_table, "block_table", {DType::i32}, {batch, -1});
  check_contiguous(cu_q, "cu_q", {DType::i32}, {batch + 1});
  check(out, "out", {q.dtype}, {num_tokens, num_heads, head_dim});
  check_aligned(out, "out");
  require(num_tokens <= INT32_MAX, "q", "has more than 2^31 - 1 tokens");
  require(max_q_len >= 0, "max_q_len", "is negative");
  require(scale > 0, "scale", "is not positive");
  require(window >= 0 && window <= INT32_MAX, "window", "is not between 0 and 2^31 - 1");
  require(causal || window == 0, "window", "needs causal");
  require(softcap >= 0, "softcap", "is negative");

  LamellaPagedPrefill what = {};
  if (sinks) {
    check_contiguous(*sinks, "sinks", {DType::f32}, {num_heads});
    check_same_device(*sinks, "sinks", q);
    what.sinks = sinks->as<float>();
  }
  if (lse) {
    check_contiguous(*lse, "lse", {DType::f32}, {num_tokens, num_heads});
    check_same_device(*lse, "lse", q);
    what.lse = lse->as<float>();
  }
  check_same_device(k_cache, "k_cache", q);
  check_same_device(v_cache, "v_cache", q);
  check_same_device(block_table, "block_table", q);
  check_same_device(cu_q, "cu_q", q);
  check_same_device(seq_lens, "seq_lens", q);
  check_same_device(out, "out", q);
  what.k_scale = check_scale(k_scale, "k_scale", num_kv_heads, q, &what.k_scale_stride);
  what.v_scale = check_scale(v_scale, "v_scale", num_kv_heads, q, &what.v_scale_stride);
  what.out = out.data;
  what.q = q.data;
  what.k_cache = k_cache.data;
  what.v_cache = v_cache.data;
  what.block_table = block_table.as<int32_t>();
  what.cu_q = cu_q.as<int32_t>();
  what.seq_lens = seq_lens.as<int32_t>();
  what.batch = batch;
  what.num_tokens = num_tokens;
  what.num_heads = num_heads;
  what.num_kv_heads = num_kv_heads;
  what.head_dim = head_dim;
  what.block_size = block_size;
  what.num_blocks = k_cache.shape[0];
  what.max_q_len = max_q_len;
  what.window = window;
  for (int i = 0; i < 2; ++i) {
    what.out_strides[i] = out.strides[i];
    what.q_strides[i] = q.strides[i];
  }
  for (int i = 0; i < 3; ++i) {
    what.k_strides[i] = k_cache.strides[i];
    what.v_strides[i] = v_cache.strides[i];
  }
  what.table_stride = block_table.strides[0];
  what.scale = static_cast<float>(scale);
  what.softcap = static_cast<float>(softcap);
  what.causal = causal;
  what.q_elem = elem_of(q.dtype);
  what.cache_elem = elem_of(k_cache.dtype);
  what.kernel = kernel;
  const OnDevice on(q);
  succeed(lamella_paged_prefill(&what, on.stream), "paged_prefill");
}

}  // namespace

void bind_prefill(py::module_& m) {
  m.def("paged_prefill", &paged_prefill, py::arg("out"), py::arg("q"), py::arg("k_cache"), py::arg("v_cache"),
        py::arg("block_table"), py::arg("cu_q"), py::arg("seq_lens"), py::arg("max_q_len"), py::arg("scale"),
        py::arg("causal"), py::arg("window"), py::arg("softcap"), py::arg("sinks"), py::arg("k_scale"),
        py::arg("v_scale"), py::arg("lse"), py::arg("kernel"));
}

}  // namespace lamella::bind
