// Lets bound functions take abi::TensorView: filled from anything that speaks DLPack, torch's tensors first of all.
// The view is valid during the call; who keeps a pointer keeps the tensor's Python object, too.
#pragma once

#include <pybind11/pybind11.h>

#include "abi/dlpack.h"

namespace lamella::bind {

// The exchange table of a tensor type, looked up once per type; null if it has none that we can read.
inline const abi::DlExchange* exchange_of(PyTypeObject* type) {
  static PyTypeObject* known_type = nullptr;
  static const abi::DlExchange* known = nullptr;
  if (type == known_type) return known;
  const abi::DlExchange* found = nullptr;
  PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (capsule == nullptr) {
    PyErr_Clear();
  } else {
    if (PyCapsule_IsValid(capsule, "dlpack_exchange_api") != 0) {
      found = static_cast<const abi::DlExchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
      if (found->version.major != 1 || found->view_from_object == nullptr) found = nullptr;
    }
    Py_DECREF(capsule);
  }
  if (known_type == nullptr) {
    Py_INCREF(type);
    known_type = type;
    known = found;
  }
  return found;
}

// Through the object's own __dlpack__(); its capsule is dropped after reading, the object keeps the memory.
inline bool view_by_protocol(pybind11::handle object, abi::TensorView& view) {
  pybind11::object capsule = pybind11::reinterpret_steal<pybind11::object>(
      PyObject_CallMethod(object.ptr(), "__dlpack__", nullptr));
  if (!capsule) throw pybind11::error_already_set();
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor") != 0)
    return abi::view_of(static_cast<abi::DlManaged*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"))->tensor, view);
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned") != 0)
    return abi::view_of(
        static_cast<abi::DlManagedVersioned*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"))->tensor, view);
  return false;
}

}  // namespace lamella::bind

namespace pybind11::detail {

template <>
struct type_caster<lamella::abi::TensorView> {
  PYBIND11_TYPE_CASTER(lamella::abi::TensorView, const_name("torch.Tensor"));

  bool load(handle source, bool) {
    if (!source || source.is_none()) return false;
    if (const lamella::abi::DlExchange* exchange = lamella::bind::exchange_of(Py_TYPE(source.ptr()))) {
      lamella::abi::DlTensor tensor;
      if (exchange->view_from_object(source.ptr(), &tensor) != 0) throw error_already_set();
      return lamella::abi::view_of(tensor, value);
    }
    if (!hasattr(source, "__dlpack__")) return false;
    return lamella::bind::view_by_protocol(source, value);
  }
};

}  // namespace pybind11::detail
