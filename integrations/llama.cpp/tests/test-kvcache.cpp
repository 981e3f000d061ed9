// Plays scenes with this cache and with llama.cpp's own, on model files: both must see the same.
#include "scene.h"
#include "scenes-decode.h"
#include "scenes-sequences.h"

#include "ggml-opt.h"

#include <cstring>
#include <stdexcept>

static const char *only = nullptr; // a part of the names of the scenes to play

static bool check(const std::string &name, llama_model *model, const llama_context_params &params,
                  const scene_fn &scene, double limit = 1e-9) {
    return (only && name.find(only) == std::string::npos) || compare(name, model, params, scene, limit);
}

static bool test_decode(llama_model *model) {
    bool ok = true;

    for (const uint32_t n_ubatch : {512, 64, 7, 1}) {
        auto params = exact_params();

        params.n_ubatch = n_ubatch;
        ok = check("prompt in ubatches of " + std::to_string(n_ubatch), model, params, scene_prompt) && ok;
    }
    for (const bool is_unified : {true, false}) {
        auto params = exact_params();

        params.kv_unified = is_unified;
        ok = check(is_unified ? "interleaved, unified" : "interleaved", model, params, scene_interleaved) && ok;
    }
    ok = check("coupled", model, exact_params(), scene_coupled) && ok;
    ok = check("draft", model, exact_params(), scene_draft) && ok;
    ok = check("causality", model, exact_params(), scene_causality) && ok;

    return ok;
}

static bool test_embeddings(llama_model *model) {
    bool ok = true;

    for (const auto pooling : {LLAMA_POOLING_TYPE_MEAN, LLAMA_POOLING_TYPE_LAST, LLAMA_POOLING_TYPE_CLS}) {
        auto params = exact_params();

        params.embeddings = true;
        params.pooling_type = pooling;
        ok = check("embeddings, pooling " + std::to_string(pooling), model, params, scene_embeddings) && ok;

        params.attention_type = LLAMA_ATTENTION_TYPE_NON_CAUSAL;
        ok = check("embeddings, non-causal, pooling " + std::to_string(pooling), model, params, scene_embeddings) && ok;
    }

    return ok;
}

static bool test_sequences(llama_model *model) {
    bool ok = true;

    for (const bool swa_full : {false, true}) {
        auto params = exact_params();

        params.swa_full = swa_full;

        const std::string suffix = swa_full ? ", swa_full" : "";

        ok = check("forks" + suffix, model, params, scene_forks) && ok;
        ok = check("ranges" + suffix, model, params, scene_ranges) && ok;
        ok = check("cuts" + suffix, model, params, scene_cuts) && ok;
        ok = check("nothing" + suffix, model, params, scene_nothing) && ok;
        ok = check("moves" + suffix, model, params, scene_moves) && ok;
        ok = check("division" + suffix, model, params, scene_division) && ok;
        ok = check("divided positions" + suffix, model, params, scene_divided_positions) && ok;

        params.n_ctx = 256;
        params.n_seq_max = 1;
        ok = check("context shift" + suffix, model, params, scene_context_shift) && ok;
        ok = check("full" + suffix, model, params, scene_full) && ok;
        params.n_seq_max = 4;
        ok = check("full of sequences" + suffix, model, params, scene_full_of_sequences) && ok;
    }

    auto params = exact_params();

    params.kv_unified = false;
    params.n_ctx = 1024;
    ok = check("forks, not unified", model, params, scene_forks) && ok;
    ok = check("cuts, not unified", model, params, scene_cuts) && ok;
    ok = check("full, not unified", model, params, scene_full) && ok;

    return ok;
}

// what README.md says that this cache does otherwise
static bool test_differences(llama_model *model) {
    if (only && !strstr("differences", only)) {
        return true;
    }

    auto params = exact_params();

    params.kv_unified = false;

    scene_context run(model, params);

    const auto max = [&](llama_seq_id s) { return llama_memory_seq_pos_max(run.mem, s); };

    run.feed("prompt", 0, 1, 0, 40);
    llama_memory_seq_cp(run.mem, 0, 1, -1, -1);
    run.feed("another", 2, 2, 0, 20);

    bool ok = max(0) == 39 && max(1) == 39 && max(2) == 19;

    // other tokens are there
    llama_memory_seq_cp(run.mem, 0, 2, 10, 30);
    ok = ok && max(2) == 19 && llama_memory_seq_pos_min(run.mem, 2) == 0;

    // a range, though not unified
    llama_memory_seq_cp(run.mem, 0, 2, 20, 30);
    ok = ok && max(2) == 29;

    if (llama_memory_can_shift(run.mem)) {
        llama_memory_seq_add(run.mem, 0, 0, -1, 5);
        ok = ok && max(0) == 44 && max(1) == 39;
    }

    llama_memory_seq_keep(run.mem, 1);
    ok = ok && max(0) == -1 && max(1) == 39 && max(2) == -1;
    ok = run.feed("goes on", 1, 1, 40, 45) == 0 && ok;
    printf("  %-4s differences\n", ok ? "ok" : "FAIL");

    return ok;
}

// With M-RoPE tokens do not move, and neither does the recurrent state of a hybrid model.
static bool test_immovable(llama_model *model) {
    const auto rope = llama_model_rope_type(model);

    if ((rope != LLAMA_ROPE_TYPE_MROPE && rope != LLAMA_ROPE_TYPE_IMROPE) || (only && !strstr("immovable", only))) {
        return true;
    }

    bool ok = true;
    std::vector<float> rows[2];

    for (const bool is_moved : {false, true}) {
        scene_context run(model, exact_params());

        run.feed("prompt", 0, 1, 0, 40);
        if (is_moved) {
            llama_memory_seq_add(run.mem, 0, 0, -1, 5);
            llama_memory_seq_div(run.mem, 0, 0, -1, 2);
        }
        ok = ok && llama_memory_seq_pos_max(run.mem, 0) == 39;
        ok = run.feed("goes on", 0, 1, 40, 45) == 0 && ok;
        rows[is_moved] = run.notes.back().row;
    }
    ok = ok && !rows[0].empty() && rows[0] == rows[1];
    printf("  %-4s immovable\n", ok ? "ok" : "FAIL");

    return ok;
}

// a sequence with windows can be cut as far back as its smallest position says, and no further
static bool test_windows(llama_model *model) {
    const int n_swa = llama_model_n_swa(model);

    if (n_swa <= 0 || (only && std::string("windows").find(only) == std::string::npos)) {
        return true;
    }

    auto params = exact_params();

    params.n_ctx = 1024;

    scene_context run(model, params);

    for (int i = 0; i < 800; i += 100) {
        run.feed("text", 0, 1, i, i + 100);
    }

    const llama_pos first = llama_memory_seq_pos_min(run.mem, 0);

    bool ok = first > 0 && !llama_memory_seq_rm(run.mem, 0, first - 1, -1) &&
              llama_memory_seq_pos_min(run.mem, 0) == first && llama_memory_seq_pos_max(run.mem, 0) == 799;

    // as far as llama-server goes back
    ok = llama_memory_seq_rm(run.mem, 0, first + n_swa + 1, -1) && ok;
    run.feed("again", 0, 2, first + n_swa + 1, first + n_swa + 9);

    const auto again = run.notes.back().row;

    llama_memory_clear(run.mem, true);
    for (int i = 0, end; i <= first + n_swa; i = end) {
        end = std::min(i + 100, first + n_swa + 1);
        run.feed("anew", 0, 1, i, end);
    }
    run.feed("anew", 0, 2, first + n_swa + 1, first + n_swa + 9);
    ok = ok && nmse(again, run.notes.back().row) < 1e-9;
    printf("  %-4s windows (cut at %d, from %d on)\n", ok ? "ok" : "FAIL", first + n_swa + 1, first);

    return ok;
}

static bool test_options(llama_model *model) {
    struct option {
        ggml_type type_k;
        ggml_type type_v;
        llama_flash_attn_type flash;
        bool offload;
        double limit; // llama.cpp itself rounds: queries to f16 or q8_0, f32 rows to f16 for flash attention
    };
    const auto on = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    const auto off = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    const auto automatic = LLAMA_FLASH_ATTN_TYPE_AUTO;

    bool ok = true;

    for (const auto &o : std::vector<option>{
             {GGML_TYPE_F32, GGML_TYPE_F32, on, true, 2e-6},
             {GGML_TYPE_F16, GGML_TYPE_F16, off, true, 1e-6},
             {GGML_TYPE_F16, GGML_TYPE_F16, automatic, false, 2e-6},
             {GGML_TYPE_BF16, GGML_TYPE_BF16, on, true, 2e-5},
             {GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, automatic, true, 2e-4},
             {GGML_TYPE_Q4_0, GGML_TYPE_Q4_0, on, true, 5e-4},
             {GGML_TYPE_F16, GGML_TYPE_Q8_0, on, true, 2e-6},
             {GGML_TYPE_Q8_0, GGML_TYPE_F16, off, true, 1e-4},
         }) {
        auto params = exact_params();

        params.type_k = o.type_k;
        params.type_v = o.type_v;
        params.flash_attn_type = o.flash;
        params.offload_kqv = o.offload;

        ok = check(std::string("keys ") + ggml_type_name(o.type_k) + ", values " + ggml_type_name(o.type_v) +
                       ", flash attention " + llama_flash_attn_type_name(o.flash),
                   model, params, scene_prompt, o.limit) &&
             ok;
    }

    return ok;
}

// rows of a type that llama.cpp lacks, which its f32 rows are nearly like
static bool test_types(llama_model *model) {
    bool ok = true;

    for (const char *type_v : {"int8", "f32"}) {
        auto params = exact_params();

        const auto suffix = std::string(", keys int8, values ") + type_v;
        const auto check_near = [&](const char *name, const scene_fn &scene) {
            ok = check(name + suffix, model, params, scene, 1e-3) && ok;
        };

        set_types("int8", type_v);
        check_near("prompt", scene_prompt);
        check_near("coupled", scene_coupled);
        check_near("forks", scene_forks);
        check_near("moves", scene_moves);
        check_near("division", scene_division);

        params.n_ctx = 256;
        params.n_seq_max = 1;
        check_near("context shift", scene_context_shift);
        check_near("full", scene_full);
    }
    unset_types();

    return ok;
}

// Training is refused, before anything of the context or of the model has changed.
static bool test_training(llama_model *model) {
    if (only && !strstr("training", only)) {
        return true;
    }

    scene_context run(model, exact_params());
    const int32_t n_ctx_train = llama_model_n_ctx_train(model);
    llama_opt_params params = {};
    std::string reason;

    params.n_ctx_train = 256;
    params.param_filter = llama_opt_param_filter_all;
    params.get_opt_pars = ggml_opt_get_default_optimizer_params;
    params.optimizer_type = GGML_OPT_OPTIMIZER_TYPE_ADAMW;
    run.feed("before", 0, 1, 0, 8);
    try {
        llama_opt_init(run.ctx, model, params);
    } catch (const std::runtime_error &error) {
        reason = error.what();
    }
    llama_memory_clear(run.mem, true);
    run.feed("after", 0, 1, 0, 8);

    const bool ok = reason.find("libkvcache has no gradients") != std::string::npos &&
                    reason.find("LLAMA_KVCACHE=0") != std::string::npos && run.notes[1].row == run.notes[3].row &&
                    llama_model_n_ctx_train(model) == n_ctx_train;

    printf("  %-4s training\n", ok ? "ok" : "FAIL");

    return ok;
}

//
// defects of the pinned llama.cpp that the pages list: if its own cache mends one, a check fails, and the list is too
// long
//

// returns how far the logits of two sequences differ that go on by the same token
static double difference(scene_context &run, llama_seq_id a, llama_seq_id b) {
    const auto row = run.go_on(a, 9, 1);
    const auto other = run.go_on(b, 9, 1);

    return row.size() == other.size() && !row.empty() ? nmse(other, row) : INFINITY;
}

// A sequence moves, and is saved before the next decode.
static double saved_behind_shift(scene_context &run) {
    run.feed("prompt", 0, 1, 0, 60);
    llama_memory_seq_rm(run.mem, 0, 10, 30);
    llama_memory_seq_add(run.mem, 0, 30, -1, -20);

    return run.load(run.save(0), 1) ? difference(run, 0, 1) : INFINITY;
}

// A state is read into a sequence behind a copy into it, and into another one.
static double read_behind_copy(scene_context &run) {
    run.feed("prompt", 0, 1, 0, 40);

    const auto state = run.save(0);

    llama_memory_seq_rm(run.mem, 0, -1, -1);
    run.feed("another", 0, 2, 0, 40);
    llama_memory_seq_cp(run.mem, 0, 1, -1, -1);

    return run.load(state, 1) && run.load(state, 2) ? difference(run, 2, 1) : INFINITY;
}

static bool test_defects(llama_model *model) {
    bool ok = true;

    if (!only || strcmp(only, "defects")) {
        return true;
    }
    for (const auto &[is_unified, scene] : std::vector<std::pair<bool, double (*)(scene_context &)>>{
             {false, saved_behind_shift}, {true, saved_behind_shift}, {false, read_behind_copy}}) {
        auto params = exact_params();
        double errors[2];

        params.kv_unified = is_unified;
        for (const bool is_ours : {false, true}) {
            scene_context run(model, params, is_ours);

            errors[is_ours] = scene(run);
        }

        const bool is_right = errors[0] > 1e-4 && errors[1] < 1e-9;

        printf("  %-4s llama.cpp's own cache is %.2g off, this one %.2g\n", is_right ? "ok" : "FAIL", errors[0],
               errors[1]);
        ok = ok && is_right;
    }

    return ok;
}

int main(int argc, char **argv) {
    for (; argc > 2 && argv[1][0] == '-'; argc -= 2, argv += 2) {
        if (!strcmp(argv[1], "--only")) {
            only = argv[2];
        } else if (!strcmp(argv[1], "--threads")) {
            scene_threads = atoi(argv[2]);
        }
    }
    if (argc < 2) {
        printf("usage: test-kvcache [--only PART] [--threads N] model.gguf ...\nplays scenes on each model; PART: of a "
               "scene's name\n");
    }

    bool ok = true;

    const bool are_loaded = on_models(argc, argv, [&](llama_model *model) {
        for (const auto test : {test_decode, test_embeddings, test_sequences, test_differences, test_immovable,
                                test_windows, test_options, test_types, test_training, test_defects}) {
            ok = test(model) && ok;
        }
    });

    return !(ok && are_loaded);
}
