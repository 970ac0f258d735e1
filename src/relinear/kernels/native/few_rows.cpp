// Operators for a few rows, each in one call (rows.h says why).
//
// Numbers are float or bfloat16, sums in single precision, what is between two products too. N rows, I inputs,
// R the width between, O outputs.

#include <torch/library.h>

#include "rows.h"

namespace {

using namespace relinear;

// out = (down x) up^T + bias, or with an order (x_S + down x_rest) up^T + bias, S being the first R of the order.
template <class T>
void chain(Tensor& out, const Tensor& x, const std::optional<Tensor>& order, const Tensor& down, const Tensor& up,
           const std::optional<Tensor>& bias) {
  const int64_t rows = x.size(0), inputs = x.size(1), rank = down.size(0), outputs = up.size(0);
  const int64_t pivots = order ? rank : 0, rest = inputs - pivots;
  const std::vector<float> taken = in_single<T>(x, order);
  std::vector<float> between(rows * rank);
  const T* first = down.const_data_ptr<T>();
  for_outputs(rank, rank, rows * rest, [&](int64_t r, auto count) {
    for (int64_t n = 0; n < rows; ++n) {  // the weights come from the first cache after n = 0
      float sums[count] = {};
      add_products(sums, first + r * rest, rest, taken.data() + n * inputs + pivots);
      for (int i = 0; i < count; ++i)
        between[n * rank + r + i] = sums[i] + (pivots ? taken[n * inputs + r + i] : 0.f);
    }
  });
  linear_rows(out.mutable_data_ptr<T>(), between, rows, rank, up.const_data_ptr<T>(), outputs, Bias<T>(bias));
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
  check_optional(order, "order", at::kInt, {sizes[1]});
  check_optional(bias, "bias", x.scalar_type(), {up.size(0)});
  RELINEAR_DISPATCH(x, chain<T>(out, x, order, down, up, bias));
}

// HDPL without noise: z = encoder x + its bias, out = diag(blocks) x + decoder silu(z) + bias.
template <class T>
void hdpl(Tensor& out, Tensor& z, const Tensor& x, const Tensor& blocks, const Tensor& encoder,
          const Tensor& encoder_bias, const Tensor& decoder, const std::optional<Tensor>& bias) {
  const int64_t rows = x.size(0), inputs = x.size(1), rank = encoder.size(0), outputs = decoder.size(0);
  const int64_t columns = blocks.size(1), depth = blocks.size(2);
  const std::vector<float> taken = in_single<T>(x);
  std::vector<float> latent(rows * rank);
  const T *to_latent = encoder.const_data_ptr<T>(), *own = blocks.const_data_ptr<T>(),
          *from_latent = decoder.const_data_ptr<T>();
  const Bias<T> offset(encoder_bias), start(bias);
  T *to = out.mutable_data_ptr<T>(), *to_z = z.mutable_data_ptr<T>();
  for_outputs(rank, rank, rows * inputs, [&](int64_t r, auto count) {
    for (int64_t n = 0; n < rows; ++n) {
      float sums[count] = {};
      add_products(sums, to_latent + r * inputs, inputs, taken.data() + n * inputs);
      for (int i = 0; i < count; ++i) {
        const float value = sums[i] + offset[r + i];
        to_z[n * rank + r + i] = T(value);
        latent[n * rank + r + i] = value * sigmoid(value);
      }
    }
  });
  for_outputs(outputs, columns, rows * (rank + depth), [&](int64_t o, auto count) {
    for (int64_t n = 0; n < rows; ++n) {
      float sums[count] = {};
      add_products(sums, own + o * depth, depth, taken.data() + n * inputs + o / columns * depth);
      add_products(sums, from_latent + o * rank, rank, latent.data() + n * rank);
      for (int i = 0; i < count; ++i) to[n * outputs + o + i] = T(sums[i] + start[o + i]);
    }
  });
}

void hdpl_any(Tensor& out, Tensor& z, const Tensor& x, const Tensor& blocks, const Tensor& encoder,
              const Tensor& encoder_bias, const Tensor& decoder, const std::optional<Tensor>& bias) {
  const auto sizes = checked(x, "x");
  TORCH_CHECK(blocks.dim() == 3 && decoder.dim() == 2 && blocks.size(1) > 0, "blocks and decoder must be of 3 and 2 ",
              "dimensions, got ", blocks.sizes(), " and ", decoder.sizes());
  const int64_t outputs = blocks.size(0) * blocks.size(1), rank = decoder.size(1);
  check(blocks, "blocks", x.scalar_type(), {blocks.size(0), blocks.size(1), sizes[1] / blocks.size(0)});
  TORCH_CHECK(blocks.size(0) * blocks.size(2) == sizes[1], "blocks must be for ", sizes[1], " inputs, got ",
              blocks.sizes());
  check(encoder, "encoder", x.scalar_type(), {rank, sizes[1]});
  check(encoder_bias, "encoder_bias", x.scalar_type(), {rank});
  check(decoder, "decoder", x.scalar_type(), {outputs, rank});
  check(out, "out", x.scalar_type(), {sizes[0], outputs});
  check(z, "z", x.scalar_type(), {sizes[0], rank});
  check_optional(bias, "bias", x.scalar_type(), {outputs});
  RELINEAR_DISPATCH(x, hdpl<T>(out, z, x, blocks, encoder, encoder_bias, decoder, bias));
}

// A weight of features with its bias, of a gate: sigmoid(weight features + bias).
struct Gate {
  const std::optional<Tensor>&weight, &bias;

  void check(const char* name, const Tensor& features, int64_t outputs) const {
    check_optional(weight, name, features.scalar_type(), {outputs, features.size(1)});
    check_optional(bias, name, features.scalar_type(), {outputs});
  }
};

// h = basis x, normalised (gain and offset may be missing, then it is not), times its gate;
// out = (mix h + bias) times its gate.
template <class T>
void ccl(Tensor& out, const Tensor& x, const Tensor& features, const Tensor& basis, const Tensor& mix,
         const std::optional<Tensor>& bias, const std::optional<Tensor>& gain, const std::optional<Tensor>& offset,
         const Gate& inner, const Gate& outer, double eps) {
  const int64_t rows = x.size(0), inputs = x.size(1), rank = basis.size(0), outputs = mix.size(0);
  const int64_t width = features.size(1);
  const std::vector<float> taken = in_single<T>(x), context = in_single<T>(features);
  std::vector<float> h(rows * rank), gates(rows * rank, 1.f);
  const T *first = basis.const_data_ptr<T>(), *second = mix.const_data_ptr<T>();
  const T* weights[2] = {inner.weight ? inner.weight->const_data_ptr<T>() : nullptr,
                         outer.weight ? outer.weight->const_data_ptr<T>() : nullptr};
  const Bias<T> inner_bias(inner.bias), outer_bias(outer.bias), start(bias), offsets(offset);
  for_outputs(rank, rank, rows * (inputs + (weights[0] ? width : 0)), [&](int64_t r, auto count) {
    for (int64_t n = 0; n < rows; ++n) {
      float sums[count] = {}, logits[count] = {};
      add_products(sums, first + r * inputs, inputs, taken.data() + n * inputs);
      if (weights[0]) add_products(logits, weights[0] + r * width, width, context.data() + n * width);
      for (int i = 0; i < count; ++i) {
        h[n * rank + r + i] = sums[i];
        if (weights[0]) gates[n * rank + r + i] = sigmoid(logits[i] + inner_bias[r + i]);
      }
    }
  });
  for (int64_t n = 0; n < rows; ++n) {
    float *row = h.data() + n * rank, mean = 0, variance = 0, scale = 1;
    if (gain) {
      for (int64_t r = 0; r < rank; ++r) mean += row[r];
      mean /= rank;
      for (int64_t r = 0; r < rank; ++r) variance += (row[r] - mean) * (row[r] - mean);
      scale = 1.f / std::sqrt(variance / rank + float(eps));
    }
    for (int64_t r = 0; r < rank; ++r) {
      const float value = gain ? (row[r] - mean) * scale * float(gain->const_data_ptr<T>()[r]) + offsets[r] : row[r];
      row[r] = value * gates[n * rank + r];
    }
  }
  T* to = out.mutable_data_ptr<T>();
  for_outputs(outputs, outputs, rows * (rank + (weights[1] ? width : 0)), [&](int64_t o, auto count) {
    for (int64_t n = 0; n < rows; ++n) {
      float sums[count] = {}, logits[count] = {};
      add_products(sums, second + o * rank, rank, h.data() + n * rank);
      if (weights[1]) add_products(logits, weights[1] + o * width, width, context.data() + n * width);
      for (int i = 0; i < count; ++i) {
        const float gate = weights[1] ? sigmoid(logits[i] + outer_bias[o + i]) : 1.f;
        to[n * outputs + o + i] = T((sums[i] + start[o + i]) * gate);
      }
    }
  });
}

void ccl_any(Tensor& out, const Tensor& x, const Tensor& features, const Tensor& basis, const Tensor& mix,
             const std::optional<Tensor>& bias, const std::optional<Tensor>& gain,
             const std::optional<Tensor>& offset, const std::optional<Tensor>& basis_gate,
             const std::optional<Tensor>& basis_gate_bias, const std::optional<Tensor>& output_gate,
             const std::optional<Tensor>& output_gate_bias, double eps) {
  const auto sizes = checked(x, "x");
  TORCH_CHECK(features.dim() == 2 && basis.dim() == 2 && mix.dim() == 2, "features, basis and mix must be matrices, ",
              "got ", features.sizes(), ", ", basis.sizes(), " and ", mix.sizes());
  const Gate inner{basis_gate, basis_gate_bias}, outer{output_gate, output_gate_bias};
  const int64_t rank = basis.size(0), outputs = mix.size(0);
  check(features, "features", x.scalar_type(), {sizes[0], features.size(1)});
  check(basis, "basis", x.scalar_type(), {rank, sizes[1]});
  check(mix, "mix", x.scalar_type(), {outputs, rank});
  check(out, "out", x.scalar_type(), {sizes[0], outputs});
  check_optional(bias, "bias", x.scalar_type(), {outputs});
  check_optional(gain, "gain", x.scalar_type(), {rank});
  check_optional(offset, "offset", x.scalar_type(), {rank});
  inner.check("basis_gate", features, rank);
  outer.check("output_gate", features, outputs);
  RELINEAR_DISPATCH(x, ccl<T>(out, x, features, basis, mix, bias, gain, offset, inner, outer, eps));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(relinear_cpu, library) {
  library.def("chain(Tensor(a!) out, Tensor x, Tensor? order, Tensor down, Tensor up, Tensor? bias) -> ()", chain_any);
  library.def(
      "hdpl_rows(Tensor(a!) out, Tensor(b!) z, Tensor x, Tensor blocks, Tensor encoder, Tensor encoder_bias, "
      "Tensor decoder, Tensor? bias) -> ()",
      hdpl_any);
  library.def(
      "ccl_rows(Tensor(a!) out, Tensor x, Tensor features, Tensor basis, Tensor mix, Tensor? bias, Tensor? gain, "
      "Tensor? offset, Tensor? basis_gate, Tensor? basis_gate_bias, Tensor? output_gate, Tensor? output_gate_bias, "
      "float eps) -> ()",
      ccl_any);
}
