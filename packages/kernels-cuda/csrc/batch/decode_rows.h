// The borders of a decode step, in which every sequence computes one token: what the step reads is derived from the
// state of rows that lives on the device, and afterwards that state moves on.
#pragma once

#include <cstdint>

#include "device/status.h"

enum { kMaxTableGroups = 4 };

// All strides in elements; 1-d tensors are contiguous.
struct LamellaPrepareDecode {
  const int32_t* rows;          // [batch]
  const int32_t* token_ids;     // [num_rows, width]
  const int32_t* computed_len;  // [num_rows]
  int32_t* ids;                 // [batch]
  int32_t* positions;           // [batch]
  int32_t* seq_lens;            // [batch]
  const int32_t* tables[kMaxTableGroups];  // [num_rows, max_blocks]
  int64_t* slots[kMaxTableGroups];         // [batch]
  int32_t* block_tables[kMaxTableGroups];  // [batch, max_blocks]
  int64_t max_blocks[kMaxTableGroups], table_strides[kMaxTableGroups], block_table_strides[kMaxTableGroups];
  int64_t batch, num_rows, width, token_stride, block_size, spare_row;
  int32_t num_groups;  // 1 to kMaxTableGroups
};

// For each i, row = rows[i], position = computed_len[row]:
//
//   ids[i] = max(token_ids[row, position], 0)    positions[i] = position    seq_lens[i] = position + 1
//   slots[g][i] = table[row, position / block_size] * block_size + position % block_size
//   block_tables[g][i, :n] = table[row, :n], n = ceil(seq_len / block_size); the rest is left alone
//
// The slot is -1 where that block is 0 (the null block), and for the spare row. A row outside the tables gives length
// 0, id 0 and slot -1; an id beyond width is 0.
LAMELLA_API int lamella_prepare_decode(const LamellaPrepareDecode* what, void* stream);

// For each i, row = rows[i]: computed_len[row] += 1 and token_ids[row, the new computed_len] = next_ids[i], if that is
// less than width. Nothing is written for the spare row, which may occur many times; others occur once.
LAMELLA_API int lamella_advance_decode(const int32_t* rows, int32_t* computed_len, int32_t* token_ids,
                                       const int32_t* next_ids, int64_t batch, int64_t num_rows, int64_t width,
                                       int64_t token_stride, int64_t spare_row, void* stream);
