#include "host/attention.h"

#include <algorithm>

namespace lamella::host {
namespace {

// Query rows (tokens times heads of a group) that share the loading of a tile.
constexpr int kQueryRows = 96;
// Items per lane below which decoding tokens are cut into spans.
constexpr int kEnoughItems = 4;

PagedHead head_of(const CacheSide& side, int head, bool half) {
  const int64_t offset = head * side.strides[1];
  PagedHead paged;
  paged.data = half ? static_cast<const void*>(static_cast<const uint16_t*>(side.data) + offset)
                    : static_cast<const void*>(static_cast<const float*>(side.data) + offset);
  paged.block_stride = side.strides[0];
  paged.slot_stride = side.strides[2];
  return paged;
}

}  // namespace

void write_head(const Kernels& kernels, const Cache& cache, const CacheSide& side, int64_t slot, int head, const float* x,
                int head_dim) {
  const int64_t block = slot >> cache.block_shift, place = slot & ((int64_t{1} << cache.block_shift) - 1);
  const int64_t offset = block * side.strides[0] + head * side.strides[1] + place * side.strides[2];
  if (cache.half) {
    kernels.to_half(x, head_dim, static_cast<uint16_t*>(side.data) + offset);
  } else {
    float* out = static_cast<float*>(side.data) + offset;
    for (int d = 0; d < head_dim; ++d) out[d] = x[d];
  }
}

int64_t AttentionWork::lane_floats(const Heads& heads, int64_t num_tokens) {
  const int64_t tokens = std::min<int64_t>(num_tokens, std::max(1, kQueryRows / heads.group()));
  return attention_scratch(tokens * heads.group(), heads.head_dim);
}

AttentionWork::AttentionWork(const Plan& plan, int64_t begin, int64_t end, const Heads& heads, const Cache& cache,
                             int num_lanes, Scratch& scratch, float* lane_scratch, const float* q, int64_t q_stride,
                             float* out, int64_t out_stride, float* lse, int64_t lse_stride)
    : plan_(plan), begin_(begin), heads_(heads), cache_(cache), q_(q), q_stride_(q_stride), out_(out),
      out_stride_(out_stride), lse_(lse), lse_stride_(lse_stride), lane_scratch_(lane_scratch),
      lane_floats_(lane_floats(heads, end - begin)) {
  const int group = heads.group();
  const int64_t most_tokens = std::max(1, kQueryRows / group);
  const int32_t* const first = std::upper_bound(plan.query_start, plan.query_start + plan.num_rows, begin) - 1;
  const int64_t first_row = std::max<int64_t>(0, first - plan.query_start);
  int64_t decoding = 0;
  for (int64_t row = first_row; row < plan.num_rows && plan.query_start[row] < end; ++row)
    decoding += heads.num_kv_heads;
  const bool few = decoding < static_cast<int64_t>(kEnoughItems) * num_lanes && num_lanes > 1;

  for (int64_t row = first_row; row < plan.num_rows && plan.query_start[row] < end; ++row) {
    const int64_t from = std::max<int64_t>(begin, plan.query_start[row]);
    const int64_t to = std::min<int64_t>(end, plan.query_start[row + 1]);
    for (int64_t token = from; token < to; token += most_tokens) {
      const int64_t tokens = std::min(most_tokens, to - token);
      const int64_t last = plan.seq_lens[row] - plan.query_start[row + 1] + token + tokens - 1;  // position
      const int64_t low = plan.window > 0 ? std::max<int64_t>(0, last - tokens + 1 - plan.window + 1) : 0;
      const int64_t first_span = low / kSpanKeys, spans = last / kSpanKeys - first_span + 1;
      const bool split = few && to - from == 1 && spans > 1;
      for (int head = 0; head < heads.num_kv_heads; ++head) {
        Item item{static_cast<int32_t>(row), static_cast<int32_t>(tokens), token, head, -1, -1, 0};
        if (!split) {
          item.cost = (last - low + 1) * (tokens * group + 8);
          items_.push_back(item);
          continue;
        }
        item.split = static_cast<int32_t>(splits_.size());
        Split part{first_span, static_cast<int32_t>(spans),
                   scratch.take<float>(spans * group * partial_floats(heads.head_dim)),
                   scratch.take<std::atomic<int32_t>>(1)};
        part.done->store(0, std::memory_order_relaxed);
        splits_.push_back(part);
        for (int64_t s = 0; s < spans; ++s) {
          item.span = static_cast<int32_t>(first_span + s);
          const int64_t keys = std::min(last + 1, (first_span + s + 1) * kSpanKeys) - std::max(low, (first_span + s) * kSpanKeys);
          item.cost = keys * (group + 8);
          items_.push_back(item);
        }
      }
    }
  }
  // the dearest first, so that the lanes finish together
  std::stable_sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
}

void AttentionWork::work(const Kernels& kernels, Lane& lane) {
  float* scratch = lane_scratch_ + lane.index() * lane_floats_;
  const int64_t count = static_cast<int64_t>(items_.size());
  for (int64_t i = lane.ticket(); i < count; i = lane.ticket()) one(kernels, items_[static_cast<size_t>(i)], scratch);
}

void AttentionWork::one(const Kernels& kernels, const Item& item, float* scratch) {
  const int group = heads_.group();
  AttentionTask task;
  task.tokens = item.tokens;
  task.group = group;
  task.head_dim = heads_.head_dim;
  task.position = plan_.seq_lens[item.row] - plan_.query_start[item.row + 1] + item.token;
  task.window = plan_.window;
  task.scale = heads_.scale;
  task.softcap = heads_.softcap;
  task.k = head_of(cache_.k, item.kv_head, cache_.half);
  task.v = head_of(cache_.v, item.kv_head, cache_.half);
  task.half = cache_.half;
  task.table = plan_.tables + item.row * plan_.table_stride;
  task.block_shift = cache_.block_shift;
  const int64_t head = static_cast<int64_t>(item.kv_head) * group, token = item.token - begin_;
  task.q = q_ + token * q_stride_ + head * heads_.head_dim;
  task.q_stride = q_stride_;
  task.out = out_ + token * out_stride_ + head * heads_.head_dim;
  task.out_stride = out_stride_;
  task.lse = lse_ != nullptr ? lse_ + token * lse_stride_ + head : nullptr;
  task.lse_stride = lse_stride_;
  task.scratch = scratch;
  if (item.split < 0) return kernels.attend(task);

  const Split& split = splits_[static_cast<size_t>(item.split)];
  const int64_t stride = partial_floats(heads_.head_dim);
  task.span = item.span;
  task.partial = split.partials + (item.span - split.first_span) * group * stride;
  kernels.attend(task);
  // whoever finishes the last span merges them all
  if (split.done->fetch_add(1, std::memory_order_acq_rel) + 1 < split.spans) return;
  for (int g = 0; g < group; ++g)
    kernels.merge(split.partials + g * stride, split.spans, group * stride, heads_.head_dim, task.out + g * heads_.head_dim,
                  task.lse != nullptr ? task.lse + g : nullptr);
}

}  // namespace lamella::host
