#include "norm/rms_norm.h"

#include "norm/rms_norm.cuh"

namespace lamella {
namespace {

template <class T, bool kFp8>
int launch_norm(const NormParams& p, int64_t num_rows, void* stream) {
  constexpr int kSize = Vec<T>::kSize;
  if (num_rows == 0 || p.width == 0) return kOk;
  if (p.width % kSize != 0 || num_rows > INT32_MAX) return kUnsupported;
  const int64_t num_vecs = p.width / kSize;
  const Launch base{dim3(static_cast<unsigned>(num_rows)), dim3(0), 0, static_cast<cudaStream_t>(stream)};
  const auto go = [&](auto threads, auto vecs) {
    Launch how = base;
    how.block = dim3(threads.value);
    return launch(rms_norm_kernel<T, threads.value, vecs.value, kFp8>, how, p);
  };
  using std::integral_constant;
  // narrow rows (heads) take a warp; a wide one as few vectors per thread as 1,024 threads allow
  if (num_vecs <= 32) return go(integral_constant<int, 32>{}, integral_constant<int, 1>{});
  if (num_vecs <= 128) return go(integral_constant<int, 128>{}, integral_constant<int, 1>{});
  if (num_vecs <= 256) return go(integral_constant<int, 256>{}, integral_constant<int, 1>{});
  if (num_vecs <= 512) return go(integral_constant<int, 512>{}, integral_constant<int, 1>{});
  if (num_vecs <= 1024) return go(integral_constant<int, 512>{}, integral_constant<int, 2>{});
  if (num_vecs <= 2048) return go(integral_constant<int, 1024>{}, integral_constant<int, 2>{});
  if (num_vecs <= 4096) return go(integral_constant<int, 1024>{}, integral_constant<int, 4>{});
  return kUnsupported;
}

template <bool kFp8>
int by_elem(const NormParams& p, int64_t num_rows, int elem, void* stream) {
  switch (static_cast<Elem>(elem)) {
    case Elem::f32:
      return launch_norm<float, kFp8>(p, num_rows, stream);
    case Elem::f16:
      return launch_norm<f16, kFp8>(p, num_rows, stream);
    case Elem::bf16:
      return launch_norm<bf16, kFp8>(p, num_rows, stream);
    default:
      return kUnsupported;
  }
}

}  // namespace
}  // namespace lamella

LAMELLA_API int lamella_rms_norm(void* out, const void* x, void* residual, const void* weight, int64_t num_rows,
                                 int64_t width, int64_t out_stride, int64_t x_stride, int64_t residual_stride,
                                 float eps, int plus_one, int elem, void* stream) {
  const lamella::NormParams p{out,        nullptr,  x,               residual, weight,       width,
                              out_stride, x_stride, residual_stride, eps,      plus_one != 0};
  return lamella::by_elem<false>(p, num_rows, elem, stream);
}

LAMELLA_API int lamella_rms_norm_fp8(void* out, float* scale, const void* x, void* residual, const void* weight,
                                     int64_t num_rows, int64_t width, int64_t out_stride, int64_t x_stride,
                                     int64_t residual_stride, float eps, int plus_one, int elem, void* stream) {
  const lamella::NormParams p{out,        scale,    x,               residual, weight,       width,
                              out_stride, x_stride, residual_stride, eps,      plus_one != 0};
  return lamella::by_elem<true>(p, num_rows, elem, stream);
}
