#include "layer/tail.h"

#include <optional>
#include <string>

#include <pybind11/stl.h>

#include "bind/families.h"
#include "bind/stream.h"
#include "layer/experts_tail.h"

namespace py = pybind11;

namespace lamella::bind {
namespace {

using abi::DType;
using abi::TensorView;
using Maybe = std::optional<TensorView>;

// What the two tails have in common: attention's end and the next layer's beginning. Returns the element type.
template <class Tail>
DType ends(Tail& p, const TensorView& attended, const TensorView& w_o, const TensorView& residual,
           const TensorView& mlp_norm, const TensorView& workspace, const Maybe& next_norm, const Maybe& w_qkv,
           const Maybe& qkv, double eps, const Maybe& prefetch) {
  check(attended, "attended", {DType::bf16, DType::f16}, {-1, -1});
  const DType dtype = attended.dtype;
  const auto fits = [&](const TensorView& tensor, const char* name) {
    check_aligned(tensor, name);
    check_same_device(tensor, name, attended);
  };
  p.m = attended.shape[0];
  p.a = attended.shape[1];
  check_aligned(attended, "attended");
  check_contiguous(w_o, "w_o", {dtype}, {-1, p.a});
  p.h = w_o.shape[0];
  check(residual, "residual", {dtype}, {p.m, p.h});
  check_contiguous(mlp_norm, "mlp_norm", {dtype}, {p.h});
  check_contiguous(workspace, "workspace", {DType::u8}, {-1});
  fits(w_o, "w_o");
  fits(residual, "residual");
  fits(mlp_norm, "mlp_norm");
  fits(workspace, "workspace");
  require(w_qkv.has_value() == next_norm.has_value(), "next_norm", "is needed with w_qkv, and only with it");
  require(w_qkv.has_value() == qkv.has_value(), "qkv", "is needed with w_qkv, and only with it");
  if (w_qkv) {
    check_contiguous(*next_norm, "next_norm", {dtype}, {p.h});
    check_contiguous(*w_qkv, "w_qkv", {dtype}, {-1, p.h});
    p.q = w_qkv->shape[0];
    check(*qkv, "qkv", {dtype}, {p.m, p.q});
    fits(*next_norm, "next_norm");
    fits(*w_qkv, "w_qkv");
    fits(*qkv, "qkv");
    p.next_norm = next_norm->data;
    p.w_qkv = w_qkv->data;
    p.qkv = qkv->data;
    p.qkv_stride = qkv->strides[0];
  }
  if (prefetch) {
    require(prefetch->contiguous(), "prefetch", "is not contiguous");
    fits(*prefetch, "prefetch");
    p.prefetch = prefetch->data;
    p.prefetch_bytes = prefetch->num_elements() * static_cast<int64_t>(abi::size_of(prefetch->dtype));
  }
  p.attended = attended.data;
  p.w_o = w_o.data;
  p.residual = residual.data;
  p.mlp_norm = mlp_norm.data;
  p.attended_stride = attended.strides[0];
  p.residual_stride = residual.strides[0];
  p.elem = elem_of(dtype);
  p.eps = static_cast<float>(eps);
  return dtype;
}

template <class Tail>
void check_room(const Tail& p, int64_t most, int64_t needed, const TensorView& workspace) {
  require(p.m <= most, "attended",
          "has " + std::to_string(p.m) + " rows of " + std::to_string(p.a) + ", residual " + std::to_string(p.h) +
              ", inner " + std::to_string(p.i) + ", qkv " + std::to_string(p.q) + ": this device's kernel takes " +
              std::to_string(most) + " rows");
  require(workspace.shape[0] >= needed, "workspace",
          "has " + std::to_string(workspace.shape[0]) + " bytes, needed " + std::to_string(needed));
}

const void* weights(const TensorView& tensor, const char* name, const TensorView& like) {
  check_aligned(tensor, name);
  check_same_device(tensor, name, like);
  return tensor.data;
}

void tail(const TensorView& attended, const TensorView& w_o, const TensorView& residual, const TensorView& mlp_norm,
          const TensorView& w_gate_up, const TensorView& w_down, const TensorView& workspace, const Maybe& next_norm,
          const Maybe& w_qkv, const Maybe& qkv, double eps, const Maybe& prefetch) {
  LamellaLayerTail p = {};
  const DType dtype =
      ends(p, attended, w_o, residual, mlp_norm, workspace, next_norm, w_qkv, qkv, eps, prefetch);
  check_contiguous(w_gate_up, "w_gate_up", {dtype}, {-1, p.h});
  require(w_gate_up.shape[0] % 2 == 0, "w_gate_up", "has an odd number of rows, needed gate and up rows");
  p.i = w_gate_up.shape[0] / 2;
  check_contiguous(w_down, "w_down", {dtype}, {p.h, p.i});
  p.w_gate_up = weights(w_gate_up, "w_gate_up", attended);
  p.w_down = weights(w_down, "w_down", attended);
  const OnDevice on(attended);
  check_room(p, lamella_layer_tail_rows(p.a, p.h, p.i, p.q), lamella_layer_tail_workspace(p.i), workspace);
  succeed(lamella_layer_tail(&p, workspace.data, workspace.shape[0], on.stream), "layer_tail");
}

void tail_of_experts(const TensorView& attended, const TensorView& w_o, const TensorView& residual,
                     const TensorView& mlp_norm, const TensorView& router, const TensorView& w13,
                     const TensorView& w2, int top_k, bool renormalize, const TensorView& workspace,
                     const Maybe& next_norm, const Maybe& w_qkv, const Maybe& qkv, double eps, const Maybe& prefetch) {
  LamellaExpertsTail p = {};
  const DType dtype =
      ends(p, attended, w_o, residual, mlp_norm, workspace, next_norm, w_qkv, qkv, eps, prefetch);
  check_contiguous(router, "router", {dtype}, {-1, p.h});
  const int64_t experts = router.shape[0];
  check_contiguous(w13, "w13", {dtype}, {experts, -1, p.h});
  require(w13.shape[1] % 2 == 0, "w13", "has an odd number of rows, needed gate and up rows");
  p.i = w13.shape[1] / 2;
  check_contiguous(w2, "w2", {dtype}, {experts, p.h, p.i});
  require(top_k >= 1 && top_k <= experts, "top_k",
          "is " + std::to_string(top_k) + " of " + std::to_string(experts) + " experts");
  p.router = weights(router, "router", attended);
  p.w13 = weights(w13, "w13", attended);
  p.w2 = weights(w2, "w2", attended);
  p.num_experts = static_cast<int>(experts);
  p.top_k = top_k;
  p.renormalize = renormalize;
  const OnDevice on(attended);
  check_room(p, lamella_experts_tail_rows(p.a, p.h, p.i, p.q, experts, top_k),
             lamella_experts_tail_workspace(p.i, experts, top_k), workspace);
  succeed(lamella_experts_tail(&p, workspace.data, workspace.shape[0], on.stream), "experts_tail");
}

}  // namespace

void bind_layer(py::module_& m) {
  m.def("layer_tail_rows", &lamella_layer_tail_rows, py::arg("attended"), py::arg("hidden"), py::arg("inner"),
        py::arg("qkv"));
  m.def("layer_tail_workspace", &lamella_layer_tail_workspace, py::arg("inner"));
  m.def("layer_tail_zeroed", &lamella_layer_tail_zeroed);
  m.def("layer_tail", &tail, py::arg("attended"), py::arg("w_o"), py::arg("residual"), py::arg("mlp_norm"),
        py::arg("w_gate_up"), py::arg("w_down"), py::arg("workspace"), py::arg("next_norm"), py::arg("w_qkv"),
        py::arg("qkv"), py::arg("eps"), py::arg("prefetch"));
  m.def("experts_tail_rows", &lamella_experts_tail_rows, py::arg("attended"), py::arg("hidden"), py::arg("inner"),
        py::arg("qkv"), py::arg("num_experts"), py::arg("top_k"));
  m.def("experts_tail_workspace", &lamella_experts_tail_workspace, py::arg("inner"), py::arg("num_experts"),
        py::arg("top_k"));
  m.def("experts_tail", &tail_of_experts, py::arg("attended"), py::arg("w_o"), py::arg("residual"),
        py::arg("mlp_norm"), py::arg("router"), py::arg("w13"), py::arg("w2"), py::arg("top_k"),
        py::arg("renormalize"), py::arg("workspace"), py::arg("next_norm"), py::arg("w_qkv"), py::arg("qkv"),
        py::arg("eps"), py::arg("prefetch"));
}

}  // namespace lamella::bind
