// Defects of the pinned llama.cpp that README.md lists, each beside both caches: llama.cpp's own has it, this one does
// not.  If llama.cpp's own mends one, a check fails, and the list is too long.
#include "expect.h"
#include "scene.h"

// returns the state of a sequence
static std::vector<uint8_t> state_of(scene_run &run, llama_seq_id seq_id) {
    std::vector<uint8_t> res(llama_state_seq_get_size(run.ctx, seq_id));

    expect(llama_state_seq_get_data(run.ctx, res.data(), res.size(), seq_id) == res.size(), "a state is saved");

    return res;
}

static void restore(scene_run &run, const std::vector<uint8_t> &state, llama_seq_id seq_id) {
    expect(llama_state_seq_set_data(run.ctx, state.data(), state.size(), seq_id) == state.size(), "a state is read");
}

// returns how far the logits of two sequences differ that go on by the same token
static double difference(scene_run &run, llama_seq_id a, llama_seq_id b) {
    std::vector<float> rows[2];

    for (const llama_seq_id s : {a, b}) {
        const int next = llama_memory_seq_pos_max(run.mem, s) + 1;

        run.feed("goes on", s, 9, next, next + 1);
        rows[s == b] = run.notes.back().row;
    }

    return rows[0].size() == rows[1].size() && !rows[0].empty() ? nmse(rows[1], rows[0]) : INFINITY;
}

// A sequence moves, and is saved before the next decode.
static double saved_behind_shift(scene_run &run) {
    run.feed("prompt", 0, 1, 0, 60);
    llama_memory_seq_rm(run.mem, 0, 10, 30);
    llama_memory_seq_add(run.mem, 0, 30, -1, -20);
    restore(run, state_of(run, 0), 1);

    return difference(run, 0, 1);
}

// A state is read into a sequence behind a copy into it, and into another one.
static double read_behind_copy(scene_run &run) {
    run.feed("prompt", 0, 1, 0, 40);

    const auto state = state_of(run, 0);

    llama_memory_seq_rm(run.mem, 0, -1, -1);
    run.feed("another", 0, 2, 0, 40);
    llama_memory_seq_cp(run.mem, 0, 1, -1, -1);
    restore(run, state, 1);
    restore(run, state, 2);

    return difference(run, 2, 1);
}

static void test_defect(llama_model *model, bool is_unified, const std::string &what, double (*scene)(scene_run &)) {
    auto params = exact_params();
    double own = NAN; // without a context
    double ours = NAN;

    params.kv_unified = is_unified;
    play(model, params, false, [&](scene_run &run) { own = scene(run); });
    play(model, params, true, [&](scene_run &run) { ours = scene(run); });
    expect(own > 1e-4, "llama.cpp's own: " + what + " is wrong", own);
    expect(ours < 1e-9, "this cache: " + what + " is right", ours);
}

int main(int argc, char **argv) {
    if (argc != 2) {
        printf("usage: test-kvcache-defects model.gguf\n");
        return 1;
    }

    begin_program();

    auto *model = llama_model_load_from_file(argv[1], llama_model_default_params());

    expect(model, "a model");
    if (model) {
        test_defect(model, false, "a state saved between llama_memory_seq_add and a decode", saved_behind_shift);
        test_defect(model, true, "the same in a unified context", saved_behind_shift);
        test_defect(model, false, "a state read into a sequence after llama_memory_seq_cp", read_behind_copy);
        llama_model_free(model);
    }
    llama_backend_free();
    printf("%s\n", n_failed ? "FAIL" : "ok");

    return n_failed ? 1 : 0;
}
