#include "batch/decode_rows.h"

#include <algorithm>

#include "batch/decode_rows.cuh"

LAMELLA_API int lamella_prepare_decode(const LamellaPrepareDecode* what, void* stream) {
  using namespace lamella;
  const LamellaPrepareDecode& w = *what;
  if (w.num_groups < 1 || w.num_groups > kMaxTableGroups || w.block_size < 1 || w.block_size > INT32_MAX ||
      w.batch > INT32_MAX)
    return kUnsupported;
  const int64_t widest = *std::max_element(w.max_blocks, w.max_blocks + w.num_groups);
  const int64_t chunks = std::max<int64_t>((widest + kPrepareEntries - 1) / kPrepareEntries, 1);
  if (chunks > 65535) return kUnsupported;
  const Launch how{dim3(static_cast<unsigned>(w.batch), static_cast<unsigned>(w.num_groups),
                        static_cast<unsigned>(chunks)),
                   dim3(kPrepareThreads), 0, static_cast<cudaStream_t>(stream)};
  return launch(prepare_decode_kernel, how, w);
}

LAMELLA_API int lamella_advance_decode(const int32_t* rows, int32_t* computed_len, int32_t* token_ids,
                                       const int32_t* next_ids, int64_t batch, int64_t num_rows, int64_t width,
                                       int64_t token_stride, int64_t spare_row, void* stream) {
  using namespace lamella;
  const int64_t blocks = (batch + kAdvanceThreads - 1) / kAdvanceThreads;
  if (blocks > INT32_MAX) return kUnsupported;
  const Launch how{dim3(static_cast<unsigned>(blocks)), dim3(kAdvanceThreads), 0, static_cast<cudaStream_t>(stream)};
  return launch(advance_decode_kernel, how, rows, computed_len, token_ids, next_ids, batch, num_rows, width,
                token_stride, spare_row);
}
