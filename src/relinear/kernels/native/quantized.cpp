// Integers of few bits, read as they are packed (functional/quantized.py says how) and made numbers in registers.
//
// N rows of x, I inputs, O outputs, K groups of a row of weights. A block is 64 codes, of B bits each.

#include <torch/library.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "rows.h"

namespace {

using namespace relinear;

constexpr int kBlock = 64, kHalf = kBlock / 2;
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

// Bytes as whole numbers; of a conversion between vectors GCC 12 makes a move for every lane.
inline Words widened(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  Bytes bytes;
  std::memcpy(&bytes, from, kLanes);
  return __builtin_convertvector(bytes, Words);
#endif
}

// The codes of a block from ``at`` on, a constant once unrolled.
template <int kBits>
inline Floats decoded(const uint8_t* block, int at) {
  Words codes = {};
  if constexpr (kBits & 8) codes = widened(block + at);
  if constexpr (kBits & 4) codes = (widened(block + at % 32) >> (at / 32 * 4)) & 15;
  const uint8_t* next = block + (kBits & 4) * 8;
  if constexpr (kBits & 2) codes = (codes << 2) | ((widened(next + at % 16) >> (at / 16 * 2)) & 3);
  if constexpr (kBits & 1) {
    Words lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i + at % 8;
    uint16_t single = next[(kBits & 2) * 8 + at / 8];
    if constexpr (kLanes == 16) single |= next[(kBits & 2) * 8 + at / 8 + 1] << 8;
    codes = (codes << 1) | (((Words{} + single) >> lane) & 1);
  }
  return __builtin_convertvector((Ints)codes, Floats);
}

// A matrix of codes with its grids.
template <class T>
struct Grid {
  const uint8_t *codes, *zeros;
  const T* scales;
  int64_t inputs, groups, halves, width;  // halves of a block in a group, bytes of a row of codes
  float unit;                              // of zero points, in codes

  Grid(const Tensor& packed, const Tensor& scale, const std::optional<Tensor>& zero, int64_t in_features, int64_t bits,
       int64_t group)
      : codes(packed.const_data_ptr<uint8_t>()),
        zeros(zero ? zero->const_data_ptr<uint8_t>() : nullptr),
        scales(scale.const_data_ptr<T>()),
        inputs(in_features),
        groups(scale.size(1)),
        halves(group / kHalf),
        width(packed.size(1)),
        unit(1.f / (1 << (8 - bits))) {}

  float zero(int64_t o, int64_t k) const { return (zeros ? zeros[o * groups + k] : 128) * unit; }
};

// sums[i] = the product of row o + i with x; ``totals``: the sum of x over every group.
template <int kBits, int kCount, class T>
inline void integer_products(float (&sums)[kCount], const Grid<T>& grid, int64_t o, const float* x,
                             const float* totals) {
  Floats found[kCount] = {};
  int64_t k = 0, left = grid.halves;
  for (int64_t start = 0; start < grid.inputs; start += kBlock)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) {
        const uint8_t* block = grid.codes + (o + i) * grid.width + start / 8 * kBits;
        Floats part = {};
#pragma GCC unroll 8
        for (int at = half * kHalf; at < (half + 1) * kHalf; at += kLanes)
          part += decoded<kBits>(block, at) * load(x + start + at, kLanes);
        found[i] += part * float(grid.scales[(o + i) * grid.groups + k]);
      }
      if (--left == 0) ++k, left = grid.halves;
    }
  for (int i = 0; i < kCount; ++i) {
    for_vectors(grid.groups, [&](int64_t at, int count) {
      uint8_t zeros[kLanes];
      std::fill(zeros, zeros + kLanes, 128);
      const int64_t from = (o + i) * grid.groups + at;
      if (grid.zeros) std::memcpy(zeros, grid.zeros + from, count);
      const Floats zero = __builtin_convertvector((Ints)widened(zeros), Floats) * grid.unit;
      found[i] -= load(grid.scales + from, count) * zero * load(totals + at, count);
    });
    sums[i] = sum(found[i]);
  }
}

// Row o of the matrix.
template <int kBits, class To, class T>
inline void write_row(To* to, const Grid<T>& grid, int64_t o) {
  for (int64_t start = 0; start < grid.inputs; start += kBlock)
#pragma GCC unroll 16
    for (int at = 0; at < kBlock; at += kLanes) {
      const int64_t k = (start + at) / kHalf / grid.halves;
      const Floats codes = decoded<kBits>(grid.codes + o * grid.width + start / 8 * kBits, at);
      store(to + start + at, (codes - grid.zero(o, k)) * float(grid.scales[o * grid.groups + k]), kLanes);
    }
}

template <int kBits, class T>
void row_product(T* to, const Grid<T>& grid, const std::vector<float>& x, int64_t outputs, int64_t group,
                 const Bias<T>& start) {
  std::vector<float> totals(grid.groups);
  for (int64_t i = 0; i < grid.inputs; ++i) totals[i / group] += x[i];
  for_outputs(outputs, outputs, grid.inputs, [&](int64_t o, auto count) {
    float sums[decltype(count)::value];
    integer_products<kBits>(sums, grid, o, x.data(), totals.data());
    for (int i = 0; i < count; ++i) to[o + i] = T(sums[i] + start[o + i]);
  });
}

// Several rows: those of weights are made numbers once, in the nearest cache.
template <int kBits, class T>
void rows_product(T* to, const Grid<T>& grid, const std::vector<float>& x, int64_t rows, int64_t outputs,
                  const Bias<T>& start) {
  for_rows(outputs, rows * grid.inputs, [&](int64_t begin, int64_t end) {
    std::vector<float> weights(grid.inputs);
    for (int64_t o = begin; o < end; ++o) {
      write_row<kBits>(weights.data(), grid, o);
      const auto take = [&](int64_t n, auto count) {
        float sums[decltype(count)::value] = {};
        add_products(sums, x.data() + n * grid.inputs, grid.inputs, weights.data());
        for (int i = 0; i < count; ++i) to[(n + i) * outputs + o] = T(sums[i] + start[o]);
      };
      int64_t n = 0;
      for (; n + kTogether <= rows; n += kTogether) take(n, std::integral_constant<int, kTogether>());
      for (; n < rows; ++n) take(n, std::integral_constant<int, 1>());
    }
  });
}

template <int kBits, class T>
void dense(T* to, const Grid<T>& grid, int64_t outputs) {
  for_rows(outputs, grid.inputs, [&](int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end; ++o) write_row<kBits>(to + o * grid.inputs, grid, o);
  });
}

template <class Body>
void for_bits(int64_t bits, const Body& body) {
  switch (bits) {
    case 2: return body(std::integral_constant<int, 2>());
    case 3: return body(std::integral_constant<int, 3>());
    case 4: return body(std::integral_constant<int, 4>());
    case 5: return body(std::integral_constant<int, 5>());
    case 6: return body(std::integral_constant<int, 6>());
    case 7: return body(std::integral_constant<int, 7>());
    case 8: return body(std::integral_constant<int, 8>());
    default: TORCH_CHECK(false, "bits must be 2 to 8, got ", bits);
  }
}

void check_grid(const Tensor& packed, const Tensor& scales, const std::optional<Tensor>& zeros, int64_t inputs,
                int64_t bits, int64_t group) {
  TORCH_CHECK(inputs % kBlock == 0 && group > 0 && group % kHalf == 0, "inputs and group must be multiples of 64 and 32, ",
              "got ", inputs, " and ", group);
  const int64_t outputs = checked(scales, "scales")[0], groups = (inputs + group - 1) / group;
  check(scales, "scales", scales.scalar_type(), {outputs, groups});
  check(packed, "codes", at::kByte, {outputs, inputs / 8 * bits});
  check_optional(zeros, "zeros", at::kByte, {outputs, groups});
}

Tensor quantized_layer(const Tensor& x, const Tensor& packed, const Tensor& scales, const std::optional<Tensor>& zeros,
                       int64_t bits, int64_t group, const std::optional<Tensor>& bias) {
  const Tensor rows = rows_of(x);
  const auto sizes = checked(rows, "x");
  check_grid(packed, scales, zeros, sizes[1], bits, group);
  const int64_t outputs = scales.size(0);
  check(scales, "scales", x.scalar_type(), scales.sizes());
  check_optional(bias, "bias", x.scalar_type(), {outputs});
  Tensor out = empty_like_rows(x, outputs);
  RELINEAR_DISPATCH(rows, {
    const Grid<T> grid(packed, scales, zeros, sizes[1], bits, group);
    const std::vector<float> taken = in_single<T>(rows);
    const Bias<T> start(bias);
    T* to = out.mutable_data_ptr<T>();
    for_bits(bits, [&](auto constant) {
      if (sizes[0] == 1)
        row_product<constant>(to, grid, taken, outputs, group, start);
      else
        rows_product<constant>(to, grid, taken, sizes[0], outputs, start);
    });
  });
  return out;
}

Tensor quantized_dense(const Tensor& packed, const Tensor& scales, const std::optional<Tensor>& zeros, int64_t bits,
                       int64_t group, int64_t inputs) {
  check_grid(packed, scales, zeros, inputs, bits, group);
  Tensor out = at::empty({scales.size(0), inputs}, scales.options());
  RELINEAR_DISPATCH(scales, {
    const Grid<T> grid(packed, scales, zeros, inputs, bits, group);
    for_bits(bits, [&](auto constant) { dense<constant>(out.mutable_data_ptr<T>(), grid, scales.size(0)); });
  });
  return out;
}

// functional/rounding.py's change_codes, on vectors of O numbers, in place.
void change_codes(const Tensor& values, const Tensor& codes, const Tensor& pull, const Tensor& outputs,
                  const Tensor& scale, const Tensor& zero, const Tensor& top, double own, int64_t parts) {
  const int64_t count = values.numel();
  for (const Tensor& each : {values, codes, pull, scale, zero, top}) check(each, "a vector", at::kFloat, {count});
  check(outputs, "outputs", at::kFloat, {count, count});
  float *value = values.mutable_data_ptr<float>(), *code = codes.mutable_data_ptr<float>(),
        *left = pull.mutable_data_ptr<float>();
  const float *g = outputs.const_data_ptr<float>(), *unit = scale.const_data_ptr<float>(),
              *middle = zero.const_data_ptr<float>(), *most = top.const_data_ptr<float>();
  const float mass = own;
  std::vector<float> found(count), back(count);
  for (int64_t part = 0; part < parts; ++part) {
    std::fill(back.begin(), back.end(), 0.f);
    for (int64_t o = part; o < count; o += parts) {
      const float aim = value[o] + left[o] / g[o * count + o] / mass;
      found[o] = std::min(std::max(std::nearbyint(aim / unit[o] + middle[o]), 0.f), most[o]);
      const float step = (found[o] - code[o]) * unit[o] * mass;
      if (step != 0)
        for (int64_t other = 0; other < count; ++other) back[other] += step * g[o * count + other];
    }
    float gain = 0;
    for (int64_t o = part; o < count; o += parts) gain += (found[o] - code[o]) * unit[o] * (2 * left[o] - back[o]);
    if (!(gain > 0)) continue;
    for (int64_t o = part; o < count; o += parts) {
      value[o] += (found[o] - code[o]) * unit[o];
      code[o] = found[o];
    }
    for (int64_t o = 0; o < count; ++o) left[o] -= back[o];
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(relinear_cpu, library) {
  library.def(
      "change_codes(Tensor(a!) values, Tensor(b!) codes, Tensor(c!) pull, Tensor outputs, Tensor scale, Tensor zero, "
      "Tensor top, float own, int parts) -> ()",
      change_codes);
  library.def(
      "quantized_layer(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, int bits, int group, Tensor? bias) -> "
      "Tensor",
      quantized_layer);
  library.def(
      "quantized_dense(Tensor codes, Tensor scales, Tensor? zeros, int bits, int group, int inputs) -> Tensor",
      quantized_dense);
}
