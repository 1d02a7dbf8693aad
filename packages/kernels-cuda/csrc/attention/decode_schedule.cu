// The chunks of all (sequence, group) pairs stand in one row; part p takes those from p * payload on:
//
//   pair     | 0          | 1    | 2                       | 3 |    pairs without a key take one place: who comes by it
//   parts    |0       |1       |2       |3       |4       |          writes their zeros
//
// so a pair is cut at borders of parts only, and everything about the cut follows from payload.
#include "attention/decode_schedule.h"

#include "attention/chunks.cuh"
#include "device/launch.cuh"

namespace lamella {
namespace {

constexpr int kThreads = 1024;

struct ScheduleParams {
  int32_t* schedule;
  const int32_t* seq_lens;
  int batch, num_queries, num_groups, num_parts, window;
};

// Inclusive scan over the block. scratch: 32 places, free again after the next __syncthreads().
__device__ __forceinline__ int64_t block_scan(int64_t x, int64_t* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int offset = 1; offset < 32; offset <<= 1) {
    const int64_t other = __shfl_up_sync(0xffffffffu, x, offset);
    if (lane >= offset) x += other;
  }
  if (lane == 31) scratch[warp] = x;
  __syncthreads();
  for (int i = 0; i < warp; ++i) x += scratch[i];
  return x;
}

__global__ void __launch_bounds__(kThreads) decode_schedule_kernel(const ScheduleParams p) {
  __shared__ int64_t scratch[32], ends[kThreads], sums[kThreads / 32];
  __shared__ int most[kThreads / 32];
  wait_predecessor();
  const auto places = [&](int sequence) {  // of each of its groups
    const int chunks = attention::visible_keys(p.seq_lens[sequence], p.num_queries, p.window).num_chunks();
    return chunks > 0 ? chunks : 1;
  };
  int64_t total = 0;
  int widest = 1;
  for (int i = threadIdx.x; i < p.batch; i += kThreads) {
    const int width = places(i);
    total += static_cast<int64_t>(width) * p.num_groups;
    widest = max(widest, width);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    total += __shfl_xor_sync(0xffffffffu, total, offset);
    widest = max(widest, __shfl_xor_sync(0xffffffffu, widest, offset));
  }
  if (threadIdx.x % 32 == 0) {
    sums[threadIdx.x / 32] = total;
    most[threadIdx.x / 32] = widest;
  }
  __syncthreads();
  total = 0;
  for (int i = 0; i < kThreads / 32; ++i) {
    total += sums[i];
    widest = max(widest, most[i]);
  }
  int64_t payload = max((total + p.num_parts - 1) / p.num_parts, int64_t{1});
  // whole pairs per part cost no partial results; parts that end early leave their bandwidth to the others
  const int64_t whole = (payload + widest - 1) / widest * widest;
  if (whole <= payload + payload / 16) payload = whole;

  int4* parts = reinterpret_cast<int4*>(p.schedule);
  const int step = static_cast<int>(payload);
  int64_t before = 0;  // places of the sequences of earlier rounds
  for (int base = 0; base < p.batch; base += kThreads) {
    const int mine = base + threadIdx.x;
    const int64_t width = mine < p.batch ? static_cast<int64_t>(places(mine)) * p.num_groups : 0;
    ends[threadIdx.x] = before + block_scan(width, scratch);
    __syncthreads();
    const int count = min(p.batch - base, kThreads);
    const int64_t after = ends[count - 1];
    const int64_t last = min((after + payload - 1) / payload, static_cast<int64_t>(p.num_parts));
    for (int64_t part = (before + payload - 1) / payload + threadIdx.x; part < last; part += kThreads) {
      const int64_t place = part * payload;
      int low = 0, high = count - 1;  // the first sequence that ends behind the place
      while (low < high) {
        const int middle = (low + high) / 2;
        if (ends[middle] > place) {
          high = middle;
        } else {
          low = middle + 1;
        }
      }
      const int64_t inside = place - (low > 0 ? ends[low - 1] : before);
      const int width_one = places(base + low);
      parts[part] = make_int4(base + low, static_cast<int>(inside / width_one), static_cast<int>(inside % width_one),
                              step);
    }
    before = after;
    __syncthreads();
  }
  const int64_t used = (total + payload - 1) / payload;
  for (int64_t part = used + threadIdx.x; part <= p.num_parts; part += kThreads)
    parts[part] = make_int4(p.batch, 0, 0, step);
  int32_t* counters = p.schedule + 4 * (static_cast<int64_t>(p.num_parts) + 1);
  for (int64_t i = threadIdx.x; i < static_cast<int64_t>(p.batch) * p.num_groups; i += kThreads) counters[i] = 0;
  launch_successor();
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
  const Launch how{dim3(1), dim3(kThreads), 0, static_cast<cudaStream_t>(stream)};
  return launch(decode_schedule_kernel, how, p);
}

LAMELLA_API int64_t lamella_decode_parts(void) { return 2 * static_cast<int64_t>(lamella::device_facts().num_sms); }
