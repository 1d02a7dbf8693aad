// One warp per token; lane l holds experts l, l + 32, ... in registers.
#pragma once

#include "device/dtype.cuh"
#include "device/launch.cuh"
#include "device/reduce.cuh"
#include "moe/route.h"

namespace lamella {

struct RouteParams {
  int32_t* ids;
  float* weights;
  const void* logits;
  const float* bias;
  int64_t num_tokens, logits_stride;
  int num_experts, top_k, scoring, num_groups, topk_groups, elem;
  bool renormalize;
  float scale;
};

constexpr int kRouteWarps = 4;

// Order of floats as unsigned integers; no float but NaN maps to 0 or 1.
__device__ __forceinline__ uint32_t rank_of(float x) {
  const uint32_t bits = __float_as_uint(x + 0.f);  // -0 and 0 are one value
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

constexpr uint32_t kTaken = 0, kOtherGroup = 1;

template <int kPer>
__device__ __forceinline__ void load_bias(float (&bias)[kPer], const RouteParams& p) {
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int e = threadIdx.x % 32 + 32 * i;
    bias[i] = p.bias != nullptr && e < p.num_experts ? p.bias[e] : 0.f;
  }
}

// By a warp; lane j < top_k gets the j-th choice and its weight. Logits are read past L1, which may hold what lay there
// before.
template <int kPer>
__device__ __forceinline__ void route_token(const RouteParams& p, int64_t token, const float (&bias)[kPer], int& my_id,
                                            float& my_weight) {
  const int lane = threadIdx.x % 32;
  const float kNone = -__int_as_float(0x7f800000);
  float logit[kPer];
  const int64_t row = token * p.logits_stride;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int e = lane + 32 * i;
    float x = kNone;
    if (e < p.num_experts) {
      if (p.elem == static_cast<int>(Elem::f32)) x = __ldcg(static_cast<const float*>(p.logits) + row + e);
      else if (p.elem == static_cast<int>(Elem::f16)) x = to_float(__ldcg(static_cast<const f16*>(p.logits) + row + e));
      else x = to_float(__ldcg(static_cast<const bf16*>(p.logits) + row + e));
    }
    logit[i] = isfinite(x) ? x : kNone;
  }

  float score[kPer];
  if (p.scoring == kScoreSoftmax) {
    float most = kNone, total = 0.f;
#pragma unroll
    for (int i = 0; i < kPer; ++i) most = fmaxf(most, logit[i]);
    most = warp_max(most);
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      score[i] = logit[i] == kNone ? 0.f : expf(logit[i] - most);
      total += score[i];
    }
    total = warp_sum(total);
    const float inverse = total > 0.f ? 1.f / total : 0.f;
#pragma unroll
    for (int i = 0; i < kPer; ++i) score[i] *= inverse;
  } else {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const float x = logit[i];
      if (x == kNone) score[i] = 0.f;
      else if (p.scoring == kScoreSigmoid) score[i] = 1.f / (1.f + expf(-x));
      else score[i] = sqrtf(x > 20.f ? x : log1pf(expf(x)));
    }
  }

  // what is ranked; experts beyond the last are taken from the start
  float choice[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    choice[i] = p.bias != nullptr ? score[i] + bias[i] : logit[i];
    if (logit[i] == kNone || !isfinite(choice[i])) choice[i] = kNone;
  }
  unsigned open_groups = 0xffffffffu;
  const int group_size = p.num_experts / p.num_groups;
  if (p.num_groups > 1) {
    float mine = kNone;
    for (int g = 0; g < p.num_groups; ++g) {
      float best = kNone, second = kNone;
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        const int e = lane + 32 * i;
        if (e < g * group_size || e >= (g + 1) * group_size) continue;
        second = fmaxf(second, fminf(best, choice[i]));
        best = fmaxf(best, choice[i]);
      }
#pragma unroll
      for (int offset = 16; offset > 0; offset >>= 1) {
        const float other = __shfl_xor_sync(0xffffffffu, best, offset);
        const float other_second = __shfl_xor_sync(0xffffffffu, second, offset);
        second = fmaxf(fminf(best, other), fmaxf(second, other_second));
        best = fmaxf(best, other);
      }
      if (lane == g) mine = p.bias != nullptr && group_size > 1 ? best + second : best;
    }
    int better = 0;
    for (int g = 0; g < p.num_groups; ++g) {
      const float other = __shfl_sync(0xffffffffu, mine, g);
      if (other > mine || (other == mine && g < lane)) ++better;
    }
    open_groups = __ballot_sync(0xffffffffu, lane < p.num_groups && better < p.topk_groups);
  }
  uint32_t rank[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int e = lane + 32 * i;
    rank[i] = rank_of(choice[i]);
    if (p.num_groups > 1 && e < p.num_experts && (open_groups >> (e / group_size) & 1) == 0) rank[i] = kOtherGroup;
    if (e >= p.num_experts) rank[i] = kTaken;
  }

  my_id = 0;
  float my_score = 0.f;
  for (int j = 0; j < p.top_k; ++j) {
    uint32_t best = rank[0];
    int best_id = lane;
    float best_score = score[0];
#pragma unroll
    for (int i = 1; i < kPer; ++i) {
      if (rank[i] > best) {
        best = rank[i];
        best_id = lane + 32 * i;
        best_score = score[i];
      }
    }
    const uint32_t top = __reduce_max_sync(0xffffffffu, best);
    const int id = __reduce_min_sync(0xffffffffu, best == top ? best_id : INT32_MAX);
    const float chosen = __shfl_sync(0xffffffffu, best_score, id % 32);
    if (lane == j) {
      my_id = id;
      my_score = chosen;
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i)
      if (lane + 32 * i == id) rank[i] = kTaken;
  }
  float factor = p.scale;
  if (p.renormalize) factor /= warp_sum(my_score) + 1e-20f;
  my_weight = my_score * factor;
}

template <int kPer>
__global__ void __launch_bounds__(kRouteWarps * 32) moe_route_kernel(const RouteParams p) {
  const int lane = threadIdx.x % 32;
  const int64_t token = int64_t{blockIdx.x} * kRouteWarps + threadIdx.x / 32;
  launch_successor();
  float bias[kPer];
  load_bias(bias, p);
  wait_predecessor();
  if (token >= p.num_tokens) return;
  int id;
  float weight;
  route_token(p, token, bias, id, weight);
  if (lane < p.top_k) {
    p.ids[token * p.top_k + lane] = id;
    p.weights[token * p.top_k + lane] = weight;
  }
}

}  // namespace lamella
