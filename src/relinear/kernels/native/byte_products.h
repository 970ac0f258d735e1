// Packed integers (functional/quantized.py says how) times inputs that are rounded to bytes, 32 of them to a step: products
// of bytes are what processors take most of at a time.
//
// A block is 64 codes of B bits each, a half of it 32; K groups of a row of weights share a scale and a zero point.

#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "rows.h"

namespace relinear {

constexpr int kBlock = 64, kHalf = kBlock / 2, kBytes = 4 * kLanes;
typedef uint8_t ByteVector __attribute__((vector_size(kBytes)));
typedef int16_t Shorts __attribute__((vector_size(kBytes)));
typedef uint16_t PlainShorts __attribute__((vector_size(kBytes)));
typedef uint64_t Quads __attribute__((vector_size(kBytes)));

// A matrix of packed codes.
struct Codes {
  const uint8_t* codes;
  int64_t inputs, groups, halves, width;  // halves of a block in a group, bytes of a row of codes

  Codes(const uint8_t* codes, int64_t inputs, int64_t bits, int64_t group)
      : codes(codes),
        inputs(inputs),
        groups(divided_up(inputs, group)),
        halves(group / kHalf),
        width(inputs / 8 * bits) {}
};

// One with its grids.
template <class T>
struct Grid : Codes {
  const uint8_t* zeros;
  const T* scales;
  float unit;  // of zero points, in codes

  Grid(const uint8_t* codes, const void* scales, const uint8_t* zeros, int64_t inputs, int64_t bits, int64_t group)
      : Codes(codes, inputs, bits, group),
        zeros(zeros),
        scales(static_cast<const T*>(scales)),
        unit(1.f / (1 << (8 - bits))) {}

  float zero(int64_t o, int64_t k) const { return (zeros ? zeros[o * groups + k] : 128) * unit; }

  // Steps of row o's groups, then what their numbers begin at.
  void write_units(float* to, int64_t o) const {
    for (int64_t k = 0; k < groups; ++k) {
      to[k] = scales[o * groups + k];
      to[groups + k] = -zero(o, k) * to[k];
    }
  }
};

template <class Body>
void for_bits(int64_t bits, const Body& body) {
  switch (bits) {
    case 2: return body(std::integral_constant<int, 2>());
    case 3: return body(std::integral_constant<int, 3>());
    case 4: return body(std::integral_constant<int, 4>());
    case 5: return body(std::integral_constant<int, 5>());
    case 6: return body(std::integral_constant<int, 6>());
    default: return body(std::integral_constant<int, 8>());
  }
}

inline ByteVector read(const void* from) {
  ByteVector bytes;
  std::memcpy(&bytes, from, kBytes);
  return bytes;
}

// ``kPart`` bytes, over and over.
template <int kPart>
inline Quads repeated(const uint8_t* from) {
#if defined(__AVX512F__)
  if constexpr (kPart == 32) return (Quads)_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)from));
  return (Quads)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  if constexpr (kPart == 16) return (Quads)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)from));
#endif
  return (Quads)read(from);
}

// Codes of a plane of 4 or 2 bits from ``at`` on.
template <int kPlane>
inline ByteVector plane_of(const uint8_t* bytes, int at) {
  constexpr int kPart = 8 * kPlane;
  Quads shifts = {};
  for (int i = 0; i < kBytes / 8; ++i) shifts[i] = (at + 8 * i) / kPart * kPlane;
  return (ByteVector)(repeated<kPart>(bytes + at % kPart) >> shifts) & uint8_t((1 << kPlane) - 1);
}

// The codes of a block from ``at`` on, a byte each.
template <int kBits>
inline ByteVector codes_of(const uint8_t* block, int at) {
  if constexpr (kBits & 8) return read(block + at);
  ByteVector codes = {};
  const uint8_t *pairs = block + (kBits & 4) * 8, *single = pairs + (kBits & 2) * 8 + at / 8;
  if constexpr (kBits & 4) codes = plane_of<4>(block, at);
  if constexpr (kBits & 2) codes = codes * 4 + plane_of<2>(pairs, at);
  if constexpr (kBits & 1) {
#if defined(__AVX512BW__)
    uint64_t mask;
    std::memcpy(&mask, single, 8);
    codes = codes + codes - (ByteVector)_mm512_movm_epi8(mask);
#else
    Quads bits = {};  // a bit of a byte to each of 8
    for (int i = 0; i < kBytes / 8; ++i) bits[i] = single[i] * 0x0101010101010101u & 0x8040201008040201u;
    codes = codes + codes - (ByteVector)((ByteVector)bits != 0);
#endif
  }
  return codes;
}

// Sums of 4 neighbouring products each, of codes with whole numbers of either sign.
template <int kBits>
inline Ints dots(ByteVector codes, ByteVector x) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32(__m512i{}, (__m512i)codes, (__m512i)x);
#elif defined(__AVXVNNI__)
  return (Ints)_mm256_dpbusd_avx_epi32(__m256i{}, (__m256i)codes, (__m256i)x);
#elif defined(__AVX2__)
#if defined(__AVX512BW__)
  const auto pairs = [](Shorts a, Shorts b) { return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b); };
  const auto halves = [&] { return (Shorts)_mm512_maddubs_epi16((__m512i)codes, (__m512i)x); };
#else
  const auto pairs = [](Shorts a, Shorts b) { return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b); };
  const auto halves = [&] { return (Shorts)_mm256_maddubs_epi16((__m256i)codes, (__m256i)x); };
#endif
  if constexpr (kBits < 8) return pairs(halves(), Shorts{} + 1);
  const PlainShorts wide = (PlainShorts)codes, left = (PlainShorts)x << 8;  // sums of two are beyond 16 bits
  return pairs((Shorts)(wide & 255), (Shorts)left >> 8) + pairs((Shorts)(wide >> 8), (Shorts)x >> 8);
#else
  Ints sums = {};
  for (int i = 0; i < kBytes; ++i) sums[i / 4] += codes[i] * int8_t(x[i]);
  return sums;
#endif
}

// Inputs as whole numbers below 2^7, a step for every half of a block.
struct Rounded {
  std::vector<uint8_t> bytes;
  std::vector<float> steps, sums;  // of 4 neighbours: their step, and their sum

  explicit Rounded(const float* x, int64_t count) : bytes(count), steps(count / 4), sums(count / 4) {
    constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it leaves the nearest integer in the lowest bits
    for (int64_t start = 0; start < count; start += kHalf) {
      float most = 0, none = 0;  // NaN if any number is none, or infinite
      for (int i = 0; i < kHalf; ++i) {
        most = std::max(most, std::fabs(x[start + i]));
        none += 0 * x[start + i];
      }
      const float step = most / 127 + none, inverse = most > 0 ? 127 / most : 0;
      for (int i = 0; i < kHalf; ++i) {
        const float moved = x[start + i] * inverse + kRound;
        std::memcpy(&bytes[start + i], &moved, 1);
      }
      for (int i = 0; i < kHalf / 4; ++i) {
        const uint8_t* four = bytes.data() + start + 4 * i;
        const int sum = int8_t(four[0]) + int8_t(four[1]) + int8_t(four[2]) + int8_t(four[3]);
        steps[start / 4 + i] = step;
        sums[start / 4 + i] = step * sum;
      }
    }
  }
};

// sums[i] = the product of row o + i with the inputs from ``from`` on
template <int kBits, int kCount, class T>
inline void byte_products(float (&sums)[kCount], const Grid<T>& grid, int64_t o, const Rounded& x, int64_t from) {
  Floats found[kCount] = {};
  Ints first = {};  // lanes of a first half
  for (int lane = 0; lane < kHalf / 4 && lane < kLanes; ++lane) first[lane] = -1;
  for (int64_t start = 0; start < grid.inputs; start += kBlock) {
    const uint8_t* block = grid.codes + o * grid.width + start / 8 * kBits;
    for (int i = 0; i < kCount; ++i) __builtin_prefetch(block + (kCount + i) * grid.width);  // of the next rows
#pragma GCC unroll 4
    for (int at = 0; at < kBlock; at += kBytes) {
      const int64_t half = (start + at) / kHalf, k = half / grid.halves, lane = (from + start + at) / 4;
      const int64_t next = kBytes > kHalf ? (half + 1) / grid.halves : k;
      const ByteVector bytes = read(x.bytes.data() + 4 * lane);
      const Floats steps = load(x.steps.data() + lane, kLanes), lows = load(x.sums.data() + lane, kLanes);
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) {
        const Ints dot = dots<kBits>(codes_of<kBits>(block + i * grid.width, at), bytes);
        const T* scale = grid.scales + (o + i) * grid.groups;
        Floats unit = Floats{} + float(scale[k]), zero = Floats{} + grid.zero(o + i, k);
        if (next != k) {
          unit = first ? unit : Floats{} + float(scale[next]);
          zero = first ? zero : Floats{} + grid.zero(o + i, next);
        }
        found[i] += (__builtin_convertvector(dot, Floats) * steps - zero * lows) * unit;
      }
    }
  }
  for (int i = 0; i < kCount; ++i) sums[i] = sum(found[i]);
}

// to (N, O) = the products with N rows of inputs, and a bias
template <class T>
void multiply(T* to, const Grid<T>& grid, int64_t bits, const Rounded& x, int64_t rows, int64_t outputs,
              const Bias<T>& start) {
  for_bits(bits, [&](auto constant) {
    for_outputs(outputs, outputs, rows * grid.inputs, [&](int64_t o, auto count) {
      for (int64_t n = 0; n < rows; ++n) {
        float sums[count];
        byte_products<constant>(sums, grid, o, x, n * grid.inputs);
        for (int i = 0; i < count; ++i) to[n * outputs + o + i] = T(sums[i] + start[o + i]);
      }
    });
  });
}

}  // namespace relinear
