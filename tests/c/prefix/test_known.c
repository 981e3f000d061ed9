/* Which tokens of a prompt are known, and that every call means the same by it. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign, nanosleep */
#include <time.h>

#include "support/payloads.h"
#include "support/serving.h"

/* ---- commits ----------------------------------------------------------------------------------------------------- */

/* A batch of tokens of several sequences, [num] each, of which those listed are not kept. */
static void commit_but(const int64_t *seq_ids, int num, const int *rejected, int num_rejected) {
    const kvc_put_args put = zero_rows(0, 0);
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

/* A batch that is not stored empties its sequence.  Then other tokens may be fed, and the release says which. */
static void test_unstored(void) {
    const kvc_put_args put = zero_rows(0, 0);
    const int64_t *ids = numbers(100), *others = numbers(200);
    for (int is_other = 0; is_other < 2; is_other++)
        for (int served = 1; served <= 9; served += 4) {
            const int64_t *fed = is_other ? others : ids;
            kvc_batch *batch;
            open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){0});
            serve(ids, served, 12);
            const int64_t id = acquire(ids, 12, NULL);
            const kvc_begin_args args = {
                .struct_size = sizeof args, .num_tokens = 1, .seq_ids = &id, .unstored = (uint8_t[]){1}};
            CHECKF(kvc_begin_with(cache, &args, &batch) == KVC_OK, "%s", kvc_last_error());
            CHECK(kvc_put(batch, 0, &put) == KVC_OK && kvc_commit(batch) == KVC_OK);
            CHECK(kvc_next_position(cache, id) == 0 && stats_now().sequences == 1);
            CHECK(kvc_prefix_clear(prefix) == KVC_OK);
            feed_to(id, 12, 12);
            CHECK(known(ids, 12) == 0 && known(others, 12) == 0);
            release(id, fed, 12);
            CHECKF(known(fed, 12) == 12 && known(is_other ? ids : others, 12) == 0, "%d", known(fed, 12));
            close_world();
        }
}

/* A prompt that ends where a chunk begins needs no row, but a block of the longer prompt: the pin holds it, too. */
static void test_pinned_beginning_of_a_chunk(void) {
    const kvc_policy chunks = chunked_policy(7, 0);
    const int64_t *ids = numbers(100);
    kvc_new_block blocks[3];
    int64_t num;
    int32_t pinned;
    open_world(&chunks, 1, (kvc_config){0}, (kvc_prefix_config){.collects_new = 1});
    const kvc_tokens eleven = tokens_of(ids, 11);
    feed_to(acquire(ids, 20, NULL), 12, 12);
    CHECK(kvc_take_new_blocks(cache, blocks, sizeof *blocks, 3, &num) == KVC_OK && num == 3);
    kvc_node_relist(kvc_node_of(cache, blocks[2].id));                 /* uses [8, 12) */
    CHECK(kvc_clear_sequence(cache, acquire(ids, 5, NULL)) == KVC_OK); /* uses [0, 4) */
    CHECK(kvc_prefix_evict(prefix, 1, &num) == KVC_OK && num == BLOCK);
    CHECK(kvc_prefix_pin(prefix, &eleven, &pinned) == KVC_OK);
    CHECKF(pinned == 7 && known(ids, 11) == 7, "%d pinned, %d known", pinned, known(ids, 11));
    CHECK(kvc_prefix_evict(prefix, INT64_MAX, &num) == KVC_OK && num == 0);
    CHECKF(known(ids, 11) == 7, "%d", known(ids, 11));
    CHECK(kvc_prefix_unpin(prefix, &eleven) == KVC_OK);
    CHECK(kvc_prefix_evict(prefix, INT64_MAX, &num) == KVC_OK && num == 8 && stats_now().blocks == 0);
    close_world();
}

/* ---- one definition ---------------------------------------------------------------------------------------------- */

/* Checks that calls agree about a prompt; returns how many of its tokens are known. */
static int check_agreement(const int64_t *ids, int num) {
    const kvc_tokens tokens = tokens_of(ids, num);
    const int found = known(ids, num);
    int32_t first = -1, kept = -1;
    int64_t missing = -1;
    int matched;
    CHECK(missing_blocks(prefix, &tokens, num, NULL, 0, &first, &missing) == KVC_OK);
    CHECKF(first == found / BLOCK && missing == num / BLOCK - first, "%d known, %lld missing from %d on", found,
           (long long)missing, first);
    CHECK(kvc_clear_sequence(cache, acquire(ids, num, &matched)) == KVC_OK);
    CHECKF(matched == (found < num ? found : known(ids, num - 1)), "%d matched, %d known", matched, found);
    CHECK(kvc_prefix_pin(prefix, &tokens, &kept) == KVC_OK && kept == found);
    CHECK(kvc_prefix_unpin(prefix, &tokens) == KVC_OK && known(ids, num) == found);
    return found;
}

/* ---- pins -------------------------------------------------------------------------------------------------------- */

static void pin(const int64_t *ids, int num, int expected) {
    const kvc_tokens tokens = tokens_of(ids, num);
    int32_t kept = -1;
    CHECK(kvc_prefix_pin(prefix, &tokens, &kept) == KVC_OK);
    CHECKF(kept == expected, "%d of %d tokens are pinned", kept, num);
}

static void unpin(const int64_t *ids, int num) {
    const kvc_tokens tokens = tokens_of(ids, num);
    CHECK(kvc_prefix_unpin(prefix, &tokens) == KVC_OK);
}

static void evict(int64_t num) {
    int64_t evicted;
    CHECK(kvc_prefix_evict(prefix, num, &evicted) == KVC_OK);
}

/* Serves a prompt with a state behind its first `at` tokens. */
static void serve_state(const int64_t *ids, int num, int at) {
    const int64_t id = acquire(ids, num, NULL);
    feed_to(id, at, MOST);
    checkpoint(id, ids, at, at);
    feed_to(id, num, MOST);
    release(id, ids, num);
}

/* max_checkpoint_bytes does not drop the state of a pinned prompt. */
static void test_pinned_state(void) {
    const int64_t *ids = numbers(100);
    for (int at = 6; at <= 8; at++) {
        open_world(&full, 1, (kvc_config){0},
                   (kvc_prefix_config){.state_bytes = STATE, .max_checkpoint_bytes = 2 * STATE});
        serve_state(ids, 10, at);
        CHECK(check_agreement(ids, 10) == at);
        pin(ids, 10, at);
        for (int i = 2; i < 6; i++) serve_state(numbers(100 * i), 10, 7);
        CHECKF(known(ids, 10) == at && stats_now().checkpoints == 2, "%d", known(ids, 10));
        evict(INT64_MAX);
        CHECKF(known(ids, 10) == at, "%d: %d", at, known(ids, 10));
        unpin(ids, 10);
        evict(INT64_MAX);
        CHECK(known(ids, 10) == 0);
        close_world();
    }
}

/* Returns how many tokens of a prompt have rows. */
static int with_rows(const int64_t *ids, int num) {
    const kvc_tokens tokens = tokens_of(ids, num);
    int32_t matched, found = -1;
    CHECK(kvc_prefix_lookup(prefix, &tokens, &matched, &found) == KVC_OK);
    return found;
}

/* A state for which pinned prompts' states leave no room is refused, and drops no others. */
static void test_pinned_states_fill(void) {
    const uint8_t state[STATE] = {1};
    open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){.state_bytes = STATE, .max_checkpoint_bytes = STATE});
    const int64_t id = acquire(numbers(100), 12, NULL);
    for (int at = 4; at <= 8; at += 2) {
        const kvc_tokens tokens = tokens_of(numbers(100), at);
        feed_to(id, at, at);
        if (at < 8) CHECK(kvc_prefix_checkpoint(prefix, id, &tokens, state, 4) == KVC_OK);
        if (at == 4) pin(numbers(100), 4, 4);
        if (at == 8)
            CHECK_FAILS(kvc_prefix_checkpoint(prefix, id, &tokens, state, 13), KVC_ERR_FULL,
                        "max_checkpoint_bytes is 16", "13");
    }
    CHECK(known(numbers(100), 8) == 6 && with_rows(numbers(100), 8) == 8 && stats_now().checkpoints == 2);
    unpin(numbers(100), 4);
    checkpoint(id, numbers(100), 8, 1);
    CHECK(known(numbers(100), 8) == 8 && stats_now().checkpoints == 1);
    CHECK(kvc_clear_sequence(cache, id) == KVC_OK);
    close_world();
}

/* A pinned prompt that was forgotten gets its state back only where other pinned states leave room. */
static void test_forgotten_pinned_state(void) {
    const uint8_t state[STATE] = {1};
    open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){.state_bytes = STATE, .max_checkpoint_bytes = 2 * STATE});
    for (int i = 1; i < 4; i++) {
        serve_state(numbers(100 * i), 10, 8);
        pin(numbers(100 * i), 10, 8);
        const kvc_tokens given = tokens_of(numbers(100), 10);
        int64_t num, dropped;
        if (i == 1) CHECK(kvc_prefix_forget(prefix, &given, NULL, 0, &num, &dropped) == KVC_OK && dropped == 10);
    }
    const int64_t id = acquire(numbers(100), 10, NULL);
    const kvc_tokens tokens = tokens_of(numbers(100), 8);
    feed_to(id, 8, 8);
    CHECK_FAILS(kvc_prefix_checkpoint(prefix, id, &tokens, state, STATE), KVC_ERR_FULL, "max_checkpoint_bytes", "32");
    CHECK(stats_now().checkpoint_bytes == 2 * STATE);
    CHECK(kvc_clear_sequence(cache, id) == KVC_OK);
    close_world();
}

/* A block that is computed again, because its state was not kept, was used last. */
static void test_computed_again(void) {
    open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){.state_bytes = STATE});
    serve(numbers(100), 8, 8);
    serve(numbers(200), 8, 8);
    int matched;
    const int64_t id = acquire(numbers(100), 8, &matched);
    CHECK(!matched);
    feed_to(id, 8, 8);
    evict(8);
    CHECKF(with_rows(numbers(100), 8) == 8 && with_rows(numbers(200), 8) == 0, "%d and %d tokens have rows",
           with_rows(numbers(100), 8), with_rows(numbers(200), 8));
    CHECK(kvc_clear_sequence(cache, id) == KVC_OK);
    close_world();
}

/* The block whose state a prompt goes on from is used by that, though a longer block has its rows as well. */
static void test_state_is_used(void) {
    open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){.state_bytes = STATE});
    for (int i = 1; i <= 2; i++) serve_state(numbers(100 * i), 10, 6);
    int matched;
    const int64_t id = acquire(numbers(100), 10, &matched);
    CHECK(matched == 6);
    evict(12);
    CHECKF(known(numbers(100), 10) == 6 && known(numbers(200), 10) == 0, "%d and %d tokens are known",
           known(numbers(100), 10), known(numbers(200), 10));
    CHECK(kvc_clear_sequence(cache, id) == KVC_OK);
    close_world();
}

/* A block that is added, and was kept before, is used by that. */
static void test_added_again(void) {
    static uint8_t payload[4096];
    const kvc_tokens tokens = tokens_of(numbers(100), 4);
    kvc_new_block block;
    int64_t num, size;
    int32_t is_kept;
    open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){.collects_new = 1});
    serve(numbers(100), 4, 4);
    CHECK(kvc_take_new_blocks(cache, &block, sizeof block, 1, &num) == KVC_OK && num == 1);
    CHECK(kvc_read_block(cache, block.id, payload, sizeof payload, &size) == KVC_OK && size > 0);
    serve(numbers(200), 4, 4);
    CHECK(add_payload(prefix, &tokens, 0, payload, size, &is_kept) == KVC_OK && is_kept);
    evict(4);
    CHECKF(known(numbers(100), 4) == 4 && known(numbers(200), 4) == 0, "%d and %d tokens are known",
           known(numbers(100), 4), known(numbers(200), 4));
    close_world();
}

/* A state that comes late is kept with rows of a kept block, though the sequence's windows have left them behind. */
static void test_late_state(void) {
    const kvc_policy policies[] = {sliding_policy(4, 0, 0), full};
    const int64_t *ids = numbers(100);
    for (int num_policies = 1; num_policies <= 2; num_policies++)
        for (int at = 6; at <= 8; at++) {
            open_world(policies, num_policies, (kvc_config){0}, (kvc_prefix_config){.state_bytes = STATE});
            const int64_t id = acquire(ids, 22, NULL);
            feed_to(id, 20, 2);
            checkpoint(id, ids, at, 1);
            CHECKF(check_agreement(ids, 22) == at, "%d groups: %d of %d", num_policies, known(ids, 22), at);
            CHECK(stats_now().checkpoints == 1);
            CHECK(kvc_clear_sequence(cache, id) == KVC_OK);
            close_world();
        }
}

/* A state whose last token's rows windows have lost, though no token follows it, is not kept; that is no failure. */
static void test_state_without_rows(void) {
    const kvc_policy chunks = {.kind = KVC_CHUNKED, .attention_chunk_size = 3};
    const int64_t *ids = numbers(100);
    open_world(&chunks, 1, (kvc_config){0}, (kvc_prefix_config){.state_bytes = STATE});
    const int64_t id = acquire(ids, 4, NULL);
    feed_to(id, 7, 7);
    CHECK(kvc_truncate(cache, id, 6) == KVC_OK && kvc_seq_len(cache, id, 0) == 0);
    checkpoint(id, ids, 6, 1);
    CHECK(known(ids, 6) == 0 && stats_now().checkpoints == 0);
    CHECK(kvc_clear_sequence(cache, id) == KVC_OK);
    close_world();
}

/* A match ends at the last state whose windows have their rows. */
static void test_states_that_lack_rows(void) {
    enum { NUM = 60, LAST = 25 };
    const kvc_policy policies[] = {full, sliding_policy(3, 0, 0), chunked_policy(7, 0)};
    const int64_t *ids = numbers(100);
    for (int num_policies = 1; num_policies <= 3; num_policies++) {
        open_world(policies, num_policies, (kvc_config){0}, (kvc_prefix_config){.state_bytes = STATE});
        const int64_t id = kvc_new_sequence(cache);
        for (int at = 2; at <= NUM; at += 4) {
            const kvc_tokens tokens = tokens_of(ids, at);
            feed_to(id, at, at);
            CHECK(kvc_prefix_checkpoint(prefix, id, &tokens, NULL, 0) == KVC_OK);
            if (at == LAST / 4 * 4 - 2) checkpoint(id, ids, at, 1);
        }
        for (int at = 4; at < NUM; at += 4) checkpoint(id, ids, at, 1);
        const int found = num_policies == 1 ? NUM - 4 : LAST / 4 * 4 - 2;
        CHECKF(known(ids, NUM - 2) == found && with_rows(ids, NUM - 2) == NUM - 2, "%d policies: %d of %d are known",
               num_policies, known(ids, NUM - 2), with_rows(ids, NUM - 2));
        CHECK(kvc_clear_sequence(cache, id) == KVC_OK);
        close_world();
    }
}

/* A sequence lacks the tokens that a batch did not keep: no block has them, and no state stands behind them. */
static void test_state_behind_a_gap(void) {
    const kvc_policy policies[] = {full, sliding_policy(3, 0, 0)};
    const int64_t *ids = numbers(100);
    for (int num_policies = 1; num_policies <= 2; num_policies++)
        for (int at = 3; at <= 4; at++) {
            open_world(policies, num_policies, (kvc_config){0},
                       (kvc_prefix_config){.state_bytes = STATE, .max_events = 9});
            const int64_t id = acquire(ids, 12, NULL), seq_ids[] = {id, id, id, id, id};
            kvc_prefix_event event;
            int64_t num, num_lost;
            commit_but(seq_ids, 5, (int[]){2, 3}, 2);
            CHECK(kvc_exact_to(cache, id) == 4);
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

/* A commit does not keep a block that lacks tokens. */
static void test_block_with_a_gap(void) {
    const int64_t *ids = numbers(100);
    open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){0});
    const int64_t id = acquire(ids, 12, NULL), other = kvc_new_sequence(cache);
    feed_to(id, 1, 1);
    feed_to(other, 8, 8);
    CHECK(kvc_share(cache, other, id, BLOCK, 8) == KVC_OK && kvc_exact_to(cache, id) == BLOCK);
    feed_to(id, 12, 4);
    CHECKF(stats_now().held == 0, "%d tokens are kept", (int)stats_now().held);
    release(id, ids, 12);
    CHECKF(stats_now().held == 1 && known(ids, 12) == 1, "%d tokens are kept", (int)stats_now().held);
    close_world();
}

/* ---- time -------------------------------------------------------------------------------------------------------- */

static void sleep_ms(int ms) { nanosleep(&(struct timespec){0, ms * 1000000}, NULL); }

/* Events tell of all blocks that have expired. */
static void test_expired_is_dropped(void) {
    kvc_prefix_event events[64];
    int64_t num, before, lost;
    open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){.ttl_ms = 20, .max_events = 64});
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 25; i++) serve(numbers(100 * i), 4, 4);
        CHECK(kvc_prefix_take_events(prefix, events, sizeof *events, 64, &before, &lost) == KVC_OK);
        sleep_ms(40);
        CHECK(kvc_prefix_take_events(prefix, events, sizeof *events, 64, &num, &lost) == KVC_OK);
        num += before; /* some may have expired in time for the first list */
        CHECKF(num == 2 * 25, "%lld events", (long long)num);
        CHECK(stats_now().blocks == 0 && stats_now().held == 0);
    }
    close_world();
}

int main(void) {
    test_unstored();
    test_pinned_beginning_of_a_chunk();
    test_pinned_state();
    test_pinned_states_fill();
    test_forgotten_pinned_state();
    test_computed_again();
    test_state_is_used();
    test_added_again();
    test_late_state();
    test_state_without_rows();
    test_states_that_lack_rows();
    test_state_behind_a_gap();
    test_block_with_a_gap();
    test_expired_is_dropped();
    return test_result();
}
