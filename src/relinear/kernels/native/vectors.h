// Vectors of GCC and clang, as wide as the processor's registers, and what the kernels have in common.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstring>

namespace relinear {

using at::Tensor;
using c10::BFloat16;

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

template <class Body>
inline void for_rows(int64_t rows, int64_t columns, const Body& body) {
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, columns)), body);
}

inline void check(const Tensor& tensor, const char* name, at::ScalarType dtype, at::IntArrayRef sizes) {
  TORCH_CHECK(tensor.device().is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == dtype &&
                  tensor.sizes() == sizes,
              name, " must be a contiguous ", dtype, " tensor of shape ", sizes, " on the CPU, got ", tensor.dtype(),
              " ", tensor.sizes(), " on ", tensor.device());
}

// The shape (N, O) that the others are checked against.
inline at::IntArrayRef checked(const Tensor& matrix, const char* name) {
  TORCH_CHECK(matrix.dim() == 2 && (matrix.scalar_type() == at::kFloat || matrix.scalar_type() == at::kBFloat16), name,
              " must be a float32 or bfloat16 matrix, got ", matrix.dtype(), " ", matrix.sizes());
  check(matrix, name, matrix.scalar_type(), matrix.sizes());
  return matrix.sizes();
}

#define RELINEAR_DISPATCH(tensor, ...)         \
  do {                                         \
    if ((tensor).scalar_type() == at::kFloat) { \
      using T = float;                         \
      __VA_ARGS__;                             \
    } else {                                   \
      using T = BFloat16;                      \
      __VA_ARGS__;                             \
    }                                          \
  } while (false)

}  // namespace relinear
