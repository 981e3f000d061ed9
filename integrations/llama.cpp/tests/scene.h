// A scene: what a program does with a context.  It is played twice in one process, with llama.cpp's own cache and with
// this one, and notes what it sees: both must note the same.
#pragma once

#include "llama-cpp.h"
#include "llama-kvcache-hybrid.h"
#include "llama-kvcache.h"
#include "llama.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

inline int scene_errors = 0; // that llama.cpp and this cache have logged

// begins a test program, which prints what llama.cpp logs only if VERBOSE is set
inline void begin_program() {
    llama_log_set(
        [](ggml_log_level level, const char *text, void *) {
            scene_errors += level == GGML_LOG_LEVEL_ERROR;
            if (getenv("VERBOSE")) fputs(text, stderr);
        },
        nullptr);
    llama_backend_init();
}

// runs a test on each model that the arguments name; returns whether there are some, and all can be loaded
inline bool on_models(int argc, char **argv, const std::function<void(llama_model *)> &test) {
    bool ok = argc > 1;

    begin_program();
    for (int i = 1; i < argc; ++i) {
        const llama_model_ptr model(llama_model_load_from_file(argv[i], llama_model_default_params()));

        printf("%s\n", argv[i]);
        if (model) {
            test(model.get());
        } else {
            printf("  FAIL: cannot be loaded\n");
            ok = false;
        }
    }
    llama_backend_free();

    return ok;
}

using bytes = std::vector<uint8_t>;

// returns the state of a sequence, -1: of all
inline bytes save_state(llama_context *ctx, llama_seq_id seq_id, llama_state_seq_flags flags = 0) {
    bytes res(seq_id < 0 ? llama_state_get_size(ctx) : llama_state_seq_get_size_ext(ctx, seq_id, flags));

    res.resize(seq_id < 0 ? llama_state_get_data(ctx, res.data(), res.size())
                          : llama_state_seq_get_data_ext(ctx, res.data(), res.size(), seq_id, flags));

    return res;
}

// returns how many bytes of a state were read, 0 if it was refused
inline size_t load_state(llama_context *ctx, const bytes &state, llama_seq_id seq_id, llama_state_seq_flags flags = 0) {
    return seq_id < 0 ? llama_state_set_data(ctx, state.data(), state.size())
                      : llama_state_seq_set_data_ext(ctx, state.data(), state.size(), seq_id, flags);
}

struct scene_note {
    std::string label;
    long long value;
    std::vector<float> row; // logits or an embedding
    bool is_blind = false;  // tokens that a window shows to them were lost before: they may differ
};

struct scene_token {
    llama_token id;
    llama_pos pos;
    std::vector<llama_seq_id> seq_ids;
    bool has_logits = false;
};

using scene_batch = std::vector<scene_token>;

// the i-th token of a text of its own, the same for every context
inline llama_token text_token(const llama_model *model, uint32_t text, uint32_t i) {
    uint32_t x = text * 7919u + i * 2654435761u + 1u;

    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;

    return (llama_token)(x % (uint32_t)llama_vocab_n_tokens(llama_model_get_vocab(model)));
}

inline int scene_threads = 1;

// defaults that leave the least room for rounding: f32, without flash attention
inline llama_context_params exact_params() {
    auto params = llama_context_default_params();

    params.n_ctx = 512;
    params.n_batch = 512;
    params.n_ubatch = 64;
    params.n_seq_max = 4;
    params.kv_unified = true;
    params.n_threads = scene_threads;
    params.n_threads_batch = scene_threads;
    params.type_k = GGML_TYPE_F32;
    params.type_v = GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.swa_full = false;

    return params;
}

// the types of this cache go before llama.cpp's option
inline void set_types(const char *k, const char *v) {
    setenv("LLAMA_KVCACHE_TYPE_K", k, 1);
    setenv("LLAMA_KVCACHE_TYPE_V", v, 1);
}

inline void unset_types() {
    unsetenv("LLAMA_KVCACHE_TYPE_K");
    unsetenv("LLAMA_KVCACHE_TYPE_V");
}

// returns a context with this cache, or with llama.cpp's own; nullptr if there is none
inline llama_context *new_context(llama_model *model, const llama_context_params &params, bool is_ours) {
    setenv("LLAMA_KVCACHE", is_ours ? "1" : "0", 1);

    auto *ctx = llama_init_from_model(model, params);

    if (!ctx) {
        return nullptr;
    }

    const auto mem = llama_get_memory(ctx);
    const bool has_ours = dynamic_cast<llama_kvcache *>(mem) || dynamic_cast<llama_kvcache_hybrid *>(mem);

    if (has_ours != is_ours) {
        llama_free(ctx);
        return nullptr;
    }

    return ctx;
}

inline llama_context *needed_context(llama_model *model, const llama_context_params &params, bool is_ours) {
    auto *ctx = new_context(model, params, is_ours);

    if (!ctx) {
        printf("    FAIL: no context with %s cache\n", is_ours ? "this" : "llama.cpp's");
        exit(1);
    }

    return ctx;
}

class scene_run {
  public:
    scene_run(llama_model *model, llama_context *ctx, bool is_ours)
        : model(model), ctx(ctx), mem(llama_get_memory(ctx)), is_ours(is_ours) {}

    bool is_unified() const { return llama_n_ctx(ctx) == llama_n_ctx_seq(ctx); }

    llama_model *model;
    llama_context *ctx;
    llama_memory_t mem;
    bool is_ours;
    std::vector<scene_note> notes;

    void note(const std::string &label, long long value) { notes.push_back({label, value, {}}); }

    void note_row(const std::string &label, const float *row, int n) {
        notes.push_back({label, row != nullptr, row ? std::vector<float>(row, row + n) : std::vector<float>()});
    }

    // pos_min depends, in models with windows, on when tokens are dropped that no window shows any more
    void note_positions(const std::string &label) {
        for (llama_seq_id s = 0; s < 4; ++s) {
            const llama_pos min = llama_memory_seq_pos_min(mem, s);

            note(label + ": pos_min of " + std::to_string(s), llama_model_n_swa(model) > 0 ? min >= 0 : min);
            note(label + ": pos_max of " + std::to_string(s), llama_memory_seq_pos_max(mem, s));
        }
    }

    // whether a token of the batch would see tokens that are gone: a sequence was cut further back than windows last
    bool is_blind(const scene_batch &tokens) const {
        const int n_swa = llama_model_n_swa(model);

        return n_swa > 0 && std::any_of(tokens.begin(), tokens.end(), [&](const scene_token &token) {
                   return llama_memory_seq_pos_min(mem, token.seq_ids[0]) > std::max(0, token.pos - n_swa + 1);
               });
    }

    // tokens [first, end) of a text, which are to stand at pos and after it
    scene_batch tokens(uint32_t text, int first, int end, std::vector<llama_seq_id> seq_ids, llama_pos pos) const {
        scene_batch res;

        for (int i = first; i < end; ++i) {
            res.push_back({text_token(model, text, i), pos + i - first, seq_ids, false});
        }

        return res;
    }

    // decodes, and returns the status
    int decode(const scene_batch &tokens) {
        auto batch = llama_batch_init((int32_t)tokens.size(), 0, 256);

        batch.n_tokens = (int32_t)tokens.size();
        for (int32_t i = 0; i < batch.n_tokens; ++i) {
            batch.token[i] = tokens[i].id;
            batch.pos[i] = tokens[i].pos;
            batch.n_seq_id[i] = (int32_t)tokens[i].seq_ids.size();
            std::copy(tokens[i].seq_ids.begin(), tokens[i].seq_ids.end(), batch.seq_id[i]);
            batch.logits[i] = tokens[i].has_logits;
        }

        const int res = llama_decode(ctx, batch);

        llama_batch_free(batch);

        return res;
    }

    // decodes, and notes the status and the logits asked for
    int feed(const std::string &label, const scene_batch &tokens) {
        const bool blind = is_blind(tokens);
        const int res = decode(tokens);

        note(label + ": decode", res);
        for (size_t i = 0; i < tokens.size() && res == 0; ++i) {
            if (tokens[i].has_logits) {
                note_row(label + ": logits of token " + std::to_string(i), llama_get_logits_ith(ctx, (int32_t)i),
                         llama_vocab_n_tokens(llama_model_get_vocab(model)));
                notes.back().is_blind = blind;
            }
        }

        return res;
    }

    // feeds tokens of a text to a sequence, at their own positions, and notes the logits of the last
    int feed(const std::string &label, llama_seq_id seq_id, uint32_t text, int first, int end) {
        auto batch = tokens(text, first, end, {seq_id}, first);

        batch.back().has_logits = true;

        return feed(label, batch);
    }

    // the token that the last logits make most likely
    llama_token best(int32_t i = -1) const {
        const float *row = llama_get_logits_ith(ctx, i);

        return (llama_token)(std::max_element(row, row + llama_vocab_n_tokens(llama_model_get_vocab(model))) - row);
    }
};

// a run in a context of its own; the program ends if there is none
class scene_context : public scene_run {
  public:
    scene_context(llama_model *model, const llama_context_params &params, bool is_ours = true)
        : scene_run(model, needed_context(model, params, is_ours), is_ours) {}
    ~scene_context() { llama_free(ctx); }

    scene_context(const scene_context &) = delete;

    bytes save(llama_seq_id seq_id, llama_state_seq_flags flags = 0) const { return save_state(ctx, seq_id, flags); }
    size_t load(const bytes &state, llama_seq_id seq_id, llama_state_seq_flags flags = 0) {
        return load_state(ctx, state, seq_id, flags);
    }

    // feeds a sequence further tokens of a text, and returns the logits of the last
    const std::vector<float> &go_on(llama_seq_id seq_id, uint32_t text, int n) {
        const int next = llama_memory_seq_pos_max(mem, seq_id) + 1;

        feed("goes on", seq_id, text, next, next + n);

        return notes.back().row;
    }
};

using scene_fn = std::function<void(scene_run &)>;

// the squared difference over the squared length
inline double nmse(const std::vector<float> &a, const std::vector<float> &b) {
    double difference = 0.0;
    double length = 1e-30;

    for (size_t i = 0; i < a.size(); ++i) {
        difference += (a[i] - b[i]) * (double)(a[i] - b[i]);
        length += b[i] * (double)b[i];
    }

    return difference / length;
}

// prints where notes differ first, and returns whether they do by more than `limit`
inline bool differ(const std::vector<scene_note> &ours, const std::vector<scene_note> &own, double limit,
                   double *most) {
    if (ours.size() != own.size()) {
        printf("    %zu notes with this cache, %zu with llama.cpp's\n", ours.size(), own.size());
    }

    int n_different = ours.size() != own.size();

    for (size_t i = 0; i < std::min(ours.size(), own.size()) && n_different < 10; ++i) {
        const auto &a = ours[i];
        const auto &b = own[i];

        if (a.label != b.label || a.value != b.value || a.row.size() != b.row.size()) {
            printf("    %s: %lld with this cache; %s: %lld with llama.cpp's\n", a.label.c_str(), a.value,
                   b.label.c_str(), b.value);
            ++n_different;
            continue;
        }

        if (b.is_blind) {
            continue;
        }

        const double error = a.is_blind ? 1.0 : nmse(a.row, b.row);

        *most = std::max(*most, error);
        if (!(error <= limit)) {
            printf("    %s: differs by %.2g\n", a.label.c_str(), error);
            ++n_different;
        }
    }

    return n_different > 0;
}

inline std::vector<scene_note> play(llama_model *model, const llama_context_params &params, bool is_ours,
                                    const scene_fn &scene) {
    auto *ctx = new_context(model, params, is_ours);

    if (!ctx) {
        printf("    no context with %s cache\n", is_ours ? "this" : "llama.cpp's");
        return {{is_ours ? "no context" : "without a context", 0, {}}};
    }

    scene_run run(model, ctx, is_ours);

    scene(run);
    llama_free(ctx);

    return std::move(run.notes);
}

// plays a scene with both caches, and returns whether they agree
inline bool compare(const std::string &name, llama_model *model, const llama_context_params &params,
                    const scene_fn &scene, double limit) {
    const auto own = play(model, params, false, scene);
    const auto ours = play(model, params, true, scene);

    double most = 0.0;
    const bool ok = !differ(ours, own, limit, &most);

    printf("  %-4s %s (%zu notes, at most %.1g apart)\n", ok ? "ok" : "FAIL", name.c_str(), own.size(), most);
    fflush(stdout);

    return ok;
}
