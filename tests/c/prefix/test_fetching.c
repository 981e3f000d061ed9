/* kvc_prefix_fetch beside calls that use blocks later than it does, and what it asks for to go on.  tests/world makes
 * other calls while the store reads a block. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/serving.h"

enum { NUM = 20, PROMPT = NUM * BLOCK, LONG = 256, MOST_VALUE = 4096, MOST_VALUES = LONG };
#include "support/shelf.h"

static int num_reads;
static int event_at = -1;   /* number of the read that `event` comes with */
static void (*event)(void); /* what happens in it */

static kvc_status count_and_read(void *user, const uint8_t *name, void *to, int64_t max_bytes, int64_t *size) {
    if (num_reads++ == event_at) event();
    return read_value(user, name, to, max_bytes, size);
}

static const kvc_store eventful = {.struct_size = sizeof eventful, .read = count_and_read, .write = write_value};

/* ---- a prompt in the store --------------------------------------------------------------------------------------- */

static int64_t ids[LONG * BLOCK + 1], others[PROMPT + 1];

/* Opens a cache whose store has the prompt, of which it holds nothing itself. */
static void open_fetched(kvc_config config) {
    const kvc_prefix_config own = {.collects_new = 1};
    int64_t num;
    for (int i = 0; i <= LONG * BLOCK; i++) ids[i] = i;
    for (int i = 0; i <= PROMPT; i++) others[i] = 10000 + i;
    open_world(&full, 1, (kvc_config){0}, own);
    feed_to(acquire(ids, PROMPT + 1, NULL), PROMPT, MOST);
    CHECK(kvc_store_new_blocks(cache, &store, &num) == KVC_OK && num == NUM);
    CHECK(kvc_cache_free(cache) == KVC_OK);
    open_world(&full, 1, config, own);
    num_reads = 0;
}

static void close_fetched(void) {
    close_world();
    num_values = 0;
    event_at = -1;
}

/* Fetches the prompt; returns how many tokens that brought. */
static int fetch(void) {
    const kvc_tokens tokens = tokens_of(ids, PROMPT + 1);
    int32_t fetched = -1;
    CHECKF(kvc_prefix_fetch(prefix, &tokens, -1, &eventful, &fetched) == KVC_OK, "%s", kvc_last_error());
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

/* ---- what others use while the store reads ----------------------------------------------------------------------- */

static void use_others(void) { (void)serve(others, 4 * BLOCK, BLOCK); }

/* A fetch marks its own blocks as used again behind 4 blocks.  It evicts blocks that others have used before, and none
 * that they use later: then it ends. */
static void test_used_meanwhile(int at, int fetched, int left) {
    open_fetched((kvc_config){.capacity = 10 * BLOCK});
    event = use_others;
    event_at = at;
    CHECK(fetch() == fetched * BLOCK && known(ids, PROMPT + 1) == fetched * BLOCK);
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
    open_fetched((kvc_config){0});
    event = compute_next;
    event_at = 4;
    CHECK(fetch() == PROMPT - 2 * BLOCK && event_at == 5 && num_reads > event_at);
    close_fetched();
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

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
        if (i) CHECK(kvc_prefix_fetch(prefix, &tokens, -1, &eventful, &fetched) == KVC_OK && fetched == num * BLOCK);
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
    CHECK(kvc_prefix_fetch(prefix, &tokens, -1, &eventful, &fetched) == KVC_OK && !fetched);
    CHECKF(num_reads == num - 8, "%d of %d blocks are looked for", num_reads, num - 8);
    const int64_t bytes = bytes_asked;
    CHECK(kvc_cache_free(cache) == KVC_OK);
    return bytes;
}

/* Blocks that wait to be stored still do once a fetch has brought them rows of windows. */
static void test_waiting_blocks(void) {
    const kvc_policy policies[2] = {{.kind = KVC_FULL}, {.kind = KVC_SLIDING, .window = BLOCK}};
    const kvc_tokens beginning = tokens_of(ids, 2 * BLOCK + 1);
    kvc_new_block blocks[8];
    int64_t num;
    int32_t fetched;
    open_world(policies, 2, (kvc_config){0}, (kvc_prefix_config){.collects_new = 1});
    serve(ids, 3 * BLOCK, BLOCK);
    CHECK(kvc_store_new_blocks(cache, &store, &num) == KVC_OK && num == 3 && kvc_clear(cache) == KVC_OK);
    feed_to(50, 3 * BLOCK, 3 * BLOCK); /* in one batch, so that windows lose the first rows */
    release(50, ids, 3 * BLOCK);
    CHECK(known(ids, 2 * BLOCK) == 0);
    CHECK(kvc_prefix_fetch(prefix, &beginning, -1, &eventful, &fetched) == KVC_OK && fetched == 2 * BLOCK);
    CHECK(kvc_take_new_blocks(cache, blocks, sizeof *blocks, 8, &num) == KVC_OK);
    CHECKF(num == 3, "%d blocks wait", (int)num);
    close_fetched();
}

/* A fetch does not look at all blocks again for each one. */
static void check_linear(int64_t (*bytes_of)(int num)) {
    const int64_t few = bytes_of(LONG / 4), many = bytes_of(LONG);
    CHECKF(many < 5 * few, "%d blocks ask for %d bytes, and %d for %d", LONG / 4, (int)few, LONG, (int)many);
}

int main(void) {
    test_used_meanwhile(3, 10, 0);
    test_used_meanwhile(4, 6, 4);
    test_later_use();
    test_waiting_blocks();
    check_linear(bytes_of_fetch);
    check_linear(bytes_of_passing);
    return test_result();
}
