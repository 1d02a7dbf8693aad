// Element types as they cross the border between Python and native code.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lamella::abi {

enum class DType : uint8_t { f32, f16, bf16, f64, i8, i16, i32, i64, u8, boolean, other };

inline size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f16:
    case DType::bf16:
    case DType::i16:
      return 2;
    case DType::i8:
    case DType::u8:
    case DType::boolean:
      return 1;
    case DType::other:
      break;
  }
  return 0;
}

inline const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "float32";
    case DType::f16:
      return "float16";
    case DType::bf16:
      return "bfloat16";
    case DType::f64:
      return "float64";
    case DType::i8:
      return "int8";
    case DType::i16:
      return "int16";
    case DType::i32:
      return "int32";
    case DType::i64:
      return "int64";
    case DType::u8:
      return "uint8";
    case DType::boolean:
      return "bool";
    case DType::other:
      break;
  }
  return "an unsupported type";
}

}  // namespace lamella::abi
