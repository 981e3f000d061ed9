// Calls each function that names a sequence with numbers that no sequence has: the process ends at once, as it does
// with llama.cpp's own cache, and nothing is read or written elsewhere.
#include "expect.h"
#include "scene.h"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

struct id_call {
    std::string name;
    bool takes_all; // -1 names all sequences
    bool own_ends;  // llama.cpp's own cache ends the process, too, unless the model is hybrid
    std::function<void(llama_context *, llama_seq_id)> run;
};

static const llama_token prompt_tokens[] = {1, 2, 3};
static const llama_memory_prompt prompt = {prompt_tokens, 3, nullptr, nullptr};

// a state of one sequence that holds three tokens
static bytes saved;

static const std::vector<id_call> calls = {
    {"seq_rm", true, true, [](auto *ctx, auto id) { llama_memory_seq_rm(llama_get_memory(ctx), id, 0, -1); }},
    {"seq_cp to", false, true, [](auto *ctx, auto id) { llama_memory_seq_cp(llama_get_memory(ctx), 0, id, -1, -1); }},
    {"seq_cp from", false, true, [](auto *ctx, auto id) { llama_memory_seq_cp(llama_get_memory(ctx), id, 0, -1, -1); }},
    {"seq_cp to itself", false, true,
     [](auto *ctx, auto id) { llama_memory_seq_cp(llama_get_memory(ctx), id, id, -1, -1); }},
    {"seq_keep", false, true, [](auto *ctx, auto id) { llama_memory_seq_keep(llama_get_memory(ctx), id); }},
    {"seq_add", false, true, [](auto *ctx, auto id) { llama_memory_seq_add(llama_get_memory(ctx), id, 0, -1, 1); }},
    {"seq_div", false, true, [](auto *ctx, auto id) { llama_memory_seq_div(llama_get_memory(ctx), id, 0, -1, 2); }},
    {"seq_pos_min", false, true, [](auto *ctx, auto id) { llama_memory_seq_pos_min(llama_get_memory(ctx), id); }},
    {"seq_pos_max", false, true, [](auto *ctx, auto id) { llama_memory_seq_pos_max(llama_get_memory(ctx), id); }},
    {"prefix_begin", false, false,
     [](auto *ctx, auto id) { llama_memory_prefix_begin(llama_get_memory(ctx), id, &prompt, 0); }},
    {"prefix_keep", false, false,
     [](auto *ctx, auto id) { llama_memory_prefix_keep(llama_get_memory(ctx), id, &prompt); }},
    {"state_seq_get_size", true, false, [](auto *ctx, auto id) { llama_state_seq_get_size(ctx, id); }},
    {"state_seq_get_data", true, false,
     [](auto *ctx, auto id) {
         bytes data(saved.size());
         llama_state_seq_get_data(ctx, data.data(), data.size(), id);
     }},
    {"state_seq_set_data", true, true,
     [](auto *ctx, auto id) { llama_state_seq_set_data(ctx, saved.data(), saved.size(), id); }},
};

// calls in a child, and returns the signal that ended it, 0 if none did
static int signal_of(llama_context *ctx, const id_call &call, llama_seq_id id) {
    const pid_t pid = fork();

    if (pid == 0) {
        if (!freopen("/dev/null", "w", stderr)) { // which llama.cpp's assertions write to
            _exit(1);
        }
        call.run(ctx, id);
        _exit(0);
    }

    int status = -1;

    waitpid(pid, &status, 0);

    return WIFSIGNALED(status) ? WTERMSIG(status) : status;
}

static void test_ids(scene_run &run) {
    run.decode(run.tokens(1, 0, 3, {0}, 0));
    saved = save_state(run.ctx, 0);

    const std::string which = run.is_ours ? "this cache, " : "llama.cpp's, ";

    for (const auto &call : calls) {
        if (!run.is_ours && !call.own_ends) {
            continue;
        }
        for (const llama_seq_id id : {-7, -1, 256, 100000000}) {
            if (id != -1 || !call.takes_all) {
                expect(signal_of(run.ctx, call, id) == SIGABRT, which + call.name + " of " + std::to_string(id));
            }
        }
        for (const llama_seq_id id : {0, 3}) {
            expect(signal_of(run.ctx, call, id) == 0, which + call.name + " of " + std::to_string(id));
        }
    }
}

int main(int argc, char **argv) {
    setenv("GGML_NO_BACKTRACE", "1", 1);
    setenv("LLAMA_KVCACHE_PREFIX", "on", 1);

    const bool ok = on_models(argc, argv, [](llama_model *model) {
        for (const bool is_unified : {false, true}) {
            auto params = exact_params();

            params.kv_unified = is_unified;
            play(model, params, true, test_ids);
            if (!llama_model_is_hybrid(model)) {
                play(model, params, false, test_ids);
            }
        }
    });

    printf("%s\n", ok && n_failed == 0 ? "ok" : "FAIL");

    return !ok || n_failed > 0;
}
