/* Which tokens of a prompt are known, and that every call means the same by it. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign, nanosleep */
#include "support/feeding.h"
#include "support/oracle.h"

enum { DIM = 32, BLOCK = 4, MOST = 64, STATE = 16 };

static kvc_cache *cache;
static kvc_prefix *prefix;
static int num_layers;

static void open_world(const kvc_policy *policies, int num, kvc_config config, kvc_prefix_config own) {
    kvc_layer layers[4];
    for (int l = 0; l < num; l++)
        layers[l] = (kvc_layer){
            .num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM, .policy = policies[l], .rope = {.kind = KVC_ROPE_NONE}};
    own.struct_size = sizeof own;
    own.fingerprint = "a model";
    config.block_size = BLOCK;
    num_layers = num;
    cache = heap_cache(num, layers, config);
    CHECKF(kvc_prefix_new(cache, &own, &prefix) == KVC_OK, "%s", kvc_last_error());
}

static void close_world(void) { free_valid(cache); }

/* Tokens that count up from `first`; ids[at] may be changed. */
static int64_t *numbers(int64_t first) {
    static int64_t ids[8][MOST];
    static int next;
    int64_t *to = ids[next++ % 8];
    for (int i = 0; i < MOST; i++) to[i] = first + i;
    return to;
}

static kvc_tokens tokens_of(const int64_t *ids, int num) {
    return (kvc_tokens){.struct_size = sizeof(kvc_tokens), .ids = ids, .num_tokens = num};
}

static int known(const int64_t *ids, int num) {
    const kvc_tokens tokens = tokens_of(ids, num);
    int32_t matched = -1;
    CHECK(kvc_prefix_lookup(prefix, &tokens, &matched, NULL) == KVC_OK);
    return matched;
}

static int64_t acquire(const int64_t *ids, int num, int *matched) {
    const kvc_tokens tokens = tokens_of(ids, num);
    int64_t id = -1;
    int32_t found = -1;
    CHECKF(kvc_prefix_acquire(prefix, &tokens, -1, &id, &found) == KVC_OK, "%s", kvc_last_error());
    if (matched) *matched = found;
    return id;
}

/* Feeds a sequence up to `end` tokens, `step` at a time. */
static void feed_to(int64_t id, int end, int step) {
    for (int at; (at = kvc_next_position(cache, id)) < end;)
        CHECKF(feed(cache, num_layers, id, end - at < step ? end - at : step) == KVC_OK, "%s", kvc_last_error());
}

static void release(int64_t id, const int64_t *ids, int num) {
    const kvc_tokens tokens = tokens_of(ids, num);
    CHECKF(kvc_prefix_release(prefix, id, &tokens) == KVC_OK, "%s", kvc_last_error());
}

/* Serves a prompt, fed `step` tokens at a time; returns how many of them were known. */
static int serve(const int64_t *ids, int num, int step) {
    int matched;
    const int64_t id = acquire(ids, num, &matched);
    feed_to(id, num, step);
    release(id, ids, num);
    return matched;
}

static kvc_prefix_stats stats_now(void) {
    kvc_prefix_stats stats;
    kvc_prefix_get_stats(prefix, &stats, sizeof stats);
    return stats;
}

static const kvc_policy full = {.kind = KVC_FULL};

/* ---- commits ----------------------------------------------------------------------------------------------------- */

/* A batch of tokens of several sequences, [num] each, of which those listed are not kept. */
static void commit_but(const int64_t *seq_ids, int num, const int *rejected, int num_rejected) {
    static const float row[DIM];
    const kvc_put_args put = {.struct_size = sizeof put, .k = row, .v = row};
    kvc_batch *batch = NULL;
    int32_t kept[MOST], num_kept = 0;
    CHECKF(kvc_begin(cache, num, NULL, seq_ids, NULL, &batch) == KVC_OK, "%s", kvc_last_error());
    for (int l = 0; l < num_layers; l++) CHECK(kvc_put(batch, l, &put) == KVC_OK);
    for (int i = 0; i < num; i++) {
        int is_kept = 1;
        for (int j = 0; j < num_rejected; j++) is_kept &= rejected[j] != i;
        if (is_kept) kept[num_kept++] = i;
    }
    CHECKF(kvc_commit_kept(batch, kept, num_kept) == KVC_OK, "%s", kvc_last_error());
}

/* A draft of one sequence that is rejected costs another sequence of the batch nothing. */
static void test_draft_of_another(void) {
    const kvc_policy policies[] = {sliding_policy(3, 0, 0), full};
    const int64_t *first = numbers(100), *second = numbers(200);
    open_world(policies, 2, (kvc_config){0}, (kvc_prefix_config){0});
    const int64_t a = acquire(first, 12, NULL), b = acquire(second, 12, NULL);
    const int64_t ids[] = {a, a, a, a, a, a, a, a, a, b, b, b};
    commit_but(ids, 12, (int[]){11}, 1);
    for (int n = 4; n <= 8; n += 4) CHECKF(known(first, n) == n, "%d of %d", known(first, n), n);
    close_world();
}

/* Tokens that fill a block are found where those behind them are rejected. */
static void test_own_draft(void) {
    const kvc_policy policies[] = {sliding_policy(2, 1, 0), full};
    const int64_t *ids = numbers(100);
    open_world(policies, 2, (kvc_config){0}, (kvc_prefix_config){0});
    const int64_t a = acquire(ids, 12, NULL);
    const int64_t seq_ids[] = {a, a, a, a, a, a, a, a, a};
    commit_but(seq_ids, 9, (int[]){7, 8}, 2);
    CHECKF(known(ids, 4) == 4, "%d", known(ids, 4));
    CHECK(kvc_validate(cache) == KVC_OK);
    release(a, ids, 7);
    CHECK(known(ids, 7) == 7);
    close_world();
}

int main(void) {
    test_draft_of_another();
    test_own_draft();
    return test_result();
}
