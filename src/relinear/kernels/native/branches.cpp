// Between the sandwiches of a rotor network: branches are permuted, normalised, activated (PReLU) and mixed, in one pass
// over memory each for forward and backward, which computes again what the forward pass did not keep.
//
// Numbers are float or bfloat16, everything between loading and storing in single precision. N tokens, W branches of V
// coordinates; order (W V,) holds places among the W V coordinates of a token, of each branch its own.

#include <torch/library.h>

#include <cmath>
#include <vector>

#include "vectors.h"

namespace {

using namespace relinear;

constexpr float kEpsilon = 1e-5f;  // that of torch's layer norm

// A token's coordinates in single precision.
template <class T>
void unpack(float* to, const T* from, int64_t size) {
  for_vectors(size, [&](int64_t at, int count) { store(to + at, load(from + at, count), count); });
}

template <class T>
void pack(T* to, const float* from, int64_t size) {
  for_vectors(size, [&](int64_t at, int count) { store(to + at, load(from + at, count), count); });
}

struct Moments {
  float mean = 0, scale = 1;
};

Moments moments(const float* values, int64_t size, bool normalize) {
  if (!normalize) return {};
  float total = 0, squares = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < size; ++i) total += values[i];
  const float mean = total / size;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < size; ++i) squares += (values[i] - mean) * (values[i] - mean);
  return {mean, 1 / std::sqrt(squares / size + kEpsilon)};
}

// y = sum_w mix_w prelu_w(norm(x_w)[order_w])
template <class T>
void mix_branches(Tensor& y, const Tensor& x, const Tensor& order, const Tensor& slopes, const Tensor& mix,
                  bool normalize) {
  const int64_t branches = x.size(1), size = x.size(2), all = branches * size;
  const T* from = x.const_data_ptr<T>();
  const int32_t* places = order.const_data_ptr<int32_t>();
  const float *slope = slopes.const_data_ptr<float>(), *share = mix.const_data_ptr<float>();
  T* to = y.mutable_data_ptr<T>();
  for_rows(x.size(0), all, [&](int64_t begin, int64_t end) {
    std::vector<float> token(all), sums(size);
    for (int64_t row = begin; row < end; ++row) {
      float *values = token.data(), *out = sums.data();
      unpack(values, from + row * all, all);
      for (int64_t w = 0; w < branches; ++w) {
        const Moments of = moments(values + w * size, size, normalize);
        const int32_t* at = places + w * size;
        const float above = share[w], below = share[w] * slope[w];
#pragma omp simd
        for (int64_t v = 0; v < size; ++v) {
          const float h = (values[at[v]] - of.mean) * of.scale;
          out[v] = (w ? out[v] : 0.f) + h * (h > 0 ? above : below);
        }
      }
      pack(to + row * size, out, size);
    }
  });
}

// The gradient of x, and what each token adds to those of slopes and mix: sums (N, 2, W).
template <class T>
void mix_branches_backward(Tensor& to_x, Tensor& sums, const Tensor& grad, const Tensor& x, const Tensor& order,
                           const Tensor& slopes, const Tensor& mix, bool normalize) {
  const int64_t branches = x.size(1), size = x.size(2), all = branches * size;
  const T *from = x.const_data_ptr<T>(), *grads = grad.const_data_ptr<T>();
  const int32_t* places = order.const_data_ptr<int32_t>();
  const float *slope = slopes.const_data_ptr<float>(), *share = mix.const_data_ptr<float>();
  T* to = to_x.mutable_data_ptr<T>();
  float* totals = sums.mutable_data_ptr<float>();
  for_rows(x.size(0), all, [&](int64_t begin, int64_t end) {
    std::vector<float> token(all), upstream(size), normal(size), change(size);
    float *values = token.data(), *g = upstream.data(), *normed = normal.data(), *changes = change.data();
    for (int64_t row = begin; row < end; ++row) {
      unpack(values, from + row * all, all);
      unpack(g, grads + row * size, size);
      for (int64_t w = 0; w < branches; ++w) {
        const Moments of = moments(values + w * size, size, normalize);
        const int32_t* at = places + w * size;
        const float above = share[w], below = share[w] * slope[w];
        float positive = 0, negative = 0, mean = 0, along = 0;
#pragma omp simd reduction(+ : positive, negative, mean, along)
        for (int64_t v = 0; v < size; ++v) {
          const float h = (values[at[v]] - of.mean) * of.scale, product = g[v] * h;
          const float d = g[v] * (h > 0 ? above : below);
          positive += h > 0 ? product : 0.f;
          negative += h > 0 ? 0.f : product;
          normed[v] = h;
          changes[v] = d;
          mean += d;
          along += d * h;
        }
        totals[(2 * row) * branches + w] = share[w] * negative;
        totals[(2 * row + 1) * branches + w] = positive + slope[w] * negative;
        mean = normalize ? mean / size : 0.f;
        along = normalize ? along / size : 0.f;
        for (int64_t v = 0; v < size; ++v) values[at[v]] = of.scale * (changes[v] - mean - normed[v] * along);
      }
      pack(to + row * all, values, all);
    }
  });
}

void check_branches(const Tensor& x, const Tensor& order, const Tensor& slopes, const Tensor& mix) {
  TORCH_CHECK(x.dim() == 3 && (x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16),
              "x must be float32 or bfloat16 of shape (tokens, branches, window), got ", x.dtype(), " ", x.sizes());
  check(x, "x", x.scalar_type(), x.sizes());
  check(order, "order", at::kInt, {x.size(1) * x.size(2)});
  check(slopes, "slopes", at::kFloat, {x.size(1)});
  check(mix, "mix", at::kFloat, {x.size(1)});
}

void mix_branches_any(Tensor& y, const Tensor& x, const Tensor& order, const Tensor& slopes, const Tensor& mix,
                      bool normalize) {
  check_branches(x, order, slopes, mix);
  check(y, "y", x.scalar_type(), {x.size(0), x.size(2)});
  RELINEAR_DISPATCH(x, mix_branches<T>(y, x, order, slopes, mix, normalize));
}

void mix_branches_backward_any(Tensor& to_x, Tensor& sums, const Tensor& grad, const Tensor& x, const Tensor& order,
                               const Tensor& slopes, const Tensor& mix, bool normalize) {
  check_branches(x, order, slopes, mix);
  check(to_x, "to_x", x.scalar_type(), x.sizes());
  check(sums, "sums", at::kFloat, {x.size(0), 2, x.size(1)});
  check(grad, "grad", x.scalar_type(), {x.size(0), x.size(2)});
  RELINEAR_DISPATCH(x, mix_branches_backward<T>(to_x, sums, grad, x, order, slopes, mix, normalize));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(relinear_cpu, library) {
  library.def("mix_branches(Tensor(a!) y, Tensor x, Tensor order, Tensor slopes, Tensor mix, bool normalize) -> ()",
              mix_branches_any);
  library.def(
      "mix_branches_backward(Tensor(a!) to_x, Tensor(b!) sums, Tensor grad, Tensor x, Tensor order, Tensor slopes, "
      "Tensor mix, bool normalize) -> ()",
      mix_branches_backward_any);
}
