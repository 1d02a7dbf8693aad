// The tokens go through a layer in chunks small enough that what lies between two matrices stays in a core's own cache:
//
//     chunk 0: norm, qkv | rotate, write | attend | o, add | norm, gate and up | down, add        | = barrier
//     chunk 1: ...       its queries read the slots that chunk 0 wrote
//
// In MoE layers the second half runs over many chunks at once, since there the weights are what is dear to read.
#include "host/layer.h"

#include <algorithm>

namespace lamella::host {
namespace {

constexpr int64_t kChunkTokens = 192;
constexpr int64_t kExpertTokens = 1024;
// Up to this many tokens every lane makes its own inputs, which is cheaper than a barrier.
constexpr int64_t kRedundantTokens = 2;

class LayerRun {
 public:
  LayerRun(const Layer& layer, const Plan& plan, const Cache& cache, float* hidden, int64_t stride)
      : kernels_(kernels()), layer_(layer), plan_(plan), cache_(cache), hidden_(hidden), stride_(stride),
        qkv_width_(layer.qkv.rows), out_width_(static_cast<int64_t>(layer.heads.num_heads) * layer.heads.head_dim) {
    Scratch& scratch = Scratch::mine();
    scratch.reset();
    const int lanes = Pool::get().size();
    const int64_t tokens = std::min(kChunkTokens, plan.num_tokens);
    qkv_ = scratch.take<float>(tokens * qkv_width_);
    attended_ = scratch.take<float>(tokens * out_width_);
    if (layer.attn_post_norm != nullptr || layer.mlp_post_norm != nullptr) delta_ = scratch.take<float>(tokens * layer.hidden);
    const int64_t widest = std::max(layer.hidden, out_width_);
    lane_row_ = scratch.take<float>(widest * lanes);
    float* const attention_scratch = scratch.take<float>(lanes * AttentionWork::lane_floats(layer.heads, tokens));
    for (int64_t begin = 0; begin < plan.num_tokens; begin += kChunkTokens) {
      const int64_t end = std::min(plan.num_tokens, begin + kChunkTokens);
      attention_.emplace_back(plan, begin, end, layer.heads, cache, lanes, scratch, attention_scratch, qkv_, qkv_width_, attended_,
                              out_width_, nullptr, 0);
    }
    tokens_ = tokens;
    const int64_t last = plan.num_tokens % kChunkTokens;
    const auto sizes = [&](auto make) {  // inputs of a full chunk and of the last one, if that is another
      make(0, tokens);
      if (plan.num_tokens > kChunkTokens && last != 0) make(1, last);
    };
    sizes([&](int i, int64_t rows) {
      // rows that every lane makes for itself lie apart
      const int copies = rows <= kRedundantTokens ? lanes : 1;
      for (int lane = 0; lane < copies; ++lane) {
        qkv_in_[i].push_back(Inputs::take_fine(scratch, kernels_, rows, layer.qkv));
        o_in_[i].push_back(Inputs::take_fine(scratch, kernels_, rows, layer.o));
        if (!layer.moe) mlp_in_[i].push_back(Inputs::take(scratch, kernels_, rows, layer.gate_up));
      }
      if (!layer.moe) inner_[i] = Inputs::take(scratch, kernels_, rows, layer.down);
    });
    if (layer.moe) {
      const int64_t most = std::min(kExpertTokens, plan.num_tokens);
      const int64_t num_experts = layer.router.rows;
      normed_ = scratch.take<float>(most * layer.hidden);
      router_logits_ = scratch.take<float>(most * num_experts);
      ids_ = scratch.take<int32_t>(most * layer.experts_per_token);
      weights_ = scratch.take<float>(most * layer.experts_per_token);
      if (layer.mlp_post_norm != nullptr) expert_out_ = scratch.take<float>(most * layer.hidden);
      for (int64_t begin = 0; begin < plan.num_tokens; begin += kExpertTokens) {
        const int64_t count = std::min(plan.num_tokens - begin, kExpertTokens);
        experts_.emplace_back(layer.experts, kernels_, count, layer.experts_per_token, scratch);
        router_in_.push_back(Inputs::take(scratch, kernels_, count, layer.router));
      }
    }
  }

  void run(Lane& lane) {
    int chunk = 0;
    for (int64_t begin = 0; begin < plan_.num_tokens; begin += kChunkTokens, ++chunk) {
      const int64_t count = std::min(plan_.num_tokens - begin, kChunkTokens);
      const int which = count == tokens_ ? 0 : 1;
      attention(lane, begin, count, which, attention_[static_cast<size_t>(chunk)]);
      if (!layer_.moe) mlp(lane, begin, count, which);
    }
    if (!layer_.moe) return;
    chunk = 0;
    for (int64_t begin = 0; begin < plan_.num_tokens; begin += kExpertTokens, ++chunk)
      moe(lane, begin, std::min(plan_.num_tokens - begin, kExpertTokens), static_cast<size_t>(chunk));
  }

 private:
  float* row(int64_t token) { return hidden_ + token * stride_; }

  // Rows [0, count) into inputs: each lane all of them for itself if they are few, else shared out and then a barrier.
  template <class Fill>
  Inputs& prepare(Lane& lane, std::vector<Inputs>& inputs, int64_t count, Fill fill) {
    const bool redundant = count <= kRedundantTokens;
    Inputs& mine = inputs[redundant ? static_cast<size_t>(lane.index()) : 0];
    const Span share = redundant ? Span{0, count} : lane.share(count);
    for (int64_t t = share.begin; t < share.end; ++t) fill(mine, t);
    if (!redundant) lane.barrier();
    return mine;
  }

  Inputs& normed(Lane& lane, std::vector<Inputs>& inputs, int64_t begin, int64_t count, const float* weight) {
    float* buffer = lane_row_ + lane.index() * std::max(layer_.hidden, out_width_);
    return prepare(lane, inputs, count, [&](Inputs& to, int64_t t) {
      kernels_.norm(row(begin + t), weight, layer_.hidden, layer_.eps, buffer);
      to.put(kernels_, t, 0, layer_.hidden, buffer);
    });
  }

  // hidden += linear(inputs), behind a norm of its own if the model has one.
  void add_to_hidden(Lane& lane, const Linear& linear, const Inputs& inputs, int64_t begin, int64_t count, const float* post_norm) {
    if (post_norm == nullptr) {
      multiply_into(kernels_, lane, linear, inputs, row(begin), stride_, true);
      lane.barrier();
      return;
    }
    multiply_into(kernels_, lane, linear, inputs, delta_, layer_.hidden, false);
    lane.barrier();
    add_normed(lane, delta_, begin, count, post_norm);
    lane.barrier();
  }

  void add_normed(Lane& lane, float* delta, int64_t begin, int64_t count, const float* weight) {
    const Span share = lane.share(count);
    for (int64_t t = share.begin; t < share.end; ++t) {
      float* x = delta + t * layer_.hidden;
      kernels_.norm(x, weight, layer_.hidden, layer_.eps, x);
      kernels_.add(row(begin + t), x, layer_.hidden);
    }
  }

  void attention(Lane& lane, int64_t begin, int64_t count, int which, AttentionWork& work) {
    const Inputs& inputs = normed(lane, qkv_in_[which], begin, count, layer_.attn_norm);
    multiply_into(kernels_, lane, layer_.qkv, inputs, qkv_, qkv_width_, false);
    lane.barrier();
    const Span heads = lane.share(count * layer_.heads.num_kv_heads);
    for (int64_t i = heads.begin; i < heads.end; ++i)
      rotate_and_write(begin, i / layer_.heads.num_kv_heads, static_cast<int>(i % layer_.heads.num_kv_heads));
    lane.barrier();
    work.work(kernels_, lane);
    lane.barrier();
    const Inputs& attended = prepare(lane, o_in_[which], count, [&](Inputs& to, int64_t t) {
      to.put(kernels_, t, 0, out_width_, attended_ + t * out_width_);
    });
    add_to_hidden(lane, layer_.o, attended, begin, count, layer_.attn_post_norm);
  }

  // One KV head of a token and the query heads that share it.
  void rotate_and_write(int64_t begin, int64_t t, int kv_head) {
    const Heads& heads = layer_.heads;
    const int dim = heads.head_dim, group = heads.group();
    float* q = qkv_ + t * qkv_width_ + static_cast<int64_t>(kv_head) * group * dim;
    float* k = qkv_ + t * qkv_width_ + static_cast<int64_t>(heads.num_heads + kv_head) * dim;
    const float* v = k + static_cast<int64_t>(heads.num_kv_heads) * dim;
    const int64_t position = plan_.positions[begin + t];
    const float* cos = layer_.cos + position * layer_.rotary_half;
    const float* sin = layer_.sin + position * layer_.rotary_half;
    for (int g = 0; g < group; ++g) {
      if (layer_.q_norm != nullptr) kernels_.norm(q + g * dim, layer_.q_norm, dim, layer_.eps, q + g * dim);
      kernels_.rotate(q + g * dim, cos, sin, layer_.rotary_half, layer_.interleaved);
    }
    if (layer_.k_norm != nullptr) kernels_.norm(k, layer_.k_norm, dim, layer_.eps, k);
    kernels_.rotate(k, cos, sin, layer_.rotary_half, layer_.interleaved);
    const int64_t slot = plan_.slots[begin + t];
    if (slot < 0) return;
    write_head(kernels_, cache_, cache_.k, slot, kv_head, k, dim);
    write_head(kernels_, cache_, cache_.v, slot, kv_head, v, dim);
  }

  void mlp(Lane& lane, int64_t begin, int64_t count, int which) {
    const Inputs& inputs = normed(lane, mlp_in_[which], begin, count, layer_.mlp_norm);
    const Matrix &gate = layer_.gate_up.parts[0], &up = layer_.gate_up.parts[1];
    const int64_t units = (gate.rows + kGatedUnit - 1) / kGatedUnit;
    gated_units(kernels_, layer_.act, gate, up, lane.share(units), inputs, inner_[which]);
    lane.barrier();
    add_to_hidden(lane, layer_.down, inner_[which], begin, count, layer_.mlp_post_norm);
  }

  void moe(Lane& lane, int64_t begin, int64_t count, size_t chunk) {
    const int64_t num_experts = layer_.router.rows, width = layer_.hidden;
    const int k = layer_.experts_per_token;
    const Span mine = lane.share(count);
    for (int64_t t = mine.begin; t < mine.end; ++t) {
      float* x = normed_ + t * width;
      kernels_.norm(row(begin + t), layer_.mlp_norm, width, layer_.eps, x);
      router_in_[chunk].put(kernels_, t, 0, width, x);
    }
    lane.barrier();
    multiply_into(kernels_, lane, layer_.router, router_in_[chunk], router_logits_, num_experts, false);
    lane.barrier();
    for (int64_t t = mine.begin; t < mine.end; ++t)
      route_row(kernels_, router_logits_ + t * num_experts, num_experts, k, layer_.norm_topk, ids_ + t * k, weights_ + t * k);
    lane.barrier();
    const bool post = layer_.mlp_post_norm != nullptr;
    experts_[chunk].run(lane, normed_, width, ids_, weights_, post ? expert_out_ : row(begin), post ? width : stride_, !post);
    if (!post) return;
    add_normed(lane, expert_out_, begin, count, layer_.mlp_post_norm);
    lane.barrier();
  }

  const Kernels& kernels_;
  const Layer& layer_;
  const Plan& plan_;
  const Cache& cache_;
  float* hidden_;
  int64_t stride_;
  int64_t qkv_width_;
  int64_t out_width_;
  int64_t tokens_ = 0;  // of a full chunk
  float* qkv_ = nullptr;
  float* attended_ = nullptr;
  float* delta_ = nullptr;
  float* lane_row_ = nullptr;
  std::vector<AttentionWork> attention_;
  std::vector<Inputs> qkv_in_[2], o_in_[2], mlp_in_[2];
  Inputs inner_[2];
  float* normed_ = nullptr;
  float* router_logits_ = nullptr;
  float* expert_out_ = nullptr;
  int32_t* ids_ = nullptr;
  float* weights_ = nullptr;
  std::vector<ExpertsWork> experts_;
  std::vector<Inputs> router_in_;
};

}  // namespace

void run_layer(const Layer& layer, const Plan& plan, const Cache& cache, float* hidden, int64_t stride) {
  if (plan.num_tokens == 0) return;
  LayerRun run(layer, plan, cache, hidden, stride);
  Pool::get().run([&run](Lane& lane) { run.run(lane); });
}

}  // namespace lamella::host
