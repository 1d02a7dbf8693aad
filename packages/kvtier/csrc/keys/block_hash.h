// Chained keys of blocks without media, as lamella/kvtier/keys.py defines them:
//
//   key[i] = SHA-256(block_size × u32 id ‖ key[i-1] ‖ u32 block_size ‖ u32 0 ‖ "lamella.kv.2"), little endian
#pragma once

#include <cstddef>
#include <cstdint>

namespace lamella::kvtier {

struct Sha256;

constexpr std::size_t kKeyBytes = 32;

// keys: num_blocks × 32 bytes, written in order. ids: num_blocks × block_size.
void chain_keys(const Sha256& sha, const std::uint8_t* parent, const std::uint32_t* ids, std::size_t block_size,
                std::size_t num_blocks, std::uint8_t* keys);

}  // namespace lamella::kvtier
