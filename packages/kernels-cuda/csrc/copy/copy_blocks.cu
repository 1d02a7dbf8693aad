#include "copy/copy_blocks.h"

#include <algorithm>

#include "copy/copy_blocks.cuh"

namespace lamella {
namespace {

template <class Copies>
int launch_copies(const Copies& copies, int64_t num_copies, int64_t bytes, int max_blocks, void* stream) {
  if (num_copies <= 0 || bytes <= 0) return kOk;
  if (max_blocks <= 0) return kUnsupported;
  const int64_t pieces = (bytes + kCopyPiece - 1) / kCopyPiece;
  const int64_t blocks = std::min<int64_t>(max_blocks, num_copies * pieces);
  const Launch how{dim3(static_cast<unsigned>(blocks)), dim3(kCopyThreads), 0, static_cast<cudaStream_t>(stream)};
  return launch(copy_kernel<Copies>, how, copies, num_copies, pieces);
}

}  // namespace
}  // namespace lamella

LAMELLA_API int lamella_copy_blocks(const int64_t* sources, const int64_t* targets, const int64_t* sizes,
                                    int64_t num_copies, int64_t bytes, int max_blocks, void* stream) {
  const lamella::CopyList list{sources, targets, sizes, bytes};
  return lamella::launch_copies(list, num_copies, bytes, max_blocks, stream);
}

LAMELLA_API int lamella_copy_pairs(const void* source, void* target, const int64_t* pairs, int64_t num_copies,
                                   int64_t bytes, int64_t source_stride, int64_t target_stride, int max_blocks,
                                   void* stream) {
  const lamella::CopyPairs list{static_cast<const char*>(source),
                                static_cast<char*>(target),
                                reinterpret_cast<const longlong2*>(pairs),
                                bytes,
                                source_stride,
                                target_stride};
  return lamella::launch_copies(list, num_copies, bytes, max_blocks, stream);
}
