// Sorts the (token, expert) pairs by expert, in blocks of rows that belong to one expert.
#pragma once

#include <cstdint>

#include "device/status.h"

// Most blocks that num_ids pairs over num_experts experts can fill.
LAMELLA_API int64_t lamella_moe_max_blocks(int64_t num_ids, int64_t num_experts, int64_t block_rows);

// ids: [num_ids], flat [token, choice]. The expert of pair i is expert_map[ids[i]], or ids[i] without a map; what is
// outside [0, num_experts) is left out (-1: skip).
//   sorted_ids [max_blocks * block_rows]   flat pairs, grouped by expert, in their order, those of a block at its start;
//                                          num_ids behind the last block if fill
//   block_experts [max_blocks]             expert of each block; -1 behind the last if fill
//   block_sizes [max_blocks] or null       pairs of each block; null: the rest of a block is num_ids, else anything
//   num_rows [1]                           rows of all the blocks
// even: an expert's blocks, no more than it needs, get equally many pairs (the last may have fewer); else all but the
// last are full. One launch of one thread block; the order does not depend on timing. num_experts <= 1024.
LAMELLA_API int lamella_moe_align(int32_t* sorted_ids, int32_t* block_experts, int32_t* block_sizes, int32_t* num_rows,
                                  const int32_t* ids, const int32_t* expert_map, int64_t num_ids, int64_t map_size,
                                  int64_t num_experts, int64_t block_rows, int fill, int even,
                                  void* stream);
