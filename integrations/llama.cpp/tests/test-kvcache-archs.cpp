// Runs models on llama.cpp's own cache and on this one, and compares logits or embeddings:
//
//   test-kvcache-archs [OPTIONS] MODEL...
//     --types f32,f16,q8_0 --scenes text,seqs,...     these only
//     --set KEY=VALUE --yarn FACTOR                   other hyperparameters
//     --embeddings                                    of embeddings
//     --threads N                                     for this cache, 1 if left out
//   test-kvcache-archs --table
//     prints which architectures are served, as the README has it
//
// The reference is its own cache in f32 without flash attention.  With any type, this cache is to be no further from it
// than its own with flash attention is.  A line a model and scene: normalised squared errors, own and this one's.
// Weights of the models are to be large enough for attention to be far from even (test-llama-archs -d 0.5).
#include "images.h"
#include "random.h"
#include "scene.h"

#include "ggml-cpp.h"
#include "gguf.h"
#include "llama-arch.h"
#include "llama-model.h"

#include <cstring>
#include <map>
#include <random>
#include <stdexcept>

#include <sys/wait.h>
#include <unistd.h>

static std::string g_reason;      // why the last context does not use this cache
static bool g_is_ours = false;    // whether it does
static std::string g_last_error;  // of llama.cpp
static const double FLOOR = 1e-9; // rounding: errors below are not compared

static void on_log(ggml_log_level level, const char *text, void * /*user*/) {
    if (const char *reason = strstr(text, "llama_kvcache_create: not used: ")) {
        g_reason = strstr(reason, "used: ") + 6;
        g_reason.erase(g_reason.find_last_not_of('\n') + 1);
    }
    g_is_ours = g_is_ours || !strncmp(text, "llama_kvcache: ", 15);

    if (level == GGML_LOG_LEVEL_ERROR) {
        g_last_error = text;
    }
    if (getenv("VERBOSE")) {
        fputs(text, stderr);
    }
}

struct setup {
    bool is_ours = false;
    bool flash_attn = false;
    ggml_type type = GGML_TYPE_F32;
    uint32_t n_ubatch = 64;
};

struct options {
    std::vector<std::string> models;
    std::vector<std::string> types = {"f32", "f16", "q8_0"};
    std::vector<std::string> scenes;
    std::vector<llama_model_kv_override> overrides;
    float yarn = 0.0f;
    bool embeddings = false;
    int threads = 1;
};

// what a scene needs of its context
struct scene {
    const char *name;
    uint32_t n_seq_max;
    bool unified;
    bool swa_full;
    uint32_t n_rs_seq;
    bool (*is_for)(llama_context *ctx);
    void (*play)(class player &p);
};

// decodes tokens and keeps their logits
class player {
  public:
    player(llama_model *model, const setup &s, const scene &sc, const options &opts)
        : model(model), is_ours(s.is_ours) {
        llama_context_params params = llama_context_default_params();

        params.n_ctx = 256 * (sc.unified ? 1 : sc.n_seq_max);
        params.n_batch = 256;
        params.n_ubatch = s.n_ubatch;
        params.n_seq_max = sc.n_seq_max;
        params.n_rs_seq = sc.n_rs_seq;
        params.n_threads = s.is_ours ? opts.threads : 1; // OpenMP has no others in a process that was forked
        params.n_threads_batch = params.n_threads;
        params.kv_unified = sc.unified;
        params.swa_full = sc.swa_full;
        params.type_k = s.type;
        params.type_v = s.type;
        params.flash_attn_type = s.flash_attn ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;

        if (opts.yarn > 0.0f) {
            params.rope_scaling_type = LLAMA_ROPE_SCALING_TYPE_YARN;
            params.rope_freq_scale = 1.0f / opts.yarn;
            params.yarn_ext_factor = 1.0f;
            params.yarn_orig_ctx = 64;
        }

        params.embeddings = opts.embeddings;
        params.pooling_type = LLAMA_POOLING_TYPE_NONE;

        g_reason.clear();
        g_is_ours = false;
        setenv("LLAMA_KVCACHE", s.is_ours ? "1" : "0", 1);
        ctx.reset(llama_init_from_model(model, params));
        if (!ctx) {
            throw std::runtime_error("no context: " + g_last_error);
        }
        n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
        n_embd = opts.embeddings ? llama_model_n_embd_out(model) : 0;
    }

    llama_memory_t memory() const { return llama_get_memory(ctx.get()); }

    // n more tokens of a sequence, from its next position on
    player &add(int n, std::vector<llama_seq_id> seqs = {0}) {
        for (int i = 0; i < n; ++i) {
            for (const auto seq : seqs) {
                next[seq] = std::max(next[seq], llama_pos(memory() ? llama_memory_seq_pos_max(memory(), seq) + 1 : 0));
            }
            tokens.push_back({llama_token(rng() % (n_vocab - 1)), next[seqs[0]], seqs, true});
            for (const auto seq : seqs) {
                ++next[seq];
            }
        }
        return *this;
    }

    void decode() {
        const int rc = scene_run(model, ctx.get(), is_ours).decode(tokens);
        const size_t n = tokens.size();

        tokens.clear();
        next.clear();
        keep(rc, n);
    }

    // rows [begin, end) of an image that stands at `pos`; text goes on behind it
    void image(llama_pos pos, int begin, int end) {
        keep(decode_image(ctx.get(), 0, pos, begin, end), (size_t)(end - begin) * IMAGE_WIDTH);
        next[0] = behind_image(pos, end);
    }

    llama_model *const model;
    llama_context_ptr ctx;
    const bool is_ours;
    std::vector<float> logits;

  private:
    // keeps the logits of n tokens that were decoded
    void keep(int rc, size_t n) {
        if (rc) {
            throw std::runtime_error("decode returns " + std::to_string(rc) + ": " + g_last_error);
        }
        for (size_t i = 0; i < n; ++i) {
            const float *row =
                n_embd ? llama_get_embeddings_ith(ctx.get(), (int32_t)i) : llama_get_logits_ith(ctx.get(), (int32_t)i);
            logits.insert(logits.end(), row, row + (n_embd ? n_embd : n_vocab));
        }
    }

    std::mt19937 rng{5};
    int n_vocab;
    int n_embd; // 0: logits are compared
    scene_batch tokens;
    std::map<llama_seq_id, llama_pos> next;
};

static bool is_arch(const llama_model *model, const std::vector<llm_arch> &archs) {
    return std::find(archs.begin(), archs.end(), model->arch) != archs.end();
}

// Tokens choose rows by keys of an indexer, and llama.cpp's own cache turns these the wrong way as it moves them:
// test-kvcache-sparse shows it.
static bool has_indexer(const llama_model *model) {
    return is_arch(model, {LLM_ARCH_DEEPSEEK32, LLM_ARCH_DOTS3NOTE, LLM_ARCH_GLM_DSA, LLM_ARCH_HY_V4});
}

// tokens choose blocks, in llama.cpp only with flash attention, and not where sequences share a pool
static bool chooses_blocks(const llama_model *model) { return is_arch(model, {LLM_ARCH_MINIMAX_M3}); }

// keys stand for several consecutive tokens: test-kvcache-strides shows what is refused
static bool pools_keys(const llama_model *model) { return is_arch(model, {LLM_ARCH_GLM5_NEXT, LLM_ARCH_QWEN4EXP}); }

static bool sees_later(llama_context *ctx) { return !pools_keys(llama_get_model(ctx)); }

static bool always(llama_context * /*ctx*/) { return true; }
static bool can_pool(llama_context *ctx) { return !chooses_blocks(llama_get_model(ctx)); }
static bool can_shift(llama_context *ctx) {
    return llama_memory_can_shift(llama_get_memory(ctx)) && !has_indexer(llama_get_model(ctx)) &&
           !pools_keys(llama_get_model(ctx));
}
static bool is_cached(llama_context *ctx) { return !llama_model_is_hybrid(llama_get_model(ctx)); }
static bool can_roll_back(llama_context *ctx) { return is_cached(ctx) || llama_n_rs_seq(ctx) > 0; }

static void play_text(player &p) {
    p.add(150).decode();
    p.add(40).decode();
    for (int i = 0; i < 10; ++i) {
        p.add(1).decode();
    }
}

// sequences begin with tokens in common, go on in one batch, fork, and end
static void play_sequences(player &p) {
    p.add(20, {0, 1, 2}).decode();
    p.add(30, {0}).add(11, {1}).add(30, {2}).decode();

    llama_memory_seq_rm(p.memory(), 1, -1, -1);
    llama_memory_seq_cp(p.memory(), 0, 1, -1, -1);
    p.add(5, {1}).add(5, {0}).decode();

    llama_memory_seq_keep(p.memory(), 1);
    p.add(40, {1}).add(3, {2}).decode();
    for (int i = 0; i < 3; ++i) {
        p.add(1, {1}).add(1, {2}).decode();
    }
}

static void play_streams(player &p) {
    p.add(40, {0}).add(70, {1}).decode();
    llama_memory_seq_cp(p.memory(), 1, 2, -1, -1);
    p.add(9, {2}).add(9, {0}).add(9, {1}).decode();
    llama_memory_seq_rm(p.memory(), 0, -1, -1);
    p.add(20, {0}).add(1, {1}).decode();
}

static void play_rollback(player &p) {
    p.add(100).decode();
    p.add(8).decode();
    if (!llama_memory_seq_rm(p.memory(), 0, 105, -1)) {
        throw std::runtime_error("no rollback");
    }
    p.add(8).decode();
}

static void play_shift(player &p) {
    p.add(100).decode();
    llama_memory_seq_rm(p.memory(), 0, 10, 45);
    llama_memory_seq_add(p.memory(), 0, 45, -1, -35);
    p.add(20).decode();
    llama_memory_seq_add(p.memory(), 0, 0, -1, 7);
    p.add(1).decode();
}

static void play_divide(player &p) {
    p.add(96).decode();

    if (p.is_ours) {
        llama_memory_seq_div(p.memory(), 0, 0, 64, 2);
    } else {
        // its own llama_kv_cells::pos_div turns keys the wrong way
        for (llama_pos pos = 1; pos < 64; ++pos) {
            llama_memory_seq_add(p.memory(), 0, pos, pos + 1, pos / 2 - pos);
        }
    }

    llama_memory_seq_add(p.memory(), 0, 64, -1, -32);
    p.add(20).decode();
}

// an image's tokens see each other
static void play_non_causal(player &p) {
    p.add(90).decode();
    llama_set_causal_attn(p.ctx.get(), false);
    p.add(16).decode();
    llama_set_causal_attn(p.ctx.get(), true);
    p.add(9).decode();
}

static bool has_images(llama_context *ctx) {
    return has_image_positions(llama_get_model(ctx)) && !pools_keys(llama_get_model(ctx));
}

// an image in one call, and one in two, as those that are larger than a batch
static void play_images(player &p) {
    p.add(30).decode();
    p.image(30, 0, 5);
    p.add(14).decode();
    p.image(50, 0, 3);
    p.image(50, 3, 8);
    p.add(1).decode();
    p.add(20).decode();
    if (llama_memory_seq_rm(p.memory(), 0, 50, -1)) {
        p.add(5).decode();
    }
}

static const scene SCENES[] = {
    {"text", 1, false, false, 0, always, play_text},
    {"full", 1, false, true, 0, always, play_text},
    {"seqs", 3, true, false, 0, can_pool, play_sequences},
    {"streams", 3, false, false, 0, always, play_streams},
    {"rollback", 1, false, false, 4, can_roll_back, play_rollback},
    {"shift", 1, false, true, 0, can_shift, play_shift},
    {"divide", 1, false, true, 0, can_shift, play_divide},
    {"noncausal", 1, false, false, 0, sees_later, play_non_causal},
    {"images", 1, false, false, 0, has_images, play_images},
};

static std::vector<float> half_of(const std::vector<float> &logits, bool is_second) {
    const auto middle = logits.begin() + (int64_t)logits.size() / 2;

    return is_second ? std::vector<float>(middle, logits.end()) : std::vector<float>(logits.begin(), middle);
}

// The larger error of two halves, one a size of ubatches.  With some recurrent layers, the logits of llama.cpp's own
// cache depend on how a batch is split: either size's are right.
static double error_of(const std::vector<float> &a, const std::vector<float> &exact) {
    double res = 0.0;

    for (const bool i : {false, true}) {
        const auto half = half_of(a, i);
        const double error = std::min(nmse(half, half_of(exact, false)), nmse(half, half_of(exact, true)));

        res = error <= res ? res : error;
    }

    return res;
}

static std::vector<float> play(llama_model *model, const setup &s, const scene &sc, const options &opts) {
    player p(model, s, sc, opts);

    if (s.is_ours && !g_is_ours) {
        throw std::runtime_error(g_reason.empty() ? "not used, without a reason" : "refused: " + g_reason);
    }

    if (sc.is_for(p.ctx.get())) {
        sc.play(p);
    }

    return p.logits;
}

// plays in a process of its own: llama.cpp aborts where its own cache cannot do something
static std::vector<float> play_own(llama_model *model, const setup &s, const scene &sc, const options &opts) {
    int ends[2];
    if (pipe(ends)) {
        throw std::runtime_error("no pipe");
    }

    fflush(stdout);

    const pid_t child = fork();

    if (child == 0) {
        try {
            const auto logits = play(model, s, sc, opts);
            FILE *out = fdopen(ends[1], "w");
            fwrite(logits.data(), sizeof(float), logits.size(), out);
            fclose(out);
            _exit(0);
        } catch (const std::exception &) {
            _exit(1);
        }
    }
    close(ends[1]);

    std::vector<float> res;
    FILE *in = fdopen(ends[0], "r");
    for (float logit; fread(&logit, sizeof(logit), 1, in) == 1;) {
        res.push_back(logit);
    }
    fclose(in);

    int status;
    waitpid(child, &status, 0);
    if (status) {
        throw std::runtime_error("its own cache fails");
    }

    return res;
}

// logits with ubatches of two sizes
static std::vector<float> play_both(llama_model *model, setup s, const scene &sc, const options &opts) {
    std::vector<float> res;

    for (const uint32_t n_ubatch : {64, 16}) {
        s.n_ubatch = n_ubatch;

        const auto logits = s.is_ours ? play(model, s, sc, opts) : play_own(model, s, sc, opts);
        res.insert(res.end(), logits.begin(), logits.end());
    }

    return res;
}

// its own cache in f32, without flash attention if it works without
static setup reference(const llama_model *model) { return {false, chooses_blocks(model)}; }

static bool test_type(llama_model *model, const scene &sc, const options &opts, const std::string &name,
                      const std::vector<float> &exact) {
    const ggml_type type = name == "f32" ? GGML_TYPE_F32 : name == "f16" ? GGML_TYPE_F16 : GGML_TYPE_Q8_0;

    double own;
    try {
        own = error_of(play_both(model, {false, true, type}, sc, opts), exact);
    } catch (const std::exception &) {
        // as far off as its own is in the first scene
        const auto text = play_both(model, reference(model), SCENES[0], opts);

        try {
            own = error_of(play_both(model, {false, true, type}, SCENES[0], opts), text);
        } catch (const std::exception &) {
            printf(" | %-4s of no context", name.c_str());
            return true;
        }
    }

    const double ours = error_of(play_both(model, {true, true, type}, sc, opts), exact);

    // Flash attention rounds keys and values to f16.  Rounded keys of an indexer may choose other rows.
    const double chance = has_indexer(model) && type != GGML_TYPE_F32 ? 10.0 : 1.0;
    const double share = type == GGML_TYPE_F32 ? 0.1 : type == GGML_TYPE_F16 ? 1.25 : 2.0;
    const double floor = chooses_blocks(model) ? 2e-5 : FLOOR;
    const bool ok = ours <= std::max(floor, chance * share * own);

    printf(" | %-4s %8.1e %8.1e", name.c_str(), own, ours);

    return ok;
}

// a model without a cache: nothing changes, and nothing is said
static bool test_without_cache(llama_model *model, const options &opts) {
    const scene sc = {"encode", 1, false, false, 0, always, nullptr};
    std::vector<float> logits[2];

    for (const bool is_ours : {false, true}) {
        player p(model, {is_ours, false, GGML_TYPE_F16, 256}, sc, opts);
        p.add(100).decode();
        logits[is_ours] = p.logits;
    }

    const bool ok = logits[0] == logits[1] && g_reason.empty();
    printf("  encode    works without a cache%s\n", ok ? "" : " !!");

    return ok;
}

static bool test_scene(llama_model *model, const scene &sc, const options &opts) {
    std::vector<float> exact;
    try {
        exact = play_both(model, reference(model), sc, opts);
    } catch (const std::exception &e) {
        printf("  %-9s %s\n", sc.name, e.what());
        return true;
    }
    if (exact.empty()) {
        return true; // not for this model
    }
    if (exact != play_both(model, reference(model), sc, opts)) {
        printf("  %-9s its own cache gives other logits each time\n", sc.name);
        return true;
    }

    bool ok = true;

    printf("  %-9s", sc.name);
    for (const auto &type : opts.types) {
        try {
            ok = test_type(model, sc, opts, type, exact) && ok;
        } catch (const std::exception &e) {
            printf(" | %s: %s", type.c_str(), g_reason.empty() ? e.what() : g_reason.c_str());
            ok = ok && !g_reason.empty();
        }
    }
    printf("%s\n", ok ? "" : " !!");

    return ok;
}

// a file with metadata only stands for a model with random weights
static llama_model *load(const std::string &path, const options &opts) {
    llama_model_params params = llama_model_default_params();

    params.n_gpu_layers = 0;
    params.kv_overrides = opts.overrides.data();

    const gguf_context_ptr metadata(gguf_init_from_file(path.c_str(), {true, nullptr}));

    if (metadata && gguf_get_n_tensors(metadata.get()) == 0) {
        return llama_model_init_from_user(metadata.get(), set_random, nullptr, params);
    }

    return llama_model_load_from_file(path.c_str(), params);
}

static bool test_model(const std::string &path, const options &opts) {
    llama_model_ptr model(load(path, opts));
    if (!model) {
        printf("%s: not loaded: %s !!\n", path.c_str(), g_last_error.c_str());
        return false;
    }

    printf("%s\n", path.substr(path.find_last_of('/') + 1).c_str());

    const player probe(model.get(), {true, true, GGML_TYPE_F16, 64}, SCENES[0], opts);

    if (!g_is_ours && g_reason.empty()) {
        return test_without_cache(model.get(), opts);
    }
    if (!g_is_ours) {
        printf("  refused   %s\n", g_reason.c_str());
        return true;
    }

    bool ok = true;
    for (const auto &sc : SCENES) {
        const auto &names = opts.scenes;

        if (names.empty() || std::find(names.begin(), names.end(), sc.name) != names.end()) {
            try {
                ok = test_scene(model.get(), sc, opts) && ok;
            } catch (const std::exception &e) {
                printf("  %-9s %s !!\n", sc.name, e.what());
                ok = false;
            }
            fflush(stdout);
        }
    }

    return ok;
}

// architectures by the reason why they are refused, as two columns of Markdown
static void print_table() {
    std::map<std::string, std::string> names;

    for (const llm_arch arch : llm_arch_all()) {
        const char *reason = llama_kvcache_arch_refusal(arch);
        const std::string key = reason ? std::string("refused: ") + reason : "served";

        if (arch != LLM_ARCH_UNKNOWN) {
            names[key] += (names[key].empty() ? "" : ", ") + std::string(llm_arch_name(arch));
        }
    }

    printf("| architectures | |\n|---|---|\n");
    for (auto it = names.rbegin(); it != names.rend(); ++it) {
        printf("| %s | %s |\n", it->second.c_str(), it->first.c_str());
    }
}

static std::vector<std::string> split(const std::string &list) {
    std::vector<std::string> res;

    for (size_t end, at = 0; at <= list.size(); at = end + 1) {
        end = std::min(list.find(',', at), list.size());
        res.push_back(list.substr(at, end - at));
    }

    return res;
}

// KEY=VALUE: a number with a point, or a whole one
static llama_model_kv_override parse_override(const std::string &arg) {
    const size_t at = arg.find('=');
    const std::string value = arg.substr(at + 1);

    llama_model_kv_override res = {};

    arg.copy(res.key, std::min(at, sizeof(res.key) - 1));
    if (value.find('.') == std::string::npos) {
        res.tag = LLAMA_KV_OVERRIDE_TYPE_INT;
        res.val_i64 = std::stoll(value);
    } else {
        res.tag = LLAMA_KV_OVERRIDE_TYPE_FLOAT;
        res.val_f64 = std::stod(value);
    }

    return res;
}

static options parse(int argc, char **argv) {
    options opts;

    for (int i = 1; i < argc; ++i) {
        const std::string arg = argv[i];

        if (arg == "--types") {
            opts.types = split(argv[++i]);
        } else if (arg == "--scenes") {
            opts.scenes = split(argv[++i]);
        } else if (arg == "--embeddings") {
            opts.embeddings = true;
        } else if (arg == "--threads") {
            opts.threads = std::stoi(argv[++i]);
        } else if (arg == "--yarn") {
            opts.yarn = std::stof(argv[++i]);
        } else if (arg == "--set") {
            opts.overrides.push_back(parse_override(argv[++i]));
        } else {
            opts.models.push_back(arg);
        }
    }

    opts.overrides.push_back({});

    return opts;
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "--table")) {
        print_table();
        return 0;
    }

    setenv("GGML_NO_BACKTRACE", "1", 1);
    llama_log_set(on_log, nullptr);
    llama_backend_init();

    const options opts = parse(argc, argv);
    int n_failed = 0;

    for (const auto &path : opts.models) {
        try {
            n_failed += !test_model(path, opts);
        } catch (const std::exception &e) {
            printf("  %s !!\n", e.what());
            ++n_failed;
        }
        fflush(stdout);
    }

    printf("%d of %zu models failed\n", n_failed, opts.models.size());

    return n_failed ? 1 : 0;
}
