// Compiled once for each instruction set, with that set's compiler flags and LAMELLA_KERNELS as the table's name.
#include "host/kernels.h"
#include "host/lanes/attention.h"
#include "host/lanes/matmul.h"
#include "host/lanes/rows.h"

namespace lamella::host {

namespace sampling {
extern const Lanes LAMELLA_KERNELS;
}

extern const Kernels LAMELLA_KERNELS;
const Kernels LAMELLA_KERNELS = {
    kIsaName,  kMaxBlock, multiply, widen, multiply_wide, quantise, quantise_twice, attend,  merge,   norm,
    add_rows,  add_scaled, put_tile, activate, softcap, rotate, to_half, softmax, &sampling::LAMELLA_KERNELS,
};

}  // namespace lamella::host
