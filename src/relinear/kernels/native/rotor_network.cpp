// A network of rotor layers, a few tokens at a time: what lies between its input and its output never leaves the cache.
//
// Tokens lie in the lanes of vectors: a coordinate is one vector, of as many tokens as it has lanes, and every product
// with a small matrix multiplies vectors by numbers. So no size is too odd for the lanes, sums over coordinates need no
// shuffles, and a token's numbers are the same whoever its neighbours are. The backward pass computes a tile again and
// keeps all of it while gradients run back through it. Arithmetic is in single precision.
//
// Factors act on coordinates of the spin representation. Where x and y are in those of blades, so is what stands between
// the layers: a state is turned into spin coordinates once for all branches, and each branch back.
//
// V window of a layer, M coordinates that share a pair of factors (L, L) and (R, R), o / i windows of its output /
// input, W branches of a hidden step. Matrices of vectors have strides in vectors.

#include <cmath>
#include <memory>
#include <utility>

#include "activations.h"
#include "spin.h"

namespace {

using namespace relinear;

constexpr float kEpsilon = 1e-5f;  // that of torch's layer norm

// Rows and columns of a product that stay in registers at a time.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRows = 8;
#else
constexpr int kRows = 4;
#endif
constexpr int kColumns = 2;
// what sizes of factors are multiples of
constexpr int64_t kSmallest = 8;
// A gradient's block of kLanes numbers: each is summed over lanes, into a lane of one vector.
constexpr int kDown = kLanes / 4, kAcross = 4;
// vectors from which on those at a power of two's distance fall into too few sets of the first cache
constexpr int64_t kAliasing = 512;
// rows of vectors that are read against all others before the next: they stay in the first cache
constexpr int64_t kPanel = 8;

// Memory that nobody has written yet.
struct Vectors {
  std::unique_ptr<Floats[]> own;
  explicit Vectors(int64_t count) : own(new Floats[std::max<int64_t>(1, count)]) {}
  Floats* get() const { return own.get(); }
};

template <int half, int... lane>
inline Floats interleaved(Floats a, Floats b, std::integer_sequence<int, lane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (lane % 2 * kLanes + (half * kLanes + lane) / 2)...);
#else
  return __builtin_shuffle(a, b, Ints{(lane % 2 * kLanes + (half * kLanes + lane) / 2)...});
#endif
}

// The first or the second halves of a and b, lane by lane in turn.
template <int half>
inline Floats zip(Floats a, Floats b) {
  return interleaved<half>(a, b, std::make_integer_sequence<int, kLanes>());
}

inline void transpose(Floats (&rows)[kLanes]) {
  for (int step = 1; step < kLanes; step *= 2) {
    Floats next[kLanes];
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = zip<0>(rows[i], rows[i + kLanes / 2]);
      next[2 * i + 1] = zip<1>(rows[i], rows[i + kLanes / 2]);
    }
    for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
  }
}

// The sum over the lanes of each vector, into the lane of its place.
inline Floats sums_of(Floats (&values)[kLanes]) {
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) values[i] = zip<0>(values[i], values[i + half]) + zip<1>(values[i], values[i + half]);
  return values[0];
}

template <class T>
inline __attribute__((always_inline)) void take_block(Floats* to, const T* from, int64_t width, int count, int numbers) {
  Floats rows[kLanes];
  for (int token = 0; token < kLanes; ++token)
    rows[token] = token < count ? load(from + token * width, numbers) : Floats{};
  transpose(rows);
  for (int i = 0; i < numbers; ++i) to[i] = rows[i];
}

template <class T>
inline __attribute__((always_inline)) void give_block(T* to, const Floats* from, int64_t width, int count, int numbers) {
  Floats rows[kLanes];
  for (int i = 0; i < kLanes; ++i) rows[i] = i < numbers ? from[i] : Floats{};
  transpose(rows);
  for (int token = 0; token < count; ++token) store(to + token * width, rows[token], numbers);
}

// ``count`` tokens (count, width), one lane each; the other lanes are 0.
template <class T>
void take(Floats* to, const T* from, int64_t width, int count) {
  int64_t at = 0;
  for (; at + kLanes <= width; at += kLanes) take_block(to + at, from + at, width, count, kLanes);
  if (at < width) take_block(to + at, from + at, width, count, int(width - at));
}

template <class T>
void give(T* to, const Floats* from, int64_t width, int count) {
  int64_t at = 0;
  for (; at + kLanes <= width; at += kLanes) give_block(to + at, from + at, width, count, kLanes);
  if (at < width) give_block(to + at, from + at, width, count, int(width - at));
}

struct Factor {
  const float* data;
  int64_t rows, depth, row, step;  // strides of a row and of a column
};

struct Place {
  Floats* data;
  int64_t row, column;  // strides
};

template <int columns>
inline __attribute__((always_inline)) void multiply_columns(const Factor& w, const Floats* x, int64_t row,
                                                            int64_t column, const Place& y, bool add) {
  for (int64_t p = 0; p < w.rows; p += kRows) {
    Floats sums[kRows][columns];
    Floats* to = y.data + p * y.row;
    for (int i = 0; i < kRows; ++i)
      for (int q = 0; q < columns; ++q) sums[i][q] = add ? to[i * y.row + q * y.column] : Floats{};
    const float* factors = w.data + p * w.row;
    const Floats* from = x;
    for (int64_t s = 0; s < w.depth; ++s, factors += w.step, from += row) {
      Floats inputs[columns];
      for (int q = 0; q < columns; ++q) inputs[q] = from[q * column];
      for (int i = 0; i < kRows; ++i)
        for (int q = 0; q < columns; ++q) sums[i][q] += factors[i * w.row] * inputs[q];
    }
    for (int i = 0; i < kRows; ++i)
      for (int q = 0; q < columns; ++q) to[i * y.row + q * y.column] = sums[i][q];
  }
}

// y (+)= w x, of x (w.depth, count)
void multiply(const Factor& w, const Place& x, int64_t count, const Place& y, bool add, Floats* packed) {
  const bool scattered = x.row > 1 && x.row * w.depth > kAliasing;
  int64_t q = 0;
  for (; q + kColumns <= count; q += kColumns) {
    const Floats* from = x.data + q * x.column;
    const Place to = {y.data + q * y.column, y.row, y.column};
    if (!scattered) {
      multiply_columns<kColumns>(w, from, x.row, x.column, to, add);
      continue;
    }
    for (int64_t s = 0; s < w.depth; ++s)
      for (int i = 0; i < kColumns; ++i) packed[s * kColumns + i] = from[s * x.row + i * x.column];
    multiply_columns<kColumns>(w, packed, kColumns, 1, to, add);
  }
  for (; q < count; ++q)
    multiply_columns<1>(w, x.data + q * x.column, x.row, x.column, {y.data + q * y.column, y.row, y.column}, add);
}

// A layer of sandwiches: y_o = sum_i A_oi X_i B_oi^T, for each of the parts of a window. As ``calls.Network`` hands it
// over.
struct Layer {
  int64_t outputs, inputs, own, left_size, right_size, window, parts;
  const float *left, *right;
  Spin spin;  // without tables where coordinates are its own

  int64_t shared() const { return window / parts; }
  int64_t left_columns() const { return shared() / left_size; }
  int64_t right_rows() const { return shared() / right_size; }
  // which pair of factors
  int64_t pair(int64_t o, int64_t i, int64_t part) const { return (o * inputs + i) * own + (own > 1 ? part : 0); }
  int64_t pairs() const { return outputs * inputs * own; }
  int64_t left_numbers() const { return pairs() * left_size * left_size; }
  int64_t right_numbers() const { return pairs() * right_size * right_size; }
  int64_t numbers() const { return left_numbers() + right_numbers(); }
  Factor a(int64_t at, bool transposed) const { return factor(left, at, left_size, transposed); }
  Factor b(int64_t at, bool transposed) const { return factor(right, at, right_size, transposed); }

  static Factor factor(const float* data, int64_t at, int64_t size, bool transposed) {
    return {data + at * size * size, size, size, transposed ? 1 : size, transposed ? size : 1};
  }

  // X_i B_oi^T
  void run_right(Floats* half, Floats* x, int64_t o, int64_t i, Floats* packed) const {
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t start = part * shared();
      multiply(b(pair(o, i, part), false), {x + i * window + start, 1, right_size}, right_rows(),
               {half + start, 1, right_size}, false, packed);
    }
  }

  // y_o += A_oi times that, from the second input window on
  void run_left(Floats* y, Floats* half, int64_t o, int64_t i, Floats* packed) const {
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t start = part * shared(), columns = left_columns();
      multiply(a(pair(o, i, part), false), {half + start, columns, 1}, columns, {y + start, columns, 1}, i > 0, packed);
    }
  }

  // One output window; the halves of its input windows lie ``stride`` apart, or all in one place.
  void run(Floats* y, Floats* x, int64_t o, Floats* halves, int64_t stride, Floats* packed) const {
    for (int64_t i = 0; i < inputs; ++i) {
      run_right(halves + i * stride, x, o, i, packed);
      run_left(y, halves + i * stride, o, i, packed);
    }
  }
};

// Sums of products, as gradients of factors are: blocks of kDown x kAcross numbers, a vector each.
// sums[a, b] += sum over q < count and over lanes of u[a, q] v[b, q], for a, b < size.
void add_products(Floats* sums, const Place& u, const Place& v, int64_t size, int64_t count) {
  const int64_t across = size / kAcross;
  for (int64_t panel = 0; panel < size; panel += kPanel)
    for (int64_t b = 0; b < size; b += kAcross)
      for (int64_t a = panel; a < std::min(size, panel + kPanel); a += kDown) {
        Floats block[kLanes] = {};
        const Floats *first = u.data + a * u.row, *second = v.data + b * v.row;
        for (int64_t q = 0; q < count; ++q, first += u.column, second += v.column) {
          Floats others[kAcross];
          for (int j = 0; j < kAcross; ++j) others[j] = second[j * v.row];
          for (int i = 0; i < kDown; ++i) {
            const Floats one = first[i * u.row];
            for (int j = 0; j < kAcross; ++j) block[i * kAcross + j] += one * others[j];
          }
        }
        sums[a / kDown * across + b / kAcross] += sums_of(block);
      }
}

// Blocks of ``add_products`` as matrices (count, size, size).
void unblock(float* to, const Floats* sums, int64_t count, int64_t size) {
  const int64_t across = size / kAcross, down = size / kDown;
  for (int64_t matrix = 0; matrix < count; ++matrix)
    for (int64_t a = 0; a < size; ++a)
      for (int64_t b = 0; b < size; ++b)
        to[(matrix * size + a) * size + b] =
            sums[(matrix * down + a / kDown) * across + b / kAcross][a % kDown * kAcross + b % kAcross];
}

struct Moments {
  Floats mean = {}, scale = Floats{} + 1.f;
};

Moments moments(const Floats* values, int64_t size, bool normalize) {
  Moments found;
  if (!normalize) return found;
  constexpr int kSums = 4;  // windows are multiples of the factors' sizes
  Floats totals[kSums] = {}, squares[kSums] = {};
  for (int64_t v = 0; v < size; v += kSums)
    for (int i = 0; i < kSums; ++i) totals[i] += values[v + i];
  found.mean = ((totals[0] + totals[1]) + (totals[2] + totals[3])) / float(size);
  for (int64_t v = 0; v < size; v += kSums)
    for (int i = 0; i < kSums; ++i) squares[i] += (values[v + i] - found.mean) * (values[v + i] - found.mean);
  const Floats variance = ((squares[0] + squares[1]) + (squares[2] + squares[3])) / float(size);
  for (int lane = 0; lane < kLanes; ++lane) found.scale[lane] = 1 / std::sqrt(variance[lane] + kEpsilon);
  return found;
}

// What follows the sandwiches of a step: y = sum_w mix_w activation_w(norm(z_w)[order_w]).
struct Step {
  int64_t branches, window;
  const int32_t* order;  // or nothing
  const float *slopes, *mix;
  bool normalize;
  Activation activation;

  // to y, or added to it from the second branch on
  void run(Floats* y, const Floats* z, int64_t w, Moments& of) const {
    of = moments(z, window, normalize);
    with_activation(activation, slopes[w], mix[w], [&](auto active) { run(y, z, w, of, active); });
  }

  // The gradient of z in its place, from that of y; adds to those of the slope and of the factor in the mixture.
  void run_backward(Floats* z, const Floats* grad, int64_t w, const Moments& of, Floats& to_slope, Floats& to_mix) const {
    with_activation(activation, slopes[w], mix[w], [&](auto active) {
      run_backward(z, grad, w, of, active);
      active.finish(to_slope, to_mix);
    });
  }

 private:
  const int32_t* places_of(int64_t w) const { return order ? order + w * window : nullptr; }

  template <class Active>
  void run(Floats* y, const Floats* z, int64_t w, const Moments& of, const Active& active) const {
    const int32_t* places = places_of(w);
    for (int64_t v = 0; v < window; ++v) {
      const Floats result = active.value((z[places ? places[v] : v] - of.mean) * of.scale);
      y[v] = w ? y[v] + result : result;
    }
  }

  template <class Active>
  void run_backward(Floats* z, const Floats* grad, int64_t w, const Moments& of, Active& active) const {
    const int32_t* places = places_of(w);
    Floats mean = {}, along = {};
    for (int64_t v = 0; v < window; ++v) {
      const Floats h = (z[places ? places[v] : v] - of.mean) * of.scale, d = grad[v] * active.derivative(h);
      active.add(grad[v], h);
      mean += d;
      along += d * h;
    }
    mean = normalize ? mean / float(window) : Floats{};
    along = normalize ? along / float(window) : Floats{};
    for (int64_t v = 0; v < window; ++v) {
      Floats& value = z[places ? places[v] : v];
      const Floats h = (value - of.mean) * of.scale;
      value = of.scale * (grad[v] * active.derivative(h) - mean - h * along);
    }
  }
};

// What a network is, as ``calls.Network`` hands it over.
struct Description {
  int64_t in_features, out_features;
  const int32_t *reads, *writes;  // the coordinate at every place of the input's windows, and two places of every output
                                  // in its windows; or nothing, where they are the same
  int64_t residual;
  int64_t after_entry;  // whether the first step follows the entry
  int64_t blades;       // whether all but what the layers read and write is in coordinates of blades
  const float* bias;
  int64_t normalize;
  Activation activation;
  const int32_t* orders;  // or nothing
  const float *slopes, *mix;
  int64_t count;  // of layers
};

struct Network : Description {
  std::vector<Layer> layers;  // entry, hidden ones, exit
  std::vector<Step> steps;    // what follows each, but the exit
  int64_t inner;

  Network(const Description& given, const Layer* of) : Description(given), layers(of, of + count) {
    inner = entry().outputs * entry().window;
    int64_t first = 0;
    for (int64_t at = !after_entry; at + 1 < count; ++at) {
      const int64_t width = at ? of[at].outputs : 1;
      steps.push_back({width, inner, orders ? orders + first * inner : nullptr, slopes + first, mix + first,
                       bool(normalize), activation});
      first += width;
    }
  }

  const Layer& entry() const { return layers.front(); }
  const Layer& exit() const { return layers.back(); }
  int64_t depth() const { return int64_t(layers.size()) - 2; }
  const Step& hidden(int64_t k) const { return steps[k + after_entry]; }

  int64_t largest_window() const {
    int64_t most = 0;
    for (const Layer& layer : layers) most = std::max(most, layer.window);
    return most;
  }
  int64_t numbers_of_factors() const {
    int64_t numbers = 0;
    for (const Layer& layer : layers) numbers += layer.numbers();
    return numbers;
  }
  // of the first ``count`` steps
  int64_t branches_of(int64_t count) const {
    int64_t branches = 0;
    for (int64_t at = 0; at < count; ++at) branches += steps[at].branches;
    return branches;
  }
  int64_t branches() const { return branches_of(steps.size()); }
};

// The memory of one tile. Where it is kept for the backward pass, every layer has its own.
struct Tile {
  const Network& net;
  const bool keep;
  int64_t branch_stride;
  Vectors memory;
  Floats *x, *windows, *states, *branches, *halves, *out, *y, *packed;
  Floats *of_blades, *of_spins;  // a state before it is turned, and what a layer leaves
  std::vector<Moments> of;

  Tile(const Network& net, bool keep)
      : net(net), keep(keep), branch_stride(keep ? net.inner : 0), memory(size()) {
    Floats* at = memory.get();
    const auto part = [&](Floats*& name, int64_t count) { name = at, at += count; };
    for_parts(part);
    of.resize(first_branch(net.depth()));
  }

  template <class Body>
  void for_parts(const Body& body) {
    const Layer &entry = net.entry(), &exit = net.exit();
    const int64_t all = keep ? first_branch(net.depth()) : 1;
    body(x, net.in_features);
    body(windows, entry.inputs * entry.window);
    body(states, (keep ? net.depth() + 1 : 2) * net.inner);
    body(branches, all * net.inner);
    body(halves, keep ? entry_halves() + (all - net.after_entry) * net.inner : net.largest_window());
    body(out, exit.outputs * exit.window);
    body(y, net.out_features);
    body(packed, kColumns * net.largest_window());
    body(of_blades, net.blades ? std::max(net.inner, entry.inputs * entry.window) : 0);
    body(of_spins, net.blades ? net.largest_window() : 0);
  }

  int64_t size() {
    int64_t total = 0;
    for_parts([&](Floats*&, int64_t count) { total += count; });
    return total;
  }

  int64_t entry_halves() const { return net.entry().outputs * net.entry().inputs * net.entry().window; }

  // number of the first branch of a hidden step
  int64_t first_branch(int64_t k) const { return net.branches_of(net.after_entry + k); }

  Floats* state(int64_t k) const { return states + (keep ? k : k % 2) * net.inner; }
  Floats* branch(int64_t number) const { return branches + number * branch_stride; }
  Floats* half_of_entry(int64_t o) const { return halves + (keep ? o * net.entry().inputs * net.entry().window : 0); }
  Floats* half_of_branch(int64_t number) const {
    return halves + (keep ? entry_halves() + (number - net.after_entry) * net.inner : 0);
  }

  // From ``x``, to the last state.
  void run() {
    const Layer& entry = net.entry();
    Floats* given = x;
    if (net.reads) {
      given = net.blades ? of_blades : windows;
      for (int64_t at = 0; at < entry.inputs * entry.window; ++at) given[at] = x[net.reads[at]];
    }
    if (net.blades) {
      enter(entry, windows, given);
      given = windows;
    }
    Floats *next = coming(0), *first = net.after_entry ? branch(0) : next;
    for (int64_t o = 0; o < entry.outputs; ++o)
      apply(entry, first + o * entry.window, given, o, half_of_entry(o), keep ? entry.window : 0);
    if (net.after_entry) net.steps[0].run(next, first, 0, of[0]);
    if (net.residual && net.in_features == net.inner)
      for (int64_t v = 0; v < net.inner; ++v) next[v] += x[v];
    if (net.blades) enter(net.layers[1], state(0), next);
    for (int64_t k = 0; k < net.depth(); ++k) {
      const int64_t number = first_branch(k);
      next = coming(k + 1);
      for (int64_t w = 0; w < net.hidden(k).branches; ++w) {
        apply(net.layers[k + 1], branch(number + w), state(k), w, half_of_branch(number + w), 0);
        net.hidden(k).run(next, branch(number + w), w, of[number + w]);
      }
      if (net.blades) enter(net.layers[k + 2], state(k + 1), next);
    }
  }

  // From the last state, to ``y``.
  void finish() {
    const Layer& exit = net.exit();
    Floats *last = state(net.depth()), *result = net.writes ? out : y;
    for (int64_t o = 0; o < exit.outputs; ++o) apply(exit, result + o * exit.window, last, o, halves, 0);
    if (net.writes)
      for (int64_t c = 0; c < net.out_features; ++c)
        y[c] = (out[net.writes[c]] + out[net.writes[net.out_features + c]]) / 2.f;
    if (net.residual && net.out_features == net.inner) {
      const Floats* added = coming(net.depth());  // where it lies until another state is made
      for (int64_t c = 0; c < net.inner; ++c) y[c] += added[c];
    }
    if (net.bias)
      for (int64_t c = 0; c < net.out_features; ++c) y[c] += net.bias[c];
  }

 private:
  // where a state is made
  Floats* coming(int64_t k) const { return net.blades ? of_blades : state(k); }

  // Its windows as a layer reads them.
  static void enter(const Layer& layer, Floats* to, const Floats* from) {
    for (int64_t at = 0; at < layer.inputs * layer.window; at += layer.window) layer.spin.to_spin(to + at, from + at);
  }

  // One output window of a layer, in coordinates of blades where the network is.
  void apply(const Layer& layer, Floats* to, Floats* from, int64_t o, Floats* half, int64_t stride) const {
    layer.run(net.blades ? of_spins : to, from, o, half, stride, packed);
    if (net.blades) layer.spin.from_spin(to, of_spins);
  }
};

template <class T>
void run_network(T* to, const T* from, int64_t tokens, const Network& net) {
  for_rows(divided_up(tokens, kLanes), kLanes * net.inner, [&](int64_t begin, int64_t end) {
    Tile tile(net, false);
    for (int64_t start = begin * kLanes; start < std::min(tokens, end * kLanes); start += kLanes) {
      const int count = int(std::min<int64_t>(kLanes, tokens - start));
      take(tile.x, from + start * net.in_features, net.in_features, count);
      tile.run();
      tile.finish();
      give(to + start * net.out_features, tile.y, net.out_features, count);
    }
  });
}

// Gradients of a thread's tokens: of the factors of every layer, in blocks, and of slopes and mixtures, by lanes.
struct Gradients {
  const Network& net;
  std::vector<std::pair<Floats*, Floats*>> factors;
  Floats *slopes, *mix;
  Vectors memory;

  explicit Gradients(const Network& net)
      : net(net), memory(net.numbers_of_factors() / kLanes + 2 * net.branches()) {
    Floats* at = memory.get();
    for (const Layer& layer : net.layers) {
      factors.push_back({at, at + layer.left_numbers() / kLanes});
      at += layer.numbers() / kLanes;
    }
    slopes = at;
    mix = at + net.branches();
    std::fill(memory.get(), mix + net.branches(), Floats{});
  }

  void write(float* to) const {
    for (size_t at = 0; at < net.layers.size(); ++at) {
      const Layer& layer = net.layers[at];
      unblock(to, factors[at].first, layer.pairs(), layer.left_size);
      to += layer.left_numbers();
      unblock(to, factors[at].second, layer.pairs(), layer.right_size);
      to += layer.right_numbers();
    }
    for (int64_t i = 0; i < 2 * net.branches(); ++i) *to++ = sum(slopes[i]);
  }
};

// (rows, columns) as (columns, rows), so that what is read together lies together.
void turn(Floats* to, const Floats* from, int64_t rows, int64_t columns) {
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t r = 0; r < rows; ++r) to[c * rows + r] = from[r * columns + c];
}

// From the gradient of a tile's output to that of its input, where ``to_x`` is not null, in place of everything else.
struct BackwardTile {
  const Network& net;
  Tile tile;
  Vectors middle, turned_middle, turned_x, result, halves, windows, above, below, to_x;

  explicit BackwardTile(const Network& net)
      : net(net),
        tile(net, true),
        middle(net.largest_window()),
        turned_middle(net.largest_window()),
        turned_x(net.largest_window()),
        result(net.exit().outputs * net.exit().window),
        halves(net.inner),
        windows(net.entry().inputs * net.entry().window),
        above(net.inner),
        below(net.inner),
        to_x(net.in_features) {}

  // the gradient of y lies in tile.y
  void run(Gradients& sums, bool need_x) {
    Floats *grad = above.get(), *next = below.get();
    exit(grad, sums);
    int64_t step = int64_t(net.steps.size());
    int64_t number = tile.first_branch(net.depth());
    for (int64_t k = net.depth() - 1; k >= 0; --k) {
      const Step& hidden = net.steps[--step];
      number -= hidden.branches;
      for (int64_t w = 0; w < hidden.branches; ++w) {
        Floats* z = tile.branch(number + w);
        hidden.run_backward(z, grad, w, tile.of[number + w], sums.slopes[number + w], sums.mix[number + w]);
        layer(k + 1, z, tile.state(k), w, tile.half_of_branch(number + w), next, sums);
      }
      leave(net.layers[k + 1], next);
      std::swap(grad, next);
    }
    entry(grad, sums, need_x);
  }

 private:
  // From the gradient of one output window to those of the factors and, added from the second one on, that of what the
  // layer reads.
  void layer(size_t number, Floats* grad, Floats* x, int64_t o, Floats* half, Floats* to_x, Gradients& sums) {
    const Layer& layer = net.layers[number];
    if (net.blades) {
      layer.spin.to_spin(tile.of_spins, grad);
      grad = tile.of_spins;
    }
    const int64_t size = layer.shared(), l = layer.left_size, r = layer.right_size;
    const int64_t columns = layer.left_columns(), rows = layer.right_rows();
    for (int64_t i = 0; i < layer.inputs; ++i)
      for (int64_t part = 0; part < layer.parts; ++part) {
        const int64_t at = layer.pair(o, i, part), start = part * size, place = i * layer.window + start;
        const Place given = {grad + start, columns, 1};
        add_products(sums.factors[number].first + at * l * l / kLanes, given, {half + place, columns, 1}, l, columns);
        multiply(layer.a(at, true), given, columns, {middle.get(), columns, 1}, false, tile.packed);
        Place u = {middle.get(), 1, r}, v = {x + place, 1, r};
        if (size > kAliasing) {
          turn(turned_middle.get(), u.data, rows, r);
          turn(turned_x.get(), v.data, rows, r);
          u = {turned_middle.get(), rows, 1}, v = {turned_x.get(), rows, 1};
        }
        add_products(sums.factors[number].second + at * r * r / kLanes, u, v, r, rows);
        if (to_x)
          multiply(layer.b(at, true), {middle.get(), 1, r}, rows, {to_x + place, 1, r}, o > 0, tile.packed);
      }
  }

  // The gradient of what a layer reads, in coordinates of the spin representation, as that of what came before.
  void leave(const Layer& layer, Floats* grad) {
    if (!net.blades) return;
    for (int64_t at = 0; at < layer.inputs * layer.window; at += layer.window) {
      layer.spin.from_spin(tile.of_spins, grad + at);
      std::copy(tile.of_spins, tile.of_spins + layer.window, grad + at);
    }
  }

  // the gradient of y lies in tile.y
  void exit(Floats* to_last, Gradients& sums) {
    const Layer& exit = net.exit();
    Floats *of_y = tile.y, *grad = of_y;
    if (net.writes) {
      const int64_t places = exit.outputs * exit.window;
      std::fill(result.get(), result.get() + places, Floats{});
      for (int64_t c = 0; c < net.out_features; ++c) {
        result.get()[net.writes[c]] += of_y[c] / 2.f;
        result.get()[net.writes[net.out_features + c]] += of_y[c] / 2.f;
      }
      grad = result.get();
    }
    Floats* last = tile.state(net.depth());
    for (int64_t o = 0; o < exit.outputs; ++o) {
      for (int64_t i = 0; i < exit.inputs; ++i)
        exit.run_right(halves.get() + i * exit.window, last, o, i, tile.packed);
      layer(net.layers.size() - 1, grad + o * exit.window, last, o, halves.get(), to_last, sums);
    }
    leave(exit, to_last);
    if (net.residual && net.out_features == net.inner)
      for (int64_t v = 0; v < net.inner; ++v) to_last[v] += of_y[v];
  }

  void entry(Floats* grad, Gradients& sums, bool need_x) {
    const Layer& entry = net.entry();
    const bool residual = net.residual && net.in_features == net.inner;
    Floats* of_windows = net.reads ? windows.get() : to_x.get();
    Floats* of_result = grad;
    if (net.after_entry) {
      of_result = tile.branch(0);
      net.steps[0].run_backward(of_result, grad, 0, tile.of[0], sums.slopes[0], sums.mix[0]);
    }
    Floats* read = net.reads || net.blades ? tile.windows : tile.x;
    for (int64_t o = 0; o < entry.outputs; ++o)
      layer(0, of_result + o * entry.window, read, o, tile.half_of_entry(o), need_x ? of_windows : nullptr, sums);
    if (!need_x) return;
    leave(entry, of_windows);
    if (net.reads) {
      std::fill(to_x.get(), to_x.get() + net.in_features, Floats{});
      for (int64_t at = 0; at < entry.inputs * entry.window; ++at) to_x.get()[net.reads[at]] += of_windows[at];
    }
    if (residual)
      for (int64_t v = 0; v < net.inner; ++v) to_x.get()[v] += grad[v];
  }
};

template <class T>
void run_network_backward(T* to, float* totals, int64_t shares, const T* grads, const T* from, int64_t tokens,
                          const Network& net) {
  const int64_t tiles = divided_up(tokens, kLanes);
  // shares of the tokens that do not depend on who computes them, so that neither do their sums
  parallel_for(shares, 1, [&](int64_t begin, int64_t end) {
    for (int64_t share = begin; share < end; ++share) {
      BackwardTile tile(net);
      Gradients gradients(net);
      const int64_t last = std::min(tokens, tiles * (share + 1) / shares * kLanes);
      for (int64_t start = tiles * share / shares * kLanes; start < last; start += kLanes) {
        const int count = int(std::min<int64_t>(kLanes, tokens - start));
        take(tile.tile.x, from + start * net.in_features, net.in_features, count);
        tile.tile.run();
        take(tile.tile.y, grads + start * net.out_features, net.out_features, count);
        tile.run(gradients, to != nullptr);
        if (to) give(to + start * net.in_features, tile.to_x.get(), net.in_features, count);
      }
      gradients.write(totals + share * (net.numbers_of_factors() + 2 * net.branches()));
    }
  });
}

}  // namespace

// ``half`` is whether numbers (void) are bfloat16, ``threads`` how many may run.
extern "C" {

void rotor_network(bool half, int threads, void* y, const void* x, int64_t tokens, const Description* given,
                   const Layer* layers) {
  most_threads = threads;
  const Network net(*given, layers);
  RELINEAR_DISPATCH(half, run_network((T*)y, (const T*)x, tokens, net));
}

// ``sums`` (shares, numbers): of the factors of every layer, slopes and mixtures; ``to_x`` or nothing
void rotor_network_backward(bool half, int threads, void* to_x, float* sums, int64_t shares, const void* grad,
                            const void* x, int64_t tokens, const Description* given, const Layer* layers) {
  most_threads = threads;
  const Network net(*given, layers);
  RELINEAR_DISPATCH(half, run_network_backward((T*)to_x, sums, shares, (const T*)grad, (const T*)x, tokens, net));
}

}  // extern "C"
