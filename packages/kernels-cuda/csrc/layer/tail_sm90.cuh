// A dense layer's tail on Hopper: o, gate_up, down and the next layer's qkv, between which the blocks meet.
#pragma once

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
  const bool loads = threadIdx.x >= Shape::kConsumers;
  TailStages<Shape> stages(raw, loads ? 1 : 0);
  __syncthreads();
  const auto depths = [](int64_t width) { return static_cast<int>(width / Shape::kDepth); };
  const int hidden_tiles = static_cast<int>(p.h / kTailRows), inner_tiles = static_cast<int>(p.i / 8);
  const int qkv_tiles = p.w_qkv != nullptr ? static_cast<int>(p.q / kTailRows) : 0;
  unsigned* open = reinterpret_cast<unsigned*>(met + 16);

  if (loads) {
    if (threadIdx.x != Shape::kConsumers) return;
    const uint64_t once = evict_first_policy();
    const auto row = [](int tile) { return tile * kTailRows; };
    const int grid = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    stages.load_all(&maps.o, hidden_tiles, depths(p.a), false, 8, once, FixedTiles{block, grid}, row);
    // 8 gate rows and their 8 up rows, which meet in one thread
    const auto gate_row = [](int tile) { return tile * 8; };
    stages.load_all(&maps.gate_up, inner_tiles, depths(p.h), false, static_cast<int>(p.i), once,
                    OpenTiles(block, grid, open), gate_row);
    stages.load_all(&maps.down, hidden_tiles, depths(p.i), true, 8, once, FixedTiles{block, 2 * grid}, row);
    stages.load_all(&maps.qkv, qkv_tiles, depths(p.h), false, 8, once, FixedTiles{block, grid}, row);
    if (p.prefetch != nullptr) prefetch_part(p.prefetch, p.prefetch_bytes);
    return;
  }

  TailConsumer<T, Shape> consumer(stages, p.m, met);
  const int g = consumer.g;
  const AddTile<T> add = begin_tail(consumer, p);
  consumer.template multiply<1, false>(depths(p.h), nullptr, 0, [&](int tile, float low, float high, int token) {
    inner[token * p.i + tile * 8 + g] = gated<T>(low, high);
  });
  consumer.meet();
  if (blockIdx.x == 0 && threadIdx.x == 0) *open = 0;  // for the next launch
  consumer.template multiply<Shape::kPair, true>(depths(p.i), inner, p.i, add);
  end_tail(consumer, p);
#endif
}

template <class T>
int layer_tail(const LamellaLayerTail& p, void* workspace, int64_t zeroed, void* stream) {
  auto* met = static_cast<unsigned long long*>(workspace);
  T* inner = reinterpret_cast<T*>(static_cast<char*>(workspace) + zeroed);
  using Shape = TailShape<1, 8, 512, 8>;
  TailMaps maps = {};
  if (!map_lines<T>(&maps.o, p.w_o, p.h, p.a, Shape::kDepth) ||
      !map_lines<T>(&maps.gate_up, p.w_gate_up, 2 * p.i, p.h, Shape::kDepth) ||
      !map_lines<T>(&maps.down, p.w_down, p.h, p.i, Shape::kDepth) ||
      (p.w_qkv != nullptr && !map_lines<T>(&maps.qkv, p.w_qkv, p.q, p.h, Shape::kDepth)))
    return kUnsupported;
  const Launch how{dim3(static_cast<unsigned>(device_facts().num_sms)), dim3(Shape::kThreads), Shape::kShared,
                   static_cast<cudaStream_t>(stream)};
  return launch(layer_tail_kernel<T, Shape>, how, p, maps, met, inner);
}

}  // namespace lamella
