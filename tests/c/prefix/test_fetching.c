/* kvc_prefix_fetch beside calls that change everything while the store reads a block: they drop, forget and evict
 * blocks, and take the room that is left.  Nobody waits for the store, and a fetch that cannot go on harms nobody.
 *
 * Not for Windows: the core's clock is replaced by the linker. */
#define _XOPEN_SOURCE 700 /* posix_memalign */
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "support/serving.h"

enum { NUM = 20, PROMPT = NUM * BLOCK, LONG = 256, VALUE = 4096, SECOND = 1000000000 };

/* ---- the clock, which stands still ------------------------------------------------------------------------------- */

static int64_t now; /* nanoseconds */

int __wrap_clock_gettime(clockid_t which, struct timespec *to);
int __wrap_clock_gettime(clockid_t which, struct timespec *to) {
    (void)which;
    *to = (struct timespec){.tv_sec = 1000 + now / SECOND, .tv_nsec = now % SECOND};
    return 0;
}

/* ---- a store in memory ------------------------------------------------------------------------------------------- */

typedef struct value {
    uint8_t name[KVC_NAME_BYTES], bytes[VALUE];
    int64_t size;
} value;

static value values[LONG];
static int num_values, num_reads;
static int event_at = -1;      /* number of the read that `event` comes with */
static void (*event)(void);    /* what happens in it; NULL: nothing */
static kvc_status read_status; /* of that read */

static value *find_value(const uint8_t *name) {
    for (int i = 0; i < num_values; i++)
        if (!memcmp(values[i].name, name, KVC_NAME_BYTES)) return &values[i];
    return NULL;
}

static kvc_status read_value(void *user, const uint8_t *name, void *to, int64_t max_bytes, int64_t *size) {
    const value *found = find_value(name);
    (void)user;
    if (num_reads++ == event_at) {
        if (event) event();
        if (read_status) return read_status;
    }
    *size = found ? found->size : 0;
    CHECK(*size <= max_bytes);
    memcpy(to, found ? found->bytes : (const void *)"", (size_t)*size);
    return KVC_OK;
}

static kvc_status write_value(void *user, const uint8_t *name, const void *bytes, int64_t size) {
    value *to = find_value(name);
    (void)user;
    if (!to) to = &values[num_values++];
    CHECK(num_values <= LONG && size <= VALUE);
    memcpy(to->name, name, KVC_NAME_BYTES);
    memcpy(to->bytes, bytes, (size_t)size);
    to->size = size;
    return KVC_OK;
}

static const kvc_store store = {.struct_size = sizeof store, .read = read_value, .write = write_value};

/* ---- a prompt in the store --------------------------------------------------------------------------------------- */

static int64_t ids[LONG * BLOCK + 1], others[PROMPT + 1];

static const kvc_policy *policies = &full; /* of the layers */
static int num_policies = 1, state_bytes;

/* Opens a cache whose store has the prompt, of which it holds nothing itself. */
static void open_fetched(kvc_config config, kvc_prefix_config own) {
    own.state_bytes = state_bytes;
    own.collects_new = 1;
    for (int i = 0; i <= LONG * BLOCK; i++) ids[i] = i;
    for (int i = 0; i <= PROMPT; i++) others[i] = 10000 + i;
    open_world(policies, num_policies, (kvc_config){0}, own);
    const int64_t id = acquire(ids, PROMPT + 1, NULL);
    int64_t num;
    for (int end = BLOCK; end <= PROMPT; end += BLOCK) {
        feed_to(id, end, BLOCK);
        if (state_bytes) checkpoint(id, ids, end, end);
        CHECK(kvc_store_new_blocks(cache, &store, &num) == KVC_OK && num == 1);
    }
    CHECK(kvc_cache_free(cache) == KVC_OK);
    open_world(policies, num_policies, config, own);
    num_reads = 0;
}

static void close_fetched(void) {
    close_world();
    num_values = 0;
    event_at = -1;
    event = NULL;
    read_status = KVC_OK;
    now = 0;
}

/* Fetches the prompt; returns how many tokens that brought. */
static int fetch(kvc_status expected) {
    const kvc_tokens tokens = tokens_of(ids, PROMPT + 1);
    int32_t fetched = -1;
    const kvc_status status = kvc_prefix_fetch(prefix, &tokens, -1, &store, &fetched);
    CHECKF(status == expected, "%d: %s", status, kvc_last_error());
    CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
    return fetched;
}

/* Evicts blocks one by one.  The known blocks of the prompt go from the last one on. */
static void check_order(void) {
    int64_t num;
    for (int before = known(ids, PROMPT + 1), after; before; before = after) {
        CHECK(kvc_prefix_evict(prefix, 1, &num) == KVC_OK && num > 0);
        after = known(ids, PROMPT + 1);
        CHECKF(after <= before && after >= before - BLOCK, "%d are known, then %d", before, after);
    }
}

/* ---- what others do while the store reads ------------------------------------------------------------------------ */

static void evict_all(void) {
    int64_t num;
    CHECK(kvc_prefix_evict(prefix, INT64_MAX, &num) == KVC_OK);
}

static void evict_some(void) {
    int64_t num;
    CHECK(kvc_prefix_evict(prefix, 3 * BLOCK, &num) == KVC_OK && num == 3 * BLOCK);
}

static void clear(void) { CHECK(kvc_prefix_clear(prefix) == KVC_OK); }

static void clear_cache(void) { CHECK(kvc_clear(cache) == KVC_OK); }

static void forget(void) {
    const kvc_tokens tokens = tokens_of(ids, PROMPT);
    int64_t num;
    CHECK(kvc_prefix_forget(prefix, &tokens, NULL, 0, &num, &num) == KVC_OK);
}

static void forget_another(void) {
    const kvc_tokens tokens = tokens_of(others, PROMPT);
    int64_t num;
    CHECK(kvc_prefix_forget(prefix, &tokens, NULL, 0, &num, &num) == KVC_OK);
}

static void let_expire(void) { now += 3 * (int64_t)SECOND; }

/* Another call fetches the same prompt. */
static void fetch_too(void) {
    event_at = -1;
    (void)fetch(KVC_OK);
}

/* Takes all room: a batch is begun that needs whatever may be evicted. */
static void take_room(void) {
    int64_t num;
    const int64_t id = kvc_new_sequence(cache);
    num = -1;
    CHECKF(kvc_room(cache, id, &num) == KVC_OK, "%s", kvc_last_error());
    CHECKF(num >= PROMPT / 2 && num <= MOST_FED, "room for %d", (int)num);
    if (num > MOST_FED) return;
    CHECKF(try_batch(cache, id, (int32_t)num) == KVC_OK, "%s", kvc_last_error());
}

/* A fetch whose blocks are dropped meanwhile ends: it adds nothing that nobody finds.  The next one brings all. */
static void test_drops(void (*happens)(void), int at, int64_t ttl_ms) {
    open_fetched((kvc_config){0}, (kvc_prefix_config){.ttl_ms = ttl_ms});
    event = happens;
    event_at = at;
    const int fetched = fetch(KVC_OK);
    CHECKF(fetched == at * BLOCK && num_reads == at + 1, "%d tokens by %d reads", fetched, num_reads);
    CHECKF(!known(ids, PROMPT + 1) && !stats_now().blocks, "%d are known", known(ids, PROMPT + 1));
    CHECK(fetch(KVC_OK) == PROMPT && known(ids, PROMPT + 1) == PROMPT);
    check_order();
    close_fetched();
}

/* Whatever becomes of the blocks, a fetch that goes on takes no harm. */
static void test_goes_on(void (*happens)(void), int at) {
    open_fetched((kvc_config){0}, (kvc_prefix_config){.ttl_ms = 0});
    serve(others, PROMPT, BLOCK);
    event = happens;
    event_at = at;
    (void)fetch(KVC_OK);
    (void)fetch(KVC_OK);
    CHECKF(known(ids, PROMPT + 1) == PROMPT, "%d are known", known(ids, PROMPT + 1));
    check_order();
    close_fetched();
}

/* While a fetch runs, its last blocks are evicted first.  It ends with the next block then, and what it added is known.
 */
static void test_cut_short(int at) {
    open_fetched((kvc_config){0}, (kvc_prefix_config){0});
    event = evict_some;
    event_at = at;
    const int fetched = fetch(KVC_OK), after = known(ids, PROMPT + 1);
    CHECKF(fetched == at * BLOCK && num_reads == at + 1, "%d tokens by %d reads", fetched, num_reads);
    CHECKF(after == (at - 3) * BLOCK && stats_now().held == after, "%d of %d are known", after, (int)stats_now().held);
    check_order();
    close_fetched();
}

/* Serves the beginning of the prompt by a sequence that no prefix knows, so that windows have lost most of its rows. */
static void serve_unknown(int num) {
    const int64_t id = kvc_new_sequence(cache);
    feed_to(id, num * BLOCK, BLOCK);
    release(id, ids, num * BLOCK);
}

/* If windows have lost the first blocks, a fetch also ends behind a block that lacks rows.  The next block would not be
 * known. */
static void test_lost_rows(void) {
    int64_t num;
    open_world(policies, num_policies, (kvc_config){0}, (kvc_prefix_config){.collects_new = 1});
    serve_unknown(12);
    CHECK(kvc_store_new_blocks(cache, &store, &num) == KVC_OK && num == 2);
    close_world();
    open_world(policies, num_policies, (kvc_config){0}, (kvc_prefix_config){0});
    serve_unknown(10);
    num_reads = 0;
    CHECKF(fetch(KVC_OK) == BLOCK && num_reads == 2, "%d reads", num_reads);
    CHECKF(known(ids, PROMPT + 1) == 10 * BLOCK, "%d are known", known(ids, PROMPT + 1));
    close_fetched();
}

/* A store that fails costs the blocks behind: those before are known, and go from the last one on. */
static void test_failing_store(int at) {
    open_fetched((kvc_config){0}, (kvc_prefix_config){0});
    event_at = at;
    read_status = KVC_ERR_STORE;
    kvc_set_last_error("the store is away");
    CHECK(fetch(KVC_ERR_STORE) == at * BLOCK);
    CHECK(known(ids, PROMPT + 1) == at * BLOCK && stats_now().blocks == at);
    check_order();
    close_fetched();
}

/* ---- room -------------------------------------------------------------------------------------------------------- */

/* A full cache has room for a batch while a store reads, as it has without. */
static void test_room(kvc_config config) {
    open_fetched(config, (kvc_prefix_config){0});
    serve(others, PROMPT, BLOCK);
    for (int at = 0; at <= NUM; at++) {
        event = take_room;
        event_at = at;
        num_reads = 0;
        (void)fetch(KVC_OK);
        check_order();
    }
    close_fetched();
}

/* A prompt that is longer than the cache is fetched as far as it fits, in place of what was used before. */
static void test_too_long(kvc_config config, int fits) {
    open_fetched(config, (kvc_prefix_config){0});
    serve(others, 3 * BLOCK, BLOCK);
    (void)fetch(KVC_OK);
    const int after = known(ids, PROMPT + 1);
    CHECKF(fits ? after == fits * BLOCK : after >= 4 * BLOCK && after < PROMPT, "%d are known", after);
    CHECKF(stats_now().blocks == after / BLOCK, "%d blocks", (int)stats_now().blocks);
    num_reads = 0;
    CHECK(fetch(KVC_OK) == 0 && known(ids, PROMPT + 1) == after && num_reads <= 1);
    check_order();
    close_fetched();
}

static void use_others(void) { (void)serve(others, 4 * BLOCK, BLOCK); }

/* A fetch marks its own blocks as used again behind 4 blocks.  It evicts blocks that others have used before, and none
 * that they use later: then it ends. */
static void test_used_meanwhile(int at, int fetched, int left) {
    open_fetched((kvc_config){.capacity = 10 * BLOCK}, (kvc_prefix_config){0});
    event = use_others;
    event_at = at;
    CHECK(fetch(KVC_OK) == fetched * BLOCK && known(ids, PROMPT + 1) == fetched * BLOCK);
    CHECKF(stats_now().blocks == fetched + left, "%d blocks", (int)stats_now().blocks);
    check_order();
    close_fetched();
}

/* Other calls use other blocks, and then compute the blocks that the fetch is about to bring.  A block goes at its next
 * read. */
static void compute_next(void) {
    int64_t num;
    if (event_at == 5) {
        CHECK(kvc_prefix_evict(prefix, 1, &num) == KVC_OK && num == BLOCK);
        CHECKF(known(others, PROMPT) == 3 * BLOCK, "%d of the others are known", known(others, PROMPT));
        return;
    }
    use_others();
    (void)serve(ids, 6 * BLOCK, BLOCK);
    event_at = 5;
}

/* A fetch that meets blocks which others have used later than itself takes that use from none. */
static void test_later_use(void) {
    open_fetched((kvc_config){0}, (kvc_prefix_config){0});
    event = compute_next;
    event_at = 4;
    CHECK(fetch(KVC_OK) == PROMPT - 2 * BLOCK && event_at == 5 && num_reads > event_at);
    close_fetched();
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* Wherever memory fails, nothing is half done, and the next fetch brings the rest. */
static void test_memory(void) {
    const kvc_tokens tokens = tokens_of(ids, PROMPT + 1);
    int has_failed = 1, num_failed = 0;
    for (int most = 1; most <= 1000; most += 999)
        for (int first = 0; has_failed; first++) {
            int32_t fetched = -1;
            open_fetched((kvc_config){0}, (kvc_prefix_config){0});
            memory_fail(&heap, first, most);
            const kvc_status status = kvc_prefix_fetch(prefix, &tokens, -1, &store, &fetched);
            heap.is_failing = 0;
            num_failed += has_failed = heap.failed > 0;
            CHECK(status == KVC_OK || (has_failed && status == KVC_ERR_NOMEM));
            CHECKF(known(ids, PROMPT + 1) >= fetched, "%d of %d are known", known(ids, PROMPT + 1), fetched);
            CHECK(fetch(KVC_OK) <= PROMPT && known(ids, PROMPT + 1) == PROMPT);
            check_order();
            close_fetched();
        }
    CHECKF(num_failed > NUM, "%d requests failed", num_failed);
}

static int64_t bytes_asked;

static void *count_alloc(void *user, size_t size, size_t alignment, const kvc_memory_hint *hint) {
    (void)user, (void)hint;
    bytes_asked += (int64_t)size;
    return aligned_new(alignment, size);
}

static void count_free(void *user, void *start, size_t size, const kvc_memory_hint *hint) {
    (void)user, (void)size, (void)hint;
    aligned_free(start);
}

static const kvc_allocator counting = {.struct_size = sizeof counting, .alloc = count_alloc, .free = count_free};

/* Returns the bytes that a fetch of `num` blocks asks for, even if it gives them back at once. */
static int64_t bytes_of_fetch(int num) {
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM, .rope = {.kind = KVC_ROPE_NONE}};
    const kvc_prefix_config own = {.struct_size = sizeof own, .fingerprint = "a model", .collects_new = 1};
    const kvc_tokens tokens = tokens_of(ids, num * BLOCK + 1);
    int64_t written;
    int32_t fetched = -1;
    num_layers = 1;
    for (int i = 0; i < 2; i++) {
        cache = cache_of(&layer, 1, (kvc_config){.block_size = BLOCK, .num_threads = 1, .allocator = &counting});
        CHECK(kvc_prefix_new(cache, &own, &prefix) == KVC_OK);
        bytes_asked = 0;
        if (i) CHECK(kvc_prefix_fetch(prefix, &tokens, -1, &store, &fetched) == KVC_OK && fetched == num * BLOCK);
        const int64_t bytes = bytes_asked;
        if (!i) serve(ids, num * BLOCK, BLOCK);
        CHECK(kvc_store_new_blocks(cache, &store, &written) == KVC_OK && written == (i ? 0 : num));
        CHECK(kvc_cache_free(cache) == KVC_OK);
        if (i) return num_values = 0, bytes;
    }
    return 0;
}

/* Returns the same of a fetch that passes `num` kept blocks.  They lack states, and rows of windows, and follow blocks
 * of which windows have lost all rows. */
static int64_t bytes_of_passing(int num) {
    const kvc_prefix_config own = {.struct_size = sizeof own, .fingerprint = "a model", .state_bytes = STATE};
    const kvc_tokens tokens = tokens_of(ids, num * BLOCK + 1);
    kvc_layer layers[2];
    int32_t fetched = -1;
    for (int l = 0; l < 2; l++)
        layers[l] =
            (kvc_layer){.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM, .policy = sliding_policy(2 + 4 * l, 0, 0)};
    num_layers = 2;
    cache = cache_of(layers, 2, (kvc_config){.block_size = BLOCK, .num_threads = 1, .allocator = &counting});
    CHECK(kvc_prefix_new(cache, &own, &prefix) == KVC_OK);
    feed_to(0, 8 * BLOCK, 8 * BLOCK);
    checkpoint(0, ids, 8 * BLOCK, 1);
    for (int i = 9; i <= num; i++) {
        const kvc_tokens part = tokens_of(ids, i * BLOCK);
        feed_to(0, i * BLOCK, BLOCK);
        CHECK(kvc_prefix_checkpoint(prefix, 0, &part, NULL, 0) == KVC_OK);
    }
    bytes_asked = num_reads = 0;
    CHECK(kvc_prefix_fetch(prefix, &tokens, -1, &store, &fetched) == KVC_OK && !fetched);
    CHECKF(num_reads == num - 8, "%d of %d blocks are looked for", num_reads, num - 8);
    const int64_t bytes = bytes_asked;
    CHECK(kvc_cache_free(cache) == KVC_OK);
    return bytes;
}

/* A fetch does not look at all blocks again for each one. */
static void check_linear(int64_t (*bytes_of)(int num)) {
    const int64_t few = bytes_of(LONG / 4), many = bytes_of(LONG);
    CHECKF(many < 5 * few, "%d blocks ask for %d bytes, and %d for %d", LONG / 4, (int)few, LONG, (int)many);
}

/* ---- fork() ------------------------------------------------------------------------------------------------------ */

static int is_child;

static void fork_now(void) {
    const pid_t child = fork();
    int status = -1;
    is_child = child == 0;
    if (child > 0) CHECK(waitpid(child, &status, 0) == child && status == 0);
}

/* Both go on, where a store forks. */
static void test_fork(int at) {
    open_fetched((kvc_config){0}, (kvc_prefix_config){0});
    event = fork_now;
    event_at = at;
    CHECK(fetch(KVC_OK) == PROMPT && known(ids, PROMPT + 1) == PROMPT);
    check_order();
    close_fetched();
    if (is_child) _exit(test_result());
}

/* ---- kinds of layers --------------------------------------------------------------------------------------------- */

static void test_all_drops(void) {
    static void (*const drops[])(void) = {evict_all, clear, clear_cache, forget};
    for (int at = 1; at < NUM; at += 3)
        for (int i = 0; i < 4; i++) test_drops(drops[i], at, 0);
    test_drops(forget, 0, 0);
    for (int at = 1; at < NUM; at += 3) test_drops(let_expire, at, 1000);
    for (int at = 1; at < NUM; at += 3) test_goes_on(evict_some, at);
    for (int at = 0; at < NUM; at += 3) test_goes_on(fetch_too, at);
    for (int at = 0; at < NUM; at += 4) test_goes_on(forget_another, at);
    for (int at = 0; at < NUM; at += 4) test_failing_store(at);
    test_fork(5);
}

int main(void) {
    const kvc_policy windows[] = {sliding_policy(6, 1, 0), sliding_policy(9, 0, 0)},
                     mixed[] = {full, sliding_policy(6, 0, 0)};
    for (int i = 0; i < 4; i++) {
        policies = i == 2 ? windows : i == 3 ? mixed : &full;
        num_policies = i < 2 ? 1 : 2;
        state_bytes = i == 1 ? STATE : 0;
        test_all_drops();
        for (int at = 3; at < NUM; at++) test_cut_short(at);
    }
    policies = (kvc_policy[]){sliding_policy(6, 0, 0), sliding_policy(9, 0, 0)};
    num_policies = 2;
    test_lost_rows();
    policies = &full;
    num_policies = 1;
    for (state_bytes = 0; state_bytes <= STATE; state_bytes += STATE) {
        test_room((kvc_config){.capacity = PROMPT + 2 * BLOCK});
        test_room((kvc_config){.max_bytes = 80000});
        test_too_long((kvc_config){.capacity = 8 * BLOCK}, 8);
        test_too_long((kvc_config){.max_bytes = 24000}, 0);
        test_memory();
    }
    state_bytes = 0;
    test_used_meanwhile(3, 10, 0);
    test_used_meanwhile(4, 6, 4);
    test_later_use();
    check_linear(bytes_of_fetch);
    check_linear(bytes_of_passing);
    return test_result();
}
