/* Each call of the header's section on prefixes fails with the errors that the header lists for it, and with no others.
 * A call that fails changes nothing.  Each allocation of a call fails in turn, alone and with all that follow, with
 * room and without.  tests/package/test_listed_errors.py compares the table below with the header. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/keeping.h"
#include "support/payloads.h"
#include "support/serving.h"

enum { PROMPT = 14, MOST_VALUE = 1 << 16, MOST_VALUES = 32, LARGE_STATE = 4000 };
#include "support/shelf.h"

enum { NONE = 0, NOMEM = 1, FULL = 2 }; /* errors that a call lists; others need a caller's mistake, or a store's */

/* ---- the world of a call ----------------------------------------------------------------------------------------- */

static int has_states, is_pinned;
static int32_t number;
static int64_t running; /* a sequence with the first 9 tokens of a prompt, which it was acquired for */
static kvc_tokens prompt, other, beginning;

/* A prompt is kept, the second half of another one is in the store, and a sequence of a third one runs. */
static void open_prompts(int64_t max_bytes) {
    const kvc_policy policies[] = {full, sliding_policy(6, 1, 0)};
    int64_t num_written;
    open_world(policies, 2, (kvc_config){.max_bytes = max_bytes},
               (kvc_prefix_config){.collects_new = 1,
                                   .max_events = 50,
                                   .state_bytes = has_states ? LARGE_STATE : 0,
                                   .reuse_min_tokens = has_states ? 0 : BLOCK});
    int64_t *half = numbers(100);
    for (int i = 6; i < MOST; i++) half[i] += 500;
    prompt = tokens_of(numbers(100), PROMPT);
    other = tokens_of(half, PROMPT);
    beginning = tokens_of(half, 9);
    num_values = 0;
    int64_t id = acquire(other.ids, PROMPT, NULL);
    feed_to(id, 12, 5);
    if (has_states) checkpoint(id, other.ids, 12, 1);
    release(id, other.ids, 12);
    CHECK(kvc_store_new_blocks(cache, &store, &num_written) == KVC_OK && num_written == 3);
    CHECK(kvc_prefix_clear(prefix) == KVC_OK);
    id = acquire(prompt.ids, PROMPT, NULL);
    feed_to(id, 9, 5);
    if (has_states) checkpoint(id, prompt.ids, 9, 1);
    feed_to(id, PROMPT, PROMPT);
    release(id, prompt.ids, PROMPT);
    if (is_pinned) CHECK(kvc_prefix_pin(prefix, &prompt, &number) == KVC_OK && number);
    running = acquire(other.ids, 9, NULL);
    feed_to(running, 9, 9);
}

/* The parts of a cache that a failing call leaves as they were. */
typedef struct world {
    int64_t nbytes, sequences, retained;
    kvc_prefix_stats stats;
    int known, known_of_other;
} world;

static world look(void) {
    world seen = {.nbytes = kvc_nbytes(cache),
                  .sequences = kvc_sequences(cache, NULL, 0),
                  .retained = stats_in(cache).retained,
                  .stats = stats_now()};
    seen.known = known(prompt.ids, PROMPT);
    seen.known_of_other = known(other.ids, PROMPT);
    return seen;
}

/* ---- the calls --------------------------------------------------------------------------------------------------- */

static int64_t found, lost;
static uint8_t bytes[MOST_VALUE];

static kvc_status run_identity(void) { return kvc_prefix_identity(cache, "m", 1, bytes); }

static kvc_status run_new(void) {
    const kvc_prefix_config config = {.struct_size = sizeof config, .fingerprint = "another", .max_events = 40};
    kvc_prefix *made = NULL;
    const kvc_status status = kvc_prefix_new(cache, &config, &made);
    CHECK((made != NULL) == (status == KVC_OK));
    return status;
}

static kvc_status run_acquire(void) { return kvc_prefix_acquire(prefix, &prompt, -1, &found, &number); }

static kvc_status run_acquire_none(void) { return kvc_prefix_acquire(prefix, &other, 0, &found, &number); }

/* A prompt with more tokens than there is room for. */
static kvc_status run_acquire_long(void) {
    static int64_t ids[100000];
    const kvc_tokens tokens = tokens_of(ids, sizeof ids / sizeof *ids);
    return kvc_prefix_acquire(prefix, &tokens, -1, &found, &number);
}

static kvc_status run_release(void) { return kvc_prefix_release(prefix, running, &beginning); }

static kvc_status run_checkpoint(void) {
    return kvc_prefix_checkpoint(prefix, running, &beginning, bytes, has_states ? LARGE_STATE : 0);
}

static kvc_status run_state(void) { return kvc_prefix_state(prefix, running, bytes, STATE, &found); }

static kvc_status run_lookup(void) { return kvc_prefix_lookup(prefix, &prompt, &number, NULL); }

static kvc_status run_pin(void) { return kvc_prefix_pin(prefix, &prompt, &number); }

static kvc_status pin_as(int i) {
    int64_t *ids = numbers(100);
    ids[PROMPT] = i; /* the token that is not known */
    const kvc_tokens tokens = tokens_of(ids, PROMPT + 1);
    return kvc_prefix_pin(prefix, &tokens, &number);
}

/* One pin more than there is room for. */
static kvc_status run_pin_more(void) {
    int i = 0;
    const int is_failing = heap.is_failing;
    heap.is_failing = 0;
    while (i < 200 && pin_as(i) == KVC_OK) i++;
    heap.is_failing = is_failing;
    return pin_as(i);
}

static kvc_status run_unpin(void) { return kvc_prefix_unpin(prefix, &prompt); }

static kvc_status run_evict(void) { return kvc_prefix_evict(prefix, 5, &found); }

static kvc_status run_clear(void) { return kvc_prefix_clear(prefix); }

static kvc_status run_forget(void) { return kvc_prefix_forget(prefix, &prompt, bytes, 9, &found, &lost); }

static kvc_status run_end_forget(void) {
    const kvc_status status = run_forget();
    return status == KVC_OK ? kvc_prefix_end_forget(prefix) : status;
}

static kvc_status run_names(void) { return kvc_prefix_names(prefix, &prompt, bytes, 9, &found); }

static kvc_status run_take_events(void) {
    kvc_prefix_event events[9];
    return kvc_prefix_take_events(prefix, events, sizeof *events, 9, &found, &lost);
}

static kvc_status run_take_new(void) {
    kvc_new_block blocks[9];
    return kvc_take_new_blocks(cache, blocks, sizeof *blocks, 9, &found);
}

static kvc_new_block first_new(void) {
    kvc_new_block block = {0};
    const int was_failing = heap.is_failing;
    heap.is_failing = 0;
    CHECK(kvc_take_new_blocks(cache, &block, sizeof block, 1, &found) == KVC_OK && found == 1);
    heap.is_failing = was_failing;
    return block;
}

static kvc_status run_fetch(void) { return kvc_prefix_fetch(prefix, &other, -1, &store, &number); }

static kvc_status run_store(void) { return kvc_store_new_blocks(cache, &store, &found); }

static kvc_status run_store_block(void) { return kvc_store_block(cache, first_new().id, &store, &found); }

typedef struct call {
    const char *name;
    kvc_status (*run)(void);
    int lists;
    int may_change; /* though it fails, as the header says */
} call;

static const call calls[] = {
    {"kvc_prefix_identity", run_identity, NONE, 0},
    {"kvc_prefix_new", run_new, NOMEM | FULL, 0},
    {"kvc_prefix_acquire", run_acquire, NOMEM, 0},
    {"kvc_prefix_acquire", run_acquire_none, NOMEM, 0},
    {"kvc_prefix_acquire", run_acquire_long, NOMEM | FULL, 0},
    {"kvc_prefix_release", run_release, NONE, 0},
    {"kvc_prefix_checkpoint", run_checkpoint, NOMEM | FULL, 1},
    {"kvc_prefix_state", run_state, NONE, 0},
    {"kvc_prefix_lookup", run_lookup, NOMEM, 0},
    {"kvc_prefix_pin", run_pin, NOMEM, 0},
    {"kvc_prefix_pin", run_pin_more, NOMEM | FULL, 1},
    {"kvc_prefix_unpin", run_unpin, NONE, 0},
    {"kvc_prefix_evict", run_evict, NONE, 0},
    {"kvc_prefix_clear", run_clear, NOMEM, 0},
    {"kvc_prefix_forget", run_forget, NONE, 0},
    {"kvc_prefix_end_forget", run_end_forget, NONE, 0},
    {"kvc_prefix_names", run_names, NONE, 0},
    {"kvc_prefix_take_events", run_take_events, NONE, 0},
    {"kvc_take_new_blocks", run_take_new, NONE, 0},
    {"kvc_prefix_fetch", run_fetch, NOMEM, 1},
    {"kvc_store_new_blocks", run_store, NOMEM, 0},
    {"kvc_store_block", run_store_block, NOMEM, 0},
};

/* Returns which errors a call had in a world of at most max_bytes (0: no limit). */
static int errors_of(const call *c, int64_t max_bytes) {
    int seen = NONE;
    for (int in_a_row = 1; in_a_row < 100; in_a_row += 98)
        for (int n = 0, failed = 1; failed; n++) {
            open_prompts(max_bytes);
            const world before = look();
            memory_fail(&heap, n, in_a_row);
            const kvc_status status = c->run();
            failed = heap.failed;
            heap.is_failing = 0;
            seen |= status == KVC_ERR_NOMEM ? NOMEM : status == KVC_ERR_FULL ? FULL : NONE;
            CHECKF(status == KVC_OK || status == KVC_ERR_NOMEM || status == KVC_ERR_FULL, "%s is %d: %s", c->name,
                   (int)status, kvc_last_error());
            const world after = look();
            CHECKF(status == KVC_OK || c->may_change || !memcmp(&before, &after, sizeof before),
                   "%s has failed and changed something: %lld bytes, %lld blocks, %d known, then %lld, %lld, %d",
                   c->name, (long long)before.nbytes, (long long)before.stats.blocks, before.known,
                   (long long)after.nbytes, (long long)after.stats.blocks, after.known);
            close_world();
        }
    return seen;
}

/* An edit's bookkeeping may take the cache beyond max_bytes.  An acquire that fails then evicts nothing either. */
static void test_beyond_the_limit(void) {
    int num_failed = 0;
    has_states = is_pinned = 0;
    open_prompts(0);
    const int64_t nbytes = kvc_nbytes(cache);
    close_world();
    for (int64_t limit = nbytes; limit < nbytes + 2000; limit += is_full() ? 8 : 40)
        for (int n = 0; n < 4; n++) {
            open_prompts(limit);
            if (retain(cache, running, INT64_MAX, 0, 4) == KVC_OK && kvc_nbytes(cache) > limit) {
                const world before = look();
                memory_fail(&heap, n, 99);
                const kvc_status status = run_acquire();
                heap.is_failing = 0;
                const world after = look();
                CHECK(status == KVC_OK || !memcmp(&before, &after, sizeof before));
                num_failed += status != KVC_OK;
            }
            close_world();
        }
    CHECK(num_failed > 0);
}

int main(void) {
    test_beyond_the_limit();
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        int seen = NONE;
        for (int kind = 0; kind < 4; kind++) {
            has_states = kind & 1, is_pinned = kind >> 1;
            open_prompts(0);
            const int64_t nbytes = kvc_nbytes(cache);
            close_world();
            seen |= errors_of(&calls[i], 0);
            for (int64_t more = 0; more < 2000; more += 100) seen |= errors_of(&calls[i], nbytes + more);
        }
        CHECKF(seen == calls[i].lists, "%s lists %d, and had %d", calls[i].name, calls[i].lists, seen);
    }
    return test_result();
}
