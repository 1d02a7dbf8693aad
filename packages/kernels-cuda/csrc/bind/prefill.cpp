#include "bind/families.h"

namespace lamella::bind {

void bind_prefill(pybind11::module_& m) {}

}  // namespace lamella::bind
