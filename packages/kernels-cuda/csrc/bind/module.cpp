#include <pybind11/pybind11.h>

#include "bind/families.h"
#include "device/status.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
  m.attr("build_id") = LAMELLA_BUILD_ID;
  m.attr("archs") = LAMELLA_CUDA_ARCHS;
  m.def("device_count", &lamella_cuda_device_count);
  m.def("capability", &lamella_cuda_capability, py::arg("device"));
  lamella::bind::bind_families(m);
}
