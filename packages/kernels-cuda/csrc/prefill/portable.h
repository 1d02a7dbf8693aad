// The portable kernel by types, one file each, so that they compile side by side.
#pragma once

#include "prefill/work.cuh"

namespace lamella::prefill {

constexpr int kPortableRows = 64;

int portable_bf16(const PrefillParams& p, int64_t head_dim, int64_t num_tiles, void* stream);
int portable_f16(const PrefillParams& p, int64_t head_dim, int64_t num_tiles, void* stream);
int portable_bf16_f8(const PrefillParams& p, int64_t head_dim, int64_t num_tiles, void* stream);
int portable_f16_f8(const PrefillParams& p, int64_t head_dim, int64_t num_tiles, void* stream);

}  // namespace lamella::prefill
