/* closed.h: a closed world: one cache, one prefix, a few prompts and a store, in which the header leaves nothing open.
 *
 * Every layer sees everything, and no two prompts begin alike.  So each block is one prompt's, a prompt goes from its
 * end on, and what goes first follows from the last uses alone.  drive_orders.c plays in it. */
#ifndef WORLD_CLOSED_H
#define WORLD_CLOSED_H

#include <stdlib.h>

#include "world.h"

enum { MOST_PROMPTS = SYMBOLS - 1, WIDTH = 4, EVENTS = 256, STORED = 128, ONE_STATE = 8 };
enum { PIN_BYTES = 8, PROMPTS_BYTES = 40 * (MOST_TEXT + 1) + PIN_BYTES * MOST_PROMPTS * MOST_TEXT };

/* A prompt of whole blocks.  Prompt i begins with symbol i. */
typedef struct prompt {
    int text;
    int left; /* its tokens that are known */
    int num_pins;
    long used, may;  /* when a call used it last, and when a fetch may have */
    int64_t ms;      /* the same by the clock */
    uint64_t states; /* bits: the lengths behind which it has states; 0: the prefix has none */
    int is_sorted;   /* its states are in order: it was fetched whole, or has none */
} prompt;

static struct {
    kvc_cache *cache;
    kvc_prefix *prefix;
    kvc_layer layers[LAYERS];
    int num_layers, block;
    int64_t block_bytes; /* what a block counts for max_bytes; 0: there is no such limit */
    int num;             /* prompts */
    prompt prompts[MOST_PROMPTS];
    long clock;
} o;

/* ---- calls ------------------------------------------------------------------------------------------------------- */

static inline int least(int a, int b) { return a < b ? a : b; }

static inline void must(kvc_status status) {
    if (status) wrong("status %d", status);
}

/* Returns the tokens of a text until the next call, with other ids below digests each time. */
static inline const kvc_tokens *tokens_in(int text) {
    static text_tokens given;
    static int64_t junk;
    return tokens_of(text, junk += MOST_TEXT + 1, &given);
}

static inline int any_text_of(int first, int length) {
    int text = text_behind(0, first);
    while (text_length(text) < length) text = text_behind(text, pick(SYMBOLS));
    return text;
}

/* Chooses layers, of which one has a row for each token, and a number of prompts. */
static inline void make_shape(int stride) {
    memset(&o, 0, sizeof o);
    o.num_layers = 1 + pick(3);
    const int whole = pick(o.num_layers), size = pick(4) ? 1 + pick(6) : 1 + pick(16);
    for (int l = 0; l < o.num_layers; l++)
        o.layers[l] = (kvc_layer){.num_kv_heads = 1,
                                  .k_dim = WIDTH,
                                  .v_dim = pick(4) ? WIDTH : 0,
                                  .policy = {.kind = KVC_FULL, .stride = l != whole && pick(2) ? stride : 0},
                                  .rope = {.kind = KVC_ROPE_NONE}};
    o.block = stride ? (size + stride - 1) / stride * stride : size;
    o.num = 2 + pick(MOST_PROMPTS - 1);
}

/* Feeds a sequence n tokens; their rows are no matter. */
static inline void feed(int64_t id, int n) {
    static const float zeros[MOST_TEXT][WIDTH];
    int64_t ids[MOST_TEXT];
    kvc_batch *batch;
    for (int i = 0; i < n; i++) ids[i] = id;
    must(kvc_begin(o.cache, n, NULL, ids, NULL, &batch));
    for (int l = 0; l < o.num_layers; l++) {
        const kvc_put_args args = {.struct_size = sizeof args,
                                   .num_tokens = n,
                                   .k = zeros,
                                   .v = o.layers[l].v_dim ? zeros : NULL,
                                   .k_token_stride = sizeof *zeros,
                                   .v_token_stride = sizeof *zeros};
        must(kvc_put(batch, l, &args));
    }
    must(kvc_commit(batch));
}

/* Returns what a block counts for max_bytes. */
static inline int64_t measure_block(void) {
    kvc_block_info block;
    int64_t num_blocks, num_runs;
    feed(0, 1);
    must(kvc_blocks(o.cache, 0, &block, sizeof block, 1, &num_blocks, NULL, sizeof(kvc_run_info), 0, &num_runs));
    return block.bytes;
}

/* Makes the cache, with room for so many tokens (0: any number).  by_bytes: max_bytes has room for their blocks, and
 * for the most that prompts and pins take. */
static inline void open_cache(int64_t room, int by_bytes, kvc_prefix_config own) {
    const int64_t of_events = EVENTS * (int64_t)sizeof(kvc_prefix_event);
    kvc_config config = {.struct_size = sizeof config,
                         .layers = o.layers,
                         .layer_size = sizeof *o.layers,
                         .num_layers = o.num_layers,
                         .block_size = o.block,
                         .capacity = by_bytes ? 0 : (int32_t)room,
                         .num_threads = 1};
    own.struct_size = sizeof own, own.fingerprint = "a model", own.max_events = EVENTS;
    must(kvc_cache_new(&config, &o.cache));
    if (by_bytes) {
        config.max_bytes = kvc_nbytes(o.cache) + of_events + PROMPTS_BYTES;
        o.block_bytes = measure_block();
        config.max_bytes += room / o.block * o.block_bytes;
        must(kvc_cache_free(o.cache));
        must(kvc_cache_new(&config, &o.cache));
    }
    must(kvc_prefix_new(o.cache, &own, &o.prefix));
}

static inline void close_cache(void) {
    must(kvc_validate(o.cache));
    must(kvc_cache_free(o.cache));
}

static inline int64_t acquire(int text, int *matched) {
    int64_t id;
    int32_t n;
    must(kvc_prefix_acquire(o.prefix, tokens_in(text), -1, &id, &n));
    *matched = n;
    return id;
}

static inline void checkpoint(int64_t id, int text) {
    static const uint8_t state[ONE_STATE];
    must(kvc_prefix_checkpoint(o.prefix, id, tokens_in(text), state, sizeof state));
}

/* Feeds what is not known of a text, with states behind some lengths, and keeps it.  is_released 0: the sequence only
 * ends, as its commits have kept the blocks. */
static inline void serve(int text, uint64_t states, int is_released) {
    int at;
    const int64_t id = acquire(text_behind(text, 0), &at);
    while (at < text_length(text)) {
        const int most = 1 + pick(text_length(text) - at);
        int n = 1;
        while (n < most && !(states >> (at + n) & 1)) n++;
        feed(id, n);
        at += n;
        if (states >> at & 1) checkpoint(id, text_begin(text, at));
    }
    must(is_released ? kvc_prefix_release(o.prefix, id, tokens_in(text)) : kvc_clear_sequence(o.cache, id));
}

static inline int known_of(int text) {
    int32_t n;
    must(kvc_prefix_lookup(o.prefix, tokens_in(text), &n, NULL));
    return n;
}

/* ---- a store ----------------------------------------------------------------------------------------------------- */

static struct {
    int num;
    uint8_t names[STORED][KVC_NAME_BYTES];
    uint8_t *values[STORED];
    int64_t sizes[STORED];
    void (*before)(void), (*behind)(void); /* what happens as a call of it begins, and ends; NULL: nothing */
} store;

static inline void let(void (*happen)(void)) {
    if (happen) happen();
}

static inline int find_stored(const uint8_t *name) {
    int at = 0;
    while (at < store.num && (memcmp(store.names[at], name, KVC_NAME_BYTES) || !store.values[at])) at++;
    return at;
}

static inline kvc_status read_value(void *user, const uint8_t *name, void *to, int64_t most, int64_t *size) {
    const int at = find_stored(name);
    (void)user;
    let(store.before);
    *size = at < store.num ? store.sizes[at] : 0;
    if (*size && *size <= most) memcpy(to, store.values[at], (size_t)*size);
    let(store.behind);
    return KVC_OK;
}

static inline kvc_status write_value(void *user, const uint8_t *name, const void *value, int64_t size) {
    (void)user;
    let(store.before);
    const int at = find_stored(name);
    if (at == STORED) wrong("too much is stored");
    if (at == store.num) memcpy(store.names[store.num++], name, KVC_NAME_BYTES);
    free(store.values[at]);
    memcpy(store.values[at] = malloc((size_t)size), value, (size_t)size);
    store.sizes[at] = size;
    let(store.behind);
    return KVC_OK;
}

static inline kvc_status remove_value(void *user, const uint8_t *name) {
    const int at = find_stored(name);
    (void)user;
    if (at == store.num) return KVC_OK;
    free(store.values[at]);
    store.values[at] = NULL;
    return KVC_OK;
}

static const kvc_store in_memory = {
    .struct_size = sizeof in_memory, .read = read_value, .write = write_value, .remove = remove_value};

static inline int is_stored(int text, int at) {
    uint8_t names[MOST_TEXT][KVC_NAME_BYTES];
    int64_t num;
    must(kvc_prefix_names(o.prefix, tokens_in(text), *names, MOST_TEXT, &num));
    return find_stored(names[at]) < store.num;
}

static inline int fetch(int text) {
    text_tokens given; /* other calls come between */
    int32_t fetched;
    must(kvc_prefix_fetch(o.prefix, tokens_of(text_behind(text, 0), 0, &given), -1, &in_memory, &fetched));
    return fetched;
}

static inline void end_store(void) {
    for (int i = 0; i < store.num; i++) free(store.values[i]);
    memset(&store, 0, sizeof store);
}

#endif
