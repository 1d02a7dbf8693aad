// Adds the host kernels to the module.
#pragma once

#include <pybind11/pybind11.h>

namespace lamella::bind {

void bind_host(pybind11::module_& m);

}  // namespace lamella::bind
