// Who computes what in one step's paged decode: every layer of the step with the same shapes and window shares it.
#pragma once

#include <cstdint>

#include "device/status.h"

// schedule int32 [4 * (num_parts + 1) + batch * num_groups]: where each part starts {sequence, group, chunk, seq_len};
// behind the last one that has something to do {batch, m, 0, n}: n chunks per part, the first m parts one more; then
// one counter per (sequence, group), zero between kernels. A group is a kv head and up to 64 of its query rows; a chunk
// 64 keys, counted from the first that is visible. seq_lens int32 [batch], the new tokens included.
// window: a query sees at most that many keys, itself included; 0: all.
LAMELLA_API int lamella_decode_schedule(int32_t* schedule, const int32_t* seq_lens, int64_t batch, int64_t num_queries,
                                        int64_t num_groups, int64_t num_parts, int64_t window, void* stream);

// Parts that fill the current device; 0 without one.
LAMELLA_API int64_t lamella_decode_parts(void);
