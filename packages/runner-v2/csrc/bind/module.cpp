#include <pybind11/pybind11.h>

#include "bind/host.h"
#include "host/pool.h"

namespace py = pybind11;

void bind_sampling(py::module_& m);

PYBIND11_MODULE(_C, m) {
  m.attr("build_id") = LAMELLA_BUILD_ID;
  m.def(
      "set_num_threads", [](int count) { lamella::host::Pool::get().resize(count); },
      py::arg("count"), py::call_guard<py::gil_scoped_release>());
  m.def("num_threads", [] { return lamella::host::Pool::get().size(); });
  lamella::bind::bind_host(m);
  bind_sampling(m);
}
