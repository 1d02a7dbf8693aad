#include "bind/families.h"

namespace lamella::bind {

void bind_activation(pybind11::module_& m) {}

}  // namespace lamella::bind
