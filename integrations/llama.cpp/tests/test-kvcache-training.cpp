// Training: llama.cpp's own cache trains, and a context of this one says that it does not:
//   test-kvcache-training MODEL...
#include "scene.h"

#include "ggml-opt.h"
#include "llama-cpp.h"

#include <stdexcept>

static constexpr int N_CTX = 256; // llama.cpp rounds up to this

static int n_failed = 0;

static void expect(bool ok, const char *what) {
    if (!ok) {
        printf("    FAIL: %s\n", what);
        ++n_failed;
    }
}

static llama_context_ptr make_context(llama_model *model, uint32_t n_ubatch, bool is_ours) {
    auto params = exact_params();

    params.n_ctx = N_CTX;
    params.n_batch = N_CTX;
    params.n_ubatch = n_ubatch;
    params.n_seq_max = 1;

    return llama_context_ptr(new_context(model, params, is_ours));
}

static void begin_training(llama_context *ctx, llama_model *model) {
    llama_opt_params params = {};

    params.n_ctx_train = N_CTX;
    params.param_filter = llama_opt_param_filter_all;
    params.get_opt_pars = ggml_opt_get_default_optimizer_params;
    params.optimizer_type = GGML_OPT_OPTIMIZER_TYPE_ADAMW;

    llama_opt_init(ctx, model, params);
}

// returns the loss over a text of random tokens
static double train(llama_context *ctx, const llama_model *model) {
    auto *data = ggml_opt_dataset_init(GGML_TYPE_I32, GGML_TYPE_I32, N_CTX, N_CTX, 1, 1);

    for (int i = 0; i < N_CTX; ++i) {
        ((llama_token *)ggml_opt_dataset_data(data)->data)[i] = text_token(model, 1, i);
        ((llama_token *)ggml_opt_dataset_labels(data)->data)[i] = text_token(model, 1, i + 1);
    }

    auto *trained = ggml_opt_result_init();
    auto *evaluated = ggml_opt_result_init();

    llama_opt_epoch(ctx, data, trained, evaluated, 1, nullptr, nullptr);

    double loss = 0.0;
    ggml_opt_result_loss(trained, &loss, nullptr);

    ggml_opt_result_free(trained);
    ggml_opt_result_free(evaluated);
    ggml_opt_dataset_free(data);

    return loss;
}

static std::vector<float> logits_of(scene_run &run) {
    auto batch = run.tokens(2, 0, 8, {0}, 0);

    batch.back().has_logits = true;
    expect(run.decode(batch) == 0, "a decode fails");
    llama_memory_clear(run.mem, true);

    const float *row = llama_get_logits_ith(run.ctx, -1);

    return {row, row + llama_vocab_n_tokens(llama_model_get_vocab(run.model))};
}

// A context of this cache is refused, before anything of it or of the model has changed.
static void test_refused(llama_model *model, uint32_t n_ubatch) {
    auto ctx = make_context(model, n_ubatch, true);
    scene_run run(model, ctx.get(), true);

    const auto before = logits_of(run);
    const int32_t n_ctx_train = llama_model_n_ctx_train(model);

    std::string reason;
    try {
        begin_training(ctx.get(), model);
    } catch (const std::runtime_error &error) {
        reason = error.what();
    }

    printf("  %s\n", reason.c_str());
    expect(reason.find("libkvcache has no gradients") != std::string::npos, "no reason is given");
    expect(reason.find("LLAMA_KVCACHE=0") != std::string::npos, "no remedy is given");
    expect(logits_of(run) == before, "logits have changed");
    expect(llama_model_n_ctx_train(model) == n_ctx_train, "the model has changed");
}

static void test_own(llama_model *model) {
    auto ctx = make_context(model, N_CTX, false);

    begin_training(ctx.get(), model);

    const double first = train(ctx.get(), model);
    const double last = train(ctx.get(), model);

    printf("  loss with llama.cpp's own cache: %g, then %g\n", first, last);
    expect(last < first, "nothing was learnt");
}

int main(int argc, char **argv) {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();

    for (int i = 1; i < argc; ++i) {
        auto params = llama_model_default_params();
        params.load_mode = LLAMA_LOAD_MODE_NONE; // weights that can be written

        llama_model_ptr model(llama_model_load_from_file(argv[i], params));

        printf("%s\n", argv[i]);
        expect(model != nullptr, "cannot be loaded");
        if (model) {
            test_refused(model.get(), N_CTX);
            test_refused(model.get(), N_CTX / 4);
            if (!llama_model_is_hybrid(model.get())) { // llama.cpp trains no recurrent layers
                test_own(model.get());
            }
        }
    }

    printf("%s\n", n_failed || argc < 2 ? "FAIL" : "ok");

    return n_failed || argc < 2;
}
