// Vectors of GCC and clang, as wide as the processor's registers, and what the kernels have in common.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace relinear {

// The upper half of a float, rounded to nearest, ties to even.
struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;
  explicit BFloat16(float value) {
    uint32_t from;
    std::memcpy(&from, &value, sizeof(from));
    bits = value == value ? (from + 0x7fff + (from >> 16 & 1)) >> 16 : 0x7fc0;
  }
  operator float() const {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof(value));
    return value;
  }
};

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

// entries that are worth a thread of their own
constexpr int64_t kGrain = 1 << 15;

// The first ``count`` numbers of a vector; the others are 0.
inline Floats load(const float* from, int count) {
  Floats values = {};
  std::memcpy(&values, from, sizeof(float) * count);
  return values;
}

inline Floats load(const BFloat16* from, int count) {
  Halves bits = {};
  std::memcpy(&bits, from, sizeof(BFloat16) * count);
  return (Floats)(__builtin_convertvector(bits, Words) << 16);
}

inline void store(float* to, Floats values, int count) { std::memcpy(to, &values, sizeof(float) * count); }

inline void store(BFloat16* to, Floats values, int count) {
  Words bits = (Words)values;
  Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
  Words quiet = (bits >> 16) | 0x40;
  Halves halves = __builtin_convertvector(values == values ? rounded : quiet, Halves);
  std::memcpy(to, &halves, sizeof(BFloat16) * count);
}

// 2^t with t = x / log 2 = n + f, |f| <= 1/2: 2^f by a polynomial, 2^n by its bits. Numbers beyond single precision's
// exponents, and half a binade before them, are 0 or infinite.
inline Floats exponential(Floats x) {
  constexpr float kHigh = 1.44269502162933349609375f, kLow = 1.92596299112661746887e-08f;
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it leaves the nearest integer in the lowest bits
  x = x < -88.f ? Floats{} - 88.f : x;  // comparisons are false for NaN, which so goes through
  x = x > 89.f ? Floats{} + 89.f : x;
  Floats shifted = x * kHigh + kRound;
  Floats fraction = (x * kHigh - (shifted - kRound)) + x * kLow;
  Floats power = fraction * 1.5403530393381609e-4f + 1.3333558146428443e-3f;
  power = power * fraction + 9.6181291076284772e-3f;
  power = power * fraction + 5.5504108664821580e-2f;
  power = power * fraction + 2.4022650695910072e-1f;
  power = power * fraction + 6.9314718055994531e-1f;
  power = power * fraction + 1.f;
  return power * (Floats)(((Ints)shifted + 127) << 23);
}

inline Floats sigmoid(Floats x) { return 1.f / (1.f + exponential(-x)); }

inline float sum(Floats values) {
  float lanes[kLanes], total = 0;
  std::memcpy(lanes, &values, sizeof(lanes));
#pragma omp simd reduction(+ : total)
  for (int lane = 0; lane < kLanes; ++lane) total += lanes[lane];
  return total;
}

template <class Body>
inline void for_vectors(int64_t width, const Body& body) {
  int64_t at = 0;
  for (; at + kLanes <= width; at += kLanes) body(at, kLanes);
  if (at < width) body(at, int(width - at));
}

inline int64_t divided_up(int64_t number, int64_t by) { return (number + by - 1) / by; }

// how many the call that runs may use: as many as torch does, which its caller says
inline thread_local int most_threads = 1;

inline int thread_number() {
#if defined(_OPENMP)
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// Calls body(begin, end) for shares of ``count``, of at least ``grain``: the same shares as torch's own.
template <class Body>
void parallel_for(int64_t count, int64_t grain, const Body& body) {
  const int64_t shares = std::min<int64_t>(most_threads, divided_up(count, grain));
#if defined(_OPENMP)
  if (shares > 1) {
#pragma omp parallel num_threads(most_threads)
    {
      const int64_t share = divided_up(count, std::min<int64_t>(omp_get_num_threads(), shares));
      const int64_t begin = omp_get_thread_num() * share;
      if (begin < count) body(begin, std::min(count, begin + share));
    }
    return;
  }
#endif
  if (count) body(0, count);
}

template <class Body>
inline void for_rows(int64_t rows, int64_t columns, const Body& body) {
  parallel_for(rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, columns)), body);
}

#define RELINEAR_DISPATCH(half, ...) \
  do {                               \
    if (half) {                      \
      using T = BFloat16;            \
      __VA_ARGS__;                   \
    } else {                         \
      using T = float;               \
      __VA_ARGS__;                   \
    }                                \
  } while (false)

}  // namespace relinear
