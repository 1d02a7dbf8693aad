// Attention of a batch over its rows' slots: how the work is cut, and who does which part.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "host/isa.h"
#include "host/pool.h"
#include "host/scratch.h"

namespace lamella::host {

// What a batch is, for one group of caches. Borrowed from the step's tensors.
struct Plan {
  int64_t num_tokens = 0;
  int64_t num_rows = 0;
  const int32_t* positions = nullptr;    // [num_tokens]
  const int32_t* query_start = nullptr;  // [num_rows + 1]
  const int32_t* seq_lens = nullptr;     // [num_rows]
  const int32_t* tables = nullptr;       // [num_rows][table_stride]
  int64_t table_stride = 0;
  const int64_t* slots = nullptr;  // [num_tokens], -1: write nothing
  int64_t window = 0;              // 0: none
};

// Keys or values of a layer: element (block, head, slot, 0) at block * strides[0] + head * strides[1] + slot * strides[2].
struct CacheSide {
  void* data = nullptr;
  int64_t strides[3] = {};
};

struct Cache {
  CacheSide k, v;
  int64_t num_blocks = 0;
  bool half = true;
  int block_shift = 0;
};

struct Heads {
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  float scale = 1.0f;
  float softcap = 0.0f;
  int group() const { return num_heads / num_kv_heads; }
};

// Puts one KV head of one token into its slot.
void write_head(const Kernels& kernels, const Cache& cache, const CacheSide& side, int64_t slot, int head, const float* x,
                int head_dim);

// The attention of tokens [begin, end) of a plan, cut into items that any lane can take.
class AttentionWork {
 public:
  // Floats that each lane needs while it works.
  static int64_t lane_floats(const Heads& heads, int64_t num_tokens);

  // Cuts the work; called before the region. q and out belong to token `begin`; lse may be null. lane_scratch holds
  // lane_floats(heads, end - begin) for each of num_lanes lanes.
  AttentionWork(const Plan& plan, int64_t begin, int64_t end, const Heads& heads, const Cache& cache, int num_lanes,
                Scratch& scratch, float* lane_scratch, const float* q, int64_t q_stride, float* out, int64_t out_stride,
                float* lse, int64_t lse_stride);

  // Items until none are left. Tickets must start at 0.
  void work(const Kernels& kernels, Lane& lane);

 private:
  struct Item {
    int32_t row;
    int32_t tokens;
    int64_t token;
    int32_t kv_head;
    int32_t span;   // -1: all
    int32_t split;  // index into splits_, -1: none
    int64_t cost;
  };
  // A query token whose spans are computed apart.
  struct Split {
    int64_t first_span;
    int32_t spans;
    float* partials;  // [spans][group]
    std::atomic<int32_t>* done;
  };

  void one(const Kernels& kernels, const Item& item, float* scratch);

  const Plan& plan_;
  int64_t begin_;
  const Heads& heads_;
  const Cache& cache_;
  const float* q_;
  int64_t q_stride_;
  float* out_;
  int64_t out_stride_;
  float* lse_;
  int64_t lse_stride_;
  std::vector<Item> items_;
  std::vector<Split> splits_;
  float* lane_scratch_;
  int64_t lane_floats_;
};

}  // namespace lamella::host
