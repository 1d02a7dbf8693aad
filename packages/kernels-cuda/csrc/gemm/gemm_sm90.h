#pragma once

#include "gemm/gemm.h"

namespace lamella {

// The product on Hopper; arguments were checked.
int gemm_sm90(const LamellaGemm& gemm, void* workspace, int64_t workspace_bytes, void* stream);

}  // namespace lamella
