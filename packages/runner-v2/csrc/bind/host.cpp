// The host kernels as Python sees them. Handles keep the tensors whose memory they point into.
#include "bind/host.h"

#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "bind/check.h"
#include "bind/tensor_caster.h"
#include "host/layer.h"
#include "host/ops.h"
#include "host/pack.h"

namespace py = pybind11;

namespace lamella::bind {
namespace {

using abi::DType;
using abi::TensorView;
using namespace lamella::host;

constexpr int kMaxHeadDim = 1024;

Format format_named(const std::string& name) {
  for (int i = 0; i < kNumFormats; ++i)
    if (name == info_of(static_cast<Format>(i)).name) return static_cast<Format>(i);
  throw std::invalid_argument("no weight format " + name);
}

Act act_named(const std::string& name) {
  if (name == "silu") return Act::silu;
  if (name == "gelu_tanh") return Act::gelu_tanh;
  if (name == "gelu") return Act::gelu;
  throw std::invalid_argument("no activation " + name);
}

// (panels, format code, rows, cols, bias or None)
using Part = std::tuple<py::object, int, int64_t, int64_t, py::object>;

TensorView view_of(const py::handle& tensor) { return tensor.cast<TensorView>(); }

Matrix matrix_of(const Part& part, py::list& owners) {
  const auto& [panels, code, rows, cols, bias] = part;
  if (code < 0 || code >= kNumFormats) throw std::invalid_argument("packed by an unknown version");
  Matrix matrix;
  matrix.format = static_cast<Format>(code);
  matrix.rows = rows;
  matrix.cols = cols;
  matrix.panel_stride = panel_bytes(matrix.format, cols);
  matrix.panels = check_contiguous(view_of(panels), "panels", DType::u8,
                                   {num_panels(rows), static_cast<int64_t>(matrix.panel_stride)}).as<uint8_t>();
  owners.append(panels);
  if (!bias.is_none()) {
    matrix.bias = check_contiguous(view_of(bias), "bias", DType::f32, {rows}).as<float>();
    owners.append(bias);
  }
  return matrix;
}

Linear linear_of(const std::vector<Part>& parts, py::list& owners) {
  Linear linear;
  for (const Part& part : parts) {
    const Matrix matrix = matrix_of(part, owners);
    if (!linear.parts.empty() && matrix.cols != linear.cols) refuse("parts", "input widths differ");
    linear.add(matrix);
  }
  if (linear.parts.empty()) refuse("parts", "there are none");
  return linear;
}

const float* vector_of(const py::object& tensor, const char* name, int64_t width, py::list& owners) {
  if (tensor.is_none()) return nullptr;
  owners.append(tensor);
  return check_contiguous(view_of(tensor), name, DType::f32, {width}).as<float>();
}

Rows rows_of(const TensorView& view, const char* name, int64_t width) {
  check(view, name, DType::f32, {-1, width});
  return {view.as<float>(), view.shape[0], view.shape[1], view.strides[0]};
}

struct LinearHandle {
  py::list owners;
  Linear linear;
};

struct HeadHandle {
  py::list owners;
  Linear linear;
  const float* norm = nullptr;
  float eps = 0.0f;
  float softcap = 0.0f;
};

struct TableHandle {
  py::list owners;
  Matrix matrix;
  float scale = 1.0f;
};

struct ExpertsHandle {
  py::list owners;
  Experts experts;
};

struct LayerHandle {
  py::list owners;
  Layer layer;
};

struct PlanHandle {
  py::object positions;
  py::tuple owners;
  Plan plan;
};

struct AttentionHandle {
  Heads heads;
};

Experts experts_of(const std::vector<Part>& parts, const std::string& act, py::list& owners) {
  Experts experts;
  if (parts.empty() || parts.size() % 3 != 0) refuse("parts", "not gate, up and down of each expert");
  for (size_t i = 0; i < parts.size(); i += 3) {
    experts.gate.push_back(matrix_of(parts[i], owners));
    experts.up.push_back(matrix_of(parts[i + 1], owners));
    experts.down.push_back(matrix_of(parts[i + 2], owners));
  }
  experts.act = act_named(act);
  experts.hidden = experts.gate[0].cols;
  experts.width = experts.gate[0].rows;
  for (size_t e = 0; e < experts.gate.size(); ++e) {
    const Matrix &gate = experts.gate[e], &up = experts.up[e], &down = experts.down[e];
    if (gate.rows != experts.width || up.rows != experts.width || gate.cols != experts.hidden || up.cols != experts.hidden ||
        down.rows != experts.hidden || down.cols != experts.width || gate.format != experts.gate[0].format ||
        up.format != experts.up[0].format || down.format != experts.down[0].format)
      refuse("parts", "experts differ in shape or format");
  }
  return experts;
}

Heads heads_of(int num_heads, int num_kv_heads, int head_dim, float scale, float softcap) {
  if (num_kv_heads < 1 || num_heads % num_kv_heads != 0 || head_dim < 1 || head_dim > kMaxHeadDim)
    refuse("heads", "unusable numbers");
  return {num_heads, num_kv_heads, head_dim, scale, softcap};
}

Cache cache_of(const TensorView& k, const TensorView& v, const Heads& heads) {
  const DType dtype = k.dtype == DType::f16 ? DType::f16 : DType::f32;
  check(k, "cache.k", dtype, {-1, heads.num_kv_heads, -1, heads.head_dim});
  check(v, "cache.v", dtype, {k.shape[0], heads.num_kv_heads, k.shape[2], heads.head_dim});
  Cache cache;
  cache.half = dtype == DType::f16;
  cache.num_blocks = k.shape[0];
  while ((int64_t{1} << cache.block_shift) < k.shape[2]) ++cache.block_shift;
  if ((int64_t{1} << cache.block_shift) != k.shape[2]) refuse("cache.k", "the block size is not a power of two");
  cache.k = {k.data, {k.strides[0], k.strides[1], k.strides[2]}};
  cache.v = {v.data, {v.strides[0], v.strides[1], v.strides[2]}};
  return cache;
}

std::unique_ptr<PlanHandle> make_plan(py::object positions, py::object query_start, py::object seq_lens, py::object table,
                                      py::object slots, int64_t window) {
  auto handle = std::make_unique<PlanHandle>();
  Plan& plan = handle->plan;
  const TensorView p = view_of(positions), q = view_of(query_start), s = view_of(seq_lens), t = view_of(table), w = view_of(slots);
  check_contiguous(p, "positions", DType::i32, {-1});
  plan.num_tokens = p.shape[0];
  check_contiguous(s, "seq_lens", DType::i32, {-1});
  plan.num_rows = s.shape[0];
  plan.positions = p.as<int32_t>();
  plan.query_start = check_contiguous(q, "query_start", DType::i32, {plan.num_rows + 1}).as<int32_t>();
  plan.seq_lens = s.as<int32_t>();
  plan.tables = check(t, "block_table", DType::i32, {plan.num_rows, -1}).as<int32_t>();
  plan.table_stride = t.strides[0];
  plan.slots = check_contiguous(w, "slot_mapping", DType::i64, {plan.num_tokens}).as<int64_t>();
  plan.window = window;
  handle->owners = py::make_tuple(query_start, seq_lens, table, slots);
  handle->positions = std::move(positions);
  return handle;
}

// The tokens of a plan that lie in its rows; the rest is padding.
void check_tokens(const TensorView& x, const char* name, const Plan& plan) {
  if (x.shape[0] != plan.num_tokens)
    refuse(name, "has " + std::to_string(x.shape[0]) + " tokens, the plan " + std::to_string(plan.num_tokens));
}

struct HeadRows {
  float* data;
  int64_t stride;
};

HeadRows head_rows(const TensorView& x, const char* name, int num_heads, int head_dim, const Plan& plan) {
  check(x, name, DType::f32, {-1, num_heads, head_dim});
  check_tokens(x, name, plan);
  if (num_heads > 1 && x.strides[1] != head_dim) refuse(name, "heads are not side by side");
  return {x.as<float>(), x.strides[0]};
}

py::object decoder_layer(py::object tensor, const PlanHandle& plan, const py::tuple& caches, const LayerHandle& handle) {
  const TensorView hidden = view_of(tensor);
  const Rows rows = rows_of(hidden, "hidden", handle.layer.hidden);
  check_tokens(hidden, "hidden", plan.plan);
  const Cache cache = cache_of(view_of(caches[0]), view_of(caches[1]), handle.layer.heads);
  {
    py::gil_scoped_release release;
    run_layer(handle.layer, plan.plan, cache, rows.data, rows.stride);
  }
  return tensor;
}

std::unique_ptr<LayerHandle> make_layer(
    int64_t hidden, float eps, std::tuple<int, int, int, float, float> heads, const std::string& act, const py::dict& norms,
    py::object cos, py::object sin, bool interleaved, const std::vector<Part>& qkv, const std::vector<Part>& o,
    const std::vector<Part>& gate_up, const std::vector<Part>& down, const std::vector<Part>& router,
    const std::vector<Part>& experts, int experts_per_token, bool norm_topk) {
  auto handle = std::make_unique<LayerHandle>();
  Layer& layer = handle->layer;
  py::list& owners = handle->owners;
  layer.hidden = hidden;
  layer.eps = eps;
  layer.heads = heads_of(std::get<0>(heads), std::get<1>(heads), std::get<2>(heads), std::get<3>(heads), std::get<4>(heads));
  layer.act = act_named(act);
  const auto norm = [&](const char* name, int64_t width) {
    return norms.contains(name) ? vector_of(norms[name], name, width, owners) : nullptr;
  };
  layer.attn_norm = norm("attn_norm", hidden);
  layer.attn_post_norm = norm("attn_post_norm", hidden);
  layer.mlp_norm = norm("mlp_norm", hidden);
  layer.mlp_post_norm = norm("mlp_post_norm", hidden);
  layer.q_norm = norm("q_norm", layer.heads.head_dim);
  layer.k_norm = norm("k_norm", layer.heads.head_dim);
  if (layer.attn_norm == nullptr || layer.mlp_norm == nullptr) refuse("norms", "attn_norm or mlp_norm is missing");
  const TensorView c = view_of(cos), s = view_of(sin);
  check_contiguous(c, "cos", DType::f32, {-1, -1});
  check_contiguous(s, "sin", DType::f32, {c.shape[0], c.shape[1]});
  layer.cos = c.as<float>();
  layer.sin = s.as<float>();
  layer.rotary_half = c.shape[1];
  if (2 * layer.rotary_half > layer.heads.head_dim) refuse("cos", "rotates more than a head");
  layer.interleaved = interleaved;
  owners.append(cos);
  owners.append(sin);
  layer.qkv = linear_of(qkv, owners);
  layer.o = linear_of(o, owners);
  const int64_t width = static_cast<int64_t>(layer.heads.num_heads) * layer.heads.head_dim;
  if (layer.qkv.rows != width + 2 * static_cast<int64_t>(layer.heads.num_kv_heads) * layer.heads.head_dim || layer.qkv.cols != hidden)
    refuse("qkv", "does not fit heads and hidden width");
  if (layer.o.rows != hidden || layer.o.cols != width) refuse("o", "does not fit heads and hidden width");
  layer.moe = !experts.empty();
  if (layer.moe) {
    layer.router = linear_of(router, owners);
    layer.experts = experts_of(experts, act, owners);
    layer.experts_per_token = experts_per_token;
    layer.norm_topk = norm_topk;
    if (layer.router.rows != static_cast<int64_t>(layer.experts.gate.size()) || layer.router.cols != hidden ||
        layer.experts.hidden != hidden || experts_per_token < 1 || experts_per_token > layer.router.rows)
      refuse("experts", "do not fit router and hidden width");
  } else {
    layer.gate_up = linear_of(gate_up, owners);
    layer.down = linear_of(down, owners);
    if (layer.gate_up.parts.size() != 2 || layer.gate_up.parts[0].rows != layer.gate_up.parts[1].rows ||
        layer.gate_up.cols != hidden)
      refuse("gate_up", "not two matrices of one shape");
    if (layer.down.rows != hidden || layer.down.cols != layer.gate_up.parts[0].rows) refuse("down", "does not fit gate_up");
  }
  return handle;
}

}  // namespace

void bind_host(py::module_& m) {
  m.attr("MAX_HEAD_DIM") = kMaxHeadDim;
  m.def("isas", [] {
    int count = 0;
    const char* const* names = available_isas(count);
    return std::vector<std::string>(names, names + count);
  });
  m.def("isa", [] { return std::string(kernels().name); });
  m.def("set_isa", [](const std::string& name) {
    if (!set_isa(name.c_str())) throw std::invalid_argument("no instruction set " + name + " here");
  }, py::arg("name"));
  m.def("format_code", [](const std::string& name) { return static_cast<int>(format_named(name)); }, py::arg("name"));
  m.def("packed_shape", [](const std::string& format, int64_t rows, int64_t cols) {
    return std::make_tuple(num_panels(rows), static_cast<int64_t>(panel_bytes(format_named(format), cols)));
  }, py::arg("format"), py::arg("rows"), py::arg("cols"));
  m.def("pack", [](const std::string& name, int64_t rows, int64_t cols, const TensorView& data, const TensorView& panels) {
    const Format format = format_named(name);
    const FormatInfo& info = info_of(format);
    if (cols % info.block_len != 0) refuse("cols", "not a multiple of the format's block length");
    if (data.num_dims != 2 || data.shape[0] != rows || (data.shape[1] > 1 && data.strides[1] != 1) ||
        data.shape[1] * static_cast<int64_t>(abi::size_of(data.dtype)) != cols / info.block_len * info.block_bytes)
      refuse("data", "has shape " + shape_text(data) + ", not rows of the format");
    check_contiguous(panels, "panels", DType::u8, {num_panels(rows), static_cast<int64_t>(panel_bytes(format, cols))});
    const size_t stride = static_cast<size_t>(data.strides[0]) * abi::size_of(data.dtype);
    py::gil_scoped_release release;
    pack_rows(format, rows, cols, data.as<uint8_t>(), stride, panels.as<uint8_t>());
  }, py::arg("format"), py::arg("rows"), py::arg("cols"), py::arg("data"), py::arg("panels"));

  py::class_<PlanHandle>(m, "Plan")
      .def(py::init(&make_plan), py::arg("positions"), py::arg("query_start"), py::arg("seq_lens"), py::arg("block_table"),
           py::arg("slot_mapping"), py::arg("window"))
      .def_readonly("positions", &PlanHandle::positions);

  py::class_<LinearHandle>(m, "Linear")
      .def(py::init([](const std::vector<Part>& parts) {
             auto handle = std::make_unique<LinearHandle>();
             handle->linear = linear_of(parts, handle->owners);
             return handle;
           }),
           py::arg("parts"))
      .def_property_readonly("rows", [](const LinearHandle& h) { return h.linear.rows; })
      .def_property_readonly("cols", [](const LinearHandle& h) { return h.linear.cols; });
  m.def("linear", [](const TensorView& x, const LinearHandle& handle, const TensorView& out) {
    const Rows from = rows_of(x, "x", handle.linear.cols), to = rows_of(out, "out", handle.linear.rows);
    if (from.count != to.count) refuse("out", "has another number of rows than x");
    py::gil_scoped_release release;
    linear(handle.linear, from, to);
  }, py::arg("x"), py::arg("handle"), py::arg("out"));

  py::class_<HeadHandle>(m, "Head")
      .def(py::init([](const Part& part, py::object norm, float eps, float softcap) {
             auto handle = std::make_unique<HeadHandle>();
             handle->linear = linear_of({part}, handle->owners);
             handle->norm = vector_of(norm, "norm", handle->linear.cols, handle->owners);
             handle->eps = eps;
             handle->softcap = softcap;
             return handle;
           }),
           py::arg("part"), py::arg("norm"), py::arg("eps"), py::arg("softcap"))
      .def_property_readonly("rows", [](const HeadHandle& h) { return h.linear.rows; });
  m.def("logits", [](const TensorView& hidden, const HeadHandle& handle, const TensorView& out) {
    const Rows from = rows_of(hidden, "hidden", handle.linear.cols), to = rows_of(out, "out", handle.linear.rows);
    if (from.count != to.count) refuse("out", "has another number of rows than hidden");
    py::gil_scoped_release release;
    logits(handle.linear, handle.norm, handle.eps, handle.softcap, from, to);
  }, py::arg("hidden"), py::arg("handle"), py::arg("out"));

  py::class_<TableHandle>(m, "Table")
      .def(py::init([](const Part& part, float scale) {
             auto handle = std::make_unique<TableHandle>();
             handle->matrix = matrix_of(part, handle->owners);
             handle->scale = scale;
             return handle;
           }),
           py::arg("part"), py::arg("scale"))
      .def_property_readonly("cols", [](const TableHandle& h) { return h.matrix.cols; });
  m.def("embed", [](const TensorView& ids, const TableHandle& handle, const TensorView& out) {
    check_contiguous(ids, "ids", DType::i32, {-1});
    const Rows to = rows_of(out, "out", handle.matrix.cols);
    if (to.count != ids.shape[0]) refuse("out", "has another number of rows than ids");
    const int32_t* values = ids.as<int32_t>();
    for (int64_t t = 0; t < to.count; ++t)
      if (values[t] < 0 || values[t] >= handle.matrix.rows) refuse("ids", "outside the table");
    py::gil_scoped_release release;
    embed(handle.matrix, values, handle.scale, to);
  }, py::arg("ids"), py::arg("handle"), py::arg("out"));

  m.def("rms_norm", [](const TensorView& x, const TensorView& weight, float eps, const TensorView& out) {
    if (x.num_dims < 1 || x.num_dims > 3) refuse("x", "needs one to three dimensions");
    const int64_t width = x.shape[x.num_dims - 1];
    const int n = x.num_dims;
    const int64_t inner = n > 1 ? x.shape[n - 2] : 1, outer = n > 2 ? x.shape[0] : 1;
    if (x.dtype != DType::f32 || (width > 1 && x.strides[n - 1] != 1)) refuse("x", "not float32 with a contiguous last dimension");
    check_contiguous(weight, "weight", DType::f32, {width});
    if (out.dtype != DType::f32 || !out.contiguous() || out.num_elements() != x.num_elements()) refuse("out", "does not fit x");
    py::gil_scoped_release release;
    rms_norm(x.as<float>(), outer, inner, n > 2 ? x.strides[0] : 0, n > 1 ? x.strides[n - 2] : 0, weight.as<float>(), width, eps,
             out.as<float>());
  }, py::arg("x"), py::arg("weight"), py::arg("eps"), py::arg("out"));
  m.def("add_rms_norm", [](const TensorView& x, const TensorView& residual, const TensorView& weight, float eps) {
    const Rows rows = rows_of(x, "x", -1), sums = rows_of(residual, "residual", rows.width);
    if (rows.count != sums.count) refuse("residual", "does not fit x");
    check_contiguous(weight, "weight", DType::f32, {rows.width});
    py::gil_scoped_release release;
    add_rms_norm(rows, sums, weight.as<float>(), eps);
  }, py::arg("x"), py::arg("residual"), py::arg("weight"), py::arg("eps"));
  m.def("rope", [](const TensorView& q, const TensorView& k, const TensorView& positions, const TensorView& cos,
                   const TensorView& sin, bool interleaved) {
    check_contiguous(positions, "positions", DType::i32, {-1});
    check_contiguous(cos, "cos", DType::f32, {-1, -1});
    check_contiguous(sin, "sin", DType::f32, {cos.shape[0], cos.shape[1]});
    for (const auto& [x, name] : {std::pair{&q, "q"}, std::pair{&k, "k"}}) {
      check(*x, name, DType::f32, {positions.shape[0], -1, -1});
      if (x->shape[2] < 2 * cos.shape[1]) refuse(name, "heads are narrower than the rotation");
    }
    py::gil_scoped_release release;
    for (const TensorView* x : {&q, &k})
      rope(x->as<float>(), x->shape[0], x->shape[1], x->strides[0], x->strides[1], positions.as<int32_t>(), cos.as<float>(),
           sin.as<float>(), cos.shape[1], interleaved);
  }, py::arg("q"), py::arg("k"), py::arg("positions"), py::arg("cos"), py::arg("sin"), py::arg("interleaved"));
  m.def("gated_activation", [](const TensorView& gate_up, const std::string& kind, const TensorView& out) {
    const Rows to = rows_of(out, "out", -1), from = rows_of(gate_up, "gate_up", 2 * to.width);
    if (from.count != to.count) refuse("out", "does not fit gate_up");
    const Act act = act_named(kind);
    py::gil_scoped_release release;
    gated_activation(act, from, to);
  }, py::arg("gate_up"), py::arg("kind"), py::arg("out"));

  m.def("moe_route", [](const TensorView& logits, bool renormalise, const TensorView& ids, const TensorView& weights) {
    const Rows rows = rows_of(logits, "logits", -1);
    check_contiguous(ids, "ids", DType::i32, {rows.count, -1});
    check_contiguous(weights, "weights", DType::f32, {rows.count, ids.shape[1]});
    if (ids.shape[1] > rows.width) refuse("ids", "more than there are experts");
    py::gil_scoped_release release;
    moe_route(rows, static_cast<int>(ids.shape[1]), renormalise, ids.as<int32_t>(), weights.as<float>());
  }, py::arg("logits"), py::arg("renormalise"), py::arg("ids"), py::arg("weights"));
  py::class_<ExpertsHandle>(m, "Experts")
      .def(py::init([](const std::vector<Part>& parts, const std::string& act) {
             auto handle = std::make_unique<ExpertsHandle>();
             handle->experts = experts_of(parts, act, handle->owners);
             return handle;
           }),
           py::arg("parts"), py::arg("activation"));
  m.def("moe_experts", [](const TensorView& x, const TensorView& ids, const TensorView& weights, const ExpertsHandle& handle,
                          const TensorView& out) {
    const Rows from = rows_of(x, "x", handle.experts.hidden), to = rows_of(out, "out", handle.experts.hidden);
    if (to.count != from.count) refuse("out", "does not fit x");
    check_contiguous(ids, "ids", DType::i32, {from.count, -1});
    check_contiguous(weights, "weights", DType::f32, {from.count, ids.shape[1]});
    for (int64_t i = 0; i < ids.num_elements(); ++i)
      if (ids.as<int32_t>()[i] < 0 || ids.as<int32_t>()[i] >= static_cast<int64_t>(handle.experts.gate.size()))
        refuse("ids", "no such expert");
    py::gil_scoped_release release;
    moe_experts(handle.experts, from, ids.as<int32_t>(), weights.as<float>(), static_cast<int>(ids.shape[1]), to);
  }, py::arg("x"), py::arg("ids"), py::arg("weights"), py::arg("handle"), py::arg("out"));

  py::class_<AttentionHandle>(m, "Attention")
      .def(py::init([](int num_heads, int num_kv_heads, int head_dim, float scale, float softcap) {
             return AttentionHandle{heads_of(num_heads, num_kv_heads, head_dim, scale, softcap)};
           }),
           py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("scale"), py::arg("softcap"))
      .def("write", [](const AttentionHandle& self, const TensorView& k, const TensorView& v, const TensorView& cache_k,
                       const TensorView& cache_v, const PlanHandle& plan) {
        const HeadRows keys = head_rows(k, "k", self.heads.num_kv_heads, self.heads.head_dim, plan.plan);
        const HeadRows values = head_rows(v, "v", self.heads.num_kv_heads, self.heads.head_dim, plan.plan);
        const Cache cache = cache_of(cache_k, cache_v, self.heads);
        py::gil_scoped_release release;
        attention_write(self.heads, plan.plan, cache, keys.data, keys.stride, values.data, values.stride);
      }, py::arg("k"), py::arg("v"), py::arg("cache_k"), py::arg("cache_v"), py::arg("plan"))
      .def("run", [](const AttentionHandle& self, const TensorView& q, const TensorView& cache_k, const TensorView& cache_v,
                     const PlanHandle& plan, const TensorView& out, const std::optional<TensorView>& lse) {
        const HeadRows queries = head_rows(q, "q", self.heads.num_heads, self.heads.head_dim, plan.plan);
        const HeadRows results = head_rows(out, "out", self.heads.num_heads, self.heads.head_dim, plan.plan);
        if (lse) check_contiguous(*lse, "lse", DType::f32, {plan.plan.num_tokens, self.heads.num_heads});
        const Cache cache = cache_of(cache_k, cache_v, self.heads);
        py::gil_scoped_release release;
        attention_run(self.heads, plan.plan, cache, queries.data, queries.stride, results.data, results.stride,
                      lse ? lse->as<float>() : nullptr, self.heads.num_heads);
      }, py::arg("q"), py::arg("cache_k"), py::arg("cache_v"), py::arg("plan"), py::arg("out"), py::arg("lse") = py::none());

  py::class_<LayerHandle>(m, "Layer")
      .def(py::init(&make_layer), py::kw_only(), py::arg("hidden"), py::arg("eps"), py::arg("heads"), py::arg("activation"),
           py::arg("norms"), py::arg("cos"), py::arg("sin"), py::arg("interleaved"), py::arg("qkv"), py::arg("o"),
           py::arg("gate_up"), py::arg("down"), py::arg("router"), py::arg("experts"), py::arg("experts_per_token"),
           py::arg("norm_topk"));
  m.def("decoder_layer", &decoder_layer, py::arg("hidden"), py::arg("plan"), py::arg("cache"), py::arg("handle"));
}

}  // namespace lamella::bind
