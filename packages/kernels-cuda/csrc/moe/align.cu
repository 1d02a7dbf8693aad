#include "moe/align.h"

#include "moe/align.cuh"

LAMELLA_API int64_t lamella_moe_max_blocks(int64_t num_ids, int64_t num_experts, int64_t block_rows) {
  return num_ids / block_rows + (num_ids < num_experts ? num_ids : num_experts);
}

LAMELLA_API int lamella_moe_align(int32_t* sorted_ids, int32_t* block_experts, int32_t* block_sizes, int32_t* num_rows,
                                  const int32_t* ids, const int32_t* expert_map, int64_t num_ids, int64_t map_size,
                                  int64_t num_experts, int64_t block_rows, int fill, int even,
                                  void* stream) {
  using namespace lamella;
  if (num_experts < 1 || num_experts > 1024 || block_rows < 1 || num_ids < 0) return kUnsupported;
  const int64_t max_blocks = lamella_moe_max_blocks(num_ids, num_experts, block_rows);
  if (max_blocks * block_rows > INT32_MAX) return kUnsupported;
  const AlignParams p{sorted_ids, block_experts, block_sizes, num_rows,   ids,
                      expert_map, num_ids,       map_size,    max_blocks, static_cast<int>(num_experts),
                      static_cast<int>(block_rows), fill != 0, even != 0};
  const auto go = [&](auto kernel, int warps) {
    // the table of 1,024 experts must fit where a block has 99 KB
    const Launch how{dim3(1), dim3(warps * 32), warps * num_experts * sizeof(int), static_cast<cudaStream_t>(stream)};
    return launch(kernel, how, p);
  };
  return num_experts <= 512 ? go(moe_align_kernel<32>, 32) : go(moe_align_kernel<16>, 16);
}
