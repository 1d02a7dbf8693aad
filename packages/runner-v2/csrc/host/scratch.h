// Memory for the length of one call. It grows to what the largest call needed and is kept by the calling thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace lamella::host {

class Scratch {
 public:
  // The calling thread's own.
  static Scratch& mine() {
    static thread_local Scratch instance;
    return instance;
  }

  // Forgets what was taken. If the last call did not fit, there is one buffer now that would have held it.
  void reset() {
    if (blocks_.size() > 1) {
      blocks_.clear();
      grow(needed_);
    }
    used_ = needed_ = 0;
  }

  // Uninitialised, aligned to a cache line, valid until reset().
  template <class T>
  T* take(int64_t count) {
    const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    if (blocks_.empty() || used_ + bytes > blocks_.back().size) {
      grow(bytes > kLeast ? bytes : kLeast);
      used_ = 0;
    }
    std::byte* taken = blocks_.back().aligned + used_;
    used_ += bytes;
    needed_ += bytes;
    return reinterpret_cast<T*>(taken);
  }

 private:
  static constexpr size_t kLeast = 1 << 20;
  struct Memory {
    std::unique_ptr<std::byte[]> bytes;
    std::byte* aligned;
    size_t size;
  };

  void grow(size_t size) {
    std::unique_ptr<std::byte[]> bytes(new std::byte[size + 64]);
    const uintptr_t address = reinterpret_cast<uintptr_t>(bytes.get());
    std::byte* aligned = bytes.get() + ((address + 63) / 64 * 64 - address);
    blocks_.push_back({std::move(bytes), aligned, size});
  }

  std::vector<Memory> blocks_;
  size_t used_ = 0;    // of the last block
  size_t needed_ = 0;  // since reset()
};

}  // namespace lamella::host
