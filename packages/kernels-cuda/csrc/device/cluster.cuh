// Pairs of thread blocks (clusters of two) that share what they load.
#pragma once

#include "device/tma.cuh"

namespace lamella::pair {

// 0 or 1: which of the two this one is.
__device__ __forceinline__ uint32_t rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of both.
__device__ __forceinline__ void sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Where something of this one's shared memory lies in that of the other.
__device__ __forceinline__ uint32_t address_in(uint32_t rank, const void* mine) {
  uint32_t theirs;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(shared_address(mine)), "r"(rank));
  return theirs;
}

// At a barrier of the other, by its address_in(). Says only that tensor cores have read: what threads wrote before is
// not made visible to the other, which would cost a fence of the whole device each time.
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ uint64_t normal_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// One box, to the same place in both; completes on the barrier of each.
__device__ __forceinline__ void load_box(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y,
                                         uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "h"(static_cast<uint16_t>(3)), "l"(policy)
      : "memory");
}

}  // namespace lamella::pair
