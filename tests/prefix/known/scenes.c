/* scenes.c: worlds of their own, for promises that random calls rarely come to. */
#include "known.h"

typedef struct stage {
    kvc_cache *cache;
    kvc_prefix *prefix;
} stage;

static stage open_stage(world *w, int64_t max_bytes, int64_t capacity) {
    stage s = {NULL, NULL};
    kvc_config config = w->shape.config;
    config.max_bytes = max_bytes, config.capacity = capacity;
    const kvc_prefix_config own = {.struct_size = sizeof own, .fingerprint = "a"};
    must(w, kvc_cache_new(&config, &s.cache));
    const kvc_status status = kvc_prefix_new(s.cache, &own, &s.prefix);
    if (status == KVC_ERR_FULL)
        s.prefix = NULL;
    else
        must(w, status);
    return s;
}

static void close_stage(world *w, stage s) {
    kvc_prefix_free(s.prefix);
    must(w, kvc_cache_free(s.cache));
}

/* Feeds a sequence n tokens. */
static kvc_status feed_some(world *w, kvc_cache *cache, int64_t id, int n) {
    static const float zeros[MOST_TEXT][MOST_HEADS][DIM];
    int64_t ids[MOST_TEXT];
    kvc_batch *batch;
    for (int i = 0; i < n; i++) ids[i] = id;
    const kvc_status status = kvc_begin(cache, n, NULL, ids, NULL, &batch);
    if (status) return status;
    for (int l = 0; l < w->shape.num_layers; l++) {
        if (!w->shape.has_rows[l]) continue;
        const kvc_put_args args = {.struct_size = sizeof args,
                                   .num_tokens = n,
                                   .k = zeros,
                                   .v = has_values(&w->shape, l) ? zeros : NULL,
                                   .k_token_stride = sizeof zeros[0],
                                   .k_head_stride = sizeof zeros[0][0],
                                   .v_token_stride = sizeof zeros[0],
                                   .v_head_stride = sizeof zeros[0][0]};
        must(w, kvc_put(batch, l, &args));
    }
    return kvc_commit(batch);
}

void feed_tokens(world *w, kvc_cache *cache, int64_t id, int n) { must(w, feed_some(w, cache, id, n)); }

/* Serves a prompt in batches that end at multiples of `most` tokens, whatever matched; returns the first failure, and
 * how much matched. */
static kvc_status serve(world *w, stage s, int node, int most, int32_t *matched) {
    text_tokens tokens;
    int64_t id = -1;
    *matched = 0;
    kvc_status status = kvc_prefix_acquire(s.prefix, tokens_of(node, &tokens), -1, &id, matched);
    if (status != KVC_ERR_FULL) must(w, status);
    for (int at = *matched, end; at < text_length(node) && !status; at = end) {
        end = least((at / most + 1) * most, text_length(node));
        status = feed_some(w, s.cache, id, end - at);
    }
    must(w, kvc_prefix_release(s.prefix, id, tokens_of(node, &tokens)));
    return status;
}

static int fits(world *w, int node, int most, int64_t max_bytes, int64_t capacity) {
    int32_t matched;
    stage s = open_stage(w, max_bytes, capacity);
    const int is_fit = s.prefix && !serve(w, s, node, most, &matched);
    close_stage(w, s);
    return is_fit;
}

/* A prompt behind other ones, and a limit of bytes or slots. */
typedef struct behind {
    int node, most; /* tokens of a batch */
    int num, others[3];
    int by_bytes;
    int64_t limit;
} behind;

/* Serves the prompt once the others were served, which may not fit. */
static kvc_status serve_behind(world *w, const behind *b, int64_t more, int32_t *matched) {
    stage s = open_stage(w, b->by_bytes ? b->limit + more : 0, b->by_bytes ? 0 : b->limit);
    for (int i = 0; i < b->num; i++) (void)serve(w, s, b->others[i], b->most, matched);
    const kvc_status status = serve(w, s, b->node, b->most, matched);
    if (kvc_validate(s.cache)) fail(w, "%s", kvc_last_error());
    close_stage(w, s);
    return status;
}

/* Returns the bytes of bookkeeping that a batch may lack behind a match.  A list of runs gets room for the most runs
 * that the batch can leave.  Each second token may be rejected: that is a run for two tokens.  Tokens that match are a
 * run for each block already.  Their runs count in full beside that room, also if a window leaves them behind.  483 of
 * 60,000 prompts lacked bytes so: 372 of these at most 48, and none more than a run for each block and layer.  Less
 * room would do if all tokens are kept, but only the commit knows that. */
static int64_t lists_bytes(const world *w, int matched) {
    enum { RUN_BYTES = 24 };
    return (int64_t)RUN_BYTES * w->shape.num_layers * (matched / w->shape.block + 2);
}

void play_fits(world *w) {
    make_shape(w, &w->shape);
    behind b = {.by_bytes = pick(w, 2), .most = 1 + pick(w, MOST_TEXT)};
    b.num = 1 + pick(w, 3);
    for (int n = 2 + pick(w, MOST_TEXT - 2); n; n--) b.node = text_behind(b.node, pick(w, 2));
    for (int i = 0; i < b.num; i++) {
        b.others[i] = text_begin(b.node, pick(w, text_length(b.node) + 1));
        for (int n = pick(w, MOST_TEXT - text_length(b.others[i]) + 1); n; n--)
            b.others[i] = text_behind(b.others[i], pick(w, 4));
        if (!b.others[i]) b.others[i] = b.node;
    }
    int64_t low = 0, high = b.by_bytes ? 1 << 22 : 4 * MOST_TEXT; /* the least limit with which the prompt fits */
    while (low + 1 < high) {
        const int64_t middle = (low + high) / 2;
        if (fits(w, b.node, b.most, b.by_bytes ? middle : 0, b.by_bytes ? 0 : middle))
            high = middle;
        else
            low = middle;
    }
    w->call = "a prompt that fits";
    b.limit = high + (pick(w, 2) ? 0 : pick(w, b.by_bytes ? 4000 : 8));
    int32_t matched = 0;
    trace(w, "%s of %d tokens behind %d others, in batches of %d, %s %d", spell(b.node), text_length(b.node), b.num,
          b.most, b.by_bytes ? "max_bytes" : "capacity", (int)b.limit);
    if (!serve_behind(w, &b, 0, &matched)) return;
    if (b.by_bytes && !serve_behind(w, &b, lists_bytes(w, matched), &matched)) return;
    fail(w,
         "%s (%d tokens, batches of %d, block_size %d, %s %lld, least %lld) fits without a match, and not once %d "
         "match: %s",
         spell(b.node), text_length(b.node), b.most, w->shape.block, b.by_bytes ? "max_bytes" : "capacity",
         (long long)b.limit, (long long)high, matched, kvc_last_error());
}

void play_names(world *w) {
    make_shape(w, &w->shape);
    w->shape.config.max_bytes = w->shape.config.capacity = 0;
    make_models(w);
    w->last_id[0] = -1;
    for (int i = 0; i < TEXTS; i++) do_new_text(w);
    for (int i = 0; i < 3; i++) {
        must(w, kvc_cache_new(&w->shape.config, &w->caches[0]));
        for (int j = 0; j < PREFIXES; j++) make_prefix(w, &w->prefixes[j], 0);
        w->call = "kvc_prefix_names";
        for (int j = 0; j < 20; j++) do_names(w);
        free_cache(w, 0);
        vary_layers(w, &w->shape);
    }
}
