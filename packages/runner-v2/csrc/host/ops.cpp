#include "host/ops.h"

#include <algorithm>

#include "host/pack.h"

namespace lamella::host {
namespace {

// Rows of many inputs are multiplied in slices, so that what is prepared stays in cache.
constexpr int64_t kSliceTokens = 128;
// Floats of work below which one thread does a row-wise op alone.
constexpr int64_t kAloneFloats = 4096;

int64_t grain_of(int64_t width) { return std::max<int64_t>(1, kAloneFloats / std::max<int64_t>(1, width)); }

}  // namespace

void embed(const Matrix& table, const int32_t* ids, float scale, const Rows& out) {
  Pool::get().parallel_for(
      out.count,
      [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) read_row(table, ids[t], scale, out.row(t));
      },
      grain_of(out.width * 4));
}

void rms_norm(const float* x, int64_t outer, int64_t inner, int64_t outer_stride, int64_t inner_stride, const float* weight,
              int64_t width, float eps, float* out) {
  const Kernels& use = kernels();
  Pool::get().parallel_for(
      outer * inner,
      [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
          use.norm(x + i / inner * outer_stride + i % inner * inner_stride, weight, width, eps, out + i * width);
      },
      grain_of(width));
}

void add_rms_norm(const Rows& x, const Rows& residual, const float* weight, float eps) {
  const Kernels& use = kernels();
  Pool::get().parallel_for(
      x.count,
      [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          use.add(residual.row(t), x.row(t), x.width);
          use.norm(residual.row(t), weight, x.width, eps, x.row(t));
        }
      },
      grain_of(x.width));
}

void linear(const Linear& linear, const Rows& x, const Rows& out) { logits(linear, nullptr, 0.0f, 0.0f, x, out); }

void logits(const Linear& head, const float* norm, float eps, float softcap, const Rows& hidden, const Rows& out) {
  if (hidden.count == 0) return;
  const Kernels& use = kernels();
  Scratch& scratch = Scratch::mine();
  scratch.reset();
  const int lanes = Pool::get().size();
  const int64_t slice = std::min(kSliceTokens, hidden.count);
  float* normed = scratch.take<float>(norm != nullptr ? hidden.width * lanes : 0);
  // two sets in turn: a lane may fill the next slice while another still reads this one
  const auto take = [&](int64_t rows) {
    return norm != nullptr ? Inputs::take_fine(scratch, use, rows, head) : Inputs::take(scratch, use, rows, head);
  };
  Inputs sets[2] = {take(slice), take(hidden.count > slice ? slice : 1)};
  const int64_t last = hidden.count % slice;
  Inputs rest = last != 0 ? take(last) : sets[0];
  Pool::get().run([&](Lane& lane) {
    int turn = 0;
    for (int64_t begin = 0; begin < hidden.count; begin += slice, turn ^= 1) {
      const int64_t count = std::min(slice, hidden.count - begin);
      Inputs& inputs = count == slice ? sets[turn] : rest;
      const Span mine = lane.share(count);
      for (int64_t t = mine.begin; t < mine.end; ++t) {
        const float* x = hidden.row(begin + t);
        if (norm != nullptr) {
          float* buffer = normed + lane.index() * hidden.width;
          use.norm(x, norm, hidden.width, eps, buffer);
          x = buffer;
        }
        inputs.put(use, t, 0, hidden.width, x);
      }
      lane.barrier();
      multiply_into(use, lane, head, inputs, out.row(begin), out.stride, false);
      if (softcap <= 0.0f) continue;
      lane.barrier();
      for (int64_t t = mine.begin; t < mine.end; ++t) use.softcap(out.row(begin + t), out.width, softcap);
    }
  });
}

void rope(float* x, int64_t num_tokens, int64_t num_heads, int64_t token_stride, int64_t head_stride, const int32_t* positions,
          const float* cos, const float* sin, int64_t half, bool interleaved) {
  const Kernels& use = kernels();
  Pool::get().parallel_for(
      num_tokens,
      [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t)
          for (int64_t h = 0; h < num_heads; ++h)
            use.rotate(x + t * token_stride + h * head_stride, cos + positions[t] * half, sin + positions[t] * half, half,
                       interleaved);
      },
      grain_of(num_heads * half * 2));
}

void gated_activation(Act act, const Rows& gate_up, const Rows& out) {
  const Kernels& use = kernels();
  Pool::get().parallel_for(
      out.count,
      [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t)
          use.activate(act, gate_up.row(t), gate_up.row(t) + out.width, out.width, out.row(t));
      },
      grain_of(out.width));
}

void moe_route(const Rows& logits, int k, bool renormalise, int32_t* ids, float* weights) {
  const Kernels& use = kernels();
  Pool::get().parallel_for(
      logits.count,
      [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t)
          route_row(use, logits.row(t), logits.width, k, renormalise, ids + t * k, weights + t * k);
      },
      grain_of(logits.width * k));
}

void moe_experts(const Experts& experts, const Rows& x, const int32_t* ids, const float* weights, int k, const Rows& out) {
  if (x.count == 0) return;
  Scratch& scratch = Scratch::mine();
  scratch.reset();
  ExpertsWork work(experts, kernels(), x.count, k, scratch);
  Pool::get().run([&](Lane& lane) { work.run(lane, x.data, x.stride, ids, weights, out.data, out.stride, false); });
}

void attention_write(const Heads& heads, const Plan& plan, const Cache& cache, const float* k, int64_t k_stride, const float* v,
                     int64_t v_stride) {
  const Kernels& use = kernels();
  Pool::get().parallel_for(
      plan.num_tokens,
      [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          if (plan.slots[t] < 0) continue;
          for (int h = 0; h < heads.num_kv_heads; ++h) {
            write_head(use, cache, cache.k, plan.slots[t], h, k + t * k_stride + h * heads.head_dim, heads.head_dim);
            write_head(use, cache, cache.v, plan.slots[t], h, v + t * v_stride + h * heads.head_dim, heads.head_dim);
          }
        }
      },
      grain_of(2 * static_cast<int64_t>(heads.num_kv_heads) * heads.head_dim));
}

void attention_run(const Heads& heads, const Plan& plan, const Cache& cache, const float* q, int64_t q_stride, float* out,
                   int64_t out_stride, float* lse, int64_t lse_stride) {
  if (plan.num_tokens == 0) return;
  Scratch& scratch = Scratch::mine();
  scratch.reset();
  const int lanes = Pool::get().size();
  float* lane_scratch = scratch.take<float>(lanes * AttentionWork::lane_floats(heads, plan.num_tokens));
  AttentionWork work(plan, 0, plan.num_tokens, heads, cache, lanes, scratch, lane_scratch, q, q_stride, out, out_stride, lse,
                     lse_stride);
  Pool::get().run([&](Lane& lane) { work.work(kernels(), lane); });
}

}  // namespace lamella::host
