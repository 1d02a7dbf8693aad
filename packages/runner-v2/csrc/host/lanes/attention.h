// Attention over the paged cache with an online softmax in base 2.
//
//     keys        |<------- span 256 ------->|<------- span 256 -->   aligned at absolute positions
//     tiles       |  64  |  64  |  64  |  64 |  64  | ...
//     query rows  token 0: head 0 .. group - 1, token 1: head 0 ...   each sees [max(0, p - window + 1), p]
//
// A tile's keys are transposed, so that a lane is a key and a score is one chain of multiply-adds over the head's
// dimensions; an output is one chain over the keys in order. Rows that see the same part of a tile are computed together
// (a run), which changes neither chain.
#pragma once

#include "host/kernels.h"
#include "host/lanes/rows.h"
#include "host/lanes/simd.h"

namespace lamella::host {
namespace {

constexpr int kKeys = static_cast<int>(kTileKeys);
constexpr int kKeyVecs = kKeys / 16;
constexpr float kNone = -__builtin_inff();

// kRows query rows times kVecs vectors of 16 keys.
template <int kRows, int kVecs>
void scores(const float* q, int64_t q_stride, const float* keys, int64_t dim, float* out) {
  Floats total[kRows * kVecs];
  LAMELLA_UNROLL
  for (int i = 0; i < kRows * kVecs; ++i) total[i] = splat(0.0f);
  for (int64_t d = 0; d < dim; ++d, keys += kKeys, ++q) {
    Floats k[kVecs];
    LAMELLA_UNROLL
    for (int v = 0; v < kVecs; ++v) k[v] = load(keys + 16 * v);
    LAMELLA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Floats x = splat(q[r * q_stride]);
      LAMELLA_UNROLL
      for (int v = 0; v < kVecs; ++v) total[r * kVecs + v] = fma(x, k[v], total[r * kVecs + v]);
    }
  }
  LAMELLA_UNROLL
  for (int i = 0; i < kRows * kVecs; ++i) store(out + i / kVecs * kKeys + i % kVecs * 16, total[i]);
}

// kRows rows of probabilities times kVecs vectors of the values of keys [begin, end).
template <int kRows, int kVecs>
void values(const float* p, int begin, int end, const float* v, int64_t v_stride, float* out, int64_t out_stride) {
  Floats total[kRows * kVecs];
  LAMELLA_UNROLL
  for (int i = 0; i < kRows * kVecs; ++i) total[i] = load(out + i / kVecs * out_stride + i % kVecs * 16);
  for (int key = begin; key < end; ++key) {
    Floats x[kVecs];
    LAMELLA_UNROLL
    for (int i = 0; i < kVecs; ++i) x[i] = load(v + key * v_stride + 16 * i);
    LAMELLA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Floats weight = splat(p[r * kKeys + key]);
      LAMELLA_UNROLL
      for (int i = 0; i < kVecs; ++i) total[r * kVecs + i] = fma(weight, x[i], total[r * kVecs + i]);
    }
  }
  LAMELLA_UNROLL
  for (int i = 0; i < kRows * kVecs; ++i) store(out + i / kVecs * out_stride + i % kVecs * 16, total[i]);
}

template <int kRows>
void scores_rows(int vecs, const float* q, int64_t q_stride, const float* keys, int64_t dim, float* out) {
  for (; vecs >= kTileVecs; vecs -= kTileVecs, keys += 16 * kTileVecs, out += 16 * kTileVecs)
    scores<kRows, kTileVecs>(q, q_stride, keys, dim, out);
  if constexpr (kTileVecs > 1)
    for (; vecs > 0; --vecs, keys += 16, out += 16) scores<kRows, 1>(q, q_stride, keys, dim, out);
}

template <int kRows>
void values_rows(int64_t dim, const float* p, int begin, int end, const float* v, float* out) {
  int64_t d = 0;
  for (; d + 16 * kTileVecs <= dim; d += 16 * kTileVecs) values<kRows, kTileVecs>(p, begin, end, v + d, dim, out + d, dim);
  if constexpr (kTileVecs > 1)
    for (; d < dim; d += 16) values<kRows, 1>(p, begin, end, v + d, dim, out + d, dim);
}

// The instance for `rows` <= kRows rows.
template <int kRows>
inline void scores_of(int rows, int vecs, const float* q, int64_t q_stride, const float* keys, int64_t dim, float* out) {
  if (rows == kRows) return scores_rows<kRows>(vecs, q, q_stride, keys, dim, out);
  if constexpr (kRows > 1) scores_of<kRows - 1>(rows, vecs, q, q_stride, keys, dim, out);
}

template <int kRows>
inline void values_of(int rows, int64_t dim, const float* p, int begin, int end, const float* v, float* out) {
  if (rows == kRows) return values_rows<kRows>(dim, p, begin, end, v, out);
  if constexpr (kRows > 1) values_of<kRows - 1>(rows, dim, p, begin, end, v, out);
}

inline Floats load_element(const uint16_t* p) { return load_half(p); }
inline Floats load_element(const float* p) { return load(p); }

template <class Element>
inline Floats load_elements(const Element* p, int n) {
  if (n == 16) return load_element(p);
  Element some[16] = {};
  for (int i = 0; i < n; ++i) some[i] = p[i];
  return load_element(some);
}

template <class Element>
inline const Element* slot_of(const PagedHead& head, const AttentionTask& task, int64_t position) {
  const int64_t block = task.table[position >> task.block_shift];
  const int64_t slot = position & ((int64_t{1} << task.block_shift) - 1);
  return static_cast<const Element*>(head.data) + block * head.block_stride + slot * head.slot_stride;
}

// Keys of positions [base + begin, base + end) as out[dim][64], transposed by vectors of 16.
template <class Element>
void load_keys(const AttentionTask& task, int64_t base, int begin, int end, float* out) {
  for (int first = begin / 16 * 16; first < end; first += 16) {
    const Element* slots[16];
    for (int i = 0; i < 16; ++i) {
      // a lane without a key in range repeats one that has; its scores are masked
      const int key = first + i < begin ? begin : first + i >= end ? end - 1 : first + i;
      slots[i] = slot_of<Element>(task.k, task, base + key);
    }
    for (int64_t d = 0; d < task.head_dim; d += 16) {
      const int n = task.head_dim - d < 16 ? static_cast<int>(task.head_dim - d) : 16;
      Floats rows[16];
      for (int i = 0; i < 16; ++i) rows[i] = load_elements(slots[i] + d, n);
      transpose(rows);
      for (int i = 0; i < n; ++i) store(out + (d + i) * kKeys + first, rows[i]);
    }
  }
}

template <class Element>
void load_values(const AttentionTask& task, int64_t base, int begin, int end, int64_t dim, float* out) {
  for (int key = begin; key < end; ++key) {
    const Element* slot = slot_of<Element>(task.v, task, base + key);
    each_vector(task.head_dim, [&](int64_t d, int n) { store(out + key * dim + d, load_elements(slot + d, n)); });
  }
}

// Running softmax of the query rows: sums stay spread over the lanes until the span ends.
struct Running {
  float* most;   // [rows] in units of log2
  float* sums;   // [rows][16]
  float* out;    // [rows][dim], not yet divided
};

struct Workspace {
  float* keys;
  float* values;
  float* q;       // [rows][head_dim], scaled
  float* scores;  // [kTileRows][64]
  Running span;
  float* total_most;  // [rows]
  float* total_sum;   // [rows]
  float* total_out;   // [rows][dim]
};

inline Workspace workspace(const AttentionTask& task, int64_t rows, int64_t dim) {
  Workspace w;
  float* p = task.scratch;
  const auto take = [&p](int64_t n) {
    float* taken = p;
    p += n;
    return taken;
  };
  w.keys = take(kTileKeys * dim);
  w.values = take(kTileKeys * dim);
  w.scores = take(8 * kTileKeys);
  w.span.sums = take(rows * 16);
  w.span.out = take(rows * dim);
  w.total_out = take(rows * dim);
  w.q = take(rows * dim);
  w.span.most = take(rows);
  w.total_most = take(rows);
  w.total_sum = take(rows);
  return w;
}

inline float exp2_of(float x) {
  float lanes[16];
  store(lanes, exp2(splat(x)));
  return lanes[0];
}

// Scores of `rows` rows in w.scores to probabilities; keys outside [begin, end) of the tile count nothing.
inline void soften(const AttentionTask& task, int rows, int64_t first_row, int begin, int end, int64_t dim, Workspace& w) {
  for (int r = 0; r < rows; ++r) {
    float* s = w.scores + r * kKeys;
    const int64_t row = first_row + r;
    Floats most = splat(kNone);
    for (int v = begin / 16; v < (end + 15) / 16; ++v) {
      Floats x = load(s + 16 * v);
      if (task.softcap > 0.0f)
        x = mul(tanh(mul(x, splat(1.0f / task.softcap))), splat(task.softcap * kLog2e));
      if (16 * v < begin || 16 * v + 16 > end)
        x = keep(x, begin > 16 * v ? begin - 16 * v : 0, end < 16 * v + 16 ? end - 16 * v : 16, kNone);
      store(s + 16 * v, x);
      most = max(x, most);
    }
    const float before = w.span.most[row], here = largest(most);
    const float after = here > before ? here : before;
    const float shift = after == kNone ? 0.0f : after;
    Floats sums = load(w.span.sums + 16 * row);
    if (after != before) {
      const Floats shrink = exp2(splat(before - shift));
      sums = mul(sums, shrink);
      float* out = w.span.out + row * dim;
      for (int64_t d = 0; d < dim; d += 16) store(out + d, mul(load(out + d), shrink));
      w.span.most[row] = after;
    }
    for (int v = begin / 16; v < (end + 15) / 16; ++v) {
      const Floats x = load(s + 16 * v);
      Floats p = exp2(sub(x, splat(shift)));
      if (16 * v < begin || 16 * v + 16 > end)
        p = keep(p, begin > 16 * v ? begin - 16 * v : 0, end < 16 * v + 16 ? end - 16 * v : 16, 0.0f);
      store(s + 16 * v, p);
      sums = add(sums, p);
    }
    store(w.span.sums + 16 * row, sums);
  }
}

// One run of rows [first_row, end_row) that all see keys [begin, end) of the tile.
inline void run_of_rows(const AttentionTask& task, int64_t first_row, int64_t end_row, int begin, int end, int64_t dim,
                        Workspace& w) {
  const int first_vec = begin / 16, vecs = (end + 15) / 16 - first_vec;
  for (int64_t row = first_row; row < end_row; row += kTileRows) {
    const int rows = end_row - row < kTileRows ? static_cast<int>(end_row - row) : kTileRows;
    scores_of<kTileRows>(rows, vecs, w.q + row * task.head_dim, task.head_dim, w.keys + 16 * first_vec, task.head_dim,
                         w.scores + 16 * first_vec);
    soften(task, rows, row, begin, end, dim, w);
    values_of<kTileRows>(rows, dim, w.scores, begin, end, w.values, w.span.out + row * dim);
  }
}

// Adds a finished span to the total of one row.
inline void merge_span(float most, float sum_, const float* out, int64_t dim, float& total_most, float& total_sum,
                       float* total_out) {
  const float after = most > total_most ? most : total_most;
  const float shift = after == kNone ? 0.0f : after;
  const float old_factor = exp2_of(total_most - shift), new_factor = exp2_of(most - shift);
  total_sum = total_sum * old_factor + sum_ * new_factor;
  for (int64_t d = 0; d < dim; d += 16)
    store(total_out + d, add(mul(load(total_out + d), splat(old_factor)), mul(load(out + d), splat(new_factor))));
  total_most = after;
}

// A row that sees nothing gives 0 and -inf; NaN stays NaN.
inline void finish_row(float most, float sum_, const float* total, int64_t head_dim, float* out, float* lse) {
  const Floats factor = splat(sum_ == 0.0f ? 0.0f : 1.0f / sum_);
  each_vector(head_dim, [&](int64_t d, int n) { store_some(out + d, mul(load(total + d), factor), n); });
  if (lse != nullptr) *lse = sum_ == 0.0f ? kNone : (most + __builtin_log2f(sum_)) * 0.69314718055994531f;
}

template <class Element>
void attend_elements(const AttentionTask& task) {
  const int64_t dim = padded_dim(task.head_dim), rows = static_cast<int64_t>(task.tokens) * task.group;
  Workspace w = workspace(task, rows, dim);
  const float scale = task.softcap > 0.0f ? task.scale : task.scale * kLog2e;
  for (int64_t row = 0; row < rows; ++row) {
    const float* q = task.q + row / task.group * task.q_stride + row % task.group * task.head_dim;
    for (int64_t d = 0; d < task.head_dim; ++d) w.q[row * task.head_dim + d] = q[d] * scale;
    w.total_most[row] = kNone;
    w.total_sum[row] = 0.0f;
    for (int64_t d = 0; d < dim; d += 16) store(w.total_out + row * dim + d, splat(0.0f));
  }
  if (task.head_dim != dim)
    for (int64_t i = 0; i < kTileKeys * dim; ++i) w.values[i] = 0.0f;

  const auto first_key = [&task](int64_t position) {
    return task.window > 0 && position >= task.window ? position - task.window + 1 : 0;
  };
  const int64_t last = task.position + task.tokens - 1;
  int64_t low = first_key(task.position), high = last + 1;  // keys that any row sees
  if (task.span >= 0) {
    low = low > task.span * kSpanKeys ? low : task.span * kSpanKeys;
    high = high < (task.span + 1) * kSpanKeys ? high : (task.span + 1) * kSpanKeys;
  }
  for (int64_t span = low / kSpanKeys; span * kSpanKeys < high; ++span) {
    for (int64_t row = 0; row < rows; ++row) {
      w.span.most[row] = kNone;
      store(w.span.sums + 16 * row, splat(0.0f));
      for (int64_t d = 0; d < dim; d += 16) store(w.span.out + row * dim + d, splat(0.0f));
    }
    for (int64_t base = span * kSpanKeys; base < (span + 1) * kSpanKeys && base < high; base += kTileKeys) {
      const int from = low > base ? static_cast<int>(low - base < kTileKeys ? low - base : kTileKeys) : 0;
      const int to = high - base < kTileKeys ? static_cast<int>(high - base) : kKeys;
      if (from >= to) continue;
      load_keys<Element>(task, base, from, to, w.keys);
      load_values<Element>(task, base, from, to, dim, w.values);
      const auto sees = [&](int token, int& begin, int& end) {
        const int64_t position = task.position + token, first = first_key(position) - base, stop = position + 1 - base;
        begin = first > from ? static_cast<int>(first < to ? first : to) : from;
        end = stop < to ? static_cast<int>(stop > from ? stop : from) : to;
      };
      for (int token = 0; token < task.tokens;) {
        int begin, end;
        sees(token, begin, end);
        int next = token + 1;
        for (; next < task.tokens; ++next) {
          int other_begin, other_end;
          sees(next, other_begin, other_end);
          if (other_begin != begin || other_end != end) break;
        }
        if (begin < end)
          run_of_rows(task, static_cast<int64_t>(token) * task.group, static_cast<int64_t>(next) * task.group, begin, end,
                      dim, w);
        token = next;
      }
    }
    for (int64_t row = 0; row < rows; ++row) {
      const float span_sum = sum(load(w.span.sums + 16 * row));
      const float* out = w.span.out + row * dim;
      if (task.partial != nullptr) {
        float* partial = task.partial + row * partial_floats(task.head_dim);
        for (int64_t d = 0; d < dim; d += 16) store(partial + d, load(out + d));
        partial[dim] = w.span.most[row];
        partial[dim + 1] = span_sum;
      } else {
        merge_span(w.span.most[row], span_sum, out, dim, w.total_most[row], w.total_sum[row], w.total_out + row * dim);
      }
    }
  }
  if (task.partial != nullptr) return;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t token = row / task.group, head = row % task.group;
    finish_row(w.total_most[row], w.total_sum[row], w.total_out + row * dim, task.head_dim,
               task.out + token * task.out_stride + head * task.head_dim,
               task.lse != nullptr ? task.lse + token * task.lse_stride + head : nullptr);
  }
}

void attend(const AttentionTask& task) {
  if (task.half)
    attend_elements<uint16_t>(task);
  else
    attend_elements<float>(task);
}

void merge(const float* partials, int64_t spans, int64_t stride, int64_t head_dim, float* out, float* lse) {
  const int64_t dim = padded_dim(head_dim);
  float most = kNone, total = 0.0f;
  float sums[1024];
  for (int64_t d = 0; d < dim; d += 16) store(sums + d, splat(0.0f));
  for (int64_t s = 0; s < spans; ++s, partials += stride)
    merge_span(partials[dim], partials[dim + 1], partials, dim, most, total, sums);
  finish_row(most, total, sums, head_dim, out, lse);
}

}  // namespace
}  // namespace lamella::host
