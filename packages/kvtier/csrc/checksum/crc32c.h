// CRC-32C (Castagnoli, RFC 3720): the processor's instruction where there is one, else tables.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lamella::kvtier {

// crc: the checksum of what came before; 0 at the start.
std::uint32_t crc32c(const void* data, std::size_t length, std::uint32_t crc = 0);
std::uint32_t crc32c_table(const void* data, std::size_t length, std::uint32_t crc = 0);
// "sse4.2", "armv8" or "table"
const char* crc32c_kind();

}  // namespace lamella::kvtier
