// Finding the best tokens of a row without sorting it.
//
//   threshold_of()   a value that at least k chunk maxima reach, so that at least k tokens do
//   collect()        all tokens from a value on, from the few chunks that hold any, into shared memory
//   sort()           these, in order: larger first, lower id first among equals
//   cut_by_weight()  where the first tokens reach a weight, for rows whose candidates do not fit: histograms over the
//                    row narrow the place down, first linear in the logit, then by digits of its bits, then by id
//
// Weights are integers (1, or a token's mass), so sums are exact in any order.
#pragma once

#include "sampling/noise.cuh"
#include "sampling/row.cuh"
#include "sampling/team.cuh"

namespace lamella::sampling {

constexpr int kBins = 1024;
constexpr int kRoom = 2048;  // candidates that fit
constexpr int kMaxChunks = 4160;  // of 262,144 tokens

struct Shared {
  uint32_t hist[4][kBins];  // three parts of the weights, count; or a list of chunks
  uint64_t candidates[kRoom];  // key of the value, complement of the id
  uint64_t wide[kWarps];
  double scores[kWarps];
  float narrow[kWarps];
  int ids[kWarps];
  int num_candidates, num_listed, bin, bin_count, found;
  uint64_t bin_before;
  double winner_score;
  int winner_id;
  float maxima[kMaxChunks];
};

__device__ __forceinline__ uint64_t packed(float x, int id) {
  return static_cast<uint64_t>(key_of(x)) << 32 | ~static_cast<uint32_t>(id);
}
__device__ __forceinline__ float value_of(uint64_t candidate) { return of_key(static_cast<uint32_t>(candidate >> 32)); }
__device__ __forceinline__ int id_of(uint64_t candidate) { return static_cast<int>(~static_cast<uint32_t>(candidate)); }

// The bin in which sums over bins, from bin 0 on, reach `target` > 0; false if they do not. Two neighbouring bins per
// thread; writes bin, bin_before, bin_count of s. Ends with a barrier.
template <class Weight>
__device__ bool find_bin(Shared& s, Weight&& weight, const uint32_t* counts, uint64_t above, double target,
                         double share, uint64_t* all) {
  static_assert(kBins == 2 * kThreads, "two bins per thread");
  const int b = 2 * threadIdx.x;
  const uint64_t w0 = weight(b), w1 = weight(b + 1);
  uint64_t total;
  uint64_t before = above + block_prefix(w0 + w1, s.wide, &total);
  if (all != nullptr) {  // the target is a share of the total
    *all = total;
    target = share * static_cast<double>(total);
  }
  if (threadIdx.x == 0) s.bin = -1;
  __syncthreads();
  if (static_cast<double>(before) < target && static_cast<double>(before + w0) >= target) {
    s.bin = b, s.bin_before = before, s.bin_count = static_cast<int>(counts[b]);
  }
  before += w0;
  if (static_cast<double>(before) < target && static_cast<double>(before + w1) >= target) {
    s.bin = b + 1, s.bin_before = before, s.bin_count = static_cast<int>(counts[b + 1]);
  }
  __syncthreads();
  return s.bin >= 0;
}

// At least k chunk maxima are >= the result, and not many more; `least` if fewer than k reach that.
__device__ __forceinline__ float threshold_of(Shared& s, int num_chunks, int k, float top, float least) {
  const auto smaller = [](float a, float b) { return fminf(a, b); };
  const auto larger = [](float a, float b) { return fmaxf(a, b); };
  float low = INFINITY;
  int count = 0;
  for (int c = threadIdx.x; c < num_chunks; c += kThreads) {
    if (s.maxima[c] >= least) low = fminf(low, s.maxima[c]), ++count;
  }
  count = block_reduce(count, s.ids, [](int a, int b) { return a + b; });
  if (count < k) return least;
  low = block_reduce(low, s.narrow, smaller);
  float high = top;
  int above = 0;
  for (int pass = 0; pass < 4 && low < high; ++pass) {
    const float slope = kBins / (high - low);  // 0 where the difference overflows: then nothing gets narrower
    const auto bin_of = [&](float x) {
      const float t = (high - x) * slope;
      return t < kBins - 1 ? static_cast<int>(t) : kBins - 1;
    };
    s.hist[0][threadIdx.x] = s.hist[0][threadIdx.x + kThreads] = 0;
    __syncthreads();
    for (int c = threadIdx.x; c < num_chunks; c += kThreads) {
      const float x = s.maxima[c];
      if (x >= low && x <= high) atomicAdd(&s.hist[0][bin_of(x)], 1u);
    }
    __syncthreads();
    if (!find_bin(s, [&](int b) { return uint64_t{s.hist[0][b]}; }, s.hist[0], above, k, 0.0, nullptr)) return low;
    const int bin = s.bin, before = static_cast<int>(s.bin_before), inside = s.bin_count;
    float new_low = INFINITY, new_high = -INFINITY;
    for (int c = threadIdx.x; c < num_chunks; c += kThreads) {
      const float x = s.maxima[c];
      if (x >= low && x <= high && bin_of(x) == bin) new_low = fminf(new_low, x), new_high = fmaxf(new_high, x);
    }
    new_low = block_reduce(new_low, s.narrow, smaller);
    new_high = block_reduce(new_high, s.narrow, larger);
    const bool same = new_low == low && new_high == high;
    low = new_low;
    high = new_high;
    above = before;
    if (same || before + inside <= k + 64) break;
  }
  return low;
}

// Puts the tokens that `wants(x, id)` into s.candidates, from chunks with wants_chunk(maximum), in no order. Returns how
// many there are, or more than kRoom if they do not fit. Ends with a barrier.
template <class T, class WantsChunk, class Wants>
__device__ int collect(Shared& s, const Row<T>& row, int num_chunks, WantsChunk&& wants_chunk, Wants&& wants) {
  using R = Row<T>;
  auto* list = reinterpret_cast<uint16_t*>(s.hist);  // 8,192 entries
  __syncthreads();
  if (threadIdx.x == 0) s.num_listed = s.num_candidates = 0;
  __syncthreads();
  for (int c = threadIdx.x; c < num_chunks; c += kThreads) {
    if (wants_chunk(s.maxima[c])) list[atomicAdd(&s.num_listed, 1)] = static_cast<uint16_t>(c);
  }
  __syncthreads();
  const int items = s.num_listed * R::kPieces;
  for (int item = threadIdx.x; item < items; item += kThreads) {
    if (*static_cast<volatile int*>(&s.num_candidates) > kRoom) break;
    const int chunk = list[item / R::kPieces], piece = R::piece(chunk / 32, item % R::kPieces, chunk % 32);
    const Vec<T> raw = row.raw(piece);
    const int first = row.first_id(piece);
#pragma unroll
    for (int j = 0; j < R::kSize; ++j) {
      const float x = to_float(raw.at[j]);
      if (row.has(first + j) && wants(x, first + j)) {
        const int place = atomicAdd(&s.num_candidates, 1);
        if (place < kRoom) s.candidates[place] = packed(x, first + j);
      }
    }
  }
  __syncthreads();
  return s.num_candidates;
}

// Sorts the first n <= kRoom candidates, best first. Ends with a barrier.
__device__ __forceinline__ void sort(Shared& s, int n) {
  if (n <= 128) {  // the place of each is the number of better ones
    uint64_t mine = 0;
    int place = 0;
    if (threadIdx.x < n) {
      mine = s.candidates[threadIdx.x];
      for (int i = 0; i < n; ++i) place += s.candidates[i] > mine;
    }
    __syncthreads();
    if (threadIdx.x < n) s.candidates[place] = mine;
    __syncthreads();
    return;
  }
  int size = 256;
  while (size < n) size *= 2;
  for (int i = n + threadIdx.x; i < size; i += kThreads) s.candidates[i] = 0;
  for (int run = 2; run <= size; run *= 2) {
    for (int gap = run / 2; gap > 0; gap /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < size / 2; i += kThreads) {
        const int a = 2 * i - (i & (gap - 1)), b = a + gap;
        const uint64_t x = s.candidates[a], y = s.candidates[b];
        if ((x < y) == ((a & run) == 0)) s.candidates[a] = y, s.candidates[b] = x;
      }
    }
  }
  __syncthreads();
}

// The first of n sorted candidates at which the weight, `above` included, reaches the target; n - 1 if it never does,
// 0 if the target is not positive. share >= 0: the target is that share of their weight. Ends with a barrier.
template <class Weight>
__device__ int find_candidate(Shared& s, int n, Weight&& weight, uint64_t above, double target, double share) {
  constexpr int kEach = kRoom / kThreads;
  uint64_t w[kEach], sum = 0, total;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int place = threadIdx.x * kEach + i;
    w[i] = place < n ? weight(value_of(s.candidates[place])) : 0;
    sum += w[i];
  }
  uint64_t before = above + block_prefix(sum, s.wide, &total);
  if (share >= 0.0) target = share * static_cast<double>(total);
  if (threadIdx.x == 0) s.found = target > 0.0 ? n - 1 : 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (static_cast<double>(before) < target && static_cast<double>(before + w[i]) >= target)
      s.found = threadIdx.x * kEach + i;
    before += w[i];
  }
  __syncthreads();
  return s.found;
}

// All lanes call it. Weights are below 2^53, in three parts of `width` bits that cannot overflow over a whole row.
__device__ __forceinline__ void add_to_bin(Shared& s, bool on, int bin, uint64_t weight, int width) {
  const unsigned who = __ballot_sync(kAll, on);
  if (who == 0) return;
  const int leader = __ffs(static_cast<int>(who)) - 1;
  const uint32_t mask = width >= 32 ? 0xffffffffu : (1u << width) - 1;
  uint32_t p0 = static_cast<uint32_t>(weight) & mask, p1 = static_cast<uint32_t>(weight >> width) & mask;
  uint32_t p2 = static_cast<uint32_t>(weight >> (2 * width)), count = 1;
  const int common = __shfl_sync(kAll, bin, leader);
  if (__all_sync(kAll, !on || bin == common)) {  // equal values: 32 times less traffic on one bin
    p0 = __reduce_add_sync(kAll, on ? p0 : 0);
    p1 = __reduce_add_sync(kAll, on ? p1 : 0);
    p2 = __reduce_add_sync(kAll, on ? p2 : 0);
    count = static_cast<uint32_t>(__popc(who));
    on = threadIdx.x % 32 == leader;
  }
  if (!on) return;
  if (p0 != 0) atomicAdd(&s.hist[0][bin], p0);
  if (p1 != 0) atomicAdd(&s.hist[1][bin], p1);
  if (p2 != 0) atomicAdd(&s.hist[2][bin], p2);
  atomicAdd(&s.hist[3][bin], count);
}

// Where the tokens that `base` keeps, in order, reach amount > 0 (kMass: amount * their mass; else: amount of them).
// Returns base where all of them do not.
template <bool kMass, class T>
__device__ Cut cut_by_weight(Shared& s, const Team& team, const Row<T>& row, int tiles, const Cut& base,
                             const Mass& mass, double amount) {
  using R = Row<T>;
  // level 0: linear, 1 to 4: digits of the key, 5: id / 256
  const auto shift_of = [](int level) { return level == 1 ? 22 : level == 2 ? 12 : level == 3 ? 2 : 0; };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int width = kMass ? mass.bits - 21 : 31;  // 32 minus the length of the vocabulary's size
  const auto linear = [&](float x) {  // e^-26 has no mass in any vocabulary of more than a few thousand
    const float t = mass.exponent(x) * (-kBins / 26.f);
    return t < kBins - 1 ? static_cast<int>(t) : kBins - 1;
  };
  int place = 0, id_bin = 0, level = 0;
  uint32_t prefix = 0;
  uint64_t above = 0;
  double target = amount;
  // whether a token is where the levels before `known` led to
  const auto inside = [&](float x, int id, int known) {
    if (known == 0) return true;
    if (linear(x) != place) return false;
    if (known == 1) return true;
    return (key_of(x) >> shift_of(known - 1)) == prefix && (known < 6 || id >> 8 == id_bin);
  };
  const auto matters = [&](float chunk_top, int known) {
    return chunk_top >= base.value && (known == 0 || linear(chunk_top) <= place);
  };
  for (;; ++level) {
    const int shift = shift_of(level), mask = level == 4 ? 3 : kBins - 1;
    const auto bin_of = [&](float x, int id) {
      if (level == 0) return linear(x);
      return level == 5 ? id >> 8 : mask - static_cast<int>(key_of(x) >> shift & mask);
    };
    __syncthreads();
    for (int i = threadIdx.x; i < 4 * kBins; i += kThreads) (&s.hist[0][0])[i] = 0;
    __syncthreads();
    for (int tile = team.rank * kWarps + warp; tile < tiles; tile += team.size * kWarps) {
      const bool mine = matters(s.maxima[tile * 32 + lane], level);
      if (!__any_sync(kAll, mine)) continue;
#pragma unroll 1
      for (int i = 0; i < R::kPieces; ++i) {
        const int piece = R::piece(tile, i, lane), first = row.first_id(piece);
        Vec<T> raw{};
        if (mine) raw = row.raw(piece);
#pragma unroll
        for (int j = 0; j < R::kSize; ++j) {
          const float x = to_float(raw.at[j]);
          const int id = first + j;
          const bool on = mine && row.has(id) && base.keeps(x, id) && inside(x, id, level);
          const uint64_t weight = kMass ? (on ? mass.of(x) : 0) : 1;
          add_to_bin(s, on && weight > 0, on ? bin_of(x, id) : 0, weight, width);
        }
      }
    }
    if (team.size > 1) {  // block r adds up its share of the bins for everybody
      team.sync();
      const int each = 4 * kBins / team.size;
      for (int i = threadIdx.x; i < each; i += kThreads) {
        uint32_t* at = &s.hist[0][0] + team.rank * each + i;
        uint32_t sum = 0;
        for (int r = 0; r < team.size; ++r) sum += *team.of(at, r);
        for (int r = 0; r < team.size; ++r) *team.of(at, r) = sum;
      }
    }
    team.sync();
    const auto weight = [&](int b) {
      return uint64_t{s.hist[0][b]} + (uint64_t{s.hist[1][b]} << width) + (uint64_t{s.hist[2][b]} << (2 * width));
    };
    uint64_t all;
    const bool share = kMass && level == 0;
    const bool found = find_bin(s, weight, s.hist[3], above, target, amount, share ? &all : nullptr);
    if (share) target = amount * static_cast<double>(all);
    if (!found) return base;
    const int bin = s.bin;
    const int count = s.bin_count;
    above = s.bin_before;
    if (level == 0) {
      place = bin;
    } else if (level == 5) {
      id_bin = bin;
    } else {
      prefix = prefix << (level == 4 ? 2 : 10) | static_cast<uint32_t>(mask - bin);
    }
    if (count <= kRoom) break;
  }
  const int known = level + 1;
  // tokens without mass are not counted, and must not take room here
  const int n = collect(
      s, row, tiles * 32, [&](float chunk_top) { return matters(chunk_top, known); },
      [&](float x, int id) {
        return base.keeps(x, id) && inside(x, id, known) && (!kMass || mass.of(x) > 0);
      });
  sort(s, n);
  const int at = find_candidate(s, n, [&](float x) { return kMass ? mass.of(x) : uint64_t{1}; }, above, target, -1.0);
  const uint64_t last = s.candidates[at];
  return {value_of(last), id_of(last)};
}

}  // namespace lamella::sampling
