// Models with rows that stand for several tokens, whose indexers pool keys (GLM-5.3 Flash, Qwen 4) or whose layers have
// such rows (DeepSeek V4), on this cache and on llama.cpp's own.
//   test-kvcache-strides MODEL...
// Scenes are compared with llama.cpp's own cache.  What that cannot do is as if the tokens had been fed to a new
// context.  States have a format of their own: a sequence that was restored is to go on as if it had never been saved.
// What is refused is to change nothing.
#include "expect.h"
#include "images.h"
#include "scene.h"
#include "scenes-decode.h"

#include "llama-model.h"

static constexpr double LIMIT = 1e-9; // of squared differences

static bool is_qwen4(const llama_model *model) { return model->arch == LLM_ARCH_QWEN4EXP; }
static bool is_deepseek4(const llama_model *model) { return model->arch == LLM_ARCH_DEEPSEEK4; }
static bool is_sparse(const llama_model *model) { return model->hparams.indexer_top_k < 256; }

// whether layers of DeepSeek V4 have rows that stand for several tokens; else llama.cpp's own cache ends the process
static bool has_blocks(const llama_model *model) {
    const auto &ratios = model->hparams.dsv4_compress_ratios;

    return !is_deepseek4(model) || std::any_of(ratios.begin(), ratios.end(), [](uint32_t ratio) { return ratio > 0; });
}

// with flash attention llama.cpp's own cache rounds queries
static llama_context_params params_of(bool is_unified = true) {
    auto params = exact_params();

    params.kv_unified = is_unified;
    params.n_ctx = is_unified ? 4096 : 4 * 1024;
    params.n_batch = 1024;
    params.n_rs_seq = 6;

    return params;
}

static double error_of(const std::vector<float> &a, const std::vector<float> &b) {
    return a.empty() || a.size() != b.size() ? INFINITY : nmse(a, b);
}

// expects the logits of 9 further tokens behind the first n of text 1
static void expect_fresh(scene_context &c, llama_seq_id seq_id, int n, const std::string &what) {
    scene_context fresh(c.model, params_of());

    if (n > 0) {
        fresh.feed("text", 0, 1, 0, n);
    }

    const double error = error_of(c.go_on(seq_id, 2, 9), fresh.go_on(0, 2, 9));

    expect(error <= LIMIT && llama_memory_seq_pos_max(c.mem, seq_id) == n + 8, what, error);
}

//
// scenes
//

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

// a text at once, of several blocks of 128, then by single tokens, and another sequence beside it
static void scene_long(scene_run &run) {
    run.feed("prompt", 0, 1, 0, 700);
    for (int i = 700; i < 770; ++i) {
        run.feed("token", 0, 1, i, i + 1);
    }
    run.feed("another", 1, 2, 0, 130);

    for (int i = 130; i < 140; ++i) {
        auto batch = run.tokens(2, i, i + 1, {1}, i);
        const auto more = run.tokens(1, i, i + 1, {0}, 640 + i);

        batch.insert(batch.end(), more.begin(), more.end());
        for (auto &token : batch) {
            token.has_logits = true;
        }
        run.feed("both", batch);
    }
}

static void test_scenes(llama_model *model) {
    const bool has_exact_choice = !is_qwen4(model) || !is_sparse(model);
    const auto &prompt = is_deepseek4(model) ? scene_long : has_exact_choice ? scene_prompt : scene_choices;

    const auto check = [&](const std::string &name, const llama_context_params &params, const scene_fn &scene) {
        n_failed += !compare(name, model, params, scene, 1e-8);
    };

    for (const uint32_t n_ubatch : {512, 64, 7, 1}) {
        auto params = params_of(!is_deepseek4(model)); // of which llama.cpp's own cache is never unified

        params.n_rs_seq = 0;
        params.n_ubatch = n_ubatch;
        check("prompt in ubatches of " + std::to_string(n_ubatch), params, prompt);
    }
    if (!has_exact_choice || is_deepseek4(model)) {
        return;
    }
    for (const bool is_unified : {true, false}) {
        const std::string suffix = is_unified ? ", unified" : "";

        check("interleaved" + suffix, params_of(is_unified), scene_interleaved);
        check("edits" + suffix, params_of(is_unified), scene_edits);
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
    expect(most > 1e-6, "which blocks are chosen matters", most);
}

//
// DeepSeek V4, beyond what llama.cpp's own cache can do
//

// any tail goes that windows allow
static void test_cuts(llama_model *model) {
    static constexpr int N_TOKENS = 700;

    for (const int n : {N_TOKENS - 1, N_TOKENS - 2, 640, 639, 643, 641, 577, 512, 511, 300, 128, 3, 0}) {
        scene_context c(model, params_of());
        const auto name = "cut at " + std::to_string(n);

        c.feed("text", 0, 1, 0, N_TOKENS);

        const llama_pos first = llama_memory_seq_pos_min(c.mem, 0);
        const bool is_cut = llama_memory_seq_rm(c.mem, 0, n, -1);

        expect(is_cut == (n == 0 || n > first), name + ", as pos_min says", first);
        expect_fresh(c, 0, is_cut ? n : N_TOKENS, name);
    }
}

static void test_speculation(llama_model *model) {
    scene_context c(model, params_of());

    c.feed("text", 0, 1, 0, 120);
    for (int i = 120; i < 140; ++i) { // guesses that are wrong
        c.feed("guesses", 0, 3, i, i + 5);
        llama_memory_seq_rm(c.mem, 0, i, -1);
        c.feed("text", 0, 1, i, i + 1);
    }
    expect_fresh(c, 0, 140, "guesses removed");
}

static void test_forks(llama_model *model) {
    scene_context c(model, params_of());

    c.feed("text", 0, 1, 0, 300);
    llama_memory_seq_cp(c.mem, 0, 1, -1, -1);
    llama_memory_seq_cp(c.mem, 0, 2, 0, 256);
    llama_memory_seq_cp(c.mem, 0, 3, 0, 128);
    llama_memory_seq_cp(c.mem, 0, 3, 128, 300);
    llama_memory_seq_cp(c.mem, 0, 2, 256, 261);
    c.feed("another", 0, 3, 300, 340);
    llama_memory_seq_cp(c.mem, 0, 2, 261, 270); // both begin alike
    for (const auto &[seq, n] : {std::pair<int, int>{1, 300}, {2, 270}, {3, 300}}) {
        expect_fresh(c, seq, n, "copy " + std::to_string(seq));
    }
}

static void test_coupled(llama_model *model) {
    scene_context c(model, params_of());

    for (const int first : {0, 150}) {
        c.decode(c.tokens(1, first, first ? 200 : 150, {0, 1, 2}, first));
    }
    c.feed("alone", 0, 3, 200, 230);
    for (const llama_seq_id seq : {1, 2}) {
        expect_fresh(c, seq, 200, "tokens of several sequences, " + std::to_string(seq));
    }

    auto batch = c.tokens(5, 209, 212, {1}, 209); // differ, in the same decode

    for (const auto &more : {c.tokens(7, 209, 212, {2}, 209), c.tokens(6, 212, 215, {1, 2}, 212)}) {
        batch.insert(batch.end(), more.begin(), more.end());
    }
    expect(c.decode(batch) != 0 && llama_memory_seq_pos_max(c.mem, 1) == 208, "tokens behind those that differ");
}

// the bytes that a context says it takes
static size_t stated_bytes(llama_model *model, uint32_t n_ctx) {
    auto params = params_of();
    size_t res = 0;

    params.n_ctx = n_ctx;
    for (const auto &part : scene_context(model, params).mem->memory_breakdown()) {
        res += part.second;
    }

    return res;
}

// windows do not grow with the context, and rows that stand for several tokens are few
static void test_memory(llama_model *model) {
    const size_t n_more = (stated_bytes(model, 32768) - stated_bytes(model, 16384)) / 16384;

    expect(n_more < 1024, "the bytes that a context takes for one more token", n_more);
}

//
// states
//

static constexpr llama_state_seq_flags PARTIAL = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;

// returns the logits of ten further tokens
static std::vector<float> ten_more(scene_context &c, llama_seq_id seq_id, uint32_t text) {
    std::vector<float> res;

    for (int i = 0; i < 10; ++i) {
        const auto &row = c.go_on(seq_id, text, 1);

        res.insert(res.end(), row.begin(), row.end());
    }

    return res;
}

// sequences go on from a state as from their tokens, wherever in a block they are
static void test_states(llama_model *model, const char *type, int n) {
    set_types(type, type);

    const std::string suffix = ", " + std::to_string(n) + " tokens, " + type;
    scene_context from(model, params_of());
    scene_context to(model, params_of());
    scene_context to_one(model, params_of());

    unset_types();
    from.feed("prompt", 0, 1, 0, n);
    from.feed("another", 1, 2, 0, 30);
    llama_memory_seq_cp(from.mem, 0, 2, -1, -1);
    from.feed("behind", 2, 3, n, n + 8);
    to.feed("before", 3, 7, 0, 50);
    to_one.feed("before", 3, 7, 0, 200);
    to_one.feed("beside", 1, 7, 0, 50);

    const auto all = from.save(-1);
    const auto one = from.save(0);

    expect(to.load(all, -1) && to.save(-1) == all && llama_memory_seq_pos_max(to.mem, 3) == -1, "all" + suffix);
    expect(to_one.load(one, 3) && to_one.save(3).size() == one.size(), "a sequence" + suffix);
    expect(n < 150 || !llama_memory_seq_rm(to_one.mem, 3, n - 3, -1), "does not go back" + suffix);
    for (const llama_seq_id s : {0, 1, 2}) {
        const auto wanted = ten_more(from, s, 5);

        expect(ten_more(to, s, 5) == wanted, "goes on, of all: " + std::to_string(s) + suffix);
        expect(s != 0 || ten_more(to_one, 3, 5) == wanted, "goes on" + suffix);
    }
    expect(llama_memory_seq_pos_max(to_one.mem, 1) == 49, "beside others" + suffix);

    // a checkpoint, behind which the sequence has gone on
    const auto partial = from.save(0, PARTIAL);
    const auto whole = from.save(0);

    from.go_on(0, 6, 500);
    expect(partial.size() < whole.size() && from.load(partial, 0, PARTIAL) &&
               llama_memory_seq_pos_max(from.mem, 0) == n + 9 && llama_memory_seq_rm(from.mem, 0, n + 10, -1),
           "a checkpoint" + suffix);
    expect(to.load(whole, 0) && ten_more(from, 0, 8) == ten_more(to, 0, 8), "goes on behind a checkpoint" + suffix);
}

// states that end too early, or are another model's, are refused; what else the context has goes on
static void test_wrong_states(llama_model *model) {
    auto params = params_of();
    scene_context from(model, params);
    scene_context to(model, params);

    params.n_seq_max = 1;

    scene_context small(model, params);

    from.feed("prompt", 0, 1, 0, 150);
    to.feed("prompt", 0, 1, 0, 150);

    const auto state = from.save(0);
    bool ok = true;

    const auto check = [&](bool holds, const char *what, size_t at) {
        if (!holds) {
            printf("    %s: byte %zu\n", what, at);
        }
        ok = ok && holds;
    };

    for (size_t n = 0; n < state.size(); n += 1 + state.size() / 40) {
        check(!to.load({state.begin(), state.begin() + n}, 1), "read a part", n);
        check(llama_memory_seq_pos_max(to.mem, 1) == -1, "left a part", n);
    }
    for (size_t at = 0; at < 120; at += 4) { // the layout, and how many tokens there are
        auto changed = state;

        changed[at] ^= 0x40;
        if (to.load(changed, 1)) {
            check(to.save(1).size() == state.size(), "read what was changed", at);
            llama_memory_seq_rm(to.mem, 1, -1, -1);
        }
    }
    const auto partial = from.save(0, PARTIAL);

    check(!to.load(partial, 1), "read a partial state as a whole one", 0);
    check(!to.load(state, 1, PARTIAL), "read a whole state as a partial one", 0);
    check(!to.load(partial, 1, PARTIAL), "read a partial state alone", 0);
    check(llama_memory_seq_pos_min(to.mem, 1) == -1, "left a part", 0);

    // no part of what was there before goes on
    scene_context again(model, params_of());

    again.feed("before", 0, 7, 0, 30);
    check(!again.load({state.begin(), state.begin() + 200}, 0), "read a part", 200);
    again.feed("prompt", 0, 1, 0, 150);
    check(ten_more(again, 0, 2) == ten_more(from, 0, 2), "goes on with what was there before", 0);
    from.feed("prompt", 1, 1, 0, 150);
    check(!small.load(from.save(-1), -1), "read more sequences than there can be", 0);

    expect(ok, "wrong states are refused");
    expect(ten_more(from, 1, 2) == ten_more(to, 0, 2), "goes on behind wrong states");
}

//
// what is refused
//

// tokens stay where they are, also those of layers without such rows, and with windows that keep all
static void test_moves(llama_model *model) {
    auto params = params_of();
    scene_context c(model, params);

    params.swa_full = true;
    c.feed("prompt", 0, 1, 0, 300);
    llama_memory_seq_add(c.mem, 0, 8, -1, 4);
    llama_memory_seq_div(c.mem, 0, 8, -1, 4);
    expect(!llama_memory_can_shift(c.mem) && !llama_memory_can_shift(scene_context(model, params).mem), "cannot shift");
    expect_fresh(c, 0, 300, "tokens do not move");
}

static void test_refusals(llama_model *model) {
    auto params = params_of();
    scene_context plain(model, params);
    scene_context c(model, params);

    params.n_ctx = 256;

    scene_context full(model, params);

    for (auto *of : {&plain, &c}) {
        of->feed("prompt", 0, 1, 0, 50);
    }
    expect(!llama_memory_seq_rm(c.mem, 0, 8, 16), "tokens in the middle stay");
    llama_memory_seq_cp(c.mem, 0, 1, 8, 16);
    llama_memory_seq_cp(c.mem, 0, 1, 10, 50);
    expect(llama_memory_seq_pos_max(c.mem, 1) == -1, "tokens from the middle are not copied");
    expect(c.decode(c.tokens(1, 60, 70, {0}, 60)) != 0, "positions are not left out");
    expect(c.decode(c.tokens(1, 3, 9, {2}, 3)) != 0, "a sequence begins at position 0");
    expect(c.decode(c.tokens(1, 50, 60, {0, 3}, 50)) != 0, "sequences do not share a part of a block");

    auto batch = c.tokens(1, 0, 3, {2}, 0); // differ, in the same decode

    for (const auto &more : {c.tokens(2, 0, 3, {3}, 0), c.tokens(3, 3, 9, {2, 3}, 3)}) {
        batch.insert(batch.end(), more.begin(), more.end());
    }
    expect(c.decode(batch) != 0 && llama_memory_seq_pos_max(c.mem, 2) == -1, "nor tokens behind those that differ");
    if (has_image_positions(model)) {
        expect(decode_image(c.ctx, 0, 50, 0, 3) != 0, "images");
    }
    if (!is_deepseek4(model)) {
        llama_set_causal_attn(c.ctx, false);
        expect(c.decode(c.tokens(1, 50, 60, {0}, 50)) != 0, "tokens do not see later ones");
        llama_set_causal_attn(c.ctx, true);
    }
    expect(ten_more(c, 0, 2) == ten_more(plain, 0, 2), "goes on behind refusals");

    // a sequence has as many tokens as the context says, although its layers may have room for more
    expect(full.decode(full.tokens(1, 0, 256, {0}, 0)) == 0 && full.decode(full.tokens(1, 256, 257, {0}, 256)) == 1 &&
               llama_memory_seq_pos_max(full.mem, 0) == 255,
           "a full context");
}

int main(int argc, char **argv) {
    int i = 0;

    const bool ok = on_models(argc, argv, [&](llama_model *model) {
        const char *path = argv[++i];

        test_moves(model);
        if (!has_blocks(model)) {
            return;
        }
        test_scenes(model);
        if (is_deepseek4(model)) {
            test_cuts(model);
            test_speculation(model);
            test_forks(model);
            test_coupled(model);
            test_memory(model);
        } else if (is_sparse(model)) {
            test_that_choices_matter(path, model);
        }
        for (const char *type : {"f32", "q8_0", "int8"}) {
            for (const int n : {3, 128, 333}) {
                test_states(model, type, n);
            }
        }
        test_wrong_states(model);
        test_refusals(model);
    });

    return !ok || n_failed > 0;
}
