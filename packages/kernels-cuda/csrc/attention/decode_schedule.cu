// The chunks of all (sequence, group) pairs stand in one row; each part takes neighbouring ones, as many as any other
// or one more:
//
//   pair     | 0          | 1    | 2                       | 3 |    pairs without a key take one place: who comes by it
//   parts    |0       |1       |2      |3      |4      |             writes their zeros
//
// so a pair is cut at borders of parts only, and everything about the cut follows from the two numbers of a Share.
#include "attention/decode_schedule.h"

#include "attention/chunks.cuh"
#include "device/launch.cuh"

namespace lamella {
namespace {

struct ScheduleParams {
  int32_t* schedule;
  const int32_t* seq_lens;
  int batch, num_queries, num_groups, num_parts, window;
};

struct Totals {
  uint32_t sum;  // inclusive, up to this thread
  uint32_t all;
  int widest;
};

// scratch: two places per warp, free again after the next __syncthreads().
template <int kThreads>
__device__ __forceinline__ Totals block_totals(uint32_t places, int width, uint2* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int offset = 1; offset < 32; offset <<= 1) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, places, offset);
    if (lane >= offset) places += other;
    width = max(width, __shfl_xor_sync(0xffffffffu, width, offset));
  }
  if (lane == 31) scratch[warp] = make_uint2(places, width);
  __syncthreads();
  Totals totals = {places, 0, 0};
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) {
    const uint2 one = scratch[i];
    if (i < warp) totals.sum += one.x;
    totals.all += one.x;
    totals.widest = max(totals.widest, static_cast<int>(one.y));
  }
  return totals;
}

// An even share. Whole pairs per part cost no partial results, if that takes hardly longer.
__device__ __forceinline__ attention::Share share_out(uint32_t total, int widest, int num_parts) {
  const uint32_t parts = num_parts, most = max((total + parts - 1) / parts, 1u), width = max(widest, 1);
  const uint32_t whole = (most + width - 1) / width * width;
  if (whole <= most + most / 16) return {whole, 0};
  return {total / parts, total % parts};
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) decode_schedule_kernel(const ScheduleParams p) {
  __shared__ uint2 scratch[kThreads / 32];
  __shared__ uint32_t ends[kThreads];
  __shared__ int lengths[kThreads];
  const auto places = [&](int length) {  // of each group of such a sequence
    return max(attention::visible_keys(length, p.num_queries, p.window).num_chunks(), 1);
  };
  wait_predecessor();
  launch_successor();
  int length = static_cast<int>(threadIdx.x) < p.batch ? p.seq_lens[threadIdx.x] : 0;
  int width = static_cast<int>(threadIdx.x) < p.batch ? places(length) : 0;
  int32_t* counters = p.schedule + 4 * (static_cast<int64_t>(p.num_parts) + 1);
  for (int64_t i = threadIdx.x; i < static_cast<int64_t>(p.batch) * p.num_groups; i += kThreads) counters[i] = 0;

  uint32_t later = 0;  // places and width of sequences of later rounds
  int widest = width;
  for (int i = threadIdx.x + kThreads; i < p.batch; i += kThreads) {
    const int one = places(p.seq_lens[i]);
    later += static_cast<uint32_t>(one) * p.num_groups;
    widest = max(widest, one);
  }
  const bool many = p.batch > kThreads;
  Totals totals = {0, 0, 0};
  uint32_t total = 0;
  if (many) {
    totals = block_totals<kThreads>(later + static_cast<uint32_t>(width) * p.num_groups, widest, scratch);
    total = totals.all;
    widest = totals.widest;
    __syncthreads();
  }
  int4* parts = reinterpret_cast<int4*>(p.schedule);
  attention::Share share = {0, 0};
  uint32_t before = 0;  // places of the sequences of earlier rounds
  for (int base = 0; base < p.batch; base += kThreads) {
    const int mine = base + static_cast<int>(threadIdx.x), count = min(p.batch - base, kThreads);
    if (base > 0) {
      length = mine < p.batch ? p.seq_lens[mine] : 0;
      width = mine < p.batch ? places(length) : 0;
    }
    totals = block_totals<kThreads>(static_cast<uint32_t>(width) * p.num_groups, width, scratch);
    if (base == 0) share = share_out(many ? total : totals.all, many ? widest : totals.widest, p.num_parts);
    if (!many) total = totals.all;
    ends[threadIdx.x] = before + totals.sum;
    lengths[threadIdx.x] = length;
    __syncthreads();
    const uint32_t after = before + totals.all;
    for (int part = threadIdx.x; part < p.num_parts; part += kThreads) {
      const uint32_t place = share.start(part);
      if (place < before || place >= after) continue;
      int low = 0, high = count - 1;  // the first sequence that ends behind the place
      while (low < high) {
        const int middle = (low + high) / 2;
        if (ends[middle] > place) {
          high = middle;
        } else {
          low = middle + 1;
        }
      }
      const uint32_t inside = place - (low > 0 ? ends[low - 1] : before), width_one = places(lengths[low]);
      const uint32_t group = inside / width_one;
      parts[part] = make_int4(base + low, static_cast<int>(group), static_cast<int>(inside - group * width_one),
                              lengths[low]);
    }
    before = after;
    __syncthreads();
  }
  for (int part = threadIdx.x; part <= p.num_parts; part += kThreads)
    if (part == p.num_parts || share.start(part) >= total)
      parts[part] = make_int4(p.batch, static_cast<int>(share.more), 0, static_cast<int>(share.each));
}

}  // namespace
}  // namespace lamella

LAMELLA_API int lamella_decode_schedule(int32_t* schedule, const int32_t* seq_lens, int64_t batch, int64_t num_queries,
                                        int64_t num_groups, int64_t num_parts, int64_t window, void* stream) {
  using namespace lamella;
  if (batch > INT32_MAX / 2 || num_groups > INT32_MAX / 2 || num_parts < 1 || num_parts > (1 << 20) ||
      reinterpret_cast<uintptr_t>(schedule) % 16 != 0)
    return kUnsupported;
  const ScheduleParams p{schedule,
                         seq_lens,
                         static_cast<int>(batch),
                         static_cast<int>(num_queries),
                         static_cast<int>(num_groups),
                         static_cast<int>(num_parts),
                         static_cast<int>(window < INT32_MAX / 2 ? window : 0)};
  const auto go = [&](auto threads) {
    const Launch how{dim3(1), dim3(threads.value), 0, static_cast<cudaStream_t>(stream)};
    return launch(decode_schedule_kernel<threads.value>, how, p);
  };
  // fewer threads start sooner; as many as there are parts find their places in one round
  return batch <= 512 ? go(std::integral_constant<int, 512>{}) : go(std::integral_constant<int, 1024>{});
}

LAMELLA_API int64_t lamella_decode_parts(void) { return 2 * static_cast<int64_t>(lamella::device_facts().num_sms); }
