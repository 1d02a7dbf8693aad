// Which experts a token goes to, and with what weight.
#pragma once

#include <cstdint>

#include "device/status.h"

enum LamellaScoring { kScoreSoftmax = 0, kScoreSigmoid = 1, kScoreSqrtSoftplus = 2 };

// Per row of logits: scores s over all experts; ranks c = s + bias (the logits themselves without bias); the k best by
// (c, lower index first), best first.
//   num_groups > 1: only experts of the topk_groups best groups of num_experts / num_groups neighbours; a group counts
//   the sum of its two best c with bias, its best c without.
//   weights = s of the chosen, divided by (their sum + 1e-20) if renormalize, times scale.
// A logit that is not finite scores 0 and ranks behind every finite one; k different ids are found in any case.
// elem: of logits (f32, f16, bf16). num_experts <= 1024, top_k <= 32 and <= num_experts, num_groups <= 32.
// ids, weights: [num_tokens, top_k] without gaps.
LAMELLA_API int lamella_moe_route(int32_t* ids, float* weights, const void* logits, const float* bias,
                                  int64_t num_tokens, int64_t num_experts, int64_t logits_stride, int top_k,
                                  int scoring, int renormalize, int num_groups, int topk_groups, float scale, int elem,
                                  void* stream);
