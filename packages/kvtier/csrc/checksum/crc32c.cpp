#include "checksum/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define LAMELLA_CRC_X86 1
#elif defined(__aarch64__) && (defined(__linux__) || defined(__APPLE__))
#include <arm_acle.h>
#ifdef __linux__
#include <sys/auxv.h>
#endif
#define LAMELLA_CRC_ARM 1
#endif

namespace lamella::kvtier {
namespace {

constexpr std::uint32_t kPoly = 0x82F63B78;  // reversed

using Table = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Table make_slices() {
  Table table{};
  for (std::uint32_t n = 0; n < 256; ++n) {
    std::uint32_t crc = n;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPoly : 0);
    table[0][n] = crc;
  }
  for (std::uint32_t n = 0; n < 256; ++n) {
    for (std::size_t k = 1; k < 8; ++k) table[k][n] = (table[k - 1][n] >> 8) ^ table[0][table[k - 1][n] & 0xFF];
  }
  return table;
}

constexpr Table kSlices = make_slices();

std::uint64_t load64(const unsigned char* at) {
  std::uint64_t word;
  std::memcpy(&word, at, sizeof word);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  word = __builtin_bswap64(word);
#endif
  return word;
}

#if defined(LAMELLA_CRC_X86) || defined(LAMELLA_CRC_ARM)

// The instruction has a latency of three and a throughput of one: three streams run side by side, and each result is
// moved over the bytes behind it by a table of "append n zero bytes" (a linear map over GF(2)).
constexpr std::size_t kLong = 8192, kShort = 256;

constexpr std::uint32_t times(const std::array<std::uint32_t, 32>& matrix, std::uint32_t vector) {
  std::uint32_t sum = 0;
  for (int bit = 0; vector != 0; ++bit, vector >>= 1) {
    if ((vector & 1) != 0) sum ^= matrix[static_cast<std::size_t>(bit)];
  }
  return sum;
}

using Shift = std::array<std::array<std::uint32_t, 256>, 4>;

constexpr Shift make_shift(std::size_t num_bytes) {
  std::array<std::uint32_t, 32> step{};  // append one zero bit
  step[0] = kPoly;
  for (std::size_t bit = 1; bit < 32; ++bit) step[bit] = 1u << (bit - 1);
  for (std::size_t bits = num_bytes * 8; bits > 1; bits /= 2) {  // num_bytes is a power of two
    std::array<std::uint32_t, 32> twice{};
    for (std::size_t bit = 0; bit < 32; ++bit) twice[bit] = times(step, step[bit]);
    step = twice;
  }
  Shift shift{};
  for (std::uint32_t n = 0; n < 256; ++n) {
    for (std::size_t k = 0; k < 4; ++k) shift[k][n] = times(step, n << (8 * k));
  }
  return shift;
}

const Shift kShiftLong = make_shift(kLong);
const Shift kShiftShort = make_shift(kShort);

inline std::uint32_t moved(const Shift& shift, std::uint32_t crc) {
  return shift[0][crc & 0xFF] ^ shift[1][(crc >> 8) & 0xFF] ^ shift[2][(crc >> 16) & 0xFF] ^ shift[3][crc >> 24];
}

#ifdef LAMELLA_CRC_X86
#define LAMELLA_CRC_TARGET __attribute__((target("sse4.2")))
using Word = std::uint64_t;
LAMELLA_CRC_TARGET inline Word step64(Word crc, const unsigned char* at) { return _mm_crc32_u64(crc, load64(at)); }
LAMELLA_CRC_TARGET inline Word step8(Word crc, unsigned char byte) {
  return _mm_crc32_u8(static_cast<std::uint32_t>(crc), byte);
}
#else
#if defined(__clang__)
#define LAMELLA_CRC_TARGET __attribute__((target("crc")))
#else
#define LAMELLA_CRC_TARGET __attribute__((target("+crc")))
#endif
using Word = std::uint32_t;
LAMELLA_CRC_TARGET inline Word step64(Word crc, const unsigned char* at) { return __crc32cd(crc, load64(at)); }
LAMELLA_CRC_TARGET inline Word step8(Word crc, unsigned char byte) { return __crc32cb(crc, byte); }
#endif

template <std::size_t N>
LAMELLA_CRC_TARGET inline Word three_streams(Word crc, const unsigned char*& at, std::size_t& length,
                                             const Shift& shift) {
  while (length >= 3 * N) {
    Word second = 0, third = 0;
    const unsigned char* const end = at + N;
    for (; at < end; at += 8) {
      crc = step64(crc, at);
      second = step64(second, at + N);
      third = step64(third, at + 2 * N);
    }
    crc = moved(shift, static_cast<std::uint32_t>(crc)) ^ second;
    crc = moved(shift, static_cast<std::uint32_t>(crc)) ^ third;
    at += 2 * N;
    length -= 3 * N;
  }
  return crc;
}

LAMELLA_CRC_TARGET std::uint32_t crc32c_hardware(const void* data, std::size_t length, std::uint32_t start) {
  const auto* at = static_cast<const unsigned char*>(data);
  Word crc = static_cast<std::uint32_t>(~start);
  crc = three_streams<kLong>(crc, at, length, kShiftLong);
  crc = three_streams<kShort>(crc, at, length, kShiftShort);
  for (; length >= 8; length -= 8, at += 8) crc = step64(crc, at);
  for (; length > 0; --length, ++at) crc = step8(crc, *at);
  return ~static_cast<std::uint32_t>(crc);
}

bool has_instruction() {
#if defined(LAMELLA_CRC_X86)
  return __builtin_cpu_supports("sse4.2");
#elif defined(__APPLE__)
  return true;
#else
  return (getauxval(AT_HWCAP) & (1UL << 7)) != 0;  // HWCAP_CRC32
#endif
}

const bool kHardware = has_instruction();

#endif

}  // namespace

std::uint32_t crc32c_table(const void* data, std::size_t length, std::uint32_t start) {
  const auto* at = static_cast<const unsigned char*>(data);
  std::uint32_t crc = ~start;
  for (; length >= 8; length -= 8, at += 8) {
    const std::uint64_t word = load64(at) ^ crc;
    crc = 0;
    for (std::size_t k = 0; k < 8; ++k) crc ^= kSlices[7 - k][(word >> (8 * k)) & 0xFF];
  }
  for (; length > 0; --length, ++at) crc = (crc >> 8) ^ kSlices[0][(crc ^ *at) & 0xFF];
  return ~crc;
}

#if defined(LAMELLA_CRC_X86) || defined(LAMELLA_CRC_ARM)

std::uint32_t crc32c(const void* data, std::size_t length, std::uint32_t crc) {
  return kHardware ? crc32c_hardware(data, length, crc) : crc32c_table(data, length, crc);
}

const char* crc32c_kind() {
  if (!kHardware) return "table";
#ifdef LAMELLA_CRC_X86
  return "sse4.2";
#else
  return "armv8";
#endif
}

#else

std::uint32_t crc32c(const void* data, std::size_t length, std::uint32_t crc) {
  return crc32c_table(data, length, crc);
}

const char* crc32c_kind() { return "table"; }

#endif

}  // namespace lamella::kvtier
