// Operators for a few rows, each in one call (rows.h says why).
//
// Numbers are float or bfloat16, sums in single precision, what is between two products too. N rows, I inputs,
// R the width between, O outputs.

#include "rows.h"

namespace {

using namespace relinear;

// weight x + bias (N, O) of x (N, I)
template <class T>
std::vector<float> affine(const void* weight, const void* bias, const std::vector<float>& x, int64_t rows,
                          int64_t inputs, int64_t outputs) {
  const T* matrix = static_cast<const T*>(weight);
  const Bias<T> start(bias);
  std::vector<float> y(rows * outputs);
  for_outputs(outputs, outputs, rows * inputs, [&](int64_t o, auto count) {
    for (int64_t n = 0; n < rows; ++n) {
      Floats totals[count] = {};
      accumulate(totals, matrix + o * inputs, inputs, x.data() + n * inputs);
      for (int i = 0; i < count; ++i) y[n * outputs + o + i] = sum(totals[i]) + start[o + i];
    }
  });
  return y;
}

// function of every number, in its place
template <class Function>
void apply(std::vector<float>& values, const Function& function) {
  for_vectors(values.size(), [&](int64_t at, int count) {
    store(values.data() + at, function(load(values.data() + at, count)), count);
  });
}

// HDPL without noise: z = encoder x + its bias, out = diag(blocks) x + decoder silu(z) + bias; z may
// be kept, or not.
template <class T>
void hdpl(T* to, T* to_z, const T* x, const T* own, const T* encoder, const T* offset, const T* decoder,
          const Bias<T>& start, int64_t rows, int64_t inputs, int64_t rank, int64_t outputs, int64_t blocks) {
  const int64_t columns = outputs / blocks, depth = inputs / blocks;
  const std::vector<float> taken = in_single(x, rows * inputs);
  std::vector<float> latent = affine<T>(encoder, offset, taken, rows, inputs, rank);
  if (to_z) std::transform(latent.begin(), latent.end(), to_z, [](float value) { return T(value); });
  apply(latent, [](Floats value) { return value * sigmoid(value); });
  for_outputs(outputs, columns, rows * (rank + depth), [&](int64_t o, auto count) {
    for (int64_t n = 0; n < rows; ++n) {
      Floats totals[count] = {};
      accumulate(totals, own + o * depth, depth, taken.data() + n * inputs + o / columns * depth);
      accumulate(totals, decoder + o * rank, rank, latent.data() + n * rank);
      for (int i = 0; i < count; ++i) to[n * outputs + o + i] = T(sum(totals[i]) + start[o + i]);
    }
  });
}

// A CCL layer as ``calls.ccl_layer`` hands it over: numbers (void) are T.
struct CCL {
  int64_t inputs, context, hidden, rank, outputs, gate_bias;  // hidden: layers of the gate network before its last
  const void *basis, *mix, *bias, *gain, *offset, *basis_gate, *basis_gate_bias, *output_gate, *output_gate_bias;
};

// LayerNorm of every row, in its place.
template <class T>
void normalize(std::vector<float>& h, int64_t rank, const T* gain, const Bias<T>& offset, float eps) {
  for (float *row = h.data(), *end = row + h.size(); row != end; row += rank) {
    float mean = 0, variance = 0;
    for (int64_t r = 0; r < rank; ++r) mean += row[r];
    mean /= rank;
    for (int64_t r = 0; r < rank; ++r) variance += (row[r] - mean) * (row[r] - mean);
    const float scale = 1.f / std::sqrt(variance / rank + eps);
    for (int64_t r = 0; r < rank; ++r) row[r] = (row[r] - mean) * scale * float(gain[r]) + offset[r];
  }
}

// h = basis x, normalised (gain and offset may be missing, then it is not), times its gate;
// out = (mix h + bias) times its gate, or (mix h) times its gate + bias. ``trunk`` has weights and biases of the gate
// network's hidden layers by turns, ``widths`` their outputs.
template <class T>
void ccl(T* to, const T* x, const T* context, int64_t rows, const CCL& layer, const void* const* trunk,
         const int64_t* widths, float eps) {
  const int64_t rank = layer.rank, outputs = layer.outputs;
  std::vector<float> features = in_single(context, rows * layer.context);
  int64_t width = layer.context;
  for (int64_t at = 0; at < layer.hidden; ++at) {
    features = affine<T>(trunk[2 * at], trunk[2 * at + 1], features, rows, width, widths[at]);
    for (float& value : features) value *= 0.5f * (1.f + std::erf(value * float(M_SQRT1_2)));  // gelu
    width = widths[at];
  }
  const auto gate = [&](std::vector<float>& values, const void* weight, const void* bias, int64_t size) {
    if (!weight) return;
    std::vector<float> gates = affine<T>(weight, bias, features, rows, width, size);
    apply(gates, [](Floats logits) { return sigmoid(logits); });
    for (size_t at = 0; at < gates.size(); ++at) values[at] *= gates[at];
  };
  std::vector<float> h = affine<T>(layer.basis, nullptr, in_single(x, rows * layer.inputs), rows, layer.inputs, rank);
  if (layer.gain) normalize(h, rank, (const T*)layer.gain, Bias<T>(layer.offset), eps);
  gate(h, layer.basis_gate, layer.basis_gate_bias, rank);
  std::vector<float> y = affine<T>(layer.mix, layer.gate_bias ? layer.bias : nullptr, h, rows, rank, outputs);
  gate(y, layer.output_gate, layer.output_gate_bias, outputs);
  const Bias<T> ungated(layer.gate_bias ? nullptr : layer.bias);
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t o = 0; o < outputs; ++o) to[n * outputs + o] = T(y[n * outputs + o] + ungated[o]);
}

}  // namespace

// ``half`` is whether numbers (void) are bfloat16, ``threads`` how many may run.
extern "C" {

void hdpl_layer(bool half, int threads, void* out, void* z, const void* x, const void* blocks, const void* encoder,
                const void* encoder_bias, const void* decoder, const void* bias, int64_t rows, int64_t inputs,
                int64_t rank, int64_t outputs, int64_t groups) {
  most_threads = threads;
  RELINEAR_DISPATCH(half, hdpl((T*)out, (T*)z, (const T*)x, (const T*)blocks, (const T*)encoder,
                               (const T*)encoder_bias, (const T*)decoder, Bias<T>(bias), rows, inputs, rank, outputs, groups));
}

void ccl_layer(bool half, int threads, void* out, const void* x, const void* context, int64_t rows, const CCL* layer,
               const void* const* trunk, const int64_t* widths, float eps) {
  most_threads = threads;
  RELINEAR_DISPATCH(half, ccl((T*)out, (const T*)x, (const T*)context, rows, *layer, trunk, widths, eps));
}

}  // extern "C"
