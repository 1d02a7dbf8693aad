#include "keys/block_hash.h"

#include <cstring>
#include <vector>

namespace lamella::kvtier {
namespace {

// BLAKE2b, RFC 7693. A chain cannot be split over lanes of several messages: each key waits
// for the one before it. One message in four AVX2 lanes was no faster: both are bound by the latency of the rounds.
constexpr std::uint64_t kIv[8] = {0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1,
                                  0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179};
constexpr std::size_t kChunk = 128;

inline std::uint64_t rotr(std::uint64_t x, int n) { return (x >> n) | (x << (64 - n)); }

inline std::uint64_t little(std::uint64_t x) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  return __builtin_bswap64(x);
#else
  return x;
#endif
}

#define LAMELLA_G(a, b, c, d, x, y) \
  a += x;                           \
  a += b;                           \
  d = rotr(d ^ a, 32);              \
  c += d;                           \
  b = rotr(b ^ c, 24);              \
  a += y;                           \
  a += b;                           \
  d = rotr(d ^ a, 16);              \
  c += d;                           \
  b = rotr(b ^ c, 63);

#define LAMELLA_SCHEDULE(R) \
  R(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15) \
  R(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3) \
  R(11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4) \
  R(7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8) \
  R(9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13) \
  R(2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9) \
  R(12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11) \
  R(13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10) \
  R(6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5) \
  R(10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0) \
  R(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15) \
  R(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3)

// The message schedule is written out: every index is a constant, so the words stay addressed directly.
#define LAMELLA_ROUND(i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10, i11, i12, i13, i14, i15) \
  LAMELLA_G(v0, v4, v8, v12, m[i0], m[i1])                                                  \
  LAMELLA_G(v1, v5, v9, v13, m[i2], m[i3])                                                  \
  LAMELLA_G(v2, v6, v10, v14, m[i4], m[i5])                                                 \
  LAMELLA_G(v3, v7, v11, v15, m[i6], m[i7])                                                 \
  LAMELLA_G(v0, v5, v10, v15, m[i8], m[i9])                                                 \
  LAMELLA_G(v1, v6, v11, v12, m[i10], m[i11])                                               \
  LAMELLA_G(v2, v7, v8, v13, m[i12], m[i13])                                                \
  LAMELLA_G(v3, v4, v9, v14, m[i14], m[i15])

void compress(std::uint64_t* h, const std::uint64_t* m, std::uint64_t count, bool last) {
  std::uint64_t v0 = h[0], v1 = h[1], v2 = h[2], v3 = h[3], v4 = h[4], v5 = h[5], v6 = h[6], v7 = h[7];
  std::uint64_t v8 = kIv[0], v9 = kIv[1], v10 = kIv[2], v11 = kIv[3];
  std::uint64_t v12 = kIv[4] ^ count, v13 = kIv[5], v14 = last ? ~kIv[6] : kIv[6], v15 = kIv[7];
  LAMELLA_SCHEDULE(LAMELLA_ROUND)
  h[0] ^= v0 ^ v8;
  h[1] ^= v1 ^ v9;
  h[2] ^= v2 ^ v10;
  h[3] ^= v3 ^ v11;
  h[4] ^= v4 ^ v12;
  h[5] ^= v5 ^ v13;
  h[6] ^= v6 ^ v14;
  h[7] ^= v7 ^ v15;
}

struct Start {
  std::uint64_t h[8];
};

Start start_state() {
  unsigned char params[64] = {};
  params[0] = kKeyBytes;
  params[2] = 1;  // fanout
  params[3] = 1;  // depth
  std::memcpy(params + 48, "lamella.kv.1", 12);
  Start start{};
  for (std::size_t i = 0; i < 8; ++i) {
    std::uint64_t word;
    std::memcpy(&word, params + 8 * i, 8);
    start.h[i] = kIv[i] ^ little(word);
  }
  return start;
}

}  // namespace

void chain_keys(const std::uint8_t* parent, const std::uint32_t* ids, std::size_t block_size, std::size_t num_blocks,
                std::uint8_t* keys) {
  static const Start start = start_state();
  const std::size_t length = kKeyBytes + 5 + 4 * block_size;
  const std::size_t num_chunks = (length + kChunk - 1) / kChunk;
  std::vector<std::uint64_t> message(num_chunks * kChunk / 8);
  auto* bytes = reinterpret_cast<unsigned char*>(message.data());
  std::memcpy(bytes, parent, kKeyBytes);
  bytes[kKeyBytes] = 'T';
  const std::uint32_t size = static_cast<std::uint32_t>(block_size);
  for (std::size_t i = 0; i < 4; ++i) bytes[kKeyBytes + 1 + i] = static_cast<unsigned char>(size >> (8 * i));
  for (std::size_t block = 0; block < num_blocks; ++block) {
    unsigned char* at = bytes + kKeyBytes + 5;
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    for (std::size_t i = 0; i < block_size; ++i) {
      const std::uint32_t id = __builtin_bswap32(ids[i]);
      std::memcpy(at + 4 * i, &id, 4);
    }
#else
    std::memcpy(at, ids, 4 * block_size);
#endif
    ids += block_size;
    Start state = start;
    for (std::size_t chunk = 0; chunk < num_chunks; ++chunk) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
      std::uint64_t words[16];
      for (std::size_t i = 0; i < 16; ++i) words[i] = little(message[chunk * 16 + i]);
#else
      const std::uint64_t* words = message.data() + chunk * 16;
#endif
      const bool last = chunk + 1 == num_chunks;
      compress(state.h, words, last ? length : (chunk + 1) * kChunk, last);
    }
    for (std::size_t i = 0; i < 4; ++i) {
      const std::uint64_t word = little(state.h[i]);
      std::memcpy(keys + 8 * i, &word, 8);
    }
    std::memcpy(bytes, keys, kKeyBytes);
    keys += kKeyBytes;
  }
}

}  // namespace lamella::kvtier
