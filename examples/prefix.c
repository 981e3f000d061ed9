/* prefix.c: replies to several prompts that begin alike, at the same time: what they share is computed once.
 *
 * A server in C on kvc_prefix_acquire and kvc_prefix_release, with the model of the runner in c/.  Requests take turns,
 * a token each, and the cache is so small that a request has to wait. */
#include <kvcache.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "c/model.h"

const char program[] = "prefix";

enum {
    REPLY = 60,
    MOST_REQUESTS = 16,
    BLOCK = 16,
    CAPACITY = 368 /* tokens; shared tokens count once */
};

static const char scene[] = "ESCALUS:\n"
                            "Go, bring them in; the morning is not young,\n"
                            "And half the city waits before the gate\n"
                            "To hear what sentence shall be given here.\n"
                            "My lords, be patient; speak when you are called,\n"
                            "And let no man put passion in his plea.\n"
                            "\n";
static char *const speakers[] = {"ROMEO:\n", "JULIET:\n", "First Citizen:\n"};

typedef struct server {
    model m;
    state s;
    pool *pool;
    kvc_cache *cache;
    kvc_prefix *prefix;
} server;

typedef struct request {
    int number;
    int64_t *tokens; /* [end] the prompt and, behind it, the reply, as far as it goes */
    int num_tokens, prompt, end;
    int64_t seq_id; /* while it is running */
    int is_running, is_waiting;
} request;

/* ---- a forward pass ---------------------------------------------------------------------------------------------- */

/* Rotates queries and keys by their positions (RoPE): element i pairs with i + half. */
static void rotate(const model *m, float *qkv, const int32_t *positions, int n) {
    const int half = m->head_dim / 2;
    for (int t = 0; t < n; t++, qkv += m->qkv_dim)
        for (int i = 0; i < half; i++) {
            const double angle = positions[t] * pow(m->rope_theta, -2.0 * i / m->head_dim);
            const float cosine = (float)cos(angle), sine = (float)sin(angle);
            float *x = qkv + i;
            for (int h = 0; h < m->num_heads + m->num_kv_heads; h++, x += m->head_dim) {
                const float a = x[0], b = x[half];
                x[0] = a * cosine - b * sine;
                x[half] = b * cosine + a * sine;
            }
        }
}

/* Stores keys and values of a layer, and attends over them and all before them. */
static kvc_status attend(server *v, kvc_batch *batch, int layer) {
    const model *m = &v->m;
    const int64_t token = m->qkv_dim * (int64_t)sizeof(float);
    const float *k = v->s.qkv + m->num_heads * m->head_dim;
    const kvc_put_args put = {.struct_size = sizeof put,
                              .k = k,
                              .v = k + m->num_kv_heads * m->head_dim,
                              .k_token_stride = token,
                              .v_token_stride = token};
    const kvc_plan_args plan = {.struct_size = sizeof plan, .layer = layer, .num_heads = m->num_heads};
    const kvc_attend_args args = {
        .struct_size = sizeof args, .put = &put, .q = v->s.qkv, .out = v->s.attended, .q_token_stride = token};
    return kvc_attend(batch, &plan, &args);
}

/* Feeds tokens [begin, begin + n) of a request, n at most BATCH. */
static kvc_status forward(server *v, const request *r, int begin, int n) {
    unsigned char bytes[BATCH];
    int32_t positions[BATCH];
    int64_t seq_ids[BATCH];
    kvc_batch *batch;
    for (int t = 0; t < n; t++) {
        bytes[t] = (unsigned char)r->tokens[begin + t];
        positions[t] = begin + t;
        seq_ids[t] = r->seq_id;
    }
    kvc_status status = kvc_begin(v->cache, n, positions, seq_ids, NULL, &batch);
    if (status) return status;
    model_embed(&v->m, &v->s, bytes, n);
    for (int layer = 0; layer < v->m.num_layers && !status; layer++) {
        model_qkv(&v->m, &v->s, v->pool, layer, n);
        rotate(&v->m, v->s.qkv, positions, n);
        status = attend(v, batch, layer);
        model_finish(&v->m, &v->s, v->pool, layer, n);
    }
    if (!status) status = kvc_commit(batch); /* other prompts find the blocks that this has filled */
    if (status) return kvc_abort(batch), status;
    model_logits(&v->m, &v->s, v->pool, n);
    return KVC_OK;
}

/* Feeds the tokens that a request's sequence does not hold yet. */
static kvc_status feed(server *v, const request *r) {
    kvc_status status = KVC_OK;
    for (int begin; !status && (begin = kvc_next_position(v->cache, r->seq_id)) < r->num_tokens;)
        status = forward(v, r, begin, r->num_tokens - begin < BATCH ? r->num_tokens - begin : BATCH);
    return status;
}

/* ---- a request --------------------------------------------------------------------------------------------------- */

static kvc_tokens tokens_of(const request *r) {
    return (kvc_tokens){.struct_size = sizeof(kvc_tokens), .ids = r->tokens, .num_tokens = r->num_tokens};
}

/* Gives a request a sequence, which holds its known tokens: never the last one, which has to be fed. */
static int acquire(server *v, request *r) {
    const kvc_tokens tokens = tokens_of(r);
    int32_t matched;
    if (kvc_prefix_acquire(v->prefix, &tokens, -1, &r->seq_id, &matched)) return fail("%s", kvc_last_error());
    r->is_running = 1;
    printf("request %d: %d of %d tokens are there\n", r->number, (int)matched, r->num_tokens);
    return 0;
}

/* Ends a request's sequence.  Its blocks stay until their memory is needed; a token that was not fed is ignored. */
static int release(server *v, request *r) {
    const kvc_tokens tokens = tokens_of(r);
    r->is_running = 0;
    return kvc_prefix_release(v->prefix, r->seq_id, &tokens) ? fail("%s", kvc_last_error()) : 0;
}

/* Computes what all prompts begin with, and pins it: it is not evicted, whatever else needs memory. */
static int pin(server *v, request *r) {
    const kvc_tokens tokens = tokens_of(r);
    int32_t kept;
    int status = acquire(v, r);
    if (!status && feed(v, r)) status = fail("%s", kvc_last_error());
    if (!status) status = release(v, r);
    if (!status && kvc_prefix_pin(v->prefix, &tokens, &kept)) status = fail("%s", kvc_last_error());
    return status;
}

static void print_reply(const request *r) {
    printf("request %d: ", r->number);
    for (int i = r->prompt; i < r->end; i++) putchar((int)r->tokens[i]);
    putchar('\n');
}

/* Adds a token to a reply.  KVC_ERR_FULL means that nothing is left to evict, because running sequences and pins hold
 * everything.  Then the request releases its sequence.  Once another request has ended, it resumes from the blocks that
 * are left. */
static int take_turn(server *v, request *r, int is_alone) {
    int status = r->is_running ? 0 : acquire(v, r);
    if (status) return status;
    const kvc_status fed = feed(v, r);
    if (fed == KVC_ERR_FULL && !is_alone) {
        printf("request %d: waits for room\n", r->number);
        r->is_waiting = 1;
        return release(v, r);
    }
    if (fed) return fail("%s", kvc_last_error());
    r->tokens[r->num_tokens++] = likeliest(v->s.logits);
    if (r->num_tokens < r->end) return 0;
    print_reply(r);
    return release(v, r);
}

static int serve(server *v, request *requests, int num) {
    for (int left = num, running = 0, status; left;)
        for (int i = 0; i < num; i++) {
            request *r = &requests[i];
            if (r->num_tokens == r->end || r->is_waiting) continue;
            running -= r->is_running;
            status = take_turn(v, r, !running);
            running += r->is_running;
            if (status) return status;
            if (r->num_tokens < r->end) continue;
            left--;
            for (int k = 0; k < num; k++) requests[k].is_waiting = 0;
        }
    return 0;
}

/* ---- the program ------------------------------------------------------------------------------------------------- */

static int server_init(server *v) {
    int status = model_read(&v->m, "examples/model");
    if (status) return status;
    if (!state_init(&v->s, &v->m) || !(v->pool = pool_new(1, 0))) return fail("out of memory");
    kvc_layer *layers = calloc((size_t)v->m.num_layers, sizeof *layers);
    if (!layers) return fail("out of memory");
    for (int i = 0; i < v->m.num_layers; i++)
        layers[i] = (kvc_layer){.num_kv_heads = v->m.num_kv_heads,
                                .k_dim = v->m.head_dim,
                                .v_dim = v->m.head_dim,
                                .k_type = KVC_F16,
                                .v_type = KVC_F16};
    const kvc_config config = {.struct_size = sizeof config,
                               .layers = layers,
                               .layer_size = sizeof *layers,
                               .num_layers = v->m.num_layers,
                               .block_size = BLOCK, /* what is found, kept and evicted as a whole */
                               .max_seq_len = v->m.max_seq_len,
                               .capacity = CAPACITY,
                               .num_threads = 1};
    const kvc_prefix_config named = {.struct_size = sizeof named, .fingerprint = "examples/model"};
    kvc_status made = kvc_cache_new(&config, &v->cache);
    free(layers);
    if (!made) made = kvc_prefix_new(v->cache, &named, &v->prefix);
    return made ? fail("%s", kvc_last_error()) : 0;
}

static void server_destroy(server *v) {
    kvc_prefix_free(v->prefix);
    kvc_cache_free(v->cache);
    pool_free(v->pool);
    state_destroy(&v->s);
    model_free(&v->m);
}

/* Makes a request of two texts, one after the other, for a reply of some tokens. */
static int request_init(request *r, int number, const char *first, const char *second, int reply) {
    const size_t num_first = strlen(first), num_second = strlen(second);
    *r = (request){.number = number, .num_tokens = (int)(num_first + num_second)};
    r->prompt = r->num_tokens;
    r->end = r->prompt + reply;
    r->tokens = malloc((size_t)(r->end + 1) * sizeof *r->tokens); /* + 1: not 0, where there is no common beginning */
    if (!r->tokens) return fail("out of memory");
    for (int i = 0; i < r->prompt; i++)
        r->tokens[i] = (unsigned char)((size_t)i < num_first ? first[i] : second[(size_t)i - num_first]);
    return 0;
}

int main(int argc, char **argv) {
    const char *common = argc > 1 ? argv[1] : scene;
    char *const *prompts = argc > 1 ? argv + 2 : speakers;
    const int num = argc > 1 ? argc - 2 : (int)(sizeof speakers / sizeof *speakers);
    request requests[1 + MOST_REQUESTS] = {0}; /* 0: what all begin with */
    server v = {0};
    if (num < 1 || num > MOST_REQUESTS)
        return fail("give what the prompts begin with, then 1 to %d of them, or nothing", MOST_REQUESTS);
    int status = request_init(&requests[0], 0, common, "", 0);
    for (int i = 1; i <= num && !status; i++) status = request_init(&requests[i], i, common, prompts[i - 1], REPLY);
    if (!status) status = server_init(&v);
    if (!status && *common) status = pin(&v, &requests[0]);
    if (!status) status = serve(&v, requests + 1, num);
    for (int i = 0; i <= num; i++) free(requests[i].tokens);
    server_destroy(&v);
    return status;
}
