// Which of the compiled kernel sets this processor runs.
#pragma once

#include "host/kernels.h"

namespace lamella::host {

// The best set, unless set_isa chose another.
const Kernels& kernels();

// Names of the sets that this processor can run, best first.
const char* const* available_isas(int& count);

// False if there is no such set here. Not while a region runs.
bool set_isa(const char* name);

}  // namespace lamella::host
