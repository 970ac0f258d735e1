// llama.cpp's own rounding of one matrix; for k_types.py.
//
//     k_types TYPE ROWS INPUTS WEIGHT MATRIX OUT   TYPE: a number of ggml_type; WEIGHT, MATRIX: float32, the matrix and mean squares
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "ggml.h"

static std::vector<float> read(const char* path, size_t count) {
  std::vector<float> values(count);
  FILE* file = std::fopen(path, "rb");
  if (!file || std::fread(values.data(), 4, count, file) != count) std::exit(1);
  std::fclose(file);
  return values;
}

int main(int count, char** given) {
  if (count != 7) return 2;
  const ggml_type type = static_cast<ggml_type>(std::atoi(given[1]));
  const long rows = std::atol(given[2]), inputs = std::atol(given[3]);
  const std::vector<float> weight = read(given[4], rows * inputs), matrix = read(given[5], inputs);
  std::vector<char> out(rows * ggml_row_size(type, inputs));
  ggml_quantize_init(type);
  ggml_quantize_chunk(type, weight.data(), out.data(), 0, rows, inputs, matrix.data());
  FILE* file = std::fopen(given[6], "wb");
  return std::fwrite(out.data(), 1, out.size(), file) != out.size() || std::fclose(file);
}
