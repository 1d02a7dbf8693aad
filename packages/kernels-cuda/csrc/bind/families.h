// One function per family, each in its own file beside this one.
#pragma once

#include <pybind11/pybind11.h>

namespace lamella::bind {

void bind_activation(pybind11::module_& m);
void bind_attention(pybind11::module_& m);
void bind_batch(pybind11::module_& m);
void bind_cache(pybind11::module_& m);
void bind_copy(pybind11::module_& m);
void bind_gemm(pybind11::module_& m);
void bind_layer(pybind11::module_& m);
void bind_moe(pybind11::module_& m);
void bind_norm(pybind11::module_& m);
void bind_prefill(pybind11::module_& m);
void bind_sampling(pybind11::module_& m);

inline void bind_families(pybind11::module_& m) {
  bind_activation(m);
  bind_attention(m);
  bind_batch(m);
  bind_cache(m);
  bind_copy(m);
  bind_gemm(m);
  bind_layer(m);
  bind_moe(m);
  bind_norm(m);
  bind_prefill(m);
  bind_sampling(m);
}

}  // namespace lamella::bind
