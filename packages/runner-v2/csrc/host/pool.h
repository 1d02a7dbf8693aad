// The process's one thread pool for native CPU work: n - 1 workers and the calling thread.
//
//   run(body)            body(lane) once on every thread, with barriers between the phases of a fused op
//   parallel_for(n, f)   f(begin, end) on contiguous shares of [0, n)
//
// Workers spin for at most 20 us after their last work and then sleep, so that an idle engine costs nothing and torch's
// own threads find the cores free. Regions are exclusive: a second calling thread waits for the first. A region must not
// start another one, and what runs inside must not throw.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace lamella::host {

class Pool;

// Half-open share of a range.
struct Span {
  int64_t begin;
  int64_t end;
};

// The part of [0, n) that falls to `index` of `count` when whole multiples of `grain` are dealt out evenly.
inline Span share(int64_t n, int64_t index, int64_t count, int64_t grain = 1) {
  const int64_t units = (n + grain - 1) / grain;
  const int64_t each = units / count, extra = units % count;
  const int64_t first = index * each + (index < extra ? index : extra);
  const int64_t begin = first * grain, end = (first + each + (index < extra ? 1 : 0)) * grain;
  return {begin < n ? begin : n, end < n ? end : n};
}

// One thread inside a region.
class Lane {
 public:
  Lane(Pool& pool, int index, int count) : pool_(pool), index_(index), count_(count) {}
  int index() const { return index_; }
  int count() const { return count_; }
  Span share(int64_t n, int64_t grain = 1) const { return host::share(n, index_, count_, grain); }
  // Returns once every thread of the region has come here; what they wrote before is visible after. Tickets restart.
  inline void barrier();
  // 0, 1, 2 ... over all threads since the region's start or its last barrier: deals out items of unequal cost.
  inline int64_t ticket();

 private:
  Pool& pool_;
  int index_;
  int count_;
};

class Pool {
 public:
  // The process's pool. It starts with one thread per core and is never destroyed.
  static Pool& get();

  // Number of threads from now on, the caller included; at least 1. Waits for a running region.
  void resize(int num_threads);
  int size() const { return count_; }

  template <class Body>
  void run(Body&& body) {
    using Bare = std::remove_reference_t<Body>;
    region([](void* context, Lane& lane) { (*static_cast<Bare*>(context))(lane); },
           const_cast<void*>(static_cast<const void*>(&body)));
  }

  // f(begin, end) for shares that are multiples of `grain`; on the calling thread alone if there is only one share.
  template <class Function>
  void parallel_for(int64_t n, Function&& f, int64_t grain = 1) {
    if (n <= 0) return;
    if (n <= grain || count_ == 1) {
      f(int64_t{0}, n);
      return;
    }
    run([&](Lane& lane) {
      const Span mine = lane.share(n, grain);
      if (mine.begin < mine.end) f(mine.begin, mine.end);
    });
  }

 private:
  friend class Lane;
  using Entry = void (*)(void* context, Lane& lane);

  explicit Pool(int num_threads);
  void region(Entry entry, void* context);
  void start_workers();
  void stop_workers();
  void work(int index, uint32_t seen);
  void wait_at_barrier(uint32_t phase);

  // Sleeping and waking around a condition that is written before wake() and read inside sleep().
  struct Bed {
    std::mutex mutex;
    std::condition_variable condition;
    std::atomic<int> sleepers{0};
    template <class Ready>
    void sleep(Ready ready) {
      std::unique_lock<std::mutex> lock(mutex);
      sleepers.fetch_add(1, std::memory_order_seq_cst);
      condition.wait(lock, ready);
      sleepers.fetch_sub(1, std::memory_order_relaxed);
    }
    void wake() {
      if (sleepers.load(std::memory_order_seq_cst) == 0) return;
      std::lock_guard<std::mutex> lock(mutex);
      condition.notify_all();
    }
  };

  int count_ = 1;
  std::mutex callers_;
  std::vector<std::thread> workers_;
  Entry entry_ = nullptr;
  void* context_ = nullptr;
  bool stopping_ = false;
  // Apart on cache lines: each is written by another party.
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> running_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  alignas(64) std::atomic<int64_t> tickets_{0};
  Bed idle_, finish_, gate_;
};

inline void Lane::barrier() {
  if (count_ == 1) {
    pool_.tickets_.store(0, std::memory_order_relaxed);
    return;
  }
  const uint32_t phase = pool_.phase_.load(std::memory_order_relaxed);
  if (pool_.arrived_.fetch_add(1, std::memory_order_acq_rel) == count_ - 1) {
    pool_.arrived_.store(0, std::memory_order_relaxed);
    pool_.tickets_.store(0, std::memory_order_relaxed);
    pool_.phase_.store(phase + 1, std::memory_order_seq_cst);
    pool_.gate_.wake();
  } else {
    pool_.wait_at_barrier(phase);
  }
}

inline int64_t Lane::ticket() { return pool_.tickets_.fetch_add(1, std::memory_order_relaxed); }

}  // namespace lamella::host
