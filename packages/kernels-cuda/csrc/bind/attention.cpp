#include <optional>

#include <pybind11/stl.h>

#include "attention/decode_schedule.h"
#include "attention/merge_states.h"
#include "attention/paged_decode.h"
#include "bind/families.h"
#include "bind/stream.h"

namespace py = pybind11;

namespace lamella::bind {
namespace {

using abi::DType;
using abi::TensorView;

void check_shape_of_step(int64_t num_queries, int64_t num_heads, int64_t num_kv_heads) {
  require(num_queries >= 1 && num_queries <= 8, "num_queries",
          "is " + std::to_string(num_queries) + ", needed 1 to 8 new tokens per sequence");
  require(num_kv_heads >= 1 && num_heads >= 1 && num_heads % num_kv_heads == 0, "num_heads",
          std::to_string(num_heads) + " is no multiple of num_kv_heads, " + std::to_string(num_kv_heads));
}

// Parts that a schedule of this size has.
int64_t parts_of(const TensorView& schedule, int64_t batch, int64_t num_groups) {
  check_contiguous(schedule, "schedule", {DType::i32}, {-1});
  check_aligned(schedule, "schedule");
  const int64_t records = schedule.shape[0] - batch * num_groups;
  require(records >= 8 && records % 4 == 0, "schedule",
          "has " + std::to_string(schedule.shape[0]) + " elements, needed decode_schedule_size() of the same batch (" +
              std::to_string(batch) + "), heads and queries");
  return records / 4 - 1;
}

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

void decode_schedule(const TensorView& schedule, const TensorView& seq_lens, int64_t num_queries, int64_t num_heads,
                     int64_t num_kv_heads, int64_t window) {
  check_contiguous(seq_lens, "seq_lens", {DType::i32}, {-1});
  check_shape_of_step(num_queries, num_heads, num_kv_heads);
  require(window >= 0, "window", "is negative");
  const int64_t batch = seq_lens.shape[0], groups = lamella_decode_groups(num_queries, num_heads, num_kv_heads);
  const int64_t parts = parts_of(schedule, batch, groups);
  check_same_device(schedule, "schedule", seq_lens);
  const OnDevice on(seq_lens);
  succeed(lamella_decode_schedule(schedule.as<int32_t>(), seq_lens.as<int32_t>(), batch, num_queries, groups, parts,
                                  window, on.stream),
          "decode_schedule");
}

// scale: of the scores. layout of caches: [num_blocks, num_kv_heads, block_size, head_dim], any strides.
void paged_decode(const TensorView& out, const TensorView& q, const TensorView& k_cache, const TensorView& v_cache,
                  const TensorView& block_table, const TensorView& seq_lens, const TensorView& schedule,
                  const TensorView& workspace, double scale, int64_t window, double softcap,
                  const std::optional<TensorView>& sinks, const std::optional<TensorView>& k_scale,
                  const std::optional<TensorView>& v_scale, const std::optional<TensorView>& lse,
                  bool follows_write) {
  check(q, "q", {DType::bf16, DType::f16}, {-1, -1, -1, -1});
  check_aligned(q, "q");
  const int64_t batch = q.shape[0], num_queries = q.shape[1], num_heads = q.shape[2], head_dim = q.shape[3];
  check(k_cache, "k_cache", {q.dtype, DType::u8}, {-1, -1, -1, head_dim});
  check_aligned(k_cache, "k_cache");
  const int64_t num_kv_heads = k_cache.shape[1], block_size = k_cache.shape[2];
  check(v_cache, "v_cache", {k_cache.dtype}, {k_cache.shape[0], num_kv_heads, block_size, head_dim});
  check_aligned(v_cache, "v_cache");
  check_shape_of_step(num_queries, num_heads, num_kv_heads);
  require(head_dim == 64 || head_dim == 80 || head_dim == 96 || head_dim == 128 || head_dim == 192 || head_dim == 256,
          "q", "has head_dim " + std::to_string(head_dim) + ", needed 64, 80, 96, 128, 192 or 256");
  require(block_size > 0 && block_size % 16 == 0, "k_cache",
          "has block size " + std::to_string(block_size) + ", needed a multiple of 16");
  check(block_table, "block_table", {DType::i32}, {batch, -1});
  check_contiguous(seq_lens, "seq_lens", {DType::i32}, {batch});
  check(out, "out", {q.dtype}, {batch, num_queries, num_heads, head_dim});
  check_aligned(out, "out");
  require(window >= 0, "window", "is negative");
  require(softcap >= 0, "softcap", "is negative");

  LamellaPagedDecode what = {};
  what.num_parts = parts_of(schedule, batch, lamella_decode_groups(num_queries, num_heads, num_kv_heads));
  check_contiguous(workspace, "workspace", {DType::u8}, {-1});
  check_aligned(workspace, "workspace");
  const int64_t needed =
      lamella_paged_decode_workspace(num_queries, num_heads, num_kv_heads, head_dim, what.num_parts);
  require(workspace.shape[0] >= needed, "workspace",
          "has " + std::to_string(workspace.shape[0]) + " bytes, needed " + std::to_string(needed));
  if (sinks) {
    check_contiguous(*sinks, "sinks", {DType::f32}, {num_heads});
    check_same_device(*sinks, "sinks", q);
    what.sinks = sinks->as<float>();
  }
  if (lse) {
    check_contiguous(*lse, "lse", {DType::f32}, {batch, num_queries, num_heads});
    check_same_device(*lse, "lse", q);
    what.lse = lse->as<float>();
  }
  check_same_device(k_cache, "k_cache", q);
  check_same_device(v_cache, "v_cache", q);
  check_same_device(block_table, "block_table", q);
  check_same_device(seq_lens, "seq_lens", q);
  check_same_device(schedule, "schedule", q);
  check_same_device(workspace, "workspace", q);
  check_same_device(out, "out", q);

  what.k_scale = check_scale(k_scale, "k_scale", num_kv_heads, q, &what.k_scale_stride);
  what.v_scale = check_scale(v_scale, "v_scale", num_kv_heads, q, &what.v_scale_stride);
  what.out = out.data;
  what.q = q.data;
  what.k_cache = k_cache.data;
  what.v_cache = v_cache.data;
  what.block_table = block_table.as<int32_t>();
  what.seq_lens = seq_lens.as<int32_t>();
  what.schedule = schedule.as<int32_t>();
  what.workspace = workspace.as<float>();
  what.batch = batch;
  what.num_queries = num_queries;
  what.num_heads = num_heads;
  what.num_kv_heads = num_kv_heads;
  what.head_dim = head_dim;
  what.block_size = block_size;
  what.num_blocks = k_cache.shape[0];
  what.window = window;
  for (int i = 0; i < 3; ++i) {
    what.out_strides[i] = out.strides[i];
    what.q_strides[i] = q.strides[i];
    what.k_strides[i] = k_cache.strides[i];
    what.v_strides[i] = v_cache.strides[i];
  }
  what.table_stride = block_table.strides[0];
  what.scale = static_cast<float>(scale);
  what.softcap = static_cast<float>(softcap);
  what.q_elem = elem_of(q.dtype);
  what.cache_elem = elem_of(k_cache.dtype);
  what.follows_write = follows_write;
  const OnDevice on(q);
  succeed(lamella_paged_decode(&what, on.stream), "paged_decode");
}

// o [num_states, num_rows, width], lse [num_states, num_rows].
void merge_states(const TensorView& out, const std::optional<TensorView>& out_lse, const TensorView& first,
                  const TensorView& first_lse, const TensorView& rest, const TensorView& rest_lse) {
  check(first, "o1", {DType::bf16, DType::f16, DType::f32}, {-1, -1});
  check_aligned(first, "o1");
  const int64_t rows = first.shape[0], width = first.shape[1];
  require(width * static_cast<int64_t>(abi::size_of(first.dtype)) % 16 == 0, "o1",
          "rows of " + std::to_string(width) + " elements are no multiple of 16 bytes");
  check_contiguous(first_lse, "lse1", {DType::f32}, {rows});
  check(rest, "o2", {first.dtype}, {-1, rows, width});
  check_aligned(rest, "o2");
  check_contiguous(rest_lse, "lse2", {DType::f32}, {rest.shape[0], rows});
  check(out, "out", {first.dtype}, {rows, width});
  check_aligned(out, "out");
  if (out_lse) {
    check_contiguous(*out_lse, "lse", {DType::f32}, {rows});
    check_same_device(*out_lse, "lse", first);
  }
  check_same_device(first_lse, "lse1", first);
  check_same_device(rest, "o2", first);
  check_same_device(rest_lse, "lse2", first);
  check_same_device(out, "out", first);
  const OnDevice on(first);
  succeed(lamella_merge_states(out.data, out_lse ? out_lse->as<float>() : nullptr, first.data, first_lse.as<float>(),
                               rest.data, rest_lse.as<float>(), 1 + rest.shape[0], rest.strides[0], rows, rows, width,
                               out.strides[0], first.strides[0], rest.strides[1], elem_of(first.dtype), on.stream),
          "merge_states");
}

}  // namespace

void bind_attention(py::module_& m) {
  m.def("decode_parts", [](int device) {
    const int before = lamella_cuda_swap_device(device);
    if (before < 0) succeed(-before, "decode_parts");
    const int64_t parts = lamella_decode_parts();
    lamella_cuda_swap_device(before);
    return parts;
  }, py::arg("device"));
  m.def("decode_schedule_size", [](int64_t batch, int64_t num_queries, int64_t num_heads, int64_t num_kv_heads,
                                   int64_t num_parts) {
    check_shape_of_step(num_queries, num_heads, num_kv_heads);
    return 4 * (num_parts + 1) + batch * lamella_decode_groups(num_queries, num_heads, num_kv_heads);
  }, py::arg("batch"), py::arg("num_queries"), py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("num_parts"));
  m.def("paged_decode_workspace", [](int64_t num_queries, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                     int64_t num_parts) {
    check_shape_of_step(num_queries, num_heads, num_kv_heads);
    return lamella_paged_decode_workspace(num_queries, num_heads, num_kv_heads, head_dim, num_parts);
  }, py::arg("num_queries"), py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("num_parts"));
  m.def("decode_schedule", &decode_schedule, py::arg("schedule"), py::arg("seq_lens"), py::arg("num_queries"),
        py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("window"));
  m.def("paged_decode", &paged_decode, py::arg("out"), py::arg("q"), py::arg("k_cache"), py::arg("v_cache"),
        py::arg("block_table"), py::arg("seq_lens"), py::arg("schedule"), py::arg("workspace"), py::arg("scale"),
        py::arg("window"), py::arg("softcap"), py::arg("sinks"), py::arg("k_scale"), py::arg("v_scale"),
        py::arg("lse"), py::arg("follows_write"));
  m.def("merge_states", &merge_states, py::arg("out"), py::arg("out_lse"), py::arg("first"), py::arg("first_lse"),
        py::arg("rest"), py::arg("rest_lse"));
}

}  // namespace lamella::bind
