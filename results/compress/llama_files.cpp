// What llama.cpp makes of GGUF files, beside the first of them, and llama.cpp's own rounding; for llama_files.py.
//
//     llama_files judge LENGTH WINDOWS OUT FILE...  WINDOWS: token ids, int32, LENGTH a window. OUT: float32 for each window,
//                                                   FILE and token: loss, KL divergence to the first FILE, same first token
//     llama_files continue LENGTH WINDOWS COUNT FILE    prints 64 greedy tokens after the first 32 of COUNT windows
//     llama_files tokens FILE TEXT                  prints the token ids of TEXT, a file
//     llama_files logits WINDOWS OUT FILE           OUT: float32 for each token of WINDOWS, one after the other
//     llama_files speed TURNS FILE...               prints tokens a second of each FILE, a line a turn: 64 tokens, one thread
//     llama_files quantize SOURCE OUT TYPE MATRIX [TYPES]   TYPE: a number of llama_ftype; MATRIX: names, sizes, mean squares;
//                                                   TYPES: names of tensors and numbers of ggml_type
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "llama.h"

struct Reader {
  llama_model* model;
  llama_context* context;
  int entries;

  Reader(const char* file, int length) {
    model = llama_model_load_from_file(file, llama_model_default_params());
    llama_context_params options = llama_context_default_params();
    options.n_ctx = options.n_batch = options.n_ubatch = length;
    options.n_threads = options.n_threads_batch = 1;
    context = llama_init_from_model(model, options);
    entries = llama_vocab_n_tokens(llama_model_get_vocab(model));
  }
  ~Reader() {
    llama_free(context);
    llama_model_free(model);
  }
  void clear() { llama_memory_clear(llama_get_memory(context), true); }
  void feed(const llama_token* ids, int count, int position, bool all) {
    llama_batch batch = llama_batch_init(count, 0, 1);
    batch.n_tokens = count;
    for (int i = 0; i < count; ++i) {
      batch.token[i] = ids[i];
      batch.pos[i] = position + i;
      batch.n_seq_id[i] = 1;
      batch.seq_id[i][0] = 0;
      batch.logits[i] = all || i + 1 == count;
    }
    if (llama_decode(context, batch)) std::exit(1);
    llama_batch_free(batch);
  }
  llama_token first() {
    const float* logits = llama_get_logits_ith(context, -1);
    return static_cast<llama_token>(std::max_element(logits, logits + entries) - logits);
  }
  // log-probabilities of the token behind place
  void say(int place, std::vector<float>& out) {
    const float* logits = llama_get_logits_ith(context, place);
    const float most = *std::max_element(logits, logits + entries);
    double sum = 0;
    for (int j = 0; j < entries; ++j) sum += std::exp(logits[j] - most);
    const float by = most + static_cast<float>(std::log(sum));
    out.resize(entries);
    for (int j = 0; j < entries; ++j) out[j] = logits[j] - by;
  }
};

static std::vector<llama_token> read(const char* windows) {
  std::ifstream in(windows, std::ios::binary | std::ios::ate);
  std::vector<llama_token> ids(in.tellg() / sizeof(llama_token));
  in.seekg(0).read(reinterpret_cast<char*>(ids.data()), ids.size() * sizeof(llama_token));
  return ids;
}

static int judge(int length, const char* windows, const char* out, int count, char** files) {
  const std::vector<llama_token> ids = read(windows);
  std::vector<std::unique_ptr<Reader>> readers;
  for (int i = 0; i < count; ++i) readers.push_back(std::make_unique<Reader>(files[i], length));
  std::ofstream to(out, std::ios::binary);
  std::vector<std::vector<float>> wanted(length - 1);
  std::vector<float> found;
  for (size_t at = 0; at + length <= ids.size(); at += length) {
    for (auto& reader : readers) {
      reader->clear();
      reader->feed(&ids[at], length, 0, true);
      for (int i = 0; i + 1 < length; ++i) {
        reader->say(i, found);
        if (reader == readers[0]) wanted[i] = found;
        const std::vector<float>& p = wanted[i];
        double divergence = 0;
        for (int j = 0; j < reader->entries; ++j) divergence += std::exp(p[j]) * double(p[j] - found[j]);
        const bool same = std::max_element(p.begin(), p.end()) - p.begin() ==
                          std::max_element(found.begin(), found.end()) - found.begin();
        const float row[] = {-found[ids[at + i + 1]], static_cast<float>(divergence), static_cast<float>(same)};
        to.write(reinterpret_cast<const char*>(row), sizeof row);
      }
    }
    to.flush();
  }
  return 0;
}

static int go_on(int length, const char* windows, int count, const char* file) {
  const std::vector<llama_token> ids = read(windows);
  Reader reader(file, length);
  for (int i = 0; i < count; ++i) {
    reader.clear();
    reader.feed(&ids[ids.size() / length * i / count * length], 32, 0, false);
    for (int made = 0; made < 64; ++made) {
      llama_token next = reader.first();
      std::printf("%d ", next);
      reader.feed(&next, 1, 32 + made, false);
    }
    std::printf("\n");
  }
  return 0;
}

static int tokens(const char* file, const char* text) {
  llama_model_params options = llama_model_default_params();
  options.vocab_only = true;
  llama_model* model = llama_model_load_from_file(file, options);
  std::ifstream in(text, std::ios::binary);
  const std::string given((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  std::vector<llama_token> ids(given.size() + 8);
  const int count = llama_tokenize(llama_model_get_vocab(model), given.data(), given.size(), ids.data(), ids.size(), true, true);
  for (int i = 0; i < count; ++i) std::printf("%d ", ids[i]);
  std::printf("\n");
  llama_model_free(model);
  return count < 0;
}

static int logits(const char* windows, const char* out, const char* file) {
  const std::vector<llama_token> ids = read(windows);
  Reader reader(file, ids.size());
  reader.feed(ids.data(), ids.size(), 0, true);
  std::ofstream to(out, std::ios::binary);
  for (size_t i = 0; i < ids.size(); ++i)
    to.write(reinterpret_cast<const char*>(llama_get_logits_ith(reader.context, i)), reader.entries * sizeof(float));
  return 0;
}

static int speed(int turns, int count, char** files) {
  std::vector<std::unique_ptr<Reader>> readers;
  for (int i = 0; i < count; ++i) readers.push_back(std::make_unique<Reader>(files[i], 128));
  for (int turn = 0; turn < turns; ++turn) {
    for (auto& reader : readers) {
      llama_token next = 100;
      reader->clear();
      reader->feed(&next, 1, 0, false);
      const std::clock_t start = std::clock();  // of this process: what else the machine does counts little
      for (int made = 1; made <= 64; ++made) {
        next = reader->first();
        reader->feed(&next, 1, made, false);
      }
      std::printf("%.2f ", 64.0 * CLOCKS_PER_SEC / (std::clock() - start));
    }
    std::printf("\n");
    std::fflush(stdout);
  }
  return 0;
}

static int quantize(const char* source, const char* out, int type, const char* matrix, const char* types) {
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
  std::vector<std::string> patterns;
  std::vector<llama_model_tensor_override> chosen;
  std::ifstream list(types ? types : "");
  std::vector<int> numbers;
  for (int number; list >> name >> number; numbers.push_back(number)) patterns.push_back("^" + name + "$");
  for (size_t i = 0; i < patterns.size(); ++i) chosen.push_back({patterns[i].c_str(), static_cast<ggml_type>(numbers[i])});
  chosen.push_back({nullptr, GGML_TYPE_COUNT});
  llama_model_quantize_params options = llama_model_quantize_default_params();
  options.nthread = 1;
  options.ftype = static_cast<llama_ftype>(type);
  options.imatrix = data.data();
  if (types) options.tt_overrides = chosen.data();
  return static_cast<int>(llama_model_quantize(source, out, &options));
}

int main(int count, char** given) {
  llama_backend_init();
  llama_log_set([](ggml_log_level level, const char* text, void*) { if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr); },
                nullptr);
  const std::string what = count > 1 ? given[1] : "";
  if (count > 5 && what == "judge") return judge(std::atoi(given[2]), given[3], given[4], count - 5, given + 5);
  if (count == 6 && what == "continue") return go_on(std::atoi(given[2]), given[3], std::atoi(given[4]), given[5]);
  if (count == 4 && what == "tokens") return tokens(given[2], given[3]);
  if (count == 5 && what == "logits") return logits(given[2], given[3], given[4]);
  if (count > 3 && what == "speed") return speed(std::atoi(given[2]), count - 3, given + 3);
  if (count > 5 && what == "quantize") return quantize(given[2], given[3], std::atoi(given[4]), given[5], count > 6 ? given[6] : nullptr);
  return 2;
}
