#include "gemm/gemm.h"

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

const void* vector_of(const Maybe& tensor, const char* name, DType dtype, int64_t width, const TensorView& x) {
  if (!tensor) return nullptr;
  check_contiguous(*tensor, name, {dtype}, {width});
  check_aligned(*tensor, name);
  check_same_device(*tensor, name, x);
  return tensor->data;
}

// out, x and w; everything else is optional and named after the fields of LamellaGemm.
void gemm(const TensorView& out, const TensorView& x, const TensorView& w, const TensorView& workspace, int act,
          const Maybe& bias, const Maybe& residual, const Maybe& squares_in, double eps, const Maybe& gain,
          const Maybe& scaled_out, const Maybe& squares_out, const Maybe& x_scale, const Maybe& w_scale,
          const Maybe& prefetch, bool portable) {
  LamellaGemm g = {};
  check(x, "x", {DType::bf16, DType::f16, DType::u8}, {-1, -1});
  check_aligned(x, "x");
  check(w, "w", {x.dtype}, {-1, x.shape[1]});
  check_aligned(w, "w");
  check_same_device(w, "w", x);
  const bool is_fp8 = x.dtype == DType::u8;
  check(out, "out", {DType::bf16, DType::f16}, {x.shape[0], -1});
  if (!is_fp8) check(out, "out", {x.dtype}, {x.shape[0], -1});
  check_aligned(out, "out");
  check_same_device(out, "out", x);
  require(act >= kActNone && act <= kActGelu, "act", "no activation " + std::to_string(act));
  g.m = x.shape[0];
  g.k = x.shape[1];
  g.n = act != kActNone ? w.shape[0] / 2 : w.shape[0];
  require(out.shape[1] == g.n, "out", "has " + std::to_string(out.shape[1]) + " columns, w gives " + std::to_string(g.n));
  require(g.k % (is_fp8 ? 16 : 8) == 0, "x", "its width is no multiple of 16 bytes");
  require(w.shape[0] % (act != kActNone ? 128 : 8) == 0, "w",
          act != kActNone ? "needs a multiple of 128 packed rows" : "needs a multiple of 8 rows");
  g.x = x.data;
  g.w = w.data;
  g.out = out.data;
  g.x_stride = x.strides[0];
  g.w_stride = w.strides[0];
  g.out_stride = out.strides[0];
  g.elem = elem_of(x.dtype);
  g.out_elem = elem_of(out.dtype);
  g.act = act;
  g.bias = vector_of(bias, "bias", out.dtype, g.n, x);
  g.gain = vector_of(gain, "gain", out.dtype, g.n, x);
  if (residual) {
    check(*residual, "residual", {out.dtype}, {g.m, g.n});
    check_aligned(*residual, "residual");
    check_same_device(*residual, "residual", x);
    g.residual = residual->data;
    g.residual_stride = residual->strides[0];
  }
  if (gain) {
    require(scaled_out.has_value(), "scaled_out", "is needed with gain");
    check(*scaled_out, "scaled_out", {out.dtype}, {g.m, g.n});
    check_aligned(*scaled_out, "scaled_out");
    check_same_device(*scaled_out, "scaled_out", x);
    g.scaled_out = scaled_out->data;
    g.scaled_out_stride = scaled_out->strides[0];
  }
  if (squares_in) {
    check_contiguous(*squares_in, "squares_in", {DType::f32}, {-1, g.m});
    check_same_device(*squares_in, "squares_in", x);
    g.squares_in = squares_in->as<float>();
    g.num_squares_in = squares_in->shape[0];
    g.eps = static_cast<float>(eps);
  }
  if (squares_out) {
    require(act == kActNone, "squares_out", "is not for products with an activation");
    check_contiguous(*squares_out, "squares_out", {DType::f32}, {(g.n + 127) / 128, g.m});
    check_same_device(*squares_out, "squares_out", x);
    g.squares_out = squares_out->as<float>();
  }
  require(x_scale.has_value() == is_fp8, "x_scale", is_fp8 ? "is needed with fp8" : "is for fp8 only");
  require(w_scale.has_value() == is_fp8, "w_scale", is_fp8 ? "is needed with fp8" : "is for fp8 only");
  if (is_fp8) {
    const int64_t blocks = (g.k + 127) / 128;
    g.scale_block = w_scale->num_dims == 2 ? 128 : 0;
    if (g.scale_block != 0) {
      check_contiguous(*x_scale, "x_scale", {DType::f32}, {g.m, blocks});
      check_contiguous(*w_scale, "w_scale", {DType::f32}, {(w.shape[0] + 127) / 128, blocks});
    } else {
      check_contiguous(*x_scale, "x_scale", {DType::f32}, {g.m});
      check_contiguous(*w_scale, "w_scale", {DType::f32}, {w.shape[0]});
    }
    check_same_device(*x_scale, "x_scale", x);
    check_same_device(*w_scale, "w_scale", x);
    g.x_scale = x_scale->as<float>();
    g.w_scale = w_scale->as<float>();
  }
  if (prefetch) {
    require(prefetch->contiguous(), "prefetch", "is not contiguous");
    check_aligned(*prefetch, "prefetch");
    check_same_device(*prefetch, "prefetch", x);
    g.prefetch = prefetch->data;
    g.prefetch_bytes = prefetch->num_elements() * static_cast<int64_t>(abi::size_of(prefetch->dtype));
  }
  g.portable = portable;
  check_contiguous(workspace, "workspace", {DType::u8}, {-1});
  check_aligned(workspace, "workspace");
  check_same_device(workspace, "workspace", x);
  const OnDevice on(x);
  const int64_t needed = lamella_gemm_workspace(g.m);
  require(workspace.shape[0] >= needed, "workspace",
          "has " + std::to_string(workspace.shape[0]) + " bytes, needed " + std::to_string(needed));
  succeed(lamella_gemm(&g, workspace.data, workspace.shape[0], on.stream), "gemm");
}

}  // namespace

void bind_gemm(py::module_& m) {
  m.def("gemm", &gemm, py::arg("out"), py::arg("x"), py::arg("w"), py::arg("workspace"), py::arg("act") = 0,
        py::arg("bias") = py::none(), py::arg("residual") = py::none(), py::arg("squares_in") = py::none(),
        py::arg("eps") = 0.0, py::arg("gain") = py::none(), py::arg("scaled_out") = py::none(),
        py::arg("squares_out") = py::none(), py::arg("x_scale") = py::none(), py::arg("w_scale") = py::none(),
        py::arg("prefetch") = py::none(), py::arg("portable") = false);
  m.def("gemm_workspace", &lamella_gemm_workspace, py::arg("num_tokens"));
}

}  // namespace lamella::bind
