// A place in a ring of buffers, and how often it has come round.
#pragma once

#include <cstdint>

namespace lamella {

// parity: of the barriers that are waited for on the first round; 1 passes at once where nobody has arrived yet.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity;

  __device__ explicit Ring(uint32_t parity) : parity(parity) {}
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace lamella
