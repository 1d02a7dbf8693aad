// Threads that each run one preadv or pwritev at a time: works on every POSIX system.
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "io/engine.h"

namespace lamella::kvtier {
namespace {

constexpr int kMaxParts = 1024;  // IOV_MAX of Linux and macOS

std::int64_t transfer(Op& op) {
  std::int64_t done = 0;
  while (!op.parts.empty()) {
    const int count = static_cast<int>(std::min<std::size_t>(op.parts.size(), kMaxParts));
    const auto offset = static_cast<off_t>(op.offset);
    const ssize_t now = op.write ? pwritev(op.fd, op.parts.data(), count, offset)
                                 : preadv(op.fd, op.parts.data(), count, offset);
    if (now < 0) {
      if (errno == EINTR) continue;
      // the rest of a short transfer may be refused for its alignment: what came is what is reported
      return done > 0 && errno == EINVAL ? done : -errno;
    }
    if (now == 0) break;
    done += now;
    advance(op, static_cast<std::size_t>(now));
  }
  return done;
}

class ThreadEngine final : public IoEngine {
 public:
  explicit ThreadEngine(unsigned num_threads) {
    for (unsigned i = 0; i < std::max(1u, num_threads); ++i) threads_.emplace_back([this] { run(); });
  }

  ~ThreadEngine() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    has_work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void submit(std::vector<Op> ops) override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (Op& op : ops) queue_.push_back(std::move(op));
    }
    has_work_.notify_all();
  }

  std::vector<Done> wait(std::size_t min_done, double timeout_s) override {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto enough = [&] { return done_.size() >= min_done || woken_; };
    if (timeout_s < 0) {
      has_done_.wait(lock, enough);
    } else if (timeout_s > 0) {
      has_done_.wait_for(lock, std::chrono::duration<double>(timeout_s), enough);
    }
    woken_ = false;
    return std::exchange(done_, {});
  }

  void wake() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      woken_ = true;
    }
    has_done_.notify_all();
  }

  std::string name() const override { return "threads"; }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      has_work_.wait(lock, [&] { return closing_ || !queue_.empty(); });
      if (queue_.empty()) return;
      Op op = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      const std::int64_t result = transfer(op);
      lock.lock();
      done_.push_back(Done{op.id, result});
      has_done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable has_work_, has_done_;
  std::deque<Op> queue_;
  std::vector<Done> done_;
  bool closing_ = false, woken_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoEngine> make_thread_engine(unsigned num_threads) {
  return std::make_unique<ThreadEngine>(num_threads);
}

}  // namespace lamella::kvtier
