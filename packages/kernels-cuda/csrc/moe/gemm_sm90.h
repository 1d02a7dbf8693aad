#pragma once

#include "moe/gemm.cuh"

namespace lamella {

// Rows per block of the kernels of wide_sm90.cuh.
constexpr int kMoeWideRows = 320;

// Rows per block that the Hopper kernels take for an expected number of rows per expert.
int moe_sm90_rows(int64_t num_tokens, int64_t rows_per_expert, bool fp8);

// Bytes of sums that blocks of one launch leave to each other.
int64_t moe_sm90_partials(int block_rows);

// One grouped product on Hopper; sets g's tiles. places: rows of h. In moe_gemm_*_sm90.cu, by the weights' type.
int moe_gemm_sm90_bf16(const MoeGemm& g, bool first, int block_rows, int64_t places, void* stream);
int moe_gemm_sm90_f16(const MoeGemm& g, bool first, int block_rows, int64_t places, void* stream);
int moe_gemm_sm90_f8(const MoeGemm& g, bool first, int block_rows, int64_t places, int out_elem, void* stream);

// The same with blocks of kMoeWideRows. In moe_wide_*_sm90.cu.
int moe_wide_sm90_bf16(const MoeGemm& g, bool first, int64_t places, void* stream);
int moe_wide_sm90_f16(const MoeGemm& g, bool first, int64_t places, void* stream);

}  // namespace lamella
