/* Prefixes: quotas, times to live, events, blocks and states of stores, and windows that have lost rows.  Random calls
 * are compared with an oracle in tests/world. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign, nanosleep */
#include <time.h>

#include "support/payloads.h"
#include "support/serving.h"

static const kvc_config no_limits;

/* ---- quotas and times to live ------------------------------------------------------------------------------------ */

/* Requests of others take what is above a quota, and nothing of the blocks that are within it, or in part. */
static void test_quota(void) {
    const int64_t *kept = numbers(1000);
    const kvc_tokens tokens = tokens_of(kept, 24);
    for (int quota = 0; quota <= 24; quota += quota % 12 == 1 ? 5 : 1) {
        const kvc_prefix_config own = {.salt = "a", .salt_size = 1, .quota = quota};
        open_world(&full, 1, (kvc_config){.capacity = 60}, own);
        kvc_prefix *small = prefix;
        const kvc_prefix_config others = {.struct_size = sizeof others, .fingerprint = "a model"};
        serve(kept, 24, 24);
        CHECK(kvc_prefix_new(cache, &others, &prefix) == KVC_OK);
        for (int i = 0; i < 10; i++) serve(numbers(2000 + 100 * i), 30, 30);
        prefix = small;
        CHECKF(known(kept, 24) >= quota && known(kept, 24) < quota + 12, "quota %d: %d are left", quota,
               known(kept, 24));
        int32_t num;
        CHECK(kvc_prefix_pin(small, &tokens, &num) == KVC_OK && num == known(kept, 24));
        kvc_prefix_free(small);
        close_world();
    }
}

/* A block that falls out of its quota has been used no later for that. */
static void test_left_quota(void) {
    const int64_t *first = numbers(0), *second = numbers(100), *other = numbers(200), *last = numbers(300);
    kvc_prefix *own, *others;
    open_world(&full, 1, (kvc_config){.capacity = 3 * BLOCK}, (kvc_prefix_config){.quota = BLOCK});
    own = prefix;
    CHECK(kvc_prefix_new(cache,
                         &(kvc_prefix_config){.struct_size = sizeof(kvc_prefix_config), .fingerprint = "another"},
                         &others) == KVC_OK);
    serve(first, BLOCK, BLOCK);
    prefix = others;
    serve(other, BLOCK, BLOCK);
    prefix = own;
    serve(second, BLOCK, BLOCK);
    serve(last, BLOCK, BLOCK);
    CHECK(!known(first, BLOCK) && known(second, BLOCK) && known(last, BLOCK));
    prefix = others;
    CHECK(known(other, BLOCK));
    prefix = own;
    close_world();
}

/* More blocks than one call drops have expired: nothing is taken from them. */
static void test_ttl(void) {
    int matched;
    open_world(&full, 1, no_limits, (kvc_prefix_config){.ttl_ms = 1, .reuse_min_tokens = 4});
    serve(numbers(0), 40, 40);
    nanosleep(&(struct timespec){0, 5000000}, NULL);
    const int64_t id = acquire(numbers(16), 20, &matched);
    CHECK(matched == 0 && kvc_clear_sequence(cache, id) == KVC_OK);
    close_world();
}

/* ---- blocks for stores ------------------------------------------------------------------------------------------- */

enum { MOST_PAYLOAD = 8192 };
static uint8_t payloads[8][MOST_PAYLOAD];
static kvc_new_block blocks[8];
static int64_t sizes[8];

/* Reads the blocks that are new to stores; returns how many. */
static int64_t read_new_blocks(void) {
    int64_t num = 0;
    CHECK(kvc_take_new_blocks(cache, blocks, sizeof *blocks, 8, &num) == KVC_OK);
    CHECK(payload_bytes(cache) <= MOST_PAYLOAD);
    for (int64_t i = 0; i < num; i++)
        CHECK(kvc_read_block(cache, blocks[i].id, payloads[i], MOST_PAYLOAD, &sizes[i]) == KVC_OK);
    return num;
}

/* Adds a payload as a block of a prompt; returns whether the block is known. */
static int add(const int64_t *ids, int num, int block, const uint8_t *payload, int64_t size) {
    const kvc_tokens tokens = tokens_of(ids, num);
    int32_t is_known = -1;
    CHECKF(add_payload(prefix, &tokens, block, payload, size, &is_known) == KVC_OK, "%s", kvc_last_error());
    return is_known;
}

/* A block goes out of one cache and into another, even if windows have lost rows of it in some layer.  If they have in
 * each layer, it does not come: `num` of 5 come. */
static void check_payloads(const kvc_policy *policies, int step, int num, int keeps_all) {
    const kvc_prefix_config own = {.collects_new = 1, .user = blocks};
    const int64_t *ids = numbers(7);
    const kvc_tokens tokens = tokens_of(ids, 21);
    uint8_t names[8][KVC_NAME_BYTES];
    int64_t num_names = -1, none = -1;
    int32_t first = -1, is_known;
    open_world(policies, 2, no_limits, own);
    const int64_t id = acquire(ids, 21, NULL);
    feed_to(id, 21, step);
    CHECK(read_new_blocks() == num);
    for (int i = 0; i < num; i++) {
        CHECK(blocks[i].user == blocks && blocks[i].begin % BLOCK == 0 && blocks[i].end == blocks[i].begin + BLOCK);
        CHECK(sizes[i] > 0 && (!i || blocks[i].begin > blocks[i - 1].begin));
    }
    CHECK(kvc_read_block(cache, 1000, payloads[7], MOST_PAYLOAD, &none) == KVC_OK && none == 0);
    CHECK(kvc_clear_sequence(cache, id) == KVC_OK);
    close_world();

    open_world(policies, 2, no_limits, own);
    CHECK(missing_blocks(prefix, &tokens, 21, *names, 8, &first, &num_names) == KVC_OK);
    CHECK(first == 0 && num_names == 5);
    for (int i = 0; i < num; i++) {
        const int block = blocks[i].begin / BLOCK;
        CHECK(!memcmp(names[block], blocks[i].name, sizeof names[block]));
        CHECK(add(ids, 21, block, payloads[i], sizes[i]) || block);
        CHECK_FAILS(add_payload(prefix, &tokens, block, payloads[i], sizes[i] - 1, &is_known), KVC_ERR_FORMAT,
                    "payload", "bytes");
        payloads[i][0] += 2;
        CHECK_FAILS(add_payload(prefix, &tokens, block, payloads[i], sizes[i], &is_known), KVC_ERR_FORMAT,
                    "the payload has", "for layer 0");
        payloads[i][0] -= 2;
    }
    CHECK(read_new_blocks() == 0);
    CHECK(known(ids, 21) <= 20 && (!keeps_all || known(ids, 21) == 20));
    close_world();
}

static void test_payloads(void) {
    const kvc_policy policies[][2] = {{full, sliding_policy(3, 1, 0)},
                                      {sliding_policy(2, 0, 0), sliding_policy(3, 0, 0)}};
    const int num[][3] = {{5, 5, 5}, {0, 4, 5}}; /* a batch that holds a whole block keeps its rows */
    for (int set = 0; set < 2; set++)
        for (int i = 0; i < 3; i++) check_payloads(policies[set], 1 + 10 * i, num[set][i], !set && i == 2);
}

/* Bytes of a block may be more than an int holds. */
static void test_large_payload(void) {
    if (SIZE_MAX == UINT32_MAX) return; /* such a cache is refused there */
    const kvc_layer layer = {.num_kv_heads = 1 << 12, .k_dim = 1, .v_dim = 1};
    kvc_cache *large = heap_cache(1, &layer, (kvc_config){.block_size = 1 << 19});
    CHECK(payload_bytes(large) == 1 + 2 * (INT64_C(4) << 31));
    kvc_cache_free(large);
}

/* ---- windows ----------------------------------------------------------------------------------------------------- */

/* A block of which windows have lost rows takes the place of none that has them. */
static void test_fewer_rows(void) {
    const kvc_policy policies[] = {full, sliding_policy(3, 0, 0)};
    int64_t *ids = numbers(7), *other = numbers(7); /* begins with the same block */
    other[4] = 98;
    open_world(policies, 2, no_limits, (kvc_prefix_config){.collects_new = 1});
    serve(ids, 6, 1);
    CHECK(read_new_blocks() == 1 && sizes[0] && !payloads[0][1]);
    kvc_prefix_clear(prefix);
    serve(ids, 4, 1);
    CHECK(known(other, 5) == 4);
    CHECK(add(ids, 4, 0, payloads[0], sizes[0]));
    CHECK(known(other, 5) == 4);
    close_world();
}

/* A commit lacks memory to keep a block, and windows lose the block since: later commits keep the next blocks. */
static void test_gap_of_a_commit(void) {
    const kvc_put_args put = zero_rows(0, 0);
    const kvc_policy policy = sliding_policy(3, 0, 0);
    const int64_t *ids = numbers(7);
    kvc_batch *batch;
    open_world(&policy, 1, no_limits, (kvc_prefix_config){0});
    const int64_t id = acquire(ids, 20, NULL);
    feed_to(id, 2, 2);
    CHECK(begin_at_end(cache, id, 5, &batch) == KVC_OK && kvc_put(batch, 0, &put) == KVC_OK);
    memory_fail(&heap, 0, 99);
    CHECK(kvc_commit(batch) == KVC_OK);
    heap.is_failing = 0;
    CHECK(heap.failed && known(ids, 20) == 0);
    feed_to(id, 12, 5);
    CHECKF(known(ids, 20) == 12, "%d are known", known(ids, 20));
    release(id, ids, 12);
    CHECK(known(ids, 20) == 12);
    close_world();
}

/* Windows leave the beginning of long prompts behind.  Lists hold its tokens while the end is kept, within the bytes
 * that the header names, and no longer. */
static void test_long_prompts(void) {
    enum { LENGTH = 256, STEP = 8, PROMPTS = 20, LIMIT = 100000 };
    static int64_t ids[LENGTH];
    const kvc_policy window = sliding_policy(STEP, 0, 0);
    open_world(&window, 1, (kvc_config){.block_size = BLOCK, .max_bytes = LIMIT}, (kvc_prefix_config){0});
    const int64_t before = kvc_nbytes(cache);
    int64_t evicted;
    for (int i = 0; i < PROMPTS; i++) {
        for (int t = 0; t < LENGTH; t++) ids[t] = t + 1000 * i;
        const int64_t id = kvc_new_sequence(cache);
        feed_to(id, LENGTH, STEP);
        release(id, ids, LENGTH);
        CHECK(known(ids, LENGTH) == LENGTH);
        const int64_t kept = stats_now().blocks, dropped = (i + 1) * LENGTH / BLOCK - kept,
                      most = LIMIT + (48 + 1000) * (kept + 1) + 300 * dropped + 8 * BLOCK * (kept + dropped);
        CHECKF(kvc_nbytes(cache) <= most, "%lld bytes, and %lld may be", (long long)kvc_nbytes(cache), (long long)most);
    }
    CHECK(kvc_nbytes(cache) > LIMIT);
    CHECK(kvc_prefix_evict(prefix, INT64_MAX, &evicted) == KVC_OK && kvc_compact(cache) == KVC_OK);
    CHECKF(kvc_nbytes(cache) == before, "%lld bytes, not %lld", (long long)kvc_nbytes(cache), (long long)before);
    close_world();
}

/* ---- which blocks are gone on from ------------------------------------------------------------------------------- */

/* Returns the numbers from `first` on, with a block in common with others behind the first one. */
static const int64_t *with_common_block(int64_t first) {
    int64_t *ids = numbers(first);
    for (int i = BLOCK; i < 2 * BLOCK; i++) ids[i] = 7;
    return ids;
}

/* Among prompts with a common block, the prompts used last are looked at. */
static void test_reuse(void) {
    enum { PROMPTS = 100 };
    open_world(&full, 1, no_limits, (kvc_prefix_config){.reuse_min_tokens = 4});
    for (int i = 0; i < PROMPTS; i++) serve(with_common_block(1000 + 100 * i), 11, 11);
    for (int i = 0; i < PROMPTS; i += PROMPTS - 1) {
        int matched;
        const int64_t id = acquire(with_common_block(1000 + 100 * i) + 4, 8, &matched);
        CHECKF(matched == (i ? 7 : 4), "%d: %d", i, matched);
        CHECK(kvc_clear_sequence(cache, id) == KVC_OK);
    }
    close_world();
}

/* ---- recurrent states -------------------------------------------------------------------------------------------- */

static const kvc_prefix_config with_states = {.collects_new = 1, .state_bytes = STATE};

/* Checks that a sequence goes on from the state behind so many tokens. */
static void check_state(int64_t id, int matched) {
    uint8_t state[STATE];
    int64_t num = -1;
    CHECK(kvc_prefix_state(prefix, id, state, STATE, &num) == KVC_OK && num == (matched ? STATE : 0));
    CHECK_FAILS(kvc_prefix_state(prefix, id, state, -1, &num), KVC_ERR_INVALID, "max_bytes is -1", "at least 0");
    if (matched) CHECKF(state[0] == matched, "the state behind %d tokens, not %d", state[0], matched);
}

/* Serves a request, with a checkpoint after each `step` tokens; returns how many were matched. */
static int serve_states(const int64_t *ids, int num, int step) {
    int matched;
    const int64_t id = acquire(ids, num, &matched);
    check_state(id, matched);
    for (int fed = matched; fed < num;) {
        fed = fed + step < num ? fed + step : num;
        feed_to(id, fed, step);
        checkpoint(id, ids, fed, fed);
    }
    release(id, ids, num);
    return matched;
}

/* A state goes with its block: to a longer block that begins with it, out to a store, and back. */
static void test_checkpoints(void) {
    const int64_t *ids = numbers(7);
    const kvc_tokens tokens = tokens_of(ids, 22), part = tokens_of(ids, 20);
    int64_t evicted;
    int32_t is_known, matched, with_rows;
    open_world(&full, 1, no_limits, with_states);
    CHECK(serve_states(ids, 22, 7) == 0 && stats_now().checkpoints == 4 && stats_now().checkpoint_bytes == 4 * STATE);
    CHECK(serve_states(ids, 22, 7) == 21); /* behind its second last token */
    CHECK(kvc_prefix_lookup(prefix, &part, &matched, &with_rows) == KVC_OK && matched == 14 && with_rows == 20);
    CHECK(read_new_blocks() == 5);
    CHECK(sizes[1] > sizes[0] && sizes[1] <= payload_bytes(cache) && sizes[3] > sizes[2]);
    CHECK(kvc_prefix_evict(prefix, INT64_MAX, &evicted) == KVC_OK && stats_now().checkpoints == 0);
    CHECK(stats_now().checkpoint_bytes == 0);
    for (int i = 0; i < 5; i++) CHECK(add(ids, 22, blocks[i].begin / BLOCK, payloads[i], sizes[i]));
    CHECK(stats_now().checkpoints == 2 && serve_states(ids, 22, 50) == 14);
    payloads[1][sizes[0]] = 4; /* a position before the block */
    CHECK_FAILS(add_payload(prefix, &tokens, 1, payloads[1], sizes[1], &is_known), KVC_ERR_FORMAT, "payload", "bytes");
    CHECK_FAILS(kvc_prefix_checkpoint(prefix, 0, &tokens, payloads[0], STATE + 1), KVC_ERR_INVALID, "num_bytes", "17");
    CHECK_FAILS(kvc_prefix_checkpoint(prefix, 0, &tokens, NULL, 1), KVC_ERR_INVALID, "state", "NULL");
    CHECK(kvc_prefix_checkpoint(prefix, 12345, &tokens, payloads[0], STATE) == KVC_OK); /* holds nothing */
    close_world();
}

/* A sequence lacks the tokens that a batch did not keep: no block has them, and no state stands behind them. */
static void test_state_behind_a_gap(void) {
    const kvc_policy policies[] = {full, sliding_policy(3, 0, 0)};
    const kvc_put_args put = zero_rows(0, 0);
    const int64_t *ids = numbers(100);
    for (int num_policies = 1; num_policies <= 2; num_policies++)
        for (int at = 3; at <= 4; at++) {
            open_world(policies, num_policies, no_limits, (kvc_prefix_config){.state_bytes = STATE, .max_events = 9});
            const int64_t id = acquire(ids, 12, NULL);
            kvc_batch *batch = NULL;
            kvc_prefix_event event;
            int64_t num, num_lost;
            CHECK(begin_at_end(cache, id, 5, &batch) == KVC_OK);
            for (int l = 0; l < num_policies; l++) CHECK(kvc_put(batch, l, &put) == KVC_OK);
            CHECK(kvc_commit_kept(batch, (int32_t[]){0, 1, 4}, 3) == KVC_OK && kvc_exact_to(cache, id) == 4);
            checkpoint(id, ids, at, 1);
            CHECKF(stats_now().checkpoints == 0 && stats_now().held == 2, "%d groups: %d tokens are kept", num_policies,
                   (int)stats_now().held);
            release(id, ids, 5);
            CHECK(kvc_prefix_take_events(prefix, &event, sizeof event, 1, &num, &num_lost) == KVC_OK && num == 0);
            serve(ids, 8, 8);
            CHECKF(known(ids, 8) == 0, "%d groups: a state is found behind %d tokens", num_policies, known(ids, 8));
            close_world();
        }
}

/* Options that cannot be, or not together. */
static void test_bad_options(void) {
    static const struct {
        kvc_prefix_config config;
        kvc_status status;
        const char *name, *value;
    } bad[] = {
        {{.quota = -1}, KVC_ERR_INVALID, "quota", "-1"},
        {{.ttl_ms = -1}, KVC_ERR_INVALID, "ttl_ms", "-1"},
        {{.max_events = -1}, KVC_ERR_INVALID, "max_events", "-1"},
        {{.reuse_min_tokens = -1}, KVC_ERR_INVALID, "reuse_min_tokens", "-1"},
        {{.state_bytes = -1}, KVC_ERR_INVALID, "state_bytes", "-1"},
        {{.state_bytes = 9, .max_checkpoint_bytes = 8}, KVC_ERR_INVALID, "max_checkpoint_bytes", "8"},
        {{.state_bytes = 9, .reuse_min_tokens = 4}, KVC_ERR_UNSUPPORTED, "reuse_min_tokens", "state"},
        {{.max_checkpoint_bytes = 8}, KVC_ERR_INVALID, "max_checkpoint_bytes", "8"},
    };
    kvc_prefix *none;
    open_world(&full, 1, no_limits, (kvc_prefix_config){0});
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        kvc_prefix_config config = bad[i].config;
        config.struct_size = sizeof config;
        config.fingerprint = "a model";
        CHECK_FAILS(kvc_prefix_new(cache, &config, &none), bad[i].status, bad[i].name, bad[i].value);
    }
    close_world();
}

/* With room for a few, a state takes the place of the least recently used state.  One that cannot fit is refused. */
static void test_room_for_states(void) {
    enum { LARGE = 4000, LIMIT = 50000 };
    static uint8_t state[LIMIT];
    const int64_t *last = numbers(1900);
    int matched;
    open_world(&full, 1, (kvc_config){.max_bytes = LIMIT}, (kvc_prefix_config){.state_bytes = LIMIT});
    for (int i = 0; i < 20; i++) {
        const int64_t *ids = numbers(100 * i), id = acquire(ids, 9, &matched);
        const kvc_tokens tokens = tokens_of(ids, 9);
        CHECK(!matched);
        feed_to(id, 9, 8);
        CHECKF(kvc_prefix_checkpoint(prefix, id, &tokens, state, LARGE) == KVC_OK, "%s", kvc_last_error());
        CHECK_FAILS(kvc_prefix_checkpoint(prefix, id, &tokens, state, LIMIT), KVC_ERR_FULL, "max_bytes", "50000");
        release(id, ids, 9);
    }
    CHECKF(stats_now().checkpoints >= 2 && stats_now().checkpoints <= 7, "%lld", (long long)stats_now().checkpoints);
    const int64_t id = acquire(last, 10, &matched);
    CHECK(matched == 9 && kvc_clear_sequence(cache, id) == KVC_OK);
    close_world();
}

/* Bytes of a state that a sequence goes on from are not freed with its block. */
static void test_state_in_use(void) {
    enum { LARGE = 100000, LEAST = 8 /* bytes of a prompt of one token */ };
    static const uint8_t state[LARGE];
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM, .rope.kind = KVC_ROPE_NONE};
    const int64_t bytes = bytes_of_blocks(1, &layer, (kvc_config){.block_size = BLOCK}, 2) + LARGE + LEAST;
    const int64_t *ids = numbers(100);
    const kvc_tokens tokens = tokens_of(ids, BLOCK);
    for (int less = 0; less < 2; less++) {
        int matched;
        open_world(&full, 1, (kvc_config){.max_bytes = bytes - less}, (kvc_prefix_config){.state_bytes = LARGE});
        feed_to(50, BLOCK, BLOCK);
        CHECKF(kvc_prefix_checkpoint(prefix, 50, &tokens, state, LARGE) == KVC_OK, "%s", kvc_last_error());
        release(50, ids, BLOCK);
        acquire(ids, BLOCK + 1, &matched);
        CHECK(matched == BLOCK && try_batch(cache, 60, BLOCK) == (less ? KVC_ERR_FULL : KVC_OK));
        CHECK(stats_now().checkpoints == 1);
        close_world();
    }
}

/* Prompts that wait to be fed do not pass max_bytes, and messages name them.  Kept blocks give way to them. */
static void test_waiting_prompts(void) {
    enum { LONG = 5000, WAITING = 8, MAX_BYTES = 1 << 18, TOO_LONG = MAX_BYTES / 8 };
    static int64_t ids[TOO_LONG], seq_ids[WAITING];
    const kvc_tokens tokens = tokens_of(ids, LONG);
    int num = 0;
    kvc_status status = KVC_OK;
    open_world(&full, 1, (kvc_config){.max_bytes = MAX_BYTES}, (kvc_prefix_config){0});
    CHECK(try_acquire(ids, TOO_LONG) < 0); /* by itself */
    for (int i = 0; kvc_nbytes(cache) < MAX_BYTES * 3 / 4; i++) serve(numbers(1000 * (i + 1)), MOST, MOST);
    const int64_t kept = stats_now().blocks;
    for (int32_t matched; status == KVC_OK && num < WAITING; num += status == KVC_OK)
        status = kvc_prefix_acquire(prefix, &tokens, -1, &seq_ids[num], &matched);
    CHECKF(num == MAX_BYTES / (LONG * (int)sizeof *ids), "%d prompts", num);
    CHECK(stats_now().blocks < kept && stats_now().sequences == num);
    CHECK_FAILS(status, KVC_ERR_FULL, "acquiring a prompt", "bytes of it are prompts of acquired sequences");
    while ((status = feed(cache, num_layers, seq_ids[0], 8)) == KVC_OK) continue;
    CHECK_FAILS(status, KVC_ERR_FULL, "more tokens", "bytes of it are prompts of acquired sequences");
    for (int i = 0; i < num; i++) CHECK(kvc_clear_sequence(cache, seq_ids[i]) == KVC_OK);
    CHECK(feed(cache, num_layers, 0, MOST) == KVC_OK);
    close_world();
}

/* Blocks that a prompt matches enter the quota, and their states with them: if that leaves no room for its tokens, no
 * sequence is left of it. */
static void test_acquired_into_the_quota(void) {
    enum { KEPT = 16, STATES = 8192, LONG = 2048, OTHERS = 1 << 20 };
    static uint8_t state[STATES];
    static int64_t ids[KEPT + LONG];
    int num_refused = 0;
    for (int i = 0; i < KEPT + LONG; i++) ids[i] = i;
    for (int64_t max_bytes = 60000; max_bytes < 100000; max_bytes += 1000) {
        open_world(&full, 1, (kvc_config){.max_bytes = max_bytes},
                   (kvc_prefix_config){.quota = KEPT, .state_bytes = STATES});
        const int64_t id = acquire(ids, KEPT + 1, NULL);
        for (int end = BLOCK; end <= KEPT; end += BLOCK) {
            const kvc_tokens tokens = tokens_of(ids, end);
            feed_to(id, end, BLOCK);
            const kvc_status status = kvc_prefix_checkpoint(prefix, id, &tokens, state, STATES);
            CHECKF(status == KVC_OK || status == KVC_ERR_FULL, "%s", kvc_last_error());
        }
        release(id, ids, KEPT);
        const int64_t other = acquire(numbers(OTHERS), KEPT + 1, NULL);
        feed_to(other, KEPT, BLOCK);
        const int is_refused = try_acquire(ids, KEPT + LONG) < 0;
        CHECKF(stats_now().sequences == 2 - is_refused, "%lld sequences", (long long)stats_now().sequences);
        num_refused += is_refused;
        close_world();
    }
    CHECKF(num_refused > 5 && num_refused < 35, "%d are refused", num_refused);
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

/* Events beyond the room for them are lost, and counted; a cleared prefix says so. */
static void test_events(void) {
    kvc_prefix_event events[8];
    int64_t num, lost;
    open_world(&full, 1, no_limits, (kvc_prefix_config){.max_events = 4});
    serve(numbers(0), 24, 4);
    CHECK_FAILS(kvc_prefix_take_events(prefix, NULL, sizeof *events, 8, &num, &lost), KVC_ERR_INVALID, "events",
                "NULL");
    CHECK(kvc_prefix_take_events(prefix, events, sizeof *events, 8, &num, &lost) == KVC_OK);
    CHECK_FAILS(kvc_prefix_take_events(prefix, events, sizeof *events, -1, &num, &lost), KVC_ERR_INVALID,
                "max_events is -1", "at least 0");
    CHECK(num == 4 && lost == 2 && events[0].kind == KVC_BLOCK_KEPT && events[0].begin == 8);
    CHECK(kvc_prefix_clear(prefix) == KVC_OK);
    CHECK(kvc_prefix_take_events(prefix, events, sizeof *events, 8, &num, &lost) == KVC_OK);
    CHECK(num == 1 && !lost && events[0].kind == KVC_BLOCKS_CLEARED);
    close_world();
}

/* A prefix takes as much memory as another, and gives it back. */
static void test_first_and_last(void) {
    const kvc_prefix_config own = {.struct_size = sizeof own, .fingerprint = "a model"};
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM};
    kvc_cache *plain = heap_cache(1, &layer, no_limits);
    const int64_t alone = kvc_nbytes(plain);
    kvc_prefix *made[2];
    for (int round = 0; round < 2; round++) {
        int64_t sizes[2];
        for (int i = 0; i < 2; i++) {
            const int64_t before = kvc_nbytes(plain);
            CHECK(kvc_prefix_new(plain, &own, &made[i]) == KVC_OK);
            sizes[i] = kvc_nbytes(plain) - before;
        }
        CHECK(sizes[0] == sizes[1] && sizes[1] > 0);
        kvc_prefix_free(made[round]); /* in either order */
        CHECK(kvc_nbytes(plain) == alone + sizes[0]);
        kvc_prefix_free(made[!round]);
        CHECK(kvc_nbytes(plain) == alone);
    }
    free_valid(plain);
}

/* All exact tokens of a sequence are needed to keep its blocks.  With fewer, nothing changes. */
static void test_too_few_tokens(void) {
    enum { NUM = 3 * BLOCK + 1 };
    open_world(&full, 1, (kvc_config){.block_size = BLOCK}, (kvc_prefix_config){0});
    const int64_t *ids = numbers(0), *others = numbers(1000);
    const kvc_tokens prompt = tokens_of(ids, NUM), none = {.struct_size = sizeof none};
    serve(ids, 2 * BLOCK, MOST);
    int matched;
    const int64_t id = acquire(ids, NUM, &matched);
    CHECK(matched == 2 * BLOCK);
    feed_to(id, matched + NUM, MOST); /* the whole prompt behind its match: other rows than those of a prompt */
    const kvc_prefix_stats before = stats_now();
    CHECK_FAILS(kvc_prefix_release(prefix, id, &prompt), KVC_ERR_INVALID, "13 tokens are given", "holds 21: give all");
    const kvc_prefix_stats after = stats_now();
    CHECK(memcmp(&before, &after, sizeof after) == 0 && kvc_next_position(cache, id) == matched + NUM);
    CHECK(kvc_prefix_release(prefix, id, &none) == KVC_OK && kvc_next_position(cache, id) == 0);
    const int64_t other = acquire(others, NUM, NULL);
    feed_to(other, MOST, MOST);
    CHECK(kvc_mark_inexact(cache, other, NUM) == KVC_OK);
    release(other, others, NUM);
    CHECK(known(others, MOST) == NUM);
    close_world();
}

int main(void) {
    test_first_and_last();
    test_too_few_tokens();
    test_quota();
    test_left_quota();
    test_ttl();
    test_payloads();
    test_large_payload();
    test_fewer_rows();
    test_gap_of_a_commit();
    test_long_prompts();
    test_reuse();
    test_checkpoints();
    test_state_behind_a_gap();
    test_bad_options();
    test_room_for_states();
    test_state_in_use();
    test_waiting_prompts();
    test_acquired_into_the_quota();
    for (int reuse_min = 0; reuse_min < 9; reuse_min += 4) test_emptied(reuse_min);
    test_events();
    return test_result();
}
