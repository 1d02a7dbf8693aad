#include "sampling/sample.h"

#include "sampling/sample.cuh"

namespace lamella::sampling {
namespace {

constexpr int64_t kMaxVocab = 262'144;

struct Space {
  float* maxima;
  float2* sums;
};

// Sizes are those of the type with the most tiles, so that one workspace serves all.
Space space_of(void* workspace, int64_t num_rows, int64_t vocab_size) {
  float* maxima = static_cast<float*>(workspace);
  return {maxima, reinterpret_cast<float2*>(maxima + num_rows * num_tiles(static_cast<int>(vocab_size), 2) * 32)};
}

template <class T>
int launch_scan(const void* logits, int64_t stride, int64_t num_rows, int vocab_size, const Space& space, bool sums,
                cudaStream_t stream) {
  const int tiles = num_tiles(vocab_size, sizeof(T)), per_row = (tiles + kScanWarps - 1) / kScanWarps;
  if (per_row * num_rows > INT32_MAX) return kUnsupported;
  const ScanParams p{logits, stride, vocab_size, tiles, space.maxima, sums ? space.sums : nullptr};
  const Launch how{dim3(static_cast<unsigned>(per_row * num_rows)), dim3(kScanWarps * 32), 0, stream};
  return launch(scan_kernel<T>, how, p, per_row);
}

// Blocks per row, so that a few rows keep the device busy.
unsigned team_size(int64_t num_rows) {
  const DeviceFacts& facts = device_facts();
  if (facts.capability < 90) return 1;
  unsigned size = 8;
  while (size > 1 && size * num_rows > facts.num_sms) size /= 2;
  return size;
}

template <class T>
int sample(const LamellaSample& what, cudaStream_t stream) {
  const int vocab_size = static_cast<int>(what.vocab_size);
  const Space space = space_of(what.workspace, what.num_rows, vocab_size);
  const int status =
      launch_scan<T>(what.logits, what.stride, what.num_rows, vocab_size, space, what.logprobs != nullptr, stream);
  if (status != kOk) return status;
  const SampleParams p{what, space.maxima, space.sums, num_tiles(vocab_size, sizeof(T))};
  Launch how{dim3(1), dim3(kThreads), sizeof(Shared), stream};
  how.cluster = team_size(what.num_rows);
  if (how.cluster * what.num_rows > INT32_MAX) return kUnsupported;
  how.grid = dim3(static_cast<unsigned>(how.cluster * what.num_rows));
  return launch(sample_kernel<T>, how, p);
}

template <class T>
int top_logprobs(const LamellaTopLogprobs& what, cudaStream_t stream) {
  const int vocab_size = static_cast<int>(what.vocab_size);
  const Space space = space_of(what.workspace, what.num_rows, vocab_size);
  const int status = launch_scan<T>(what.logits, what.stride, what.num_rows, vocab_size, space, true, stream);
  if (status != kOk) return status;
  const TopParams p{what, space.maxima, space.sums, num_tiles(vocab_size, sizeof(T))};
  const Launch how{dim3(static_cast<unsigned>(what.num_rows)), dim3(kThreads), sizeof(Shared), stream};
  return launch(top_logprobs_kernel<T>, how, p);
}

}  // namespace
}  // namespace lamella::sampling

LAMELLA_API int64_t lamella_sampling_workspace_bytes(int64_t num_rows, int64_t vocab_size) {
  const int64_t tiles = lamella::sampling::num_tiles(static_cast<int>(vocab_size), 2);
  return num_rows * tiles * (32 * 4 + 8);
}

LAMELLA_API int lamella_sample(const LamellaSample* what, void* stream) {
  using namespace lamella;
  if (what->num_rows == 0) return kOk;
  if (what->vocab_size < 1 || what->vocab_size > sampling::kMaxVocab) return kUnsupported;
  const auto s = static_cast<cudaStream_t>(stream);
  if (static_cast<Elem>(what->elem) == Elem::f32) return sampling::sample<float>(*what, s);
  if (static_cast<Elem>(what->elem) == Elem::bf16) return sampling::sample<bf16>(*what, s);
  return kUnsupported;
}

LAMELLA_API int lamella_top_logprobs(const LamellaTopLogprobs* what, void* stream) {
  using namespace lamella;
  if (what->num_rows == 0) return kOk;
  if (what->vocab_size < 1 || what->vocab_size > sampling::kMaxVocab || what->num_best > 1024 ||
      what->num_best > what->vocab_size || what->num_rows > INT32_MAX)
    return kUnsupported;
  const auto s = static_cast<cudaStream_t>(stream);
  if (static_cast<Elem>(what->elem) == Elem::f32) return sampling::top_logprobs<float>(*what, s);
  if (static_cast<Elem>(what->elem) == Elem::bf16) return sampling::top_logprobs<bf16>(*what, s);
  return kUnsupported;
}
