#pragma once

#include "moe/gemm.cuh"

namespace lamella {

// Rows per block that the portable kernels take for an expected number of rows per expert.
int moe_portable_rows(int64_t rows_per_expert);

// One grouped product on any device from 8.0 on. elem: of x and w; out_elem: of out. max_blocks: bound of the blocks.
int moe_gemm_portable(const MoeGemm& g, bool first, int block_rows, int64_t max_blocks, int elem, int out_elem,
                      void* stream);

}  // namespace lamella
