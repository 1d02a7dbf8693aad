// The part of DLPack's binary interface (version 1.x) that is needed to read a tensor: struct layouts only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "abi/tensor_view.h"

namespace lamella::abi {

struct DlDevice {
  int32_t type;
  int32_t id;
};

struct DlType {
  uint8_t code;  // 0 int, 1 uint, 2 float, 4 bfloat, 6 bool
  uint8_t bits;
  uint16_t lanes;
};

struct DlTensor {
  void* data;
  DlDevice device;
  int32_t num_dims;
  DlType dtype;
  int64_t* shape;
  int64_t* strides;  // null: row-major
  uint64_t byte_offset;
};

struct DlManaged {
  DlTensor tensor;
  void* context;
  void (*deleter)(DlManaged*);
};

struct DlVersion {
  uint32_t major;
  uint32_t minor;
};

struct DlManagedVersioned {
  DlVersion version;
  void* context;
  void (*deleter)(DlManagedVersioned*);
  uint64_t flags;
  DlTensor tensor;
};

// Found on a tensor's type as the capsule `__dlpack_c_exchange_api__`. The last two may be null.
struct DlExchange {
  DlVersion version;
  DlExchange* previous;
  int (*allocate)(DlTensor*, DlManagedVersioned**, void*, void (*)(void*, const char*, const char*));
  int (*managed_from_object)(void* object, DlManagedVersioned** out);
  int (*managed_to_object)(DlManagedVersioned*, void** out);
  int (*view_from_object)(void* object, DlTensor* out);
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
};

inline DType dtype_of(DlType type) {
  if (type.lanes != 1) return DType::other;
  switch (type.code) {
    case 0:
      return type.bits == 8 ? DType::i8 : type.bits == 16 ? DType::i16 : type.bits == 32 ? DType::i32
             : type.bits == 64 ? DType::i64 : DType::other;
    case 1:
      return type.bits == 8 ? DType::u8 : DType::other;
    case 2:
      return type.bits == 16 ? DType::f16 : type.bits == 32 ? DType::f32 : type.bits == 64 ? DType::f64 : DType::other;
    case 4:
      return type.bits == 16 ? DType::bf16 : DType::other;
    case 6:
      return type.bits == 8 ? DType::boolean : DType::other;
    default:
      return DType::other;
  }
}

// False if the tensor has more dimensions than a view can hold.
inline bool view_of(const DlTensor& tensor, TensorView& view) {
  if (tensor.num_dims > kMaxDims) return false;
  view.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  view.num_dims = tensor.num_dims;
  view.dtype = dtype_of(tensor.dtype);
  view.device_type = tensor.device.type;
  view.device_id = tensor.device.id;
  int64_t expected = 1;
  for (int i = tensor.num_dims - 1; i >= 0; --i) {
    view.shape[i] = tensor.shape[i];
    view.strides[i] = tensor.strides != nullptr ? tensor.strides[i] : expected;
    expected *= tensor.shape[i];
  }
  return true;
}

}  // namespace lamella::abi
