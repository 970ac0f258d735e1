// Integers of few bits, read as they are packed (functional/quantized.py says how) and made numbers in registers.
//
// N rows of x, I inputs, O outputs, K groups of a row of weights. A block is 64 codes, of B bits each.

#include "byte_products.h"

namespace {

using namespace relinear;

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

// The codes of a block as numbers.
template <int kBits>
inline void write_codes(Floats (&to)[kBlock / kLanes], const uint8_t* block) {
  for (int at = 0; at < kBlock; at += kBytes) {
    const ByteVector codes = codes_of<kBits>(block, at);
    uint8_t held[kBytes];
    std::memcpy(held, &codes, kBytes);
    for (int i = 0; i < 4; ++i)
      to[at / kLanes + i] = __builtin_convertvector((Ints)widened(held + i * kLanes), Floats);
  }
}

// Row o of the matrix.
template <int kBits, class T>
inline void write_row(T* to, const Grid<T>& grid, int64_t o) {
  const T* scale = grid.scales + o * grid.groups;
  const uint8_t* block = grid.codes + o * grid.width;
  int64_t k = 0, left = grid.halves;
  for (int64_t start = 0; start < grid.inputs; start += kBlock, block += 8 * kBits) {
    Floats codes[kBlock / kLanes];
    write_codes<kBits>(codes, block);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const Floats unit = Floats{} + float(scale[k]), zero = Floats{} + grid.zero(o, k);
#pragma GCC unroll 8
      for (int at = half * kHalf; at < (half + 1) * kHalf; at += kLanes)
        store(to + start + at, (codes[at / kLanes] - zero) * unit, kLanes);
      if (--left == 0) ++k, left = grid.halves;
    }
  }
}

// sums[i][n] = the product of row o + i with row n of x; ``units``, (kCount, 2, groups): steps of its groups, then what
// numbers begin at.
template <int kBits, int kCount, int kRows>
inline void integer_products(float (&sums)[kCount][kRows], const Codes& grid, int64_t o, const float* x,
                             const float* units) {
  Floats found[kCount][kRows] = {};
  int64_t k = 0, left = grid.halves;
  for (int64_t start = 0; start < grid.inputs; start += kBlock) {
    const uint8_t* block = grid.codes + o * grid.width + start / 8 * kBits;
    Floats codes[kCount][kBlock / kLanes];
    for (int i = 0; i < kCount; ++i) {
      __builtin_prefetch(block + (kCount + i) * grid.width);  // of the next rows
      write_codes<kBits>(codes[i], block + i * grid.width);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 8
      for (int at = half * kHalf; at < (half + 1) * kHalf; at += kLanes) {
        Floats weights[kCount];
#pragma GCC unroll 4
        for (int i = 0; i < kCount; ++i) {
          const float* unit = units + 2 * i * grid.groups + k;
          weights[i] = codes[i][at / kLanes] * unit[0] + unit[grid.groups];
        }
#pragma GCC unroll 8
        for (int n = 0; n < kRows; ++n) {
          const Floats taken = load(x + n * grid.inputs + start + at, kLanes);
#pragma GCC unroll 4
          for (int i = 0; i < kCount; ++i) found[i][n] += weights[i] * taken;
        }
      }
      if (--left == 0) ++k, left = grid.halves;
    }
  }
  for (int i = 0; i < kCount; ++i)
    for (int n = 0; n < kRows; ++n) sums[i][n] = sum(found[i][n]);
}

// A few rows: weights are made numbers in registers, for as many rows of x as registers hold sums of.
template <int kBits, class T>
void products(T* to, const Grid<T>& grid, const std::vector<float>& x, int64_t rows, int64_t outputs,
              const Bias<T>& start) {
  for_outputs(outputs, outputs, rows * grid.inputs, [&](int64_t first, auto together) {
    constexpr int kCount = decltype(together)::value, kMost = kLanes / 2;
    std::vector<float> units(2 * kCount * grid.groups);
    for (int i = 0; i < kCount; ++i) grid.write_units(units.data() + 2 * i * grid.groups, first + i);
    const auto take = [&](int64_t n, auto side_by_side, auto several) {
      constexpr int kPart = decltype(side_by_side)::value, kRows = decltype(several)::value;
      for (int from = 0; from < kCount; from += kPart) {
        float sums[kPart][kRows];
        const float* unit = units.data() + 2 * from * grid.groups;
        integer_products<kBits>(sums, grid, first + from, x.data() + n * grid.inputs, unit);
        for (int i = 0; i < kPart; ++i)
          for (int m = 0; m < kRows; ++m) {
            const int64_t o = first + from + i;
            to[(n + m) * outputs + o] = T(sums[i][m] + start[o]);
          }
      }
    };
    int64_t n = 0;
    if constexpr (kCount > 1) {  // what is left of the outputs is not worth code of its own
      for (; n + kMost <= rows; n += kMost) take(n, std::integral_constant<int, 2>(), std::integral_constant<int, kMost>());
      for (; n + 2 <= rows; n += 2) take(n, together, std::integral_constant<int, 2>());
    }
    for (; n < rows; ++n) take(n, together, std::integral_constant<int, 1>());
  });
}

}  // namespace

// ``half`` is whether numbers (void) are bfloat16, ``threads`` how many may run.
extern "C" {

// out = x weights + bias for a few rows, which may be rounded to bytes first
void quantized_rows(bool half, int threads, bool rounded, void* out, const void* x, const uint8_t* codes,
                    const void* scales, const uint8_t* zeros, const void* bias, int64_t rows, int64_t inputs,
                    int64_t outputs, int64_t bits, int64_t group) {
  most_threads = threads;
  RELINEAR_DISPATCH(half, {
    const Grid<T> grid(codes, scales, zeros, inputs, bits, group);
    const std::vector<float> taken = in_single((const T*)x, rows * inputs);
    const Bias<T> start(bias);
    if (rounded)
      multiply((T*)out, grid, bits, Rounded(taken.data(), rows * inputs), rows, outputs, start);
    else
      for_bits(bits, [&](auto constant) { products<constant>((T*)out, grid, taken, rows, outputs, start); });
  });
}

// The weights (count, I) of ``count`` outputs from ``first`` on.
void quantized_weights(bool half, int threads, void* out, const uint8_t* codes, const void* scales,
                       const uint8_t* zeros, int64_t first, int64_t count, int64_t inputs, int64_t bits,
                       int64_t group) {
  most_threads = threads;
  RELINEAR_DISPATCH(half, {
    const Grid<T> grid(codes, scales, zeros, inputs, bits, group);
    for_bits(bits, [&](auto constant) {
      for_rows(count, inputs, [&](int64_t begin, int64_t end) {
        for (int64_t o = begin; o < end; ++o) write_row<constant>((T*)out + o * inputs, grid, first + o);
      });
    });
  });
}

// functional/rounding.py's change_codes, on vectors of O numbers, in place.
void change_codes(float* value, float* code, float* left, const float* g, const float* unit, const float* middle,
                  const float* most, float mass, int64_t count, int64_t parts) {
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

}  // extern "C"
