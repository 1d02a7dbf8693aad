#include "host/moe.h"

#include <algorithm>

namespace lamella::host {

void route_row(const Kernels& kernels, float* logits, int64_t num_experts, int k, bool renormalise, int32_t* ids, float* weights) {
  kernels.softmax(logits, num_experts);
  float total = 0.0f;
  for (int j = 0; j < k; ++j) {
    // a NaN row still gets distinct experts
    int64_t best = -1;
    for (int64_t e = 0; e < num_experts; ++e) {
      bool taken = false;
      for (int i = 0; i < j; ++i) taken = taken || ids[i] == e;
      if (!taken && (best < 0 || logits[e] > logits[best])) best = e;
    }
    ids[j] = static_cast<int32_t>(best);
    weights[j] = logits[best];
    total += weights[j];
  }
  if (renormalise)
    for (int j = 0; j < k; ++j) weights[j] /= total;
}

void gated_units(const Kernels& kernels, Act act, const Matrix& gate, const Matrix& up, Span units, const Inputs& inputs, Inputs& inner) {
  constexpr int64_t tile_ld = kPanelRows * kTilePanels;
  alignas(64) float gates[kTileFloats], ups[kTileFloats];
  const int64_t panels = num_panels(gate.rows);
  for (int64_t unit = units.begin; unit < units.end; ++unit) {
    const int64_t col = unit * kGatedUnit, panel = col / kPanelRows;
    const int64_t count = std::min<int64_t>(kGatedUnit / kPanelRows, panels - panel);
    const int64_t cols = std::min(kGatedUnit, gate.rows - col);
    const ReadyPanels gate_panels(kernels, gate, panel, count, inputs.rows(), 0);
    const ReadyPanels up_panels(kernels, up, panel, count, inputs.rows(), 1);
    for (int64_t row = 0; row < inputs.rows();) {
      int64_t first;
      int rows;
      inputs.block_at(row, first, rows);
      const Block block = inputs.block(first, rows);
      gate_panels.multiply(block, gates, tile_ld);
      up_panels.multiply(block, ups, tile_ld);
      for (const auto& [matrix, tile] : {std::pair{&gate, gates}, std::pair{&up, ups}})
        if (matrix->bias != nullptr)
          for (int r = 0; r < rows; ++r) kernels.add(tile + r * tile_ld, matrix->bias + col, cols);
      for (int r = 0; r < rows; ++r) {
        kernels.activate(act, gates + r * tile_ld, ups + r * tile_ld, cols, gates + r * tile_ld);
        inner.put(kernels, first + r, col, cols, gates + r * tile_ld);
      }
      row = first + rows;
    }
  }
}

ExpertsWork::ExpertsWork(const Experts& experts, const Kernels& kernels, int64_t num_tokens, int k, Scratch& scratch)
    : experts_(experts), kernels_(kernels), num_tokens_(num_tokens), k_(k) {
  const int64_t count = static_cast<int64_t>(experts.gate.size()), assignments = num_tokens * k;
  active_ = scratch.take<int32_t>(count);
  starts_ = scratch.take<int64_t>(count + 1);
  fill_ = scratch.take<int64_t>(count);
  tokens_ = scratch.take<int32_t>(assignments);
  weights_ = scratch.take<float>(assignments);
  const bool quantised = experts.quantised_in(), dense = experts.dense_in();
  rows_ = Inputs::take(scratch, kernels, num_tokens, experts.hidden, quantised, dense);
  gathered_ = Inputs::take(scratch, kernels, assignments, experts.hidden, quantised, dense);
  const bool dense_down = is_dense(experts.down[0].format);
  inner_ = Inputs::take(scratch, kernels, assignments, experts.width, !dense_down, dense_down);
}

void ExpertsWork::group(const int32_t* ids, const float* weights) {
  const int64_t count = static_cast<int64_t>(experts_.gate.size()), assignments = num_tokens_ * k_;
  std::fill(fill_, fill_ + count, 0);
  for (int64_t a = 0; a < assignments; ++a) ++fill_[ids[a]];
  num_active_ = 0;
  int64_t start = 0;
  for (int64_t e = 0; e < count; ++e) {
    const int64_t size = fill_[e];
    fill_[e] = start;
    if (size == 0) continue;
    active_[num_active_] = static_cast<int32_t>(e);
    starts_[num_active_++] = start;
    start += size;
  }
  starts_[num_active_] = start;
  for (int64_t a = 0; a < assignments; ++a) {
    const int64_t place = fill_[ids[a]]++;
    tokens_[place] = static_cast<int32_t>(a / k_);
    weights_[place] = weights[a];
  }
}

void ExpertsWork::run(Lane& lane, const float* x, int64_t x_stride, const int32_t* ids, const float* weights, float* out,
                      int64_t out_stride, bool accumulate) {
  if (lane.index() == 0) group(ids, weights);
  const Span mine = lane.share(num_tokens_);
  for (int64_t t = mine.begin; t < mine.end; ++t) rows_.put(kernels_, t, 0, experts_.hidden, x + t * x_stride);
  lane.barrier();

  for (int64_t i = lane.ticket(); i < num_active_; i = lane.ticket()) {
    Inputs inputs = gathered_.part(starts_[i], starts_[i + 1] - starts_[i]);
    for (int64_t a = 0; a < inputs.rows(); ++a) inputs.copy(a, rows_, tokens_[starts_[i] + a]);
  }
  lane.barrier();

  // items of one unit of one expert; neighbours read neighbouring weights
  const int64_t units = (experts_.width + kGatedUnit - 1) / kGatedUnit;
  const auto some_units = [&](int64_t i, Span span) {
    const size_t e = static_cast<size_t>(active_[i]);
    const Inputs inputs = gathered_.part(starts_[i], starts_[i + 1] - starts_[i]);
    Inputs inner = inner_.part(starts_[i], inputs.rows());
    gated_units(kernels_, experts_.act, experts_.gate[e], experts_.up[e], span, inputs, inner);
  };
  constexpr int64_t kUnits = 4;
  const int64_t items = (units + kUnits - 1) / kUnits;
  for (int64_t item = lane.ticket(); item < num_active_ * items; item = lane.ticket()) {
    const int64_t begin = item % items * kUnits;
    some_units(item / items, {begin, std::min(units, begin + kUnits)});
  }
  lane.barrier();

  const int64_t panels = num_panels(experts_.hidden);
  const Span columns = lane.share(panels);
  const int64_t from = columns.begin * kPanelRows, to = std::min(experts_.hidden, columns.end * kPanelRows);
  if (!accumulate)
    for (int64_t t = 0; t < num_tokens_; ++t)
      for (int64_t c = from; c < to; ++c) out[t * out_stride + c] = 0.0f;
  for (int64_t i = 0; i < num_active_; ++i) {
    const Inputs inner = inner_.part(starts_[i], starts_[i + 1] - starts_[i]);
    multiply_panels(kernels_, experts_.down[static_cast<size_t>(active_[i])], columns.begin, columns.end, inner,
                    [&](int64_t col, int64_t cols, int64_t row, int rows, float* tile) {
                      for (int r = 0; r < rows; ++r) {
                        const int64_t a = starts_[i] + row + r;
                        kernels_.add_scaled(out + tokens_[a] * out_stride + col, tile + r * kPanelRows * kTilePanels,
                                            weights_[a], cols);
                      }
                    });
  }
  lane.barrier();
}

}  // namespace lamella::host
