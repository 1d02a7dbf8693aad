// The device and stream that a call runs on: those of its first tensor, as torch sees them now.
#pragma once

#include <pybind11/pybind11.h>

#include "abi/dlpack.h"
#include "bind/check.h"
#include "bind/tensor_caster.h"

namespace lamella::bind {

inline void* current_stream(int device) {
  static const abi::DlExchange* exchange = [] {
    pybind11::object type = pybind11::module_::import("torch").attr("Tensor");
    const abi::DlExchange* found = exchange_of(reinterpret_cast<PyTypeObject*>(type.ptr()));
    return found != nullptr && found->current_stream != nullptr ? found : nullptr;
  }();
  void* stream = nullptr;
  if (exchange != nullptr && exchange->current_stream(2, device, &stream) == 0) return stream;
  static const pybind11::object* raw_stream = new pybind11::object(
      pybind11::module_::import("torch").attr("_C").attr("_cuda_getCurrentRawStream"));
  return reinterpret_cast<void*>((*raw_stream)(device).cast<uintptr_t>());
}

// Makes the tensor's device current while it lives.
class OnDevice {
 public:
  explicit OnDevice(const abi::TensorView& tensor) : stream(current_stream(tensor.device_id)) {
    const int before = lamella_cuda_swap_device(tensor.device_id);
    if (before < 0) succeed(-before, "cudaSetDevice");
    before_ = before;
    device_ = tensor.device_id;
  }
  ~OnDevice() {
    if (before_ != device_) lamella_cuda_swap_device(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  void* const stream;

 private:
  int before_ = 0;
  int device_ = 0;
};

// Codes of device/dtype.cuh.
inline int elem_of(abi::DType dtype) {
  switch (dtype) {
    case abi::DType::f32:
      return 0;
    case abi::DType::f16:
      return 1;
    case abi::DType::bf16:
      return 2;
    default:
      return 3;
  }
}

}  // namespace lamella::bind
