// Models with rows that stand for several tokens (DeepSeek V4): long texts as on llama.cpp's own cache, and what that
// cannot do, as if the tokens had been fed to a new context.
//   test-kvcache-blocks MODEL...
// Its tokens choose few rows.
#include "expect.h"
#include "scene.h"

#include "llama-cpp.h"
#include "llama-model.h"

#include <cstring>

static constexpr double LIMIT = 1e-9; // of squared differences
static constexpr int N_TOKENS = 700;  // several blocks of 128
static llama_context_params params_of(uint32_t n_ubatch) {
    auto params = exact_params();

    params.n_ctx = 4096;
    params.n_batch = 1024;
    params.n_ubatch = n_ubatch;

    return params;
}

// a context of this cache
struct played {
    played(llama_model *model, uint32_t n_ubatch = 64)
        : ctx(new_context(model, params_of(n_ubatch), true)), run(model, ctx.get(), true) {}

    // logits of the last token of those that follow in a sequence
    const std::vector<float> &feed(llama_seq_id seq, uint32_t text, int first, int end) {
        run.feed("fed", seq, text, first, end);

        return run.notes.back().row;
    }

    llama_context_ptr ctx;
    scene_run run;
};

static double error_of(const std::vector<float> &a, const std::vector<float> &b) {
    return a.empty() || a.size() != b.size() ? INFINITY : nmse(a, b);
}

// logits of a new context behind tokens [0, n) of text 1 and `n_more` tokens of text 2
static std::vector<float> fresh(llama_model *model, int n, int n_more) {
    played p(model);

    if (n > 0) {
        p.feed(0, 1, 0, n);
    }
    return p.feed(0, 2, n, n + n_more);
}

// a text at once, then by single tokens, and another sequence beside it
static void scene_long(scene_run &run) {
    run.feed("prompt", 0, 1, 0, N_TOKENS);
    for (int i = N_TOKENS; i < N_TOKENS + 70; ++i) {
        run.feed("token", 0, 1, i, i + 1);
    }
    run.feed("another", 1, 2, 0, 130);

    for (int i = 130; i < 140; ++i) {
        auto batch = run.tokens(2, i, i + 1, {1}, i);
        const auto more = run.tokens(1, i, i + 1, {0}, N_TOKENS + i - 60);

        batch.insert(batch.end(), more.begin(), more.end());
        for (auto &token : batch) {
            token.has_logits = true;
        }
        run.feed("both", batch);
    }
}

static void test_long(llama_model *model) {
    for (const uint32_t n_ubatch : {512, 64, 7}) {
        auto params = params_of(n_ubatch);

        params.kv_unified = false; // llama.cpp's own cache is never
        n_failed += !compare("ubatches of " + std::to_string(n_ubatch), model, params, scene_long, LIMIT);
    }
}

// any tail goes that windows allow
static void test_cuts(llama_model *model) {
    for (const int n : {N_TOKENS - 1, N_TOKENS - 2, 640, 639, 643, 641, 577, 512, 511, 300, 128, 3, 0}) {
        played p(model);
        const auto name = "cut at " + std::to_string(n);

        p.feed(0, 1, 0, N_TOKENS);

        const llama_pos first = llama_memory_seq_pos_min(p.run.mem, 0);
        const bool is_cut = llama_memory_seq_rm(p.run.mem, 0, n, -1);
        const int n_left = is_cut ? n : N_TOKENS;

        if (is_cut != (n == 0 || n > first) || llama_memory_seq_pos_max(p.run.mem, 0) != n_left - 1) {
            expect(false, name + ", as pos_min " + std::to_string(first) + " says");
            continue;
        }

        const double error = error_of(p.feed(0, 2, n_left, n_left + 9), fresh(model, n_left, 9));

        expect(error <= LIMIT, name + (is_cut ? "" : ", refused"), error);
    }
}

static void test_speculation(llama_model *model) {
    played p(model);

    p.feed(0, 1, 0, 120);
    for (int i = 120; i < 140; ++i) { // guesses that are wrong
        p.feed(0, 3, i, i + 5);
        llama_memory_seq_rm(p.run.mem, 0, i, -1);
        p.feed(0, 1, i, i + 1);
    }

    const double error = error_of(p.feed(0, 2, 140, 149), fresh(model, 140, 9));

    expect(error <= LIMIT, "guesses removed", error);
}

static void test_forks(llama_model *model) {
    played p(model);

    p.feed(0, 1, 0, 300);
    llama_memory_seq_cp(p.run.mem, 0, 1, -1, -1);
    llama_memory_seq_cp(p.run.mem, 0, 2, 0, 256);
    llama_memory_seq_cp(p.run.mem, 0, 3, 0, 128);
    llama_memory_seq_cp(p.run.mem, 0, 3, 128, 300);
    llama_memory_seq_cp(p.run.mem, 0, 2, 256, 261);
    p.feed(0, 3, 300, 340);
    llama_memory_seq_cp(p.run.mem, 0, 2, 261, 270); // both begin alike
    for (const auto &[seq, n] : {std::pair<int, int>{1, 300}, {2, 270}, {3, 300}}) {
        const double error = error_of(p.feed(seq, 2, n, n + 9), fresh(model, n, 9));

        expect(error <= LIMIT, "copy " + std::to_string(seq), error);
    }

    llama_memory_seq_rm(p.run.mem, 1, -1, -1);
    llama_memory_seq_cp(p.run.mem, 0, 1, 100, 300); // not from a block's beginning
    expect(llama_memory_seq_pos_max(p.run.mem, 1) == -1, "a range from within a block is refused");
}

// decodes one token of several sequences, or tokens of such
static int decode(played &p, uint32_t text, int first, int end, const std::vector<llama_seq_id> &seqs) {
    return p.run.decode(p.run.tokens(text, first, end, seqs, first));
}

static void test_coupled(llama_model *model) {
    played p(model);

    decode(p, 1, 0, 150, {0, 1, 2});
    decode(p, 1, 150, 200, {0, 1, 2});
    p.feed(0, 3, 200, 230);

    for (const llama_seq_id seq : {1, 2}) {
        const double error = error_of(p.feed(seq, 2, 200, 209), fresh(model, 200, 9));

        expect(error <= LIMIT, "tokens of several sequences, " + std::to_string(seq), error);
    }

    auto batch = p.run.tokens(4, 0, 3, {3}, 0); // differ, in the same decode
    const auto others = p.run.tokens(5, 209, 212, {1}, 209);
    const auto both = p.run.tokens(6, 212, 215, {1, 2}, 212);

    batch.insert(batch.end(), others.begin(), others.end());
    for (const auto &token : p.run.tokens(7, 209, 212, {2}, 209)) {
        batch.push_back(token);
    }
    batch.insert(batch.end(), both.begin(), both.end());
    expect(p.run.decode(batch) != 0 && llama_memory_seq_pos_max(p.run.mem, 3) == -1,
           "tokens behind those that differ are refused");

    const bool is_refused = decode(p, 1, 209, 215, {1, 3}) != 0 || decode(p, 1, 230, 235, {0, 1}) != 0;

    expect(is_refused && llama_memory_seq_pos_max(p.run.mem, 0) == 229, "tokens of sequences that differ are refused");
}

static void test_moves(llama_model *model) {
    played p(model);

    p.feed(0, 1, 0, 300);
    llama_memory_seq_add(p.run.mem, 0, 100, -1, -10);
    llama_memory_seq_div(p.run.mem, 0, 0, 64, 2);

    const double error = error_of(p.feed(0, 2, 300, 309), fresh(model, 300, 9));

    auto params = params_of(64);

    params.swa_full = true;

    llama_context_ptr keeping(new_context(model, params, true));
    const bool can_shift = llama_memory_can_shift(p.run.mem) || llama_memory_can_shift(llama_get_memory(keeping.get()));

    expect(!can_shift && error <= LIMIT, "tokens that are to move stay", error);
}

// a sequence has as many tokens as the context says, although its layers have room for more
static void test_end(llama_model *model) {
    auto params = params_of(64);

    params.n_ctx = 256;

    llama_context_ptr ctx(new_context(model, params, true));
    scene_run run(model, ctx.get(), true);

    expect(run.decode(run.tokens(1, 0, 256, {0}, 0)) == 0 && run.decode(run.tokens(1, 256, 257, {0}, 256)) == 1 &&
               llama_memory_seq_pos_max(run.mem, 0) == 255,
           "a full context");
}

// the bytes that a context says it takes
static size_t stated_bytes(llama_model *model, uint32_t n_ctx) {
    auto params = params_of(64);
    size_t res = 0;

    params.n_ctx = n_ctx;

    llama_context_ptr ctx(new_context(model, params, true));

    for (const auto &part : llama_get_memory(ctx.get())->memory_breakdown()) {
        res += part.second;
    }

    return res;
}

// windows do not grow with the context, and rows that stand for several tokens are few
static void test_memory(llama_model *model) {
    const size_t n_more = (stated_bytes(model, 32768) - stated_bytes(model, 16384)) / 16384;

    expect(n_more < 1024, "a context takes " + std::to_string(n_more) + " bytes for one more token");
}

using bytes = std::vector<uint8_t>;

static bytes state_of(played &p, llama_seq_id seq, llama_state_seq_flags flags) {
    bytes res(llama_state_seq_get_size_ext(p.ctx.get(), seq, flags));

    res.resize(llama_state_seq_get_data_ext(p.ctx.get(), res.data(), res.size(), seq, flags));

    return res;
}

static bool set_state(played &p, const bytes &state, llama_seq_id seq, llama_state_seq_flags flags) {
    return llama_state_seq_set_data_ext(p.ctx.get(), state.data(), state.size(), seq, flags) > 0;
}

// sequences go on from a state as from their tokens, wherever in a block they are
static void test_states(llama_model *model, const char *type) {
    set_types(type, type);
    for (const int n : {1, 3, 4, 127, 128, 130, 333, 515}) {
        played from(model);
        played to(model, 512);
        const auto name = std::string("state of ") + std::to_string(n) + " tokens, " + type;

        from.feed(0, 1, 0, n);
        to.feed(1, 3, 0, 50);
        to.feed(2, 3, 0, 200);

        bool is_set = set_state(to, state_of(from, 0, 0), 2, 0);
        const double error = error_of(to.feed(2, 2, n, n + 9), fresh(model, n, 9));

        expect(is_set && error <= LIMIT, name, error);

        // of all sequences
        from.feed(3, 3, 0, 50);

        bytes whole(llama_state_get_size(from.ctx.get()));

        whole.resize(llama_state_get_data(from.ctx.get(), whole.data(), whole.size()));
        is_set = llama_state_set_data(to.ctx.get(), whole.data(), whole.size()) == whole.size();

        const double error_0 = error_of(to.feed(0, 2, n, n + 9), fresh(model, n, 9));
        const bool is_alone =
            llama_memory_seq_pos_max(to.run.mem, 1) == -1 && llama_memory_seq_pos_max(to.run.mem, 3) == 49;

        expect(is_set && is_alone && error_0 <= LIMIT, name + ", of all sequences", error_0);
    }
    unset_types();
}

// the checkpoints of llama-server: windows of an earlier moment, while the other rows stay
static void test_checkpoints(llama_model *model) {
    for (const int n : {5, 128, 131, 200}) {
        played p(model);

        p.feed(0, 1, 0, n);

        const auto state = state_of(p, 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);

        p.feed(0, 1, n, N_TOKENS);

        const bool is_set = set_state(p, state, 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) &&
                            llama_memory_seq_pos_max(p.run.mem, 0) == n - 1 &&
                            llama_memory_seq_pos_min(p.run.mem, 0) < n && llama_memory_seq_rm(p.run.mem, 0, n, -1);
        const double error = error_of(p.feed(0, 2, n, n + 9), fresh(model, n, 9));

        expect(is_set && error <= LIMIT, "checkpoint at " + std::to_string(n), error);
    }
}

static void test_damaged_states(llama_model *model) {
    played p(model);

    p.feed(0, 1, 0, 300);
    p.feed(1, 2, 0, 20);

    const auto state = state_of(p, 0, 0);
    const auto partial = state_of(p, 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    int n_refused = !set_state(p, partial, 2, 0) + !set_state(p, state, 2, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) +
                    !set_state(p, partial, 2, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);

    for (const size_t n_left : {size_t(0), size_t(3), size_t(40), state.size() / 2, state.size() - 1}) {
        n_refused += !set_state(p, bytes(state.begin(), state.begin() + n_left), 2, 0);
    }
    for (size_t i = 8; i < 64; i += 4) { // numbers at the beginning, behind the sequence's own
        auto damaged = state;

        damaged[i + 3] ^= 0x40;
        n_refused += !set_state(p, damaged, 2, 0);
    }

    const double error = error_of(p.feed(1, 2, 20, 29), fresh(model, 0, 29));

    auto params = params_of(64); // of one sequence
    bytes whole(llama_state_get_size(p.ctx.get()));

    params.n_seq_max = 1;
    whole.resize(llama_state_get_data(p.ctx.get(), whole.data(), whole.size()));

    llama_context_ptr small(new_context(model, params, true));

    n_refused += llama_state_set_data(small.get(), whole.data(), whole.size()) == 0;

    expect(n_refused == 23 && llama_memory_seq_pos_max(p.run.mem, 2) == -1 && error <= LIMIT,
           "damaged states, " + std::to_string(n_refused) + " of 23 refused", error);
}

static bool has_blocks(const llama_model *model) {
    const auto &ratios = model->hparams.dsv4_compress_ratios;

    return std::any_of(ratios.begin(), ratios.end(), [](uint32_t ratio) { return ratio > 0; });
}

int main(int argc, char **argv) {
    begin_program();

    for (int i = 1; i < argc; ++i) {
        llama_model_ptr model(llama_model_load_from_file(argv[i], llama_model_default_params()));

        printf("%s\n", argv[i]);
        if (!model || !llama_context_ptr(new_context(model.get(), params_of(64), true))) {
            printf("  FAIL: no such model, or it is not served\n");
            return 1;
        }
        test_moves(model.get());
        if (!has_blocks(model.get())) {
            continue; // llama.cpp's own cache ends the process
        }
        test_long(model.get());
        test_cuts(model.get());
        test_speculation(model.get());
        test_forks(model.get());
        test_coupled(model.get());
        test_end(model.get());
        test_memory(model.get());
        for (const char *type : {"f32", "int8"}) {
            test_states(model.get(), type);
        }
        test_checkpoints(model.get());
        test_damaged_states(model.get());
    }

    return argc < 2 || n_failed > 0;
}
