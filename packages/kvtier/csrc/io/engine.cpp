#include "io/engine.h"

namespace lamella::kvtier {

void advance(Op& op, std::size_t count) {
  op.offset += count;
  std::size_t first = 0;
  while (first < op.parts.size() && count >= op.parts[first].iov_len) count -= op.parts[first++].iov_len;
  op.parts.erase(op.parts.begin(), op.parts.begin() + static_cast<std::ptrdiff_t>(first));
  if (count > 0 && !op.parts.empty()) {
    op.parts[0].iov_base = static_cast<char*>(op.parts[0].iov_base) + count;
    op.parts[0].iov_len -= count;
  }
}

std::size_t total(const Op& op) {
  std::size_t sum = 0;
  for (const iovec& part : op.parts) sum += part.iov_len;
  return sum;
}

}  // namespace lamella::kvtier
