#include "activation/gated.h"

#include "activation/gated.cuh"

namespace lamella {
namespace {

template <int kAct, class T>
int launch_gated(const ActParams& p, int64_t num_rows, cudaStream_t stream) {
  constexpr int kSize = Vec<T>::kSize;
  if (num_rows == 0 || p.width == 0) return kOk;
  if (p.width % kSize != 0 || p.width > INT32_MAX) return kUnsupported;
  const int64_t num_vecs = p.width / kSize;
  const auto go = [&](auto vecs, auto streams) {
    const int64_t per_row = (num_vecs + vecs.value * kGatedThreads - 1) / (vecs.value * kGatedThreads);
    if (per_row * num_rows > INT32_MAX) return static_cast<int>(kUnsupported);
    const Launch how{dim3(static_cast<unsigned>(per_row * num_rows)), dim3(kGatedThreads), 0, stream};
    return launch(gated_kernel<kAct, T, vecs.value, streams.value>, how, p, static_cast<int>(per_row));
  };
  using std::bool_constant;
  using std::integral_constant;
  const int64_t bytes = num_rows * p.width * 2 * static_cast<int64_t>(sizeof(T));
  if (bytes > int64_t{32} << 20) return go(integral_constant<int, 2>{}, bool_constant<true>{});
  return go(integral_constant<int, 1>{}, bool_constant<false>{});
}

template <class T>
int gated_by_act(const ActParams& p, int64_t num_rows, int act, cudaStream_t stream) {
  switch (act) {
    case kActSilu:
      return launch_gated<kActSilu, T>(p, num_rows, stream);
    case kActGelu:
      return launch_gated<kActGelu, T>(p, num_rows, stream);
    case kActGeluTanh:
      return launch_gated<kActGeluTanh, T>(p, num_rows, stream);
    default:
      return kUnsupported;
  }
}

template <int kAct, class T>
int launch_token(const ActParams& p, int64_t num_rows, cudaStream_t stream) {
  if (num_rows == 0 || p.width == 0) return kOk;
  if (p.width % 8 != 0 || num_rows > INT32_MAX) return kUnsupported;
  const int64_t num_vecs = p.width / 8;
  const auto go = [&](auto threads, auto vecs) {
    const Launch how{dim3(static_cast<unsigned>(num_rows)), dim3(threads.value), 0, stream};
    return launch(act_fp8_token_kernel<kAct, T, threads.value, vecs.value>, how, p);
  };
  using std::integral_constant;
  if (num_vecs <= 128) return go(integral_constant<int, 128>{}, integral_constant<int, 1>{});
  if (num_vecs <= 256) return go(integral_constant<int, 256>{}, integral_constant<int, 1>{});
  if (num_vecs <= 512) return go(integral_constant<int, 256>{}, integral_constant<int, 2>{});
  if (num_vecs <= 1024) return go(integral_constant<int, 512>{}, integral_constant<int, 2>{});
  if (num_vecs <= 2048) return go(integral_constant<int, 1024>{}, integral_constant<int, 2>{});
  if (num_vecs <= 4096) return go(integral_constant<int, 1024>{}, integral_constant<int, 4>{});
  return kUnsupported;
}

template <int kAct, class T>
int launch_group(const ActParams& p, int64_t num_rows, cudaStream_t stream) {
  if (num_rows == 0 || p.width == 0) return kOk;
  if (p.width % 128 != 0 || p.width > INT32_MAX) return kUnsupported;
  const int64_t per_row = (p.width / 8 + kGatedThreads - 1) / kGatedThreads;
  if (per_row * num_rows > INT32_MAX) return kUnsupported;
  const Launch how{dim3(static_cast<unsigned>(per_row * num_rows)), dim3(kGatedThreads), 0, stream};
  return launch(act_fp8_group_kernel<kAct, T>, how, p, static_cast<int>(per_row));
}

// Offsets within a row stay within 32 bits.
bool known_layout(int layout, int64_t width) {
  return width <= INT32_MAX / 2 && (layout == kHalves || (layout == kTile64 && width % layout == 0));
}

// launch(act, T) for what the quantisers take.
template <class Go>
int by_act_and_elem(int act, int elem, Go&& go) {
  using std::integral_constant;
  const bool wide = static_cast<Elem>(elem) == Elem::bf16;
  if (!wide && static_cast<Elem>(elem) != Elem::f16) return kUnsupported;
  if (act == kActNone)
    return wide ? go(integral_constant<int, kActNone>{}, bf16{}) : go(integral_constant<int, kActNone>{}, f16{});
  if (act == kActSilu)
    return wide ? go(integral_constant<int, kActSilu>{}, bf16{}) : go(integral_constant<int, kActSilu>{}, f16{});
  return kUnsupported;
}

}  // namespace
}  // namespace lamella

LAMELLA_API int lamella_gated(void* out, const void* x, int64_t num_rows, int64_t width, int64_t out_stride,
                              int64_t x_stride, int layout, int act, int elem, void* stream) {
  using namespace lamella;
  if (!known_layout(layout, width)) return kUnsupported;
  ActParams p{out, nullptr, x, width, out_stride, x_stride, 0, 0, false, 0, 0};
  set_layout(p, layout);
  const auto s = static_cast<cudaStream_t>(stream);
  switch (static_cast<Elem>(elem)) {
    case Elem::f32:
      return gated_by_act<float>(p, num_rows, act, s);
    case Elem::f16:
      return gated_by_act<f16>(p, num_rows, act, s);
    case Elem::bf16:
      return gated_by_act<bf16>(p, num_rows, act, s);
    default:
      return kUnsupported;
  }
}

LAMELLA_API int lamella_act_fp8_token(void* out, float* scale, const void* x, int64_t num_rows, int64_t width,
                                      int64_t out_stride, int64_t x_stride, int layout, int act, int elem,
                                      void* stream) {
  using namespace lamella;
  if (!known_layout(layout, width)) return kUnsupported;
  ActParams p{out, scale, x, width, out_stride, x_stride, 0, 0, false, 0, 0};
  set_layout(p, layout);
  return by_act_and_elem(act, elem, [&](auto kind, auto example) {
    return launch_token<kind.value, decltype(example)>(p, num_rows, static_cast<cudaStream_t>(stream));
  });
}

LAMELLA_API int lamella_act_fp8_group(void* out, float* scale, const void* x, int64_t num_rows, int64_t width,
                                      int64_t out_stride, int64_t x_stride, int64_t scale_row_stride,
                                      int64_t scale_group_stride, int layout, int pow2, int act, int elem,
                                      void* stream) {
  using namespace lamella;
  if (!known_layout(layout, width)) return kUnsupported;
  ActParams p{out, scale, x, width, out_stride, x_stride, scale_row_stride, scale_group_stride, pow2 != 0, 0, 0};
  set_layout(p, layout);
  return by_act_and_elem(act, elem, [&](auto kind, auto example) {
    return launch_group<kind.value, decltype(example)>(p, num_rows, static_cast<cudaStream_t>(stream));
  });
}
