// Prompts that begin alike: sequences take what others have left behind, and go on as if they had computed it.
#include "expect.h"
#include "images.h"
#include "scene.h"

#include <cstring>
#include <filesystem>

static constexpr double MOST = 1e-9; // squared difference of logits over their squared length

// tokens of one text, then of another
struct prompt {
    prompt(const llama_model *model, uint32_t text, int n, uint32_t other = 0, int n_other = 0) {
        for (int i = 0; i < n; ++i) {
            tokens.push_back(text_token(model, text, i));
        }
        for (int i = 0; i < n_other; ++i) {
            tokens.push_back(text_token(model, other, n + i));
        }
    }

    llama_memory_prompt get() const {
        return {tokens.data(), (int32_t)tokens.size(), digests.empty() ? nullptr : digests.data(), adapters};
    }

    std::vector<llama_token> tokens;
    std::vector<uint8_t> digests;
    const char *adapters = nullptr;
};

// returns parameters of a context that keeps prompts where `spec` says
static const llama_context_params &kept_in(const std::string &spec, const llama_context_params &params) {
    setenv("LLAMA_KVCACHE_PREFIX", spec.c_str(), 1);

    return params;
}

class context : public scene_context {
  public:
    context(llama_model *model, const llama_context_params &params, const std::string &spec)
        : scene_context(model, kept_in(spec, params)) {}

    int32_t begin(llama_seq_id seq_id, const prompt &p, int32_t n_held = 0) {
        const auto given = p.get();

        return llama_memory_prefix_begin(mem, seq_id, &given, n_held);
    }

    void keep(llama_seq_id seq_id, const prompt &p) {
        const auto given = p.get();

        llama_memory_prefix_keep(mem, seq_id, &given);
    }

    // feeds tokens [first, end) of a prompt, and returns the logits of the last; none if that fails
    std::vector<float> feed(llama_seq_id seq_id, const prompt &p, int32_t first, int32_t end) {
        scene_batch batch;

        for (int32_t i = first; i < end; ++i) {
            batch.push_back({p.tokens[i], i, {seq_id}, i + 1 == end});
        }
        if (decode(batch)) {
            return {};
        }

        const float *row = llama_get_logits_ith(ctx, -1);

        return std::vector<float>(row, row + llama_vocab_n_tokens(llama_model_get_vocab(model)));
    }

    // begins and feeds a prompt, and keeps it; returns how much of it was there
    int32_t serve(llama_seq_id seq_id, const prompt &p) {
        const int32_t n = begin(seq_id, p);

        expect(!feed(seq_id, p, n, (int32_t)p.tokens.size()).empty(), "a prompt is fed", n);
        keep(seq_id, p);

        return n;
    }

    void drop(llama_seq_id seq_id) { llama_memory_seq_rm(mem, seq_id, -1, -1); }

    llama_pos last(llama_seq_id seq_id) const { return llama_memory_seq_pos_max(mem, seq_id); }
};

static llama_context_params params_of(bool is_unified = true) {
    auto params = exact_params();

    params.kv_unified = is_unified;
    params.n_ctx = is_unified ? 1024 : 2048;

    return params;
}

// the logits of a prompt that is computed as a whole
static std::vector<float> plain(llama_model *model, const prompt &p) {
    context c(model, params_of(), "off");

    expect(!llama_memory_has_prefix(c.mem), "no prefix unless it is asked for");
    expect(c.begin(0, p) == 0 && c.begin(0, p, 7) == 7 && c.last(0) == -1, "and nothing is begun");
    c.keep(0, p);

    return c.feed(0, p, 0, (int32_t)p.tokens.size());
}

static void expect_plain(llama_model *model, const std::vector<float> &logits, const prompt &p,
                         const std::string &what) {
    const auto wanted = plain(model, p);

    expect(logits.size() == wanted.size() && nmse(logits, wanted) < MOST, what + ": logits of the whole prompt");
}

// a beginning is taken while its sequence goes on, and after it has ended
static void test_sequences(llama_model *model, bool is_unified) {
    context c(model, params_of(is_unified), "on");
    const prompt p(model, 1, 200);

    expect(llama_memory_has_prefix(c.mem), "a prefix");
    expect(c.begin(0, p) == 0, "nothing is known");
    llama_memory_seq_rm(c.mem, 0, 0, -1); // as the server does
    c.feed(0, p, 0, 100);
    llama_memory_seq_rm(c.mem, 0, 100, -1);
    c.feed(0, p, 100, 150);

    const prompt q(model, 1, 140, 2, 60);

    int32_t n = c.begin(1, q);
    expect(n == 128, "blocks of a prompt that is being fed", n);
    expect(c.last(1) == n - 1, "are held", c.last(1));
    expect_plain(model, c.feed(1, q, n, 200), q, "beside another");

    expect_plain(model, c.feed(0, p, 150, 200), p, "of the other");
    c.keep(0, p);
    expect(c.last(0) == 199, "a sequence that is kept goes on", c.last(0));

    const prompt longer(model, 1, 230);
    const prompt r(model, 1, 190, 3, 30);

    n = c.begin(2, r);
    expect(n == 190, "tokens of one that was kept", n);
    expect_plain(model, c.feed(2, r, n, 220), r, "behind one that was kept");

    c.drop(0);
    n = c.begin(3, longer);
    expect(n == 200, "all tokens of one that has ended", n);
    expect_plain(model, c.feed(3, longer, n, 230), longer, "behind all of another");
}

// a sequence takes what is known in place of its own tokens, or goes on with these
static void test_own_tokens(llama_model *model) {
    context c(model, params_of(), "on");
    const prompt p(model, 1, 200);
    const prompt q(model, 1, 100, 2, 60);

    c.serve(0, p);

    const int32_t n = c.begin(0, q, 100);
    expect(n == 100, "as many as it holds", n);
    llama_memory_seq_rm(c.mem, 0, n, -1);
    expect_plain(model, c.feed(0, q, n, 160), q, "from another prompt");
    c.keep(0, q);

    const prompt unknown(model, 9, 50);
    expect(c.begin(0, unknown, 3) == 3 && c.last(0) == 159, "fewer are known than it holds", c.last(0));
    expect(c.begin(0, unknown) == 0 && c.last(0) == -1, "none of either", c.last(0));

    // all are known: the last one is fed
    c.drop(0);
    expect(c.begin(1, p) <= 199, "less than all");
    c.keep(1, p);

    // behind a prompt that was cut short, another one is fed
    const prompt first(model, 5, 200);
    c.begin(2, first);
    c.feed(2, first, 0, 30);
    c.keep(2, first);

    prompt second(model, 5, 30, 6, 170);
    expect(c.begin(2, second, 30) == 30, "goes on where another one ended");
    expect_plain(model, c.feed(2, second, 30, 200), second, "behind a prompt that was cut short");
    c.keep(2, second);
    expect(c.begin(3, first) == 30, "what was not fed is not known");
}

// rows that do not follow from their tokens are not kept
static void test_edits(llama_model *model) {
    context c(model, params_of(), "on");
    prompt p(model, 1, 200);

    if (llama_memory_can_shift(c.mem)) {
        c.begin(0, p);
        c.feed(0, p, 0, 200);
        llama_memory_seq_rm(c.mem, 0, 130, 150);
        llama_memory_seq_add(c.mem, 0, 150, -1, -20);
        p.tokens.erase(p.tokens.begin() + 130, p.tokens.begin() + 150);
        c.keep(0, p);
        expect(c.last(0) == 179, "a context shift");
        c.drop(0);

        const int32_t n = c.begin(1, p);
        expect(n == 130, "up to the tokens that moved", n);
        expect_plain(model, c.feed(1, p, n, 180), p, "in place of tokens that moved");
        c.drop(1);
    }

    // a text that sees all of itself
    const prompt q(model, 7, 150);

    c.begin(0, q);
    llama_set_causal_attn(c.ctx, false);
    c.feed(0, q, 0, 60);
    llama_set_causal_attn(c.ctx, true);
    c.feed(0, q, 60, 150);
    c.keep(0, q);
    expect(c.begin(1, q) == 0, "tokens that saw later ones");

    // rows that were saved
    context other(model, params_of(), "off");
    const prompt r(model, 8, 150);

    other.feed(0, r, 0, 150);

    c.begin(2, r);
    expect(c.load(other.save(0), 2), "a state");
    expect(c.last(2) == 149, "is restored", c.last(2));
    c.keep(2, r);
    expect(c.begin(3, r) == 0, "whatever a state has");
}

// kept prompts take no room from others, and the least recently used go first
static void test_eviction(llama_model *model) {
    auto params = params_of();
    params.n_ctx = 512;

    context c(model, params, "on");

    for (uint32_t text = 1; text <= 6; ++text) {
        expect(c.serve(0, prompt(model, text, 150)) == 0, "a new prompt", text);
    }
    c.drop(0);
    expect(c.begin(0, prompt(model, 1, 150)) == 0, "the oldest is gone");

    const prompt latest(model, 6, 150);

    int32_t n = c.begin(0, latest);
    expect(n == 149, "the latest is there", n);
    expect_plain(model, c.feed(0, latest, n, 150), latest, "of the latest");
    c.keep(0, latest);
    c.drop(0);

    const prompt large(model, 8, 500);
    expect(c.begin(1, large) == 0, "a large one");
    expect_plain(model, c.feed(1, large, 0, 500), large, "in place of all that was kept");
    c.keep(1, large);
    c.drop(1);
    n = c.begin(2, large);
    expect(n == 499, "is kept itself", n);
}

static void test_names(llama_model *model) {
    context c(model, params_of(), "on");
    prompt p(model, 1, 100);

    c.serve(0, p);

    p.adapters = "style.gguf=0.5";
    expect(c.serve(1, p) == 0, "with an adapter");
    expect(c.begin(2, p) >= 64, "with the same adapter");
    p.adapters = "";
    expect(c.begin(2, p) >= 64, "without an adapter");

    p.digests.assign(32 * 100, 0);
    expect(c.begin(2, p) >= 64, "no digests");
    std::fill(p.digests.begin() + 32 * 70, p.digests.begin() + 32 * 80, (uint8_t)1);
    const int32_t n = c.serve(2, p);
    expect(n == 70, "up to an image", n);
    expect(c.begin(3, p) >= 64 + 10, "with the same image");
    std::fill(p.digests.begin() + 32 * 70, p.digests.begin() + 32 * 80, (uint8_t)2);
    expect(c.begin(3, p) == 70, "up to another image");
}

// With M-RoPE, an image's tokens stand at one position: what is behind it is not known.
static void test_images(llama_model *model) {
    if (!has_image_positions(model)) {
        return;
    }

    const int n_rows = 4;
    const int n_image = n_rows * IMAGE_WIDTH;
    prompt p(model, 1, 70 + n_image + 80);
    p.digests.assign(32 * p.tokens.size(), 0);
    std::fill(p.digests.begin() + 32 * 70, p.digests.begin() + 32 * (70 + n_image), (uint8_t)1);

    const prompt behind(model, 3, behind_image(70, n_rows) + 80);
    const auto show = [&](context &c, llama_seq_id seq_id, int32_t first) {
        c.feed(seq_id, p, first, 70);
        expect(decode_image(c.ctx, seq_id, 70, 0, n_rows) == 0, "an image");

        return c.feed(seq_id, behind, behind_image(70, n_rows), (int32_t)behind.tokens.size());
    };

    context other(model, params_of(), "off");
    const auto wanted = show(other, 0, 0);

    context c(model, params_of(), "on");

    c.begin(0, p);
    expect(nmse(show(c, 0, 0), wanted) < MOST, "behind an image");
    c.keep(0, p);

    prompt longer = p;
    longer.tokens.push_back(0);
    longer.digests.resize(32 * longer.tokens.size(), 0);
    const int32_t n = c.begin(1, longer);
    expect(n == 70, "up to the image", n);
    decode_image(c.ctx, 1, 70, 0, n_rows);
    expect(nmse(c.feed(1, behind, behind_image(70, n_rows), (int32_t)behind.tokens.size()), wanted) < MOST,
           "behind an image that was seen before");
}

// states have what sequences hold, and nothing that is kept
static void test_states(llama_model *model) {
    const prompt p(model, 1, 120);
    const prompt q(model, 1, 90, 2, 20);

    std::vector<size_t> sizes;

    for (const char *spec : {"off", "on"}) {
        context c(model, params_of(), spec);

        c.feed(3, p, 0, 120);
        c.keep(3, p);
        c.drop(3);

        for (const llama_seq_id s : {0, 1}) {
            const int32_t n = c.begin(s, p);
            c.feed(s, p, n, 120);
            c.keep(s, p);
        }

        const bytes state = c.save(1);

        sizes.push_back(state.size());

        context other(model, params_of(), "off");
        other.load(state, 2);
        expect(other.last(2) == 119, "a state of a sequence that was begun", other.last(2));

        const prompt longer(model, 1, 130);
        expect_plain(model, other.feed(2, longer, 120, 130), longer, "behind a state");

        const bytes all = c.save(-1);
        expect(other.load(all, -1), "a state of all");
        expect(other.last(0) == 119 && other.last(1) == 119 && other.last(2) == -1 && other.last(3) == -1,
               "has the sequences");
        expect(c.load(all, -1), "and is restored");
        expect(c.last(0) == 119 && c.last(1) == 119 && c.last(3) == -1, "into the same sequences");
        expect_plain(model, c.feed(1, longer, 120, 130), longer, "behind a state of all");
    }

    expect(sizes[0] == sizes[1], "states of one size", (long long)sizes[1] - (long long)sizes[0]);
}

// sequences of all kinds of edits are those of the context, whichever of the cache they are
static void test_operations(llama_model *model) {
    context c(model, params_of(), "on");
    const prompt p(model, 1, 100);

    c.serve(0, p);
    c.serve(1, p);
    llama_memory_seq_cp(c.mem, 1, 2, -1, -1);
    expect(c.last(2) == 99, "copied", c.last(2));
    expect(llama_memory_seq_rm(c.mem, -1, 99, -1) && c.last(0) == 98 && c.last(1) == 98 && c.last(2) == 98,
           "removed of all");
    llama_memory_seq_keep(c.mem, 1);
    expect(c.last(0) == -1 && c.last(1) == 98 && c.last(2) == -1, "the only one");
    expect_plain(model, c.feed(1, p, 99, 100), p, "of the only one");
    llama_memory_clear(c.mem, true);
    expect(c.last(1) == -1 && c.begin(1, p) == 0, "cleared");
    expect_plain(model, c.feed(1, p, 0, 100), p, "of a cleared one");
}

//
// recurrent layers
//

// the logits of a prompt that is fed in two parts
static std::vector<float> plain_parts(llama_model *model, const prompt &p, int32_t n) {
    context c(model, params_of(), "off");

    c.feed(0, p, 0, n);

    return c.feed(0, p, n, (int32_t)p.tokens.size());
}

// A match ends where a state was kept, and what follows has the bits of a sequence that was fed all.
static void test_states_of_layers(llama_model *model, bool is_unified) {
    context c(model, params_of(is_unified), "on");
    const prompt p(model, 1, 200);
    const prompt q(model, 1, 150, 2, 60);

    expect(llama_memory_has_prefix(c.mem), "a prefix");
    expect(c.begin(0, p) == 0, "nothing is known");
    c.feed(0, p, 0, 100);
    expect(c.begin(1, q) == 0, "no state yet");
    c.keep(0, prompt(model, 1, 100));
    c.feed(0, p, 100, 200);
    c.keep(0, p);
    expect(c.last(0) == 199, "a sequence that is kept goes on", c.last(0));

    int32_t n = c.begin(1, q);
    expect(n == 100 && c.last(1) == 99, "up to the first state", n);
    expect(c.feed(1, q, n, 210) == plain_parts(model, q, n), "behind the first state: the same bits");

    n = c.begin(2, p);
    expect(n == 100, "the last token is to be fed", n);

    const prompt longer(model, 1, 230);
    c.drop(0);
    n = c.begin(2, longer);
    expect(n == 200, "up to the last state", n);

    context other(model, params_of(), "off");
    other.feed(0, longer, 0, 100);
    other.feed(0, longer, 100, 200);
    expect(c.feed(2, longer, n, 230) == other.feed(0, longer, 200, 230), "behind the last state: the same bits");

    expect(c.begin(3, prompt(model, 1, 99)) == 0, "no state in a shorter one");
    c.keep(2, prompt(model, 1, 50));
    expect(c.begin(3, prompt(model, 1, 70)) == 0, "a state belongs to all tokens");
    llama_memory_clear(c.mem, true);
    expect(c.begin(0, p) == 0, "cleared");
}

// a sequence goes on with its own tokens where these are more, or gives them up
static void test_own_state(llama_model *model) {
    context c(model, params_of(), "on");
    const prompt p(model, 1, 100);
    const prompt q(model, 1, 130);

    c.serve(0, p);
    c.feed(0, q, 100, 120);
    expect(c.begin(0, q, 120) == 120 && c.last(0) == 119, "more than what was kept");
    expect(c.feed(0, q, 120, 130).size() > 0, "goes on");
    expect(c.begin(0, prompt(model, 7, 50)) == 0 && c.last(0) == -1, "nothing of another", c.last(0));
    expect(c.begin(0, q) == 100, "instead of nothing");
}

static void test_edits_of_states(llama_model *model) {
    context c(model, params_of(), "on");
    prompt p(model, 1, 100);

    c.begin(0, p);
    c.feed(0, p, 0, 100);
    if (llama_memory_can_shift(c.mem)) {
        llama_memory_seq_rm(c.mem, 0, 10, 20);
        llama_memory_seq_add(c.mem, 0, 20, -1, -10);
        p.tokens.erase(p.tokens.begin() + 10, p.tokens.begin() + 20);
        c.keep(0, p);
        p.tokens.push_back(0);
        expect(c.begin(1, p) == 0, "a state behind tokens that moved");
    }

    // a sequence that has a part of another's tokens, and its state
    const prompt whole(model, 3, 100);
    const prompt part(model, 3, 50, 4, 50);
    c.serve(0, whole);
    llama_memory_seq_rm(c.mem, 1, -1, -1);
    llama_memory_seq_cp(c.mem, 0, 1, 0, 50);
    c.feed(1, part, 50, 90);
    c.feed(1, part, 90, 100);
    c.keep(1, part);
    expect(c.begin(2, prompt(model, 3, 50, 4, 60)) == 0, "a state of other tokens");

    // a sequence that has fewer tokens than it is said to
    const prompt q(model, 2, 100);
    c.begin(2, q);
    c.feed(2, q, 0, 60);
    c.keep(2, q);
    expect(c.begin(3, q) == 60, "as many as were fed");
    c.drop(3);
    c.keep(3, q);
    c.keep(3, prompt(model, 1, 0));
    expect(c.begin(3, q) == 60, "a sequence without tokens changes nothing");
}

//
// stores
//

static const std::string FOLDER = "kept";

static std::string in_folder() {
    std::filesystem::remove_all(FOLDER);

    return "dir:" + FOLDER;
}

// what one context has kept, another finds, as far as blocks were full
static void test_folder(llama_model *model) {
    const std::string spec = in_folder();
    const prompt p(model, 1, 200);
    const prompt q(model, 1, 150, 2, 50);
    const prompt longer(model, 1, 230);
    const bool is_hybrid = llama_model_is_hybrid(model);

    {
        context c(model, params_of(), spec);

        expect(c.begin(0, p) == 0, "an empty folder");
        c.feed(0, p, 0, 100);
        c.keep(0, prompt(model, 1, 100));
        c.feed(0, p, 100, 200);
        c.keep(0, p);
    }
    {
        context c(model, params_of(), spec);

        int32_t n = c.begin(1, p);
        expect(n == (is_hybrid ? 100 : 192), "from the folder", n);
        expect_plain(model, c.feed(1, p, n, 200), p, "from the folder");
        n = c.begin(2, q);
        expect(n == (is_hybrid ? 100 : 150), "another", n);
        expect_plain(model, c.feed(2, q, n, 200), q, "another");
    }

    context c(model, params_of(), spec);
    const std::vector<float> steer((size_t)llama_model_n_embd(model) * llama_model_n_layer(model), 0.5f);
    llama_set_adapter_cvec(c.ctx, steer.data(), steer.size(), llama_model_n_embd(model), 1, 1);
    expect(c.begin(0, p) == 0, "a control vector");
    c.feed(0, p, 0, 200);
    c.keep(0, p);
    expect(c.begin(1, longer) == 200, "with the same control vector");
    llama_set_adapter_cvec(c.ctx, nullptr, 0, llama_model_n_embd(model), 1, 1);
    c.keep(0, longer);
    expect(c.begin(2, longer) < 200, "not what was computed with one");
    expect(c.begin(0, p) >= 100, "none any more");
}

int main(int argc, char **argv) {
    struct named_test {
        const char *name;
        std::function<void(llama_model *)> run;
        bool of_hybrids;
        bool of_others;
    };

    const std::vector<named_test> tests = {
        {"states of layers", [](auto *model) { test_states_of_layers(model, true); }, true, false},
        {"states of layers, not unified", [](auto *model) { test_states_of_layers(model, false); }, true, false},
        {"own state", test_own_state, true, false},
        {"edits of states", test_edits_of_states, true, false},
        {"sequences", [](auto *model) { test_sequences(model, true); }, false, true},
        {"sequences, not unified", [](auto *model) { test_sequences(model, false); }, false, true},
        {"own tokens", test_own_tokens, false, true},
        {"edits", test_edits, false, true},
        {"eviction", test_eviction, false, true},
        {"names", test_names, false, true},
        {"images", test_images, false, true},
        {"states", test_states, false, true},
        {"operations", test_operations, false, true},
        {"folder", test_folder, true, true},
    };

    only_failures = true;

    const bool ok = on_models(argc, argv, [&](llama_model *model) {
        for (const auto &test : tests) {
            if (llama_model_is_hybrid(model) ? test.of_hybrids : test.of_others) {
                const int n_before = n_failed;

                test.run(model);
                printf("  %-4s %s\n", n_failed == n_before ? "ok" : "FAIL", test.name);
                fflush(stdout);
            }
        }
    });

    printf("%s\n", ok && n_failed == 0 ? "ok" : "failed");

    return !ok || n_failed > 0;
}
