// Exchanges saved state between this cache and llama.cpp's own, in both directions:
//   test-kvcache-state [--types f32,f16,...] MODEL...
// A context that read a state is to go on as the one that wrote it, and what is wrong with a state is to be an error
// that leaves the sequence empty and all others as they were.
#include "images.h"
#include "scene.h"

#include <cstdarg>
#include <cstring>
#include <set>
#include <sstream>

static constexpr int N_STEPS = 20;      // tokens that a context goes on for
static constexpr llama_seq_id ALL = -1; // sequences

static int n_failed = 0;
static int n_checked = 0;
static int64_t n_allocations_left = INT64_MAX; // until the cache gets no more memory
static double worst = 0.0;                     // squared difference of logits over their squared length, in a setup
static double most = 0.0;                      // it may be

static bool expect(bool ok, const char *format, ...) {
    ++n_checked;
    if (ok) {
        return true;
    }

    va_list args;
    va_start(args, format);
    printf("    FAIL: ");
    vprintf(format, args);
    printf("\n");
    va_end(args);
    fflush(stdout);

    ++n_failed;
    return false;
}

//
// contexts
//

struct setup {
    std::string type; // of both caches, or one that llama.cpp's own lacks
    bool flash_attn = true;
    bool is_unified = true;
    bool swa_full = false;
    bool is_divided = false; // sequences have several tokens at one position
    uint32_t n_ctx = 256;    // of a sequence
};

// returns GGML_TYPE_COUNT if llama.cpp's own cache lacks the type
static ggml_type ggml_type_of(const std::string &name) {
    int res = 0;

    while (res < GGML_TYPE_COUNT && name != ggml_type_name((ggml_type)res)) {
        ++res;
    }
    return (ggml_type)res;
}

static bool is_float(const setup &s) { return s.type == "f32" || s.type == "f16" || s.type == "bf16"; }

// whether a context has this cache: of all, or of those that have the type
static std::vector<bool> caches_of(const setup &s) {
    return ggml_type_of(s.type) == GGML_TYPE_COUNT ? std::vector<bool>{true} : std::vector<bool>{false, true};
}

struct step {
    llama_token best;
    std::vector<float> logits;
};

static llama_context_params params_of(const setup &s) {
    auto params = exact_params();

    params.n_seq_max = 3;
    params.n_ctx = s.is_unified ? s.n_ctx : s.n_ctx * params.n_seq_max;
    params.n_batch = s.n_ctx;
    params.n_ubatch = 32;
    params.kv_unified = s.is_unified;
    params.swa_full = s.swa_full;
    params.flash_attn_type = s.flash_attn ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;

    if (const auto type = ggml_type_of(s.type); type == GGML_TYPE_COUNT) {
        set_types(s.type.c_str(), s.type.c_str());
    } else {
        params.type_k = params.type_v = type;
    }

    return params;
}

// a context of this cache, or of llama.cpp's own
class context : public scene_context {
  public:
    context(llama_model *model, const setup &s, bool is_ours) : scene_context(model, params_of(s), is_ours) {
        unset_types();
    }

    const char *name() const { return is_ours ? "this" : "llama.cpp's"; }

    void decode(const std::vector<llama_token> &tokens, llama_seq_id seq_id) {
        scene_batch batch;
        const llama_pos first = llama_memory_seq_pos_max(mem, seq_id) + 1;

        for (size_t i = 0; i < tokens.size(); ++i) {
            batch.push_back({tokens[i], first + (llama_pos)i, {seq_id}, i + 1 == tokens.size()});
        }

        const int status = scene_run::decode(batch);
        expect(status == 0, "%s cache: decoding %zu tokens of sequence %d gives %d", name(), tokens.size(), seq_id,
               status);
    }

    // an image, behind which text goes on at the next position
    void show(llama_seq_id seq_id, int n_rows) {
        const int status = decode_image(ctx, seq_id, llama_memory_seq_pos_max(mem, seq_id) + 1, 0, n_rows);

        expect(status == 0, "%s cache: decoding an image gives %d", name(), status);
    }

    // tokens [begin, end) of a text of its own
    void feed(uint32_t text, int begin, int end, llama_seq_id seq_id) {
        std::vector<llama_token> tokens;

        for (int i = begin; i < end; ++i) {
            tokens.push_back(text_token(model, text, i));
        }
        decode(tokens, seq_id);
    }

    int n_vocab() const { return llama_vocab_n_tokens(llama_model_get_vocab(model)); }

    // goes on with the tokens that `path` found best, or with its own best ones
    std::vector<step> go_on(llama_seq_id seq_id, const std::vector<step> *path = nullptr) {
        std::vector<step> res;
        llama_token token = 7 % n_vocab();

        for (int i = 0; i < N_STEPS; ++i) {
            decode({token}, seq_id);

            const float *row = llama_get_logits_ith(ctx, -1);
            const auto best = (llama_token)(std::max_element(row, row + n_vocab()) - row);

            res.push_back({best, {row, row + n_vocab()}});
            token = path ? (*path)[i].best : best;
        }
        return res;
    }
};

// whether the token that a step found best is, in the step that is wanted, as likely as the best one within the bound
static bool as_likely(const step &found, const step &wanted) {
    std::vector<float> logits = wanted.logits;

    logits[found.best] = logits[wanted.best];
    return nmse(logits, wanted.logits) <= most;
}

// expects the same tokens, of nearly the same logits
static void compare(const std::vector<step> &found, const std::vector<step> &wanted, const std::string &what) {
    for (int i = 0; i < N_STEPS; ++i) {
        const double error = nmse(found[i].logits, wanted[i].logits);

        worst = std::max(worst, error);
        if (!expect(error <= most, "%s: logits of step %d differ by %.2g", what.c_str(), i, error) ||
            !expect(as_likely(found[i], wanted[i]), "%s: token %d is %d, not %d", what.c_str(), i, found[i].best,
                    wanted[i].best)) {
            return;
        }
    }
}

//
// what contexts hold
//

static std::string architecture(const llama_model *model) {
    char res[64] = "";

    llama_model_meta_val_str(model, "general.architecture", res, sizeof(res));
    return res;
}

static bool is_mla(const llama_model *model) {
    char rank[16];

    return llama_model_meta_val_str(model, (architecture(model) + ".attention.kv_lora_rank").c_str(), rank,
                                    sizeof(rank)) > 0;
}

// whether tokens choose rows by an indexer
static bool has_indexer(const llama_model *model) {
    static const std::set<std::string> ARCHS = {"deepseek32", "dots3note", "glm-dsa", "hy_v4", "minimax-m3"};

    return ARCHS.count(architecture(model)) > 0;
}

// Whether both caches move tokens.  llama.cpp's own does so in all layers or none, has no part of a recurrent state to
// remove, turns the keys of most indexers the wrong way, and ends the process over bf16, over quantised parts of keys
// (MLA), over quantised layers without heads and with M-RoPE.
static bool can_move(const llama_model *model, const setup &s) {
    const bool is_plain = !is_mla(model) && architecture(model) != "deci";
    const bool is_rotatable =
        s.type != "bf16" && !has_image_positions(model) && (is_plain || is_float(s) || caches_of(s).size() == 1);

    return is_rotatable && !has_indexer(model) && !llama_model_is_hybrid(model) &&
           (s.swa_full || llama_model_n_swa(model) == 0);
}

// Expects a context to go on with a sequence as the one did that wrote its state.  With an indexer, the caches'
// rounding may choose other rows: f32 without flash attention alone is compared then.
static void expect_same(context &c, llama_seq_id seq_id, const std::vector<step> &wanted, bool is_from_ours,
                        const setup &s, const std::string &what) {
    const bool is_exact = s.type == "f32" && !s.flash_attn;

    if (c.is_ours == is_from_ours || !has_indexer(c.model) || is_exact) {
        compare(c.go_on(seq_id, &wanted), wanted, what);
    }
}

// divides positions, of tokens that sequences share too, so that several stand where others do
static void divide(context &c) {
    llama_memory_seq_div(c.mem, 0, 37, 45, 2);
    llama_memory_seq_div(c.mem, 2, 0, 16, 2);
    llama_memory_seq_add(c.mem, 2, 16, -1, -8);

    // llama.cpp's own cache moves keys when it decodes
    c.feed(1, 52, 54, 0);
    c.feed(3, 32, 33, 2);
}

// Whether all layers that attend have windows, as in the hybrid that test-llama-archs writes.  llama.cpp then saves
// cells without rows as well, for layers without windows, at positions that no window shows any more.
static bool has_windows_only(const llama_model *model) {
    return llama_model_is_hybrid(model) && llama_model_n_swa(model) > 0;
}

static bool is_size(const llama_model *model, size_t found, size_t wanted) {
    return found == wanted || has_windows_only(model);
}

// Two sequences that share a prefix, and one whose end has moved down.
static void fill(context &c, const setup &s) {
    c.feed(1, 0, 40, 0);
    llama_memory_seq_cp(c.mem, 0, 1, -1, -1);
    c.feed(1, 40, 52, 0);
    c.feed(2, 0, 9, 1);

    if (llama_memory_can_shift(c.mem) && can_move(c.model, s)) {
        c.feed(3, 0, 30, 2);
        llama_memory_seq_rm(c.mem, 2, 5, 12);
        llama_memory_seq_add(c.mem, 2, 12, -1, -7);
        c.feed(3, 30, 32, 2);
    } else {
        c.feed(3, 0, 32, 2);
    }
    if (has_image_positions(c.model)) {
        c.show(0, 4);
        c.feed(7, 0, 5, 0);
    }
    if (s.is_divided) {
        divide(c);
    }
}

// other content, to be replaced
static void fill_otherwise(context &c) {
    c.feed(4, 0, 20, 0);
    c.feed(5, 0, 11, 1);
    c.feed(6, 0, 60, 2);
}

static std::string direction(const context &from, const context &to, const std::string &what) {
    return what + " from " + from.name() + " cache to " + to.name();
}

//
// exchanges
//

struct saved {
    std::vector<bytes> seqs;
    bytes all;
    std::vector<std::vector<step>> steps; // how each sequence goes on
};

static saved save_all(context &c) {
    saved res;

    for (llama_seq_id s = 0; s < 3; ++s) {
        res.seqs.push_back(c.save(s));
    }
    res.all = c.save(ALL);
    for (llama_seq_id s = 0; s < 3; ++s) {
        res.steps.push_back(c.go_on(s));
    }
    return res;
}

static void exchange(llama_model *model, const setup &s, context &from, const saved &state, bool is_ours) {
    context to(model, s, is_ours);

    for (llama_seq_id id = 0; id < 3; ++id) {
        const llama_seq_id dest = (id + 1) % 3;
        const auto what = direction(from, to, "sequence " + std::to_string(id));

        llama_memory_clear(to.mem, true);
        fill_otherwise(to);
        const bytes others[2] = {to.save((dest + 1) % 3), to.save((dest + 2) % 3)};

        expect(to.load(state.seqs[id], dest) == state.seqs[id].size(), "%s: not read", what.c_str());
        expect(is_size(model, to.save(dest).size(), state.seqs[id].size()), "%s: saved again with another size",
               what.c_str());
        expect(to.save((dest + 1) % 3) == others[0] && to.save((dest + 2) % 3) == others[1],
               "%s: other sequences have changed", what.c_str());
        expect_same(to, dest, state.steps[id], from.is_ours, s, what);
    }

    const auto what = direction(from, to, "all sequences");

    // where sequences share some of their tokens at a position, and not others, this cache reads each its own
    expect(to.load(state.all, ALL) == state.all.size(), "%s: not read", what.c_str());
    expect(!has_indexer(model) || to.save(ALL) == state.all, "%s: saved again with other bytes", what.c_str());
    expect(is_size(model, to.save(ALL).size(), state.all.size()) || s.is_divided, "%s: saved again with another size",
           what.c_str());
    for (llama_seq_id id = 0; id < 3; ++id) {
        expect(is_size(model, to.save(id).size(), state.seqs[id].size()), "%s: sequence %d has another size",
               what.c_str(), id);
    }
    for (llama_seq_id id = 0; id < 3; ++id) {
        expect_same(to, id, state.steps[id], from.is_ours, s, what);
    }
}

static void test_exchange(llama_model *model, const setup &s) {
    context ours(model, s, true);

    fill(ours, s);

    const saved state_ours = save_all(ours);

    for (const bool is_ours : caches_of(s)) {
        exchange(model, s, ours, state_ours, is_ours);
    }
    if (caches_of(s).size() > 1) {
        context own(model, s, false);

        fill(own, s);

        const saved state_own = save_all(own);

        for (llama_seq_id id = 0; id < 3; ++id) {
            expect(is_size(model, state_ours.seqs[id].size(), state_own.seqs[id].size()),
                   "sequence %d has %zu bytes with this cache, %zu with llama.cpp's", id, state_ours.seqs[id].size(),
                   state_own.seqs[id].size());
        }
        expect(is_size(model, state_ours.all.size(), state_own.all.size()) || s.is_divided,
               "the state has %zu bytes with this cache, %zu with llama.cpp's", state_ours.all.size(),
               state_own.all.size());

        for (const bool is_ours : {false, true}) {
            exchange(model, s, own, state_own, is_ours);
        }
    }

    const uint32_t on_device = LLAMA_STATE_SEQ_FLAGS_ON_DEVICE;

    expect(ours.load(state_ours.all, ALL) == state_ours.all.size(), "its own state is not read");

    const bytes state = ours.save(0, on_device);

    const bytes before = ours.save(0);

    llama_memory_seq_rm(ours.mem, 0, -1, -1);
    expect(ours.load(state, 0, on_device) == state.size(), "a state on the device is not read");
    expect(ours.save(0) == before, "a state on the device is not what was saved");
}

// three sequences that fit only as long as they share a prefix
static void test_sharing(llama_model *model, const setup &s) {
    context from(model, s, true);

    from.feed(1, 0, 130, 0);
    llama_memory_seq_cp(from.mem, 0, 1, -1, -1);
    llama_memory_seq_cp(from.mem, 0, 2, 0, 100);
    from.feed(2, 0, 25, 0);
    from.feed(3, 0, 15, 1);

    const saved state = save_all(from);

    for (const bool is_ours : caches_of(s)) {
        context to(model, s, is_ours);

        const auto what = direction(from, to, "a shared prefix");

        expect(to.load(state.all, ALL) == state.all.size(), "%s: not read", what.c_str());
        expect(to.save(ALL).size() == state.all.size(), "%s: saved again with another size", what.c_str());
        for (llama_seq_id id = 0; id < 3; ++id) {
            expect_same(to, id, state.steps[id], from.is_ours, s, what);
        }
    }
}

//
// states that are wrong
//

// what llama_context writes before the memory does, and refuses by itself
static size_t n_head(const context &c, llama_seq_id seq_id) {
    return sizeof(uint32_t) + (seq_id == ALL ? architecture(c.model).size() : sizeof(llama_seq_id));
}

// Reads a state that was changed, which may make it another valid one.  Returns whether it was read.
static bool read_changed(context &c, const bytes &state, llama_seq_id seq_id, const bytes &other, const char *what,
                         size_t at) {
    const size_t n = c.load(state, seq_id);

    n_allocations_left = INT64_MAX;

    if (n == 0 && at >= n_head(c, seq_id)) {
        expect(llama_memory_seq_pos_max(c.mem, seq_id == ALL ? 0 : seq_id) == -1, "%s at %zu: rows were left", what,
               at);
    }
    if (seq_id != ALL) {
        expect(c.save(1) == other, "%s at %zu: another sequence has changed", what, at);
    }
    return n > 0;
}

static void test_wrong(llama_model *model, const setup &s) {
    context c(model, s, true);

    c.feed(1, 0, 12, 0);
    c.feed(2, 0, 7, 1);

    const bytes other = c.save(1);
    const auto wanted = c.go_on(1);

    for (const llama_seq_id seq_id : {ALL, 0}) {
        expect(c.load(other, 1) == other.size(), "sequence 1 is not read");
        if (seq_id == ALL) {
            c.feed(1, 0, 12, 0);
        }

        const bytes state = c.save(seq_id);

        // llama.cpp makes a string as long as the first word of a state of all sequences says, up to 4 GiB
        const size_t n_string = seq_id == ALL ? 4 + architecture(model).size() : 0;
        const size_t n_header = std::min<size_t>(state.size(), n_string + 400);

        for (size_t n = 0; n < state.size(); n += n < n_header ? 3 : state.size() / 40 + 1) {
            expect(!read_changed(c, bytes(state.begin(), state.begin() + n), seq_id, other, "a state that ends", n),
                   "a state that ends at %zu was read", n);
        }

        // with a count in place of each word: of streams, cells, sequences, layers, bytes
        for (const uint32_t value : {0u, 1u, 257u, 0x7fffffffu, 0xffffffffu}) {
            for (size_t at = n_string; at + 4 <= n_header; at += 4) {
                bytes changed = state;

                memcpy(&changed[at], &value, 4);
                read_changed(c, changed, seq_id, other, "a state with another word", at);
            }
        }
        expect(c.load(state, seq_id) == state.size(), "the state is not read after all that");
    }

    expect(c.load(other, 1) == other.size(), "sequence 1 is not read");
    compare(c.go_on(1, &wanted), wanted, "a context that read wrong states");
}

static void *allocate(void *, size_t size, size_t alignment, const kvc_memory_hint *) {
    return n_allocations_left-- > 0 ? aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment)
                                    : nullptr;
}

static void release(void *, void *memory, size_t, const kvc_memory_hint *) { free(memory); }

// each allocation of the cache fails once
static void test_memory(llama_model *model, const setup &s) {
    static const kvc_allocator failing = {sizeof(failing), nullptr, allocate, release, nullptr};

    llama_kvcache_allocator = &failing;

    context from(model, s, true);
    context to(model, s, true);

    llama_kvcache_allocator = nullptr;

    fill(from, s);
    to.feed(2, 0, 7, 1);

    const bytes other = to.save(1);

    for (const llama_seq_id seq_id : {0, ALL}) {
        const bytes state = from.save(seq_id);

        bool is_read = false;
        for (int64_t n = 0; !is_read; ++n) {
            n_allocations_left = n;
            is_read = read_changed(to, state, seq_id, other, "a state without memory", 100 + n);
            expect(is_read || n < 1000, "a state is not read with %lld allocations", (long long)n);
            if (n == 1000) {
                return;
            }
        }
        expect(to.save(seq_id).size() == state.size(), "a state is not what was saved");
    }
}

// types, transposed values and streams that the context does not have
static void test_mismatch(llama_model *model, const setup &s) {
    context c(model, s, true);

    setup other = s;
    other.type = s.type == "f16" ? "f32" : "f16";
    context of_type(model, other, true);
    of_type.feed(1, 0, 12, 0);
    expect(c.load(of_type.save(0), 0) == 0, "rows of another type were read");

    context own(model, other, false);
    c.feed(1, 0, 12, 0);
    expect(own.load(c.save(0), 0) == 0, "rows of another type were read by llama.cpp's own cache");

    other = s;
    other.is_unified = !s.is_unified;
    context of_streams(model, other, true);
    of_streams.feed(1, 0, 12, 0);
    expect(c.load(of_streams.save(0), 0) == 0, "another number of streams was read");

    if (!has_windows_only(model)) {
        other = s;
        other.n_ctx = 512;
        context larger(model, other, true);
        larger.feed(1, 0, 257, 0);
        expect(c.load(larger.save(0), 0) == 0, "more cells than there are were read");
        expect(llama_memory_seq_pos_max(c.mem, 0) == -1, "rows were left");
    }

    if (is_float(s)) { // transposed by one, not by the other
        other = s;
        other.flash_attn = !s.flash_attn;
        context transposed(model, other, true);
        transposed.feed(1, 0, 12, 0);
        const bytes state = transposed.save(0);
        const auto wanted = transposed.go_on(0);
        expect(c.load(state, 0) == state.size(), "transposed values were not read");
        compare(c.go_on(0, &wanted), wanted, "transposed values");
    }
}

// Tokens of one position are told apart by nothing that the keys of an indexer are saved with.
static void test_divided_indexer(llama_model *model, const setup &s) {
    context c(model, s, true);

    c.feed(1, 0, 40, 0);
    llama_memory_seq_div(c.mem, 0, 0, 40, 2);
    expect(c.load(c.save(0), 1) == 0, "several tokens at one position were read");
    expect(llama_memory_seq_pos_max(c.mem, 1) == -1 && llama_memory_seq_pos_max(c.mem, 0) == 19, "rows were left");
}

//
// checkpoints of models with windows
//

// The state of the layers with windows takes a sequence back to where their rows were overwritten since.
static void test_partial(llama_model *model, setup s) {
    static constexpr int N_SAVED = 100;

    const bool is_short = llama_model_n_swa(model) < 300; // overwritten by what follows

    const uint32_t flags = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;

    s.n_ctx = 1024;

    std::vector<bytes> states;
    std::vector<std::vector<step>> steps;

    for (const bool is_ours : caches_of(s)) {
        context c(model, s, is_ours);

        c.feed(1, 0, N_SAVED, 0);
        states.push_back(c.save(0, flags));
        steps.push_back(c.go_on(0));
    }
    expect(states.front().size() == states.back().size(),
           "a checkpoint has %zu bytes with this cache, %zu with llama.cpp's", states.back().size(),
           states.front().size());

    for (const bool is_ours : caches_of(s)) {
        for (size_t from = 0; from < states.size(); ++from) {
            context c(model, s, is_ours);

            const std::string what = std::string("a checkpoint from ") +
                                     (from + 1 == states.size() ? "this" : "llama.cpp's") + " cache to " + c.name();

            c.feed(1, 0, N_SAVED, 0);
            c.feed(2, 0, 700, 0);
            c.feed(3, 0, 20, 1);
            const bytes other = c.save(1);

            if (is_ours && is_short) {
                expect(!llama_memory_seq_rm(c.mem, 0, N_SAVED, -1), "%s: windows are still there", what.c_str());
            }
            expect(c.load(states[from], 0, flags) == states[from].size(), "%s: not read", what.c_str());
            expect(llama_memory_seq_pos_max(c.mem, 0) == N_SAVED - 1, "%s: the last position is %d", what.c_str(),
                   llama_memory_seq_pos_max(c.mem, 0));
            expect(llama_memory_seq_rm(c.mem, 0, N_SAVED, -1), "%s: the sequence does not go back", what.c_str());
            expect_same(c, 0, steps[from], from + 1 == states.size(), s, what);
            expect(c.save(1) == other, "%s: another sequence has changed", what.c_str());
        }
    }
}

// Windows of two sequences with a prefix in common, which only one of them still sees.
static void test_expired(llama_model *model, setup s) {
    s.n_ctx = 1024;

    context from(model, s, true);

    from.feed(1, 0, 60, 0);
    llama_memory_seq_cp(from.mem, 0, 1, -1, -1);
    from.feed(2, 0, 500, 0);
    from.feed(3, 0, 10, 1);

    const bytes state = from.save(ALL);
    const llama_pos pos_min[2] = {llama_memory_seq_pos_min(from.mem, 0), llama_memory_seq_pos_min(from.mem, 1)};
    const std::vector<step> steps[2] = {from.go_on(0), from.go_on(1)};

    expect(pos_min[0] > 60 && pos_min[1] == 0, "nothing has expired, or too much: %d, %d", pos_min[0], pos_min[1]);

    for (const bool is_ours : caches_of(s)) {
        context to(model, s, is_ours);

        const auto what = direction(from, to, "a prefix that one sequence sees");

        expect(to.load(state, ALL) == state.size(), "%s: not read", what.c_str());
        expect(to.save(ALL).size() == state.size(), "%s: saved again with another size", what.c_str());
        for (llama_seq_id id = 0; id < 2; ++id) {
            const llama_pos first = llama_memory_seq_pos_min(to.mem, id);
            const llama_pos seen = llama_memory_seq_pos_max(to.mem, id) - llama_model_n_swa(model) + 1;

            expect(first >= pos_min[id] && first <= std::max(0, seen), "%s: sequence %d begins at %d", what.c_str(), id,
                   first);
            expect_same(to, id, steps[id], true, s, what);
        }
        if (is_ours) {
            expect(!llama_memory_seq_rm(to.mem, 0, 50, -1), "%s: sequence 0 goes back", what.c_str());
            expect(llama_memory_seq_rm(to.mem, 1, 50, -1), "%s: sequence 1 does not go back", what.c_str());
        }
    }
}

//
// all of it
//

static void test_setup(llama_model *model, setup s, bool is_first) {
    const bool has_windows = llama_model_n_swa(model) > 0;

    for (const bool swa_full : {false, true}) {
        if (swa_full && !has_windows) {
            continue;
        }
        s.swa_full = swa_full;
        test_exchange(model, s);
        if (can_move(model, s)) {
            s.is_divided = true;
            test_exchange(model, s);
            s.is_divided = false;
        }
    }
    s.swa_full = false;

    if (s.is_unified && !llama_model_is_hybrid(model)) {
        test_sharing(model, s);
    }
    if (is_first) {
        test_wrong(model, s);
        test_memory(model, s);
    }
    test_mismatch(model, s);
    if (has_indexer(model)) {
        test_divided_indexer(model, s);
    }
    if (has_windows && !has_windows_only(model)) {
        test_partial(model, s);
    }
    if (has_windows && !has_windows_only(model) && llama_model_n_swa(model) < 200 && s.is_unified) {
        test_expired(model, s);
    }
}

static void test_model(llama_model *model, const std::vector<std::string> &types) {
    for (const auto &type : types) {
        most = type == "int4" ? 1e-3 : 1e-4; // moved rows are quantised once more as they are saved
        for (const bool flash_attn : {true, false}) {
            for (const bool is_unified : {true, false}) {
                setup s;
                s.type = type;
                s.flash_attn = flash_attn;
                s.is_unified = is_unified;

                if (!is_float(s) && caches_of(s).size() > 1 && !flash_attn) {
                    continue; // llama.cpp takes none
                }

                const int n_before = n_failed;
                worst = 0.0;

                test_setup(model, s, type == types[0]);

                printf("  %-4s %-4s %s, %s: logits differ by at most %.1g\n", n_failed == n_before ? "ok" : "FAIL",
                       type.c_str(), flash_attn ? "flash attention" : "values transposed",
                       is_unified ? "unified" : "streams", worst);
                fflush(stdout);
            }
        }
    }
}

static std::vector<std::string> parse_types(const std::string &names) {
    std::vector<std::string> res;
    std::istringstream in(names);

    for (std::string name; std::getline(in, name, ',');) {
        res.push_back(name);
    }
    return res;
}

int main(int argc, char **argv) {
    std::string types = "f32,f16,bf16,q8_0,q4_0,q4_1,q5_0,q5_1,iq4_nl,int8,int6,int4";

    if (argc > 2 && !strcmp(argv[1], "--types")) {
        types = argv[2];
        argc -= 2;
        argv += 2;
    }

    const bool ok = on_models(argc, argv, [&](llama_model *model) { test_model(model, parse_types(types)); });

    printf("%d of %d checks failed\n", n_failed, n_checked);

    return !ok || n_failed > 0;
}
