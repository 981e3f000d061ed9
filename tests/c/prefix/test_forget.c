/* kvc_prefix_forget: no prompt matches forgotten tokens again.  These are examples.  tests/world compares the rest: how
 * old rows are, whatever became of their sequence, and what a store is given or gives meanwhile. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/serving.h"

static int64_t forget(const int64_t *ids, int num) {
    const kvc_tokens tokens = tokens_of(ids, num);
    const int64_t held = stats_now().held;
    int64_t dropped = -1, num_names = -1;
    CHECK(kvc_prefix_forget(prefix, &tokens, NULL, 0, &num_names, &dropped) == KVC_OK && num_names == 0);
    CHECK(held - stats_now().held == dropped && known(ids, num) == 0);
    CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
    return dropped;
}

/* Returns numbers from 100 on, of which those from `at` on are others. */
static int64_t *other_from(int at, int64_t id) {
    int64_t *ids = numbers(100);
    for (int i = at; i < MOST; i++) ids[i] = id + i;
    return ids;
}

/* Blocks that follow the whole prompt go; blocks that follow a part of it and hold none of its tokens stay. */
static void test_what_stays(void) {
    const int64_t *all = numbers(100), *other = other_from(8, 500);
    open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){0});
    serve(all, 24, 24);
    serve(other, 16, 16);
    CHECK(forget(all, 12) == 24 && stats_now().held == 8);
    CHECK(known(other, 16) == 0);
    serve(other, 8, 8);
    CHECKF(known(other, 16) == 16 && known(all, 24) == 8, "%d, %d", known(other, 16), known(all, 24));
    close_world();
}

/* If all layers have windows, a block that follows a part of the prompt would match without the tokens before it. */
static void test_windows(void) {
    const kvc_policy windows[] = {{.kind = KVC_SLIDING, .window = 4},
                                  {.kind = KVC_SLIDING, .window = 4, .num_sink_tokens = 1},
                                  {.kind = KVC_CHUNKED, .attention_chunk_size = 4},
                                  {.kind = KVC_FULL}};
    const int64_t *all = numbers(100), *other = other_from(6, 500), *next = other_from(1, 800);
    for (int i = 0; i < 4; i++) {
        open_world(&windows[i], 1, (kvc_config){0}, (kvc_prefix_config){0});
        serve(all, 20, 20);
        CHECK(known(all, 20) == 20);
        forget(other, 8);
        serve(next, 4, 4); /* brings the first token alone */
        CHECKF(known(all, 20) == 1, "%d: %d", i, known(all, 20));
        serve(all, 8, 8);
        CHECKF(known(all, 20) == (i < 3 ? 8 : 20), "%d: %d", i, known(all, 20));
        close_world();
    }
}

/* Running sequences continue, whatever they hold, but no more of their blocks is kept. */
static void test_running(void) {
    const int64_t *all = numbers(100), *other = numbers(300);
    for (int is_copied = 0; is_copied < 2; is_copied++) {
        open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){0});
        const int64_t unharmed = acquire(other, 12, NULL), id = acquire(all, 12, NULL);
        feed_to(id, 12, 3);
        feed_to(unharmed, 5, 5);
        forget(all, 12);
        CHECK(stats_in(cache).retained == 1); /* of the unharmed one */
        const int64_t to = is_copied ? kvc_new_sequence(cache) : id;
        if (is_copied) CHECK(kvc_fork(cache, id, to) == KVC_OK);
        feed_to(to, 16, 16);
        release(to, all, 16);
        CHECKF(known(all, 16) == 0 && stats_now().held == 4, "%d: %d", is_copied, known(all, 16));
        release(unharmed, other, 5);
        CHECK(known(other, 12) == 4); /* what its commits had kept before stays */
        serve(all, 16, 16);           /* which computes them again */
        CHECK(known(all, 16) == 16);
        close_world();
    }
}

/* Windows have left all tokens of a sequence behind.  Its rows may still be kept aside, and its state still follows
 * from forgotten tokens. */
static void test_left_behind(void) {
    const int64_t *all = numbers(100);
    const kvc_policy chunks = {.kind = KVC_CHUNKED, .attention_chunk_size = 4};
    for (int has_states = 0; has_states < 2; has_states++) {
        open_world(&chunks, 1, (kvc_config){0}, (kvc_prefix_config){.state_bytes = has_states ? STATE : 0});
        const int64_t id = acquire(all, 3, NULL); /* the other tokens are generated */
        feed_to(id, 13, 4);
        CHECK(kvc_truncate(cache, id, 12) == KVC_OK && kvc_seq_len(cache, id, 0) == 0 &&
              kvc_next_position(cache, id) == 12);
        forget(all, 12);
        if (has_states) checkpoint(id, all, 12, 1);
        release(id, all, 12);
        CHECKF(known(all, 12) == 0 && stats_now().blocks == 0, "%d: %d", has_states, known(all, 12));
        serve(all, 12, 12);
        CHECK(known(all, 12) == (has_states ? 0 : 12));
        close_world();
    }
}

/* A pin of blocks that were dropped stays, and keeps the blocks once they are there again.  If it is taken again when
 * less is known, it holds what it held before as well. */
static void test_pins(void) {
    const int64_t *all = numbers(100);
    const kvc_tokens tokens = tokens_of(all, 12);
    int32_t kept;
    int64_t num;
    for (int clears = 0; clears < 2; clears++) {
        open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){0});
        serve(all, 12, 12);
        CHECK(kvc_prefix_pin(prefix, &tokens, &kept) == KVC_OK && kept == 12);
        CHECK(clears ? kvc_clear(cache) == KVC_OK : forget(all, 12) == 12);
        serve(all, 5, 5);
        CHECK(kvc_prefix_pin(prefix, &tokens, &kept) == KVC_OK && kept == 5);
        serve(all, 12, 12);
        for (int left = 2; left >= 0; left--) {
            CHECK(kvc_prefix_evict(prefix, INT64_MAX, &num) == KVC_OK);
            CHECKF(known(all, 12) == (left ? 12 : 0), "%d: %d", left, known(all, 12));
            CHECK(stats_in(cache).evictable_slots == 0); /* nor do rows go for others */
            CHECK(kvc_prefix_unpin(prefix, &tokens) == KVC_OK);
        }
        close_world();
    }
}

/* Names of the blocks that were dropped, however few there is room for. */
static void test_names(void) {
    const int64_t *all = numbers(100);
    const kvc_tokens tokens = tokens_of(all, 6), whole = tokens_of(all, 20);
    uint8_t names[8][KVC_NAME_BYTES], wanted[8][KVC_NAME_BYTES];
    int64_t num, dropped, num_wanted, total = 0;
    for (int most = 1; most <= 8; most++) {
        int seen = 0, found = 0;
        open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){0});
        serve(all, 22, 22);
        CHECK(kvc_prefix_names(prefix, &whole, *wanted, 8, &num_wanted) == KVC_OK && num_wanted == 5);
        for (total = 0, num = most; num == most; total += dropped) {
            CHECK(kvc_prefix_forget(prefix, &tokens, *names, most, &num, &dropped) == KVC_OK);
            for (int i = 0; i < num; i++, seen++)
                for (int j = 0; j < 5; j++) found += !memcmp(names[i], wanted[j], KVC_NAME_BYTES);
        }
        CHECKF(seen == 5 && found == 5 && total == 22, "%d: %d, %d", most, seen, found);
        close_world();
    }
    open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){0});
    CHECK_FAILS(kvc_prefix_forget(prefix, &tokens, *names, 0, &num, &dropped), KVC_ERR_INVALID, "max_names", "0");
    CHECK_FAILS(kvc_prefix_forget(prefix, &tokens, NULL, 1, &num, &dropped), KVC_ERR_INVALID, "max_names", "1");
    CHECK_FAILS(kvc_prefix_forget(prefix, &tokens, NULL, 0, NULL, &dropped), KVC_ERR_INVALID, "num_names", "NULL");
    CHECK_FAILS(kvc_prefix_forget(prefix, &tokens, NULL, 0, &num, NULL), KVC_ERR_INVALID, "num_dropped", "NULL");
    close_world();
}

/* Rows that another prefix hands out are not kept, whether it had kept them before the call or since. */
static void test_elsewhere(void) {
    const int64_t *all = numbers(100);
    const kvc_tokens tokens = tokens_of(all, 13);
    const kvc_prefix_config config = {
        .struct_size = sizeof config, .fingerprint = "a model", .salt = "b", .salt_size = 1};
    for (int is_since = 0; is_since < 2; is_since++) {
        kvc_prefix *tenant;
        int64_t id = -1;
        int32_t matched;
        open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){0});
        CHECK(kvc_prefix_new(cache, &config, &tenant) == KVC_OK);
        if (is_since) forget(all, 12);
        CHECK(kvc_prefix_acquire(tenant, &tokens, -1, &id, &matched) == KVC_OK && matched == 0);
        feed_to(id, 12, 12);
        CHECK(kvc_prefix_release(tenant, id, &tokens) == KVC_OK);
        if (!is_since) forget(all, 12);
        CHECK(kvc_prefix_acquire(tenant, &tokens, -1, &id, &matched) == KVC_OK && matched == 12);
        release(id, all, 12);
        CHECKF(known(all, 12) == 0, "%d: %d", is_since, known(all, 12));
        close_world();
    }
}

int main(void) {
    test_what_stays();
    test_windows();
    test_running();
    test_elsewhere();
    test_left_behind();
    test_pins();
    test_names();
    return test_result();
}
