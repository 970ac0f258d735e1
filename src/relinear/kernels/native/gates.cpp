// Gates of Transponder and CCL, forward and backward, in one pass over memory each.
//
// Numbers are float or bfloat16; sums and gates are in single precision. N rows, O columns, R rank.

#include "vectors.h"

namespace {

using namespace relinear;

// columns taken at a time, so that a tile of every row of B stays in the first cache
constexpr int kTile = 512;
// of B: its rows are unrolled
constexpr int kMaxRank = 16;
// rows that a line is asked for ahead of its use
constexpr int kAhead = 2;
// rows taken at a time
constexpr int kRows = 16;
// rows that are not worth a copy of B
constexpr int kFew = 4;

// A line that is needed kAhead rows later: tiles are too narrow for the processor to see what comes next.
template <class T>
inline void prefetch(const T* from) {
  __builtin_prefetch(from, 1);
}

// A tile of B (R, O), padded with rows and columns of 0.
template <int R>
struct Panel {
  alignas(64) float values[R][kTile];

  void read(const float* up, int64_t columns, int rank, int width) {
    std::memset(values, 0, sizeof(values));
    for (int k = 0; k < rank; ++k) std::memcpy(values[k], up + k * columns, sizeof(float) * width);
  }
};

// phi of one token, padded with 0.
template <int R>
struct Hidden {
  alignas(64) float values[R] = {};

  Hidden() = default;
  Hidden(const float* from, int rank) { std::copy(from, from + rank, values); }

  Floats logits(const Panel<R>& panel, int64_t at) const {
    Floats total = {};
    for (int k = 0; k < R; ++k) total += values[k] * load(panel.values[k] + at, kLanes);
    return total;
  }
};

// The same of B (R, O) itself, of which the first ``rank`` rows are: for a few rows it is not worth copying.
template <int R>
Floats logits_of(const Hidden<R>& phi, const float* up, int64_t columns, int rank, int64_t at, int count) {
  Floats total = {};
  for (int k = 0; k < rank; ++k) total += phi.values[k] * load(up + k * columns + at, count);
  return total;
}

template <class Body>
void for_tiles(int64_t columns, const Body& body) {
  for (int64_t start = 0; start < columns; start += kTile)
    body(start, int(std::min<int64_t>(kTile, columns - start)));
}

// Sums of every thread's rows, by itself.
struct Partials {
  int64_t size;
  std::vector<float> sums;

  explicit Partials(int64_t size) : size(size), sums(most_threads * size) {}
  float* own() { return sums.data() + thread_number() * size; }
  void add_to(float* total) const {
    for (auto from = sums.begin(); from != sums.end(); from += size)
      for (int64_t i = 0; i < size; ++i) total[i] += from[i];
  }
};

// tokens whose sums fit into the registers together
template <int R>
constexpr int rows_at_once = kMaxRank / R;

// u = A x of ``count`` tokens, at most rows_at_once, into ``to`` (count, rank).
template <int R, class T>
void narrow_product(T* to, const T* x, const T* down, int64_t inputs, int rank, int count) {
  Floats totals[rows_at_once<R>][R] = {};
  for_vectors(inputs, [&](int64_t at, int lanes) {
    Floats rows[rows_at_once<R>] = {};
    for (int i = 0; i < count; ++i) rows[i] = load(x + i * inputs + at, lanes);
    for (int k = 0; k < R; ++k) {
      const Floats weights = load(down + std::min(k, rank - 1) * inputs + at, lanes);
      for (int i = 0; i < rows_at_once<R>; ++i) totals[i][k] += weights * rows[i];
    }
  });
  for (int i = 0; i < count; ++i)
    for (int k = 0; k < rank; ++k) to[i * rank + k] = T(sum(totals[i][k]));
}

// out = z times the gates of u = A x, which is written too: phi = sigmoid(u), the channel gate 2 sigmoid(B phi), the
// scalar gate 2 sigmoid(b phi), if there is one.
template <int R, class T>
void modulate(T* to, T* us, const T* from, const T* given, const T* downs, const float* ups, const float* factors,
              int64_t rows, int64_t inputs, int64_t columns, int rank) {
  const bool few = rows <= kFew;
  std::vector<Panel<R>> panels(few ? 0 : divided_up(columns, kTile));
  if (!few)
    for_tiles(columns,
              [&](int64_t start, int width) { panels[start / kTile].read(ups + start, columns, rank, width); });
  for_rows(rows, columns, [&](int64_t begin, int64_t end) {
    Hidden<R> phis[kRows];
    float twice[kRows];
    for (int64_t block = begin; block < end; block += kRows) {
      const int height = int(std::min<int64_t>(kRows, end - block));
      for (int i = 0; i < height; i += rows_at_once<R>)
        narrow_product<R>(us + (block + i) * rank, given + (block + i) * inputs, downs, inputs, rank,
                          std::min(rows_at_once<R>, height - i));
      for (int i = 0; i < height; ++i) {
        float logit = 0;
        for (int k = 0; k < rank; ++k) {
          phis[i].values[k] = sigmoid(Floats{} + float(us[(block + i) * rank + k]))[0];
          if (factors) logit += factors[k] * phis[i].values[k];
        }
        twice[i] = factors ? 4.f * sigmoid(Floats{} + logit)[0] : 2.f;
        if (few)
          for_vectors(columns, [&](int64_t at, int count) {
            const int64_t place = (block + i) * columns + at;
            const Floats gates = twice[i] * sigmoid(logits_of(phis[i], ups, columns, rank, at, count));
            store(to + place, load(from + place, count) * gates, count);
          });
      }
      if (few) continue;
      for_tiles(columns, [&](int64_t start, int width) {
        const Panel<R>& panel = panels[start / kTile];
        for (int i = 0; i < height; ++i) {
          const int64_t first = (block + i) * columns + start;
          for_vectors(width, [&](int64_t at, int count) {
            prefetch(from + first + at + kAhead * columns);
            Floats gates = twice[i] * sigmoid(phis[i].logits(panel, at));
            store(to + first + at, load(from + first + at, count) * gates, count);
          });
        }
      });
    }
  });
}

// Of y = z times its gates: to_z and the gradient of phi through the channel gate, ``to_hidden``; ``total`` (N, 1) is
// the sum of grad y, and the gradient of B is added to ``to_up``. ``twice`` (N, 1) is twice the scalar gate.
template <int R, class T>
void modulate_backward(T* to_inputs, float* to_hiddens, float* to_up, float* totals, const T* outputs, const T* grads,
                       const float* hiddens, const float* ups, const float* factors, int64_t rows, int64_t columns,
                       int rank) {
  Partials partials(rank * columns);
  for_rows(rows, columns, [&](int64_t begin, int64_t end) {
    Panel<R> panel, sums;
    Hidden<R> phis[kRows];
    alignas(64) float to_logits[kRows][kTile];
    float* mine = partials.own();
    for_tiles(columns, [&](int64_t start, int width) {
      panel.read(ups + start, columns, rank, width);
      std::memset(sums.values, 0, sizeof(sums.values));
      for (int64_t block = begin; block < end; block += kRows) {
        const int height = int(std::min<int64_t>(kRows, end - block));
        for (int i = 0; i < height; ++i) {
          const int64_t row = block + i, first = row * columns + start;
          const Hidden<R>& phi = phis[i] = Hidden<R>(hiddens + row * rank, rank);
          Floats products = {}, changes[R] = {};
          for_vectors(width, [&](int64_t at, int count) {
            prefetch(grads + first + at + kAhead * columns);
            prefetch(outputs + first + at + kAhead * columns);
            Floats gates = sigmoid(phi.logits(panel, at));
            Floats upstream = load(grads + first + at, count);
            Floats product = upstream * load(outputs + first + at, count);
            Floats change = product * (1.f - gates);
            products += product;
            for (int k = 0; k < R; ++k) changes[k] += change * load(panel.values[k] + at, kLanes);
            store(to_logits[i] + at, change, kLanes);
            store(to_inputs + first + at, upstream * (gates * factors[row]), count);
          });
          totals[row] = (start ? totals[row] : 0) + sum(products);
          for (int k = 0; k < rank; ++k) {
            float& change = to_hiddens[row * rank + k];
            change = (start ? change : 0) + sum(changes[k]);
          }
        }
        for_vectors(width, [&](int64_t at, int count) {
          Floats totals[R];
          for (int k = 0; k < R; ++k) totals[k] = load(sums.values[k] + at, kLanes);
          for (int i = 0; i < height; ++i) {
            const Floats change = load(to_logits[i] + at, kLanes);
            for (int k = 0; k < R; ++k) totals[k] += phis[i].values[k] * change;
          }
          for (int k = 0; k < R; ++k) store(sums.values[k] + at, totals[k], kLanes);
        });
      }
      for (int k = 0; k < rank; ++k)
        for (int at = 0; at < width; ++at) mine[k * columns + start + at] += sums.values[k][at];
    });
  });
  partials.add_to(to_up);
}

// out = value * sigmoid(logits + bias)
template <class T>
void gate(T* to, const T* values, const T* given, const T* biases, int64_t rows, int64_t columns) {
  for_rows(rows, columns, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * columns; first < end * columns; first += columns)
      for_vectors(columns, [&](int64_t at, int count) {
        Floats gates = sigmoid(load(given + first + at, count) + load(biases + at, count));
        store(to + first + at, load(values + first + at, count) * gates, count);
      });
  });
}

// rows and vectors of a tile of a product, which fills the registers with a row of weights and a factor
constexpr int kTileRows = 6;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileVectors = 4;
#else
constexpr int kTileVectors = 2;
#endif
constexpr int kTileWidth = kTileVectors * kLanes;
// rows that are multiplied by all weights before the next, so that they stay in the second cache
constexpr int kBlock = 8 * kTileRows;

struct alignas(64) TileRow {
  float values[kTileWidth];
};

struct Tile {
  Floats sums[kTileRows][kTileVectors];

  // the bias in every row, plus rows times weights (depth, kTileWidth)
  Tile(const float* const (&rows)[kTileRows], const TileRow* weights, int64_t depth, const TileRow& bias) {
    for (int i = 0; i < kTileRows; ++i)
      for (int v = 0; v < kTileVectors; ++v) sums[i][v] = load(bias.values + v * kLanes, kLanes);
    for (int64_t k = 0; k < depth; ++k) {
      Floats row[kTileVectors];
      for (int v = 0; v < kTileVectors; ++v) row[v] = load(weights[k].values + v * kLanes, kLanes);
      for (int i = 0; i < kTileRows; ++i)
        for (int v = 0; v < kTileVectors; ++v) sums[i][v] += rows[i][k] * row[v];
    }
  }
};

// out (N, O) = (mix h + bias) * sigmoid(weight features + offset), for h (N, R) and features (N, G). A library's products
// over few inputs spend their time on passes over their results; here both stay in registers until they are combined.
void gated_product(float* out, const float* h, const float* mix, const float* bias, const float* features,
                   const float* weight, const float* offset, int64_t rows, int64_t columns, int64_t rank, int64_t width) {
  const int64_t tiles = divided_up(columns, kTileWidth), panel = 2 + rank + width;
  std::vector<TileRow> packed(tiles * panel);  // of each tile: bias, offset, mix and weight, padded with 0
  parallel_for(tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      TileRow* to = packed.data() + tile * panel;
      const int64_t first = tile * kTileWidth, count = std::min<int64_t>(kTileWidth, columns - first);
      if (bias) std::copy(bias + first, bias + first + count, to[0].values);
      std::copy(offset + first, offset + first + count, to[1].values);
      for (int64_t o = 0; o < count; ++o) {
        for (int64_t k = 0; k < rank; ++k) to[2 + k].values[o] = mix[(first + o) * rank + k];
        for (int64_t k = 0; k < width; ++k) to[2 + rank + k].values[o] = weight[(first + o) * width + k];
      }
    }
  });
  parallel_for(divided_up(rows, kTileRows), 1, [&](int64_t begin, int64_t end) {
    const int64_t last = std::min(end * kTileRows, rows);
    for (int64_t block = begin * kTileRows; block < last; block += kBlock)
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const TileRow* weights = packed.data() + tile * panel;
        const int64_t first = tile * kTileWidth, count = std::min<int64_t>(kTileWidth, columns - first);
        for (int64_t row = block; row < std::min(block + kBlock, last); row += kTileRows) {
          const float *of_h[kTileRows], *of_features[kTileRows];
          for (int i = 0; i < kTileRows; ++i) {  // a tile that reaches over the end repeats the last row
            of_h[i] = h + std::min(row + i, last - 1) * rank;
            of_features[i] = features + std::min(row + i, last - 1) * width;
          }
          const Tile values(of_h, weights + 2, rank, weights[0]);
          const Tile logits(of_features, weights + 2 + rank, width, weights[1]);
          for (int i = 0; i < std::min<int64_t>(kTileRows, last - row); ++i)
            for_vectors(count, [&](int64_t at, int lanes) {
              const int v = int(at / kLanes);
              store(out + (row + i) * columns + first + at, values.sums[i][v] * sigmoid(logits.sums[i][v]), lanes);
            });
        }
      }
  });
}

// Gradients of value and, over ``logits``, of logits; their sums over rows are added to ``to_bias`` (2, O).
template <class T>
void gate_backward(T* to_values, T* changed, float* to_bias, const T* outputs, const T* grads, const T* biases,
                   int64_t rows, int64_t columns) {
  Partials partials(2 * columns);
  for_rows(rows, columns, [&](int64_t begin, int64_t end) {
    float *of_value = partials.own(), *of_logits = of_value + columns;
    for (int64_t first = begin * columns; first < end * columns; first += columns)
      for_vectors(columns, [&](int64_t at, int count) {
        Floats gates = sigmoid(load(changed + first + at, count) + load(biases + at, count));
        Floats upstream = load(grads + first + at, count);
        Floats change = upstream * gates;
        Floats to_logits = upstream * load(outputs + first + at, count) * (1.f - gates);
        store(to_values + first + at, change, count);
        store(changed + first + at, to_logits, count);
        store(of_value + at, load(of_value + at, count) + change, count);
        store(of_logits + at, load(of_logits + at, count) + to_logits, count);
      });
  });
  partials.add_to(to_bias);
}

// body of the ranks that are unrolled, from ``rank`` on
template <class Body>
void for_rank(int64_t rank, const Body& body) {
  if (rank <= 4) body(std::integral_constant<int, 4>());
  else if (rank <= 8) body(std::integral_constant<int, 8>());
  else body(std::integral_constant<int, kMaxRank>());
}

}  // namespace

// ``half`` is whether numbers (void) are bfloat16, ``threads`` how many may run.
extern "C" {

void modulate(bool half, int threads, void* out, void* u, const void* z, const void* x, const void* down, const float* up,
              const float* scalar, int64_t rows, int64_t inputs, int64_t columns, int64_t rank) {
  most_threads = threads;
  for_rank(rank, [&](auto most) {
    RELINEAR_DISPATCH(half, modulate<most>((T*)out, (T*)u, (const T*)z, (const T*)x, (const T*)down, up, scalar, rows,
                                           inputs, columns, int(rank)));
  });
}

void modulate_backward(bool half, int threads, void* to_z, float* to_hidden, float* to_up, float* total, const void* y,
                       const void* grad, const float* hidden, const float* up, const float* twice, int64_t rows,
                       int64_t columns, int64_t rank) {
  most_threads = threads;
  for_rank(rank, [&](auto most) {
    RELINEAR_DISPATCH(half, modulate_backward<most>((T*)to_z, to_hidden, to_up, total, (const T*)y, (const T*)grad,
                                                    hidden, up, twice, rows, columns, int(rank)));
  });
}

void gate(bool half, int threads, void* out, const void* value, const void* logits, const void* bias, int64_t rows,
          int64_t columns) {
  most_threads = threads;
  RELINEAR_DISPATCH(half, gate((T*)out, (const T*)value, (const T*)logits, (const T*)bias, rows, columns));
}

void gated_product(int threads, float* out, const float* h, const float* mix, const float* bias, const float* features,
                   const float* weight, const float* offset, int64_t rows, int64_t columns, int64_t rank,
                   int64_t width) {
  most_threads = threads;
  gated_product(out, h, mix, bias, features, weight, offset, rows, columns, rank, width);
}

void gate_backward(bool half, int threads, void* to_value, void* logits, float* to_bias, const void* y, const void* grad,
                   const void* bias, int64_t rows, int64_t columns) {
  most_threads = threads;
  RELINEAR_DISPATCH(half, gate_backward((T*)to_value, (T*)logits, to_bias, (const T*)y, (const T*)grad, (const T*)bias,
                                        rows, columns));
}

}  // extern "C"
