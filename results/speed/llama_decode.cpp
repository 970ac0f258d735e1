// Milliseconds a token that llama.cpp takes to decode, for decode.py, which asks for one run after another.
//
//     llama_decode FILE    lines "THREADS TOKENS" on stdin: the token ids it chose, then milliseconds a token
#include <chrono>
#include <cstdio>
#include <vector>

#include "llama.h"

int main(int count, char** given) {
  if (count != 2) return 2;
  llama_backend_init();
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  llama_model* model = llama_model_load_from_file(given[1], llama_model_default_params());
  if (!model) return 1;
  llama_context_params options = llama_context_default_params();
  options.n_ctx = 512;
  llama_context* context = llama_init_from_model(model, options);
  const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
  for (int threads, tokens; std::scanf("%d %d", &threads, &tokens) == 2;) {
    llama_set_n_threads(context, threads, threads);
    llama_memory_clear(llama_get_memory(context), true);
    std::vector<llama_token> prompt = {1, 504, 3575, 282, 4649, 314, 253, 1838};
    if (llama_decode(context, llama_batch_get_one(prompt.data(), prompt.size()))) return 1;
    std::chrono::steady_clock::time_point start;
    for (int i = 0; i <= tokens; ++i) {
      const float* logits = llama_get_logits_ith(context, -1);
      llama_token best = 0;
      for (llama_token id = 1; id < vocabulary; ++id)
        if (logits[id] > logits[best]) best = id;
      std::printf("%d ", best);
      if (i == 0) start = std::chrono::steady_clock::now();  // the prompt has been read
      if (i < tokens && llama_decode(context, llama_batch_get_one(&best, 1))) return 1;
    }
    const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - start;
    std::printf("\n%.4f\n", taken.count() / tokens);
    std::fflush(stdout);
  }
}
