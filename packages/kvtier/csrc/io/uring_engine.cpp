// io_uring: through liburing where it was found, else through its system calls and the two mapped rings.
#include "io/engine.h"

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#define LAMELLA_HAS_URING 1
#include <linux/io_uring.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <utility>
#ifdef LAMELLA_LIBURING
#include <liburing.h>
#endif
#if !defined(__NR_io_uring_setup)
#define __NR_io_uring_setup 425
#define __NR_io_uring_enter 426
#endif
#endif

namespace lamella::kvtier {

#ifdef LAMELLA_HAS_URING
namespace {

constexpr unsigned kMaxParts = 1024;

#ifdef LAMELLA_LIBURING

class Ring {
 public:
  static constexpr const char* kName = "io_uring (liburing)";

  int open(unsigned depth) {
    const int rc = io_uring_queue_init(depth, &ring_, 0);
    opened_ = rc == 0;
    return -rc;
  }
  ~Ring() {
    if (opened_) io_uring_queue_exit(&ring_);
  }
  int fd() const { return ring_.ring_fd; }
  // False if the ring is full.
  bool push(const Op& op, std::uint64_t tag) {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    if (entry == nullptr) return false;
    const auto count = static_cast<unsigned>(std::min<std::size_t>(op.parts.size(), kMaxParts));
    if (op.write) {
      io_uring_prep_writev(entry, op.fd, op.parts.data(), count, op.offset);
    } else {
      io_uring_prep_readv(entry, op.fd, op.parts.data(), count, op.offset);
    }
    entry->user_data = tag;
    return true;
  }
  int flush() {
    const int rc = io_uring_submit(&ring_);
    return rc < 0 ? -rc : 0;
  }
  bool pop(std::uint64_t& tag, int& result) {
    io_uring_cqe* entry = nullptr;
    if (io_uring_peek_cqe(&ring_, &entry) != 0 || entry == nullptr) return false;
    tag = entry->user_data;
    result = entry->res;
    io_uring_cqe_seen(&ring_, entry);
    return true;
  }

 private:
  io_uring ring_{};
  bool opened_ = false;
};

#else

class Ring {
 public:
  static constexpr const char* kName = "io_uring (system calls)";

  int open(unsigned depth) {
    io_uring_params params{};
    fd_ = static_cast<int>(syscall(__NR_io_uring_setup, depth, &params));
    if (fd_ < 0) return errno;
    sq_bytes_ = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    cq_bytes_ = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    sq_ = map(sq_bytes_, IORING_OFF_SQ_RING);
    cq_ = map(cq_bytes_, IORING_OFF_CQ_RING);
    entries_ = static_cast<io_uring_sqe*>(map(entries_bytes_, IORING_OFF_SQES));
    if (sq_ == nullptr || cq_ == nullptr || entries_ == nullptr) return ENOMEM;
    sq_head_ = at(sq_, params.sq_off.head);
    sq_tail_ = at(sq_, params.sq_off.tail);
    sq_mask_ = *at(sq_, params.sq_off.ring_mask);
    sq_array_ = at(sq_, params.sq_off.array);
    num_entries_ = params.sq_entries;
    cq_head_ = at(cq_, params.cq_off.head);
    cq_tail_ = at(cq_, params.cq_off.tail);
    cq_mask_ = *at(cq_, params.cq_off.ring_mask);
    completions_ = reinterpret_cast<io_uring_cqe*>(static_cast<char*>(cq_) + params.cq_off.cqes);
    return 0;
  }
  ~Ring() {
    if (sq_ != nullptr) munmap(sq_, sq_bytes_);
    if (cq_ != nullptr) munmap(cq_, cq_bytes_);
    if (entries_ != nullptr) munmap(entries_, entries_bytes_);
    if (fd_ >= 0) close(fd_);
  }
  int fd() const { return fd_; }
  bool push(const Op& op, std::uint64_t tag) {
    const unsigned tail = *sq_tail_;  // only this thread writes it
    if (tail - __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE) >= num_entries_) return false;
    const unsigned slot = tail & sq_mask_;
    io_uring_sqe& entry = entries_[slot];
    std::memset(&entry, 0, sizeof entry);
    entry.opcode = op.write ? IORING_OP_WRITEV : IORING_OP_READV;
    entry.fd = op.fd;
    entry.off = op.offset;
    entry.addr = reinterpret_cast<std::uint64_t>(op.parts.data());
    entry.len = static_cast<unsigned>(std::min<std::size_t>(op.parts.size(), kMaxParts));
    entry.user_data = tag;
    sq_array_[slot] = slot;
    __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
    return true;
  }
  int flush() {
    for (;;) {
      const unsigned count = *sq_tail_ - __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE);
      if (count == 0) return 0;
      if (syscall(__NR_io_uring_enter, fd_, count, 0, 0, nullptr, 0) < 0 && errno != EINTR) return errno;
    }
  }
  bool pop(std::uint64_t& tag, int& result) {
    const unsigned head = *cq_head_;
    if (head == __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) return false;
    const io_uring_cqe& entry = completions_[head & cq_mask_];
    tag = entry.user_data;
    result = entry.res;
    __atomic_store_n(cq_head_, head + 1, __ATOMIC_RELEASE);
    return true;
  }

 private:
  void* map(std::size_t bytes, std::uint64_t offset) const {
    void* where = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, static_cast<off_t>(offset));
    return where == MAP_FAILED ? nullptr : where;
  }
  static unsigned* at(void* ring, unsigned offset) {
    return reinterpret_cast<unsigned*>(static_cast<char*>(ring) + offset);
  }

  int fd_ = -1;
  void* sq_ = nullptr;
  void* cq_ = nullptr;
  io_uring_sqe* entries_ = nullptr;
  io_uring_cqe* completions_ = nullptr;
  std::size_t sq_bytes_ = 0, cq_bytes_ = 0, entries_bytes_ = 0;
  unsigned *sq_head_ = nullptr, *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  unsigned sq_mask_ = 0, cq_mask_ = 0, num_entries_ = 0;
};

#endif

class UringEngine final : public IoEngine {
 public:
  int open(unsigned depth) {
    depth = std::clamp(depth, 1u, 4096u);
    const int error = ring_.open(depth);
    if (error != 0) return error;
    wake_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (wake_fd_ < 0) return errno;
    slots_.resize(depth);
    for (unsigned i = depth; i-- > 0;) free_.push_back(i);
    return 0;
  }

  ~UringEngine() override {
    // The kernel may still write into buffers: they must not go before the last op has ended.
    while (num_in_flight_ > 0 && collect(1, -1.0, false)) {
    }
    if (wake_fd_ >= 0) close(wake_fd_);
  }

  void submit(std::vector<Op> ops) override {
    for (Op& op : ops) queue_.push_back(std::move(op));
    start();
  }

  std::vector<Done> wait(std::size_t min_done, double timeout_s) override {
    collect(min_done, timeout_s, true);
    return std::exchange(done_, {});
  }

  void wake() override {
    const std::uint64_t one = 1;
    const ssize_t written = write(wake_fd_, &one, sizeof one);
    static_cast<void>(written);  // a full counter is awake already
  }

  std::string name() const override { return Ring::kName; }

 private:
  struct Slot {
    Op op;
    std::int64_t transferred = 0;
  };

  void start() {
    while (!queue_.empty() && !free_.empty()) {
      const unsigned idx = free_.back();
      slots_[idx] = Slot{std::move(queue_.front()), 0};
      queue_.pop_front();
      free_.pop_back();
      ++num_in_flight_;
      push(idx);
    }
    flush();
  }

  void push(unsigned idx) {
    if (!ring_.push(slots_[idx].op, idx)) {
      flush();
      if (!ring_.push(slots_[idx].op, idx)) finish(idx, -EAGAIN);
    }
  }

  void flush() {
    // EAGAIN and EBUSY: short of kernel memory or of room for completions; tried again with the next collection
    broken_ = ring_.flush();
    if (broken_ == EAGAIN || broken_ == EBUSY) broken_ = 0;
  }

  void finish(unsigned idx, std::int64_t result) {
    done_.push_back(Done{slots_[idx].op.id, result});
    slots_[idx].op.parts.clear();
    free_.push_back(idx);
    --num_in_flight_;
  }

  void reap() {
    std::uint64_t tag;
    int result;
    while (ring_.pop(tag, result)) {
      const auto idx = static_cast<unsigned>(tag);
      Slot& slot = slots_[idx];
      if (result == -EINTR || result == -EAGAIN) {
        push(idx);
      } else if (result < 0) {
        // the rest of a short transfer may be refused for its alignment: what came is what is reported
        finish(idx, slot.transferred > 0 && result == -EINVAL ? slot.transferred : result);
      } else if (result == 0) {
        finish(idx, slot.transferred);
      } else {
        slot.transferred += result;
        advance(slot.op, static_cast<std::size_t>(result));
        if (slot.op.parts.empty()) {
          finish(idx, slot.transferred);
        } else {
          push(idx);
        }
      }
    }
    start();
  }

  bool collect(std::size_t min_done, double timeout_s, bool wakeable) {
    using Time = std::chrono::steady_clock;
    const auto until = Time::now() + std::chrono::duration<double>(std::max(timeout_s, 0.0));
    for (;;) {
      reap();
      if (broken_ != 0) return false;
      if (done_.size() >= min_done) break;
      // waiting for what never was submitted would last for ever, unless somebody may wake us
      if (!wakeable && num_in_flight_ == 0) return false;
      int wait_ms = -1;
      if (timeout_s >= 0) {
        const double left_s = std::chrono::duration<double>(until - Time::now()).count();
        if (left_s <= 0) break;
        wait_ms = static_cast<int>(left_s * 1e3) + 1;
      }
      pollfd fds[2] = {{ring_.fd(), POLLIN, 0}, {wake_fd_, POLLIN, 0}};
      poll(fds, wakeable ? 2 : 1, wait_ms);
      if (wakeable && (fds[1].revents & POLLIN) != 0) {
        drain_wakes();
        reap();
        break;
      }
    }
    return true;
  }

  void drain_wakes() const {
    std::uint64_t count;
    while (read(wake_fd_, &count, sizeof count) > 0) {
    }
  }

  Ring ring_;
  int wake_fd_ = -1;
  int broken_ = 0;
  std::vector<Slot> slots_;
  std::vector<unsigned> free_;
  std::size_t num_in_flight_ = 0;
  std::deque<Op> queue_;
  std::vector<Done> done_;
};

}  // namespace

std::unique_ptr<IoEngine> make_uring_engine(unsigned depth, std::string& why) {
  auto engine = std::make_unique<UringEngine>();
  const int error = engine->open(depth);
  if (error == 0) return engine;
  why = std::string("io_uring is refused: ") + std::strerror(error);
  return nullptr;
}

#else

std::unique_ptr<IoEngine> make_uring_engine(unsigned, std::string& why) {
  why = "this system has no io_uring";
  return nullptr;
}

#endif

}  // namespace lamella::kvtier
