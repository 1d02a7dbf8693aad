// Which tiles a thread block of the persistent kernel works on, in which order. Every block finds that out by itself
// from cu_q and seq_lens, so nothing must be prepared and nothing depends on timing.
//
//   groups   sequences [s, s1) x heads [h, h1), so few that their keys stay in L2 while they are worked on
//   items    of a group: (rank, sequence, head), rank 0 being the last tile of each sequence, which sees the most keys
//   rounds   item i goes to block i % grid in even rounds, to grid - 1 - i % grid in odd ones: as items get shorter,
//            what a block has too much in one round it has too little in the next
#pragma once

#include "prefill/work.cuh"

namespace lamella::prefill {

// Used by a whole warp; all members are the same in all lanes.
class Roster {
 public:
  __device__ __forceinline__ void start(const PrefillParams& p, int bytes_per_key) {
    int tiles = 0;
    float keys = 0.f;
    for (int b = threadIdx.x % 32; b < p.batch; b += 32) {
      tiles += tiles_of(p, b);
      keys += static_cast<float>(max(p.seq_lens[b], 0));
    }
    tiles = __reduce_add_sync(0xffffffffu, tiles);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) keys += __shfl_xor_sync(0xffffffffu, keys, step);
    constexpr float kGroupBytes = 24 << 20;
    const float wanted = keys * static_cast<float>(bytes_per_key) * static_cast<float>(p.head_groups) / kGroupBytes;
    // a group keeps all blocks busy for some rounds
    const int most = tiles * p.head_groups / (4 * static_cast<int>(gridDim.x));
    const int groups = max(min(static_cast<int>(fminf(wanted, 1e6f)) + 1, most), 1);
    if (groups <= p.head_groups) {
      heads_per_group_ = (p.head_groups + groups - 1) / groups;
      sequences_per_group_ = p.batch;
    } else {
      const int parts = (groups + p.head_groups - 1) / p.head_groups;
      heads_per_group_ = 1;
      sequences_per_group_ = (p.batch + parts - 1) / parts;
    }
    offset_ = 0;
    sequence0_ = head0_ = 0;
    open(p);
  }

  // The next item of this block; false: there is none.
  __device__ __forceinline__ bool next(const PrefillParams& p, int& sequence, int& tile, int& head) {
    const int grid = static_cast<int>(gridDim.x);
    for (;;) {
      const int place = (static_cast<int>(blockIdx.x) + offset_) % grid;
      const int item = round_ * grid + (round_ % 2 == 0 ? place : grid - 1 - place);
      if (item < num_items_) {
        ++round_;
        head = head0_ + item % num_heads_;
        locate(p, item / num_heads_, sequence, tile);
        return true;
      }
      // who had nothing in the last round comes first in the next group
      if (num_items_ / grid % 2 == 0) offset_ = (offset_ + grid - num_items_ % grid) % grid;
      head0_ += heads_per_group_;
      if (head0_ >= p.head_groups) {
        head0_ = 0;
        sequence0_ += sequences_per_group_;
        if (sequence0_ >= p.batch) return false;
      }
      open(p);
    }
  }

 private:
  int heads_per_group_, sequences_per_group_;
  int sequence0_, head0_;                            // of this group
  int num_heads_, num_items_, max_tiles_, round_, rank_;
  int offset_;

  __device__ __forceinline__ int sequence_end(const PrefillParams& p) const {
    return min(sequence0_ + sequences_per_group_, p.batch);
  }

  __device__ __forceinline__ void open(const PrefillParams& p) {
    int tiles = 0, most = 0;
    for (int b = sequence0_ + threadIdx.x % 32; b < sequence_end(p); b += 32) {
      const int mine = tiles_of(p, b);
      tiles += mine;
      most = max(most, mine);
    }
    max_tiles_ = __reduce_max_sync(0xffffffffu, most);
    num_heads_ = min(heads_per_group_, p.head_groups - head0_);
    num_items_ = __reduce_add_sync(0xffffffffu, tiles) * num_heads_;
    round_ = rank_ = 0;
  }

  // Tiles of ranks below this one.
  __device__ __forceinline__ int tiles_before(const PrefillParams& p, int rank) const {
    int tiles = 0;
    for (int b = sequence0_ + threadIdx.x % 32; b < sequence_end(p); b += 32) tiles += min(tiles_of(p, b), rank);
    return __reduce_add_sync(0xffffffffu, tiles);
  }

  // Tile number `at` in the order (rank, sequence). It never falls within a group, so that ranks are searched upwards.
  __device__ __forceinline__ void locate(const PrefillParams& p, int at, int& sequence, int& tile) {
    const int lane = threadIdx.x % 32;
    int low = rank_, high = max_tiles_ - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (tiles_before(p, middle) <= at) low = middle;
      else high = middle - 1;
    }
    rank_ = low;
    at -= tiles_before(p, low);
    for (int base = sequence0_;; base += 32) {
      const int b = base + lane, mine = b < sequence_end(p) ? tiles_of(p, b) : 0;
      const unsigned have = __ballot_sync(0xffffffffu, mine > low);
      const unsigned found = __ballot_sync(0xffffffffu, mine > low && __popc(have & ((1u << lane) - 1)) == at);
      if (found != 0) {
        const int lane_of = __ffs(found) - 1;
        sequence = base + lane_of;
        tile = __shfl_sync(0xffffffffu, mine, lane_of) - 1 - low;
        return;
      }
      at -= __popc(have);
    }
  }
};

}  // namespace lamella::prefill
