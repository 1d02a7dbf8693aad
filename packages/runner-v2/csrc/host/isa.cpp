#include "host/isa.h"

#include <cstring>

namespace lamella::host {

extern const Kernels kernels_generic;
#if defined(LAMELLA_X86_LANES)
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512vnni;
#endif

namespace {

struct Sets {
  const Kernels* table[4];
  const char* names[4];
  int count = 0;
  const Kernels* chosen;

  Sets() {
#if defined(LAMELLA_X86_LANES)
    __builtin_cpu_init();
    // these also check that the operating system saves the registers
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx512 && __builtin_cpu_supports("avx512vnni")) put(kernels_avx512vnni);
    if (avx512) put(kernels_avx512);
    if (avx2) put(kernels_avx2);
#endif
    put(kernels_generic);
    chosen = table[0];
  }

  void put(const Kernels& kernels) {
    table[count] = &kernels;
    names[count++] = kernels.name;
  }
};

Sets& sets() {
  static Sets instance;
  return instance;
}

}  // namespace

const Kernels& kernels() { return *sets().chosen; }

const char* const* available_isas(int& count) {
  count = sets().count;
  return sets().names;
}

bool set_isa(const char* name) {
  Sets& all = sets();
  for (int i = 0; i < all.count; ++i)
    if (std::strcmp(all.names[i], name) == 0) {
      all.chosen = all.table[i];
      return true;
    }
  return false;
}

}  // namespace lamella::host
