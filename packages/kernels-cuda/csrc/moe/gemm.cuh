// What the grouped products of all devices share: the list of blocks, and how tiles of weight rows are laid out.
//
//   first:   h[p, i] = silu(sum of gate row i) * (sum of up row i)   p: place of a pair among the sorted ones
//   second:  y[pair, n] = sum of row n over h[p]     not yet times its weight: the last kernel does that
//
// A tile has two sets of 64 weight rows per group: 64 gate rows and their 64 up rows in the first product, so that a
// thread holds both sums of an output; two neighbouring sets of rows in the second.
#pragma once

#include "device/dtype.cuh"
#include "device/launch.cuh"
#include "moe/align.cuh"
#include "moe/route.cuh"

namespace lamella {

struct MoeBlocks {
  const int32_t *ids, *expert_map;  // without align: every pair is a block of its own
  int64_t map_size;
  const int32_t *sorted_ids, *block_experts, *block_sizes, *num_rows;  // of align; num_rows null: without
  int num_ids, num_experts, top_k;
  RouteParams route;  // logits null: ids and weights are there; only without align
};

constexpr int kMaxDirect = 64;        // pairs that are served without align,
constexpr int kMaxDirectTokens = 2;   // of so many tokens
constexpr int kMaxDirectRoute = 256;  // experts among which the products can choose by themselves

struct MoeGemm {
  MoeBlocks blocks;
  const void* x;          // first: [T, K], gathered; second: h [places, K]
  const void* w;          // [E, rows, K]
  void* out;              // first: h [places, num_out]; second: y [pairs, num_out]
  const float* x_scale;   // fp8: [T or places, K / 128]
  const float* w_scale;   // fp8: [E, rows / 128, K / 128]
  int64_t x_stride;       // elements
  int64_t k, rows;        // weight rows of an expert: 2 I or H
  int num_out;            // columns of out: I or H
  int num_k, num_tiles;   // units of 128 bytes of K; tiles of an expert
  float* partials;
  unsigned* flags;
};

// Blocks without align: the pairs that have an expert, in their order. Filled by the first warp. Ids are read past
// L1, which may hold what lay there before.
struct DirectBlocks {
  int count;
  int16_t pair[kMaxDirect], expert[kMaxDirect];
};

__device__ __forceinline__ void list_direct(DirectBlocks& list, const MoeBlocks& b) {
  const int lane = threadIdx.x % 32;
  int count = 0;
  for (int at = 0; at < b.num_ids; at += 32) {
    const int pair = at + lane;
    const int expert =
        pair < b.num_ids ? local_expert(__ldcg(b.ids + pair), b.expert_map, b.map_size, b.num_experts) : -1;
    const unsigned have = __ballot_sync(0xffffffffu, expert >= 0);
    if (expert >= 0) {
      const int place = count + __popc(have & ((1u << lane) - 1));
      list.pair[place] = static_cast<int16_t>(pair);
      list.expert[place] = static_cast<int16_t>(expert);
    }
    count += __popc(have);
  }
  if (lane == 0) list.count = count;
}

// The same where ids are yet to be chosen: warp t for token t, by every thread block and in both products. Written, for
// the sum over experts, by the first block of the first.
template <int kPer>
__device__ __forceinline__ void route_direct(DirectBlocks& list, const MoeBlocks& b, bool write) {
  const int token = threadIdx.x / 32, lane = threadIdx.x % 32;
  float bias[kPer], weight;
  int id;
  load_bias(bias, b.route);
  route_token(b.route, token, bias, id, weight);
  if (lane < b.top_k) {
    const int pair = token * b.top_k + lane;
    list.pair[pair] = static_cast<int16_t>(pair);
    list.expert[pair] = static_cast<int16_t>(id);
    if (write) {
      b.route.ids[pair] = id;
      b.route.weights[pair] = weight;
    }
  }
  if (threadIdx.x == 0) list.count = b.num_ids;
}

__device__ __forceinline__ float silu_mul(float gate, float up) { return __fdividef(gate, 1.f + __expf(-gate)) * up; }

}  // namespace lamella
