// Models whose tokens choose rows by an indexer: what no comparison with llama.cpp's own cache shows.
//   test-kvcache-sparse MODEL...
// A model has one layer, so that keys depend on their own token alone.  Tokens that moved are then to be seen as those
// of a context in which they never stood elsewhere.  Its tokens choose few rows.
#include "expect.h"
#include "random.h"
#include "scene.h"

#include "ggml-cpp.h"
#include "gguf.h"
#include "llama-model.h"

#include <cstring>

// the difference of logits that are there
static double error_of(const std::vector<float> &a, const std::vector<float> &b) {
    return a.empty() || a.size() != b.size() ? INFINITY : nmse(a, b);
}

static llama_context_params params_of(ggml_type type) {
    auto params = exact_params();

    params.type_k = params.type_v = type;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.swa_full = true;
    params.kv_unified = false; // llama.cpp's own cache chooses no blocks in a pool
    params.n_seq_max = 2;

    return params;
}

// tokens 0 to 9, and 45 to 99, of a text, then 20 others; returns the logits of these
static std::vector<float> moved_text(llama_model *model, ggml_type type, bool is_ours, bool is_moved) {
    scene_context run(model, params_of(type), is_ours);

    if (is_moved) {
        run.decode(run.tokens(1, 0, 100, {0}, 0));
        llama_memory_seq_rm(run.mem, 0, 10, 45);
        llama_memory_seq_add(run.mem, 0, 45, -1, -35);
        llama_memory_seq_add(run.mem, 0, 0, -1, 7);
        llama_memory_seq_add(run.mem, 0, 0, -1, -7);
    } else {
        run.decode(run.tokens(1, 0, 10, {0}, 0));
        run.decode(run.tokens(1, 45, 100, {0}, 10));
    }

    auto last = run.tokens(2, 0, 20, {0}, 65);

    for (auto &token : last) {
        token.has_logits = true;
    }
    run.feed("goes on", last);

    std::vector<float> res;

    for (const auto &note : run.notes) {
        res.insert(res.end(), note.row.begin(), note.row.end());
    }

    return res;
}

static void test_moves(llama_model *model) {
    for (const auto type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q8_0}) {
        const std::string name = ggml_type_name(type);
        const double ours = error_of(moved_text(model, type, true, true), moved_text(model, type, true, false));

        // moved keys are rounded to their type once more, which may choose other rows
        expect(ours <= (type == GGML_TYPE_F32 ? 1e-9 : 0.5), "moved, " + name, ours);

        // llama.cpp's own cache moves no parts of quantised rows, and runs no Dots3-Note without a layer with a window
        if (type == GGML_TYPE_Q8_0 || model->arch == LLM_ARCH_DOTS3NOTE) {
            continue;
        }

        const double own = error_of(moved_text(model, type, false, true), moved_text(model, type, false, false));

        printf("       moved, %s, with llama.cpp's own cache: %.1g\n", name.c_str(), own);
    }
}

// sequences of a pool, in which other sequences' tokens lie between, choose as if each were alone
static void test_pool(llama_model *model) {
    std::vector<float> rows[2];

    for (const bool is_pool : {false, true}) {
        auto params = params_of(GGML_TYPE_F32);

        params.kv_unified = is_pool;

        scene_context run(model, params);

        for (int i = 0; i < 90; i += 3) {
            run.feed("one", 0, 1, i, i + 3);
            if (is_pool) {
                run.feed("other", 1, 2, i, i + 3);
            }
        }
        rows[is_pool] = run.notes[run.notes.size() - (is_pool ? 3 : 1)].row;
    }

    const double error = error_of(rows[1], rows[0]);

    expect(error < 1e-9, "in a pool", error);
}

// prompts by batches of several sizes choose the same rows
static void test_batches(llama_model *model) {
    std::vector<float> rows[2];

    for (const uint32_t n_ubatch : {64, 5}) {
        auto params = params_of(GGML_TYPE_F32);

        params.n_ubatch = n_ubatch;

        scene_context run(model, params);

        run.feed("prompt", 0, 1, 0, 130);
        rows[n_ubatch == 5] = run.notes.back().row;
    }

    const double error = error_of(rows[1], rows[0]);

    expect(error < 1e-9, "in ubatches of 64 and 5", error);
}

// makes tokens choose all rows
static std::vector<llama_model_kv_override> all_chosen(const llama_model *model) {
    char arch[64] = "";

    llama_model_meta_val_str(model, "general.architecture", arch, sizeof(arch));

    llama_model_kv_override res = {};

    res.tag = LLAMA_KV_OVERRIDE_TYPE_INT;
    snprintf(res.key, sizeof(res.key), "%s.attention.indexer.top_k", arch);
    res.val_i64 = 512;

    return {res, {}};
}

int main(int argc, char **argv) {
    begin_program();

    for (int i = 1; i < argc; ++i) {
        const gguf_context_ptr metadata(gguf_init_from_file(argv[i], {true, nullptr}));
        llama_model_ptr model(
            llama_model_init_from_user(metadata.get(), set_random, nullptr, llama_model_default_params()));

        printf("%s\n", argv[i]);
        if (!model || !new_context(model.get(), params_of(GGML_TYPE_F32), true)) {
            printf("  FAIL: no such model, or it is not served\n");
            return 1;
        }
        auto params = llama_model_default_params();
        auto overrides = all_chosen(model.get());

        params.kv_overrides = overrides.data();

        llama_model_ptr dense(llama_model_init_from_user(metadata.get(), set_random, nullptr, params));
        const double error = error_of(moved_text(model.get(), GGML_TYPE_F32, true, false),
                                      moved_text(dense.get(), GGML_TYPE_F32, true, false));
        expect(error > 1e-3, "which rows are chosen matters", error);

        test_moves(model.get());
        test_pool(model.get());
        test_batches(model.get());
    }

    return argc < 2 || n_failed > 0;
}
