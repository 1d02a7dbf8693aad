// SHA-256 (FIPS 180-4), the compression of whole chunks only: who calls it pads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lamella::kvtier {

constexpr std::size_t kShaChunk = 64;

struct ShaState {
  std::uint32_t words[8];
};

extern const ShaState kShaStart;

// Takes one chunk of 64 bytes into each of two states. Neither depends on the other, so that processors with
// instructions for it work on both at a time.
using ShaPair = void (*)(ShaState& one, const std::uint8_t* chunk_of_one, ShaState& two,
                         const std::uint8_t* chunk_of_two);
using ShaSingle = void (*)(ShaState& state, const std::uint8_t* chunk);
// The 32 bytes of the hash, by stores so wide that the next chunk's loads need not wait for them.
using ShaDigest = void (*)(const ShaState& state, std::uint8_t* digest);

struct Sha256 {
  ShaSingle single;
  ShaPair pair;
  ShaDigest digest;
  const char* kind;  // "sha-ni" or "portable"
};

// The fastest that this processor has.
const Sha256& sha256();
// Plain C++, everywhere.
const Sha256& portable_sha256();

}  // namespace lamella::kvtier
