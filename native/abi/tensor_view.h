// A tensor as native code sees it: where it lies and how it is laid out, never whose it is.
#pragma once

#include <cstdint>

#include "abi/dtype.h"

namespace lamella::abi {

constexpr int kMaxDims = 8;

struct TensorView {
  void* data = nullptr;
  int64_t shape[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};  // in elements
  int32_t num_dims = 0;
  DType dtype = DType::other;
  int32_t device_type = 1;  // DLPack's numbering: 1 CPU, 2 CUDA, 10 ROCm
  int32_t device_id = 0;

  int64_t num_elements() const {
    int64_t count = 1;
    for (int i = 0; i < num_dims; ++i) count *= shape[i];
    return count;
  }
  bool contiguous() const {
    int64_t expected = 1;
    for (int i = num_dims - 1; i >= 0; --i) {
      if (shape[i] != 1 && strides[i] != expected) return false;
      expected *= shape[i];
    }
    return true;
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

}  // namespace lamella::abi
