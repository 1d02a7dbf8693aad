#include "layer/tail.h"

#include <optional>

#include <pybind11/stl.h>

#include "bind/families.h"
#include "bind/stream.h"

namespace py = pybind11;

namespace lamella::bind {
namespace {

using abi::DType;
using abi::TensorView;
using Maybe = std::optional<TensorView>;

void tail(const TensorView& attended, const TensorView& w_o, const TensorView& residual, const TensorView& mlp_norm,
          const TensorView& w_gate_up, const TensorView& w_down, const TensorView& workspace, const Maybe& next_norm,
          const Maybe& w_qkv, const Maybe& qkv, double eps, const Maybe& prefetch) {
  check(attended, "attended", {DType::bf16, DType::f16}, {-1, -1});
  const DType dtype = attended.dtype;
  const auto fits = [&](const TensorView& tensor, const char* name) {
    check_aligned(tensor, name);
    check_same_device(tensor, name, attended);
  };
  LamellaLayerTail p = {};
  p.m = attended.shape[0];
  p.a = attended.shape[1];
  check_aligned(attended, "attended");
  check_contiguous(w_o, "w_o", {dtype}, {-1, p.a});
  p.h = w_o.shape[0];
  check(residual, "residual", {dtype}, {p.m, p.h});
  check_contiguous(mlp_norm, "mlp_norm", {dtype}, {p.h});
  check_contiguous(w_gate_up, "w_gate_up", {dtype}, {-1, p.h});
  require(w_gate_up.shape[0] % 2 == 0, "w_gate_up", "has an odd number of rows, needed gate and up rows");
  p.i = w_gate_up.shape[0] / 2;
  check_contiguous(w_down, "w_down", {dtype}, {p.h, p.i});
  check_contiguous(workspace, "workspace", {DType::u8}, {-1});
  fits(w_o, "w_o");
  fits(residual, "residual");
  fits(mlp_norm, "mlp_norm");
  fits(w_gate_up, "w_gate_up");
  fits(w_down, "w_down");
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
  p.w_gate_up = w_gate_up.data;
  p.w_down = w_down.data;
  p.attended_stride = attended.strides[0];
  p.residual_stride = residual.strides[0];
  p.elem = elem_of(dtype);
  p.eps = static_cast<float>(eps);
  const OnDevice on(attended);
  const int64_t most = lamella_layer_tail_rows(p.a, p.h, p.i, p.q);
  require(p.m <= most, "attended",
          "has " + std::to_string(p.m) + " rows of " + std::to_string(p.a) + ", residual " + std::to_string(p.h) +
              ", inner " + std::to_string(p.i) + ", qkv " + std::to_string(p.q) + ": this device's kernel takes " +
              std::to_string(most) + " rows");
  const int64_t needed = lamella_layer_tail_workspace(p.i);
  require(workspace.shape[0] >= needed, "workspace",
          "has " + std::to_string(workspace.shape[0]) + " bytes, needed " + std::to_string(needed));
  succeed(lamella_layer_tail(&p, workspace.data, workspace.shape[0], on.stream), "layer_tail");
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
}

}  // namespace lamella::bind
