#include "keys/block_hash.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "keys/sha256.h"

namespace lamella::kvtier {
namespace {

constexpr char kDomain[] = "lamella.kv.2";
constexpr std::size_t kDomainBytes = sizeof kDomain - 1;

void put_little(std::uint8_t* at, std::uint32_t x) {
  for (int i = 0; i < 4; ++i) at[i] = static_cast<std::uint8_t>(x >> (8 * i));
}

void put_big(std::uint8_t* at, std::uint32_t x) {
  for (int i = 0; i < 4; ++i) at[i] = static_cast<std::uint8_t>(x >> (24 - 8 * i));
}

// The message of one block, padded. Its leading chunks hold nothing but ids and need not wait for the parent's key:
//
//   [ ids ……………………………… | ids, parent, lengths, domain, padding )
//   0           num_free chunks                              num_chunks
class Message {
 public:
  explicit Message(std::size_t block_size) : block_size_(block_size), parent_at_(4 * block_size) {
    const std::size_t length = parent_at_ + kKeyBytes + 8 + kDomainBytes;
    num_chunks = (length + 9 + kShaChunk - 1) / kShaChunk;
    num_free = parent_at_ / kShaChunk;
    bytes_.resize(num_chunks * kShaChunk);
    std::uint8_t* at = bytes_.data() + parent_at_ + kKeyBytes;
    put_little(at, static_cast<std::uint32_t>(block_size));
    std::memcpy(at + 8, kDomain, kDomainBytes);
    at[8 + kDomainBytes] = 0x80;
    const std::uint64_t bits = 8 * static_cast<std::uint64_t>(length);
    put_big(bytes_.data() + bytes_.size() - 8, static_cast<std::uint32_t>(bits >> 32));
    put_big(bytes_.data() + bytes_.size() - 4, static_cast<std::uint32_t>(bits));
  }

  // Free chunks are read where the ids lie, if they lie there as they go into the hash.
  void set_ids(const std::uint32_t* ids) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    for (std::size_t i = 0; i < block_size_; ++i) put_little(bytes_.data() + 4 * i, ids[i]);
    free_ = bytes_.data();
#else
    free_ = reinterpret_cast<const std::uint8_t*>(ids);
    const std::size_t start = num_free * kShaChunk;
    std::memcpy(bytes_.data() + start, free_ + start, 4 * block_size_ - start);
#endif
  }

  void set_parent(const std::uint8_t* key) { std::memcpy(bytes_.data() + parent_at_, key, kKeyBytes); }
  const std::uint8_t* free_chunk(std::size_t n) const { return free_ + n * kShaChunk; }
  const std::uint8_t* bound_chunk(std::size_t n) const { return bytes_.data() + (num_free + n) * kShaChunk; }

  std::size_t num_chunks, num_free;

 private:
  std::size_t block_size_, parent_at_;
  std::vector<std::uint8_t> bytes_;
  const std::uint8_t* free_ = nullptr;
};

}  // namespace

// A key waits for the one before it, but only with the chunks behind the ids. So the ids of the next block go through
// the rounds beside the end of this one.
void chain_keys(const Sha256& sha, const std::uint8_t* parent, const std::uint32_t* ids, std::size_t block_size,
                std::size_t num_blocks, std::uint8_t* keys) {
  if (num_blocks == 0) return;
  Message now(block_size), next(block_size);
  const std::size_t num_free = now.num_free, num_bound = now.num_chunks - num_free;
  ShaState state = kShaStart;
  now.set_ids(ids);
  for (std::size_t n = 0; n < num_free; ++n) sha.single(state, now.free_chunk(n));
  for (std::size_t block = 0; block < num_blocks; ++block) {
    const bool last = block + 1 == num_blocks;
    ShaState ahead = kShaStart;
    if (!last) next.set_ids(ids + (block + 1) * block_size);
    now.set_parent(parent);
    const std::size_t num_pairs = last ? 0 : std::min(num_bound, num_free);
    for (std::size_t n = 0; n < num_pairs; ++n) sha.pair(state, now.bound_chunk(n), ahead, next.free_chunk(n));
    for (std::size_t n = num_pairs; n < num_bound; ++n) sha.single(state, now.bound_chunk(n));
    for (std::size_t n = num_pairs; !last && n < num_free; ++n) sha.single(ahead, next.free_chunk(n));
    sha.digest(state, keys);
    parent = keys;
    keys += kKeyBytes;
    state = ahead;
    std::swap(now, next);
  }
}

}  // namespace lamella::kvtier
