// What bound functions ask of the tensors they are given. Errors name the argument.
#pragma once

#include <initializer_list>
#include <stdexcept>
#include <string>

#include "abi/tensor_view.h"
#include "device/status.h"

namespace lamella::bind {

[[noreturn]] inline void refuse(const std::string& name, const std::string& why) {
  throw std::invalid_argument(name + ": " + why);
}

inline void require(bool holds, const char* name, const std::string& why) {
  if (!holds) refuse(name, why);
}

inline std::string shape_text(const abi::TensorView& view) {
  std::string text = "[";
  for (int i = 0; i < view.num_dims; ++i) text += (i > 0 ? ", " : "") + std::to_string(view.shape[i]);
  return text + "]";
}

// A CUDA tensor of one of these types and of this shape; -1 leaves a size open. Any strides but that the last dimension
// is contiguous.
inline const abi::TensorView& check(const abi::TensorView& view, const char* name,
                                    std::initializer_list<abi::DType> dtypes, std::initializer_list<int64_t> shape) {
  if (view.device_type != 2) refuse(name, "not on a CUDA device");
  bool known = false;
  std::string needed;
  for (abi::DType dtype : dtypes) {
    known = known || view.dtype == dtype;
    needed += (needed.empty() ? "" : " or ") + std::string(abi::name_of(dtype));
  }
  if (!known) refuse(name, std::string("is ") + abi::name_of(view.dtype) + ", needed " + needed);
  bool fits = view.num_dims == static_cast<int32_t>(shape.size());
  int i = 0;
  for (int64_t size : shape) {
    if (fits && size >= 0 && view.shape[i] != size) fits = false;
    ++i;
  }
  if (!fits) {
    std::string text = "[";
    i = 0;
    for (int64_t size : shape) text += (i++ > 0 ? ", " : "") + (size < 0 ? std::string("*") : std::to_string(size));
    refuse(name, "has shape " + shape_text(view) + ", needed " + text + "]");
  }
  if (view.num_dims > 0 && view.shape[view.num_dims - 1] > 1 && view.strides[view.num_dims - 1] != 1)
    refuse(name, "the last dimension is not contiguous");
  return view;
}

// As check(), and no gaps between rows.
inline const abi::TensorView& check_contiguous(const abi::TensorView& view, const char* name,
                                               std::initializer_list<abi::DType> dtypes,
                                               std::initializer_list<int64_t> shape) {
  check(view, name, dtypes, shape);
  if (view.num_elements() > 0 && !view.contiguous()) refuse(name, "is not contiguous");
  return view;
}

// Every row starts at a multiple of 16 bytes, so that kernels may load 16 bytes at a time.
inline void check_aligned(const abi::TensorView& view, const char* name) {
  const int64_t size = static_cast<int64_t>(abi::size_of(view.dtype));
  bool aligned = reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
  for (int i = 0; i + 1 < view.num_dims; ++i)
    aligned = aligned && (view.shape[i] <= 1 || view.strides[i] * size % 16 == 0);
  if (!aligned) refuse(name, "rows do not start at multiples of 16 bytes");
}

inline void check_same_device(const abi::TensorView& a, const char* name, const abi::TensorView& b) {
  if (a.device_id != b.device_id)
    refuse(name, "is on device " + std::to_string(a.device_id) + ", the first argument on " +
                     std::to_string(b.device_id));
}

// What a launch returned -> an exception that says what to do.
inline void succeed(int status, const char* function) {
  if (status == kOk) return;
  throw std::runtime_error(std::string(function) + ": " + lamella_cuda_status_text(status));
}

}  // namespace lamella::bind
