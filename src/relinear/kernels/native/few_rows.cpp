// Products of a few rows, as in decoding: a library's matrix product reads the weights on one thread or in blocks that
// are made for many rows. Here every thread reads its rows of the weights once, in order, for all rows of x.
//
// Numbers are float or bfloat16, sums in single precision, what is between two products too. N rows, I inputs,
// R the width between, O outputs.

#include <torch/library.h>

#include <optional>
#include <vector>

#include "vectors.h"

namespace {

using namespace relinear;

// rows of weights that are read side by side: memory is asked for several lines ahead
constexpr int kTogether = 4;

// Weights (O, depth), contiguous.
template <class T>
struct Weights {
  const T* data;
  int64_t depth;

  template <int kCount>
  void rows(float (&sums)[kCount], const float* x, int64_t row) const {
    const T* from = data + row * depth;
    Floats total[kCount] = {};
    for_vectors(depth, [&](int64_t at, int count) {
      const Floats input = load(x + at, count);
      for (int i = 0; i < kCount; ++i) total[i] += load(from + i * depth + at, count) * input;
    });
    for (int i = 0; i < kCount; ++i) sums[i] = sum(total[i]);
  }
};

// Calls body(n, o, sum) for every number of x weights^T; x holds N rows, ``stride`` apart.
template <class T, class Body>
void multiply(const Weights<T>& weights, const float* x, int64_t stride, int64_t rows, int64_t outputs,
              const Body& body) {
  at::parallel_for(0, (outputs + kTogether - 1) / kTogether,
                   std::max<int64_t>(1, kGrain / kTogether / std::max<int64_t>(1, weights.depth * rows)),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t o = begin * kTogether; o < std::min(end * kTogether, outputs); o += kTogether)
                       for (int64_t n = 0; n < rows; ++n) {  // the weights come from the first cache after n = 0
                         if (o + kTogether <= outputs) {
                           float sums[kTogether];
                           weights.rows(sums, x + n * stride, o);
                           for (int i = 0; i < kTogether; ++i) body(n, o + i, sums[i]);
                         } else {
                           for (int64_t last = o; last < outputs; ++last) {
                             float sums[1];
                             weights.rows(sums, x + n * stride, last);
                             body(n, last, sums[0]);
                           }
                         }
                       }
                   });
}

// out = (down x) up^T + bias, or with an order (x_S + down x_rest) up^T + bias, S being the first R of the order.
template <class T>
void chain(Tensor& out, const Tensor& x, const std::optional<Tensor>& order, const Tensor& down, const Tensor& up,
           const std::optional<Tensor>& bias) {
  const int64_t rows = x.size(0), inputs = x.size(1), rank = down.size(0), outputs = up.size(0);
  const int64_t pivots = order ? rank : 0;
  std::vector<float> taken(rows * inputs), between(rows * rank);
  const int32_t* places = order ? order->const_data_ptr<int32_t>() : nullptr;
  const T* from = x.const_data_ptr<T>();
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t i = 0; i < inputs; ++i) {
      const int64_t place = places ? places[i] : i;
      TORCH_CHECK_INDEX(place >= 0 && place < inputs, "order must hold places below ", inputs, ", got ", place);
      taken[n * inputs + i] = float(from[n * inputs + place]);
    }
  multiply(Weights<T>{down.const_data_ptr<T>(), inputs - pivots}, taken.data() + pivots, inputs, rows, rank,
           [&](int64_t n, int64_t r, float value) {
             between[n * rank + r] = value + (pivots ? taken[n * inputs + r] : 0.f);
           });
  const T* start = bias ? bias->const_data_ptr<T>() : nullptr;
  T* to = out.mutable_data_ptr<T>();
  multiply(Weights<T>{up.const_data_ptr<T>(), rank}, between.data(), rank, rows, outputs,
           [&](int64_t n, int64_t o, float value) {
             to[n * outputs + o] = T(value + (start ? float(start[o]) : 0.f));
           });
}

void chain_any(Tensor& out, const Tensor& x, const std::optional<Tensor>& order, const Tensor& down, const Tensor& up,
               const std::optional<Tensor>& bias) {
  const auto sizes = checked(x, "x");
  TORCH_CHECK(down.dim() == 2 && up.dim() == 2, "down and up must be matrices, got ", down.sizes(), " and ",
              up.sizes());
  const int64_t pivots = order ? down.size(0) : 0;
  check(down, "down", x.scalar_type(), {up.size(1), sizes[1] - pivots});
  check(up, "up", x.scalar_type(), up.sizes());
  check(out, "out", x.scalar_type(), {sizes[0], up.size(0)});
  if (order) check(*order, "order", at::kInt, {sizes[1]});
  if (bias) check(*bias, "bias", x.scalar_type(), {up.size(0)});
  RELINEAR_DISPATCH(x, chain<T>(out, x, order, down, up, bias));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(relinear_cpu, library) {
  library.def("chain(Tensor(a!) out, Tensor x, Tensor? order, Tensor down, Tensor up, Tensor? bias) -> ()", chain_any);
}
