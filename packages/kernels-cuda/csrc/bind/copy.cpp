#include "bind/families.h"

namespace lamella::bind {

void bind_copy(pybind11::module_& m) {}

}  // namespace lamella::bind
