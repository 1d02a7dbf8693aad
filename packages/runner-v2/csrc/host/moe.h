// Routed experts: each expert's weights are read once for all the tokens that chose it.
#pragma once

#include <cstdint>
#include <vector>

#include "host/isa.h"
#include "host/linear.h"
#include "host/pool.h"
#include "host/scratch.h"

namespace lamella::host {

struct Experts {
  std::vector<Matrix> gate, up, down;  // per expert
  Act act = Act::silu;
  int64_t hidden = 0;
  int64_t width = 0;

  bool quantised_in() const { return !is_dense(gate[0].format) || !is_dense(up[0].format); }
  bool dense_in() const { return is_dense(gate[0].format) || is_dense(up[0].format); }
};

// The k best of softmax(logits), by falling weight, lower number first among equals; logits become probabilities.
void route_row(const Kernels& kernels, float* logits, int64_t num_experts, int k, bool renormalise, int32_t* ids, float* weights);

// Columns [0, width) of gated activations, in units that different lanes can compute: act(gate x) * (up x), put straight
// into the inputs of the next matrix.
constexpr int64_t kGatedUnit = 32;
void gated_units(const Kernels& kernels, Act act, const Matrix& gate, const Matrix& up, Span units, const Inputs& inputs, Inputs& inner);

// One batch of tokens through their experts, inside a region.
class ExpertsWork {
 public:
  // Takes memory for num_tokens tokens; before the region.
  ExpertsWork(const Experts& experts, const Kernels& kernels, int64_t num_tokens, int k, Scratch& scratch);

  // out[t] = sum over the experts of token t, in the order of their numbers; added to what is there if accumulate.
  // x [T][hidden] and ids, weights [T][k] must be complete; out may be x. Ends behind a barrier.
  void run(Lane& lane, const float* x, int64_t x_stride, const int32_t* ids, const float* weights, float* out,
           int64_t out_stride, bool accumulate);

 private:
  void group(const int32_t* ids, const float* weights);

  const Experts& experts_;
  const Kernels& kernels_;
  int64_t num_tokens_;
  int k_;
  int64_t num_active_ = 0;
  int32_t* active_;   // [E] experts with tokens, in order
  int64_t* starts_;   // [E + 1] first assignment of each active expert
  int64_t* fill_;     // [E]
  int32_t* tokens_;   // [T * k] token of each assignment
  float* weights_;    // [T * k]
  Inputs rows_;       // of tokens
  Inputs gathered_;   // of assignments, expert by expert
  Inputs inner_;
};

}  // namespace lamella::host
