// Gates of Transponder and CCL, forward and backward, in one pass over memory each.
//
// Numbers are float or bfloat16; sums and gates are in single precision. N rows, O columns, R rank.

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <optional>
#include <vector>

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
void modulate(Tensor& out, Tensor& u, const Tensor& z, const Tensor& x, const Tensor& down, const Tensor& up,
              const std::optional<Tensor>& scalar) {
  const int64_t columns = z.size(1), inputs = x.size(1), tiles = (columns + kTile - 1) / kTile;
  const int rank = int(up.size(0));
  const T *from = z.const_data_ptr<T>(), *given = x.const_data_ptr<T>(), *downs = down.const_data_ptr<T>();
  T *to = out.mutable_data_ptr<T>(), *us = u.mutable_data_ptr<T>();
  const float *ups = up.const_data_ptr<float>(), *factors = scalar ? scalar->const_data_ptr<float>() : nullptr;
  const bool few = z.size(0) <= kFew;
  std::vector<Panel<R>> panels(few ? 0 : tiles);
  if (!few)
    for_tiles(columns,
              [&](int64_t start, int width) { panels[start / kTile].read(ups + start, columns, rank, width); });
  for_rows(z.size(0), columns, [&](int64_t begin, int64_t end) {
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
void modulate_backward(Tensor& to_z, Tensor& to_hidden, Tensor& to_up, Tensor& total, const Tensor& y,
                       const Tensor& grad, const Tensor& hidden, const Tensor& up, const Tensor& twice) {
  const int64_t columns = y.size(1);
  const int rank = int(up.size(0));
  const T *outputs = y.const_data_ptr<T>(), *grads = grad.const_data_ptr<T>();
  T* to_inputs = to_z.mutable_data_ptr<T>();
  const float *hiddens = hidden.const_data_ptr<float>(), *ups = up.const_data_ptr<float>();
  const float* factors = twice.const_data_ptr<float>();
  float *to_hiddens = to_hidden.mutable_data_ptr<float>(), *totals = total.mutable_data_ptr<float>();
  // every thread sums its rows by itself
  Tensor partial = at::zeros({at::get_num_threads(), rank, columns}, up.options());
  float* partials = partial.mutable_data_ptr<float>();
  for_rows(y.size(0), columns, [&](int64_t begin, int64_t end) {
    Panel<R> panel, sums;
    Hidden<R> phis[kRows];
    alignas(64) float to_logits[kRows][kTile];
    float* mine = partials + at::get_thread_num() * rank * columns;
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
  to_up.add_(partial.sum(0));
}

// out = value * sigmoid(logits + bias)
template <class T>
void gate(Tensor& out, const Tensor& value, const Tensor& logits, const Tensor& bias) {
  const int64_t columns = value.size(1);
  const T *values = value.const_data_ptr<T>(), *given = logits.const_data_ptr<T>(), *biases = bias.const_data_ptr<T>();
  T* to = out.mutable_data_ptr<T>();
  for_rows(value.size(0), columns, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * columns; first < end * columns; first += columns)
      for_vectors(columns, [&](int64_t at, int count) {
        Floats gates = sigmoid(load(given + first + at, count) + load(biases + at, count));
        store(to + first + at, load(values + first + at, count) * gates, count);
      });
  });
}

// Gradients of value and, over ``logits``, of logits; their sums over rows are added to ``to_bias`` (2, O).
template <class T>
void gate_backward(Tensor& to_value, Tensor& logits, Tensor& to_bias, const Tensor& y, const Tensor& grad,
                   const Tensor& bias) {
  const int64_t columns = y.size(1);
  const T *outputs = y.const_data_ptr<T>(), *grads = grad.const_data_ptr<T>(), *biases = bias.const_data_ptr<T>();
  T *to_values = to_value.mutable_data_ptr<T>(), *changed = logits.mutable_data_ptr<T>();
  Tensor partial = at::zeros({at::get_num_threads(), 2, columns}, to_bias.options());
  float* partials = partial.mutable_data_ptr<float>();
  for_rows(y.size(0), columns, [&](int64_t begin, int64_t end) {
    float *of_value = partials + at::get_thread_num() * 2 * columns, *of_logits = of_value + columns;
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
  to_bias.add_(partial.sum(0));
}

void check_rank(const Tensor& up) {
  TORCH_CHECK(up.dim() == 2 && up.size(0) > 0 && up.size(0) <= kMaxRank, "up must be (R, O) with R of at most ",
              kMaxRank, ", got ", up.sizes());
}

void modulate_any(Tensor& out, Tensor& u, const Tensor& z, const Tensor& x, const Tensor& down, const Tensor& up,
                  const std::optional<Tensor>& scalar) {
  const auto shape = checked(z, "z"), given = checked(x, "x");
  check_rank(up);
  check(out, "out", z.scalar_type(), shape);
  check(u, "u", z.scalar_type(), {shape[0], up.size(0)});
  check(x, "x", z.scalar_type(), {shape[0], given[1]});
  check(down, "down", z.scalar_type(), {up.size(0), given[1]});
  check(up, "up", at::kFloat, {up.size(0), shape[1]});
  if (scalar) check(*scalar, "scalar", at::kFloat, {1, up.size(0)});
  if (up.size(0) <= 4) RELINEAR_DISPATCH(z, modulate<4, T>(out, u, z, x, down, up, scalar));
  else if (up.size(0) <= 8) RELINEAR_DISPATCH(z, modulate<8, T>(out, u, z, x, down, up, scalar));
  else RELINEAR_DISPATCH(z, modulate<kMaxRank, T>(out, u, z, x, down, up, scalar));
}

// weight x + bias times its gates, for x (..., I) and channel (O, R): no gradients.
Tensor modulated_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& down,
                        const Tensor& channel, const std::optional<Tensor>& scalar) {
  const auto matrix = [](const Tensor& tensor) {
    return tensor.dim() == 2 && tensor.is_contiguous() ? tensor : tensor.reshape({-1, tensor.size(-1)}).contiguous();
  };
  Tensor z = at::linear(x, weight, bias).contiguous();
  Tensor rows = matrix(z);
  Tensor u = at::empty({rows.size(0), down.size(0)}, z.options());
  modulate_any(rows, u, rows, matrix(x), down.contiguous(), channel.t().contiguous(), scalar);
  return z;
}

void modulate_backward_any(Tensor& to_z, Tensor& to_hidden, Tensor& to_up, Tensor& total, const Tensor& y,
                           const Tensor& grad, const Tensor& hidden, const Tensor& up, const Tensor& twice) {
  const auto shape = checked(y, "y");
  check_rank(up);
  check(up, "up", at::kFloat, {up.size(0), shape[1]});
  check(hidden, "hidden", at::kFloat, {shape[0], up.size(0)});
  check(twice, "twice", at::kFloat, {shape[0], 1});
  check(grad, "grad", y.scalar_type(), shape);
  check(to_z, "to_z", y.scalar_type(), shape);
  check(to_hidden, "to_hidden", at::kFloat, hidden.sizes());
  check(to_up, "to_up", at::kFloat, up.sizes());
  check(total, "total", at::kFloat, twice.sizes());
  if (up.size(0) <= 4)
    RELINEAR_DISPATCH(y, modulate_backward<4, T>(to_z, to_hidden, to_up, total, y, grad, hidden, up, twice));
  else if (up.size(0) <= 8)
    RELINEAR_DISPATCH(y, modulate_backward<8, T>(to_z, to_hidden, to_up, total, y, grad, hidden, up, twice));
  else
    RELINEAR_DISPATCH(y, modulate_backward<kMaxRank, T>(to_z, to_hidden, to_up, total, y, grad, hidden, up, twice));
}

void gate_any(Tensor& out, const Tensor& value, const Tensor& logits, const Tensor& bias) {
  const auto shape = checked(value, "value");
  check(out, "out", value.scalar_type(), shape);
  check(logits, "logits", value.scalar_type(), shape);
  check(bias, "bias", value.scalar_type(), {shape[1]});
  RELINEAR_DISPATCH(value, gate<T>(out, value, logits, bias));
}

void gate_backward_any(Tensor& to_value, Tensor& logits, Tensor& to_bias, const Tensor& y, const Tensor& grad,
                       const Tensor& bias) {
  const auto shape = checked(y, "y");
  check(grad, "grad", y.scalar_type(), shape);
  check(to_value, "to_value", y.scalar_type(), shape);
  check(logits, "logits", y.scalar_type(), shape);
  check(bias, "bias", y.scalar_type(), {shape[1]});
  check(to_bias, "to_bias", at::kFloat, {2, shape[1]});
  RELINEAR_DISPATCH(y, gate_backward<T>(to_value, logits, to_bias, y, grad, bias));
}

}  // namespace

TORCH_LIBRARY(relinear_cpu, library) {
  library.def(
      "modulate(Tensor(a!) out, Tensor(b!) u, Tensor z, Tensor x, Tensor down, Tensor up, Tensor? scalar) -> ()",
      modulate_any);
  library.def(
      "modulated_linear(Tensor x, Tensor weight, Tensor? bias, Tensor down, Tensor channel, Tensor? scalar) -> Tensor",
      modulated_linear);
  library.def(
      "modulate_backward(Tensor(a!) to_z, Tensor(b!) to_hidden, Tensor(c!) to_up, Tensor(d!) total, Tensor y, "
      "Tensor grad, Tensor hidden, Tensor up, Tensor twice) -> ()",
      modulate_backward_any);
  library.def("gate(Tensor(a!) out, Tensor value, Tensor logits, Tensor bias) -> ()", gate_any);
  library.def(
      "gate_backward(Tensor(a!) to_value, Tensor(b!) logits, Tensor(c!) to_bias, Tensor y, Tensor grad, Tensor bias) "
      "-> ()",
      gate_backward_any);
}
