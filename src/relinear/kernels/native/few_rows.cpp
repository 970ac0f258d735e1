// Operators for a few rows, each in one call (rows.h says why).
//
// Numbers are float or bfloat16, sums in single precision, what is between two products too. N rows, I inputs,
// R the width between, O outputs.

#include <torch/library.h>

#include "rows.h"

namespace {

using namespace relinear;

// HDPL without noise: z = encoder x + its bias, out = diag(blocks) x + decoder silu(z) + bias.
template <class T>
void hdpl(T* to, T* to_z, const Tensor& x, const Tensor& blocks, const Tensor& encoder, const Tensor& encoder_bias,
          const Tensor& decoder, const std::optional<Tensor>& bias) {
  const int64_t rows = x.size(0), inputs = x.size(1), rank = encoder.size(0), outputs = decoder.size(0);
  const int64_t columns = blocks.size(1), depth = blocks.size(2);
  const std::vector<float> taken = in_single<T>(x);
  std::vector<float> latent(rows * rank);
  const T *to_latent = encoder.const_data_ptr<T>(), *own = blocks.const_data_ptr<T>(),
          *from_latent = decoder.const_data_ptr<T>();
  const Bias<T> offset(encoder_bias), start(bias);
  for_outputs(rank, rank, rows * inputs, [&](int64_t r, auto count) {
    for (int64_t n = 0; n < rows; ++n) {
      float sums[count] = {};
      add_products(sums, to_latent + r * inputs, inputs, taken.data() + n * inputs);
      for (int i = 0; i < count; ++i) {
        const float value = sums[i] + offset[r + i];
        to_z[n * rank + r + i] = T(value);
        latent[n * rank + r + i] = value;
      }
    }
  });
  for_vectors(rows * rank, [&](int64_t at, int count) {
    const Floats value = load(latent.data() + at, count);
    store(latent.data() + at, value * sigmoid(value), count);
  });
  for_outputs(outputs, columns, rows * (rank + depth), [&](int64_t o, auto count) {
    for (int64_t n = 0; n < rows; ++n) {
      Floats totals[count] = {};
      accumulate(totals, own + o * depth, depth, taken.data() + n * inputs + o / columns * depth);
      accumulate(totals, from_latent + o * rank, rank, latent.data() + n * rank);
      for (int i = 0; i < count; ++i) to[n * outputs + o + i] = T(sum(totals[i]) + start[o + i]);
    }
  });
}

void check_hdpl(const Tensor& x, const Tensor& blocks, const Tensor& encoder, const Tensor& encoder_bias,
                const Tensor& decoder, const std::optional<Tensor>& bias) {
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
  check_optional(bias, "bias", x.scalar_type(), {outputs});
}

std::tuple<Tensor, Tensor> hdpl_layer(const Tensor& x, const Tensor& blocks, const Tensor& encoder,
                                      const Tensor& encoder_bias, const Tensor& decoder,
                                      const std::optional<Tensor>& bias) {
  const Tensor rows = rows_of(x);
  check_hdpl(rows, blocks, encoder, encoder_bias, decoder, bias);
  Tensor out = empty_like_rows(x, decoder.size(0)), z = empty_like_rows(x, decoder.size(1));
  RELINEAR_DISPATCH(rows, hdpl<T>(out.mutable_data_ptr<T>(), z.mutable_data_ptr<T>(), rows, blocks, encoder,
                                  encoder_bias, decoder, bias));
  return {out, z};
}

// A weight of features with its bias, of a gate: sigmoid(weight features + bias).
struct Gate {
  const std::optional<Tensor>&weight, &bias;

  void check(const char* name, at::ScalarType dtype, int64_t outputs, int64_t width) const {
    check_optional(weight, name, dtype, {outputs, width});
    check_optional(bias, name, dtype, {outputs});
  }
};

// Gates of logits, in their place: many at once, as a sigmoid takes longer than a product of some inputs.
void open(std::vector<float>& logits) {
  for_vectors(logits.size(), [&](int64_t at, int count) {
    store(logits.data() + at, sigmoid(load(logits.data() + at, count)), count);
  });
}

// gelu(weight x + bias), one after another: ``trunk`` holds weights and biases by turns
template <class T>
std::vector<float> hidden_layers(const Tensor& context, at::TensorList trunk) {
  std::vector<float> features = in_single<T>(context);
  const int64_t rows = context.size(0);
  for (size_t at = 0; at + 1 < trunk.size(); at += 2) {
    const int64_t outputs = trunk[at].size(0), inputs = trunk[at].size(1);
    std::vector<float> next(rows * outputs);
    const T *weight = trunk[at].const_data_ptr<T>(), *bias = trunk[at + 1].const_data_ptr<T>();
    for_outputs(outputs, outputs, rows * inputs, [&](int64_t o, auto count) {
      for (int64_t n = 0; n < rows; ++n) {
        float sums[count] = {};
        add_products(sums, weight + o * inputs, inputs, features.data() + n * inputs);
        for (int i = 0; i < count; ++i) {
          const float value = sums[i] + float(bias[o + i]);
          next[n * outputs + o + i] = 0.5f * value * (1.f + std::erf(value * float(M_SQRT1_2)));
        }
      }
    });
    features.swap(next);
  }
  return features;
}

// h = basis x, normalised (gain and offset may be missing, then it is not), times its gate;
// out = (mix h + bias) times its gate, or (mix h) times its gate + bias.
template <class T>
void ccl(T* to, const Tensor& x, const std::vector<float>& context, const Tensor& basis, const Tensor& mix,
         const std::optional<Tensor>& bias, const std::optional<Tensor>& gain, const std::optional<Tensor>& offset,
         const Gate& inner, const Gate& outer, bool gate_bias, double eps) {
  const int64_t rows = x.size(0), inputs = x.size(1), rank = basis.size(0), outputs = mix.size(0);
  const int64_t width = rows ? context.size() / rows : 0;
  const std::vector<float> taken = in_single<T>(x);
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
        if (weights[0]) gates[n * rank + r + i] = logits[i] + inner_bias[r + i];
      }
    }
  });
  if (weights[0]) open(gates);
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
  std::vector<float> values(rows * outputs), outer_gates(rows * outputs, 1.f);
  for_outputs(outputs, outputs, rows * (rank + (weights[1] ? width : 0)), [&](int64_t o, auto count) {
    for (int64_t n = 0; n < rows; ++n) {
      float sums[count] = {}, logits[count] = {};
      add_products(sums, second + o * rank, rank, h.data() + n * rank);
      if (weights[1]) add_products(logits, weights[1] + o * width, width, context.data() + n * width);
      for (int i = 0; i < count; ++i) {
        values[n * outputs + o + i] = sums[i] + (gate_bias ? start[o + i] : 0.f);
        if (weights[1]) outer_gates[n * outputs + o + i] = logits[i] + outer_bias[o + i];
      }
    }
  });
  if (weights[1]) open(outer_gates);
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t o = 0; o < outputs; ++o)
      to[n * outputs + o] =
          T(values[n * outputs + o] * outer_gates[n * outputs + o] + (gate_bias ? 0.f : start[o]));
}

Tensor ccl_any(const Tensor& x, const std::optional<Tensor>& context, at::TensorList trunk, const Tensor& basis,
               const Tensor& mix, const std::optional<Tensor>& bias, const std::optional<Tensor>& gain,
               const std::optional<Tensor>& offset, const std::optional<Tensor>& basis_gate,
               const std::optional<Tensor>& basis_gate_bias, const std::optional<Tensor>& output_gate,
               const std::optional<Tensor>& output_gate_bias, bool gate_bias, double eps) {
  const Tensor rows = rows_of(x);
  const at::ScalarType dtype = x.scalar_type();
  const auto sizes = checked(rows, "x");
  TORCH_CHECK(basis.dim() == 2 && mix.dim() == 2 && trunk.size() % 2 == 0, "basis and mix must be matrices, and a ",
              "trunk has a bias for every weight, got ", basis.sizes(), ", ", mix.sizes(), " and ", trunk.size());
  Tensor given;
  int64_t width = 0;
  if (context) {
    given = rows_of(*context);
    width = given.size(1);
    check(given, "context", dtype, {sizes[0], width});
  }
  for (size_t at = 0; at < trunk.size(); at += 2) {
    TORCH_CHECK(trunk[at].dim() == 2 && context, "a trunk is matrices and their biases, for a context");
    check(trunk[at], "trunk", dtype, {trunk[at].size(0), width});
    width = trunk[at].size(0);
    check(trunk[at + 1], "trunk", dtype, {width});
  }
  TORCH_CHECK(context || !(basis_gate || output_gate), "gates need a context");
  const Gate inner{basis_gate, basis_gate_bias}, outer{output_gate, output_gate_bias};
  const int64_t rank = basis.size(0), outputs = mix.size(0);
  check(basis, "basis", dtype, {rank, sizes[1]});
  check(mix, "mix", dtype, {outputs, rank});
  check_optional(bias, "bias", dtype, {outputs});
  check_optional(gain, "gain", dtype, {rank});
  check_optional(offset, "offset", dtype, {rank});
  inner.check("basis_gate", dtype, rank, width);
  outer.check("output_gate", dtype, outputs, width);
  Tensor out = empty_like_rows(x, outputs);
  RELINEAR_DISPATCH(rows, {
    const std::vector<float> features = context ? hidden_layers<T>(given, trunk) : std::vector<float>();
    ccl(out.mutable_data_ptr<T>(), rows, features, basis, mix, bias, gain, offset, inner, outer, gate_bias, eps);
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(relinear_cpu, library) {
  library.def(
      "hdpl_layer(Tensor x, Tensor blocks, Tensor encoder, Tensor encoder_bias, Tensor decoder, Tensor? bias) -> "
      "(Tensor, Tensor)",
      hdpl_layer);
  library.def(
      "ccl_layer(Tensor x, Tensor? context, Tensor[] trunk, Tensor basis, Tensor mix, Tensor? bias, Tensor? gain, "
      "Tensor? offset, Tensor? basis_gate, Tensor? basis_gate_bias, Tensor? output_gate, Tensor? output_gate_bias, "
      "bool gate_bias, float eps) -> Tensor",
      ccl_any);
}
