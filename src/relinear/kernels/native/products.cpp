// Sums of thin products in single precision, for HDPL and CCL: every number of the result is written once.
//
// A library's product over few inputs spends its time on passes over its result, one for each product and one for the
// bias. Here a tile of the result stays in registers until all is in it. N rows, O columns, K groups.

#include <memory>

#include "vectors.h"

namespace {

using namespace relinear;

// A tile of the result, with a row of weights and a factor, fills the registers.
constexpr int kHeight = 6;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kVectors = 4;
#else
constexpr int kVectors = 2;
#endif
constexpr int kWidth = kVectors * kLanes;
// rows taken at a time: their inputs stay in the second cache
constexpr int kRows = 8 * kHeight;
// rows whose gradients of weights are summed at a time: a tile of their inputs stays in the first cache
constexpr int kSummed = 64;
// numbers of a cache line
constexpr int kLine = 16;
// numbers between copied rows: so the same column of several rows does not fall into the same cache set, and a tile may
// be read over the end of a row
constexpr int kGap = kWidth + 16;

// diag(W_1 .. W_K) x, with W (K, O / K, I / K) of any strides and x (N, I) contiguous.
struct Product {
  const float *x, *weight;
  const int64_t* strides;
  int64_t inputs, depth, columns;

  int64_t group(int64_t column) const { return column / columns; }

  // The weights of ``width`` columns of one group, from ``start``: (depth, kWidth), padded with 0.
  void pack(float* to, int64_t start, int width) const {
    const float* from = weight + group(start) * strides[0] + start % columns * strides[1];
    if (width < kWidth) std::fill(to, to + depth * kWidth, 0.f);
    // as many columns at a time as there are numbers in a line, whose lines stay in the first cache
    for (int first = 0; first < width; first += kLine) {
      const int end = std::min(first + kLine, width);
      for (int64_t k = 0; k < depth; ++k)
        for (int at = first; at < end; ++at) to[k * kWidth + at] = from[k * strides[2] + at * strides[1]];
    }
  }
};

// Zeros of a thread's own, from the start of a cache line on.
class Scratch {
 public:
  explicit Scratch(int64_t size) : lines_(size / kLine + 1) {}
  float* data() { return lines_.data()->values; }

 private:
  struct alignas(64) Line {
    float values[kLine];
  };
  std::vector<Line> lines_;
};

// Row ``row`` of x and of s, one after the other.
inline void copy_row(float* to, const float* x, int64_t inputs, const float* s, int64_t latents, int64_t row) {
  std::copy(x + row * inputs, x + (row + 1) * inputs, to);
  std::copy(s + row * latents, s + (row + 1) * latents, to + inputs);
}

typedef Floats Tile[kHeight][kVectors];

inline void fill(Tile& tile, const float* bias) {
  for (int row = 0; row < kHeight; ++row)
    for (int v = 0; v < kVectors; ++v) tile[row][v] = load(bias + v * kLanes, kLanes);
}

// tile += x weights, of x (kHeight, depth) and weights (depth, kWidth); the numbers of x are ``row_stride`` and
// ``stride`` apart
inline __attribute__((always_inline)) void add_product(Tile& tile, const float* x, int64_t row_stride, int64_t stride,
                                                       const float* weights, int64_t weight_stride, int64_t depth) {
  for (int64_t k = 0; k < depth; ++k, x += stride, weights += weight_stride) {
    Floats row_of_weights[kVectors];
    for (int v = 0; v < kVectors; ++v) row_of_weights[v] = load(weights + v * kLanes, kLanes);
    for (int row = 0; row < kHeight; ++row)
      for (int v = 0; v < kVectors; ++v) tile[row][v] += x[row * row_stride] * row_of_weights[v];
  }
}

// Calls body(row, vector, at, count) for every vector of a tile that holds numbers of the result: ``count`` of them,
// from column ``at`` on.
template <class Body>
inline void for_tile(int64_t height, int64_t width, const Body& body) {
  for (int64_t row = 0; row < height; ++row)
    for (int v = 0; v < kVectors; ++v) {
      const int count = int(std::min<int64_t>(kLanes, width - v * kLanes));
      if (count == kLanes) body(row, v, v * kLanes, kLanes);
      else if (count > 0) body(row, v, v * kLanes, count);
    }
}

// first x + bias, plus second x + its bias, or times the sigmoid of that if it is a gate. A second product is of one
// group, so that no tile reaches over two of its groups.
template <bool kGate>
void combine(float* to, int64_t rows, int64_t columns, const Product& first, const Product& second,
             const float* first_bias, const float* second_bias) {
  const int64_t tiles_of_group = divided_up(first.columns, kWidth);
  const int64_t tiles = columns / first.columns * tiles_of_group;
  const int64_t stride = first.inputs + second.inputs + kGap, panel = (2 + first.depth + second.depth) * kWidth;
  const float* biases[2] = {first_bias, second_bias};
  const std::unique_ptr<float[]> packed(new float[tiles * panel]);
  float* weights = packed.get();

  const auto start_of = [&](int64_t tile) {
    return tile / tiles_of_group * first.columns + tile % tiles_of_group * kWidth;
  };
  const auto width_of = [&](int64_t tile) {
    return int(std::min<int64_t>(kWidth, first.columns - tile % tiles_of_group * kWidth));
  };
  parallel_for(tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t start = start_of(tile);
      const int width = width_of(tile);
      float* into = weights + tile * panel;
      std::fill(into, into + 2 * kWidth, 0.f);
      for (int i = 0; i < 2; ++i)
        if (biases[i]) std::copy(biases[i] + start, biases[i] + start + width, into + i * kWidth);
      first.pack(into + 2 * kWidth, start, width);
      second.pack(into + (2 + first.depth) * kWidth, start, width);
    }
  });
  parallel_for(divided_up(rows, kHeight), 1, [&](int64_t begin, int64_t end) {
    Scratch inputs(kRows * stride);
    const int64_t last = std::min(end * kHeight, rows);
    for (int64_t block = begin * kHeight; block < last; block += kRows) {
      const int64_t height = std::min<int64_t>(kRows, last - block);
      for (int64_t row = 0; row < height; ++row)
        copy_row(inputs.data() + row * stride, first.x, first.inputs, second.x, second.inputs, block + row);
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t start = start_of(tile);
        const int width = width_of(tile);
        const float *bias = weights + tile * panel, *firsts = bias + 2 * kWidth;
        const float* seconds = firsts + first.depth * kWidth;
        for (int64_t row = 0; row < height; row += kHeight) {
          const float *x = inputs.data() + row * stride + first.group(start) * first.depth;
          const float *s = inputs.data() + row * stride + first.inputs;
          Tile values, others;
          const int64_t written = std::min<int64_t>(kHeight, height - row);
          float* corner = to + (block + row) * columns + start;
          for (int64_t i = 0; i < written; ++i)  // asked for before they are written: the sums take long enough
            for (int at = 0; at < width; at += kLanes) __builtin_prefetch(corner + i * columns + at, 1);
          fill(values, bias);
          add_product(values, x, stride, 1, firsts, kWidth, first.depth);
          if constexpr (kGate) {
            fill(others, bias + kWidth);
            add_product(others, s, stride, 1, seconds, kWidth, second.depth);
            for (int i = 0; i < kHeight; ++i)
              for (int v = 0; v < kVectors; ++v) values[i][v] *= sigmoid(others[i][v]);
          } else {
            add_product(values, s, stride, 1, seconds, kWidth, second.depth);
          }
          for_tile(written, width, [&](int64_t i, int v, int at, int count) {
            store(corner + i * columns + at, values[i][v], count);
          });
        }
      }
    }
  });
}

// A gradient (K, O / K, I / K) of weights, one group after the other, and where their inputs are in a copied row.
struct Gradient {
  float* to;
  int64_t offset, depth, columns;
};

// to_blocks and to_up from the gradient of the result, x and s: sums over rows, taken some rows at a time. Threads
// share out the outputs, so that sums do not depend on how many threads there are.
void combine_gradients(const Gradient (&gradients)[2], const float* grads, const float* xs, const float* ss,
                       int64_t rows, int64_t columns, int64_t inputs, int64_t latents) {
  const int64_t stride = inputs + latents + kGap, size = gradients[0].columns;
  const int64_t tiles_of_group = divided_up(size, kHeight);
  const int64_t tiles = columns / size * tiles_of_group;
  const auto start_of = [&](int64_t tile) {
    return tile / tiles_of_group * size + tile % tiles_of_group * kHeight;
  };
  parallel_for(tiles, 1, [&](int64_t begin, int64_t end) {
    const int64_t from = start_of(begin), to = end == tiles ? columns : start_of(end), width = to - from + kGap;
    Scratch input_rows(kSummed * stride), grad_rows(kSummed * width);
    for (int64_t block = 0; block == 0 || block < rows; block += kSummed) {  // of no rows, the sums are 0
      const int64_t height = std::min<int64_t>(kSummed, rows - block);
      for (int64_t row = 0; row < height; ++row) {
        const float* line = grads + (block + row) * columns;
        std::copy(line + from, line + to, grad_rows.data() + row * width);
        copy_row(input_rows.data() + row * stride, xs, inputs, ss, latents, block + row);
      }
      for (const Gradient& gradient : gradients) {
        for (int64_t first = begin, last; first < end; first = last) {  // tiles of outputs that share their inputs
          const int64_t group = start_of(first) / gradient.columns;
          for (last = first; last < end && start_of(last) / gradient.columns == group;) ++last;
          for (int64_t column = 0; column < gradient.depth; column += kWidth) {
            const float* given = input_rows.data() + gradient.offset + group * gradient.depth + column;
            for (int64_t tile = first; tile < last; ++tile) {
              const int64_t start = start_of(tile);
              float* corner = gradient.to + start * gradient.depth + column;
              Tile sums = {};
              add_product(sums, grad_rows.data() + start - from, 1, width, given, stride, height);
              const int64_t outputs = std::min<int64_t>(kHeight, size - tile % tiles_of_group * kHeight);
              for_tile(outputs, gradient.depth - column, [&](int64_t i, int v, int at, int count) {
                float* into = corner + i * gradient.depth + at;
                store(into, block ? load(into, count) + sums[i][v] : sums[i][v], count);
              });
            }
          }
        }
      }
    }
  });
}

}  // namespace

// ``strides`` are those of a weight (K, O / K, I / K), in numbers.
extern "C" {

// out = diag(blocks) x + up s + bias: blocks (groups, O / groups, I / groups) and up (1, O, R)
void block_low_rank(int threads, float* out, const float* x, const float* blocks, const int64_t* block_strides,
                    const float* s, const float* up, const int64_t* up_strides, const float* bias, int64_t rows,
                    int64_t inputs, int64_t latents, int64_t outputs, int64_t groups) {
  most_threads = threads;
  combine<false>(out, rows, outputs, {x, blocks, block_strides, inputs, inputs / groups, outputs / groups},
                 {s, up, up_strides, latents, latents, outputs}, bias, nullptr);
}

// The gradients of blocks and up, of the same shapes and contiguous, from that of out.
void block_low_rank_gradient(int threads, float* to_blocks, float* to_up, const float* grad, const float* x,
                             const float* s, int64_t rows, int64_t inputs, int64_t latents, int64_t outputs,
                             int64_t groups) {
  most_threads = threads;
  combine_gradients({{to_blocks, 0, inputs / groups, outputs / groups}, {to_up, inputs, latents, outputs}}, grad, x, s,
                    rows, outputs, inputs, latents);
}

// out = (mix h + bias) sigmoid(gate features + gate_bias): mix (1, O, R) and gate (1, O, G)
void gated_product(int threads, float* out, const float* h, const float* mix, const int64_t* mix_strides,
                   const float* bias, const float* features, const float* gate, const int64_t* gate_strides,
                   const float* gate_bias, int64_t rows, int64_t rank, int64_t width, int64_t outputs) {
  most_threads = threads;
  combine<true>(out, rows, outputs, {h, mix, mix_strides, rank, rank, outputs},
                {features, gate, gate_strides, width, width, outputs}, bias, gate_bias);
}

}  // extern "C"
