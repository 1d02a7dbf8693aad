// Hopper's kernel; compiled for that device only.
#pragma once

#include "prefill/paged_prefill.h"
#include "prefill/work.cuh"

namespace lamella::prefill {

// Whether it serves this call.
bool serves_sm90(const LamellaPagedPrefill& what);

// p without pack, tile_tokens and head_groups, which are this kernel's own.
int prefill_sm90(const LamellaPagedPrefill& what, PrefillParams p, void* stream);

}  // namespace lamella::prefill
