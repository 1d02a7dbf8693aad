#include "keys/sha256.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#define LAMELLA_SHA_X86 1
#endif

namespace lamella::kvtier {

const ShaState kShaStart = {
    {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19}};

namespace {

alignas(16) constexpr std::uint32_t kRound[64] = {
    0x428A2F98, 0x71374491, 0xB5C0FBCF, 0xE9B5DBA5, 0x3956C25B, 0x59F111F1, 0x923F82A4, 0xAB1C5ED5,
    0xD807AA98, 0x12835B01, 0x243185BE, 0x550C7DC3, 0x72BE5D74, 0x80DEB1FE, 0x9BDC06A7, 0xC19BF174,
    0xE49B69C1, 0xEFBE4786, 0x0FC19DC6, 0x240CA1CC, 0x2DE92C6F, 0x4A7484AA, 0x5CB0A9DC, 0x76F988DA,
    0x983E5152, 0xA831C66D, 0xB00327C8, 0xBF597FC7, 0xC6E00BF3, 0xD5A79147, 0x06CA6351, 0x14292967,
    0x27B70A85, 0x2E1B2138, 0x4D2C6DFC, 0x53380D13, 0x650A7354, 0x766A0ABB, 0x81C2C92E, 0x92722C85,
    0xA2BFE8A1, 0xA81A664B, 0xC24B8B70, 0xC76C51A3, 0xD192E819, 0xD6990624, 0xF40E3585, 0x106AA070,
    0x19A4C116, 0x1E376C08, 0x2748774C, 0x34B0BCB5, 0x391C0CB3, 0x4ED8AA4A, 0x5B9CCA4F, 0x682E6FF3,
    0x748F82EE, 0x78A5636F, 0x84C87814, 0x8CC70208, 0x90BEFFFA, 0xA4506CEB, 0xBEF9A3F7, 0xC67178F2};

inline std::uint32_t rotr(std::uint32_t x, int n) { return (x >> n) | (x << (32 - n)); }

inline std::uint32_t load_big(const std::uint8_t* at) {
  return static_cast<std::uint32_t>(at[0]) << 24 | static_cast<std::uint32_t>(at[1]) << 16 |
         static_cast<std::uint32_t>(at[2]) << 8 | static_cast<std::uint32_t>(at[3]);
}

void portable_single(ShaState& state, const std::uint8_t* chunk) {
  std::uint32_t w[64];
  for (int i = 0; i < 16; ++i) w[i] = load_big(chunk + 4 * i);
  for (int i = 16; i < 64; ++i) {
    const std::uint32_t s0 = rotr(w[i - 15], 7) ^ rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const std::uint32_t s1 = rotr(w[i - 2], 17) ^ rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  std::uint32_t a = state.words[0], b = state.words[1], c = state.words[2], d = state.words[3];
  std::uint32_t e = state.words[4], f = state.words[5], g = state.words[6], h = state.words[7];
  for (int i = 0; i < 64; ++i) {
    const std::uint32_t t1 =
        h + (rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25)) + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
    const std::uint32_t t2 = (rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  const std::uint32_t sums[8] = {a, b, c, d, e, f, g, h};
  for (int i = 0; i < 8; ++i) state.words[i] += sums[i];
}

void portable_pair(ShaState& one, const std::uint8_t* chunk_of_one, ShaState& two,
                   const std::uint8_t* chunk_of_two) {
  portable_single(one, chunk_of_one);
  portable_single(two, chunk_of_two);
}

void portable_digest(const ShaState& state, std::uint8_t* digest) {
  for (int i = 0; i < 32; ++i) digest[i] = static_cast<std::uint8_t>(state.words[i / 4] >> (24 - 8 * (i % 4)));
}

#ifdef LAMELLA_SHA_X86

#define LAMELLA_SHA_TARGET __attribute__((target("sha,sse4.1"), always_inline))

// The instructions want the eight words as (a, b, e, f) and (c, d, g, h), a and c in the highest lane.
struct Halves {
  __m128i abef, cdgh;
};

LAMELLA_SHA_TARGET inline Halves load_state(const ShaState& state) {
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state.words));
  const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state.words + 4));
  const __m128i cdab = _mm_shuffle_epi32(low, 0xB1), efgh = _mm_shuffle_epi32(high, 0x1B);
  return {_mm_alignr_epi8(cdab, efgh, 8), _mm_blend_epi16(efgh, cdab, 0xF0)};
}

LAMELLA_SHA_TARGET inline void store_state(ShaState& state, const Halves& halves) {
  const __m128i feba = _mm_shuffle_epi32(halves.abef, 0x1B), dchg = _mm_shuffle_epi32(halves.cdgh, 0xB1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state.words), _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state.words + 4), _mm_alignr_epi8(dchg, feba, 8));
}

// One chunk on its way through the rounds.
struct Rounds {
  Halves start, now;
  __m128i words[4];
};

LAMELLA_SHA_TARGET inline Rounds begin(const ShaState& state, const std::uint8_t* chunk) {
  const __m128i swap = _mm_set_epi64x(0x0C0D0E0F08090A0B, 0x0405060700010203);
  Rounds rounds;
  rounds.start = rounds.now = load_state(state);
  for (int i = 0; i < 4; ++i) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(chunk + 16 * i));
    rounds.words[i] = _mm_shuffle_epi8(raw, swap);
  }
  return rounds;
}

// Rounds 4i … 4i + 3, and the four words that the schedule needs sixteen words later.
LAMELLA_SHA_TARGET inline void four_rounds(Rounds& r, int i) {
  const __m128i constants = _mm_load_si128(reinterpret_cast<const __m128i*>(kRound + 4 * i));
  const __m128i sum = _mm_add_epi32(r.words[i & 3], constants);
  r.now.cdgh = _mm_sha256rnds2_epu32(r.now.cdgh, r.now.abef, sum);
  r.now.abef = _mm_sha256rnds2_epu32(r.now.abef, r.now.cdgh, _mm_shuffle_epi32(sum, 0x0E));
  if (i < 12) {
    __m128i next = _mm_sha256msg1_epu32(r.words[i & 3], r.words[(i + 1) & 3]);
    next = _mm_add_epi32(next, _mm_alignr_epi8(r.words[(i + 3) & 3], r.words[(i + 2) & 3], 4));
    r.words[i & 3] = _mm_sha256msg2_epu32(next, r.words[(i + 3) & 3]);
  }
}

LAMELLA_SHA_TARGET inline void end(ShaState& state, const Rounds& r) {
  store_state(state, {_mm_add_epi32(r.now.abef, r.start.abef), _mm_add_epi32(r.now.cdgh, r.start.cdgh)});
}

__attribute__((target("sha,sse4.1"))) void x86_single(ShaState& state, const std::uint8_t* chunk) {
  Rounds rounds = begin(state, chunk);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) four_rounds(rounds, i);
  end(state, rounds);
}

// A round waits four cycles for the one before it: the other chunk's rounds fit between.
__attribute__((target("sha,sse4.1"))) void x86_pair(ShaState& one, const std::uint8_t* chunk_of_one, ShaState& two,
                                                    const std::uint8_t* chunk_of_two) {
  Rounds first = begin(one, chunk_of_one), second = begin(two, chunk_of_two);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    four_rounds(first, i);
    four_rounds(second, i);
  }
  end(one, first);
  end(two, second);
}

__attribute__((target("sha,sse4.1"))) void x86_digest(const ShaState& state, std::uint8_t* digest) {
  const __m128i swap = _mm_set_epi64x(0x0C0D0E0F08090A0B, 0x0405060700010203);
  for (int i = 0; i < 2; ++i) {
    const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state.words + 4 * i));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(digest + 16 * i), _mm_shuffle_epi8(words, swap));
  }
}

bool has_sha() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & bit_SSE4_1) == 0) return false;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & (1u << 29)) != 0;
}

#endif

}  // namespace

const Sha256& portable_sha256() {
  static const Sha256 found{portable_single, portable_pair, portable_digest, "portable"};
  return found;
}

const Sha256& sha256() {
#ifdef LAMELLA_SHA_X86
  static const Sha256 found = has_sha() ? Sha256{x86_single, x86_pair, x86_digest, "sha-ni"} : portable_sha256();
  return found;
#else
  return portable_sha256();
#endif
}

}  // namespace lamella::kvtier
