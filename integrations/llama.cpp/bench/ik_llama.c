/* ik_llama.c MODEL THREADS [cpu]: times ik_llama.cpp, whose llama.h differs from llama.cpp's; with `cpu` by CPU time.
 * Reads lines, and answers each with a line.  An answer begins with "ok", or with "no: " and the reason:
 *
 *   open ID TYPE_K TYPE_V N_CTX   make a context
 *   fill ID TOKENS                let it hold this many tokens; answer 1 if no prompt was read for them, 0 otherwise
 *   decode ID COUNT               append tokens, in one batch; answer the seconds
 *   rewind ID TOKENS              drop the tokens from this position on
 *   close ID                      free the context */
#include "driver.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "llama.h"

enum { MAX_CONTEXTS = 64, BATCH = 512 };

typedef struct context {
    struct llama_context *llama;
    enum ggml_type type_k;
    int32_t tokens;
} context;

static struct llama_model *model;
static int32_t vocab_size;
static clockid_t timer = CLOCK_MONOTONIC;
static char reason[256]; /* of the last failure: what ik_llama.cpp logged of it */

static void keep_error(enum ggml_log_level level, const char *text, void *data) {
    (void)data;
    if (level == GGML_LOG_LEVEL_ERROR) snprintf(reason, sizeof reason, "%.*s", (int)strcspn(text, "\n"), text);
}

static enum ggml_type type_of(const char *name) {
    for (int t = 0; t < GGML_TYPE_COUNT; t++) {
        const char *known = ggml_type_name((enum ggml_type)t);
        if (known && !strcmp(known, name)) return (enum ggml_type)t;
    }
    return GGML_TYPE_COUNT;
}

static bool open_context(context *c, const char *k, const char *v, uint32_t n_ctx, uint32_t threads) {
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = n_ctx;
    params.n_batch = params.n_ubatch = n_ctx < BATCH ? n_ctx : BATCH;
    params.n_threads = params.n_threads_batch = threads;
    params.flash_attn = true;
    params.dsa = true;   /* -dsa: tokens choose rows, in models that have indexers */
    params.mla_attn = 1; /* -mla: latent rows are read as they are; only then do prompts read chosen rows alone */
    params.type_k = type_of(k);
    params.type_v = type_of(v);
    params.idx_type_k = params.type_k; /* -ictk: as index keys of the others; f16 keys take longer than q8_0 ones */
    snprintf(reason, sizeof reason, "no context of types %s and %s", k, v);
    if (params.type_k == GGML_TYPE_COUNT || params.type_v == GGML_TYPE_COUNT) return false;
    *c = (context){.llama = llama_init_from_model(model, params), .type_k = params.type_k};
    return c->llama;
}

/* Appends tokens, and returns the seconds; a negative number is a failure. */
static double decode(context *c, int32_t count) {
    llama_token *tokens = malloc((size_t)count * sizeof *tokens);
    if (!tokens) abort();
    for (int32_t i = 0; i < count; i++) tokens[i] = (c->tokens + i) % (vocab_size - 1) + 1;
    snprintf(reason, sizeof reason, "llama_decode failed");
    const double start = read_clock(timer);
    const int32_t status = llama_decode(c->llama, llama_batch_get_one(tokens, count, c->tokens, 0));
    llama_synchronize(c->llama);
    const double seconds = read_clock(timer) - start;
    free(tokens);
    if (status) return -1;
    c->tokens += count;
    const float *logits = llama_get_logits_ith(c->llama, -1);
    snprintf(reason, sizeof reason, "logits are not finite");
    for (int32_t i = 0; i < vocab_size; i++)
        if (!isfinite(logits[i])) return -1;
    return seconds;
}

static bool prefill(context *c, int32_t tokens) {
    while (c->tokens < tokens)
        if (decode(c, tokens - c->tokens < BATCH ? tokens - c->tokens : BATCH) < 0) return false;
    return true;
}

static void rewind_to(context *c, int32_t tokens) {
    llama_kv_cache_seq_rm(c->llama, 0, tokens, -1);
    c->tokens = tokens;
}

/* Copies bytes from one cursor to another, and moves both. */
static void copy(uint8_t **to, const uint8_t **from, size_t nbytes) {
    memcpy(*to, *from, nbytes);
    *to += nbytes;
    *from += nbytes;
}

/* Copies the type, the size and the rows of a part of a state, the rows again and again. */
static void repeat(uint8_t **to, const uint8_t **from, uint32_t cells, uint32_t tokens) {
    uint64_t row;
    copy(to, from, sizeof(int32_t)); /* the type */
    memcpy(&row, *from, sizeof row);
    copy(to, from, sizeof row);
    for (uint32_t i = 0; i < tokens; i++, *to += row) memcpy(*to, *from + i % cells * row, row);
    *from += cells * row;
}

/* Makes the state of a sequence longer, by its own rows again and again; returns its size, or 0 for a state whose V is
 * transposed.  llama_data_write::write_kv_cache has the format: cells, the rows of K by layer, and the rows of V, which
 * latent attention lacks.  Then come recurrent states, which do not depend on the number of cells, or index keys. */
static size_t lengthen(uint8_t *longer, const uint8_t *state, size_t size, uint32_t tokens) {
    enum { TRANSPOSED = 1, NO_V = 2 };
    const uint8_t *const end = state + size;
    uint8_t *to = longer;
    uint32_t cells, v, num_layers, recurrent;
    memcpy(&cells, state, sizeof cells);
    state += sizeof cells + cells * 2 * sizeof(uint32_t);
    memcpy(to, &tokens, sizeof tokens);
    to += sizeof tokens;
    for (uint32_t i = 0; i < tokens; i++, to += 2 * sizeof i)
        memcpy(to, (uint32_t[]){i, 0}, 2 * sizeof i); /* the position, and no list of sequences */
    memcpy(&v, state, sizeof v);
    memcpy(&num_layers, state + sizeof v, sizeof num_layers);
    if (v == TRANSPOSED) return 0;
    copy(&to, &state, sizeof v + sizeof num_layers);
    for (uint32_t part = 0; part < (v == NO_V ? 1 : 2) * num_layers; part++) repeat(&to, &state, cells, tokens);
    memcpy(&recurrent, state, sizeof recurrent);
    if (!recurrent) {
        copy(&to, &state, 2 * sizeof(uint32_t));
        while (state < end) repeat(&to, &state, cells, tokens); /* index keys */
    }
    copy(&to, &state, (size_t)(end - state));
    return (size_t)(to - longer);
}

/* Loads the state of the tokens that the context holds, made longer; returns whether it was taken. */
static bool load_longer(context *c, int32_t tokens) {
    const size_t size = llama_state_seq_get_size(c->llama, 0, 0);
    uint8_t *state = malloc(size), *longer = malloc(size * ((size_t)(tokens / c->tokens) + 1));
    if (!state || !longer) abort();
    llama_state_seq_get_data(c->llama, state, size, 0, 0);
    const size_t nbytes = lengthen(longer, state, size, (uint32_t)tokens);
    const bool taken = nbytes && llama_state_seq_set_data(c->llama, longer, nbytes, 0, 0) == nbytes;
    free(state);
    free(longer);
    return taken;
}

/* Whether rows have scales of their own, as q8_KV's: a state then takes a token's rows of all heads for one row, and
 * lacks some of their bytes. */
static bool has_scaled_rows(enum ggml_type type) { return ggml_row_size(type, 512) != 2 * ggml_row_size(type, 256); }

/* Returns 1 if the context was filled from a state, 0 if it was filled by prompts, and -1 on failure. */
static int fill(context *c, int32_t tokens) {
    if (!prefill(c, tokens < BATCH ? tokens : BATCH)) return -1;
    if (c->tokens == tokens) return 1;
    if (!has_scaled_rows(c->type_k) && load_longer(c, tokens)) {
        c->tokens = tokens;
        return 1;
    }
    rewind_to(c, 0);
    return prefill(c, tokens) ? 0 : -1;
}

int main(int argc, char **argv) {
    static context contexts[MAX_CONTEXTS];
    if (argc != 3 && argc != 4) return 2;
    if (argc == 4) timer = CLOCK_PROCESS_CPUTIME_ID;
    setvbuf(stdout, NULL, _IOLBF, 0);
    llama_log_set(keep_error, NULL);
    llama_backend_init();
    struct llama_model_params params = llama_model_default_params();
    params.repack_tensors = true; /* -rtr: an empty context's step takes 0.75 times as long */
    params.use_mmap = false;      /* which repacking needs */
    model = llama_model_load_from_file(argv[1], params);
    if (model) vocab_size = llama_n_vocab(model);
    char line[256], verb[16], k[32], v[32];
    while (fgets(line, sizeof line, stdin)) {
        int id = 0, n = 0;
        double answer = 0;
        const bool opens = sscanf(line, "open %d %31s %31s %d", &id, k, v, &n) == 4;
        const bool known = (opens || sscanf(line, "%15s %d %d", verb, &id, &n) >= 2) && id >= 0 && id < MAX_CONTEXTS;
        context *c = &contexts[known ? id : 0];
        if (!model) {
            answer = -1;
        } else if (!known || (!opens && !c->llama)) {
            snprintf(reason, sizeof reason, "no such line or context");
            answer = -1;
        } else if (opens) {
            answer = open_context(c, k, v, (uint32_t)n, (uint32_t)atoi(argv[2])) ? 0 : -1;
        } else if (!strcmp(verb, "fill")) {
            answer = fill(c, n);
        } else if (!strcmp(verb, "decode")) {
            answer = decode(c, n);
        } else if (!strcmp(verb, "rewind")) {
            rewind_to(c, n);
        } else {
            llama_free(c->llama);
            *c = (context){0};
        }
        if (answer < 0)
            printf("no: %s\n", reason);
        else
            printf("ok %.9f\n", answer);
    }
    return 0;
}
