// Losses that llama.cpp gives of a GGUF file, window by window, and llama.cpp's own rounding of one; for llama_files.py.
//
//     llama_files losses FILE WINDOWS LENGTH        WINDOWS: token ids, int32, LENGTH a window; prints nats a token of each
//     llama_files quantize SOURCE OUT TYPE MATRIX   TYPE: a number of llama_ftype; MATRIX: names, sizes, mean squares
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "llama.h"

static int losses(const char* file, const char* windows, int length) {
  std::ifstream in(windows, std::ios::binary);
  std::vector<llama_token> ids(length);
  llama_model* model = llama_model_load_from_file(file, llama_model_default_params());
  llama_context_params options = llama_context_default_params();
  options.n_ctx = options.n_batch = options.n_ubatch = length;
  options.n_threads = options.n_threads_batch = 1;
  llama_context* context = llama_init_from_model(model, options);
  const int count = llama_vocab_n_tokens(llama_model_get_vocab(model));
  llama_batch batch = llama_batch_init(length, 0, 1);
  while (in.read(reinterpret_cast<char*>(ids.data()), length * sizeof(llama_token))) {
    llama_memory_clear(llama_get_memory(context), true);
    batch.n_tokens = length;
    for (int i = 0; i < length; ++i) {
      batch.token[i] = ids[i];
      batch.pos[i] = i;
      batch.n_seq_id[i] = 1;
      batch.seq_id[i][0] = 0;
      batch.logits[i] = 1;
    }
    if (llama_decode(context, batch)) return 1;
    double total = 0;
    for (int i = 0; i + 1 < length; ++i) {
      const float* logits = llama_get_logits_ith(context, i);
      double sum = 0, most = logits[0];
      for (int j = 0; j < count; ++j) most = std::fmax(most, logits[j]);
      for (int j = 0; j < count; ++j) sum += std::exp(logits[j] - most);
      total += most + std::log(sum) - logits[ids[i + 1]];
    }
    std::printf("%.6f\n", total / (length - 1));
    std::fflush(stdout);
  }
  return 0;
}

static int quantize(const char* source, const char* out, int type, const char* matrix) {
  std::ifstream in(matrix, std::ios::binary);
  std::vector<std::string> names;
  std::vector<std::vector<float>> values;
  std::string name;
  for (size_t count; in >> name >> count;) {
    in.ignore(1);
    names.push_back(name);
    values.emplace_back(count);
    in.read(reinterpret_cast<char*>(values.back().data()), count * sizeof(float));
  }
  std::vector<llama_model_imatrix_data> data;
  for (size_t i = 0; i < names.size(); ++i) data.push_back({names[i].c_str(), values[i].data(), values[i].size()});
  data.push_back({nullptr, nullptr, 0});
  llama_model_quantize_params options = llama_model_quantize_default_params();
  options.nthread = 1;
  options.ftype = static_cast<llama_ftype>(type);
  options.imatrix = data.data();
  return static_cast<int>(llama_model_quantize(source, out, &options));
}

int main(int count, char** given) {
  llama_backend_init();
  llama_log_set([](ggml_log_level level, const char* text, void*) { if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr); },
                nullptr);
  if (count == 5 && !std::strcmp(given[1], "losses")) return losses(given[2], given[3], std::atoi(given[4]));
  if (count == 6 && !std::strcmp(given[1], "quantize")) return quantize(given[2], given[3], std::atoi(given[4]), given[5]);
  return 2;
}
