#include <optional>

#include <pybind11/stl.h>

#include "bind/families.h"
#include "bind/stream.h"
#include "cache/rope_write.h"

namespace py = pybind11;

namespace lamella::bind {
namespace {

using abi::DType;
using abi::TensorView;
using Optional = std::optional<TensorView>;

bool all_aligned(const TensorView& view) {
  const int64_t size = static_cast<int64_t>(abi::size_of(view.dtype));
  bool aligned = reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
  for (int i = 0; i + 1 < view.num_dims; ++i)
    aligned = aligned && (view.shape[i] <= 1 || view.strides[i] * size % 16 == 0);
  return aligned;
}

// Checks one of q, k, v: [tokens, heads, width] of the type and device of `first`.
const TensorView& heads_of(const TensorView& view, const char* name, const TensorView& first, int64_t heads) {
  check(view, name, {first.dtype}, {first.shape[0], heads, first.shape[2]});
  check_same_device(view, name, first);
  return view;
}

void rope_write(const Optional& q, const Optional& k, const Optional& v, const Optional& positions, const Optional& cos,
                const Optional& sin, const Optional& k_cache, const Optional& v_cache, const Optional& slots,
                const Optional& q_weight, const Optional& k_weight, double eps, bool plus_one, bool interleaved,
                bool keep_k, const Optional& k_scale, const Optional& v_scale, const char* function) {
  const TensorView& x = q ? *q : k ? *k : v ? *v : throw std::invalid_argument("q: missing, and k and v are, too");
  const char* x_name = q ? "q" : k ? "k" : "v";
  check(x, x_name, {DType::bf16, DType::f16, DType::f32}, {-1, -1, -1});
  const int64_t tokens = x.shape[0], width = x.shape[2];
  LamellaRopeWrite what = {};
  bool aligned = all_aligned(x);
  if (q) {
    what.q = q->data;
    what.num_q_heads = q->shape[1];
    what.q_token_stride = q->strides[0];
    what.q_head_stride = q->strides[1];
  }
  int64_t kv_heads = -1;
  if (k) {
    heads_of(*k, "k", x, -1);
    kv_heads = k->shape[1];
    what.k = k->data;
    what.k_token_stride = k->strides[0];
    what.k_head_stride = k->strides[1];
    aligned = aligned && all_aligned(*k);
  }
  if (v) {
    heads_of(*v, "v", x, kv_heads);
    kv_heads = v->shape[1];
    what.v = v->data;
    what.v_token_stride = v->strides[0];
    what.v_head_stride = v->strides[1];
    aligned = aligned && all_aligned(*v);
  }
  what.num_kv_heads = kv_heads < 0 ? 0 : kv_heads;
  if (cos) {
    check_contiguous(*cos, "cos", {DType::f32}, {-1, -1});
    require(sin.has_value(), "sin", "missing");
    check_contiguous(*sin, "sin", {DType::f32}, {cos->shape[0], cos->shape[1]});
    check_same_device(*cos, "cos", x);
    check_same_device(*sin, "sin", x);
    require(positions.has_value(), "positions", "missing");
    check_contiguous(*positions, "positions", {DType::i32, DType::i64}, {tokens});
    check_same_device(*positions, "positions", x);
    what.rotary_dim = 2 * cos->shape[1];
    require(what.rotary_dim <= width, "cos", "has " + std::to_string(cos->shape[1]) + " pairs for heads of " +
                                                 std::to_string(width));
    require(cos->shape[0] > 0, "cos", "has no position");
    what.positions = positions->data;
    what.wide_positions = positions->dtype == DType::i64;
    what.num_positions = cos->shape[0];
    what.cos = cos->as<float>();
    what.sin = sin->as<float>();
    aligned = aligned && reinterpret_cast<uintptr_t>(cos->data) % 16 == 0 &&
              reinterpret_cast<uintptr_t>(sin->data) % 16 == 0;
  }
  for (const auto& [weight, name, into] : {std::tuple{&q_weight, "q_norm", &what.q_weight},
                                           std::tuple{&k_weight, "k_norm", &what.k_weight}}) {
    if (!*weight) continue;
    check_contiguous(**weight, name, {x.dtype}, {width});
    check_same_device(**weight, name, x);
    aligned = aligned && all_aligned(**weight);
    *into = (*weight)->data;
  }
  what.cache_elem = elem_of(x.dtype);
  if (k_cache || v_cache) {
    require(slots.has_value(), "slot_mapping", "missing");
    check_contiguous(*slots, "slot_mapping", {DType::i64}, {tokens});
    check_same_device(*slots, "slot_mapping", x);
    what.slots = slots->as<int64_t>();
    const TensorView& cache = k_cache ? *k_cache : *v_cache;
    what.num_blocks = cache.num_dims == 4 ? cache.shape[0] : 0;
    what.block_size = cache.num_dims == 4 ? cache.shape[2] : 0;
    for (const auto& [given, name, into] : {std::tuple{&k_cache, "k_cache", 0}, std::tuple{&v_cache, "v_cache", 1}}) {
      if (!*given) continue;
      const TensorView& part = **given;
      check(part, name, {x.dtype, DType::u8}, {what.num_blocks, kv_heads, what.block_size, width});
      check_same_device(part, name, x);
      require(part.dtype == cache.dtype, name, "is not of the type of k_cache");
      require(part.shape[2] > 0 || part.shape[0] == 0, name, "blocks hold no token");
      aligned = aligned && all_aligned(part);
      (into == 0 ? what.k_cache : what.v_cache) = part.data;
      (into == 0 ? what.k_block_stride : what.v_block_stride) = part.strides[0];
      (into == 0 ? what.k_cache_head_stride : what.v_cache_head_stride) = part.strides[1];
      (into == 0 ? what.k_place_stride : what.v_place_stride) = part.strides[2];
    }
    if (cache.dtype == DType::u8) what.cache_elem = 3;
    if (what.block_size == 0) what.slots = nullptr;
  }
  require(!v || v_cache.has_value(), "v_cache", "missing, and v goes nowhere else");
  require(!v_cache || v.has_value(), "v", "missing, and v_cache is given");
  require(!k_cache || k.has_value(), "k", "missing, and k_cache is given");
  for (const auto& [scale, name, into] :
       {std::tuple{&k_scale, "k_scale", &what.k_scale}, std::tuple{&v_scale, "v_scale", &what.v_scale}}) {
    if (!*scale) continue;
    require(what.cache_elem == 3, name, "is for fp8 caches");
    const bool per_head = (*scale)->num_dims == 1 && (*scale)->shape[0] == kv_heads && kv_heads > 1;
    check_contiguous(**scale, name, {DType::f32}, {per_head ? kv_heads : 1});
    check_same_device(**scale, name, x);
    require(!k_scale || !v_scale || k_scale->shape[0] == v_scale->shape[0], name, "k_scale and v_scale differ in shape");
    what.scale_stride = per_head ? 1 : 0;
    *into = (*scale)->as<float>();
  }
  what.num_tokens = tokens;
  what.head_dim = width;
  what.eps = static_cast<float>(eps);
  what.plus_one = plus_one;
  what.interleaved = interleaved;
  what.keep_k = keep_k;
  what.elem = elem_of(x.dtype);
  what.aligned = aligned;
  const OnDevice on(x);
  succeed(lamella_rope_write(&what, on.stream), function);
}

}  // namespace

void bind_cache(py::module_& m) {
  m.def("rope_write", &rope_write, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("positions"), py::arg("cos"),
        py::arg("sin"), py::arg("k_cache"), py::arg("v_cache"), py::arg("slot_mapping"), py::arg("q_norm"),
        py::arg("k_norm"), py::arg("eps"), py::arg("plus_one"), py::arg("interleaved"), py::arg("keep_k"),
        py::arg("k_scale"), py::arg("v_scale"), py::arg("function"));
}

}  // namespace lamella::bind
