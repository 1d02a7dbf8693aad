#include "norm/rms_norm.h"

#include <optional>

#include <pybind11/stl.h>

#include "bind/families.h"
#include "bind/stream.h"

namespace py = pybind11;

namespace lamella::bind {
namespace {

using abi::DType;
using abi::TensorView;

// Checks what all the norms share and calls launch(residual pointer, residual stride, stream).
template <class Go>
void norm(const char* function, const TensorView& x, const TensorView& weight,
          const std::optional<TensorView>& residual, Go&& go) {
  check(x, "x", {DType::bf16, DType::f16, DType::f32}, {-1, -1});
  check_aligned(x, "x");
  const int64_t rows = x.shape[0], width = x.shape[1];
  require(width * static_cast<int64_t>(abi::size_of(x.dtype)) % 16 == 0, "x",
          "rows of " + std::to_string(width) + " elements are no multiple of 16 bytes");
  check_contiguous(weight, "weight", {x.dtype}, {width});
  check_aligned(weight, "weight");
  check_same_device(weight, "weight", x);
  if (residual) {
    check(*residual, "residual", {x.dtype}, {rows, width});
    check_aligned(*residual, "residual");
    check_same_device(*residual, "residual", x);
  }
  const OnDevice on(x);
  succeed(go(residual ? residual->data : nullptr, residual ? residual->strides[0] : 0, on.stream), function);
}

}  // namespace

void bind_norm(py::module_& m) {
  m.def(
      "rms_norm",
      [](const TensorView& out, const TensorView& x, const TensorView& weight, double eps,
         const std::optional<TensorView>& residual, bool plus_one) {
        check(out, "out", {x.dtype}, {x.shape[0], x.shape[1]});
        check_aligned(out, "out");
        check_same_device(out, "out", x);
        norm("rms_norm", x, weight, residual, [&](void* sum, int64_t sum_stride, void* stream) {
          return lamella_rms_norm(out.data, x.data, sum, weight.data, x.shape[0], x.shape[1], out.strides[0],
                                  x.strides[0], sum_stride, static_cast<float>(eps), plus_one, elem_of(x.dtype),
                                  stream);
        });
      },
      py::arg("out"), py::arg("x"), py::arg("weight"), py::arg("eps"), py::arg("residual"), py::arg("plus_one"));
  m.def(
      "rms_norm_fp8",
      [](const TensorView& out, const TensorView& scale, const TensorView& x, const TensorView& weight, double eps,
         const std::optional<TensorView>& residual, bool plus_one) {
        check(out, "out", {DType::u8}, {x.shape[0], x.shape[1]});
        check_aligned(out, "out");
        check_contiguous(scale, "scale", {DType::f32}, {x.shape[0]});
        check_same_device(out, "out", x);
        check_same_device(scale, "scale", x);
        norm("rms_norm_fp8", x, weight, residual, [&](void* sum, int64_t sum_stride, void* stream) {
          return lamella_rms_norm_fp8(out.data, scale.as<float>(), x.data, sum, weight.data, x.shape[0], x.shape[1],
                                      out.strides[0], x.strides[0], sum_stride, static_cast<float>(eps), plus_one,
                                      elem_of(x.dtype), stream);
        });
      },
      py::arg("out"), py::arg("scale"), py::arg("x"), py::arg("weight"), py::arg("eps"), py::arg("residual"),
      py::arg("plus_one"));
}

}  // namespace lamella::bind
