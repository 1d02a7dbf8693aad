// The blocks that work on one row: a cluster where rows are few, else one block. All of them take the same decisions from
// the same numbers; they share histograms and winners through distributed shared memory.
#pragma once

#include <cstdint>

namespace lamella::sampling {

constexpr int kThreads = 512, kWarps = kThreads / 32;

struct Team {
  int rank = 0, size = 1;

  __device__ Team() {
#if __CUDA_ARCH__ >= 900
    uint32_t r, n;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
    rank = static_cast<int>(r);
    size = static_cast<int>(n);
#endif
  }
  __device__ void sync() const {
#if __CUDA_ARCH__ >= 900
    if (size > 1) {
      asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
      return;
    }
#endif
    __syncthreads();
  }
  // The same variable in the shared memory of another block of the team.
  template <class T>
  __device__ T* of(T* mine, int other) const {
#if __CUDA_ARCH__ >= 900
    uint64_t theirs;
    asm("mapa.u64 %0, %1, %2;" : "=l"(theirs) : "l"(reinterpret_cast<uint64_t>(mine)), "r"(other));
    return reinterpret_cast<T*>(theirs);
#else
    return mine;
#endif
  }
};

// Every thread gets the result. scratch: [kWarps], free again after the next barrier.
template <class T, class Op>
__device__ __forceinline__ T block_reduce(T x, T* scratch, Op op) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) x = op(x, __shfl_xor_sync(0xffffffffu, x, offset));
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  x = scratch[threadIdx.x % kWarps];
#pragma unroll
  for (int offset = kWarps / 2; offset > 0; offset >>= 1) x = op(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

// Sum of what the threads before this one have, and of all.
__device__ __forceinline__ uint64_t block_prefix(uint64_t x, uint64_t* scratch, uint64_t* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint64_t upto = x;
#pragma unroll
  for (int offset = 1; offset < 32; offset <<= 1) {
    const uint64_t other = __shfl_up_sync(0xffffffffu, upto, offset);
    if (lane >= offset) upto += other;
  }
  __syncthreads();
  if (lane == 31) scratch[warp] = upto;
  __syncthreads();
  uint64_t before = 0, all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) before = all;
    all += scratch[w];
  }
  *total = all;
  return before + upto - x;
}

}  // namespace lamella::sampling
