#include "io/aligned_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <system_error>

namespace lamella::kvtier {
namespace {

constexpr unsigned kPage = 4096;

int open_at(int dir_fd, const std::string& name, int flags) {
  int fd;
  do {
    fd = openat(dir_fd, name.c_str(), flags | O_CLOEXEC, 0600);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

}  // namespace

AlignedFile::AlignedFile(int dir_fd, const std::string& name, bool write, bool create, bool direct) {
  const int flags = (write ? O_RDWR : O_RDONLY) | (create ? O_CREAT | O_EXCL : 0);
#ifdef O_DIRECT
  if (direct) {
    fd_ = open_at(dir_fd, name, flags | O_DIRECT);
    direct_ = fd_ >= 0;
    // the refusal may come after the file was made
    if (fd_ < 0 && errno == EINVAL && create) unlinkat(dir_fd, name.c_str(), 0);
    if (fd_ < 0 && errno != EINVAL) throw std::system_error(errno, std::generic_category(), name);
  }
#endif
  if (fd_ < 0) fd_ = open_at(dir_fd, name, flags);
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), name);
#if !defined(O_DIRECT) && defined(F_NOCACHE)
  if (direct) fcntl(fd_, F_NOCACHE, 1);
#endif
  if (direct_) alignment_ = probe();
}

unsigned AlignedFile::probe() const {
#if defined(__linux__) && defined(STATX_DIOALIGN)
  struct statx info {};
  if (statx(fd_, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 && (info.stx_mask & STATX_DIOALIGN) != 0 &&
      info.stx_dio_offset_align != 0) {
    const unsigned both = info.stx_dio_offset_align > info.stx_dio_mem_align ? info.stx_dio_offset_align
                                                                             : info.stx_dio_mem_align;
    return both <= 512 ? 512 : kPage;
  }
#endif
  // A read of one small piece is refused where only whole pages are served; at the end of a file it gives nothing.
  void* memory = nullptr;
  if (posix_memalign(&memory, kPage, kPage) != 0) return kPage;
  const ssize_t got = pread(fd_, memory, 512, 0);
  free(memory);
  return got == 512 ? 512 : kPage;
}

std::uint64_t AlignedFile::size() const {
  struct stat info {};
  if (fstat(fd_, &info) != 0) throw std::system_error(errno, std::generic_category(), "fstat");
  return static_cast<std::uint64_t>(info.st_size);
}

int AlignedFile::preallocate(std::uint64_t bytes) const {
#ifdef __linux__
  int rc;
  do {
    rc = fallocate(fd_, 0, 0, static_cast<off_t>(bytes));
  } while (rc != 0 && errno == EINTR);
  if (rc != 0 && errno != EOPNOTSUPP && errno != ENOSYS) return errno;
#endif
  return 0;
}

int AlignedFile::truncate(std::uint64_t bytes) const {
  return ftruncate(fd_, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
}

void AlignedFile::drop_cache() const {
#ifdef __linux__
  if (!direct_) posix_fadvise(fd_, 0, 0, POSIX_FADV_DONTNEED);
#endif
}

void AlignedFile::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

}  // namespace lamella::kvtier
