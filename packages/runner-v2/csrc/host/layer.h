// A whole decoder layer in one region of the pool.
#pragma once

#include <cstdint>

#include "host/attention.h"
#include "host/linear.h"
#include "host/moe.h"

namespace lamella::host {

// What a layer is. Norm weights are the factors themselves; null where the model has no such norm.
struct Layer {
  int64_t hidden = 0;
  float eps = 0.0f;
  Heads heads;
  Act act = Act::silu;
  const float* attn_norm = nullptr;
  const float* attn_post_norm = nullptr;
  const float* mlp_norm = nullptr;
  const float* mlp_post_norm = nullptr;
  const float* q_norm = nullptr;  // [head_dim]
  const float* k_norm = nullptr;
  const float* cos = nullptr;  // [max_position][rotary_half]
  const float* sin = nullptr;
  int64_t rotary_half = 0;
  bool interleaved = false;
  Linear qkv, o;
  Linear gate_up;  // two parts of equal size
  Linear down;
  Linear router;
  Experts experts;
  bool moe = false;
  int experts_per_token = 0;
  bool norm_topk = true;
};

// hidden [plan.num_tokens][stride] in place.
void run_layer(const Layer& layer, const Plan& plan, const Cache& cache, float* hidden, int64_t stride);

}  // namespace lamella::host
