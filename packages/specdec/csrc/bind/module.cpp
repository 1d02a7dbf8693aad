#include <pybind11/pybind11.h>

PYBIND11_MODULE(_C, m) { m.attr("build_id") = LAMELLA_BUILD_ID; }
