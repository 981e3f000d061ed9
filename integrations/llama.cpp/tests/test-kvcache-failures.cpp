// Makes decodes fail in the middle, by an abort callback and by memory that is short: what was computed stays, nothing
// else has changed, and the context goes on as one that was not disturbed.
#include "expect.h"
#include "scene.h"

#include <cstdlib>

// counts down, and fails at 0; gives memory in another way where it does not
struct countdown {
    int64_t left = -1; // never
    bool has_failed = false;
    int64_t n_bytes = 0;

    bool step() {
        has_failed = has_failed || left == 0;

        return left >= 0 && left-- == 0;
    }
};

static countdown allocations;

static void *allocate(void *, size_t size, size_t alignment, const kvc_memory_hint *) {
    if (allocations.step()) {
        return nullptr;
    }

    allocations.n_bytes += size;

    return aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}

static void release(void *, void *memory, size_t size, const kvc_memory_hint *) {
    allocations.n_bytes -= size;
    free(memory);
}

static const kvc_allocator failing = {sizeof(kvc_allocator), nullptr, allocate, release, nullptr};

static const int n_prompt = 40;
static const int n_text = 70;

// feeds the rest of the text after a failure, and compares with a context in which nothing failed
static void go_on_as_undisturbed(scene_run &run, const std::vector<float> &undisturbed, const std::string &what,
                                 long long i) {
    const int next = llama_memory_seq_pos_max(run.mem, 0) + 1;

    expect(next >= n_prompt && next <= n_text && (next - n_prompt) % llama_n_ubatch(run.ctx) == 0,
           what + ": whole ubatches stay", next);
    if (next == n_text) {
        return;
    }

    run.notes.clear();
    expect(run.feed(what, 0, 1, next, n_text) == 0, what + ": goes on", i);
    expect(!run.notes.back().row.empty() && nmse(run.notes.back().row, undisturbed) < 1e-9,
           what + ": as if nothing had happened", i);
}

static std::vector<float> play_undisturbed(llama_model *model, const llama_context_params &params) {
    scene_context run(model, params);

    run.feed("prompt", 0, 1, 0, n_prompt);
    run.feed("text", 0, 1, n_prompt, n_text);

    return run.notes.back().row;
}

// Makes the first, second, ... call of something fail in the decode of the text, each in a new context, until one
// succeeds.  Returns how many failed.  If memory is refused, the status tells whether anything has changed, and the
// context names the cause.
static int fail_each(llama_model *model, const llama_context_params &params, countdown &calls, bool is_of_memory,
                     const std::string &what) {
    const auto undisturbed = play_undisturbed(model, params);

    for (int i = 0;; ++i) {
        scene_context run(model, params);

        run.feed("prompt", 0, 1, 0, n_prompt);

        calls = {i, false, calls.n_bytes};

        const int res = run.decode(run.tokens(1, n_prompt, n_text, {0}, n_prompt));
        const bool has_failed = calls.has_failed;

        calls.left = -1;

        const bool has_changed = llama_memory_seq_pos_max(run.mem, 0) + 1 > n_prompt;
        const std::string cause = llama_memory_failure(run.mem);

        expect((res != 0) == has_failed, what + ": the status tells", i);
        expect(!has_failed || res == (!is_of_memory ? 2 : has_changed ? -3 : 1), what + ": status", res);
        expect((cause.find("out of memory") != std::string::npos) == (has_failed && is_of_memory), cause, i);
        go_on_as_undisturbed(run, undisturbed, what, i);

        if (!has_failed || n_failed > 0) {
            return i;
        }
    }
}

static countdown nodes;

static void test_abort(llama_model *model) {
    auto params = exact_params();

    params.n_ubatch = 10;
    params.abort_callback = [](void *) { return nodes.step(); };

    printf("  aborted at each of %d nodes\n", fail_each(model, params, nodes, false, "aborted"));
}

static void test_memory_of_decode(llama_model *model) {
    for (const bool is_unified : {true, false}) {
        auto params = exact_params();

        params.n_ubatch = 10;
        params.kv_unified = is_unified;
        params.n_seq_max = is_unified ? 4 : 1;

        const int n = fail_each(model, params, allocations, true, "short of memory");

        expect(n > 0 || !is_unified, "a decode takes memory", n);
        printf("  each of %d allocations of a decode failed\n", n);
    }
}

// each allocation of an edit fails once: then the edit has changed nothing, and succeeds when it is made again
static void test_memory_of_edits(llama_model *model) {
    const std::vector<std::pair<std::string, std::function<void(llama_memory_t)>>> edits = {
        {"seq_cp", [](llama_memory_t mem) { llama_memory_seq_cp(mem, 0, 2, -1, -1); }},
        {"seq_cp of a range", [](llama_memory_t mem) { llama_memory_seq_cp(mem, 0, 1, 20, 30); }},
        {"seq_rm", [](llama_memory_t mem) { llama_memory_seq_rm(mem, 0, 10, 20); }},
        {"seq_rm of all", [](llama_memory_t mem) { llama_memory_seq_rm(mem, -1, 5, 15); }},
        {"seq_keep", [](llama_memory_t mem) { llama_memory_seq_keep(mem, 1); }},
        {"seq_add", [](llama_memory_t mem) { llama_memory_seq_add(mem, 0, 20, -1, 7); }},
        {"seq_div", [](llama_memory_t mem) { llama_memory_seq_div(mem, 0, 20, -1, 2); }},
    };

    auto params = exact_params();

    params.swa_full = true;

    for (const auto &edit : edits) {
        for (int i = 0;; ++i) {
            scene_context run(model, params);

            run.feed("prompt", 0, 1, 0, n_prompt);
            run.feed("prompt of another", 1, 2, 0, 20);

            allocations = {i, false, allocations.n_bytes};
            edit.second(run.mem);

            const bool has_failed = allocations.has_failed;

            allocations.left = -1;

            if (has_failed) {
                edit.second(run.mem);
            }

            run.notes.clear();
            run.note_positions(edit.first);
            run.feed(edit.first, 1, 2, llama_memory_seq_pos_max(run.mem, 1) + 1, 50);

            const auto again = std::move(run.notes);

            llama_memory_clear(run.mem, true);
            run.feed("prompt", 0, 1, 0, n_prompt);
            run.feed("prompt of another", 1, 2, 0, 20);
            edit.second(run.mem);
            run.notes.clear();
            run.note_positions(edit.first);
            run.feed(edit.first, 1, 2, llama_memory_seq_pos_max(run.mem, 1) + 1, 50);

            double most = 0.0;

            expect(!differ(again, run.notes, 1e-9, &most), edit.first + ": made again", i);

            if (!has_failed || n_failed > 0) {
                printf("  each of %d allocations of %s failed\n", i, edit.first.c_str());
                break;
            }
        }
    }
}

// each allocation of a copy fails once: then the tokens behind it are refused, until the sequence is fed from the start
static void test_memory_of_copies(llama_model *model) {
    for (int i = 0;; ++i) {
        scene_context run(model, exact_params());

        run.feed("prompt", 0, 1, 0, n_prompt);
        allocations = {i, false, allocations.n_bytes};
        llama_memory_seq_cp(run.mem, 0, 2, -1, -1);

        const bool has_failed = allocations.has_failed;

        allocations.left = -1;

        const int res = run.decode(run.tokens(1, n_prompt, n_text, {2}, n_prompt));
        const std::string cause = llama_memory_failure(run.mem);

        expect(res == (has_failed ? -2 : 0), "copies: the status tells", res);
        expect((cause.find("to sequence 2: out of memory") != std::string::npos) == has_failed, cause, i);
        llama_memory_seq_rm(run.mem, 2, -1, -1);
        expect(run.decode(run.tokens(1, 0, n_prompt, {2}, 0)) == 0, "copies: goes on", i);

        if (!has_failed) {
            expect(i > 0, "a copy takes memory", i);
            printf("  each of %d allocations of a copy failed\n", i);
            return;
        }
    }
}

// a call with tokens of several sequences fails at each allocation: after a clear, the context works as ever
static void test_memory_of_coupled(llama_model *model) {
    std::vector<float> undisturbed;

    for (int i = -1;; ++i) {
        scene_context run(model, exact_params());

        auto batch = run.tokens(1, 0, 30, {0, 1, 2}, 0);

        for (llama_seq_id s = 0; s < 3; ++s) {
            for (auto &token : run.tokens(2 + s, 30, 35, {s}, 30)) {
                batch.push_back(token);
            }
        }
        batch.back().has_logits = true;

        allocations = {i, false, allocations.n_bytes};
        run.decode(batch);

        const bool has_failed = allocations.has_failed;

        allocations.left = -1;

        llama_memory_clear(run.mem, true);
        expect(run.feed("again", batch) == 0, "coupled: decodes again", i);
        undisturbed = i < 0 ? run.notes.back().row : undisturbed;
        expect(run.notes.back().row == undisturbed, "coupled: as if nothing had happened", i);

        if (i >= 0 && !has_failed) {
            printf("  each of %d allocations of coupled tokens failed\n", i);
            return;
        }
    }
}

static void test_memory_of_creation(llama_model *model) {
    for (int i = 0;; ++i) {
        setenv("LLAMA_KVCACHE", "1", 1);
        allocations = {i, false, allocations.n_bytes};

        auto *ctx = llama_init_from_model(model, exact_params());

        expect((ctx == nullptr) == allocations.has_failed, "no context without memory", i);
        allocations.left = -1;
        if (ctx) {
            llama_free(ctx);
            printf("  each of %d allocations of a context failed\n", i);
            return;
        }
        expect(allocations.n_bytes == 0, "a failed creation leaves nothing", allocations.n_bytes);
    }
}

// each allocation of beginning and keeping a prompt fails once: at worst less is known, and sequences go on
static void test_memory_of_prefixes(llama_model *model) {
    const int n_all = 200;
    const int n_common = 150;

    scene_context undisturbed(model, exact_params());
    auto prompt = undisturbed.tokens(1, 0, n_common, {1}, 0);

    for (const auto &token : undisturbed.tokens(2, n_common, n_all, {1}, n_common)) {
        prompt.push_back(token);
    }
    prompt.back().has_logits = true;
    undisturbed.feed("prompt", 0, 1, 0, n_all);
    undisturbed.feed("goes on", 0, 1, n_all, n_all + 5);
    const auto rest = undisturbed.notes.back().row;
    undisturbed.feed("another", prompt);
    const auto other = undisturbed.notes.back().row;

    std::vector<llama_token> ids[2];
    for (int i = 0; i < n_all; ++i) {
        ids[0].push_back(text_token(model, 1, i));
        ids[1].push_back(prompt[i].id);
    }

    const llama_memory_prompt given[2] = {{ids[0].data(), n_all, nullptr, nullptr},
                                          {ids[1].data(), n_all, nullptr, "other"}};
    const llama_memory_prompt common = {ids[0].data(), n_common, nullptr, nullptr};

    setenv("LLAMA_KVCACHE_PREFIX", "on", 1);
    for (int i = 0;; ++i) {
        scene_context run(model, exact_params());

        llama_memory_prefix_begin(run.mem, 0, &given[0], 0);
        run.feed("prompt", 0, 1, 0, n_common);

        allocations = {i, false, allocations.n_bytes};

        llama_memory_prefix_keep(run.mem, 0, &common);
        const int n_other = llama_memory_prefix_begin(run.mem, 2, &given[1], 0);
        llama_memory_prompt same = given[1];
        same.adapters = nullptr;
        const int n = llama_memory_prefix_begin(run.mem, 1, &same, 0);
        const bool has_failed = allocations.has_failed;

        allocations.left = -1;

        expect(n_other == 0 && n <= n_common && (has_failed || n == n_common), "prefixes: as many as are known", n);
        expect(llama_memory_seq_pos_max(run.mem, 0) == n_common - 1, "prefixes: what is kept goes on", i);
        expect(llama_memory_seq_pos_max(run.mem, 1) == n - 1, "prefixes: what is begun is held", i);
        run.feed("prompt", 0, 1, n_common, n_all);
        run.feed("goes on", 0, 1, n_all, n_all + 5);
        expect(nmse(run.notes.back().row, rest) < 1e-9, "prefixes: as if nothing had been kept", i);
        run.feed("another", scene_batch(prompt.begin() + n, prompt.end()));
        expect(nmse(run.notes.back().row, other) < 1e-9, "prefixes: as if nothing had been begun", i);

        if (!has_failed || n_failed > 0) {
            printf("  each of %d allocations of prefixes failed\n", i);
            break;
        }
    }
    setenv("LLAMA_KVCACHE_PREFIX", "off", 1);
}

int main(int argc, char **argv) {
    only_failures = true;
    llama_kvcache_allocator = &failing;

    const bool ok = on_models(argc, argv, [](llama_model *model) {
        for (const auto test : {test_abort, test_memory_of_decode, test_memory_of_edits, test_memory_of_copies,
                                test_memory_of_coupled, test_memory_of_prefixes, test_memory_of_creation}) {
            test(model);
        }
        expect(allocations.n_bytes == 0, "memory is left", allocations.n_bytes);
    });

    printf("%s\n", ok && n_failed == 0 ? "ok" : "FAIL");

    return !ok || n_failed > 0;
}
