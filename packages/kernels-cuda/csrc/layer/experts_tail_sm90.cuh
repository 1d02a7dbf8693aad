// The tail of a layer with experts on Hopper: o, router, the chosen experts' gate_up, their down, the next layer's qkv.
//
// Every block chooses the experts for itself from the router's product, and takes its share of all that any token chose:
//
//   gate_up   tiles of 8 gate rows and their up rows, of the chosen experts one behind the other
//   down      16 rows of the sum over experts: K runs through the chosen experts, whose sums are added with the tokens'
//             weights (0 where a token chose another)
//
// Only then it is known which weights are needed: meanwhile qkv's are brought into L2.
#pragma once

#include "layer/experts_tail.h"
#include "layer/tail_block_sm90.cuh"
#include "moe/route.cuh"

namespace lamella {

constexpr int kExpertsTokens = 8, kExpertsTopK = 8, kMostChosen = kExpertsTokens * kExpertsTopK;

struct ExpertsMaps {
  CUtensorMap o, router, w13, w2, qkv;
};

// What a block knows of the choice, in shared memory.
struct Choice {
  uint64_t done;                                // barrier: the rest is written
  unsigned long long slots[kMostChosen];        // of a chosen expert: byte t is the token's choice j, 0xff: none
  float weights[kMostChosen][kExpertsTokens];   // of a chosen expert for a token
  int experts[kMostChosen];                     // ascending
  int ids[kExpertsTokens][kExpertsTopK];
  float token_weights[kExpertsTokens][kExpertsTopK];
  int counts[kExpertsTokens + 1];               // by warp; behind them the number of all
};

// By all consumers, a thread per expert and a warp per token.
template <class Consumer>
__device__ __forceinline__ void choose(Choice& choice, const LamellaExpertsTail& p, const void* logits,
                                       const Consumer& consumer) {
  const int warp = consumer.warp, lane = consumer.lane, num_tokens = consumer.num_tokens;
  if (warp < num_tokens) {
    const RouteParams route{nullptr,       nullptr, logits, nullptr, num_tokens,         p.num_experts,
                            p.num_experts, p.top_k, kScoreSoftmax, 1, 1, p.elem, p.renormalize != 0, 1.f};
    int id;
    float weight;
    if (p.num_experts <= 128) {
      const float bias[4] = {};
      route_token<4>(route, warp, bias, id, weight);
    } else {
      const float bias[8] = {};
      route_token<8>(route, warp, bias, id, weight);
    }
    if (lane < p.top_k) {
      choice.ids[warp][lane] = id;
      choice.token_weights[warp][lane] = weight;
    }
  }
  consumer.sync();
  const int expert = threadIdx.x;
  unsigned long long slots = ~0ull;
  if (expert < p.num_experts) {
    for (int t = 0; t < num_tokens; ++t)
      for (int j = 0; j < p.top_k; ++j)
        if (choice.ids[t][j] == expert) slots ^= static_cast<unsigned long long>(0xff ^ j) << (8 * t);
  }
  const bool is_chosen = ~slots != 0;
  const unsigned neighbours = __ballot_sync(0xffffffffu, is_chosen);
  if (lane == 0) choice.counts[warp] = __popc(neighbours);
  consumer.sync();
  int place = __popc(neighbours & ((1u << lane) - 1)), total = 0;
  for (int w = 0; w < kExpertsTokens; ++w) {
    if (w < warp) place += choice.counts[w];
    total += choice.counts[w];
  }
  if (threadIdx.x == 0) choice.counts[kExpertsTokens] = total;
  if (is_chosen) {
    choice.experts[place] = expert;
    choice.slots[place] = slots;
    for (int t = 0; t < kExpertsTokens; ++t) {
      const unsigned j = static_cast<unsigned>(slots >> (8 * t)) & 0xff;
      choice.weights[place][t] = j == 0xff ? 0.f : choice.token_weights[t][j];
    }
  }
  consumer.sync();
  if (threadIdx.x == 0) barrier_arrive(&choice.done);
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    experts_tail_kernel(const __grid_constant__ LamellaExpertsTail p, const __grid_constant__ ExpertsMaps maps,
                        unsigned long long* met, T* logits, T* inner) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static_assert(Shape::kTiles == 1 && Shape::kWarps == kExpertsTokens && sizeof(Choice) <= Shape::kExtra, "");
  constexpr int kHeld = Shape::kHeld;
  extern __shared__ char raw[];
  const bool loads = threadIdx.x >= Shape::kConsumers;
  TailStages<Shape> stages(raw, loads ? 1 : 0);
  Choice& choice = *reinterpret_cast<Choice*>(stages.extra);
  if (threadIdx.x == 0) {
    barrier_init(&choice.done, 1);
    barrier_init_done();
  }
  __syncthreads();
  const auto depths = [](int64_t width) { return static_cast<int>(width / Shape::kDepth); };
  const int hidden_tiles = static_cast<int>(p.h / kTailRows), inner_tiles = static_cast<int>(p.i / 8);
  const int qkv_tiles = p.w_qkv != nullptr ? static_cast<int>(p.q / kTailRows) : 0;
  const int grid = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  unsigned* open = reinterpret_cast<unsigned*>(met + 16);

  if (loads) {
    if (threadIdx.x != Shape::kConsumers) return;
    const uint64_t once = evict_first_policy();
    const auto row = [](int tile) { return tile * kTailRows; };
    stages.load_all(&maps.o, hidden_tiles, depths(p.a), false, 8, once, FixedTiles{block, grid}, row);
    // o leaves the last blocks free
    stages.load_all(&maps.router, p.num_experts / kTailRows, depths(p.h), false, 8, once,
                    FixedTiles{grid - 1 - block, grid}, row);
    const int64_t tile_bytes = kTailRows * p.h * 2;
    for (int tile = block; tile < qkv_tiles; tile += grid)
      prefetch_l2(static_cast<const char*>(p.w_qkv) + tile * tile_bytes, static_cast<uint32_t>(tile_bytes));
    barrier_wait(&choice.done, 0);
    const int num_chosen = choice.counts[kExpertsTokens];
    const int width = static_cast<int>(p.i);
    stages.load_all(&maps.w13, num_chosen * inner_tiles, depths(p.h), false, width, once,
                    OpenTiles(block, grid, open), [&](int tile) {
                      return choice.experts[tile / inner_tiles] * 2 * width + tile % inner_tiles * 8;
                    });
    for (int tile = block; tile < hidden_tiles; tile += grid) {
      for (int u = 0; u < num_chosen; ++u) {
        const int first = choice.experts[u] * static_cast<int>(p.h) + tile * kTailRows;
        for (int k = 0; k < depths(p.i); ++k) {
          stages.claim();
          stages.load(&maps.w2, first, first + 8, k, once);
        }
      }
    }
    stages.load_all(&maps.qkv, qkv_tiles, depths(p.h), false, 8, once, FixedTiles{block, grid}, row);
    if (p.prefetch != nullptr) prefetch_part(p.prefetch, p.prefetch_bytes);
    return;
  }

  using Consumer = TailConsumer<T, Shape>;
  Consumer consumer(stages, p.m, met);
  const int g = consumer.g;
  const AddTile<T> add = begin_tail(consumer, p);
  consumer.template multiply<1, false>(depths(p.h), nullptr, 0, StoreTile<T>{logits, p.num_experts, g});
  consumer.meet();
  choose(choice, p, logits, consumer);
  const int num_chosen = choice.counts[kExpertsTokens];
  consumer.template multiply<1, false>(depths(p.h), nullptr, 0, [&](int tile, float low, float high, int token) {
    const unsigned j = static_cast<unsigned>(choice.slots[tile / inner_tiles] >> (8 * token)) & 0xff;
    if (j == 0xff) return;
    inner[(token * p.top_k + j) * p.i + tile % inner_tiles * 8 + g] = gated<T>(low, high);
  });
  consumer.meet();
  if (block == 0 && threadIdx.x == 0) *open = 0;  // for the next launch

  const int num_k = depths(p.i), num_stages = num_chosen * num_k;
  const auto source = [&](int u) -> const T* {
    const unsigned j = static_cast<unsigned>(choice.slots[u] >> (8 * g)) & 0xff;
    return j == 0xff ? nullptr : inner + (g * p.top_k + j) * p.i;
  };
  for (int tile = block; tile < hidden_tiles; tile += grid) {
    float sum[1][1][4] = {}, c[1][4] = {};
    int u = 0, k = 0, ahead_u = 0, ahead_k = 0;
    const auto read = [&](int slot) {
      if (ahead_u < num_chosen) consumer.read(slot, 0, source(ahead_u), ahead_k);
      if (++ahead_k == num_k) {
        ahead_k = 0;
        ++ahead_u;
      }
    };
#pragma unroll
    for (int j = 0; j < kHeld; ++j) read(j);
    for (int s0 = 0; s0 < num_stages; s0 += kHeld) {
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        if (s0 + j >= num_stages) break;
        consumer.multiply_stage(c, j);
        read(j);
        if (++k == num_k) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            sum[0][0][e] += choice.weights[u][consumer.kq * 2 + e % 2] * c[0][e];
            c[0][e] = 0.f;
          }
          k = 0;
          ++u;
        }
      }
    }
    consumer.template add_up<1>(sum, 1, [&](int, float low, float high, int token) { add(tile, low, high, token); });
  }
  end_tail(consumer, p);
#endif
}

template <class T>
int experts_tail(const LamellaExpertsTail& p, void* workspace, int64_t zeroed, void* stream) {
  using Shape = TailShape<1, 8, 256, 16, 4096>;
  auto* met = static_cast<unsigned long long*>(workspace);
  T* logits = reinterpret_cast<T*>(static_cast<char*>(workspace) + zeroed);
  T* inner = logits + kExpertsTokens * p.num_experts;
  ExpertsMaps maps = {};
  if (!map_lines<T>(&maps.o, p.w_o, p.h, p.a, Shape::kDepth) ||
      !map_lines<T>(&maps.router, p.router, p.num_experts, p.h, Shape::kDepth) ||
      !map_lines<T>(&maps.w13, p.w13, 2 * p.i * p.num_experts, p.h, Shape::kDepth) ||
      !map_lines<T>(&maps.w2, p.w2, p.h * p.num_experts, p.i, Shape::kDepth) ||
      (p.w_qkv != nullptr && !map_lines<T>(&maps.qkv, p.w_qkv, p.q, p.h, Shape::kDepth)))
    return kUnsupported;
  const Launch how{dim3(static_cast<unsigned>(device_facts().num_sms)), dim3(Shape::kThreads), Shape::kShared,
                   static_cast<cudaStream_t>(stream)};
  return launch(experts_tail_kernel<T, Shape>, how, p, maps, met, logits, inner);
}

}  // namespace lamella
