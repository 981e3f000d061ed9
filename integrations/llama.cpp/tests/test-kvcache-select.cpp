// Selected rows: which tokens of a decode read which rows.
//   test-kvcache-select MODEL...
// A model has heads of 32 elements, and three layers with attention or more.  If it has neither windows nor recurrent
// layers, values of single rows are made NaN in a saved state: the logits of a token show whether it has read them.
#include "expect.h"
#include "scene.h"

#include <cstring>

using logits = std::vector<float>;

static constexpr int N_LONG = 8200; // tokens of a text from which rows are selected
static constexpr int N_ROWS = 64;   // that are selected
static constexpr int N_CELLS = 5 * 8192;

// returns parameters of a context whose new tokens select so many rows
static const llama_context_params &selecting(int n_rows, const llama_context_params &params) {
    setenv("LLAMA_KVCACHE_SELECT", std::to_string(n_rows).c_str(), 1);

    return params;
}

// a context of this cache, whose new tokens select so many rows; 0: all are read
class context : public scene_context {
  public:
    context(llama_model *model, int n_rows, const llama_context_params &params)
        : scene_context(model, selecting(n_rows, params)) {}

    context(llama_model *model, int n_rows) : context(model, n_rows, params_of()) {}

    static llama_context_params params_of() {
        auto params = exact_params();

        params.n_ctx = N_CELLS;
        params.n_batch = 1024;
        params.n_ubatch = 512;
        params.type_k = GGML_TYPE_F16;
        params.type_v = GGML_TYPE_F16;
        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;

        return params;
    }

    // decodes, and returns the logits of each token
    std::vector<logits> decode(scene_batch batch) {
        std::vector<logits> res;

        for (auto &token : batch) {
            token.has_logits = true;
        }
        if (scene_run::decode(batch)) {
            return std::vector<logits>(batch.size());
        }
        for (size_t i = 0; i < batch.size(); ++i) {
            const float *row = llama_get_logits_ith(ctx, (int32_t)i);

            res.emplace_back(row, row + llama_vocab_n_tokens(llama_model_get_vocab(model)));
        }

        return res;
    }

    // n tokens behind what a sequence has
    scene_batch next(int n, llama_seq_id seq_id = 0) const {
        const int first = llama_memory_seq_pos_max(mem, seq_id) + 1;

        return tokens(1, first, first + n, {seq_id}, first);
    }

    // feeds a sequence a text of so many tokens, and returns the last logits
    logits feed(int n_tokens, llama_seq_id seq_id = 0) {
        logits last;

        for (int first = llama_memory_seq_pos_max(mem, seq_id) + 1; first < n_tokens;) {
            const int n = std::min(1000, n_tokens - first);

            last = decode(next(n, seq_id)).back();
            first += n;
        }

        return last;
    }

    bytes save() const { return scene_context::save(0); }

    context &load(const bytes &state, llama_seq_id seq_id = 0) {
        if (!scene_context::load(state, seq_id)) {
            expect(false, "the state is loaded");
        }

        return *this;
    }

    void truncate(int n_tokens, llama_seq_id seq_id = 0) { llama_memory_seq_rm(mem, seq_id, n_tokens, -1); }

    size_t n_bytes() const {
        size_t res = 0;

        for (const auto &part : mem->memory_breakdown()) {
            res += part.second;
        }

        return res;
    }
};

static bool is_finite(const logits &row) {
    return !row.empty() && std::all_of(row.begin(), row.end(), [](float x) { return std::isfinite(x); });
}

static bool is_same(const std::vector<logits> &a, const std::vector<logits> &b) {
    return !a.empty() && !a[0].empty() && a == b;
}

// returns a state of one sequence, in f16, in which a value of a row is NaN in one layer
static bytes with_nan(bytes state, int layer, int position) {
    const auto number = [&](size_t at) {
        uint32_t res;

        memcpy(&res, &state[at], sizeof(res));

        return res;
    };
    const size_t n_tokens = number(12); // behind a magic number, a version, and the number of streams

    size_t at = 16 + 12 * n_tokens; // behind the cells
    const size_t n_layers = number(at + 4);

    at += 8;
    for (size_t i = 0; i < n_layers + layer; ++i) { // all keys, and the values of the layers before
        at += 12 + n_tokens * number(at + 4);
    }

    const size_t n_row_bytes = number(at + 4);

    at += 12 + position * n_row_bytes;
    for (size_t i = 0; i < n_row_bytes; i += 2) {
        state[at + i] = 0;
        state[at + i + 1] = 0x7e;
    }

    return state;
}

// whether the last of n new tokens has not read a row
static bool is_unread(llama_model *model, int n_rows, const bytes &state, int n_new = 1) {
    context ctx(model, n_rows);

    ctx.load(state);

    return is_finite(ctx.decode(ctx.next(n_new)).back());
}

static void test_what_is_read(llama_model *model, const bytes &text) {
    int n_unread = 0;

    for (int i = 0; i < 8; ++i) {
        n_unread += is_unread(model, N_ROWS, with_nan(text, 3, 1000 + 900 * i));
    }

    const bytes poisoned = with_nan(text, 3, 4000);

    expect(n_unread >= 6, "of 8 rows in the middle, a token reads next to none (" + std::to_string(8 - n_unread) + ")");
    expect(!is_unread(model, 0, poisoned), "a token of another context reads them");
    expect(!is_unread(model, N_ROWS, with_nan(text, 3, 5)), "a token reads the first rows");
    expect(!is_unread(model, N_ROWS, with_nan(text, 3, N_LONG - 20)), "a token reads the last rows");
    expect(!is_unread(model, N_ROWS, with_nan(text, 0, 4000)), "a token reads all rows of the first layer");
    expect(!is_unread(model, N_ROWS, with_nan(text, 1, 4000)), "a token reads all rows of the second layer");
    expect(!is_unread(model, N_ROWS, poisoned, 2), "guesses read all rows");
    expect(!is_unread(model, N_ROWS, poisoned, 513), "the last ubatch of a prompt reads all rows, if of one token");
    expect(!is_unread(model, N_LONG / 2, poisoned), "a token reads all rows where it may select half of them");
}

static void test_from_which_token_on(llama_model *model, const bytes &text) {
    context ctx(model, N_ROWS);

    ctx.load(with_nan(text, 3, 4000));
    ctx.truncate(8190);
    expect(!is_finite(ctx.decode(ctx.next(1))[0]), "token 8191 reads all rows");
    ctx.load(with_nan(text, 3, 4000));
    ctx.truncate(8191);
    expect(is_finite(ctx.decode(ctx.next(1))[0]), "token 8192 selects");
}

// each token of a decode goes its own way, whatever stands beside it
static void test_side_by_side(llama_model *model, const bytes &text) {
    const bytes poisoned = with_nan(text, 3, 4000);

    const auto alone = [&](int n_held, int n_new) {
        context ctx(model, N_ROWS);

        ctx.load(n_held == N_LONG ? poisoned : text);
        ctx.truncate(n_held);

        return ctx.decode(ctx.next(n_new));
    };

    context ctx(model, N_ROWS);
    scene_batch batch;

    ctx.load(poisoned, 0).load(poisoned, 1).load(text, 2).load(poisoned, 3);
    ctx.truncate(100, 2);
    for (const auto &[seq_id, n] : std::vector<std::pair<llama_seq_id, int>>{{1, 2}, {0, 1}, {2, 20}, {3, 1}}) {
        const auto tokens = ctx.next(n, seq_id);

        batch.insert(batch.end(), tokens.begin(), tokens.end());
    }

    const auto found = ctx.decode(batch);
    const auto of = [&](int first, int n) {
        return std::vector<logits>(found.begin() + first, found.begin() + first + n);
    };

    expect(!is_finite(found[0]) && !is_finite(found[1]), "guesses beside others read all rows");
    expect(is_finite(found[2]) && is_finite(found[23]), "tokens beside others select");
    expect(is_same(of(2, 1), alone(N_LONG, 1)) && is_same(of(23, 1), alone(N_LONG, 1)), "as if they were alone");
    expect(is_same(of(3, 20), alone(100, 20)), "a prompt beside others is computed as if it were alone");

    // a token of two sequences, of which one has another
    ctx.load(poisoned, 0);
    ctx.truncate(0, 1);
    llama_memory_seq_cp(ctx.mem, 0, 1, -1, -1);
    batch = ctx.tokens(1, N_LONG, N_LONG + 1, {0, 1}, N_LONG);
    expect(is_finite(ctx.decode(batch)[0]), "a token of two sequences selects");
    batch = ctx.tokens(1, N_LONG + 1, N_LONG + 2, {0, 1}, N_LONG + 1);
    batch.push_back(ctx.tokens(1, N_LONG + 2, N_LONG + 3, {1}, N_LONG + 2)[0]);
    expect(!is_finite(ctx.decode(batch)[0]), "but not where one of these has another token");
}

static void test_threads_and_failures(llama_model *model, const bytes &text) {
    std::vector<std::vector<logits>> found;

    for (const int n_threads : {1, 3}) {
        auto params = context::params_of();

        params.n_threads = params.n_threads_batch = n_threads;

        context ctx(model, N_ROWS, params);

        ctx.load(text).load(text, 1);

        auto batch = ctx.next(1);

        batch.push_back(ctx.next(1, 1)[0]);
        found.push_back(ctx.decode(batch));
    }
    expect(is_same(found[0], found[1]), "three threads find what one finds");

    static int n_left = -1; // allocations until memory is short, -1: it is not
    static const kvc_allocator counting = {
        sizeof(kvc_allocator), nullptr,
        [](void *, size_t size, size_t alignment, const kvc_memory_hint *) {
            return n_left >= 0 && n_left-- == 0 ? nullptr : aligned_alloc(alignment, GGML_PAD(size, alignment));
        },
        [](void *, void *memory, size_t, const kvc_memory_hint *) { free(memory); }, nullptr};

    llama_kvcache_allocator = &counting;

    context ctx(model, N_ROWS);
    bool ok = true;
    bool is_short = true;
    int n_refused = 0;

    ctx.load(text).load(text, 1);

    auto batch = ctx.next(2, 1);

    batch.push_back(ctx.next(1)[0]); // a plan for each
    for (int n_given = 0; is_short && n_given < 100; ++n_given) {
        n_left = n_given;

        const bool is_refused = ctx.scene_run::decode(batch) != 0;

        is_short = n_left < 0;
        n_left = -1;
        ok = ok && (is_short || !is_refused);
        n_refused += is_refused;
        ctx.truncate(N_LONG);
        ctx.truncate(N_LONG, 1);
    }
    expect(ok && !is_short && n_refused > 1 && is_same(ctx.decode(ctx.next(1)), {found[0][0]}),
           "a decode goes on after memory was short (" + std::to_string(n_refused) + " times)");
    llama_kvcache_allocator = nullptr;
}

// a prompt is known as far as its rows follow from its tokens alone
static void test_prefix(llama_model *model) {
    for (const int n_rows : {0, N_ROWS}) {
        setenv("LLAMA_KVCACHE_PREFIX", "on", 1);

        context ctx(model, n_rows);
        std::vector<llama_token> ids;

        for (int i = 0; i < N_LONG + 10; ++i) {
            ids.push_back(text_token(model, 1, i));
        }

        const llama_memory_prompt prompt = {ids.data(), N_LONG, nullptr, nullptr};
        const llama_memory_prompt longer = {ids.data(), N_LONG + 10, nullptr, nullptr};

        setenv("LLAMA_KVCACHE_PREFIX", "off", 1);
        llama_memory_prefix_begin(ctx.mem, 0, &prompt, 0);
        ctx.feed(N_LONG);
        for (int i = 0; i < 5; ++i) {
            ctx.decode(ctx.next(1));
        }
        llama_memory_prefix_keep(ctx.mem, 0, &longer);

        const int n_known = llama_memory_prefix_begin(ctx.mem, 1, &longer, 0);

        expect(n_known == (n_rows ? N_LONG : N_LONG + 5),
               "with " + std::to_string(n_rows) + " rows, " + std::to_string(n_known) + " tokens are known");
    }
}

static double error_of(const logits &found, const logits &exact) { return nmse(found, exact); }

// what holds for any model
static void test_any(llama_model *model) {
    context dense(model, 0), few(model, N_ROWS), many(model, 3000);
    std::vector<logits> exact;

    for (auto *ctx : {&dense, &few, &many}) {
        auto prompt = std::vector<logits>{ctx->feed(8000)};

        prompt.push_back(ctx->decode(ctx->next(1))[0]);
        prompt.push_back(ctx->feed(N_LONG - 3));
        for (const auto &row : ctx->decode(ctx->next(3))) {
            prompt.push_back(row);
        }
        if (ctx == &dense) {
            exact = prompt;
        } else {
            expect(is_same(prompt, exact), "prompts, guesses and tokens of short texts are as without selection");
        }
    }

    const auto token = dense.decode(dense.next(1))[0];
    const double error_of_few = error_of(few.decode(few.next(1))[0], token);
    const double error_of_many = error_of(many.decode(many.next(1))[0], token);

    printf("       %d rows: %.2g off, 3000: %.2g\n", N_ROWS, error_of_few, error_of_many);
    expect(error_of_few > error_of_many && error_of_many > 0 && error_of_many < 1e-2, "more rows are nearer to all");

    // sketches are made again
    context other(model, N_ROWS);

    other.load(few.save());
    expect(is_same(other.decode(other.next(1)), few.decode(few.next(1))), "a saved text goes on as it would have");

    // 10 bytes for each head of 32
    const double extra = (double)few.n_bytes() - dense.n_bytes();

    expect(extra > 0 && many.n_bytes() == few.n_bytes(), "contexts that select have sketches");
}

static void test_bytes(llama_model *model) {
    context dense(model, 0), few(model, N_ROWS);

    const double n_sketch = 10.0 * N_CELLS * llama_model_n_head_kv(model) * (llama_model_n_layer(model) - 2);
    const double more = (few.n_bytes() - dense.n_bytes()) / n_sketch;

    expect(more >= 1 && more < 1.02, "sketches of all layers but two are counted (" + std::to_string(more) + ")");
}

int main(int argc, char **argv) {
    const bool ok = on_models(argc, argv, [](llama_model *model) {
        test_any(model);
        if (llama_model_is_hybrid(model) || llama_model_n_swa(model) > 0) {
            return;
        }

        const bytes text = [&] {
            context ctx(model, 0);

            ctx.feed(N_LONG);

            return ctx.save();
        }();

        test_bytes(model);
        test_prefix(model);
        for (const auto test :
             {test_what_is_read, test_from_which_token_on, test_side_by_side, test_threads_and_failures}) {
            test(model, text);
        }
    });

    return !ok || n_failed > 0;
}
