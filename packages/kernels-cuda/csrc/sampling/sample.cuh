// Second pass: one team of blocks per row chooses from the chunks that the maxima point to.
//
//   maxima ──> status, best ──> greedy: lowest id of the best
//                           └─> top-k: threshold of the chunks, candidates, sort, masses, noise of the few that stay
//                           └─> top-p alone: cut by mass ┐
//                           └─> min-p or nothing         ┴─> noise of all tokens that stay, split over the team
#pragma once

#include "device/launch.cuh"
#include "sampling/sample.h"
#include "sampling/scan.cuh"
#include "sampling/select.cuh"

namespace lamella::sampling {

enum Status : uint8_t { kFine = 0, kNotANumber = 1, kInfinite = 2, kNoneAllowed = 3 };

// Reads the maxima of a row into shared memory; status and the largest logit. Ends with a barrier.
__device__ __forceinline__ Status load_maxima(Shared& s, const float* maxima, int num_chunks, float& top) {
  float most = -INFINITY;
  for (int c = threadIdx.x; c < num_chunks; c += kThreads) {
    s.maxima[c] = maxima[c];
    most = max_or_nan(most, s.maxima[c]);
  }
  top = block_reduce(most, s.narrow, [](float a, float b) { return max_or_nan(a, b); });
  if (isnan(top)) return kNotANumber;
  if (top == INFINITY) return kInfinite;
  return top == -INFINITY ? kNoneAllowed : kFine;
}

// Lowest id whose logit is `value`, the largest one.
template <class T>
__device__ int lowest_id(Shared& s, const Row<T>& row, int num_chunks, float value) {
  using R = Row<T>;
  int id = kAnyTie;
  for (int c = threadIdx.x; c < num_chunks; c += kThreads) {
    if (s.maxima[c] != value) continue;
#pragma unroll 4
    for (int i = 0; i < R::kPieces; ++i) {
      const int piece = R::piece(c / 32, i, c % 32);
      const Vec<T> raw = row.raw(piece);
#pragma unroll
      for (int j = 0; j < R::kSize; ++j) {
        const int here = row.first_id(piece) + j;
        if (row.has(here) && to_float(raw.at[j]) == value) id = min(id, here);
      }
    }
  }
  return block_reduce(id, s.ids, [](int a, int b) { return min(a, b); });
}

// log of the sum of exp of the row.
__device__ __forceinline__ double logsumexp_of(Shared& s, const float2* sums, int tiles, float top) {
  double sum = 0.0;
  for (int t = threadIdx.x; t < tiles; t += kThreads) {
    const float2 part = sums[t];
    if (part.x != -INFINITY)
      sum += static_cast<double>(part.y) * exp(static_cast<double>(part.x) - static_cast<double>(top));
  }
  sum = block_reduce(sum, s.scores, [](double a, double b) { return a + b; });
  return static_cast<double>(top) + log(sum);
}

struct Winner {
  double score;
  int id;
};

__device__ __forceinline__ Winner better(const Winner& a, const Winner& b) {
  return b.score > a.score || (b.score == a.score && b.id < a.id) ? b : a;
}

__device__ __forceinline__ Winner block_best(Shared& s, Winner w) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1)
    w = better(w, {__shfl_xor_sync(kAll, w.score, offset), __shfl_xor_sync(kAll, w.id, offset)});
  __syncthreads();
  if (threadIdx.x % 32 == 0) s.scores[threadIdx.x / 32] = w.score, s.ids[threadIdx.x / 32] = w.id;
  __syncthreads();
  w = {s.scores[0], s.ids[0]};
  for (int i = 1; i < kWarps; ++i) w = better(w, {s.scores[i], s.ids[i]});
  return w;
}

__device__ __forceinline__ double score_of(float x, int id, float temperature, const Noise& noise) {
  return static_cast<double>(x) / static_cast<double>(temperature) + gumbel(noise.word(id));
}

// The best score among the tokens that the cut keeps. Rough scores, relative to the best logit, sort out all but the two
// best tokens of a thread; their float64 scores decide.
template <class T>
__device__ Winner search(Shared& s, const Team& team, const Row<T>& row, int tiles, const Cut& cut, const Mass& mass,
                         float temperature, const Noise& noise) {
  using R = Row<T>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // the best logit itself scores kGumbelLeast at least
  float best = kGumbelLeast - kGumbelError, next = -INFINITY, best_x = 0.f, next_x = 0.f;
  int best_id = kAnyTie, next_id = kAnyTie;
  for (int tile = team.rank * kWarps + warp; tile < tiles; tile += team.size * kWarps) {
    const float chunk_top = s.maxima[tile * 32 + lane];
    if (!(chunk_top >= cut.value) || mass.exponent(chunk_top) + kGumbelMost < best) continue;
#pragma unroll 1
    for (int i = 0; i < R::kPieces; ++i) {
      const int piece = R::piece(tile, i, lane), first = row.first_id(piece);
      const Vec<T> raw = row.raw(piece);
#pragma unroll
      for (int j = 0; j < R::kSize; ++j) {
        const float x = to_float(raw.at[j]), lead = mass.exponent(x);
        const int id = first + j;
        if (!(row.has(id) && cut.keeps(x, id)) || lead + kGumbelMost < best) continue;
        const float score = lead + rough_gumbel(noise.word(id));
        if (score > best) {
          next = best, next_x = best_x, next_id = best_id;
          best = score, best_x = x, best_id = id;
        } else if (score > next) {
          next = score, next_x = x, next_id = id;
        }
      }
    }
  }
  const float most = block_reduce(best, s.narrow, [](float a, float b) { return fmaxf(a, b); }) - 2 * kGumbelError;
  Winner winner{-INFINITY, kAnyTie};
  if (best_id != kAnyTie && best >= most) winner = {score_of(best_x, best_id, temperature, noise), best_id};
  if (next_id != kAnyTie && next >= most)
    winner = better(winner, {score_of(next_x, next_id, temperature, noise), next_id});
  winner = block_best(s, winner);
  if (team.size > 1) {
    if (threadIdx.x == 0) s.winner_score = winner.score, s.winner_id = winner.id;
    team.sync();
    if (team.rank == 0) {
      for (int r = 1; r < team.size; ++r)
        winner = better(winner, {*team.of(&s.winner_score, r), *team.of(&s.winner_id, r)});
    }
    team.sync();  // nobody leaves while its memory is read
  }
  return winner;
}

// The smallest float that is >= x and finite.
__device__ __forceinline__ float at_least(double x) {
  if (!(x > static_cast<double>(-FLT_MAX))) return -FLT_MAX;
  return __double2float_ru(x);
}

struct SampleParams {
  LamellaSample what;
  const float* maxima;
  const float2* sums;
  int tiles;
};

template <class T>
__global__ void __launch_bounds__(kThreads, 2) sample_kernel(const SampleParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const Team team;
  const unsigned row_idx = blockIdx.x / static_cast<unsigned>(team.size);
  const int vocab_size = static_cast<int>(p.what.vocab_size), num_chunks = p.tiles * 32;
  const Row<T> row(static_cast<const T*>(p.what.logits) + row_idx * p.what.stride, vocab_size);
  wait_predecessor();
  launch_successor();
  float top;
  const Status status = load_maxima(s, p.maxima + int64_t{row_idx} * num_chunks, num_chunks, top);
  const int params = p.what.rows != nullptr ? p.what.rows[row_idx] : static_cast<int>(row_idx);
  const bool padding = params < 0;
  const auto finish = [&](int id, Status result) {
    if (team.rank != 0) return;
    double total = 0.0;
    const bool logprob = p.what.logprobs != nullptr;
    if (logprob && result == kFine) total = logsumexp_of(s, p.sums + int64_t{row_idx} * p.tiles, p.tiles, top);
    if (threadIdx.x != 0) return;
    p.what.ids[row_idx] = result == kFine ? id : 0;
    if (p.what.status != nullptr) p.what.status[row_idx] = result;
    if (logprob)
      p.what.logprobs[row_idx] = result == kFine ? static_cast<float>(static_cast<double>(row.at(id)) - total) : NAN;
  };
  if (padding) {
    if (team.rank == 0 && threadIdx.x == 0) {
      p.what.ids[row_idx] = 0;
      if (p.what.status != nullptr) p.what.status[row_idx] = kFine;
      if (p.what.logprobs != nullptr) p.what.logprobs[row_idx] = 0.f;
    }
    return;
  }
  if (status != kFine) return finish(0, status);
  const float temperature = p.what.temperature != nullptr ? p.what.temperature[params] : 0.f;
  if (!(temperature > 0.f)) {
    if (team.rank == 0) finish(lowest_id(s, row, num_chunks, top), kFine);
    return;
  }
  const Mass mass(top, __frcp_rn(temperature), mass_bits(vocab_size));
  const Noise noise(p.what.seeds != nullptr ? p.what.seeds[params] : 0,
                    p.what.positions != nullptr ? static_cast<uint32_t>(p.what.positions[row_idx]) : 0u, p.what.salt);
  const int k = p.what.top_k != nullptr ? p.what.top_k[params] : 0;
  // at least the best token stays
  const double top_p = p.what.top_p != nullptr ? fmax(p.what.top_p[params], 1e-300) : 1.0;
  const double min_p = p.what.min_p != nullptr ? p.what.min_p[params] : 0.0;
  const bool limits = k > 0 && k < vocab_size, nucleus = top_p < 1.0;
  Cut cut{-FLT_MAX, kAnyTie};
  if (min_p > 0.0)
    cut.value = at_least(static_cast<double>(top) + static_cast<double>(temperature) * log(fmin(min_p, 1.0)));

  if (limits) {
    const float from = threshold_of(s, num_chunks, k, top, cut.value);
    int n = collect(
        s, row, num_chunks, [&](float chunk_top) { return chunk_top >= from; },
        [&](float x, int) { return x >= from; });
    if (n <= kRoom) {
      sort(s, n);
      n = min(n, k);
      if (nucleus) n = 1 + find_candidate(s, n, [&](float x) { return mass.of(x); }, 0, 0.0, top_p);
      Winner winner{-INFINITY, kAnyTie};
      for (int i = threadIdx.x; i < n; i += kThreads) {
        const float x = value_of(s.candidates[i]);
        const int id = id_of(s.candidates[i]);
        winner = better(winner, {score_of(x, id, temperature, noise), id});
      }
      winner = block_best(s, winner);
      return finish(winner.id, kFine);
    }
    cut = cut_by_weight<false>(s, team, row, p.tiles, cut, mass, static_cast<double>(k));
  }
  if (nucleus) cut = cut_by_weight<true>(s, team, row, p.tiles, cut, mass, top_p);
  const Winner winner = search(s, team, row, p.tiles, cut, mass, temperature, noise);
  finish(winner.id, kFine);
}

struct TopParams {
  LamellaTopLogprobs what;
  const float* maxima;
  const float2* sums;
  int tiles;
};

template <class T>
__global__ void __launch_bounds__(kThreads, 2) top_logprobs_kernel(const TopParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const Team team;
  const unsigned row_idx = blockIdx.x;
  const int vocab_size = static_cast<int>(p.what.vocab_size), num_chunks = p.tiles * 32;
  const int k = static_cast<int>(p.what.num_best);
  const Row<T> row(static_cast<const T*>(p.what.logits) + row_idx * p.what.stride, vocab_size);
  wait_predecessor();
  launch_successor();
  float top;
  const Status status = load_maxima(s, p.maxima + int64_t{row_idx} * num_chunks, num_chunks, top);
  int32_t* best_ids = p.what.best_ids + int64_t{row_idx} * k;
  float* best = p.what.best + int64_t{row_idx} * k;
  if (status != kFine) {
    for (int i = threadIdx.x; i < k; i += kThreads) best_ids[i] = 0, best[i] = NAN;
    if (threadIdx.x == 0) {
      if (p.what.logsumexp != nullptr)
        p.what.logsumexp[row_idx] = status == kInfinite ? INFINITY : status == kNoneAllowed ? -INFINITY : NAN;
      if (p.what.token_ids != nullptr) p.what.chosen[row_idx] = NAN, p.what.ranks[row_idx] = 0;
    }
    return;
  }
  const double total = logsumexp_of(s, p.sums + int64_t{row_idx} * p.tiles, p.tiles, top);
  if (threadIdx.x == 0 && p.what.logsumexp != nullptr) p.what.logsumexp[row_idx] = static_cast<float>(total);
  if (p.what.token_ids != nullptr) {
    const int id = p.what.token_ids[row_idx];
    const bool known = row.has(id);
    const float given = known ? row.at(id) : NAN;
    int rank = 0;
    using R = Row<T>;
    for (int tile = threadIdx.x / 32; tile < p.tiles; tile += kWarps) {
      const int lane = threadIdx.x % 32;
      if (!(s.maxima[tile * 32 + lane] >= given)) continue;
#pragma unroll 4
      for (int i = 0; i < R::kPieces; ++i) {
        const int piece = R::piece(tile, i, lane);
        const Vec<T> raw = row.raw(piece);
#pragma unroll
        for (int j = 0; j < R::kSize; ++j) rank += row.has(row.first_id(piece) + j) && to_float(raw.at[j]) >= given;
      }
    }
    rank = block_reduce(rank, s.ids, [](int a, int b) { return a + b; });
    if (threadIdx.x == 0) {
      p.what.chosen[row_idx] = static_cast<float>(static_cast<double>(given) - total);
      p.what.ranks[row_idx] = rank;
    }
  }
  if (k == 0) return;
  const float from = threshold_of(s, num_chunks, k, top, -INFINITY);
  int n = collect(
      s, row, num_chunks, [&](float chunk_top) { return chunk_top >= from; }, [&](float x, int) { return x >= from; });
  if (n > kRoom) {
    const Mass mass(top, 1.f, mass_bits(vocab_size));
    const Cut cut = cut_by_weight<false>(s, team, row, p.tiles, Cut{-INFINITY, kAnyTie}, mass, static_cast<double>(k));
    n = collect(
        s, row, num_chunks, [&](float chunk_top) { return chunk_top >= cut.value; },
        [&](float x, int id) { return cut.keeps(x, id); });
  }
  sort(s, n);
  for (int i = threadIdx.x; i < k; i += kThreads) {
    best_ids[i] = id_of(s.candidates[i]);
    best[i] = static_cast<float>(static_cast<double>(value_of(s.candidates[i])) - total);
  }
}

}  // namespace lamella::sampling
