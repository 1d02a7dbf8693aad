// From sums to outputs: partial results of cut pairs, their combination, sinks, normalisation.
#pragma once

#include "attention/decode_walk.cuh"

namespace lamella::attention {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// How many parts a pair is cut into and which is the first: from its place among all chunks alone.
struct Cut {
  uint32_t first_part;
  int splits;

  // skipped: chunks of the pair that earlier parts did; taken: chunks up to the end of this part's share.
  __device__ __forceinline__ Cut(const Share& share, uint32_t part, int skipped, int taken, int num_chunks) {
    const uint32_t start = skipped > 0 ? share.start(part) - skipped : share.start(part + 1) - taken;
    first_part = share.part_of(start);
    splits = static_cast<int>(share.part_of(start + num_chunks - 1) - first_part) + 1;
  }
};

// Each part has two places for partial results: of a pair that began earlier, and of one that goes on later.
__device__ __forceinline__ int slot_of(uint32_t part, int skipped) {
  return static_cast<int>(2 * part) + (skipped > 0 ? 0 : 1);
}

// Where a query row of a group lies.
struct RowPlace {
  int query, head;
  __device__ __forceinline__ RowPlace(const DecodeParams& p, int group, int row) {
    const int kv_head = group / p.groups_per_kv;
    row += (group - kv_head * p.groups_per_kv) * kMaxRows;
    query = row / p.heads_per_kv;
    head = kv_head * p.heads_per_kv + (row - query * p.heads_per_kv);
  }
};

__device__ __forceinline__ int rows_of(const DecodeParams& p, int group) {
  return min(p.rows - group % p.groups_per_kv * kMaxRows, kMaxRows);
}

// What one row's sum of P V is multiplied with, the sink and v_scale included; writes lse where `writes`.
__device__ __forceinline__ float settle(const DecodeParams& p, int sequence, const RowPlace& place, float most,
                                        float sum, bool writes) {
  float factor = 0.f, lse = -INFINITY;
  if (sum != 0.f) {  // NaN goes on
    float kept = 1.f;
    if (p.sinks != nullptr) {
      const float sink = p.sinks[place.head] * kLog2E, higher = fmaxf(most, sink);
      kept = exp2_fast(most - higher);
      sum = sum * kept + exp2_fast(sink - higher);
      most = higher;
    }
    factor = kept / sum;
    lse = (most + log2f(sum)) * kLn2;
    if (p.v_scale != nullptr) factor *= p.v_scale[place.head / p.heads_per_kv * p.v_scale_stride];
  }
  if (p.lse != nullptr && writes)
    p.lse[(static_cast<int64_t>(sequence) * p.num_queries + place.query) * p.num_heads + place.head] = lse;
  return factor;
}

template <class T>
__device__ __forceinline__ T* out_row(const DecodeParams& p, int sequence, const RowPlace& place) {
  return static_cast<T*>(p.out) + sequence * p.out_strides[0] + place.query * p.out_strides[1] +
         place.head * p.out_strides[2];
}

// kCount neighbouring values of an output row. T is the type of the arithmetic; over fp8 that of q may differ.
template <class T, bool kFp8, int kCount>
__device__ __forceinline__ void store_out(const DecodeParams& p, int sequence, const RowPlace& place, int d,
                                          const float* values) {
  uint32_t packed[kCount / 2];
  const bool as_bf16 = kFp8 && p.q_bf16;
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i)
    packed[i] = as_bf16 ? pack_pair<bf16>(values[2 * i], values[2 * i + 1])
                        : pack_pair<T>(values[2 * i], values[2 * i + 1]);
  T* to = out_row<T>(p, sequence, place) + d;  // both types have two bytes
  if constexpr (kCount == 4) {
    *reinterpret_cast<uint2*>(to) = make_uint2(packed[0], packed[1]);
  } else {
    *reinterpret_cast<uint32_t*>(to) = packed[0];
  }
}

// By the block that wrote the last partial result: all of them in their order, whoever was last. As many as registers
// hold are loaded at once, since each round is a way to the L2 cache and back.
template <class T, bool kFp8, int D>
__device__ __forceinline__ void combine(const DecodeParams& p, int sequence, int group, const Cut& cut) {
  constexpr int kQuads = D / 4, kBatch = 16;
  const int rows = rows_of(p, group), step = 2 * p.group_rows;  // rows between the results of one split and the next
  const int64_t first_row = static_cast<int64_t>(cut.first_part) * step;
  for (int item = threadIdx.x; item < rows * kQuads; item += kWarps * 32) {
    const int row = item / kQuads, quad = item % kQuads;
    const float2* stats_at = p.partial_stats + first_row + row;
    const float4* values_at = reinterpret_cast<const float4*>(p.partial_out) + (first_row + row) * kQuads + quad;
    float most = -INFINITY, sum = 0.f, total[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (int first = 0; first < cut.splits; first += kBatch) {
      float2 stats[kBatch];
      float4 values[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        stats[i] = make_float2(-INFINITY, 0.f);
        values[i] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (first + i < cut.splits) {
          // the first split began in the second place of its part, the others in the first
          const int64_t rows_on = first + i == 0 ? p.group_rows : static_cast<int64_t>(first + i) * step;
          stats[i] = __ldcg(stats_at + rows_on);
          values[i] = __ldcg(values_at + rows_on * kQuads);
        }
      }
      float higher = most;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) higher = fmaxf(higher, stats[i].x);
      const float safe = higher == -INFINITY ? 0.f : higher;
      const float kept = exp2_fast(most - safe);
      sum *= kept;
#pragma unroll
      for (int j = 0; j < 4; ++j) total[j] *= kept;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float weight = exp2_fast(stats[i].x - safe);
        sum += weight * stats[i].y;
        total[0] += weight * values[i].x;
        total[1] += weight * values[i].y;
        total[2] += weight * values[i].z;
        total[3] += weight * values[i].w;
      }
      most = higher;
    }
    const RowPlace place(p, group, row);
    const float factor = settle(p, sequence, place, most, sum, quad == 0);
#pragma unroll
    for (int j = 0; j < 4; ++j) total[j] = sum == 0.f ? 0.f : total[j] * factor;
    store_out<T, kFp8, 4>(p, sequence, place, quad * 4, total);
  }
}

// Writes this part's result of one row, kCount neighbouring values: final if the pair is not cut, else partial.
template <class T, bool kFp8, int D, int kCount>
__device__ __forceinline__ void store_result(const DecodeParams& p, int sequence, const RowPlace& place, int row, int d,
                                             float* values, float factor, int slot) {
  if (slot < 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = factor == 0.f ? 0.f : values[i] * factor;  // empty: 0 whatever V is
    store_out<T, kFp8, kCount>(p, sequence, place, d, values);
  } else {
    float* to = p.partial_out + (static_cast<int64_t>(slot) * p.group_rows + row) * D + d;
    if constexpr (kCount == 4) {
      *reinterpret_cast<float4*>(to) = make_float4(values[0], values[1], values[2], values[3]);
    } else {
      *reinterpret_cast<float2*>(to) = make_float2(values[0], values[1]);
    }
  }
}

}  // namespace lamella::attention
