// Operators for a few rows, each in one call (rows.h says why).
//
// Numbers are float or bfloat16, sums in single precision, what is between two products too. N rows, I inputs,
// R the width between, O outputs.

#include "rows.h"

namespace {

using namespace relinear;

// HDPL without noise: z = encoder x + its bias, out = diag(blocks) x + decoder silu(z) + bias; z may
// be kept, or not.
template <class T>
void hdpl(T* to, T* to_z, const T* x, const T* own, const T* to_latent, const Bias<T>& offset, const T* from_latent,
          const Bias<T>& start, int64_t rows, int64_t inputs, int64_t rank, int64_t outputs, int64_t blocks) {
  const int64_t columns = outputs / blocks, depth = inputs / blocks;
  const std::vector<float> taken = in_single(x, rows * inputs);
  std::vector<float> latent(rows * rank);
  for_outputs(rank, rank, rows * inputs, [&](int64_t r, auto count) {
    for (int64_t n = 0; n < rows; ++n) {
      float sums[count] = {};
      add_products(sums, to_latent + r * inputs, inputs, taken.data() + n * inputs);
      for (int i = 0; i < count; ++i) {
        const float value = sums[i] + offset[r + i];
        if (to_z) to_z[n * rank + r + i] = T(value);
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

// A CCL layer as ``calls.ccl_layer`` hands it over: numbers (void) are T.
struct CCL {
  int64_t inputs, context, hidden, rank, outputs, gate_bias;  // hidden: layers of the gate network before its last
  const void *basis, *mix, *bias, *gain, *offset, *basis_gate, *basis_gate_bias, *output_gate, *output_gate_bias;
};

// Weights and biases of these by turns, and their widths.
struct Trunk {
  const void* const* parameters;
  const int64_t* widths;
};

// Gates of logits, in their place: many at once, as a sigmoid takes longer than a product of some inputs.
void open(std::vector<float>& logits) {
  for_vectors(logits.size(), [&](int64_t at, int count) {
    store(logits.data() + at, sigmoid(load(logits.data() + at, count)), count);
  });
}

// gelu(weight x + bias), one after another
template <class T>
std::vector<float> hidden_layers(const CCL& layer, const Trunk& trunk, const T* context, int64_t rows) {
  std::vector<float> features = in_single(context, rows * layer.context);
  int64_t inputs = layer.context;
  for (int64_t at = 0; at < layer.hidden; ++at) {
    const int64_t outputs = trunk.widths[at];
    std::vector<float> next(rows * outputs);
    const T *weight = (const T*)trunk.parameters[2 * at], *bias = (const T*)trunk.parameters[2 * at + 1];
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
    inputs = outputs;
  }
  return features;
}

// h = basis x, normalised (gain and offset may be missing, then it is not), times its gate;
// out = (mix h + bias) times its gate, or (mix h) times its gate + bias.
template <class T>
void ccl(T* to, const T* x, const T* given, int64_t rows, const CCL& layer, const Trunk& trunk, float eps) {
  const int64_t inputs = layer.inputs, rank = layer.rank, outputs = layer.outputs;
  const std::vector<float> context = hidden_layers(layer, trunk, given, rows), taken = in_single(x, rows * inputs);
  const int64_t width = rows ? context.size() / rows : 0;
  const bool gate_bias = layer.gate_bias;
  std::vector<float> h(rows * rank), gates(rows * rank, 1.f);
  const T *first = (const T*)layer.basis, *second = (const T*)layer.mix, *gain = (const T*)layer.gain;
  const T* weights[2] = {(const T*)layer.basis_gate, (const T*)layer.output_gate};
  const Bias<T> inner_bias(layer.basis_gate_bias), outer_bias(layer.output_gate_bias), start(layer.bias),
      offsets(layer.offset);
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
      scale = 1.f / std::sqrt(variance / rank + eps);
    }
    for (int64_t r = 0; r < rank; ++r) {
      const float value = gain ? (row[r] - mean) * scale * float(gain[r]) + offsets[r] : row[r];
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

}  // namespace

// ``half`` is whether numbers (void) are bfloat16, ``threads`` how many may run.
extern "C" {

void hdpl_layer(bool half, int threads, void* out, void* z, const void* x, const void* blocks, const void* encoder,
                const void* encoder_bias, const void* decoder, const void* bias, int64_t rows, int64_t inputs,
                int64_t rank, int64_t outputs, int64_t groups) {
  most_threads = threads;
  RELINEAR_DISPATCH(half, hdpl((T*)out, (T*)z, (const T*)x, (const T*)blocks, (const T*)encoder, Bias<T>(encoder_bias),
                               (const T*)decoder, Bias<T>(bias), rows, inputs, rank, outputs, groups));
}

void ccl_layer(bool half, int threads, void* out, const void* x, const void* context, int64_t rows, const CCL* layer,
               const void* const* trunk, const int64_t* widths, float eps) {
  most_threads = threads;
  RELINEAR_DISPATCH(half, ccl((T*)out, (const T*)x, (const T*)context, rows, *layer, Trunk{trunk, widths}, eps));
}

}  // extern "C"
