// The smaller ops, for models that are served piece by piece. Shapes are checked by the callers.
#pragma once

#include <cstdint>

#include "host/attention.h"
#include "host/linear.h"
#include "host/moe.h"

namespace lamella::host {

// Rows of floats: row i at data + i * stride.
struct Rows {
  float* data = nullptr;
  int64_t count = 0;
  int64_t width = 0;
  int64_t stride = 0;
  float* row(int64_t i) const { return data + i * stride; }
};

void embed(const Matrix& table, const int32_t* ids, float scale, const Rows& out);
// outer * inner rows: row (o, i) at x + o * outer_stride + i * inner_stride
void rms_norm(const float* x, int64_t outer, int64_t inner, int64_t outer_stride, int64_t inner_stride, const float* weight,
              int64_t width, float eps, float* out);
void add_rms_norm(const Rows& x, const Rows& residual, const float* weight, float eps);  // x: normed, residual: the sum
void linear(const Linear& linear, const Rows& x, const Rows& out);
// norm may be null; softcap 0: none
void logits(const Linear& head, const float* norm, float eps, float softcap, const Rows& hidden, const Rows& out);
void rope(float* x, int64_t num_tokens, int64_t num_heads, int64_t token_stride, int64_t head_stride, const int32_t* positions,
          const float* cos, const float* sin, int64_t half, bool interleaved);
void gated_activation(Act act, const Rows& gate_up, const Rows& out);
void moe_route(const Rows& logits, int k, bool renormalise, int32_t* ids, float* weights);  // logits become probabilities
void moe_experts(const Experts& experts, const Rows& x, const int32_t* ids, const float* weights, int k, const Rows& out);
void attention_write(const Heads& heads, const Plan& plan, const Cache& cache, const float* k, int64_t k_stride, const float* v,
                     int64_t v_stride);
void attention_run(const Heads& heads, const Plan& plan, const Cache& cache, const float* q, int64_t q_stride, float* out,
                   int64_t out_stride, float* lse, int64_t lse_stride);

}  // namespace lamella::host
