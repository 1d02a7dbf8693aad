#include "bind/families.h"

namespace lamella::bind {

void bind_sampling(pybind11::module_& m) {}

}  // namespace lamella::bind
