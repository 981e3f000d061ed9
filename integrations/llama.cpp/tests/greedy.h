// The most likely token, 250 times, with both caches.
#pragma once

#include "scene.h"

// tokens of a prompt; of a model without a vocabulary, any
inline std::vector<llama_token> tokens_of(const llama_model *model, const std::string &prompt) {
    const auto *vocab = llama_model_get_vocab(model);

    std::vector<llama_token> res(prompt.size() + 8);

    if (llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE) {
        for (size_t i = 0; i < res.size(); ++i) {
            res[i] = text_token(model, (uint32_t)prompt.size(), (uint32_t)i);
        }
    } else {
        res.resize(
            llama_tokenize(vocab, prompt.data(), (int32_t)prompt.size(), res.data(), (int32_t)res.size(), true, false));
    }

    return res;
}

// feeds a prompt and 250 tokens, those of `forced` or, where it is empty, the most likely; notes the most likely ones
// and their logits
inline void scene_greedy(scene_run &run, const std::vector<llama_token> &prompt,
                         const std::vector<scene_note> &forced) {
    scene_batch batch;

    for (size_t i = 0; i < prompt.size(); ++i) {
        batch.push_back({prompt[i], (llama_pos)i, {0}, i + 1 == prompt.size()});
    }

    for (int i = 0; i < 250; ++i) {
        const int res = run.decode(batch);

        run.note_row("token " + std::to_string(i), res == 0 ? llama_get_logits_ith(run.ctx, -1) : nullptr,
                     llama_vocab_n_tokens(llama_model_get_vocab(run.model)));
        if (res) {
            return;
        }
        run.notes.back().value = run.best();
        batch = {{(llama_token)(forced.empty() ? run.notes.back().value : forced[i].value),
                  (llama_pos)prompt.size() + i,
                  {0},
                  true}};
    }
}

// Returns whether both caches find the same tokens most likely.  With types to which llama.cpp's own rounds queries as
// well as keys, another token may be: one that its own finds next to as likely.
inline bool compare_greedy(const std::string &name, llama_model *model, const llama_context_params &params,
                           const std::string &text) {
    const auto prompt = tokens_of(model, text);
    const auto own = play(model, params, false, [&](scene_run &run) { scene_greedy(run, prompt, {}); });
    const auto ours = play(model, params, true, [&](scene_run &run) { scene_greedy(run, prompt, own); });
    const bool is_rounded = params.type_k != GGML_TYPE_F32 && params.type_k != GGML_TYPE_F16;
    const double limit = is_rounded ? 0.1 : 0.0; // of a logit

    bool ok = own.size() == 250 && ours.size() == 250;
    int n_equal = 0;
    double gap = 0.0;
    double most = 0.0;

    for (size_t i = 0; i < std::min(own.size(), ours.size()); ++i) {
        ok = ok && !own[i].row.empty() && own[i].row.size() == ours[i].row.size();
        if (ok) {
            n_equal += own[i].value == ours[i].value;
            gap = std::max<double>(gap, own[i].row[own[i].value] - own[i].row[ours[i].value]);
            most = std::max(most, nmse(ours[i].row, own[i].row));
        }
    }

    ok = ok && gap <= limit && most < (params.type_k == GGML_TYPE_Q4_0 ? 2e-2 : is_rounded ? 1e-3 : 1e-5);
    printf("  %-4s %s (%d of 250 equal, others less likely by %.1g at most, logits at most %.1g apart)\n",
           ok ? "ok" : "FAIL", name.c_str(), n_equal, gap, most);
    fflush(stdout);

    return ok;
}
