// Reads and writes of byte ranges of open files, many at a time.
//
//   submit(ops) ──▶ in flight, at most depth; the rest waits inside ──▶ wait(min_done, timeout) ──▶ Done(id, result)
//
// Every op ends exactly once. result: bytes transferred (fewer than asked only at the end of a file, or where a device
// takes no more), or the negative errno. One thread submits and waits; wake() may be called by any.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace lamella::kvtier {

struct Op {
  std::uint64_t id;
  int fd;
  bool write;
  std::uint64_t offset;
  std::vector<iovec> parts;  // consecutive in the file; the memory must stay until the op is done
};

struct Done {
  std::uint64_t id;
  std::int64_t result;
};

class IoEngine {
 public:
  virtual ~IoEngine() = default;
  virtual void submit(std::vector<Op> ops) = 0;
  // Up to all that is done; waits until min_done are, the time is over (negative: without end) or wake() was called.
  virtual std::vector<Done> wait(std::size_t min_done, double timeout_s) = 0;
  virtual void wake() = 0;
  virtual std::string name() const = 0;
};

// Drops the first `count` bytes of what an op still has to transfer.
void advance(Op& op, std::size_t count);
std::size_t total(const Op& op);

std::unique_ptr<IoEngine> make_thread_engine(unsigned num_threads);
// nullptr where the system has no io_uring or refuses it (old kernels, seccomp, containers); why says so.
std::unique_ptr<IoEngine> make_uring_engine(unsigned depth, std::string& why);

}  // namespace lamella::kvtier
