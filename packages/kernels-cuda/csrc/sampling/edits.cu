#include "sampling/edits.h"

#include "device/dtype.cuh"
#include "device/launch.cuh"

namespace lamella::sampling {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 8;  // tokens, 32 apart: a warp takes 256 neighbours

struct PenaltyParams {
  void* logits;
  int64_t stride;
  const int32_t* rows;
  const int32_t* counts;
  int64_t counts_stride;
  const int32_t* prompt;
  int64_t prompt_stride;
  const float* repetition;
  const float* frequency;
  const float* presence;
  int vocab_size;
};

template <class T>
__global__ void __launch_bounds__(kThreads) penalties_kernel(const PenaltyParams p, int blocks_per_row) {
  const unsigned row = blockIdx.x / blocks_per_row, part = blockIdx.x - row * blocks_per_row;
  wait_predecessor();
  launch_successor();
  const int64_t params = p.rows != nullptr ? p.rows[row] : static_cast<int64_t>(row);
  if (params < 0) return;
  const float repetition = p.repetition != nullptr ? p.repetition[params] : 1.f;
  const float frequency = p.frequency != nullptr ? p.frequency[params] : 0.f;
  const float presence = p.presence != nullptr ? p.presence[params] : 0.f;
  if (repetition == 1.f && frequency == 0.f && presence == 0.f) return;
  T* logits = static_cast<T*>(p.logits) + row * p.stride;
  const int32_t* counts = p.counts + params * p.counts_stride;
  const int32_t* prompt = p.prompt != nullptr ? p.prompt + params * p.prompt_stride : nullptr;
  const int warp_first = static_cast<int>(part) * (kThreads * kPerThread) + threadIdx.x / 32 * (32 * kPerThread);
  const int lane = threadIdx.x % 32;
  int32_t count[kPerThread], words[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int id = warp_first + i * 32 + lane;
    count[i] = id < p.vocab_size ? counts[id] : 0;
    words[i] = prompt != nullptr && id < p.vocab_size ? prompt[id / 32] : 0;
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int id = warp_first + i * 32 + lane;
    // ids of a warp begin at multiples of 32, so the lane is the bit
    if (id >= p.vocab_size || (count[i] <= 0 && (words[i] >> lane & 1) == 0)) continue;
    const float x = to_float(logits[id]);
    float y = x > 0.f ? __fdiv_rn(x, repetition) : __fmul_rn(x, repetition);
    y = __fsub_rn(y, __fmul_rn(frequency, static_cast<float>(count[i])));
    if (count[i] > 0) y = __fsub_rn(y, presence);
    logits[id] = from_float<T>(y);
  }
}

struct MaskParams {
  void* logits;
  int64_t stride;
  const int32_t* rows;
  const int32_t* words;
  int64_t words_stride;
  int vocab_size;
};

// A warp takes 32 words, one per lane, and goes through them together.
template <class T>
__global__ void __launch_bounds__(kThreads) bitmask_kernel(const MaskParams p, int blocks_per_row) {
  const unsigned mask = blockIdx.x / blocks_per_row, part = blockIdx.x - mask * blocks_per_row;
  wait_predecessor();
  launch_successor();
  const int64_t row = p.rows != nullptr ? p.rows[mask] : static_cast<int64_t>(mask);
  if (row < 0) return;
  T* logits = static_cast<T*>(p.logits) + row * p.stride;
  const int lane = threadIdx.x % 32, first_word = static_cast<int>(part) * kThreads + static_cast<int>(threadIdx.x) - lane;
  const int num_words = (p.vocab_size + 31) / 32;
  const int32_t mine = first_word + lane < num_words ? p.words[mask * p.words_stride + first_word + lane] : -1;
#pragma unroll 4
  for (int w = 0; w < 32; ++w) {
    const int32_t word = __shfl_sync(0xffffffffu, mine, w);
    const int id = (first_word + w) * 32 + lane;
    if ((word >> lane & 1) == 0 && id < p.vocab_size) logits[id] = from_float<T>(-INFINITY);
  }
}

template <class Params, class Kernel>
int launch_rows(Kernel kernel, const Params& p, int64_t num_rows, int64_t per_block, void* stream) {
  const int64_t per_row = (p.vocab_size + per_block - 1) / per_block;
  if (num_rows * per_row > INT32_MAX) return kUnsupported;
  const Launch how{dim3(static_cast<unsigned>(num_rows * per_row)), dim3(kThreads), 0, static_cast<cudaStream_t>(stream)};
  return launch(kernel, how, p, static_cast<int>(per_row));
}

}  // namespace
}  // namespace lamella::sampling

LAMELLA_API int lamella_apply_penalties(void* logits, int64_t stride, int64_t num_rows, int64_t vocab_size,
                                        const int32_t* rows, const int32_t* counts, int64_t counts_stride,
                                        const int32_t* prompt, int64_t prompt_stride, const float* repetition,
                                        const float* frequency, const float* presence, int elem, void* stream) {
  using namespace lamella;
  using namespace lamella::sampling;
  if (num_rows == 0 || vocab_size == 0) return kOk;
  if (vocab_size > INT32_MAX / 2) return kUnsupported;
  const PenaltyParams p{logits,        stride,     rows,      counts,   counts_stride, prompt,
                        prompt_stride, repetition, frequency, presence, static_cast<int>(vocab_size)};
  constexpr int kPerBlock = kThreads * kPerThread;
  if (static_cast<Elem>(elem) == Elem::f32) return launch_rows(penalties_kernel<float>, p, num_rows, kPerBlock, stream);
  if (static_cast<Elem>(elem) == Elem::bf16) return launch_rows(penalties_kernel<bf16>, p, num_rows, kPerBlock, stream);
  return kUnsupported;
}

LAMELLA_API int lamella_apply_bitmask(void* logits, int64_t stride, int64_t num_masks, int64_t vocab_size,
                                      const int32_t* rows, const int32_t* words, int64_t words_stride, int elem,
                                      void* stream) {
  using namespace lamella;
  using namespace lamella::sampling;
  if (num_masks == 0 || vocab_size == 0) return kOk;
  if (vocab_size > INT32_MAX / 2) return kUnsupported;
  const MaskParams p{logits, stride, rows, words, words_stride, static_cast<int>(vocab_size)};
  if (static_cast<Elem>(elem) == Elem::f32) return launch_rows(bitmask_kernel<float>, p, num_masks, kThreads * 32, stream);
  if (static_cast<Elem>(elem) == Elem::bf16) return launch_rows(bitmask_kernel<bf16>, p, num_masks, kThreads * 32, stream);
  return kUnsupported;
}
