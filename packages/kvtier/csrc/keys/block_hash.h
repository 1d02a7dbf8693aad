// Chained keys of blocks without media, as lamella/kvtier/keys.py defines them:
//
//   key[i] = BLAKE2b-256(key[i-1] ‖ "T" ‖ u32 block_size ‖ block_size × u32 id), person "lamella.kv.1", little endian
#pragma once

#include <cstddef>
#include <cstdint>

namespace lamella::kvtier {

constexpr std::size_t kKeyBytes = 32;

// keys: num_blocks × 32 bytes, written in order. ids: num_blocks × block_size.
void chain_keys(const std::uint8_t* parent, const std::uint32_t* ids, std::size_t block_size, std::size_t num_blocks,
                std::uint8_t* keys);

}  // namespace lamella::kvtier
