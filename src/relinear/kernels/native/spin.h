// Blade coordinates and those of the spin representation of tokens in the lanes of vectors, an orthogonal map: signs and
// an order, Walsh-Hadamard transforms and an exclusive or of places (``relinear.clifford.spin`` says why).
//
// V = S K F K coordinates: S blocks (one or two), K rows and columns, F components.

#pragma once

#include "vectors.h"

namespace relinear {

// rows that ``Spin`` takes at most
constexpr int64_t kMostRows = 64;

struct Spin {
  int64_t blocks = 0, rows = 0, components = 0;
  const int32_t* blades = nullptr;  // the blade of every string in (S, F, K, K); nothing where coordinates stay
  const float* signs = nullptr;     // its sign and scale

  int64_t place(int64_t s, int64_t f, int64_t a, int64_t l) const {
    return ((s * rows + (a ^ l)) * components + f) * rows + l;
  }

  // Each row of the strings of one block, or of two together.
  template <class Body>
  void for_rows_of_strings(const Body& body) const {
    for (int64_t f = 0; f < components; ++f)
      for (int64_t a = 0; a < rows; ++a) body(f, a, (f * rows + a) * rows);
  }

  void to_spin(Floats* to, const Floats* from) const {
    const int64_t block = components * rows * rows;
    Floats line[2][kMostRows];
    for_rows_of_strings([&](int64_t f, int64_t a, int64_t first) {
      for (int64_t s = 0; s < blocks; ++s) {
        for (int64_t b = 0; b < rows; ++b)
          line[s][b] = from[blades[s * block + first + b]] * signs[s * block + first + b];
        transform(line[s]);
      }
      if (blocks == 2) both(line);
      for (int64_t s = 0; s < blocks; ++s)
        for (int64_t l = 0; l < rows; ++l) to[place(s, f, a, l)] = line[s][l];
    });
  }

  // Its transpose, and so its inverse.
  void from_spin(Floats* to, const Floats* from) const {
    const int64_t block = components * rows * rows;
    Floats line[2][kMostRows];
    for_rows_of_strings([&](int64_t f, int64_t a, int64_t first) {
      for (int64_t s = 0; s < blocks; ++s)
        for (int64_t l = 0; l < rows; ++l) line[s][l] = from[place(s, f, a, l)];
      if (blocks == 2) both(line);
      for (int64_t s = 0; s < blocks; ++s) {
        transform(line[s]);
        for (int64_t b = 0; b < rows; ++b)
          to[blades[s * block + first + b]] = line[s][b] * signs[s * block + first + b];
      }
    });
  }

 private:
  static void butterfly(Floats& first, Floats& second) {
    const Floats sum = first + second;
    second = first - second;
    first = sum;
  }

  void transform(Floats* line) const {
    for (int64_t step = 1; step < rows; step *= 2)
      for (int64_t start = 0; start < rows; start += 2 * step)
        for (int64_t i = start; i < start + step; ++i) butterfly(line[i], line[i + step]);
  }

  void both(Floats (&line)[2][kMostRows]) const {
    for (int64_t i = 0; i < rows; ++i) butterfly(line[0][i], line[1][i]);
  }
};

}  // namespace relinear
