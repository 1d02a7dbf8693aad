#include "activation/gated.h"

#include "bind/families.h"
#include "bind/stream.h"

namespace py = pybind11;

namespace lamella::bind {
namespace {

using abi::DType;
using abi::TensorView;

// x [rows, width] or [rows, 2 width] with a gate; rows of whole 16-byte vectors.
int64_t width_of(const TensorView& x, int act, int tile, std::initializer_list<DType> dtypes) {
  check(x, "x", dtypes, {-1, -1});
  check_aligned(x, "x");
  require(act == kActNone || x.shape[1] % 2 == 0, "x", "has an odd width, gate and up halves are needed");
  const int64_t width = act == kActNone ? x.shape[1] : x.shape[1] / 2;
  require(width * static_cast<int64_t>(abi::size_of(x.dtype)) % 16 == 0, "x",
          "rows of " + std::to_string(width) + " results are no multiple of 16 bytes");
  require(tile == kHalves || tile == kTile64, "tile", "is " + std::to_string(tile) + ", needed 0 or 64");
  require(tile == kHalves || (act != kActNone && width % tile == 0), "x",
          "rows of " + std::to_string(width) + " results are not whole tiles of " + std::to_string(tile));
  return width;
}

void gated(const TensorView& out, const TensorView& x, int act, int tile) {
  const int64_t width = width_of(x, act, tile, {DType::bf16, DType::f16, DType::f32});
  check(out, "out", {x.dtype}, {x.shape[0], width});
  check_aligned(out, "out");
  check_same_device(out, "out", x);
  const OnDevice on(x);
  succeed(lamella_gated(out.data, x.data, x.shape[0], width, out.strides[0], x.strides[0], tile, act,
                        elem_of(x.dtype), on.stream),
          "gated_activation");
}

void fp8_token(const TensorView& out, const TensorView& scale, const TensorView& x, int act, int tile) {
  const int64_t width = width_of(x, act, tile, {DType::bf16, DType::f16});
  check(out, "out", {DType::u8}, {x.shape[0], width});
  check_aligned(out, "out");
  check_contiguous(scale, "scale", {DType::f32}, {x.shape[0]});
  check_same_device(out, "out", x);
  check_same_device(scale, "scale", x);
  const OnDevice on(x);
  succeed(lamella_act_fp8_token(out.data, scale.as<float>(), x.data, x.shape[0], width, out.strides[0], x.strides[0],
                                tile, act, elem_of(x.dtype), on.stream),
          "quant_fp8_per_token");
}

// scale [rows, groups] with any strides.
void fp8_group(const TensorView& out, const TensorView& scale, const TensorView& x, int act, bool pow2, int tile) {
  const int64_t width = width_of(x, act, tile, {DType::bf16, DType::f16});
  require(width % 128 == 0, "x", "rows of " + std::to_string(width) + " results are no multiple of 128");
  check(out, "out", {DType::u8}, {x.shape[0], width});
  check_aligned(out, "out");
  require(scale.device_type == 2, "scale", "not on a CUDA device");
  require(scale.dtype == DType::f32, "scale", "is not float32");
  require(scale.num_dims == 2 && scale.shape[0] == x.shape[0] && scale.shape[1] == width / 128, "scale",
          "has shape " + shape_text(scale) + ", needed [" + std::to_string(x.shape[0]) + ", " +
              std::to_string(width / 128) + "]");
  check_same_device(out, "out", x);
  check_same_device(scale, "scale", x);
  const OnDevice on(x);
  succeed(lamella_act_fp8_group(out.data, scale.as<float>(), x.data, x.shape[0], width, out.strides[0], x.strides[0],
                                scale.strides[0], scale.strides[1], tile, pow2, act, elem_of(x.dtype), on.stream),
          "quant_fp8_per_group");
}

}  // namespace

void bind_activation(py::module_& m) {
  m.def("gated_activation", &gated, py::arg("out"), py::arg("x"), py::arg("act"), py::arg("tile"));
  m.def("act_fp8_token", &fp8_token, py::arg("out"), py::arg("scale"), py::arg("x"), py::arg("act"), py::arg("tile"));
  m.def("act_fp8_group", &fp8_group, py::arg("out"), py::arg("scale"), py::arg("x"), py::arg("act"), py::arg("pow2"),
        py::arg("tile"));
}

}  // namespace lamella::bind
