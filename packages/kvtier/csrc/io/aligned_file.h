// A file that is read and written past the page cache where the system allows it.
//
// O_DIRECT on Linux, F_NOCACHE on macOS. Where O_DIRECT is refused (EINVAL: overlays, old tmpfs, some NFS) the file is
// buffered, and drop_cache() gives its pages back.
#pragma once

#include <cstdint>
#include <string>

namespace lamella::kvtier {

class AlignedFile {
 public:
  // Opens `name` in the folder of dir_fd. create: a new file of mode 0600, an error if there is one.
  // Throws std::system_error.
  AlignedFile(int dir_fd, const std::string& name, bool write, bool create, bool direct);
  ~AlignedFile() { close(); }
  AlignedFile(const AlignedFile&) = delete;
  AlignedFile& operator=(const AlignedFile&) = delete;

  int fd() const { return fd_; }
  bool direct() const { return direct_; }
  // What addresses, offsets and lengths must be multiples of; 1 if buffered.
  unsigned alignment() const { return alignment_; }
  std::uint64_t size() const;
  // 0 or the errno. Where the file system cannot reserve space nothing happens, and that is 0 too.
  int preallocate(std::uint64_t bytes) const;
  int truncate(std::uint64_t bytes) const;
  void drop_cache() const;
  void close();

 private:
  unsigned probe() const;

  int fd_ = -1;
  bool direct_ = false;
  unsigned alignment_ = 1;
};

}  // namespace lamella::kvtier
