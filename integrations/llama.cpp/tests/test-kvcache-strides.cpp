// Models whose indexer pools the keys of several tokens, on this cache and on llama.cpp's own.
//   test-kvcache-strides MODEL...
// Scenes are compared with llama.cpp's own cache.  States have a format of their own: a sequence that was restored is
// to go on as if it had never been saved.  What is refused is to change nothing.
#include "expect.h"
#include "images.h"
#include "scene.h"
#include "scenes-decode.h"

#include "llama-cpp.h"
#include "llama-model.h"

#include <cstring>

static bool is_qwen4(const llama_model *model) { return model->arch == LLM_ARCH_QWEN4EXP; }

static bool is_sparse(const llama_model *model) { return model->hparams.indexer_top_k < 256; }

// with flash attention llama.cpp's own cache rounds queries
static llama_context_params params_of(bool is_unified = true) {
    auto params = exact_params();

    params.kv_unified = is_unified;
    params.n_ctx = is_unified ? 512 : 4 * 512;
    params.n_rs_seq = 6;

    return params;
}

// sequences are copied at any position, go on, go back, and end
static void scene_edits(scene_run &run) {
    run.feed("prompt", 0, 1, 0, 101);
    run.note("back", llama_memory_seq_rm(run.mem, 0, 97, -1));
    run.feed("behind", 0, 2, 97, 110);
    llama_memory_seq_cp(run.mem, 0, 1, -1, -1);
    for (const llama_seq_id s : {1, 0, 1}) {
        const int next = llama_memory_seq_pos_max(run.mem, s) + 1;

        run.feed("copied", s, 10 + s, next, next + 7);
        run.note_positions("copied");
    }
    run.note("one less", llama_memory_seq_rm(run.mem, 1, llama_memory_seq_pos_max(run.mem, 1), -1));
    run.feed("anew", 1, 3, llama_memory_seq_pos_max(run.mem, 1) + 1, 140);
    llama_memory_seq_rm(run.mem, 0, -1, -1);
    run.feed("another", 0, 4, 0, 50);
    run.feed("one", 1, 3, 140, 141);
}

// Tokens of several sequences begin at the end of a block.
static void scene_shared(scene_run &run) {
    run.feed("all", run.tokens(1, 0, 64, {0, 1, 2}, 0));

    auto batch = run.tokens(2, 64, 75, {2, 1}, 64);

    batch.back().has_logits = true;
    run.feed("two", batch);
    for (const llama_seq_id s : {0, 1, 2}) {
        run.feed("alone", s, 4, llama_memory_seq_pos_max(run.mem, s) + 1, 90 + s);
    }
}

// llama.cpp's own cache adds cells of a further block to what tokens of Qwen 4 choose, unless their incomplete block
// lacks one token: only such a token is compared, where attention is in the last layer
static void scene_choices(scene_run &run) {
    const int ratio = 4; // of the models that tests write
    auto prompt = run.tokens(1, 0, 203, {0}, 0);

    for (auto &token : prompt) {
        token.has_logits = token.pos % ratio == ratio - 2;
    }
    run.feed("prompt", prompt);
    for (int i = 203; i < 240; ++i) {
        auto token = run.tokens(1, i, i + 1, {0}, i);

        token[0].has_logits = i % ratio == ratio - 2;
        run.feed("token", token);
    }
}

static void test_scenes(llama_model *model) {
    const bool has_exact_choice = !is_qwen4(model) || !is_sparse(model);

    const auto check = [&](const char *name, const llama_context_params &params, const scene_fn &scene) {
        n_failed += !compare(name, model, params, scene, 1e-8);
    };

    for (const uint32_t n_ubatch : {512, 64, 7, 1}) {
        auto params = params_of();

        params.n_rs_seq = 0;
        params.n_ubatch = n_ubatch;
        check(("prompt in ubatches of " + std::to_string(n_ubatch)).c_str(), params,
              has_exact_choice ? scene_prompt : scene_choices);
    }
    if (!has_exact_choice) {
        return;
    }
    for (const bool is_unified : {true, false}) {
        const std::string suffix = is_unified ? ", unified" : "";

        check(("interleaved" + suffix).c_str(), params_of(is_unified), scene_interleaved);
        check(("edits" + suffix).c_str(), params_of(is_unified), scene_edits);
    }
    if (!is_qwen4(model)) {
        check("shared tokens", params_of(), scene_shared);
    }
}

// else scenes would show nothing of what is chosen
static void test_that_choices_matter(const char *path, llama_model *model) {
    auto params = llama_model_default_params();
    llama_model_kv_override overrides[2] = {};

    overrides[0].tag = LLAMA_KV_OVERRIDE_TYPE_INT;
    overrides[0].val_i64 = 512;
    snprintf(overrides[0].key, sizeof(overrides[0].key), "%s.attention.indexer.top_k", llm_arch_name(model->arch));
    params.kv_overrides = overrides;

    llama_model_ptr dense(llama_model_load_from_file(path, params));
    const auto notes = play(model, params_of(), true, scene_choices);
    const auto all = play(dense.get(), params_of(), true, scene_choices);
    double most = 0.0;

    for (size_t i = 0; i < notes.size(); ++i) {
        most = std::max(most, notes[i].row.empty() ? 0.0 : nmse(notes[i].row, all[i].row));
    }
    expect(most > 1e-6, "which blocks are chosen matters, by " + std::to_string(most));
}

//
// states
//

static constexpr llama_state_seq_flags PARTIAL = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;

static std::vector<uint8_t> save(llama_context *ctx, llama_seq_id seq_id, llama_state_seq_flags flags) {
    std::vector<uint8_t> res(seq_id < 0 ? llama_state_get_size(ctx) : llama_state_seq_get_size_ext(ctx, seq_id, flags));

    res.resize(seq_id < 0 ? llama_state_get_data(ctx, res.data(), res.size())
                          : llama_state_seq_get_data_ext(ctx, res.data(), res.size(), seq_id, flags));

    return res;
}

static bool load(llama_context *ctx, llama_seq_id seq_id, const std::vector<uint8_t> &state,
                 llama_state_seq_flags flags) {
    const size_t n = seq_id < 0 ? llama_state_set_data(ctx, state.data(), state.size())
                                : llama_state_seq_set_data_ext(ctx, state.data(), state.size(), seq_id, flags);

    return n == state.size();
}

// returns the logits of ten further tokens
static std::vector<float> go_on(scene_run &run, llama_seq_id seq_id, uint32_t text) {
    run.notes.clear();
    for (int i = 0; i < 10; ++i) {
        const int next = llama_memory_seq_pos_max(run.mem, seq_id) + 1;

        run.feed("goes on", seq_id, text, next, next + 1);
    }

    std::vector<float> res;
    for (const auto &note : run.notes) {
        res.insert(res.end(), note.row.begin(), note.row.end());
    }

    return res;
}

struct fresh {
    fresh(llama_model *model, const llama_context_params &params)
        : ctx(new_context(model, params, true)), run(model, ctx.get(), true) {}

    llama_context_ptr ctx;
    scene_run run;
};

static void test_states(llama_model *model, ggml_type type) {
    auto params = params_of();

    params.n_ctx = 1024;
    params.type_k = params.type_v = type;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;

    const std::string suffix = std::string(", ") + ggml_type_name(type);
    fresh from(model, params);

    from.run.feed("prompt", 0, 1, 0, 203);
    from.run.feed("another", 1, 2, 0, 30);
    llama_memory_seq_cp(from.run.mem, 0, 2, -1, -1);
    from.run.feed("behind", 2, 3, 203, 211);

    const auto all = save(from.ctx.get(), -1, 0);
    const auto one = save(from.ctx.get(), 0, 0);

    fresh to(model, params);

    expect(load(to.ctx.get(), -1, all, 0) && save(to.ctx.get(), -1, 0) == all, "all sequences" + suffix);
    fresh to_one(model, params);
    to_one.run.feed("before", 3, 7, 0, 9);
    expect(load(to_one.ctx.get(), 3, one, 0) && !llama_memory_seq_rm(to_one.run.mem, 3, 200, -1) &&
               save(to_one.ctx.get(), 3, 0).size() == one.size(),
           "a sequence" + suffix);

    for (const llama_seq_id s : {0, 1, 2}) {
        const auto wanted = go_on(from.run, s, 5);

        expect(go_on(to.run, s, 5) == wanted, "goes on, of all: " + std::to_string(s) + suffix);
        if (s == 0) {
            expect(go_on(to_one.run, 3, 5) == wanted, "goes on" + suffix);
        }
    }

    // a checkpoint, behind which the sequence has gone on
    const llama_pos n_tokens = llama_memory_seq_pos_max(from.run.mem, 0) + 1;
    const auto partial = save(from.ctx.get(), 0, PARTIAL);
    const auto whole = save(from.ctx.get(), 0, 0);

    from.run.feed("further", 0, 6, n_tokens, n_tokens + 150);
    expect(partial.size() < whole.size() && load(from.ctx.get(), 0, partial, PARTIAL) &&
               llama_memory_seq_rm(from.run.mem, 0, n_tokens, -1),
           "a checkpoint" + suffix);
    expect(load(to.ctx.get(), 0, whole, 0) && go_on(from.run, 0, 8) == go_on(to.run, 0, 8),
           "goes on behind a checkpoint" + suffix);
}

// states that end too early, or are another model's, are refused; what else the context has goes on
static void test_wrong_states(llama_model *model) {
    fresh from(model, params_of());
    fresh to(model, params_of());

    from.run.feed("prompt", 0, 1, 0, 50);
    to.run.feed("prompt", 0, 1, 0, 50);

    const auto state = save(from.ctx.get(), 0, 0);
    bool ok = true;

    const auto check = [&](bool holds, const char *what, size_t at) {
        if (!holds) {
            printf("    %s: byte %zu\n", what, at);
        }
        ok = ok && holds;
    };

    for (size_t n = 1; n < state.size(); n += 1 + state.size() / 40) {
        check(!load(to.ctx.get(), 1, {state.begin(), state.begin() + n}, 0), "read a part", n);
        check(llama_memory_seq_pos_max(to.run.mem, 1) == -1, "left a part", n);
    }
    for (size_t at = 0; at < 120; at += 4) { // the layout, and how many tokens there are
        auto changed = state;

        changed[at] ^= 0x40;
        if (load(to.ctx.get(), 1, changed, 0)) {
            check(save(to.ctx.get(), 1, 0).size() == state.size(), "read what was changed", at);
            llama_memory_seq_rm(to.run.mem, 1, -1, -1);
        }
    }
    const auto partial = save(from.ctx.get(), 0, PARTIAL);

    check(!load(to.ctx.get(), 1, partial, 0), "read a partial state as a whole one", 0);
    check(!load(to.ctx.get(), 1, state, PARTIAL), "read a whole state as a partial one", 0);
    check(!load(to.ctx.get(), 1, partial, PARTIAL), "read a partial state alone", 0);
    check(llama_memory_seq_pos_min(to.run.mem, 1) == -1, "left a part", 0);

    // no part of what was there before goes on
    fresh again(model, params_of());

    again.run.feed("before", 0, 7, 0, 30);
    check(!load(again.ctx.get(), 0, {state.begin(), state.begin() + 200}, 0), "read a part", 200);
    again.run.feed("prompt", 0, 1, 0, 50);
    check(go_on(again.run, 0, 2) == go_on(from.run, 0, 2), "goes on with what was there before", 0);
    from.run.feed("prompt", 1, 1, 0, 50);

    expect(ok, "wrong states are refused");
    expect(go_on(from.run, 1, 2) == go_on(to.run, 0, 2), "goes on behind wrong states");
}

//
// what is refused
//

static void test_refusals(llama_model *model) {
    fresh plain(model, params_of());
    fresh tried(model, params_of());
    auto &run = tried.run;

    for (auto *of : {&plain, &tried}) {
        of->run.feed("prompt", 0, 1, 0, 50);
    }

    expect(!llama_memory_can_shift(run.mem), "cannot shift");
    llama_memory_seq_add(run.mem, 0, 8, -1, 4);
    llama_memory_seq_div(run.mem, 0, 8, -1, 4);
    expect(llama_memory_seq_pos_max(run.mem, 0) == 49, "tokens do not move");
    expect(!llama_memory_seq_rm(run.mem, 0, 8, 16), "tokens in the middle stay");
    llama_memory_seq_cp(run.mem, 0, 1, 8, 16);
    expect(llama_memory_seq_pos_max(run.mem, 1) == -1, "tokens from the middle are not copied");
    expect(run.decode(run.tokens(1, 60, 70, {0}, 60)) != 0, "positions are not left out");
    expect(run.decode(run.tokens(1, 3, 9, {2}, 3)) != 0, "a sequence begins at position 0");
    expect(run.decode(run.tokens(1, 50, 60, {0, 3}, 50)) != 0, "sequences do not share a part of a block");

    auto batch = run.tokens(1, 0, 3, {2}, 0); // differ, in the same decode

    for (const auto &more : {run.tokens(2, 0, 3, {3}, 0), run.tokens(3, 3, 9, {2, 3}, 3)}) {
        batch.insert(batch.end(), more.begin(), more.end());
    }
    expect(run.decode(batch) != 0 && llama_memory_seq_pos_max(run.mem, 2) == -1, "nor tokens behind those that differ");
    if (has_image_positions(model)) {
        expect(decode_image(tried.ctx.get(), 0, 50, 0, 3) != 0, "images");
    }
    llama_set_causal_attn(tried.ctx.get(), false);
    expect(run.decode(run.tokens(1, 50, 60, {0}, 50)) != 0, "tokens do not see later ones");
    llama_set_causal_attn(tried.ctx.get(), true);
    expect(go_on(run, 0, 2) == go_on(plain.run, 0, 2), "goes on behind refusals");
}

int main(int argc, char **argv) {
    begin_program();

    for (int i = 1; i < argc; ++i) {
        llama_model_ptr model(llama_model_load_from_file(argv[i], llama_model_default_params()));

        printf("%s\n", argv[i]);
        if (!model || !new_context(model.get(), params_of(), true)) {
            printf("  FAIL: no such model, or it is not served\n");
            return 1;
        }
        test_scenes(model.get());
        if (is_sparse(model.get())) {
            test_that_choices_matter(argv[i], model.get());
        }
        for (const auto type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q8_0}) {
            test_states(model.get(), type);
        }
        test_wrong_states(model.get());
        test_refusals(model.get());
    }

    return argc < 2 || n_failed > 0;
}
