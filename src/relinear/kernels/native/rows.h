// Products of a few rows, as in decoding: a library's matrix product reads the weights on one thread, or in blocks that
// are made for many rows. Here every thread reads its rows of the weights once, in order, for all rows of x.

#pragma once

#include <cmath>
#include <type_traits>

#include "vectors.h"

namespace relinear {

// rows of weights that are read side by side: memory is asked for several lines ahead
constexpr int kTogether = 4;

// totals[i] += the products of row i of weights (rows of ``depth`` numbers) with x, their sum left to the end
template <int kCount, class T>
inline void accumulate(Floats (&totals)[kCount], const T* weights, int64_t depth, const float* x) {
  for_vectors(depth, [&](int64_t at, int count) {
    const Floats input = load(x + at, count);
    for (int i = 0; i < kCount; ++i) totals[i] += load(weights + i * depth + at, count) * input;
  });
}

// Calls body(o, count) for all outputs on all threads, ``count`` at a time (a constant of the type): as many as are read
// side by side, or one; never over the end of a group. ``work`` is the multiplications of an output.
template <class Body>
void for_outputs(int64_t outputs, int64_t group, int64_t work, const Body& body) {
  const int64_t grain = std::max<int64_t>(kTogether, kGrain / std::max<int64_t>(1, work));
  parallel_for(outputs, grain, [&](int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end;)
      if (o + kTogether <= std::min(end, (o / group + 1) * group)) {
        body(o, std::integral_constant<int, kTogether>());
        o += kTogether;
      } else {
        body(o++, std::integral_constant<int, 1>());
      }
  });
}

// Numbers in single precision.
template <class T>
std::vector<float> in_single(const T* from, int64_t count) {
  return {from, from + count};
}

// A bias, or zeros.
template <class T>
struct Bias {
  const T* data;

  explicit Bias(const void* data) : data(static_cast<const T*>(data)) {}
  float operator[](int64_t at) const { return data ? float(data[at]) : 0.f; }
};

}  // namespace relinear
