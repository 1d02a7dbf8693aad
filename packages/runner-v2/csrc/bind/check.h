// What bound functions ask of the tensors they are given. Errors name the argument.
#pragma once

#include <initializer_list>
#include <stdexcept>
#include <string>

#include "abi/tensor_view.h"

namespace lamella::bind {

[[noreturn]] inline void refuse(const char* name, const std::string& why) {
  throw std::invalid_argument(std::string(name) + ": " + why);
}

inline std::string shape_text(const abi::TensorView& view) {
  std::string text = "[";
  for (int i = 0; i < view.num_dims; ++i) text += (i > 0 ? ", " : "") + std::to_string(view.shape[i]);
  return text + "]";
}

// A CPU tensor of this type and shape; -1 leaves a size open. The last dimension is contiguous.
inline const abi::TensorView& check(const abi::TensorView& view, const char* name, abi::DType dtype,
                                    std::initializer_list<int64_t> shape) {
  if (view.device_type != 1) refuse(name, "not on the CPU");
  if (view.dtype != dtype)
    refuse(name, std::string("is ") + abi::name_of(view.dtype) + ", needed " + abi::name_of(dtype));
  bool fits = view.num_dims == static_cast<int32_t>(shape.size());
  int i = 0;
  for (int64_t size : shape) {
    if (fits && size >= 0 && view.shape[i] != size) fits = false;
    ++i;
  }
  if (!fits) {
    std::string needed = "[";
    i = 0;
    for (int64_t size : shape) needed += (i++ > 0 ? ", " : "") + (size < 0 ? std::string("*") : std::to_string(size));
    refuse(name, "has shape " + shape_text(view) + ", needed " + needed + "]");
  }
  if (view.num_dims > 0 && view.shape[view.num_dims - 1] > 1 && view.strides[view.num_dims - 1] != 1)
    refuse(name, "the last dimension is not contiguous");
  return view;
}

inline const abi::TensorView& check_contiguous(const abi::TensorView& view, const char* name, abi::DType dtype,
                                               std::initializer_list<int64_t> shape) {
  check(view, name, dtype, shape);
  if (!view.contiguous()) refuse(name, "is not contiguous");
  return view;
}

}  // namespace lamella::bind
