/* kvc_prefix_forget: whatever was kept, waits to be kept or is on its way, no prompt matches forgotten tokens again. */
#define _XOPEN_SOURCE 700 /* posix_memalign, mkdtemp */
#define _FILE_OFFSET_BITS 64
#define _TIME_BITS 64
#include <stdio.h>
#include <unistd.h>

#include "support/keeping.h"
#include "support/saved.h"
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

/* The state goes with its block. */
static void test_states(void) {
    const int64_t *all = numbers(100);
    open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){.state_bytes = STATE});
    for (int at = 3; at < 12; at++) {
        const int64_t id = acquire(all, 12, NULL);
        feed_to(id, at, MOST);
        checkpoint(id, all, at, at);
        CHECK(kvc_clear_sequence(cache, id) == KVC_OK);
    }
    CHECK(known(all, 12) == 11 && stats_now().checkpoints == 9);
    forget(all, 12);
    CHECK(stats_now().checkpoints == 0);
    serve(all, 12, 12);
    CHECK(known(all, 12) == 0);
    close_world();
}

/* Running sequences continue, whatever they hold, but no more of their blocks is kept. */
static void test_running(void) {
    const int64_t *all = numbers(100), *other = numbers(300);
    for (int how = 0; how < 6; how++) {
        open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){0});
        const int64_t unharmed = acquire(other, 12, NULL), copy = kvc_new_sequence(cache);
        const int64_t id = acquire(all, how == 1 ? 3 : 12, NULL); /* the others were generated */
        feed_to(id, how == 2 ? 5 : 12, 3);
        if (how == 3) CHECK(kvc_fork(cache, id, copy) == KVC_OK);
        feed_to(unharmed, 5, 5);
        forget(all, 12);
        CHECKF(stats_in(cache).retained == 1, "%d: %d", how, (int)stats_in(cache).retained); /* of the unharmed one */
        if (how == 4) CHECK(kvc_fork(cache, id, copy) == KVC_OK);
        if (how == 5) CHECK(kvc_copy_prefix(cache, id, copy, 8) == KVC_OK);
        feed_to(id, 16, 16);
        CHECK(kvc_next_position(cache, id) == 16 && known(all, 16) == 0);
        release(id, all, 16);
        if (how >= 3) release(copy, all, 12);
        CHECKF(known(all, 16) == 0 && stats_now().held == 4, "%d: %d", how, known(all, 16));
        feed_to(unharmed, 12, 12);
        release(unharmed, other, 12);
        CHECK(known(other, 12) == 4); /* what its commits had kept before stays */
        serve(all, 16, 16);           /* which computes them again */
        CHECK(known(all, 16) == 16);
        close_world();
    }
}

/* A sequence is as old as its first batch, or as the call that acquired it, until it ends.  A sequence that was not
 * acquired also ends if it is emptied, or if its only batch is aborted. */
static void test_dates(void) {
    const int64_t *all = numbers(100), *others = numbers(900);
    const kvc_put_args put = zero_rows(0, 0);
    enum { BEGUN, ACQUIRED, IN_BATCH, ABORTED, ACQUIRED_ABORTED, EMPTIED, CLEARED, ADDED_TO, NUM };
    for (int how = 0; how < NUM; how++) {
        const int was_acquired = how == ACQUIRED || how == ACQUIRED_ABORTED || how == EMPTIED;
        kvc_batch *batch = NULL;
        open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){0});
        int64_t id = was_acquired ? acquire(all, 12, NULL) : kvc_new_sequence(cache), copy = kvc_new_sequence(cache);
        if (how == IN_BATCH || how == ABORTED || how == ACQUIRED_ABORTED)
            CHECK(begin_at_end(cache, id, 12, &batch) == KVC_OK);
        if (how == BEGUN || how == EMPTIED || how == CLEARED || how == ADDED_TO) feed_to(id, 6, 6);
        CHECK(forget(others, 8) == 0);
        if (how == IN_BATCH)
            CHECK(kvc_put(batch, 0, &put) == KVC_OK && kvc_commit(batch) == KVC_OK);
        else
            kvc_abort(batch);
        if (how == EMPTIED) CHECK(kvc_truncate(cache, id, 0) == KVC_OK);
        if (how == CLEARED) CHECK(kvc_clear_sequence(cache, id) == KVC_OK);
        if (how == ADDED_TO) { /* a new sequence gets rows of an old one */
            feed_to(copy, 4, 4);
            CHECK(kvc_remove(cache, id, 0, 4, 0) == KVC_OK && kvc_share(cache, id, copy, 4, 6) == KVC_OK);
            CHECK(kvc_truncate(cache, copy, 4) == KVC_OK); /* which are gone again */
            id = copy;
        }
        feed_to(id, 12, 12);
        release(id, all, 12);
        const int is_new = how == ABORTED || how == EMPTIED || how == CLEARED;
        CHECKF(known(all, 13) == (is_new ? 12 : 0), "way %d: %d known", how, known(all, 13));
        close_world();
    }
}

/* Blocks that a prefix kept before it forgot another prompt stay known, and so does what is computed behind them. */
static void test_older_blocks(void) {
    const int64_t *all = numbers(100);
    open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){0});
    serve(all, 8, 8);
    CHECK(forget(numbers(900), 8) == 0);
    CHECK(serve(all, 16, 4) == 8 && known(all, 17) == 16);
    close_world();
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

/* A pin of blocks that were dropped stays, and keeps the blocks once they are there again. */
static void test_pins(void) {
    const int64_t *all = numbers(100);
    const kvc_tokens tokens = tokens_of(all, 12);
    int32_t kept;
    int64_t num;
    open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){0});
    serve(all, 12, 12);
    CHECK(kvc_prefix_pin(prefix, &tokens, &kept) == KVC_OK && kept == 12);
    CHECK(forget(all, 12) == 12);
    serve(all, 12, 12);
    CHECK(kvc_prefix_evict(prefix, INT64_MAX, &num) == KVC_OK && known(all, 12) == 12);
    CHECK(kvc_prefix_unpin(prefix, &tokens) == KVC_OK);
    CHECK(kvc_prefix_evict(prefix, INT64_MAX, &num) == KVC_OK && num == 12 && stats_now().blocks == 0);
    close_world();
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

/* A sequence that was acquired for another prompt holds forgotten rows, too, once they are shared with it. */
static void test_shared_into(void) {
    const int64_t *all = numbers(100), *other = numbers(300);
    open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){0});
    const int64_t id = acquire(all, 12, NULL), to = acquire(other, 12, NULL);
    feed_to(id, 12, 12);
    CHECK(kvc_share(cache, id, to, 0, 12) == KVC_OK && kvc_exact_to(cache, to) == INT32_MAX);
    forget(all, 12);
    release(to, all, 12);
    CHECKF(known(all, 12) == 0, "%d", known(all, 12));
    close_world();
}

/* Returns another prefix of the same model. */
static kvc_prefix *new_tenant(void) {
    const kvc_prefix_config config = {
        .struct_size = sizeof config, .fingerprint = "a model", .salt = "b", .salt_size = 1};
    kvc_prefix *tenant;
    CHECK(kvc_prefix_new(cache, &config, &tenant) == KVC_OK);
    return tenant;
}

/* Rows that another prefix or a saved state has kept do not become younger. */
static void test_elsewhere(void) {
    const int64_t *all = numbers(100);
    const kvc_tokens tokens = tokens_of(all, 13);
    for (int how = 0; how < 4; how++) {
        saved file = {.fail_after = -1};
        int64_t id = -1, copy;
        int32_t matched;
        open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){0});
        kvc_prefix *tenant = new_tenant();
        CHECK(kvc_prefix_acquire(tenant, &tokens, -1, &id, &matched) == KVC_OK && matched == 0);
        feed_to(id, 12, 12);
        if (how == 3) CHECK(save_one(cache, id, &file) == KVC_OK);
        CHECK(kvc_prefix_release(tenant, id, &tokens) == KVC_OK);
        forget(all, 12);
        if (how == 3) {
            const kvc_load_args args = load_args_of(&file);
            CHECKF(kvc_restore(cache, &args) == KVC_OK, "%s", kvc_last_error());
        } else {
            CHECK(kvc_prefix_acquire(tenant, &tokens, -1, &id, &matched) == KVC_OK && matched == 12);
        }
        if (how == 1) { /* a copy of a copy, which another one keeps in between */
            CHECK(kvc_fork(cache, id, copy = kvc_new_sequence(cache)) == KVC_OK);
            CHECK(kvc_prefix_release(tenant, copy, &tokens) == KVC_OK);
            CHECK(kvc_prefix_acquire(tenant, &tokens, -1, &copy, &matched) == KVC_OK && matched == 12);
            CHECK(kvc_clear_sequence(cache, id) == KVC_OK && kvc_fork(cache, copy, id) == KVC_OK);
        }
        if (how == 2) feed_to(id, 16, 4);
        release(id, all, 16);
        CHECKF(known(all, 16) == 0, "%d: %d", how, known(all, 16));
        serve(all, 16, 16);
        CHECK(known(all, 16) == 16); /* what this prefix has kept since is its own */
        CHECK(kvc_prefix_acquire(tenant, &tokens, -1, &id, &matched) == KVC_OK && matched == 12);
        CHECK(kvc_prefix_release(tenant, id, &tokens) == KVC_OK);
        free(file.bytes);
        close_world();
    }
}

/* Rows that another prefix hands out after the call are not kept, whenever they were computed. */
static void test_kept_elsewhere_since(void) {
    const int64_t *all = numbers(100);
    const kvc_tokens tokens = tokens_of(all, 13);
    int64_t id = -1;
    int32_t matched;
    open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){0});
    kvc_prefix *tenant = new_tenant();
    forget(all, 12);
    for (int i = 0; i < 2; i++) {
        CHECK(kvc_prefix_acquire(tenant, &tokens, -1, &id, &matched) == KVC_OK && matched == 12 * i);
        feed_to(id, 12, 12);
        CHECK(kvc_prefix_release(i ? prefix : tenant, id, &tokens) == KVC_OK);
    }
    CHECKF(known(all, 12) == 0, "%d", known(all, 12));
    close_world();
}

/* A store of one value, which forgets a prompt after it has read that. */
typedef struct late_store {
    const int64_t *ids;
    uint8_t name[KVC_NAME_BYTES], value[8192];
    int64_t size;
    int is_forgetful;
} late_store;

static kvc_status read_late(void *user, const uint8_t *name, void *to, int64_t max_bytes, int64_t *size) {
    const late_store *s = user;
    *size = memcmp(s->name, name, sizeof s->name) ? 0 : s->size;
    if (*size && *size <= max_bytes) memcpy(to, s->value, (size_t)*size);
    if (s->is_forgetful) forget(s->ids, 4);
    return KVC_OK;
}

static kvc_status write_one(void *user, const uint8_t *name, const void *value, int64_t size) {
    late_store *s = user;
    CHECK(size <= (int64_t)sizeof s->value);
    memcpy(s->name, name, sizeof s->name);
    memcpy(s->value, value, (size_t)size);
    s->size = size;
    return KVC_OK;
}

/* A value that was read before its prompt was forgotten is not added after that. */
static void test_fetched(void) {
    const int64_t *all = numbers(100);
    const kvc_tokens tokens = tokens_of(all, 5);
    for (int is_forgetful = 0; is_forgetful < 2; is_forgetful++) {
        late_store late = {.ids = all, .is_forgetful = is_forgetful};
        const kvc_store store = {sizeof store, &late, read_late, write_one, NULL};
        int64_t num_written;
        int32_t fetched;
        open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){.collects_new = 1});
        serve(all, 4, 4);
        CHECK(kvc_store_new_blocks(cache, &store, &num_written) == KVC_OK && num_written == 1);
        CHECK(kvc_prefix_clear(prefix) == KVC_OK);
        CHECK(kvc_prefix_fetch(prefix, &tokens, -1, &store, &fetched) == KVC_OK);
        CHECKF(fetched == (is_forgetful ? 0 : 4) && known(all, 4) == fetched, "%d: %d", is_forgetful, fetched);
        close_world();
    }
}

/* A store that forgets a prompt while it writes a value, early or late. */
typedef struct slow_store {
    kvc_store store; /* where the values go */
    const int64_t *ids;
    int is_late, in_steps, num;
} slow_store;

/* Drops the full blocks of a prompt of 12 tokens, one a call; the last call of all is still to come. */
static void forget_in_steps(const int64_t *ids) {
    const kvc_tokens tokens = tokens_of(ids, 12);
    uint8_t name[KVC_NAME_BYTES];
    int64_t num, dropped;
    for (int i = 0; i < 3; i++)
        CHECK(kvc_prefix_forget(prefix, &tokens, name, 1, &num, &dropped) == KVC_OK && num == 1 && dropped == 4);
}

static kvc_status write_slowly(void *user, const uint8_t *name, const void *value, int64_t size) {
    slow_store *s = user;
    if (s->in_steps && s->num == 1) forget_in_steps(s->ids);
    if (!s->is_late && !s->in_steps && s->num == 1) forget(s->ids, 12);
    CHECK(s->store.write(s->store.user, name, value, size) == KVC_OK);
    if (s->is_late && s->num == 1) forget(s->ids, 12);
    s->num++;
    return KVC_OK;
}

static kvc_status read_through(void *user, const uint8_t *name, void *to, int64_t max_bytes, int64_t *size) {
    const slow_store *s = user;
    return s->store.read(s->store.user, name, to, max_bytes, size);
}

static kvc_status remove_through(void *user, const uint8_t *name) {
    const slow_store *s = user;
    return s->store.remove(s->store.user, name);
}

/* A value that is being written while its prompt is forgotten does not stay in the store; other values do. */
static void test_written(void) {
    const int64_t *all = numbers(100), *other = numbers(300), *alike = other_from(2, 500);
    const kvc_tokens tokens[] = {tokens_of(all, 13), tokens_of(other, 13), tokens_of(alike, 5)};
    char folder[] = P_tmpdir "/kvcache-test-XXXXXX", usage[sizeof folder + 20];
    if (!mkdtemp(folder)) exit(1);
    snprintf(usage, sizeof usage, "%s/usage.lock", folder);
    for (int how = 0; how < 3; how++) {
        kvc_store *directory = NULL;
        CHECKF(kvc_dir_store_new(folder, 0, &directory) == KVC_OK, "%s", kvc_last_error());
        slow_store slow = {.store = *directory, .ids = all, .is_late = how == 1, .in_steps = how == 2};
        const kvc_store store = {sizeof store, &slow, read_through, write_slowly, remove_through};
        uint8_t names[8][KVC_NAME_BYTES];
        int64_t num, num_written;
        int32_t fetched;
        open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){.collects_new = 1});
        serve(other, 4, 4);
        serve(all, 12, 12);
        serve(other, 12, 12);
        serve(alike, 4, 4); /* which is dropped last */
        CHECK(kvc_store_new_blocks(cache, &store, &num_written) == KVC_OK);
        CHECKF(num_written == 3 + slow.in_steps && slow.num == 4 + slow.in_steps, "%d: %d, %d", how, (int)num_written,
               slow.num);
        if (how == 2) CHECK(forget(all, 12) == 4);
        CHECK(kvc_prefix_clear(prefix) == KVC_OK);
        for (int i = 0; i < 3; i++) {
            CHECK(kvc_prefix_names(prefix, &tokens[i], *names, 8, &num) == KVC_OK && num == (i < 2 ? 3 : 1));
            if (i < 2) CHECK(kvc_prefix_fetch(prefix, &tokens[i], -1, &store, &fetched) == KVC_OK && fetched == 12 * i);
            for (int j = 0; j < num; j++) CHECK(store.remove(store.user, names[j]) == KVC_OK);
        }
        close_world();
        kvc_dir_store_free(directory);
    }
    CHECK(!unlink(usage) && !rmdir(folder)); /* nothing else is left */
}

int main(void) {
    test_what_stays();
    test_windows();
    test_states();
    test_running();
    test_dates();
    test_older_blocks();
    test_shared_into();
    test_elsewhere();
    test_kept_elsewhere_since();
    test_fetched();
    test_written();
    test_left_behind();
    test_pins();
    test_names();
    return test_result();
}
