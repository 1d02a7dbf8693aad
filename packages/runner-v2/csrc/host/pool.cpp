#include "pool.h"

#include <chrono>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace lamella::host {
namespace {

// Idle workers spin this long before they sleep.
constexpr int64_t kIdleSpin_ns = 20'000;
// Inside a region the others are about to arrive; sleep only when one of them has lost its core.
constexpr int64_t kBusySpin_ns = 20'000;
constexpr int64_t kBusyYield_ns = 50'000;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__) || defined(__arm__)
  __asm__ __volatile__("yield" ::: "memory");
#endif
}

int64_t now_ns() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

template <class Ready>
bool spin(Ready ready, int64_t spin_ns, int64_t yield_ns) {
  for (int i = 0; i < 64; ++i) {
    if (ready()) return true;
    relax();
  }
  const int64_t start = now_ns();
  for (;;) {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return true;
      relax();
    }
    const int64_t waited = now_ns() - start;
    if (waited >= spin_ns + yield_ns) return false;
    if (waited >= spin_ns) std::this_thread::yield();
  }
}

Pool* instance = nullptr;

}  // namespace

Pool& Pool::get() {
  static std::once_flag once;
  std::call_once(once, [] {
    const unsigned cores = std::thread::hardware_concurrency();
    instance = new Pool(cores > 0 ? static_cast<int>(cores) : 1);
#if defined(__unix__) || defined(__APPLE__)
    // A forked child has none of the workers: it starts with a fresh pool of the same size.
    pthread_atfork(nullptr, nullptr, [] { instance = new Pool(instance->count_); });
#endif
  });
  return *instance;
}

Pool::Pool(int num_threads) : count_(num_threads < 1 ? 1 : num_threads) {}

void Pool::resize(int num_threads) {
  std::lock_guard<std::mutex> lock(callers_);
  if (num_threads < 1) num_threads = 1;
  if (num_threads == count_) return;
  stop_workers();
  count_ = num_threads;
}

void Pool::region(Entry entry, void* context) {
  std::lock_guard<std::mutex> lock(callers_);
  tickets_.store(0, std::memory_order_relaxed);
  Lane lane(*this, 0, count_);
  if (count_ == 1) {
    entry(context, lane);
    return;
  }
  if (workers_.empty()) start_workers();
  entry_ = entry;
  context_ = context;
  running_.store(count_ - 1, std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  idle_.wake();
  entry(context, lane);
  const auto done = [this] { return running_.load(std::memory_order_seq_cst) == 0; };
  if (!spin(done, kBusySpin_ns, kBusyYield_ns)) finish_.sleep(done);
}

void Pool::start_workers() {
  stopping_ = false;
  const uint32_t seen = epoch_.load(std::memory_order_relaxed);
  workers_.reserve(static_cast<size_t>(count_ - 1));
  for (int index = 1; index < count_; ++index) workers_.emplace_back([this, index, seen] { work(index, seen); });
}

void Pool::stop_workers() {
  if (workers_.empty()) return;
  stopping_ = true;
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  idle_.wake();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
}

void Pool::work(int index, uint32_t seen) {
  for (;;) {
    const auto called = [this, seen] { return epoch_.load(std::memory_order_seq_cst) != seen; };
    if (!spin(called, kIdleSpin_ns, 0)) idle_.sleep(called);
    if (stopping_) return;
    ++seen;
    Lane lane(*this, index, count_);
    entry_(context_, lane);
    if (running_.fetch_sub(1, std::memory_order_seq_cst) == 1) finish_.wake();
  }
}

void Pool::wait_at_barrier(uint32_t phase) {
  const auto open = [this, phase] { return phase_.load(std::memory_order_seq_cst) != phase; };
  if (!spin(open, kBusySpin_ns, kBusyYield_ns)) gate_.sleep(open);
}

}  // namespace lamella::host
