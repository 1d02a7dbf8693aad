// A dense layer's tail on Hopper: o, gate_up, down and the next layer's qkv, between which the blocks meet.
#pragma once

#include <cstdlib>

#include "layer/tail.h"
#include "layer/tail_block_sm90.cuh"

namespace lamella {

struct TailMaps {
  CUtensorMap o, gate_up, down, qkv;
};

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    layer_tail_kernel(const __grid_constant__ LamellaLayerTail p, const __grid_constant__ TailMaps maps,
                      unsigned long long* met, T* inner) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char raw[];
  TailStages<Shape> stages(raw);
  __syncthreads();
  const auto depths = [](int64_t width) { return static_cast<int>(width / Shape::kDepth); };
  const int hidden_tiles = static_cast<int>(p.h / kTailRows), inner_tiles = static_cast<int>(p.i / 8);
  const int qkv_tiles = p.w_qkv != nullptr ? static_cast<int>(p.q / kTailRows) : 0;
  constexpr int kPair = Shape::kPair;

  if (threadIdx.x >= Shape::kConsumers) {
    if (threadIdx.x != Shape::kConsumers) return;
    const uint64_t once = evict_first_policy();
    const auto row = [](int tile) { return tile * kTailRows; };
    stages.load_all(&maps.o, hidden_tiles, depths(p.a), 1, 8, once, row);
    stages.load_all(&maps.gate_up, inner_tiles, depths(p.h), 1, static_cast<int>(p.i), once,
                    [](int tile) { return tile * 8; });  // 8 gate rows and their 8 up rows, which meet in one thread
    stages.load_all(&maps.down, hidden_tiles, depths(p.i), kPair, 8, once, row);
    stages.load_all(&maps.qkv, qkv_tiles, depths(p.h), 1, 8, once, row);
    if (p.prefetch != nullptr) prefetch_part(p.prefetch, p.prefetch_bytes);
    return;
  }

  TailConsumer<T, Shape> consumer(stages, p.m, met);
  const int g = consumer.g;
  T* residual = static_cast<T*>(p.residual);
  const auto add = [&](int tile, float low, float high, int token) {
    T* to = residual + token * p.residual_stride + tile * kTailRows + g;
    grow(to, low);
    grow(to + 8, high);
  };
  consumer.hold(static_cast<const T*>(p.attended), p.attended_stride, depths(p.a));
  consumer.template multiply<1, false>(hidden_tiles, depths(p.a), nullptr, 0, add);
  consumer.meet();
  consumer.hold_normed(residual, p.residual_stride, depths(p.h), static_cast<const T*>(p.mlp_norm), p.eps);
  consumer.template multiply<1, false>(
      inner_tiles, depths(p.h), nullptr, 0, [&](int tile, float low, float high, int token) {
        const float gate = to_float(from_float<T>(low)), up = to_float(from_float<T>(high));
        const float act = to_float(from_float<T>(__fdividef(gate, 1.f + __expf(-gate))));
        inner[token * p.i + tile * 8 + g] = from_float<T>(act * up);
      });
  consumer.meet();
  consumer.template multiply<kPair, true>(hidden_tiles, depths(p.i), inner, p.i, add);
  launch_successor();
  if (p.w_qkv == nullptr) return;
  consumer.meet();
  consumer.hold_normed(residual, p.residual_stride, depths(p.h), static_cast<const T*>(p.next_norm), p.eps);
  consumer.template multiply<1, false>(qkv_tiles, depths(p.h), nullptr, 0,
                                       [&](int tile, float low, float high, int token) {
                                         T* to = static_cast<T*>(p.qkv) + token * p.qkv_stride + tile * kTailRows + g;
                                         to[0] = from_float<T>(low);
                                         to[8] = from_float<T>(high);
                                       });
#endif
}

template <class T>
int layer_tail(const LamellaLayerTail& p, void* workspace, int64_t zeroed, void* stream) {
  auto* met = static_cast<unsigned long long*>(workspace);
  T* inner = reinterpret_cast<T*>(static_cast<char*>(workspace) + zeroed);
  const auto run = [&](auto shape, auto kernel) {
    using Shape = decltype(shape);
    TailMaps maps = {};
    if (!map_lines<T>(&maps.o, p.w_o, p.h, p.a, Shape::kDepth) ||
        !map_lines<T>(&maps.gate_up, p.w_gate_up, 2 * p.i, p.h, Shape::kDepth) ||
        !map_lines<T>(&maps.down, p.w_down, p.h, p.i, Shape::kDepth) ||
        (p.w_qkv != nullptr && !map_lines<T>(&maps.qkv, p.w_qkv, p.q, p.h, Shape::kDepth)))
      return static_cast<int>(kUnsupported);
    const Launch how{dim3(static_cast<unsigned>(device_facts().num_sms)), dim3(Shape::kThreads), Shape::kShared,
                     static_cast<cudaStream_t>(stream)};
    return launch(kernel, how, p, maps, met, inner);
  };
  const char* env = getenv("TAIL_FLAGS");
  const int flags = env ? atoi(env) : 0;
  using A = TailShape<1, 16, 512, 8>;
  using B = TailShape<1, 8, 512, 8>;
  using C = TailShape<1, 8, 256, 16>;
  using D = TailShape<2, 8, 512, 8>;
  using E = TailShape<2, 8, 256, 16>;
  if (p.m <= 8) {
    if (flags == 0) return run(A{}, layer_tail_kernel<T, A>);
    if (flags == 1) return run(B{}, layer_tail_kernel<T, B>);
    return run(C{}, layer_tail_kernel<T, C>);
  }
  if (flags == 2) return run(E{}, layer_tail_kernel<T, E>);
  return run(D{}, layer_tail_kernel<T, D>);
}

}  // namespace lamella
