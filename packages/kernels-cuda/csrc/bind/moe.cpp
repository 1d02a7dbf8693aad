#include <optional>

#include <pybind11/stl.h>

#include "bind/families.h"
#include "bind/stream.h"
#include "moe/align.h"
#include "moe/experts.h"
#include "moe/route.h"

namespace py = pybind11;

namespace lamella::bind {
namespace {

using abi::DType;
using abi::TensorView;

void route(const TensorView& ids, const TensorView& weights, const TensorView& logits,
           const std::optional<TensorView>& bias, int scoring, bool renormalize, int num_groups, int topk_groups,
           double scale) {
  check(logits, "logits", {DType::f32, DType::bf16, DType::f16}, {-1, -1});
  const int64_t tokens = logits.shape[0], experts = logits.shape[1];
  require(experts >= 1 && experts <= 1024, "logits", "has " + std::to_string(experts) + " experts, needed 1 to 1024");
  check_contiguous(ids, "ids", {DType::i32}, {tokens, -1});
  const int64_t top_k = ids.shape[1];
  require(top_k >= 1 && top_k <= 32 && top_k <= experts, "top_k",
          std::to_string(top_k) + " of " + std::to_string(experts) + " experts, needed 1 to 32 and no more than there are");
  check_contiguous(weights, "weights", {DType::f32}, {tokens, top_k});
  if (bias) {
    check_contiguous(*bias, "bias", {DType::f32}, {experts});
    check_same_device(*bias, "bias", logits);
  }
  check_same_device(ids, "ids", logits);
  check_same_device(weights, "weights", logits);
  require(num_groups >= 1 && num_groups <= 32 && experts % num_groups == 0, "num_groups",
          std::to_string(num_groups) + " does not divide the experts, or is more than 32");
  require(topk_groups >= 1 && topk_groups <= num_groups, "topk_groups", "needed 1 to num_groups");
  const OnDevice on(logits);
  succeed(lamella_moe_route(ids.as<int32_t>(), weights.as<float>(), logits.data, bias ? bias->as<float>() : nullptr,
                            tokens, experts, logits.strides[0], static_cast<int>(top_k), scoring, renormalize,
                            num_groups, topk_groups, static_cast<float>(scale), elem_of(logits.dtype), on.stream),
          "moe_route");
}

const int32_t* checked_map(const std::optional<TensorView>& map, const TensorView& like) {
  if (!map) return nullptr;
  check_contiguous(*map, "expert_map", {DType::i32}, {-1});
  check_same_device(*map, "expert_map", like);
  return map->as<int32_t>();
}

void align(const TensorView& sorted_ids, const TensorView& block_experts, const TensorView& num_rows,
           const TensorView& ids, int64_t num_experts, int64_t block_rows, const std::optional<TensorView>& map) {
  check_contiguous(ids, "ids", {DType::i32}, {-1, -1});
  require(num_experts >= 1 && num_experts <= 1024, "num_experts", "needed 1 to 1024");
  require(block_rows >= 1, "block_rows", "needed 1 or more");
  const int64_t blocks = lamella_moe_max_blocks(ids.num_elements(), num_experts, block_rows);
  check_contiguous(sorted_ids, "sorted_ids", {DType::i32}, {blocks * block_rows});
  check_contiguous(block_experts, "block_experts", {DType::i32}, {blocks});
  check_contiguous(num_rows, "num_rows", {DType::i32}, {1});
  check_same_device(sorted_ids, "sorted_ids", ids);
  check_same_device(block_experts, "block_experts", ids);
  check_same_device(num_rows, "num_rows", ids);
  const int32_t* expert_map = checked_map(map, ids);
  const OnDevice on(ids);
  succeed(lamella_moe_align(sorted_ids.as<int32_t>(), block_experts.as<int32_t>(), nullptr, num_rows.as<int32_t>(),
                            ids.as<int32_t>(), expert_map, ids.num_elements(), map ? map->shape[0] : 0, num_experts,
                            block_rows, 1, 0, on.stream),
          "moe_align");
}

void experts(const TensorView& out, const TensorView& x, const TensorView& w13, const TensorView& w2,
             const TensorView& ids, const TensorView& weights, const std::optional<TensorView>& w13_scale,
             const std::optional<TensorView>& w2_scale, const std::optional<TensorView>& map,
             const TensorView& workspace, bool portable, const std::optional<TensorView>& residual,
             const std::optional<TensorView>& next_norm, const std::optional<TensorView>& normed, double eps,
             const std::optional<TensorView>& logits, bool renormalize) {
  check(x, "x", {DType::bf16, DType::f16}, {-1, -1});
  check_aligned(x, "x");
  const int64_t tokens = x.shape[0], hidden = x.shape[1];
  const bool fp8 = w13.dtype == DType::u8;
  const DType type = fp8 ? DType::u8 : x.dtype;
  require(!fp8 || x.dtype == DType::bf16, "x", "must be bfloat16 with fp8 weights");
  check_contiguous(w13, "w13", {type}, {-1, -1, hidden});
  const int64_t num_experts = w13.shape[0], inner = w13.shape[1] / 2, multiple = fp8 ? 128 : 8;
  require(num_experts >= 1 && num_experts <= 1024, "w13", "has " + std::to_string(num_experts) +
                                                              " experts, needed 1 to 1024");
  require(w13.shape[1] % 2 == 0 && inner >= 1, "w13", "has no gate and up rows of equal number");
  check_contiguous(w2, "w2", {type}, {num_experts, hidden, inner});
  check_aligned(w13, "w13");
  check_aligned(w2, "w2");
  require(hidden % multiple == 0, "x", "has width " + std::to_string(hidden) + ", needed a multiple of " +
                                           std::to_string(multiple));
  require(inner % multiple == 0, "w2", "has width " + std::to_string(inner) + ", needed a multiple of " +
                                           std::to_string(multiple));
  require(residual.has_value() || !next_norm, "next_norm", "needs a residual");
  require(next_norm.has_value() == normed.has_value(), "normed", "is for next_norm, and needed with it");
  if (residual) {
    check(*residual, "residual", {x.dtype}, {tokens, hidden});
    check_aligned(*residual, "residual");
    check_same_device(*residual, "residual", x);
    require(hidden <= lamella_moe_residual_width(), "residual",
            "has width " + std::to_string(hidden) + ", possible are " + std::to_string(lamella_moe_residual_width()));
  }
  if (next_norm) {
    check_contiguous(*next_norm, "next_norm", {x.dtype}, {hidden});
    check_aligned(*next_norm, "next_norm");
    check_same_device(*next_norm, "next_norm", x);
    check(*normed, "normed", {x.dtype}, {tokens, hidden});
    check_aligned(*normed, "normed");
    check_same_device(*normed, "normed", x);
  }
  check(out, "out", {x.dtype}, {tokens, hidden});
  check_aligned(out, "out");
  check_contiguous(ids, "ids", {DType::i32}, {tokens, -1});
  const int64_t top_k = ids.shape[1];
  require(top_k >= 1 && top_k <= 1024, "ids", "has no experts, or more than 1024, per token");
  check_contiguous(weights, "weights", {DType::f32}, {tokens, top_k});
  if (fp8) {
    require(w13_scale.has_value(), "w13_scale", "is needed with fp8 weights");
    require(w2_scale.has_value(), "w2_scale", "is needed with fp8 weights");
    check_contiguous(*w13_scale, "w13_scale", {DType::f32}, {num_experts, 2 * inner / 128, hidden / 128});
    check_contiguous(*w2_scale, "w2_scale", {DType::f32}, {num_experts, hidden / 128, inner / 128});
    check_same_device(*w13_scale, "w13_scale", x);
    check_same_device(*w2_scale, "w2_scale", x);
  } else {
    require(!w13_scale.has_value(), "w13_scale", "is for fp8 weights");
    require(!w2_scale.has_value(), "w2_scale", "is for fp8 weights");
  }
  const int32_t* expert_map = checked_map(map, x);
  const int64_t map_size = map ? map->shape[0] : 0;
  if (logits) {
    const int64_t choices = map ? map_size : num_experts;
    check(*logits, "logits", {DType::f32, DType::bf16, DType::f16}, {tokens, choices});
    check_same_device(*logits, "logits", x);
    require(choices <= 1024, "logits", "has " + std::to_string(choices) + " experts, needed 1 to 1024");
    require(top_k <= 32 && top_k <= choices, "ids", "has more than 32 experts per token, or more than there are");
  }
  check_contiguous(workspace, "workspace", {DType::u8}, {-1});
  require(reinterpret_cast<uintptr_t>(workspace.data) % 256 == 0, "workspace", "does not start at a multiple of 256");
  check_same_device(w13, "w13", x);
  check_same_device(w2, "w2", x);
  check_same_device(out, "out", x);
  check_same_device(ids, "ids", x);
  check_same_device(weights, "weights", x);
  check_same_device(workspace, "workspace", x);
  const OnDevice on(x);
  const int64_t needed =
      lamella_moe_workspace(tokens, top_k, num_experts, map_size, hidden, inner, fp8, portable);
  require(workspace.shape[0] >= needed, "workspace",
          "has " + std::to_string(workspace.shape[0]) + " bytes, needed " + std::to_string(needed));
  const LamellaMoe moe{out.data,
                       x.data,
                       w13.data,
                       w2.data,
                       ids.as<int32_t>(),
                       weights.as<float>(),
                       expert_map,
                       fp8 ? w13_scale->as<float>() : nullptr,
                       fp8 ? w2_scale->as<float>() : nullptr,
                       tokens,
                       hidden,
                       inner,
                       num_experts,
                       map_size,
                       x.strides[0],
                       out.strides[0],
                       static_cast<int>(top_k),
                       elem_of(x.dtype),
                       elem_of(type),
                       portable,
                       residual ? residual->data : nullptr,
                       normed ? normed->data : nullptr,
                       next_norm ? next_norm->data : nullptr,
                       residual ? residual->strides[0] : 0,
                       normed ? normed->strides[0] : 0,
                       static_cast<float>(eps),
                       logits ? logits->data : nullptr,
                       logits ? logits->strides[0] : 0,
                       logits ? elem_of(logits->dtype) : 0,
                       renormalize};
  succeed(lamella_moe(&moe, workspace.data, workspace.shape[0], on.stream), "fused_moe");
}

}  // namespace

void bind_moe(py::module_& m) {
  m.def("moe_route", &route, py::arg("ids"), py::arg("weights"), py::arg("logits"), py::arg("bias"),
        py::arg("scoring"), py::arg("renormalize"), py::arg("num_groups"), py::arg("topk_groups"), py::arg("scale"));
  m.def("moe_max_blocks", &lamella_moe_max_blocks, py::arg("num_ids"), py::arg("num_experts"), py::arg("block_rows"));
  m.def("moe_align", &align, py::arg("sorted_ids"), py::arg("block_experts"), py::arg("num_rows"), py::arg("ids"),
        py::arg("num_experts"), py::arg("block_rows"), py::arg("expert_map"));
  m.def("moe_zeroed", &lamella_moe_zeroed);
  m.def("moe_workspace", &lamella_moe_workspace_up_to, py::arg("num_tokens"), py::arg("top_k"), py::arg("num_experts"),
        py::arg("map_size"), py::arg("hidden"), py::arg("inner"), py::arg("fp8"), py::arg("portable"));
  m.def("fused_moe", &experts, py::arg("out"), py::arg("x"), py::arg("w13"), py::arg("w2"), py::arg("ids"),
        py::arg("weights"), py::arg("w13_scale"), py::arg("w2_scale"), py::arg("expert_map"), py::arg("workspace"),
        py::arg("portable"), py::arg("residual"), py::arg("next_norm"), py::arg("normed"), py::arg("eps"),
        py::arg("logits"), py::arg("renormalize"));
}

}  // namespace lamella::bind
