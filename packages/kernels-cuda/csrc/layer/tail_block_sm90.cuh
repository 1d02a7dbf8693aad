// What the kernels of layers' tails are made of (Hopper): one block per multiprocessor stays for the whole tail, and its
// weights do not stop streaming.
//
//   loading thread   product 1's tiles | product 2's | product 3's    as far ahead as the stages reach
//   other warps      product 1's tiles | product 2's | product 3's
//                                      ^ all blocks meet
//
// What a block waits for at a border are the other blocks' sums: a microsecond or two, in which the stages fill. Weights
// do not depend on anything, so the first ones arrive while the kernel before still runs.
//
// A tile is 16 rows of weights over all of K, in stages of kDepth elements: of each, every warp multiplies its pieces of
// 32 elements by the tokens (mma m16n8k16, the weights as its 16 rows), and the warps' sums are added at the tile's end,
// in their order. The elements of K are taken in an order in which each thread reads 16 bytes of weights and of tokens at
// once: a sum over K allows any.
//
// Tokens stay in registers while they fit (kHeld stages); longer ones are read kHeld stages ahead of use.
#pragma once

#include <type_traits>

#include "device/dtype.cuh"
#include "device/launch.cuh"
#include "device/ring.cuh"
#include "device/tma.cuh"

namespace lamella {

constexpr int kTailRows = 16;

// kTiles: of 8 tokens. kExtra: bytes of shared memory that the kernel wants for itself.
template <int kTiles_, int kWarps_, int kDepth_, int kHeld_, int kExtra_ = 0>
struct TailShape {
  static constexpr int kTiles = kTiles_, kWarps = kWarps_, kDepth = kDepth_, kHeld = kHeld_, kExtra = kExtra_;
  static constexpr int kConsumers = kWarps * 32, kThreads = kConsumers + 32;
  static constexpr int kPieces = kDepth / 32 / kWarps;
  static constexpr int kBoxBytes = 8 * kDepth * 2, kStageBytes = 2 * kBoxBytes;
  static constexpr int kPair = 2;                    // most tiles at a time
  static constexpr int kFlying = 64 * 1024 / kStageBytes;
  static constexpr int kSums = kPair * kTiles * 128;  // of a warp
  static constexpr int kSumBytes = kWarps * kSums * 4, kSquareBytes = kWarps * kTiles * 8 * 4;
  static constexpr int kRest = kSumBytes + kSquareBytes + kExtra;
  static constexpr int kStages = (225 * 1024 - kRest) / (kStageBytes + 24);
  static constexpr int kShared = kStages * (kStageBytes + 24) + kRest + 1024;
  static_assert(kDepth % (32 * kWarps) == 0 && kThreads <= 1024, "");
};

template <class T>
__device__ __forceinline__ void mma_16x8x16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                            uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same<T, bf16>::value) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// Past L1: other blocks have written it while this kernel runs.
__device__ __forceinline__ uint4 load_others(const void* from) {
  uint4 raw;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
               : "l"(from)
               : "memory");
  return raw;
}

// to[0] += round(by)
template <class T>
__device__ __forceinline__ void grow(T* to, float by) {
  uint16_t raw;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(raw) : "l"(to) : "memory");
  *to = from_float<T>(to_float(*reinterpret_cast<const T*>(&raw)) + to_float(from_float<T>(by)));
}

// 8 rows of kDepth elements: lines of 64 elements (128 bytes), 8 rows of the first, 8 rows of the second, .., swizzled.
__device__ __forceinline__ void load_rows(void* to, const CUtensorMap* map, uint64_t* barrier, int line, int row,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, "
      "%5}], [%2], %6;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(0), "r"(row), "r"(line), "l"(policy)
      : "memory");
}

// A map of [rows, width] as lines of 64 elements, read 8 rows of depth elements at a time.
template <class T>
bool map_lines(CUtensorMap* map, const void* base, int64_t rows, int64_t width, int depth) {
  const EncodeTiled encode = tensor_map_encoder();
  if (encode == nullptr) return false;
  const cuuint64_t sizes[3] = {64, static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(width / 64)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(width * 2), 128};
  const cuuint32_t box[3] = {64, 8, static_cast<cuuint32_t>(depth / 64)}, steps[3] = {1, 1, 1};
  const auto type = std::is_same<T, bf16>::value ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return encode(map, type, 3, const_cast<void*>(base), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Shared memory of a block, and the place in its ring of stages: loader and consumers each count their own.
//
// Few stages at a time are on their way, though all may lie ready: with more, requests queue up in front of the memory
// for microseconds, and what the other warps read and wait for at borders stands in the same queue.
template <class Shape>
struct TailStages {
  char* stages;
  float* sums;
  float* squares;
  char* extra;
  uint64_t* full;
  uint64_t* empty;
  int2* tiles;  // whose first stage this is: its number and that of the tile that shares its tokens; -1: none
  Ring<Shape::kStages> here;
  Ring<Shape::kStages> landing{0};  // of the loader: the first of the stages on their way
  int flying = 0;                   // their number

  // By all threads of the block.
  __device__ __forceinline__ TailStages(char* raw, uint32_t parity) : here(parity) {
    stages = raw + (1024 - shared_address(raw) % 1024) % 1024;
    sums = reinterpret_cast<float*>(stages + Shape::kStages * Shape::kStageBytes);
    squares = sums + Shape::kSumBytes / 4;
    extra = reinterpret_cast<char*>(squares + Shape::kSquareBytes / 4);
    full = reinterpret_cast<uint64_t*>(extra + Shape::kExtra);
    empty = full + Shape::kStages;
    tiles = reinterpret_cast<int2*>(empty + Shape::kStages);
    if (threadIdx.x == 0) {
      for (int i = 0; i < Shape::kStages; ++i) {
        barrier_init(full + i, 1);
        barrier_init(empty + i, Shape::kWarps);
      }
      barrier_init_done();
    }
  }
  // By the loading thread: the next stage is free.
  __device__ __forceinline__ void claim() {
    if (flying == Shape::kFlying) {
      barrier_wait(full + landing.stage, landing.parity);
      landing.advance();
    } else {
      ++flying;
    }
    barrier_wait(empty + here.stage, here.parity);
  }
  // One stage: rows row .. row + 7 and second .. second + 7 of the map, k-th stage along K.
  __device__ __forceinline__ void load(const CUtensorMap* map, int row, int second, int k, uint64_t policy) {
    barrier_expect(full + here.stage, Shape::kStageBytes);
    char* to = stages + here.stage * Shape::kStageBytes;
    load_rows(to, map, full + here.stage, k * (Shape::kDepth / 64), row, policy);
    load_rows(to + Shape::kBoxBytes, map, full + here.stage, k * (Shape::kDepth / 64), second, policy);
    here.advance();
  }
  // A product has no more tiles.
  __device__ __forceinline__ void close() {
    claim();
    tiles[here.stage] = int2{-1, -1};
    barrier_arrive(full + here.stage);
    here.advance();
  }
  // A whole product: next() is the block's next tile, or one behind the last. pair: two tiles at a time, the second a
  // grid behind. row(tile): of its first 8 rows.
  template <class Next, class Row>
  __device__ __forceinline__ void load_all(const CUtensorMap* map, int num_tiles, int num_k, bool pair, int apart,
                                           uint64_t policy, Next&& next, Row&& row) {
    const int grid = static_cast<int>(gridDim.x);
    for (int tile = next(); tile < num_tiles; tile = next()) {
      const int second = pair && tile + grid < num_tiles ? tile + grid : -1;
      const int rows[2] = {row(tile), second >= 0 ? row(second) : 0};
      for (int k = 0; k < num_k; ++k) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          if (t == 1 && second < 0) break;
          claim();
          if (k == 0 && t == 0) tiles[here.stage] = int2{tile, second};
          load(map, rows[t], rows[t] + apart, k, policy);
        }
      }
    }
    close();
  }
};

// The block's tiles in a fixed order: block, block + step, ..
struct FixedTiles {
  int tile, step;
  __device__ __forceinline__ int operator()() {
    const int mine = tile;
    tile += step;
    return mine;
  }
};

// The first one fixed, then whichever is open: multiprocessors do not get the same share of the memory's bandwidth. The
// answer is asked for one tile ahead. The counter starts at 0.
struct OpenTiles {
  int tile, behind;  // behind: the fixed ones
  unsigned* counter;
  __device__ __forceinline__ OpenTiles(int first, int step, unsigned* open) : tile(first), behind(step), counter(open) {}
  __device__ __forceinline__ int operator()() {
    const int mine = tile;
    tile = behind + static_cast<int>(atomicAdd(counter, 1u));
    return mine;
  }
};

// The multiplying warps' side.
template <class T, class Shape>
struct TailConsumer {
  static constexpr int kTiles = Shape::kTiles, kPieces = Shape::kPieces, kHeld = Shape::kHeld, kWarps = Shape::kWarps;
  using Sums = float[kTiles][4];

  TailStages<Shape> at;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, kq = lane % 4;
  const int num_tokens;
  unsigned long long* met;
  unsigned long long before = 0;  // of the block's first thread
  uint4 tokens[kHeld][kPieces][kTiles];

  // Waits for the kernel before.
  __device__ __forceinline__ TailConsumer(const TailStages<Shape>& stages, int64_t count, unsigned long long* counter)
      : at(stages), num_tokens(static_cast<int>(count)), met(counter) {
    wait_predecessor();
    if (threadIdx.x == 0) {
      asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(before) : "l"(met) : "memory");
      before -= before % gridDim.x;  // this block has not met the others yet, so they have not gone on from here
    }
  }

  __device__ __forceinline__ void sync() const { sync_some(1, Shape::kConsumers); }

  // Until all blocks are here; what they wrote is seen by load_others().
  __device__ __forceinline__ void meet() {
    sync();
    if (threadIdx.x == 0) {
      before += gridDim.x;
      __threadfence();
      asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(met) : "memory");
      unsigned long long seen;
      do {
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(met) : "memory");
      } while (seen < before);
    }
    sync();
  }

  // The k-th stage of a token's elements; from: of token g of each 8, null for zeros.
  __device__ __forceinline__ void read(int slot, int n, const T* from, int k) {
    const T* start = from + k * Shape::kDepth + warp * kPieces * 32 + kq * 8;
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      tokens[slot][i][n] = from != nullptr ? load_others(start + i * 32) : uint4{0, 0, 0, 0};
  }
  __device__ __forceinline__ const T* row_of(const T* from, int64_t stride, int n) const {
    return n * 8 + g < num_tokens ? from + (n * 8 + g) * stride : nullptr;
  }
  __device__ __forceinline__ void hold(const T* from, int64_t stride, int num_k) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (k >= num_k) continue;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) read(k, n, row_of(from, stride, n), k);
    }
  }
  using Gain = uint4[kHeld][kPieces];
  __device__ __forceinline__ void read_gain(Gain& gain, const void* weight, int num_k) const {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (k >= num_k) continue;
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
        gain[k][i] = load_others(static_cast<const T*>(weight) + k * Shape::kDepth + (warp * kPieces + i) * 32 + kq * 8);
    }
  }
  // Meets the other blocks and holds rms_norm(from) * weight then, rounded as lamella_rms_norm() does.
  __device__ __forceinline__ void meet_and_norm(const T* from, int64_t stride, int num_k, const void* weight, float eps) {
    Gain gain;
    read_gain(gain, weight, num_k);
    meet();
    hold(from, stride, num_k);
    float sum[kTiles] = {};
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (k >= num_k) continue;
#pragma unroll
      for (int i = 0; i < kPieces * kTiles; ++i) {
        const int n = i % kTiles;
        const Vec<T> x = *reinterpret_cast<const Vec<T>*>(&tokens[k][i / kTiles][n]);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[n] += to_float(x.at[j]) * to_float(x.at[j]);
      }
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      sum[n] += __shfl_xor_sync(0xffffffffu, sum[n], 1);
      sum[n] += __shfl_xor_sync(0xffffffffu, sum[n], 2);
      if (kq == 0) at.squares[warp * kTiles * 8 + n * 8 + g] = sum[n];
    }
    sync();
    float inverse[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float total = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total += at.squares[w * kTiles * 8 + n * 8 + g];
      inverse[n] = rsqrtf(total / static_cast<float>(num_k * Shape::kDepth) + eps);
    }
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (k >= num_k) continue;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const Vec<T> factor = *reinterpret_cast<const Vec<T>*>(&gain[k][i]);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          Vec<T> x = *reinterpret_cast<const Vec<T>*>(&tokens[k][i][n]);
#pragma unroll
          for (int j = 0; j < 8; ++j)
            x.at[j] = from_float<T>(to_float(from_float<T>(to_float(x.at[j]) * inverse[n])) * to_float(factor.at[j]));
          tokens[k][i][n] = *reinterpret_cast<const uint4*>(&x);
        }
      }
    }
  }

  // The next stage of weights by the tokens of a slot.
  __device__ __forceinline__ void multiply_stage(Sums& c, int slot) {
    barrier_wait(at.full + at.here.stage, at.here.parity);
    uint4 low[kPieces], high[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int piece = warp * kPieces + i;
      const char* from =
          at.stages + at.here.stage * Shape::kStageBytes + piece / 2 * 1024 + g * 128 + ((piece % 2 * 4 + kq) ^ g) * 16;
      low[i] = *reinterpret_cast<const uint4*>(from);
      high[i] = *reinterpret_cast<const uint4*>(from + Shape::kBoxBytes);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(at.empty + at.here.stage);
    at.here.advance();
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const uint4 x = tokens[slot][i][n];
        mma_16x8x16<T>(c[n], low[i].x, high[i].x, low[i].y, high[i].y, x.x, x.y);
        mma_16x8x16<T>(c[n], low[i].z, high[i].z, low[i].w, high[i].w, x.z, x.w);
      }
    }
  }

  // Adds the warps' sums; write(tile of the pair, sum of row g, of row g + 8, token), each once, by some thread.
  template <int kCount, class Write>
  __device__ __forceinline__ void add_up(const float (&c)[kCount][kTiles][4], int count, Write&& write) {
    float* mine = at.sums + warp * Shape::kSums + lane;
#pragma unroll
    for (int t = 0; t < kCount; ++t)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) mine[((t * kTiles + n) * 4 + e) * 32] = c[t][n][e];
    sync();
    const int which = threadIdx.x / 64, t = which / kTiles, token = which % kTiles * 8 + kq * 2 + threadIdx.x % 64 / 32;
    if (t < count && token < num_tokens) {
      const float* from = at.sums + (which * 4 + threadIdx.x % 64 / 32) * 32 + lane;
      float low = 0.f, high = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        low += from[w * Shape::kSums];
        high += from[w * Shape::kSums + 64];
      }
      write(t, low, high, token);
    }
    sync();  // the sums may be written over
  }

  // The tiles whose stages come next; x < 0: the product has no more.
  __device__ __forceinline__ int2 next_tiles() {
    barrier_wait(at.full + at.here.stage, at.here.parity);
    const int2 found = at.tiles[at.here.stage];
    if (found.x < 0) {
      __syncwarp();
      if (lane == 0) barrier_arrive(at.empty + at.here.stage);
      at.here.advance();
    }
    return found;
  }

  // The block's tiles of a product, up to kCount at a time. streamed: tokens that are read on the way, else those that
  // are held. write(tile, sum of its row g, of its row g + 8, token).
  template <int kCount, bool kStreams, class Write>
  __device__ __forceinline__ void multiply(int num_k, const T* streamed, int64_t stride, Write&& write) {
    for (int2 tiles = next_tiles(); tiles.x >= 0; tiles = next_tiles()) {
      const int count = kCount == 1 || tiles.y < 0 ? 1 : kCount;
      float c[kCount][kTiles][4] = {};
      if constexpr (kStreams) hold(streamed, stride, num_k);
      for (int k0 = 0; k0 < num_k; k0 += kHeld) {
#pragma unroll
        for (int j = 0; j < kHeld; ++j) {
          const int k = k0 + j;
          if (k >= num_k) break;
#pragma unroll
          for (int t = 0; t < kCount; ++t)
            if (t < count) multiply_stage(c[t], j);
          if constexpr (kStreams) {
            if (k + kHeld < num_k) {
#pragma unroll
              for (int n = 0; n < kTiles; ++n) read(j, n, row_of(streamed, stride, n), k + kHeld);
            }
          }
        }
      }
      add_up<kCount>(c, count, [&](int t, float low, float high, int token) {
        write(t == 0 ? tiles.x : tiles.y, low, high, token);
      });
    }
  }
};

// silu(gate) * up, rounded as lamella_gated_activation() does.
template <class T>
__device__ __forceinline__ T gated(float gate_sum, float up_sum) {
  const float gate = to_float(from_float<T>(gate_sum)), up = to_float(from_float<T>(up_sum));
  return from_float<T>(to_float(from_float<T>(__fdividef(gate, 1.f + __expf(-gate)))) * up);
}

// What multiply() writes: rows of a tile into [tokens, ..].
template <class T>
struct StoreTile {
  T* to;
  int64_t stride;
  int g;
  __device__ __forceinline__ void operator()(int tile, float low, float high, int token) const {
    T* at = to + token * stride + tile * kTailRows + g;
    at[0] = from_float<T>(low);
    at[8] = from_float<T>(high);
  }
};

// The same, added to what is there.
template <class T>
struct AddTile {
  T* to;
  int64_t stride;
  int g;
  __device__ __forceinline__ void operator()(int tile, float low, float high, int token) const {
    T* at = to + token * stride + tile * kTailRows + g;
    grow(at, low);
    grow(at + 8, high);
  }
};

// How both tails begin and end; p is either's arguments.
template <class T, class Shape, class Tail>
__device__ __forceinline__ AddTile<T> begin_tail(TailConsumer<T, Shape>& consumer, const Tail& p) {
  T* residual = static_cast<T*>(p.residual);
  const AddTile<T> add{residual, p.residual_stride, consumer.g};
  const int num_k = static_cast<int>(p.a / Shape::kDepth);
  consumer.hold(static_cast<const T*>(p.attended), p.attended_stride, num_k);
  consumer.template multiply<1, false>(num_k, nullptr, 0, add);
  consumer.meet_and_norm(residual, p.residual_stride, static_cast<int>(p.h / Shape::kDepth), p.mlp_norm, p.eps);
  return add;
}
template <class T, class Shape, class Tail>
__device__ __forceinline__ void end_tail(TailConsumer<T, Shape>& consumer, const Tail& p) {
  launch_successor();
  if (p.w_qkv == nullptr) {
    consumer.next_tiles();
    return;
  }
  const int num_k = static_cast<int>(p.h / Shape::kDepth);
  consumer.meet_and_norm(static_cast<const T*>(p.residual), p.residual_stride, num_k, p.next_norm, p.eps);
  consumer.template multiply<1, false>(num_k, nullptr, 0,
                                       StoreTile<T>{static_cast<T*>(p.qkv), p.qkv_stride, consumer.g});
}

// Asks for memory to be brought into L2: the block's part, by the loading thread.
__device__ __forceinline__ void prefetch_part(const void* from, int64_t bytes) {
  constexpr int64_t kPiece = 8192;
  const char* start = static_cast<const char*>(from);
  for (int64_t piece = blockIdx.x; piece < bytes / kPiece; piece += gridDim.x)
    prefetch_l2(start + piece * kPiece, kPiece);
}

}  // namespace lamella
