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

inline Floats load_element(const uint16_t* p) { return load_half(p); }
inline Floats load_element(const float* p) { return load(p); }

// Values that were converted into a tile [64][stride], and values where they lie in the cache.
struct TileValues {
  const float* data;
  int64_t stride;
  Floats at(int key, int64_t d) const { return load(data + key * stride + d); }
};
template <class Element>
struct CachedValues {
  const Element* const* slots;  // [64]
  Floats at(int key, int64_t d) const { return load_element(slots[key] + d); }
};

// kRows rows of probabilities times dimensions d .. d + 16 kVecs - 1 of the values of keys [begin, end).
template <int kRows, int kVecs, class Source>
void values(const float* p, int begin, int end, Source source, int64_t d, float* out, int64_t out_stride) {
  Floats total[kRows * kVecs];
  LAMELLA_UNROLL
  for (int i = 0; i < kRows * kVecs; ++i) total[i] = load(out + i / kVecs * out_stride + i % kVecs * 16);
  for (int key = begin; key < end; ++key) {
    Floats x[kVecs];
    LAMELLA_UNROLL
    for (int i = 0; i < kVecs; ++i) x[i] = source.at(key, d + 16 * i);
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

template <int kRows, class Source>
void values_rows(int64_t dim, const float* p, int begin, int end, Source source, float* out) {
  int64_t d = 0;
  for (; d + 16 * kTileVecs <= dim; d += 16 * kTileVecs)
    values<kRows, kTileVecs>(p, begin, end, source, d, out + d, dim);
  if constexpr (kTileVecs > 1)
    for (; d < dim; d += 16) values<kRows, 1>(p, begin, end, source, d, out + d, dim);
}

// The instance for `rows` <= kRows rows.
template <int kRows>
inline void scores_of(int rows, int vecs, const float* q, int64_t q_stride, const float* keys, int64_t dim, float* out) {
  if (rows == kRows) return scores_rows<kRows>(vecs, q, q_stride, keys, dim, out);
  if constexpr (kRows > 1) scores_of<kRows - 1>(rows, vecs, q, q_stride, keys, dim, out);
}

template <int kRows, class Source>
inline void values_of(int rows, int64_t dim, const float* p, int begin, int end, Source source, float* out) {
  if (rows == kRows) return values_rows<kRows>(dim, p, begin, end, source, out);
  if constexpr (kRows > 1) values_of<kRows - 1>(rows, dim, p, begin, end, source, out);
}

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

// Where the keys or values of positions [base + begin, base + end) lie; slots[i] belongs to base + i.
template <class Element>
inline void find_slots(const PagedHead& head, const AttentionTask& task, int64_t base, int begin, int end,
                       const Element* slots[kKeys]) {
  const int block_size = 1 << task.block_shift;
  for (int key = begin; key < end;) {
    const Element* slot = slot_of<Element>(head, task, base + key);
    const int stop = static_cast<int>(((base + key) | (block_size - 1)) + 1 - base);
    for (; key < stop && key < end; ++key, slot += head.slot_stride) slots[key] = slot;
  }
}

// Keys [begin, end) of a tile as out[dim][64], transposed by vectors of 16. Lanes of a vector without a key in range get
// another one's; their scores are masked.
// Asks for the lines of the next tile's keys and values meanwhile; null: there is none.
template <class Element>
void load_keys(const Element* const slots[kKeys], int begin, int end, int64_t head_dim, float* out,
               const Element* const next_keys[kKeys], const Element* const next_values[kKeys], int next_end) {
  constexpr int64_t line = 64 / sizeof(Element);
  for (int first = begin / 16 * 16; first < end; first += 16) {
    for (int key = first; key < first + 16 && key < next_end; ++key)
      for (int64_t d = 0; d < head_dim; d += line) {
        prefetch(next_keys[key] + d);
        prefetch(next_values[key] + d);
      }
    const Element* from[16];
    for (int i = 0; i < 16; ++i) from[i] = slots[first + i < begin ? begin : first + i >= end ? end - 1 : first + i];
    int64_t d = 0;
    for (; d + 16 <= head_dim; d += 16) {
      Floats rows[16];
      LAMELLA_UNROLL
      for (int i = 0; i < 16; ++i) rows[i] = load_element(from[i] + d);
      transpose(rows);
      LAMELLA_UNROLL
      for (int i = 0; i < 16; ++i) store(out + (d + i) * kKeys + first, rows[i]);
    }
    if (d < head_dim) {
      const int n = static_cast<int>(head_dim - d);
      Floats rows[16];
      for (int i = 0; i < 16; ++i) rows[i] = load_elements(from[i] + d, n);
      transpose(rows);
      for (int i = 0; i < n; ++i) store(out + (d + i) * kKeys + first, rows[i]);
    }
  }
}

// Values [begin, end) of a tile as out[64][dim].
template <class Element>
void load_values(const Element* const slots[kKeys], int begin, int end, int64_t head_dim, int64_t dim, float* out) {
  for (int key = begin; key < end; ++key)
    each_vector(head_dim, [&](int64_t d, int n) { store(out + key * dim + d, load_elements(slots[key] + d, n)); });
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

// Scores of `rows` rows in w.scores to probabilities; keys outside [begin, end) of the tile count nothing. In passes over
// the rows, whose iterations do not wait for each other.
inline void soften(const AttentionTask& task, int rows, int64_t first_row, int begin, int end, int64_t dim, Workspace& w) {
  const int first_vec = begin / 16, end_vec = (end + 15) / 16;
  const bool partial = begin % 16 != 0 || end % 16 != 0;
  const auto keep_seen = [begin, end](Floats x, int v, float other) {
    return keep(x, begin > 16 * v ? begin - 16 * v : 0, end < 16 * v + 16 ? end - 16 * v : 16, other);
  };
  if (task.softcap > 0.0f) {
    const Floats inverse = splat(1.0f / task.softcap), factor = splat(task.softcap * kLog2e);
    for (int r = 0; r < rows; ++r)
      for (int v = first_vec; v < end_vec; ++v) {
        float* s = w.scores + r * kKeys + 16 * v;
        store(s, mul(tanh(mul(load(s), inverse)), factor));
      }
  }
  float here[kTileRows], shift[kTileRows];
  for (int r = 0; r < rows; ++r) {
    Floats most = splat(kNone);
    for (int v = first_vec; v < end_vec; ++v) {
      float* s = w.scores + r * kKeys + 16 * v;
      Floats x = load(s);
      if (partial) {
        x = keep_seen(x, v, kNone);
        store(s, x);
      }
      most = max(x, most);
    }
    here[r] = largest(most);
  }
  for (int r = 0; r < rows; ++r) {
    const int64_t row = first_row + r;
    const float before = w.span.most[row], after = here[r] > before ? here[r] : before;
    shift[r] = after == kNone ? 0.0f : after;
    if (after == before) continue;
    const Floats shrink = exp2(splat(before - shift[r]));
    float *sums = w.span.sums + 16 * row, *out = w.span.out + row * dim;
    store(sums, mul(load(sums), shrink));
    for (int64_t d = 0; d < dim; d += 16) store(out + d, mul(load(out + d), shrink));
    w.span.most[row] = after;
  }
  for (int r = 0; r < rows; ++r) {
    float* sums = w.span.sums + 16 * (first_row + r);
    Floats total = load(sums);
    const Floats minus = splat(shift[r]);
    for (int v = first_vec; v < end_vec; ++v) {
      float* s = w.scores + r * kKeys + 16 * v;
      const Floats p = exp2(sub(load(s), minus));  // 0 where masked
      store(s, p);
      total = add(total, p);
    }
    store(sums, total);
  }
}

// One run of rows [first_row, end_row) that all see keys [begin, end) of the tile.
template <class Source>
inline void run_of_rows(const AttentionTask& task, int64_t first_row, int64_t end_row, int begin, int end, int64_t dim,
                        Workspace& w, Source source) {
  const int first_vec = begin / 16, vecs = (end + 15) / 16 - first_vec;
  for (int64_t row = first_row; row < end_row; row += kTileRows) {
    const int rows = end_row - row < kTileRows ? static_cast<int>(end_row - row) : kTileRows;
    scores_of<kTileRows>(rows, vecs, w.q + row * task.head_dim, task.head_dim, w.keys + 16 * first_vec, task.head_dim,
                         w.scores + 16 * first_vec);
    soften(task, rows, row, begin, end, dim, w);
    values_of<kTileRows>(rows, dim, w.scores, begin, end, source, w.span.out + row * dim);
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
  const Floats scale = splat(task.softcap > 0.0f ? task.scale : task.scale * kLog2e);
  for (int token = 0, row = 0; token < task.tokens; ++token)
    for (int head = 0; head < task.group; ++head, ++row) {
      const float* q = task.q + token * task.q_stride + static_cast<int64_t>(head) * task.head_dim;
      each_vector(task.head_dim, [&](int64_t d, int n) {
        store_some(w.q + row * static_cast<int64_t>(task.head_dim) + d, mul(load_some(q + d, n), scale), n);
      });
    }
  // few rows read the values where they lie
  const bool few = rows <= kTileRows && task.head_dim == dim;
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
  const bool one_span = task.partial == nullptr && low / kSpanKeys == (high - 1) / kSpanKeys;
  if (!one_span)
    for (int64_t row = 0; row < rows; ++row) {
      w.total_most[row] = kNone;
      w.total_sum[row] = 0.0f;
      for (int64_t d = 0; d < dim; d += 16) store(w.total_out + row * dim + d, splat(0.0f));
    }
  const Element* slots[2][2][kKeys];  // this tile's and the next one's keys and values, in turn
  int turn = 0;
  bool found = false;
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
      const Element** const key_slots = slots[turn][0];
      const Element** const value_slots = slots[turn][1];
      if (!found) {
        find_slots(task.k, task, base, from, to, key_slots);
        find_slots(task.v, task, base, from, to, value_slots);
      }
      turn ^= 1;
      const int64_t beyond = base + kTileKeys;
      const int next_end = high - beyond < kTileKeys ? static_cast<int>(high > beyond ? high - beyond : 0) : kKeys;
      found = next_end > 0;
      find_slots(task.k, task, beyond, 0, next_end, slots[turn][0]);
      find_slots(task.v, task, beyond, 0, next_end, slots[turn][1]);
      load_keys(key_slots, from, to, task.head_dim, w.keys, slots[turn][0], slots[turn][1], next_end);
      if (!few) load_values(value_slots, from, to, task.head_dim, dim, w.values);
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
        const int64_t first_row = static_cast<int64_t>(token) * task.group, end_row = static_cast<int64_t>(next) * task.group;
        if (begin < end) {
          if (few)
            run_of_rows(task, first_row, end_row, begin, end, dim, w, CachedValues<Element>{value_slots});
          else
            run_of_rows(task, first_row, end_row, begin, end, dim, w, TileValues{w.values, dim});
        }
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
      } else if (one_span) {
        w.total_sum[row] = span_sum;  // merging into nothing changes nothing
      } else {
        merge_span(w.span.most[row], span_sum, out, dim, w.total_most[row], w.total_sum[row], w.total_out + row * dim);
      }
    }
  }
  if (task.partial != nullptr) return;
  const float* most = one_span ? w.span.most : w.total_most;
  const float* out = one_span ? w.span.out : w.total_out;
  for (int token = 0, row = 0; token < task.tokens; ++token)
    for (int head = 0; head < task.group; ++head, ++row)
      finish_row(most[row], w.total_sum[row], out + row * dim, task.head_dim,
                 task.out + token * task.out_stride + static_cast<int64_t>(head) * task.head_dim,
                 task.lse != nullptr ? task.lse + token * task.lse_stride + head : nullptr);
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
