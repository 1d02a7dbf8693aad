#include "host/sampling.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "host/isa.h"
#include "host/pool.h"
#include "host/sampling_lanes.h"

namespace lamella::host::sampling {
namespace {

// The inner loops for this processor.
const Lanes& inner() { return *kernels().sampling; }

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int32_t kAnyTie = std::numeric_limits<int32_t>::max();
constexpr int32_t kFewValues = 128;  // so many are sorted at once

// What a thread needs for one row. Grows to the vocabulary once.
struct Scratch {
  std::vector<float> chunk_tops, values, masses, few_values, few_masses, few_tops;
  std::vector<int32_t> ids, few_ids, order;

  static Scratch& of_thread(int32_t vocab_size) {
    static thread_local Scratch scratch;
    const auto room = static_cast<size_t>(vocab_size) + kChunk;
    if (scratch.values.size() < room) {
      scratch.chunk_tops.resize(static_cast<size_t>(num_chunks(vocab_size)));
      scratch.few_tops.resize(scratch.chunk_tops.size());
      scratch.values.resize(room);
      scratch.masses.resize(room);
      scratch.ids.resize(room);
      scratch.order.resize(room);
      const size_t few = room / 8 + kFewValues + kChunk;  // cut_to_mass moves an eighth at most
      scratch.few_values.resize(few);
      scratch.few_masses.resize(few);
      scratch.few_ids.resize(few);
    }
    return scratch;
  }
};

template <class Work>
void each_row(int64_t count, int32_t vocab_size, Work&& work) {
  if (count <= 1) {
    if (count == 1) work(int64_t{0}, Scratch::of_thread(vocab_size));
    return;
  }
  Pool::get().run([&](Lane& lane) {
    Scratch& scratch = Scratch::of_thread(vocab_size);
    for (int64_t i = lane.ticket(); i < count; i = lane.ticket()) work(i, scratch);
  });
}

Status status_of(bool nan, float top) {
  if (nan) return kNotANumber;
  if (top == kInfinity) return kInfinite;
  return top == -kInfinity ? kNoneAllowed : kOk;
}

int32_t argmax(const float* x, const float* chunk_tops, float top) {
  int32_t c = 0;
  while (chunk_tops[c] != top) ++c;
  int32_t i = c * kChunk;
  while (x[i] != top) ++i;
  return i;
}

// Tokens by id: the whole row (ids null) or some of it. masses null: each weighs 1.
struct Tokens {
  const float* values;
  const int32_t* ids;
  const float* masses;
  int32_t count;
  int32_t id(int32_t i) const { return ids != nullptr ? ids[i] : i; }
  double mass(int32_t i) const { return masses != nullptr ? static_cast<double>(masses[i]) : 1.0; }
  double mass_from(float value, int32_t* count_from) const {
    if (masses != nullptr) return inner().mass_from(values, masses, count, value, count_from);
    return *count_from = inner().count_from(values, count, value);
  }
};

// Order of floats as numbers; -0 and +0 are one value.
int64_t key_of(float x) {
  x += 0.0f;
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits < 0 ? -static_cast<int64_t>(bits & 0x7FFFFFFF) : bits;
}

float of_key(int64_t key) {
  const int32_t bits = static_cast<int32_t>(key < 0 ? -key : key);
  float x;
  std::memcpy(&x, &bits, 4);
  return key < 0 ? -x : x;
}

// The cut behind the shortest prefix of the tokens, in order, that weighs at least `target` > 0. Weights are integers
// whose sums are exact. `low` is a value from which on the tokens weigh enough, `top` the largest value.
//
//   [top .. high)   lighter than target: it weighs `above`
//   [high .. low]   the cut is in here
//
// The bracket is narrowed by passes over the values: by interpolation, where an end that stays counts half each time
// (regula falsi, Illinois), then by halving, in the end by halving the numbers of floats. Once it holds an eighth of
// the tokens, the passes go on with those alone.
Cut cut_to_mass(Tokens tokens, double target, float low, float top, Scratch& scratch) {
  float high = std::nextafter(top, kInfinity);
  double above = 0.0, moved = 0.0;  // moved: weight of the tokens that were left behind above the bracket
  int32_t inside = tokens.count, count_above = 0, count_low = tokens.count;
  double pull_above = target, pull_below = 0.0;
  if (inside > kFewValues) pull_below = tokens.mass_from(low, &count_low) - target;

  const auto move = [&] {
    const int32_t n = inner().collect(tokens.values, tokens.count, nullptr, low, high, scratch.few_values.data(),
                                      scratch.order.data());
    for (int32_t i = 0; i < n; ++i) {
      const int32_t place = scratch.order[static_cast<size_t>(i)];
      scratch.few_masses[static_cast<size_t>(i)] = static_cast<float>(tokens.mass(place));
      scratch.few_ids[static_cast<size_t>(i)] = tokens.id(place);
    }
    const float* masses = tokens.masses == nullptr ? nullptr : scratch.few_masses.data();
    tokens = {scratch.few_values.data(), scratch.few_ids.data(), masses, n};
    moved = above;
    count_above = 0;
    count_low = n;
  };

  for (int round = 0; inside > kFewValues; ++round) {
    const double width = static_cast<double>(high) - static_cast<double>(low);
    float middle;
    if (round < 12) {
      const double part = std::min(0.98, std::max(0.02, pull_above / (pull_above + pull_below)));
      middle = static_cast<float>(static_cast<double>(high) - width * part);
    } else if (round < 24) {
      middle = static_cast<float>(static_cast<double>(low) + 0.5 * width);
    } else {
      middle = of_key(key_of(low) + (key_of(high) - key_of(low)) / 2);
    }
    if (!(middle > low)) middle = std::nextafter(low, kInfinity);
    if (!(middle < high)) middle = std::nextafter(high, -kInfinity);
    if (!(middle > low)) break;  // all that is left is equal
    int32_t count;
    const double mass = moved + tokens.mass_from(middle, &count);
    if (mass >= target) {
      low = middle;
      count_low = count;
      pull_below = mass - target;
      pull_above *= 0.5;
    } else {
      high = middle;
      above = mass;
      count_above = count;
      pull_above = target - mass;
      pull_below *= 0.5;
    }
    inside = count_low - count_above;
    if (inside > kFewValues && inside <= tokens.count / 8) move();
  }

  if (inside > kFewValues) {  // equal values, by id
    for (int32_t i = 0; i < tokens.count; ++i) {
      if (!(tokens.values[i] >= low && tokens.values[i] < high)) continue;
      above += tokens.mass(i);
      if (above >= target) return {tokens.values[i], tokens.id(i)};
    }
    return {low, kAnyTie};
  }
  move();
  std::vector<int32_t>& order = scratch.order;
  for (int32_t i = 0; i < tokens.count; ++i) order[static_cast<size_t>(i)] = i;
  // ids ascend with the index, so equal values stay in order of id
  std::sort(order.begin(), order.begin() + tokens.count, [&](int32_t a, int32_t b) {
    return tokens.values[a] > tokens.values[b] || (tokens.values[a] == tokens.values[b] && a < b);
  });
  for (int32_t i = 0; i < tokens.count; ++i) {
    const int32_t place = order[static_cast<size_t>(i)];
    above += tokens.mass(place);
    if (above >= target) return {tokens.values[place], tokens.id(place)};
  }
  return {low, kAnyTie};
}

// Drops what lies behind the cut, in place; returns how many stay.
int32_t drop_behind(const Cut& cut, float* values, int32_t* ids, int32_t n) {
  int32_t kept = 0;
  for (int32_t i = 0; i < n; ++i) {
    if (values[i] > cut.value || (values[i] == cut.value && ids[i] <= cut.last_tie)) {
      values[kept] = values[i];
      ids[kept++] = ids[i];
    }
  }
  return kept;
}

// The smallest float that is >= x and finite.
float at_least(double x) {
  if (x <= static_cast<double>(-FLT_MAX)) return -FLT_MAX;
  const float near = static_cast<float>(x);
  return static_cast<double>(near) < x ? std::nextafter(near, kInfinity) : near;
}

// The k-th largest maximum of a chunk: at least k tokens are not below it. -FLT_MAX where that says nothing.
float bound_of_count(int32_t vocab_size, int32_t k, float top, Scratch& scratch) {
  const int32_t chunks = num_chunks(vocab_size);
  if (k > chunks) return -FLT_MAX;
  const float* tops = scratch.chunk_tops.data();
  const float low = inner().lowest(tops, chunks);
  return std::max(-FLT_MAX, cut_to_mass({tops, nullptr, nullptr, chunks}, k, low, top, scratch).value);
}

int32_t mass_bits(int32_t vocab_size) {
  int32_t length = 0;
  for (int32_t rest = vocab_size; rest > 0; rest >>= 1) ++length;
  return 53 - length;
}

// What min-p, top-k and top-p leave of a row. `collected`: so many tokens, all kept ones among them, lie in
// scratch.values and scratch.ids; -1: none were needed.
Cut narrow(const float* x, int32_t vocab_size, float top, const Choice& choice, int64_t i, Scratch& scratch,
           int32_t* collected) {
  const float* tops = scratch.chunk_tops.data();
  const float temperature = choice.temperature[i];
  const int32_t k = choice.top_k[i];
  const double p = choice.top_p[i];
  const bool limits = k > 0 && k < vocab_size, nucleus = p < 1.0;
  *collected = -1;
  Cut cut{at_least(static_cast<double>(top) + static_cast<double>(temperature) * choice.log_min_p[i]), kAnyTie};
  if (!limits && !nucleus) return cut;

  const Mass mass = mass_of_row(top, choice.inverse_temperature[i], mass_bits(vocab_size));
  float from = cut.value;
  double target = 0.0;
  if (limits) from = std::max(from, bound_of_count(vocab_size, k, top, scratch));
  const bool whole = !limits && cut.value == -FLT_MAX;
  if (whole) {
    // top-p of everything: tokens so light that all of them together fit into what may be dropped are not looked at
    const double all = inner().mass_sum(x, vocab_size, tops, mass);
    target = p * all;
    const double lightest = std::log((all - target) / vocab_size) - mass.bits * 0.6931471805599453;
    const double depth = std::max(lightest, static_cast<double>(mass.clamp)) - 1e-3;
    from = at_least(static_cast<double>(top) + std::min(0.0, depth) * static_cast<double>(temperature));
  }
  float* values = scratch.values.data();
  int32_t* ids = scratch.ids.data();
  int32_t n = inner().collect(x, vocab_size, tops, from, kInfinity, values, ids);
  if (limits) {
    cut = {from, kAnyTie};
    if (n > k) cut = cut_to_mass({values, ids, nullptr, n}, k, inner().lowest(values, n), top, scratch);
    if (nucleus) n = drop_behind(cut, values, ids, n);
  }
  *collected = n;
  if (!nucleus) return cut;

  float* masses = scratch.masses.data();
  inner().masses(values, n, mass, masses);
  if (!whole) {
    double all = 0.0;
    for (int32_t j = 0; j < n; ++j) all += static_cast<double>(masses[j]);
    target = p * all;
  }
  return cut_to_mass({values, ids, masses, n}, target, inner().lowest(values, n), top, scratch);
}

}  // namespace

void greedy(const Logits& logits, int32_t* ids, uint8_t* status) {
  each_row(logits.count, logits.vocab_size, [&](int64_t i, Scratch& scratch) {
    const float* x = logits.row(i);
    float* tops = scratch.chunk_tops.data();
    float top;
    const bool nan = inner().scan(x, logits.vocab_size, tops, &top);
    status[i] = status_of(nan, top);
    ids[i] = status[i] == kOk ? argmax(x, tops, top) : 0;
  });
}

void choose(const Logits& logits, const Choice& choice, int32_t* ids, uint8_t* status) {
  const int32_t vocab_size = logits.vocab_size;
  each_row(logits.count, vocab_size, [&](int64_t i, Scratch& scratch) {
    const float* x = logits.row(i);
    float* tops = scratch.chunk_tops.data();
    float top;
    const bool nan = inner().scan(x, vocab_size, tops, &top);
    status[i] = status_of(nan, top);
    ids[i] = 0;
    if (status[i] != kOk) return;
    const int32_t first = argmax(x, tops, top);
    ids[i] = first;
    if (!(choice.temperature[i] > 0.0f)) return;
    int32_t collected;
    const Cut cut = narrow(x, vocab_size, top, choice, i, scratch, &collected);
    if (cut.value == top && cut.last_tie == first) return;
    const double temperature = choice.temperature[i];
    const Noise noise = noise_of(choice.keys[i], static_cast<uint32_t>(choice.positions[i]), choice.salt);
    Winner winner{first, static_cast<double>(top) / temperature + gumbel(word_of(noise, first))};
    if (collected < 0 || collected > vocab_size / 2) {
      inner().search(x, nullptr, vocab_size, tops, cut, temperature, noise, winner);
    } else {
      float* few_tops = scratch.few_tops.data();
      inner().scan(scratch.values.data(), collected, few_tops, &top);
      inner().search(scratch.values.data(), scratch.ids.data(), collected, few_tops, cut, temperature, noise, winner);
    }
    ids[i] = winner.id;
  });
}

void logprobs(const Logits& logits, int64_t n, const int32_t* rows, const int32_t* token_ids, int32_t k, float* chosen,
              int32_t* ranks, int32_t* best_ids, float* best) {
  const int32_t vocab_size = logits.vocab_size;
  each_row(n, vocab_size, [&](int64_t j, Scratch& scratch) {
    const float* x = logits.row(rows[j]);
    float* tops = scratch.chunk_tops.data();
    int32_t* found_ids = best_ids + j * k;
    float* found = best + j * k;
    float top;
    const bool nan = inner().scan(x, vocab_size, tops, &top);
    if (status_of(nan, top) != kOk) {
      chosen[j] = kNan;
      ranks[j] = 0;
      std::fill(found_ids, found_ids + k, 0);
      std::fill(found, found + k, kNan);
      return;
    }
    const Mass mass = mass_of_row(top, 1.0f, 60);  // not for exact sums, but fine
    const double sum = inner().mass_sum(x, vocab_size, tops, mass);
    const double total = static_cast<double>(top) + std::log(sum * 0x1p-60);
    const float given = x[token_ids[j]];
    chosen[j] = static_cast<float>(static_cast<double>(given) - total);
    ranks[j] = inner().count_from(x, vocab_size, given);
    if (k == 0) return;

    int32_t count = 0;
    float* values = scratch.values.data();
    int32_t* ids = scratch.ids.data();
    if (k < vocab_size) {
      const float from = bound_of_count(vocab_size, k, top, scratch);
      count = inner().collect(x, vocab_size, tops, from, kInfinity, values, ids);
      if (count > k) {
        const Tokens tokens{values, ids, nullptr, count};
        count = drop_behind(cut_to_mass(tokens, k, inner().lowest(values, count), top, scratch), values, ids, count);
      }
    }
    if (count < k) {  // everything is wanted, or fewer than k are finite: the whole row is in order
      std::copy(x, x + vocab_size, values);
      for (count = 0; count < vocab_size; ++count) ids[count] = count;
    }
    std::vector<int32_t>& order = scratch.order;
    for (int32_t i = 0; i < count; ++i) order[static_cast<size_t>(i)] = i;
    std::sort(order.begin(), order.begin() + count, [&](int32_t a, int32_t b) {
      return values[a] > values[b] || (values[a] == values[b] && a < b);
    });
    for (int32_t i = 0; i < k; ++i) {
      found_ids[i] = ids[order[static_cast<size_t>(i)]];
      found[i] = static_cast<float>(static_cast<double>(values[order[static_cast<size_t>(i)]]) - total);
    }
  });
}

void penalise(const Logits& logits, const Penalties& penalties) {
  each_row(penalties.count, logits.vocab_size, [&](int64_t j, Scratch&) {
    float* x = logits.row(penalties.logits_rows[j]);
    const float repetition = penalties.repetition[j], frequency = penalties.frequency[j];
    const float presence = penalties.presence[j];
    for (int64_t e = penalties.start[j]; e < penalties.start[j + 1]; ++e) {
      float& logit = x[penalties.token_ids[e]];
      const int32_t count = penalties.counts[e];
      const float scaled = logit > 0.0f ? logit / repetition : logit * repetition;
      logit = (scaled - frequency * static_cast<float>(count)) - (count > 0 ? presence : 0.0f);
    }
  });
}

void mask(const Logits& logits, int64_t n, const int32_t* rows, const uint32_t* words) {
  const int32_t num_words = (logits.vocab_size + 31) / 32;
  each_row(n, logits.vocab_size, [&](int64_t j, Scratch&) {
    float* x = logits.row(rows[j]);
    for (int32_t w = 0; w < num_words; ++w) {
      const uint32_t allowed = words[j * num_words + w];
      if (allowed == 0xFFFFFFFFu) continue;
      const int32_t end = std::min(32, logits.vocab_size - w * 32);
      for (int32_t bit = 0; bit < end; ++bit)
        if ((allowed >> bit & 1u) == 0) x[w * 32 + bit] = -kInfinity;
    }
  });
}

}  // namespace lamella::host::sampling
