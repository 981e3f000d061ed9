/* Under max_bytes, a prompt that fits without a match fits with one, whatever others left behind. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "prefix/prefix.h"
#include "support/serving.h"

enum {
    SIZE = 16,    /* tokens of a block */
    FEW_RUNS = 96 /* bytes of four runs: rows that matched may be cut into a few more */
};

static kvc_status feed_all(int64_t id, int num, int step) {
    kvc_status status = KVC_OK;
    for (int at, end; status == KVC_OK && (at = kvc_next_position(cache, id)) < num;) {
        end = (at / step + 1) * step; /* batches end at the same tokens, whatever matched */
        status = feed(cache, num_layers, id, (end < num ? end : num) - at);
    }
    return status;
}

/* Returns whether a prompt of `num` tokens fits after a prompt of `kept` tokens.  They begin with the same `common`
 * tokens.  Returns -1 if the cache cannot be made. */
static int prompt_fits(int64_t max_bytes, int is_windowed, int num, int step, int common, int kept) {
    const kvc_policy policies[] = {is_windowed ? sliding_policy(8, 0, 0) : full, full};
    const kvc_prefix_config config = {.struct_size = sizeof config, .fingerprint = "a model"};
    kvc_layer layers[2];
    for (int l = 0; l < 2; l++)
        layers[l] = (kvc_layer){.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM, .policy = policies[l]};
    num_layers = 2;
    cache = heap_cache(2, layers, (kvc_config){.block_size = SIZE, .max_bytes = max_bytes});
    kvc_status status = kvc_prefix_new(cache, &config, &prefix);
    const int begins = status == KVC_OK;
    if (begins && kept) {
        int64_t *other = numbers(100);
        for (int i = common; i < MOST; i++) other[i] = 1000 + i;
        const int64_t id = try_acquire(other, kept);
        if (id >= 0) feed_all(id, kept, step);
        release(id, other, kept);
    }
    if (begins) {
        const int64_t id = try_acquire(numbers(100), num);
        status = id < 0 ? KVC_ERR_FULL : feed_all(id, num, step);
        CHECK(status == KVC_OK || status == KVC_ERR_FULL);
        CHECK(kvc_clear_sequence(cache, id) == KVC_OK);
    }
    free_valid(cache);
    return begins ? status == KVC_OK : -1;
}

/* Shares or edits rows of a sequence, or moves rows together, if there is room. */
static void edit(int64_t id) {
    const int64_t other = 1000 + random_int(0, 3);
    const int next = kvc_next_position(cache, id);
    kvc_status status = KVC_OK;
    switch (random_int(0, 6)) {
    case 0: status = kvc_fork(cache, id, other); break;
    case 1:
        CHECK(kvc_clear_sequence(cache, other) == KVC_OK);
        status = kvc_share(cache, id, other, random_int(0, next + 1), next);
        break;
    case 2: status = kvc_remove(cache, id, random_int(0, next + 1), next, 0); break;
    case 3: status = feed(cache, num_layers, other, random_int(1, 30)); break;
    case 4: status = kvc_clear_sequence(cache, other); break;
    default: status = kvc_compact(cache);
    }
    CHECKF(status == KVC_OK || status == KVC_ERR_FULL || status == KVC_ERR_GONE, "%s", kvc_last_error());
}

/* Feeds tokens as `feed` does; from some allocation of the commit on, memory is short. */
static kvc_status feed_in_need(int64_t id, int32_t num) {
    const kvc_put_args put = zero_rows(0, 0);
    kvc_batch *batch;
    kvc_status status = begin_at_end(cache, id, num, &batch);
    if (status != KVC_OK) return status;
    for (int l = 0; l < num_layers; l++) CHECK(kvc_put(batch, l, &put) == KVC_OK);
    memory_fail(&heap, random_int(0, 6), 1 << 16);
    status = kvc_commit(batch);
    heap.is_failing = 0;
    return status;
}

/* Acquires a prompt, which does not pass max_bytes; returns whether it could.  If it cannot, nothing has changed. */
static int acquire_within(int64_t max_bytes, const int64_t *ids, int num, int64_t *id) {
    const int64_t bytes = kvc_nbytes(cache);
    const int before = known(ids, num);
    const kvc_prefix_stats stats = stats_now();
    *id = try_acquire(ids, num);
    if (*id >= 0) {
        CHECK(kvc_nbytes(cache) <= max_bytes);
        return 1;
    }
    const kvc_prefix_stats now = stats_now();
    CHECK(kvc_nbytes(cache) == bytes && known(ids, num) == before && memcmp(&now, &stats, sizeof now) == 0);
    const int names_others = strstr(kvc_last_error(), "prompts of acquired sequences") != NULL;
    CHECK(strstr(kvc_last_error(), "acquiring a prompt") && names_others == (now.sequences > 0));
    return 0;
}

/* Prompts that begin alike, several at once, near max_bytes, and sequences that hold nothing: kvc_room says exactly
 * what kvc_begin takes, and no batch passes max_bytes, though memory may be short at its commit. */
static void test_room(int round) {
    enum { PROMPTS = 8 };
    kvc_layer layers[3];
    const kvc_prefix_config config = {.struct_size = sizeof config,
                                      .fingerprint = "a model",
                                      .reuse_min_tokens = random_int(0, 2) * random_int(1, 9)};
    const int64_t max_bytes = 6000 + random_int(0, 30000);
    int64_t text[PROMPTS][MOST], ids[PROMPTS];
    int length[PROMPTS] = {0};
    num_layers = random_int(1, 4);
    for (int l = 0; l < num_layers; l++)
        layers[l] =
            (kvc_layer){.num_kv_heads = 1,
                        .k_dim = 8,
                        .v_dim = 8,
                        .rope.kind = KVC_ROPE_NONE,
                        .policy = random_int(0, 2) ? full : sliding_policy(random_int(1, 12), random_int(0, 3), 0)};
    cache = heap_cache(num_layers, layers, (kvc_config){.block_size = random_int(1, 8), .max_bytes = max_bytes});
    const int begins = kvc_prefix_new(cache, &config, &prefix) == KVC_OK;
    for (int step = 0; begins && step < 60; step++) {
        const int p = random_int(0, PROMPTS);
        if (!length[p]) {
            length[p] = random_int(2, MOST);
            for (int i = 0; i < MOST; i++) text[p][i] = random_int(0, i < 20 ? 12 : 2) == 0;
            if (!acquire_within(max_bytes, text[p], length[p], &ids[p])) length[p] = 0;
        } else if (!random_int(0, 4)) {
            release(ids[p], text[p], length[p]);
            length[p] = 0;
        } else if (kvc_next_position(cache, ids[p]) < length[p]) {
            const int num = random_int(1, length[p] - kvc_next_position(cache, ids[p]) + 1);
            int64_t room = -1;
            if (!random_int(0, 4) && kvc_next_position(cache, ids[p])) edit(ids[p]);
            CHECKF(kvc_room(cache, ids[p], &room) == KVC_OK, "%s", kvc_last_error());
            kvc_batch *batch;
            const kvc_status more =
                room < 2 * MOST ? begin_at_end(cache, ids[p], (int32_t)room + 1, &batch) : KVC_ERR_FULL;
            CHECK(more == KVC_ERR_FULL || (more == KVC_ERR_GONE && !room));
            const kvc_status status =
                random_int(0, 4) ? feed(cache, num_layers, ids[p], num) : feed_in_need(ids[p], num);
            CHECKF((status == KVC_OK) == (num <= room), "round %d: room for %lld, and %d: %s", round, (long long)room,
                   num, status ? kvc_last_error() : "they fit");
            CHECK(status != KVC_OK || kvc_nbytes(cache) <= max_bytes);
        }
    }
    free_valid(cache);
}

/* A cache that keeps blocks, beside a slightly smaller cache that keeps nothing: prompts that fit in the smaller one
 * fit in the larger one, too. */
static void test_twin(int round) {
    const kvc_prefix_config own = {.struct_size = sizeof own, .fingerprint = "a model"};
    kvc_config config = {.block_size = random_int(1, 9), .max_bytes = 6000 + random_int(0, 30000), .num_threads = 1};
    kvc_layer layers[3];
    kvc_cache *caches[2];
    kvc_prefix *prefixes[2];
    int64_t text[MOST], ids[2];
    int begins = 1, length = 0;
    num_layers = random_int(1, 4);
    for (int l = 0; l < num_layers; l++)
        layers[l] =
            (kvc_layer){.num_kv_heads = random_int(1, 3),
                        .k_dim = 8,
                        .v_dim = 8,
                        .policy = random_int(0, 2) ? full : sliding_policy(random_int(1, 12), random_int(0, 3), 0)};
    for (int i = 0; i < 2; i++) {
        caches[i] = cache_of(layers, num_layers, config);
        config.max_bytes -= FEW_RUNS;
        begins &= kvc_prefix_new(caches[i], &own, &prefixes[i]) == KVC_OK;
    }
    for (int step = 0; begins && step < 60; step++) {
        int32_t num;
        if (!length) {
            length = random_int(2, MOST);
            for (int i = 0; i < MOST; i++) text[i] = random_int(0, i < 20 ? 12 : 2) == 0;
            const kvc_tokens tokens = tokens_of(text, length);
            const kvc_tokens most = tokens_of(text, length - 1);
            int32_t matched, begun;
            ids[0] = ids[1] = -1;
            CHECK(kvc_prefix_lookup(prefixes[0], &most, &matched, NULL) == KVC_OK);
            kvc_status fits = kvc_prefix_acquire(prefixes[1], &tokens, 0, &ids[1], &begun);
            if (fits == KVC_OK && matched) fits = feed(caches[1], num_layers, ids[1], matched);
            const kvc_status status = kvc_prefix_acquire(prefixes[0], &tokens, -1, &ids[0], &begun);
            CHECKF(fits != KVC_OK || (status == KVC_OK && begun == matched), "round %d: %s", round, kvc_last_error());
            if (fits == KVC_OK) continue;
        } else if (random_int(0, 4) && kvc_next_position(caches[0], ids[0]) < length) {
            num = random_int(1, length - kvc_next_position(caches[0], ids[0]) + 1);
            const kvc_status fits = feed(caches[1], num_layers, ids[1], num),
                             status = feed(caches[0], num_layers, ids[0], num);
            CHECKF(fits != KVC_OK || status == KVC_OK, "round %d: %s", round, kvc_last_error());
            CHECK(kvc_prefix_clear(prefixes[1]) == KVC_OK);
            if (fits == status) continue;
        }
        const kvc_tokens tokens = tokens_of(text, length); /* the sequences end */
        CHECK(kvc_prefix_release(prefixes[0], ids[0], &tokens) == KVC_OK);
        CHECK(kvc_clear_sequence(caches[1], ids[1]) == KVC_OK && kvc_prefix_clear(prefixes[1]) == KVC_OK);
        length = 0;
    }
    for (int i = 0; i < 2; i++) CHECK(kvc_validate(caches[i]) == KVC_OK && kvc_cache_free(caches[i]) == KVC_OK);
}

/* Once nothing is kept, a cache that has kept blocks is as small as a new one. */
static void test_emptied(int reuse_min) {
    enum { PROMPTS = 24 };
    open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){.reuse_min_tokens = reuse_min});
    const int64_t nbytes = kvc_nbytes(cache);
    int64_t evicted;
    for (int i = 0; i < PROMPTS; i++) serve(numbers(i * MOST), MOST, MOST);
    CHECK(kvc_prefix_evict(prefix, INT64_MAX, &evicted) == KVC_OK && evicted == PROMPTS * MOST);
    CHECK(kvc_compact(cache) == KVC_OK);
    CHECKF(kvc_nbytes(cache) == nbytes, "%lld bytes, not %lld", (long long)kvc_nbytes(cache), (long long)nbytes);
    close_world();
}

/* Prompts that wait to be fed do not pass max_bytes, and messages name them.  Kept blocks give way to them. */
static void test_waiting_prompts(void) {
    enum { LONG = 5000, WAITING = 8, MAX_BYTES = 1 << 18, TOO_LONG = MAX_BYTES / 8 };
    static int64_t ids[TOO_LONG], seq_ids[WAITING], none;
    const kvc_tokens tokens = tokens_of(ids, LONG);
    int num = 0;
    kvc_status status = KVC_OK;
    kvc_batch *batch;
    open_world(&full, 1, (kvc_config){.max_bytes = MAX_BYTES}, (kvc_prefix_config){0});
    CHECK(!acquire_within(MAX_BYTES, ids, TOO_LONG, &none)); /* by itself */
    for (int i = 0; kvc_nbytes(cache) < MAX_BYTES * 3 / 4; i++) serve(numbers(1000 * (i + 1)), MOST, MOST);
    const int64_t kept = stats_now().blocks;
    for (int32_t matched; status == KVC_OK && num < WAITING; num += status == KVC_OK) {
        status = kvc_prefix_acquire(prefix, &tokens, -1, &seq_ids[num], &matched);
        CHECK(kvc_nbytes(cache) <= MAX_BYTES);
    }
    CHECKF(num == MAX_BYTES / (LONG * (int)sizeof *ids), "%d prompts", num);
    CHECK(stats_now().blocks < kept && stats_now().sequences == num);
    CHECK_FAILS(status, KVC_ERR_FULL, "acquiring a prompt", "bytes of it are prompts of acquired sequences");
    while ((status = begin_at_end(cache, seq_ids[0], 64, &batch)) == KVC_OK) {
        kvc_abort(batch);
        CHECK(kvc_reserve(cache, seq_ids[0], 64) != KVC_OK || feed(cache, num_layers, seq_ids[0], 64) == KVC_OK);
    }
    CHECK_FAILS(status, KVC_ERR_FULL, "more tokens", "bytes of it are prompts of acquired sequences");
    for (int i = 0; i < num; i++) CHECK(kvc_clear_sequence(cache, seq_ids[i]) == KVC_OK);
    CHECK(feed(cache, num_layers, 0, MOST) == KVC_OK);
    close_world();
}

/* Pins a prompt that is known up to its last token, which says which prompt it is. */
static kvc_status pin(int last) {
    int64_t *ids = numbers(0);
    ids[MOST - 1] = 1000 + last;
    const kvc_tokens tokens = tokens_of(ids, MOST);
    int32_t kept = 0;
    const kvc_status status = kvc_prefix_pin(prefix, &tokens, &kept);
    CHECK(kept == (status == KVC_OK ? MOST - 1 : 0) && prefix->tree->cache->memory.replaced == 0);
    return status;
}

/* A pin takes memory for its list of blocks, within max_bytes; another pin of the same prompt takes no more. */
static void test_pins(void) {
    enum { PINS = 3000, MAX_BYTES = 1 << 17 };
    int num = 0;
    open_world(&full, 1, (kvc_config){.block_size = BLOCK, .max_bytes = MAX_BYTES}, (kvc_prefix_config){0});
    serve(numbers(0), MOST, MOST);
    while (num < PINS && pin(num) == KVC_OK) num++;
    const int64_t bytes = kvc_nbytes(cache);
    CHECKF(num > 100 && num < PINS && bytes <= MAX_BYTES, "%d pins, %lld bytes", num, (long long)bytes);
    CHECK_FAILS(pin(num), KVC_ERR_FULL, "pinning a prompt", "kept blocks are pinned: unpin some");
    CHECK(prefix->tree->pins.num == num && known(numbers(0), MOST) == MOST && kvc_nbytes(cache) == bytes);
    CHECK(pin(0) == KVC_OK && prefix->tree->pins.num == num && kvc_nbytes(cache) == bytes);
    close_world();
}

/* A prompt that may need all of max_bytes drops no block but those in which its match ends. */
static void test_blocks_behind_a_match(void) {
    enum { SIZE = 4, KEPT = 10 * SIZE, LONG = 4000 };
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = 8, .v_dim = 8};
    const kvc_prefix_config config = {.struct_size = sizeof config, .fingerprint = "a model", .state_bytes = 1};
    const kvc_put_args put = zero_rows(0, 0);
    for (int32_t at = 2 * SIZE - 1; at <= 2 * SIZE; at++) { /* where the state is kept, and the match ends */
        kvc_cache *cache = cache_of(&layer, 1, (kvc_config){.block_size = SIZE, .max_bytes = 1 << 17});
        int64_t ids[LONG], seq_ids[KEPT], id;
        int32_t matched, known, before, after;
        kvc_prefix *prefix;
        kvc_batch *batch;
        for (int i = 0; i < LONG; i++) ids[i] = i;
        kvc_tokens tokens = {.struct_size = sizeof tokens, .ids = ids, .num_tokens = KEPT + 1};
        CHECK(kvc_prefix_new(cache, &config, &prefix) == KVC_OK);
        CHECK(kvc_prefix_acquire(prefix, &tokens, -1, &id, &matched) == KVC_OK);
        for (int i = 0; i < KEPT; i++) seq_ids[i] = id;
        for (int32_t from = 0, to = at; from < KEPT; from = to, to = KEPT) {
            CHECK(kvc_begin(cache, to - from, NULL, seq_ids, NULL, &batch) == KVC_OK);
            CHECK(kvc_put(batch, 0, &put) == KVC_OK && kvc_commit(batch) == KVC_OK);
            tokens.num_tokens = to;
            if (to == at) CHECK(kvc_prefix_checkpoint(prefix, id, &tokens, "s", 1) == KVC_OK);
        }
        CHECK(kvc_prefix_release(prefix, id, &tokens) == KVC_OK);
        tokens.num_tokens = LONG;
        CHECK(kvc_prefix_lookup(prefix, &tokens, &known, &before) == KVC_OK && known == at && before == KEPT);
        CHECK(kvc_prefix_acquire(prefix, &tokens, -1, &id, &matched) == KVC_OK && matched == at);
        CHECK(kvc_clear_sequence(cache, id) == KVC_OK);
        CHECK(kvc_prefix_lookup(prefix, &tokens, &known, &after) == KVC_OK);
        CHECKF(known == at && after == (at % SIZE ? at : KEPT), "match of %d: %d and %d", at, known, after);
        CHECK(kvc_cache_free(cache) == KVC_OK);
    }
}

int main(void) {
    test_blocks_behind_a_match();
    test_waiting_prompts();
    test_pins();
    for (int reuse_min = 0; reuse_min < 9; reuse_min += 4) test_emptied(reuse_min);
    for (int shape = 0; shape < 16; shape++) {
        const int is_windowed = shape % 2, num = 20 + 10 * (shape / 4), step = shape / 2 % 2 ? 64 : 8;
        int64_t low = 1000, high = 200000; /* the least with which it fits alone */
        while (high - low > 1) {
            const int64_t middle = (low + high) / 2;
            if (prompt_fits(middle, is_windowed, num, step, 0, 0) == 1)
                high = middle;
            else
                low = middle;
        }
        for (int common = 6; common <= num; common += 11)
            for (int more = 0; more < 6000; more += 1 + more * 2)
                CHECKF(prompt_fits(high + more, is_windowed, num, step, common, common + 7) == 1,
                       "%d tokens, %d at once, windows %d: %lld bytes are too few behind %d known ones", num, step,
                       is_windowed, (long long)(high + more), common);
    }
    for (int round = 0; round < (is_full() ? 3000 : 300); round++) test_room(round);
    for (int round = 0; round < (is_full() ? 10000 : 300); round++) test_twin(round);
    return test_result();
}
