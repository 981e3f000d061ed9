/* growth.c: times every public call that takes a cache's mutex, beside few and beside many kept blocks.  It also
 * measures the longest time for which a call lets another thread wait for the mutex.  The library holds the core as
 * well.
 *
 * The core is compiled with pthread's functions for mutexes renamed to the functions below.  They note how long the
 * calling thread holds a mutex for which another thread waits, in processor time, because another program may have the
 * processor.  The clock is renamed, too, so that blocks expire at once. */
#undef pthread_mutex_lock
#undef pthread_mutex_trylock
#undef pthread_mutex_unlock
#undef clock_gettime
#include "driver.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "kvcache.h"

enum {
    BLOCK = 16,
    DIM = 8,
    WINDOW = 32,
    OWN = 8 * BLOCK /* tokens of the sequence that is read and edited */,
    LONG = 64 * BLOCK /* and of one that runs */
};
enum { OWN_ID = 1 << 20, OTHER_ID };

/* ---- time -------------------------------------------------------------------------------------------------------- */

static atomic_llong clock_ahead; /* seconds that the core's clock is ahead */

int growth_clock(clockid_t clock, struct timespec *t);
int growth_clock(clockid_t clock, struct timespec *t) {
    const int failed = clock_gettime(clock, t);
    t->tv_sec += (time_t)atomic_load(&clock_ahead);
    return failed;
}

/* Notes on this thread's calls.  They are taken only within timed calls, and waits of others only while watching. */
static _Thread_local struct {
    int is_timed, watches;
    double seconds, locked, longest;
} noted;

/* Who asks for the mutex meanwhile (ask): a call that lets go of it only if somebody wants it holds nobody up. */
static _Thread_local int is_asking;
static clockid_t clock_of_watched; /* of the thread that is watched */
static atomic_llong wanted;        /* nanoseconds of this clock when the asking thread began to wait; 0: it does not */

static void note_lock(void) {
    if (noted.watches) noted.locked = processor();
    if (is_asking) atomic_store(&wanted, 0);
}

int growth_lock(pthread_mutex_t *mutex);
int growth_trylock(pthread_mutex_t *mutex);
int growth_unlock(pthread_mutex_t *mutex);

int growth_lock(pthread_mutex_t *mutex) {
    if (is_asking) atomic_store(&wanted, (long long)(1e9 * read_clock(clock_of_watched)));
    const int failed = pthread_mutex_lock(mutex);
    if (!failed) note_lock();
    return failed;
}

int growth_trylock(pthread_mutex_t *mutex) {
    const int failed = pthread_mutex_trylock(mutex);
    if (!failed) note_lock();
    return failed;
}

int growth_unlock(pthread_mutex_t *mutex) {
    const double since = 1e-9 * (double)atomic_load(&wanted);
    if (noted.watches && noted.is_timed && noted.locked > 0 && since > 0) {
        const double held = processor() - (since > noted.locked ? since : noted.locked);
        if (held > noted.longest) noted.longest = held;
    }
    return pthread_mutex_unlock(mutex);
}

/* Times a call. */
#define TIME(call)                         \
    do {                                   \
        noted.is_timed = 1;                \
        const double start_ = now();       \
        const kvc_status result_ = (call); \
        noted.seconds += now() - start_;   \
        noted.is_timed = 0;                \
        if (result_) return result_;       \
    } while (0)

#define TIME_IF(timed, call) \
    do {                     \
        if (timed)           \
            TIME(call);      \
        else                 \
            TRY(call);       \
    } while (0)

/* ---- a cache with kept blocks ------------------------------------------------------------------------------------ */

/* The limit of a cache that is full of kept blocks, or the fate of its blocks. */
typedef enum kind {
    UNLIMITED,
    BY_CAPACITY,
    BY_BYTES,
    EXPIRED,
    PINNED,
    RUNNING,
    ACQUIRED,
    RUNNING_BY_BYTES,
    NUM_KINDS
} kind;

typedef struct scene {
    kvc_cache *cache;
    kvc_prefix *prefix;
    int64_t next; /* the next token that no prompt has had */
    int32_t num_blocks;
    int32_t rep; /* how often the call was made before */
} scene;

/* Fills in tokens that no prompt has had. */
static kvc_tokens new_tokens(scene *s, int64_t *ids, int32_t num) {
    for (int32_t i = 0; i < num; i++) ids[i] = s->next++;
    return (kvc_tokens){.struct_size = sizeof(kvc_tokens), .ids = ids, .num_tokens = num};
}

/* Returns the tokens of a prompt that is kept. */
static kvc_tokens known_tokens(const scene *s, int64_t *ids, int32_t prompt) {
    for (int32_t i = 0; i < BLOCK; i++) ids[i] = (int64_t)(prompt % s->num_blocks) * BLOCK + i;
    return (kvc_tokens){.struct_size = sizeof(kvc_tokens), .ids = ids, .num_tokens = BLOCK};
}

static kvc_status put_all(kvc_batch *batch) {
    static const float row[DIM];
    const kvc_put_args put = {.struct_size = sizeof put, .k = row, .v = row}; /* the same row for all */
    TRY(kvc_put(batch, 0, &put));
    return kvc_put(batch, 1, &put);
}

static kvc_status begin(const scene *s, int64_t id, int32_t num, kvc_batch **batch) {
    int64_t ids[OWN];
    for (int32_t i = 0; i < num; i++) ids[i] = id;
    return kvc_begin(s->cache, num, NULL, ids, NULL, batch);
}

static kvc_status feed(const scene *s, int64_t id, int32_t num) {
    kvc_batch *batch;
    TRY(begin(s, id, num, &batch));
    TRY(put_all(batch));
    return kvc_commit(batch);
}

static kvc_status take_all_new(const scene *s) {
    kvc_new_block block;
    int64_t num;
    do TRY(kvc_take_new_blocks(s->cache, &block, sizeof block, 1, &num));
    while (num);
    return KVC_OK;
}

/* Feeds a prompt of one block and releases it. */
static kvc_status keep(scene *s) {
    int64_t ids[BLOCK], id;
    int32_t matched;
    const kvc_tokens tokens = new_tokens(s, ids, BLOCK);
    TRY(kvc_prefix_acquire(s->prefix, &tokens, -1, &id, &matched));
    TRY(feed(s, id, BLOCK));
    return kvc_prefix_release(s->prefix, id, &tokens);
}

/* Acquires a sequence that holds nothing. */
static kvc_status acquire_one(scene *s) {
    int64_t ids[1], id;
    int32_t matched;
    const kvc_tokens tokens = new_tokens(s, ids, 1);
    return kvc_prefix_acquire(s->prefix, &tokens, -1, &id, &matched);
}

/* Feeds a prompt of LONG tokens, which goes on running. */
static kvc_status run_long(scene *s) {
    int64_t ids[LONG], id;
    int32_t matched;
    const kvc_tokens tokens = new_tokens(s, ids, LONG);
    TRY(kvc_prefix_acquire(s->prefix, &tokens, -1, &id, &matched));
    for (int32_t i = 0; i < LONG; i += OWN) TRY(feed(s, id, OWN));
    return KVC_OK;
}

static kvc_status scene_new(scene *s, kind kind, int32_t num_blocks, int64_t max_bytes) {
    const kvc_layer layers[] = {{.num_kv_heads = 1,
                                 .k_dim = DIM,
                                 .v_dim = DIM,
                                 .k_type = KVC_F16,
                                 .v_type = KVC_F16,
                                 .rope = {.kind = KVC_ROPE_NONE}},
                                {.num_kv_heads = 1,
                                 .k_dim = DIM,
                                 .v_dim = DIM,
                                 .k_type = KVC_F16,
                                 .v_type = KVC_F16,
                                 .policy = {.kind = KVC_SLIDING, .window = WINDOW, .resume_window = 2 * WINDOW},
                                 .rope = {.kind = KVC_ROPE_NONE}}};
    const kvc_config config = {.struct_size = sizeof config,
                               .layers = layers,
                               .layer_size = sizeof *layers,
                               .num_layers = 2,
                               .block_size = BLOCK,
                               .max_bytes = max_bytes,
                               .num_threads = 1,
                               .capacity =
                                   kind == BY_CAPACITY || kind == RUNNING ? (int64_t)num_blocks * BLOCK + 2 * OWN : 0};
    const kvc_prefix_config prefix = {.struct_size = sizeof prefix,
                                      .fingerprint = "none",
                                      .max_events = 16,
                                      .collects_new = 1,
                                      .state_bytes = 8,
                                      .ttl_ms = kind == EXPIRED ? 600000 : 0};
    *s = (scene){.num_blocks = num_blocks};
    TRY(kvc_cache_new(&config, &s->cache));
    TRY(kvc_prefix_new(s->cache, &prefix, &s->prefix));
    return KVC_OK;
}

EXPORT kvc_status growth_free(scene *s) {
    kvc_prefix_free(s->prefix);
    const kvc_status status = kvc_cache_free(s->cache);
    free(s);
    return status;
}

/* Sets *made to a cache with two sequences and num_blocks kept blocks of a kind.  Each block is a prompt of its own;
 * but in RUNNING and RUNNING_BY_BYTES, most blocks belong to running sequences.  In ACQUIRED, no block is kept, and
 * there are as many sequences that were acquired and hold nothing. */
EXPORT kvc_status growth_new(kind kind, int32_t num_blocks, int64_t max_bytes, scene **made) {
    scene *s = *made = allocate(1, sizeof *s);
    int64_t ids[BLOCK], evicted;
    int32_t pinned;
    TRY(scene_new(s, kind, num_blocks, max_bytes));
    int32_t num = 0;
    const int32_t runs = kind == RUNNING || kind == RUNNING_BY_BYTES;
    for (; runs && num + LONG / BLOCK + 2 * BLOCK <= num_blocks; num += LONG / BLOCK) TRY(run_long(s));
    for (; kind == ACQUIRED && num < num_blocks; num++) TRY(acquire_one(s));
    for (; num < num_blocks; num++) TRY(keep(s));
    for (int32_t i = num_blocks - BLOCK; kind == PINNED && i > 0; i--) { /* all are older than what can be evicted */
        const kvc_tokens tokens = known_tokens(s, ids, i - 1);
        TRY(kvc_prefix_pin(s->prefix, &tokens, &pinned));
    }
    if (kind == PINNED) TRY(kvc_prefix_evict(s->prefix, 1, &evicted));
    TRY(take_all_new(s));
    TRY(feed(s, OWN_ID, OWN));
    if (kind == EXPIRED) atomic_fetch_add(&clock_ahead, 1000000);
    return KVC_OK;
}

EXPORT int64_t growth_bytes(const scene *s) { return kvc_nbytes(s->cache); }
/* ---- calls ------------------------------------------------------------------------------------------------------- */

/* Each makes ready, times one call, and puts back what that has changed.  They are listed at the end. */
typedef kvc_status call_fn(scene *s);

#define STATUS_OF(name, call)          \
    static kvc_status name(scene *s) { \
        TIME(call);                    \
        return KVC_OK;                 \
    }
#define VALUE_OF(name, call) STATUS_OF(name, ((void)(call), KVC_OK))

static int32_t first, last;
static int64_t count;
static int64_t listed[OWN];
static int32_t positions[OWN];
static kvc_stats stats;
static kvc_prefix_stats prefix_stats;
static _Float16 rows[2][OWN][DIM];

static kvc_rows_out rows_out(void) {
    return (kvc_rows_out){.struct_size = sizeof(kvc_rows_out),
                          .type = KVC_F16,
                          .k = rows[0],
                          .v = rows[1],
                          .k_row_stride = sizeof rows[0][0],
                          .v_row_stride = sizeof rows[0][0]};
}

VALUE_OF(call_seq_len, kvc_seq_len(s->cache, OWN_ID, 0))
STATUS_OF(call_position_range, kvc_position_range(s->cache, OWN_ID, 0, &first, &last))
VALUE_OF(call_next_position, kvc_next_position(s->cache, OWN_ID))
VALUE_OF(call_can_resume, kvc_can_resume(s->cache, OWN_ID, OWN))
VALUE_OF(call_exact_to, kvc_exact_to(s->cache, OWN_ID))
VALUE_OF(call_sequences, kvc_sequences(s->cache, listed, OWN))
VALUE_OF(call_positions, kvc_positions(s->cache, OWN_ID, 0, positions, OWN))
VALUE_OF(call_new_sequence, kvc_new_sequence(s->cache))
VALUE_OF(call_nbytes, kvc_nbytes(s->cache))
VALUE_OF(call_utilization, kvc_utilization(s->cache))
VALUE_OF(call_get_stats, (kvc_get_stats(s->cache, &stats, sizeof stats), 0))
VALUE_OF(call_prefix_get_stats, (kvc_prefix_get_stats(s->prefix, &prefix_stats, sizeof prefix_stats), 0))
STATUS_OF(call_room, kvc_room(s->cache, OWN_ID, &count))
STATUS_OF(call_room_of_new, kvc_room(s->cache, OTHER_ID, &count))
STATUS_OF(call_reserve, kvc_reserve(s->cache, OWN_ID, 1))
STATUS_OF(call_compact, kvc_compact(s->cache))
STATUS_OF(call_validate, kvc_validate(s->cache))

/* Times a call that asks for one token more than fits. */
static kvc_status call_refused(scene *s) {
    kvc_status status = KVC_OK;
    TRY(kvc_room(s->cache, OWN_ID, &count));
    TIME((status = kvc_reserve(s->cache, OWN_ID, count + 1), KVC_OK));
    return status == KVC_ERR_FULL ? KVC_OK : status == KVC_OK ? KVC_ERR_CORRUPT : status;
}

static kvc_status call_blocks(scene *s) {
    int64_t num_blocks, num_runs;
    TIME(kvc_blocks(s->cache, 0, NULL, sizeof(kvc_block_info), 0, &num_blocks, NULL, sizeof(kvc_run_info), 0,
                    &num_runs));
    return KVC_OK;
}

/* Times the listing of spans, or the end of their hold. */
static kvc_status hold(scene *s, int frees) {
    kvc_span spans[OWN];
    kvc_hold *hold;
    TIME_IF(!frees, kvc_spans(s->cache, OWN_ID, 0, spans, sizeof *spans, OWN, &count, &hold));
    TIME_IF(frees, (kvc_hold_free(hold), KVC_OK));
    return KVC_OK;
}

static kvc_status call_spans(scene *s) { return hold(s, 0); }
static kvc_status call_hold_free(scene *s) { return hold(s, 1); }

static kvc_status call_gather(scene *s) {
    const kvc_rows_out out = rows_out();
    TIME(kvc_gather(s->cache, OWN_ID, 0, 0, OWN, &out));
    return KVC_OK;
}

static kvc_status call_extract(scene *s) {
    const kvc_rows_out out = rows_out();
    TIME(kvc_extract(s->cache, OWN_ID, 0, 0, OWN, &out));
    return KVC_OK;
}

/* ---- edits ------------------------------------------------------------------------------------------------------- */

/* Times an edit of a sequence that shares all rows of another. */
static kvc_status edit(scene *s, kvc_status (*edits)(scene *s)) {
    TRY(kvc_fork(s->cache, OWN_ID, OTHER_ID));
    noted.is_timed = 1;
    const double start = now();
    const kvc_status status = edits(s);
    noted.seconds += now() - start;
    noted.is_timed = 0;
    TRY(kvc_clear_sequence(s->cache, OTHER_ID));
    return status;
}

#define EDIT_BY(name, call)                                  \
    static kvc_status edit_##name(scene *s) { return call; } \
    static kvc_status name(scene *s) { return edit(s, edit_##name); }

static kvc_status inject(scene *s) {
    const kvc_rows_in in = {.struct_size = sizeof in,
                            .k = rows[0],
                            .v = rows[1],
                            .k_row_stride = sizeof rows[0][0],
                            .v_row_stride = sizeof rows[0][0],
                            .k_type = KVC_F16,
                            .v_type = KVC_F16};
    return kvc_inject(s->cache, OTHER_ID, 0, 0, BLOCK, &in);
}

EDIT_BY(call_remove, kvc_remove(s->cache, OTHER_ID, 4, 8, 0))
EDIT_BY(call_keep_positions, kvc_keep_positions(s->cache, OTHER_ID, (const int32_t[]){0, 2, 4, OWN - 1}, 4))
EDIT_BY(call_truncate, kvc_truncate(s->cache, OTHER_ID, OWN - 1))
EDIT_BY(call_shift, kvc_shift(s->cache, OTHER_ID, 4, KVC_END, 8))
EDIT_BY(call_divide, kvc_divide(s->cache, OTHER_ID, 4, KVC_END, 2))
EDIT_BY(call_mark_inexact, kvc_mark_inexact(s->cache, OTHER_ID, OWN))
EDIT_BY(call_inject, inject(s))

/* Times a call that gives another sequence the rows of the one that is read. */
#define SHARE_BY(name, call)                           \
    static kvc_status name(scene *s) {                 \
        TIME(call);                                    \
        return kvc_clear_sequence(s->cache, OTHER_ID); \
    }

SHARE_BY(call_fork, kvc_fork(s->cache, OWN_ID, OTHER_ID))
SHARE_BY(call_copy_prefix, kvc_copy_prefix(s->cache, OWN_ID, OTHER_ID, OWN))
SHARE_BY(call_share, kvc_share(s->cache, OWN_ID, OTHER_ID, 0, OWN))

static kvc_status call_clear_sequence(scene *s) {
    TRY(kvc_fork(s->cache, OWN_ID, OTHER_ID));
    TIME(kvc_clear_sequence(s->cache, OTHER_ID));
    return KVC_OK;
}

/* ---- a pass ------------------------------------------------------------------------------------------------------ */

/* The steps of a request.  Only one is timed. */
typedef enum step { ACQUIRE, BEGIN, COMMIT, COMMIT_KEPT, ABORT, RELEASE, CHECKPOINT, STATE } step;

/* Reads a prompt of num tokens and releases it.  A state is kept of a prompt of one block. */
static kvc_status request(scene *s, step step, int32_t num) {
    static const int32_t kept[BLOCK] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    int64_t ids[OWN], id, state = 0;
    int32_t matched;
    kvc_batch *batch;
    const kvc_tokens tokens = new_tokens(s, ids, num);
    TIME_IF(step == ACQUIRE, kvc_prefix_acquire(s->prefix, &tokens, -1, &id, &matched));
    TIME_IF(step == STATE, kvc_prefix_state(s->prefix, id, &state, sizeof state, &count));
    TIME_IF(step == BEGIN, begin(s, id, num, &batch));
    if (step != ABORT) TRY(put_all(batch));
    if (step == ABORT)
        TIME((kvc_abort(batch), KVC_OK));
    else if (step == COMMIT_KEPT)
        TIME(kvc_commit_kept(batch, kept, BLOCK));
    else
        TIME_IF(step == COMMIT, kvc_commit(batch));
    if (num == BLOCK) TIME_IF(step == CHECKPOINT, kvc_prefix_checkpoint(s->prefix, id, &tokens, &state, sizeof state));
    TIME_IF(step == RELEASE, kvc_prefix_release(s->prefix, id, &tokens));
    return take_all_new(s);
}

static kvc_status call_acquire_new(scene *s) { return request(s, ACQUIRE, BLOCK); }
static kvc_status call_begin(scene *s) { return request(s, BEGIN, BLOCK); }
static kvc_status call_begin_part(scene *s) { return request(s, BEGIN, BLOCK + 1 + s->rep % (BLOCK / 2)); }
static kvc_status call_commit(scene *s) { return request(s, COMMIT, BLOCK); }
static kvc_status call_commit_long(scene *s) { return request(s, COMMIT, OWN); }
static kvc_status call_commit_kept(scene *s) { return request(s, COMMIT_KEPT, BLOCK); }
static kvc_status call_abort(scene *s) { return request(s, ABORT, BLOCK); }
static kvc_status call_release(scene *s) { return request(s, RELEASE, BLOCK); }
static kvc_status call_checkpoint(scene *s) { return request(s, CHECKPOINT, BLOCK); }
static kvc_status call_state(scene *s) { return request(s, STATE, BLOCK); }

/* Times a call on an open batch, which has one token of the sequence that is read, and aborts it. */
static kvc_status in_batch(scene *s, kvc_status (*calls)(kvc_batch *batch)) {
    kvc_batch *batch;
    TRY(begin(s, OWN_ID, 1, &batch));
    const kvc_status status = calls(batch);
    kvc_abort(batch);
    return status;
}

static const kvc_plan_args plan_args = {.struct_size = sizeof plan_args, .num_heads = 1};

static kvc_status attend(kvc_batch *batch) {
    static const float q[DIM];
    static float out[DIM];
    const kvc_attend_args args = {.struct_size = sizeof args, .q = q, .out = out};
    TRY(put_all(batch));
    TIME(kvc_attend(batch, &plan_args, &args));
    return KVC_OK;
}

static kvc_status make_plan(kvc_batch *batch) {
    kvc_plan *plan;
    TIME(kvc_plan_new(batch, &plan_args, &plan));
    kvc_plan_free(plan);
    return KVC_OK;
}

static kvc_status list_batch_spans(kvc_batch *batch) {
    kvc_span spans[OWN];
    kvc_hold *hold;
    TRY(put_all(batch));
    TIME(kvc_batch_spans(batch, OWN_ID, 0, spans, sizeof *spans, OWN, &count, &hold));
    kvc_hold_free(hold);
    return KVC_OK;
}

static kvc_status find_slots(kvc_batch *batch) {
    kvc_span span;
    kvc_hold *hold;
    TIME(kvc_slots(batch, 0, 0, &span, sizeof span, &hold));
    kvc_hold_free(hold);
    return KVC_OK;
}

static kvc_status count_dense(kvc_batch *batch) {
    TRY(put_all(batch));
    TIME(kvc_dense_rows(batch, 0, &count));
    return KVC_OK;
}

static kvc_status copy_dense(kvc_batch *batch) {
    static _Float16 more_rows[2][OWN + 1][DIM];
    kvc_rows_out out = rows_out();
    out.k = more_rows[0];
    out.v = more_rows[1];
    kvc_dense_args args = {.struct_size = sizeof args, .rows = &out};
    TRY(put_all(batch));
    TRY(kvc_dense_rows(batch, 0, &args.num_rows));
    TIME(kvc_dense(batch, 0, &args));
    return KVC_OK;
}

static kvc_status call_attend(scene *s) { return in_batch(s, attend); }
static kvc_status call_plan_new(scene *s) { return in_batch(s, make_plan); }
static kvc_status call_batch_spans(scene *s) { return in_batch(s, list_batch_spans); }
static kvc_status call_slots(scene *s) { return in_batch(s, find_slots); }
static kvc_status call_dense_rows(scene *s) { return in_batch(s, count_dense); }
static kvc_status call_dense(scene *s) { return in_batch(s, copy_dense); }

/* ---- prefixes ---------------------------------------------------------------------------------------------------- */

static kvc_status call_acquire(scene *s) {
    int64_t ids[BLOCK], id;
    int32_t matched;
    const kvc_tokens tokens = known_tokens(s, ids, s->rep);
    TIME(kvc_prefix_acquire(s->prefix, &tokens, -1, &id, &matched));
    return kvc_prefix_release(s->prefix, id, &tokens);
}

static kvc_status call_lookup(scene *s) {
    int64_t ids[BLOCK];
    int32_t matched;
    const kvc_tokens tokens = known_tokens(s, ids, s->num_blocks / 2 + s->rep);
    TIME(kvc_prefix_lookup(s->prefix, &tokens, &matched, NULL));
    return KVC_OK;
}

static kvc_status call_lookup_new(scene *s) {
    int64_t ids[BLOCK];
    int32_t matched;
    kvc_tokens tokens = known_tokens(s, ids, s->num_blocks / 2 + s->rep);
    ids[BLOCK - 1]++; /* it begins as another does */
    TIME(kvc_prefix_lookup(s->prefix, &tokens, &matched, NULL));
    return KVC_OK;
}

static kvc_status call_pin(scene *s) {
    int64_t ids[BLOCK];
    int32_t kept;
    const kvc_tokens tokens = known_tokens(s, ids, s->rep);
    TIME(kvc_prefix_pin(s->prefix, &tokens, &kept));
    return kvc_prefix_unpin(s->prefix, &tokens);
}

static kvc_status call_unpin(scene *s) {
    int64_t ids[BLOCK];
    int32_t kept;
    const kvc_tokens tokens = known_tokens(s, ids, s->rep);
    TRY(kvc_prefix_pin(s->prefix, &tokens, &kept));
    TIME(kvc_prefix_unpin(s->prefix, &tokens));
    return KVC_OK;
}

static kvc_status call_evict(scene *s) {
    TIME(kvc_prefix_evict(s->prefix, BLOCK, &count));
    return keep(s);
}

static kvc_status call_forget(scene *s) {
    int64_t ids[BLOCK], num;
    const kvc_tokens tokens = known_tokens(s, ids, s->num_blocks / 2 + s->rep);
    TIME(kvc_prefix_forget(s->prefix, &tokens, NULL, 0, &num, &count));
    return keep(s);
}

static kvc_status call_take_events(scene *s) {
    kvc_prefix_event events[BLOCK];
    int64_t lost;
    TRY(keep(s));
    TIME(kvc_prefix_take_events(s->prefix, events, sizeof *events, BLOCK, &count, &lost));
    return KVC_OK;
}

static kvc_status read_nothing(void *user, const uint8_t *name, void *value, int64_t max_bytes, int64_t *size) {
    (void)user, (void)name, (void)value, (void)max_bytes;
    return *size = 0, KVC_OK;
}

static kvc_status write_nowhere(void *user, const uint8_t *name, const void *value, int64_t size) {
    return (void)user, (void)name, (void)value, (void)size, KVC_OK;
}

static const kvc_store store = {.struct_size = sizeof store, .read = read_nothing, .write = write_nowhere};

/* Times the taking of a new block, or the writing of it. */
static kvc_status carry(scene *s, int step) {
    int64_t ids[BLOCK], id, size, dropped;
    int32_t matched;
    kvc_new_block block;
    const kvc_tokens tokens = new_tokens(s, ids, BLOCK);
    TRY(take_all_new(s));
    TRY(kvc_prefix_acquire(s->prefix, &tokens, -1, &id, &matched));
    TRY(feed(s, id, BLOCK));
    TRY(kvc_prefix_release(s->prefix, id, &tokens));
    TIME_IF(step == 0, kvc_take_new_blocks(s->cache, &block, sizeof block, 1, &count));
    TIME_IF(step == 1, kvc_store_block(s->cache, block.id, &store, &size));
    TRY(kvc_prefix_forget(s->prefix, &tokens, NULL, 0, &count, &dropped));
    return KVC_OK;
}

static kvc_status call_take_new_blocks(scene *s) { return carry(s, 0); }
static kvc_status call_store_block(scene *s) { return carry(s, 1); }

static kvc_status call_fetch(scene *s) {
    int64_t ids[2 * BLOCK];
    const kvc_tokens tokens = new_tokens(s, ids, 2 * BLOCK);
    TIME(kvc_prefix_fetch(s->prefix, &tokens, -1, &store, &first));
    return KVC_OK;
}

static kvc_status call_store_new_blocks(scene *s) {
    TRY(keep(s));
    TIME(kvc_store_new_blocks(s->cache, &store, &count));
    return KVC_OK;
}

static kvc_status call_prefix_new(scene *s) {
    const kvc_prefix_config config = {.struct_size = sizeof config, .fingerprint = "other"};
    kvc_prefix *prefix;
    TIME(kvc_prefix_new(s->cache, &config, &prefix));
    kvc_prefix_free(prefix);
    return KVC_OK;
}

static kvc_status call_prefix_free(scene *s) {
    const kvc_prefix_config config = {.struct_size = sizeof config, .fingerprint = "other"};
    kvc_prefix *prefix;
    TRY(kvc_prefix_new(s->cache, &config, &prefix));
    TIME((kvc_prefix_free(prefix), KVC_OK));
    return KVC_OK;
}

/* ---- saved states ------------------------------------------------------------------------------------------------ */

static struct {
    char bytes[1 << 16];
    size_t size;
} saved;

static int32_t append(void *user, const void *data, size_t size) {
    (void)user;
    if (size > sizeof saved.bytes - saved.size) return 1;
    memcpy(saved.bytes + saved.size, data, size);
    saved.size += size;
    return 0;
}

static kvc_status save(scene *s, int restores) {
    const int64_t id = OWN_ID, to = OTHER_ID;
    const kvc_save_args args = {.struct_size = sizeof args, .write = append, .seq_ids = &id, .num_sequences = 1};
    saved.size = 0;
    TIME_IF(!restores, kvc_save(s->cache, &args));
    const kvc_load_args load = {.struct_size = sizeof load,
                                .data = saved.bytes,
                                .size = (int64_t)saved.size,
                                .seq_ids = &id,
                                .to_ids = &to,
                                .num_sequences = 1};
    if (!restores) return KVC_OK;
    TIME(kvc_restore(s->cache, &load));
    return kvc_clear_sequence(s->cache, OTHER_ID);
}

static kvc_status call_save(scene *s) { return save(s, 0); }
static kvc_status call_restore(scene *s) { return save(s, 1); }

static kvc_status call_clone(scene *s) {
    kvc_cache *clone;
    TIME(kvc_cache_clone(s->cache, &clone));
    return kvc_cache_free(clone);
}

/* ---- all at once ------------------------------------------------------------------------------------------------- */

STATUS_OF(call_clear, kvc_clear(s->cache))
STATUS_OF(call_keep, kvc_keep(s->cache, OWN_ID))
STATUS_OF(call_prefix_clear, kvc_prefix_clear(s->prefix))
STATUS_OF(call_prefix_free_all, (kvc_prefix_free(s->prefix), s->prefix = NULL, KVC_OK))

/* ---- measuring --------------------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    call_fn *run;
    int is_of_all; /* it works on all that is stored, whatever there is: only its holds count */
} CALLS[] = {
    {"seq_len", call_seq_len, 0},
    {"position_range", call_position_range, 0},
    {"next_position", call_next_position, 0},
    {"can_resume", call_can_resume, 0},
    {"exact_to", call_exact_to, 0},
    {"sequences", call_sequences, 0},
    {"positions", call_positions, 0},
    {"new_sequence", call_new_sequence, 0},
    {"nbytes", call_nbytes, 0},
    {"utilization", call_utilization, 0},
    {"get_stats", call_get_stats, 0},
    {"prefix_get_stats", call_prefix_get_stats, 0},
    {"room", call_room, 0},
    {"room_of_new", call_room_of_new, 0},
    {"reserve", call_reserve, 0},
    {"refused", call_refused, 0},
    {"compact", call_compact, 1},
    {"validate", call_validate, 1},
    {"blocks", call_blocks, 1},
    {"spans", call_spans, 0},
    {"hold_free", call_hold_free, 0},
    {"gather", call_gather, 0},
    {"extract", call_extract, 0},
    {"remove", call_remove, 0},
    {"keep_positions", call_keep_positions, 0},
    {"truncate", call_truncate, 0},
    {"shift", call_shift, 0},
    {"divide", call_divide, 0},
    {"mark_inexact", call_mark_inexact, 0},
    {"inject", call_inject, 0},
    {"fork", call_fork, 0},
    {"copy_prefix", call_copy_prefix, 0},
    {"share", call_share, 0},
    {"clear_sequence", call_clear_sequence, 0},
    {"acquire_new", call_acquire_new, 0},
    {"begin", call_begin, 0},
    {"begin_part", call_begin_part, 0},
    {"commit", call_commit, 0},
    {"commit_long", call_commit_long, 0},
    {"commit_kept", call_commit_kept, 0},
    {"abort", call_abort, 0},
    {"attend", call_attend, 0},
    {"plan_new", call_plan_new, 0},
    {"batch_spans", call_batch_spans, 0},
    {"slots", call_slots, 0},
    {"dense_rows", call_dense_rows, 0},
    {"dense", call_dense, 0},
    {"release", call_release, 0},
    {"checkpoint", call_checkpoint, 0},
    {"state", call_state, 0},
    {"acquire", call_acquire, 0},
    {"lookup", call_lookup, 0},
    {"lookup_new", call_lookup_new, 0},
    {"pin", call_pin, 0},
    {"unpin", call_unpin, 0},
    {"evict", call_evict, 0},
    {"forget", call_forget, 0},
    {"take_events", call_take_events, 0},
    {"take_new_blocks", call_take_new_blocks, 0},
    {"store_block", call_store_block, 0},
    {"fetch", call_fetch, 0},
    {"store_new_blocks", call_store_new_blocks, 0},
    {"prefix_new", call_prefix_new, 0},
    {"prefix_free", call_prefix_free, 0},
    {"save", call_save, 0},
    {"restore", call_restore, 0},
    {"clone", call_clone, 1},
    {"keep", call_keep, 1},
    {"clear", call_clear, 1},
    {"prefix_clear", call_prefix_clear, 1},
    {"prefix_free_all", call_prefix_free_all, 1},
};

EXPORT int32_t growth_num_calls(void) { return sizeof CALLS / sizeof *CALLS; }
EXPORT const char *growth_name(int32_t call) { return CALLS[call].name; }
EXPORT int32_t growth_is_of_all(int32_t call) { return CALLS[call].is_of_all; }

static kvc_status time_one(scene *s, int32_t call, int32_t rep, double *seconds) {
    noted.seconds = 0;
    s->rep = rep;
    TRY(CALLS[call].run(s));
    *seconds = noted.seconds;
    return KVC_OK;
}

/* Times a call beside few and beside many blocks, in turn: [reps]. */
EXPORT kvc_status growth_time(scene *few, scene *many, int32_t call, int32_t reps, double *beside_few,
                              double *beside_many) {
    for (int32_t i = 0; i < reps; i++) {
        TRY(time_one(few, call, i, &beside_few[i]));
        TRY(time_one(many, call, i, &beside_many[i]));
    }
    return KVC_OK;
}

typedef struct asker {
    const scene *scene;
    pthread_t thread;
    atomic_int is_over;
} asker;

/* Asks for the mutex again and again: calls that let others have it now and then do so only if somebody wants it. */
static void *ask(void *context) {
    asker *a = context;
    is_asking = 1;
    while (!atomic_load(&a->is_over)) kvc_seq_len(a->scene->cache, 0, 0);
    return NULL;
}

/* Sets *seconds to the time of a call, and *longest to the longest time for which one of `reps` calls lets another
 * thread wait for the mutex. */
EXPORT kvc_status growth_hold(scene *s, int32_t call, int32_t reps, double *seconds, double *longest) {
    asker a = {.scene = s};
    kvc_status status = KVC_OK;
    noted.longest = noted.locked = 0;
    if (pthread_getcpuclockid(pthread_self(), &clock_of_watched)) abort();
    if (pthread_create(&a.thread, NULL, ask, &a)) abort();
    noted.watches = 1;
    for (int32_t i = 0; i < reps && status == KVC_OK; i++) status = time_one(s, call, i, seconds);
    noted.watches = 0;
    *longest = noted.longest;
    atomic_store(&a.is_over, 1);
    pthread_join(a.thread, NULL);
    return status;
}
