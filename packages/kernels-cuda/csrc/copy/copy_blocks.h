// Many copies at once between device and pinned host memory, or within the device, by one kernel: for blocks that are too
// small for one copy call each. All addresses must be valid on the device (unified addressing makes pinned host memory
// so). Sources and targets of one call must not overlap.
#pragma once

#include <cstdint>

#include "device/status.h"

// Copy i: sizes[i] (null: bytes) bytes from sources[i] to targets[i]; an address of 0 skips it. No size exceeds bytes.
// max_blocks: so many thread blocks at most, each of 256 threads, so that other kernels keep the rest of the device.
LAMELLA_API int lamella_copy_blocks(const int64_t* sources, const int64_t* targets, const int64_t* sizes,
                                    int64_t num_copies, int64_t bytes, int max_blocks, void* stream);

// Copy i: bytes bytes from source + pairs[2 i] * source_stride to target + pairs[2 i + 1] * target_stride, strides in
// bytes; a negative number in a pair skips it.
LAMELLA_API int lamella_copy_pairs(const void* source, void* target, const int64_t* pairs, int64_t num_copies,
                                   int64_t bytes, int64_t source_stride, int64_t target_stride, int max_blocks,
                                   void* stream);
