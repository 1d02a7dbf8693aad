// The inner loops of sampling, compiled once for each instruction set like table.cpp. The header of the set defines
//
//   kWidth                        floats per vector
//   Vec                           that many floats, with + - *
//   load, spread, larger          memory, one number everywhere, maximum
//   from(a, b), unordered(a, b)   bit masks of a >= b, of NaN in either
//   rounded, floored              to nearest even, down (of numbers >= 0)
//   power(n, bias)                2^(n + bias - 127) of integral n
//   smaller, highest, least       minimum; the largest, the least float of one vector
//   Sum, add(sum, v), add_where(sum, v, mask), total   exact sums of integral floats in float64
//   store, compress               vectors to memory; the marked floats and their ids to memory, returns their number
//   below(noise, first, ids, wanted, limit)   bit mask of those among the wanted tokens whose word is <= limit;
//                                 ids null: the tokens first, first + 1, ..
//
// Everything is in an unnamed namespace and nothing of the standard library is used, as simd.h explains.
#include "host/sampling_lanes.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "host/lanes/sampling_avx512.h"
#elif defined(__AVX2__)
#include "host/lanes/sampling_avx2.h"
#else
#include "host/lanes/sampling_plain.h"
#endif

namespace lamella::host::sampling {
namespace {

// Chunk c of a row; the last one is filled up with -inf in `tail`.
inline const float* chunk_of(const float* x, int32_t vocab_size, int32_t c, float* tail) {
  const int32_t begin = c * kChunk;
  if (begin + kChunk <= vocab_size) return x + begin;
  for (int32_t i = 0; i < kChunk; ++i) tail[i] = begin + i < vocab_size ? x[begin + i] : -__builtin_inff();
  return tail;
}

inline Vec mass_of(Vec x, const Mass& mass) {
  const Vec d = larger((x - spread(mass.top)) * spread(mass.inverse), spread(mass.clamp));
  const Vec n = rounded(d * spread(1.4426950408889634f));
  const Vec r = (d - n * spread(0.693359375f)) - n * spread(-2.12194440e-4f);
  Vec value = spread(1.0f / 720.0f);
  value = value * r + spread(1.0f / 120.0f);
  value = value * r + spread(1.0f / 24.0f);
  value = value * r + spread(1.0f / 6.0f);
  value = value * r + spread(0.5f);
  value = value * r + spread(1.0f);
  value = value * r + spread(1.0f);
  return floored(value * power(n, mass.bits + 127));
}

bool scan(const float* x, int32_t vocab_size, float* chunk_tops, float* top) {
  alignas(64) float tail[kChunk];
  float best = -__builtin_inff();
  uint32_t nan = 0;
  const int32_t count = num_chunks(vocab_size);
  for (int32_t c = 0; c < count; ++c) {
    const float* p = chunk_of(x, vocab_size, c, tail);
    Vec a = load(p), b = load(p + kWidth);
    nan |= unordered(a, b);
    for (int32_t i = 2 * kWidth; i < kChunk; i += 2 * kWidth) {
      const Vec u = load(p + i), v = load(p + i + kWidth);
      nan |= unordered(u, v);
      a = larger(a, u);
      b = larger(b, v);
    }
    const float here = highest(larger(a, b));
    chunk_tops[c] = here;
    best = here > best ? here : best;
  }
  *top = best;
  return nan != 0;
}

double mass_sum(const float* x, int32_t vocab_size, const float* chunk_tops, const Mass& mass) {
  alignas(64) float tail[kChunk];
  Sum sum{};
  const int32_t count = num_chunks(vocab_size);
  for (int32_t c = 0; c < count; ++c) {
    if (massless(mass, chunk_tops[c])) continue;
    const float* p = chunk_of(x, vocab_size, c, tail);
    for (int32_t i = 0; i < kChunk; i += kWidth) add(sum, mass_of(load(p + i), mass));
  }
  return total(sum);
}

void masses(const float* values, int32_t n, const Mass& mass, float* out) {
  int32_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(out + i, mass_of(load(values + i), mass));
  if (i == n) return;
  alignas(64) float rest[kWidth];
  for (int32_t j = 0; j < kWidth; ++j) rest[j] = i + j < n ? values[i + j] : mass.top;
  store(rest, mass_of(load(rest), mass));
  for (int32_t j = 0; i + j < n; ++j) out[i + j] = rest[j];
}

int32_t collect(const float* x, int32_t n, const float* chunk_tops, float low, float high, float* values,
                       int32_t* places) {
  alignas(64) float tail[kChunk];
  const Vec bottom = spread(low), top = spread(high);
  int32_t found = 0;
  const int32_t count = num_chunks(n);
  for (int32_t c = 0; c < count; ++c) {
    if (chunk_tops != nullptr && !(chunk_tops[c] >= low)) continue;
    const float* p = chunk_of(x, n, c, tail);
    for (int32_t i = 0; i < kChunk; i += kWidth) {
      const Vec v = load(p + i);
      const uint32_t marked = from(v, bottom) & ~from(v, top);
      if (marked) found += compress(v, c * kChunk + i, marked, values + found, places + found);
    }
  }
  return found;
}

int32_t count_from(const float* x, int32_t n, float value) {
  const Vec low = spread(value);
  int32_t found = 0, i = 0;
  for (; i + kWidth <= n; i += kWidth) found += __builtin_popcount(from(load(x + i), low));
  for (; i < n; ++i) found += x[i] >= value;
  return found;
}

double mass_from(const float* x, const float* masses, int32_t n, float value, int32_t* count) {
  const Vec low = spread(value);
  Sum sum{};
  int32_t found = 0, i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    const uint32_t marked = from(load(x + i), low);
    found += __builtin_popcount(marked);
    add_where(sum, load(masses + i), marked);
  }
  double all = total(sum);
  for (; i < n; ++i) {
    found += x[i] >= value;
    all += x[i] >= value ? static_cast<double>(masses[i]) : 0.0;
  }
  *count = found;
  return all;
}

float lowest(const float* x, int32_t n) {
  Vec all = spread(__builtin_inff());
  int32_t i = 0;
  for (; i + kWidth <= n; i += kWidth) all = smaller(all, load(x + i));
  float best = least(all);
  for (; i < n; ++i) best = x[i] < best ? x[i] : best;
  return best;
}

// A token can win only if its noise is at least g = winner.score - x / T. Noise >= g needs u <= 1 - exp(-exp(-g)) <=
// exp(-g), so only words up to 2^32 · exp(-g) matter; the next power of two, for the largest x of a chunk, bounds them
// all. So the logarithms are worked out for a handful of tokens, and most chunks of a peaked row draw no words.
void search(const float* x, const int32_t* ids, int32_t n, const float* chunk_tops, const Cut& cut,
                   double temperature, const Noise& noise, Winner& winner) {
  alignas(64) float tail[kChunk];
  alignas(64) int32_t padded[kWidth];
  const Vec low = spread(cut.value);
  const int32_t count = num_chunks(n);
  for (int32_t c = 0; c < count; ++c) {
    if (!(chunk_tops[c] >= cut.value)) continue;
    const double lead = static_cast<double>(chunk_tops[c]) / temperature - winner.score;
    const double log2_words = lead * 1.4426950408889634 + 32.0;
    if (log2_words < -1.001) continue;  // the smallest u is 2^-33
    const uint32_t limit = log2_words >= 30.999 ? 0xFFFFFFFFu
                           : log2_words <= 0.0 ? 1u
                                               : 1u << (static_cast<int32_t>(log2_words + 1e-6) + 1);
    const float* p = chunk_of(x, n, c, tail);
    for (int32_t i = 0; i < kChunk; i += kWidth) {
      const int32_t first = c * kChunk + i;
      uint32_t marked = from(load(p + i), low);
      if (!marked) continue;
      const int32_t* some = nullptr;  // ids of these tokens where they do not follow one another
      if (ids != nullptr) {
        some = ids + first;
        if (first + kWidth > n) {
          for (int32_t j = 0; j < kWidth; ++j) padded[j] = first + j < n ? ids[first + j] : 0;
          some = padded;
        }
      }
      marked = below(noise, first, some, marked, limit);
      for (; marked; marked &= marked - 1) {
        const int32_t lane = __builtin_ctz(marked);
        const int32_t id = some != nullptr ? some[lane] : first + lane;
        if (p[i + lane] == cut.value && id > cut.last_tie) continue;
        const double score = static_cast<double>(p[i + lane]) / temperature + gumbel(word_of(noise, id));
        if (score > winner.score || (score == winner.score && id < winner.id)) winner = {id, score};
      }
    }
  }
}

}  // namespace

extern const Lanes LAMELLA_KERNELS;
const Lanes LAMELLA_KERNELS = {scan, mass_sum, masses, collect, count_from, mass_from, lowest, search};

}  // namespace lamella::host::sampling
