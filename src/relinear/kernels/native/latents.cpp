// HDPL's Gaussian latents, forward and backward, in one pass over memory each.
//
// Numbers are float or bfloat16, noise and sums in single precision. N rows, R latent dimensions. Means and logarithms of
// variances may be halves of one matrix: their rows are a stride apart.

#include <torch/library.h>

#include "vectors.h"

namespace {

using namespace relinear;

// Calls body(row, at, count) for vectors of ``count`` numbers of a matrix, from column ``at`` on.
template <class Body>
void for_latents(at::IntArrayRef sizes, const Body& body) {
  for_rows(sizes[0], sizes[1], [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      for_vectors(sizes[1], [&](int64_t at, int count) { body(row, at, count); });
  });
}

// z = mu + exp(logvar / 2) noise and s = silu(z)
template <class T>
void sample(Tensor& z, Tensor& s, const Tensor& mu, const Tensor& logvar, const Tensor& noise) {
  const T *means = mu.const_data_ptr<T>(), *logvars = logvar.const_data_ptr<T>();
  const float* noises = noise.const_data_ptr<float>();
  T *to_z = z.mutable_data_ptr<T>(), *to_s = s.mutable_data_ptr<T>();
  const int64_t columns = mu.size(1), stride = mu.stride(0);
  for_latents(mu.sizes(), [&](int64_t row, int64_t at, int count) {
    const int64_t given = row * stride + at, i = row * columns + at;
    const Floats sigma = exponential(0.5f * load(logvars + given, count));
    store(to_z + i, load(means + given, count) + sigma * load(noises + i, count), count);
    const Floats value = load(to_z + i, count);  // as rounded
    store(to_s + i, value * sigmoid(value), count);
  });
}

// The gradients (N, 2 R) of mu and of logvar, side by side, from that of s = silu(z).
template <class T>
void sample_backward(Tensor& gradient, const Tensor& grad, const Tensor& mu, const Tensor& logvar,
                     const Tensor& noise) {
  const T *means = mu.const_data_ptr<T>(), *logvars = logvar.const_data_ptr<T>(), *grads = grad.const_data_ptr<T>();
  const float* noises = noise.const_data_ptr<float>();
  T* to = gradient.mutable_data_ptr<T>();
  const int64_t columns = mu.size(1), stride = mu.stride(0);
  for_latents(mu.sizes(), [&](int64_t row, int64_t at, int count) {
    const int64_t given = row * stride + at, i = row * columns + at, both = 2 * row * columns + at;
    const Floats change = exponential(0.5f * load(logvars + given, count)) * load(noises + i, count);
    const Floats z = load(means + given, count) + change, gate = sigmoid(z);
    const Floats to_z = load(grads + i, count) * (gate * (1.f + z * (1.f - gate)));
    store(to + both, to_z, count);
    store(to + both + columns, to_z * (0.5f * change), count);
  });
}

// out = KL(N(mu, sigma^2) || N(0, 1)) of each row in nats, (N,)
template <class T>
void token_kl(Tensor& out, const Tensor& mu, const Tensor& logvar) {
  const int64_t columns = mu.size(1), stride = mu.stride(0);
  const T *means = mu.const_data_ptr<T>(), *logvars = logvar.const_data_ptr<T>();
  float* to = out.mutable_data_ptr<float>();
  for_rows(mu.size(0), columns, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      Floats total = {};
      for_vectors(columns, [&](int64_t at, int count) {
        const Floats mean = load(means + row * stride + at, count), level = load(logvars + row * stride + at, count);
        total += mean * mean + (exponential(level) - 1.f - level);  // 0 where nothing was loaded
      });
      to[row] = 0.5f * sum(total);
    }
  });
}

void check_latents(const Tensor& mu, const Tensor& logvar) {
  TORCH_CHECK(mu.dim() == 2 && logvar.sizes() == mu.sizes() && mu.device().is_cpu() && logvar.device().is_cpu() &&
                  (mu.scalar_type() == at::kFloat || mu.scalar_type() == at::kBFloat16) &&
                  logvar.scalar_type() == mu.scalar_type() && mu.stride(1) == 1 && logvar.strides() == mu.strides(),
              "mu and logvar must be float32 or bfloat16 matrices of one shape on the CPU whose rows are equally far "
              "apart, got ",
              mu.dtype(), " ", mu.sizes(), " and ", logvar.dtype(), " ", logvar.sizes());
}

void sample_any(Tensor& z, Tensor& s, const Tensor& mu, const Tensor& logvar, const Tensor& noise) {
  check_latents(mu, logvar);
  check(z, "z", mu.scalar_type(), mu.sizes());
  check(s, "s", mu.scalar_type(), mu.sizes());
  check(noise, "noise", at::kFloat, mu.sizes());
  RELINEAR_DISPATCH(mu, sample<T>(z, s, mu, logvar, noise));
}

void sample_backward_any(Tensor& gradient, const Tensor& grad, const Tensor& mu, const Tensor& logvar,
                         const Tensor& noise) {
  check_latents(mu, logvar);
  check(gradient, "gradient", mu.scalar_type(), {mu.size(0), 2 * mu.size(1)});
  check(grad, "grad", mu.scalar_type(), mu.sizes());
  check(noise, "noise", at::kFloat, mu.sizes());
  RELINEAR_DISPATCH(mu, sample_backward<T>(gradient, grad, mu, logvar, noise));
}

void token_kl_any(Tensor& out, const Tensor& mu, const Tensor& logvar) {
  check_latents(mu, logvar);
  check(out, "out", at::kFloat, {mu.size(0)});
  RELINEAR_DISPATCH(mu, token_kl<T>(out, mu, logvar));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(relinear_cpu, library) {
  library.def("sample(Tensor(a!) z, Tensor(b!) s, Tensor mu, Tensor logvar, Tensor noise) -> ()", sample_any);
  library.def("sample_backward(Tensor(a!) gradient, Tensor grad, Tensor mu, Tensor logvar, Tensor noise) -> ()",
              sample_backward_any);
  library.def("token_kl(Tensor(a!) out, Tensor mu, Tensor logvar) -> ()", token_kl_any);
}
