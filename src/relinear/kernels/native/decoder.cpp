// One token through a decoder layer as Llama's, of packed integers: what is before attention, and what follows.
//
// H heads of D numbers, of which several share keys and values.

#include "byte_products.h"

namespace {

using namespace relinear;

struct Packed {
  const uint8_t* codes;
  const float* scales;
  const uint8_t* zeros;
  const float* bias;
  int64_t inputs, outputs, bits, group;
};

// As ``calls.decoder_layer`` hands it over.
struct Layer {
  Packed query, key, value, output, gate, up, down;
  const float *first_norm, *second_norm;
  int64_t heads, shared, size;  // ``shared``: heads of keys and values
};

void multiply(float* to, const Packed& matrix, const Rounded& x) {
  const Grid<float> grid(matrix.codes, matrix.scales, matrix.zeros, matrix.inputs, matrix.bits, matrix.group);
  relinear::multiply(to, grid, matrix.bits, x, 1, matrix.outputs, Bias<float>(matrix.bias));
}

// x over its root mean square, times a weight
Rounded normalized(const float* x, const float* weight, int64_t width, float eps) {
  float squares = 0;
  for (int64_t i = 0; i < width; ++i) squares += x[i] * x[i];
  const float scale = 1.f / std::sqrt(squares / width + eps);
  std::vector<float> values(width);
  for (int64_t i = 0; i < width; ++i) values[i] = weight[i] * (x[i] * scale);
  return Rounded(values.data(), width);
}

// Turns pairs of coordinates that lie half a head apart.
void rotate(float* heads, int64_t count, int64_t size, const float* cosine, const float* sine) {
  const int64_t half = size / 2;
  for (int64_t at = 0; at < count; ++at, heads += size)
    for (int64_t i = 0; i < half; ++i) {
      const float low = heads[i], high = heads[half + i];
      heads[i] = low * cosine[i] - high * sine[i];
      heads[half + i] = high * cosine[half + i] + low * sine[half + i];
    }
}

}  // namespace

extern "C" {

// query (H, D), key and value of a token x
void decoder_before(int threads, float* query, float* key, float* value, const float* x, const float* cosine,
                    const float* sine, const Layer* layer, float eps) {
  most_threads = threads;
  const Rounded read = normalized(x, layer->first_norm, layer->query.inputs, eps);
  multiply(query, layer->query, read);
  multiply(key, layer->key, read);
  multiply(value, layer->value, read);
  rotate(query, layer->heads, layer->size, cosine, sine);
  rotate(key, layer->shared, layer->size, cosine, sine);
}

// What becomes of x once its heads have attended: ``mixed`` (H, D)
void decoder_after(int threads, float* out, const float* x, const float* mixed, const Layer* layer, float eps) {
  most_threads = threads;
  const int64_t width = layer->output.outputs, inner = layer->gate.outputs;
  std::vector<float> added(width), gate(inner), up(inner);
  multiply(out, layer->output, Rounded(mixed, layer->output.inputs));
  for (int64_t i = 0; i < width; ++i) out[i] += x[i];
  const Rounded read = normalized(out, layer->second_norm, width, eps);
  multiply(gate.data(), layer->gate, read);
  multiply(up.data(), layer->up, read);
  for_vectors(inner, [&](int64_t at, int lanes) {
    const Floats value = load(gate.data() + at, lanes);
    store(gate.data() + at, value * sigmoid(value) * load(up.data() + at, lanes), lanes);
  });
  multiply(added.data(), layer->down, Rounded(gate.data(), inner));
  for (int64_t i = 0; i < width; ++i) out[i] += added[i];
}

}  // extern "C"
