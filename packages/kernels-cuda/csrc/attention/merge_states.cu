// One warp per row.
#include "attention/merge_states.h"

#include "device/dtype.cuh"
#include "device/launch.cuh"

namespace lamella {
namespace {

constexpr int kWarps = 4;

struct MergeParams {
  void* out;
  float* lse;
  const void* first;
  const float* first_lse;
  const void* rest;
  const float* rest_lse;
  int64_t num_states, state_stride, lse_state_stride, num_rows, width, out_stride, first_stride, rest_stride;
};

template <class T>
__global__ void __launch_bounds__(kWarps * 32) merge_states_kernel(const __grid_constant__ MergeParams p) {
  constexpr int kSize = Vec<T>::kSize;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  wait_predecessor();
  launch_successor();
  if (row >= p.num_rows) return;
  const auto lse_of = [&](int64_t s) {
    const float lse = s == 0 ? p.first_lse[row] : p.rest_lse[(s - 1) * p.lse_state_stride + row];
    return lse == INFINITY ? -INFINITY : lse;
  };
  float most = -INFINITY;
  for (int64_t s = 0; s < p.num_states; ++s) most = fmaxf(most, lse_of(s));
  float sum = 0.f;
  if (most != -INFINITY)
    for (int64_t s = 0; s < p.num_states; ++s) sum += expf(lse_of(s) - most);
  if (p.lse != nullptr && lane == 0) p.lse[row] = most == -INFINITY ? -INFINITY : most + logf(sum);
  const float inverse = most == -INFINITY ? 0.f : 1.f / sum;
  T* out = static_cast<T*>(p.out) + row * p.out_stride;
  for (int64_t at = lane * kSize; at < p.width; at += 32 * kSize) {
    float total[kSize] = {};
    for (int64_t s = 0; s < p.num_states; ++s) {
      const float lse = lse_of(s);
      if (lse == -INFINITY) continue;
      const float weight = expf(lse - most) * inverse;
      const T* from = s == 0 ? static_cast<const T*>(p.first) + row * p.first_stride
                             : static_cast<const T*>(p.rest) + (s - 1) * p.state_stride + row * p.rest_stride;
      const Vec<T> part = load_vec(from + at);
#pragma unroll
      for (int j = 0; j < kSize; ++j) total[j] += weight * to_float(part.at[j]);
    }
    Vec<T> result;
#pragma unroll
    for (int j = 0; j < kSize; ++j) result.at[j] = from_float<T>(total[j]);
    store_vec(out + at, result);
  }
}

template <class T>
int launch_merge(const MergeParams& p, void* stream) {
  if (p.num_rows == 0 || p.width == 0) return kOk;
  const int64_t blocks = (p.num_rows + kWarps - 1) / kWarps;
  if (p.width % Vec<T>::kSize != 0 || blocks > INT32_MAX || p.num_states < 1) return kUnsupported;
  const Launch how{dim3(static_cast<unsigned>(blocks)), dim3(kWarps * 32), 0, static_cast<cudaStream_t>(stream)};
  return launch(merge_states_kernel<T>, how, p);
}

}  // namespace
}  // namespace lamella

LAMELLA_API int lamella_merge_states(void* out, float* lse, const void* first, const float* first_lse, const void* rest,
                                     const float* rest_lse, int64_t num_states, int64_t state_stride,
                                     int64_t lse_state_stride, int64_t num_rows, int64_t width, int64_t out_stride,
                                     int64_t first_stride, int64_t rest_stride, int elem, void* stream) {
  using namespace lamella;
  const MergeParams p{out,        lse,          first,            first_lse, rest,  rest_lse,   num_states,
                      state_stride, lse_state_stride, num_rows,  width, out_stride, first_stride, rest_stride};
  switch (static_cast<Elem>(elem)) {
    case Elem::f32:
      return launch_merge<float>(p, stream);
    case Elem::f16:
      return launch_merge<f16>(p, stream);
    case Elem::bf16:
      return launch_merge<bf16>(p, stream);
    default:
      return kUnsupported;
  }
}
