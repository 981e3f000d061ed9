/* Random calls of several threads in one cache under limits.  Owners take random steps with sequences of their own, and
 * know what these hold; guests clone, save, restore, retain, attach, hold and read whatever there is.  Every row tells
 * whether all of it was written together. */
#define _DEFAULT_SOURCE
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "support/crew.h"
#include "support/keeping.h"
#include "support/saved.h"
#include "world/attention.h"

enum {
    NUM_LAYERS = 3, /* layer 0 sees everything, layer 1 has a window */
    KEYS = 2,       /* layer 2 holds keys alone, by which tokens choose rows of layer 0 */
    WIDTH = 5,      /* rows that they choose */
    HEADS = 2,
    DIM = 4,
    WINDOW = 6,
    SINKS = 2,
    MOST = 64, /* positions of a sequence */
    OWNERS = 2,
    OWN_IDS = 3,
    GUESTS = 4,
    GUEST_IDS = 3,
    FIRST_GUEST = 100,
    FIRST_KEPT = 1000, /* ids of retained sequences: STRETCHES of each thread */
    STRETCHES = 3,
    LENGTH = 6, /* positions of a stretch */
    CAPACITY = 110,
    LEFT_OVER = 4096 /* bytes of tables and lists by which an emptied cache may be larger than a new one */
};

/* ---- random numbers of a thread -----------------------------------------------------------------------------------
 */

typedef struct actor {
    kvc_cache *cache;
    uint64_t seed, state;
    int number;
    atomic_int *stop;
} actor;

static int pick(actor *a, int n) {
    a->state = a->state * 6364136223846793005u + 1442695040888963407u;
    return (int)((a->state >> 33) % (uint64_t)n);
}

#define EXPECT(a, condition) CHECKF(condition, "seed %llu: %s", (unsigned long long)(a)->seed, kvc_last_error())

static int is_one_of(kvc_status status, const kvc_status *those, int n) {
    for (int i = 0; i < n; i++)
        if (status == those[i]) return 1;
    return status == KVC_OK;
}

/* Checks that a call succeeds, or fails with one of these statuses. */
#define EXPECT_ONE_OF(a, status, ...)                              \
    EXPECT(a, is_one_of(status, (const kvc_status[]){__VA_ARGS__}, \
                        sizeof((const kvc_status[]){__VA_ARGS__}) / sizeof(kvc_status)))

/* ---- rows ---------------------------------------------------------------------------------------------------------
 */

/* Keys, and values: [DIM] of each row, whose first element is the tag of the row that the others follow from. */
typedef float row_array[HEADS][MOST][DIM];

typedef struct rows {
    row_array k, v;
    int32_t positions[MOST];
} rows;

static float tag_element(int tag, int layer, int is_value, int h, int d) {
    return d ? (float)((tag * 31 + layer * 17 + is_value * 11 + h * 5 + d) % 4093) : (float)tag;
}

static void set_row(rows *r, int i, int tag, int layer) {
    for (int h = 0; h < HEADS; h++)
        for (int d = 0; d < DIM; d++) {
            r->k[h][i][d] = tag_element(tag, layer, 0, h, d);
            r->v[h][i][d] = tag_element(tag, layer, 1, h, d);
        }
}

/* Returns the tag of a row in memory, all of which must be of that tag; v is NULL in a layer of keys alone. */
static int tag_of(actor *a, const float *k, const float *v, int64_t head_stride, int layer) {
    const int tag = (int)k[0];
    int differ = tag < 1;
    for (int h = 0; h < HEADS; h++)
        for (int d = 0; d < DIM; d++)
            differ += k[h * head_stride + d] != tag_element(tag, layer, 0, h, d) ||
                      (v && v[h * head_stride + d] != tag_element(tag, layer, 1, h, d));
    CHECKF(!differ, "seed %llu: %d elements of tag %d differ, layer %d", (unsigned long long)a->seed, differ, tag,
           layer);
    return tag;
}

static int tag_at(actor *a, const rows *r, int i, int layer) {
    return tag_of(a, r->k[0][i], layer == KEYS ? NULL : r->v[0][i], MOST * DIM, layer);
}

/* Copies out what a sequence holds in a layer. */
static void read_rows(actor *a, kvc_cache *cache, int64_t id, int layer, rows *r) {
    const kvc_rows_out out = {.struct_size = sizeof out,
                              .k = r->k,
                              .v = layer == KEYS ? NULL : r->v,
                              .k_head_stride = sizeof *r->k,
                              .k_row_stride = sizeof **r->k,
                              .v_head_stride = sizeof *r->v,
                              .v_row_stride = sizeof **r->v,
                              .positions = r->positions};
    EXPECT(a, kvc_extract(cache, id, layer, 0, MOST, &out) == KVC_OK);
}

/* Reads a sequence that others may edit: each row is as it was written. */
static void check_intact(actor *a, kvc_cache *cache, int64_t id) {
    rows r;
    for (int l = 0; l < NUM_LAYERS; l++) {
        read_rows(a, cache, id, l, &r);
        for (int i = 0; i < MOST; i++)
            if (r.positions[i] >= 0) tag_at(a, &r, i, l);
    }
}

/* Retains stretches of a sequence that is in no batch, whose rows might not be there yet. */
static void retain_stretches(actor *a, int64_t from) {
    for (int i = 0; i < STRETCHES; i++) {
        const int64_t id = FIRST_KEPT + STRETCHES * a->number + i;
        EXPECT(a, kvc_clear_sequence(a->cache, id) == KVC_OK);
        EXPECT(a, retain(a->cache, from, id, i * LENGTH, (i + 1) * LENGTH) == KVC_OK);
    }
}

/* ---- owners -------------------------------------------------------------------------------------------------------
 */

/* The rows of a sequence: tags by position, 0 where there is no row; of a window, all rows that it might still hold. */
typedef struct own_sequence {
    int tags[NUM_LAYERS][MOST];
} own_sequence;

typedef struct owner {
    actor actor;
    own_sequence own[OWN_IDS];
    int last_tag, num_steps, num_full;
} owner;

static int64_t id_of(const owner *o, int s) { return o->actor.number * OWN_IDS + s; }

static int end_of(const own_sequence *s) {
    int end = MOST;
    while (end && !s->tags[0][end - 1]) end--;
    return end;
}

static void check_own(owner *o, int s) {
    rows r;
    const own_sequence *own = &o->own[s];
    for (int l = 0; l < NUM_LAYERS; l++) {
        read_rows(&o->actor, o->actor.cache, id_of(o, s), l, &r);
        for (int i = 0; i < MOST; i++) {
            const int tag = r.positions[i] < 0 ? 0 : tag_at(&o->actor, &r, i, l);
            CHECKF(tag == own->tags[l][i] || (l == 1 && !tag),
                   "seed %llu: sequence %d, layer %d: tag %d, not %d, at %d", (unsigned long long)o->actor.seed,
                   (int)id_of(o, s), l, tag, own->tags[l][i], i);
        }
    }
}

/* After a commit: the window still has all rows that the next token sees, except sinks that were removed once. */
static void check_window(owner *o, int s) {
    rows r;
    const own_sequence *own = &o->own[s];
    const int end = end_of(own);
    read_rows(&o->actor, o->actor.cache, id_of(o, s), 1, &r);
    for (int i = 0; i < end; i++)
        if (own->tags[1][i] && i > end - WINDOW)
            CHECKF(r.positions[i] == i, "seed %llu: no row at %d of %d", (unsigned long long)o->actor.seed, i, end);
}

/* Forgets a sequence that keeps others from going on. */
static void clear_own(owner *o, int s) {
    EXPECT(&o->actor, kvc_clear_sequence(o->actor.cache, id_of(o, s)) == KVC_OK);
    o->own[s] = (own_sequence){0};
}

static void put_tags(owner *o, kvc_batch *batch, const int *tags, int n) {
    rows r;
    for (int l = 0; l < NUM_LAYERS; l++) {
        for (int i = 0; i < n; i++) set_row(&r, i, tags[i], l);
        const kvc_put_args args = {.struct_size = sizeof args,
                                   .num_tokens = n,
                                   .k = r.k,
                                   .v = l == KEYS ? NULL : r.v,
                                   .k_token_stride = sizeof **r.k,
                                   .k_head_stride = sizeof *r.k,
                                   .v_token_stride = sizeof **r.v,
                                   .v_head_stride = sizeof *r.v};
        EXPECT(&o->actor, kvc_put(batch, l, &args) == KVC_OK);
        sched_yield();
    }
}

/* Returns the tag of a row of a sequence, or of the batch that follows at position `at`. */
static int tag_behind(const own_sequence *own, const int *tags, int at, int layer, int position) {
    return position < at ? own->tags[layer][position] : tags[position - at];
}

/* Chooses the rows with the largest tags for the last token of a batch, which differ. */
static void choose_last(owner *o, kvc_batch *batch, const own_sequence *own, const int *tags, int at, int n,
                        int32_t chosen[WIDTH]) {
    static const float q[HEADS][DIM] = {{1}, {1}};
    float scores[WIDTH];
    const kvc_plan_args plan_args = {.struct_size = sizeof plan_args,
                                     .layer = KEYS,
                                     .first = n - 1,
                                     .num_tokens = 1,
                                     .num_heads = HEADS,
                                     .num_threads = 2};
    const kvc_choose_args args = {.struct_size = sizeof args,
                                  .q = q,
                                  .q_token_stride = sizeof q,
                                  .q_head_stride = sizeof *q,
                                  .scale = 1,
                                  .width = WIDTH,
                                  .chosen = chosen,
                                  .scores = scores};
    EXPECT(&o->actor, kvc_choose(batch, &plan_args, &args) == KVC_OK);
    for (int i = 0, num = 0; i < at + n; i++) {
        const int tag = tag_behind(own, tags, at, KEYS, i);
        int larger = 0;
        for (int j = 0; j < at + n; j++) larger += tag_behind(own, tags, at, KEYS, j) > tag;
        if (larger >= WIDTH) continue;
        CHECKF(chosen[num] == i && scores[num] == (float)(HEADS * tag), "seed %llu: %d is chosen, not %d of tag %d",
               (unsigned long long)o->actor.seed, chosen[num], i, tag);
        num++;
    }
}

/* Attends with the last token of a batch in layer 0 on two threads, perhaps to chosen rows: the result follows from the
 * tags of its rows. */
static void attend_last(owner *o, kvc_batch *batch, const own_sequence *own, const int *tags, int at, int n) {
    static const float q[HEADS][DIM] = {{1e-4f, -2e-4f, 3e-4f}, {-1e-4f, 1e-4f, 0, 2e-4f}};
    float out[HEADS][DIM];
    int32_t positions[WIDTH];
    kvc_plan *plan = NULL;
    const kvc_chosen chosen = {.struct_size = sizeof chosen, .positions = positions, .num_choices = 1, .width = WIDTH};
    const int chooses = pick(&o->actor, 2);
    const kvc_plan_args plan_args = {.struct_size = sizeof plan_args,
                                     .first = n - 1,
                                     .num_tokens = 1,
                                     .num_heads = HEADS,
                                     .num_threads = 2,
                                     .max_chosen = chooses ? WIDTH : 0};
    kvc_attend_args args = float_queries(HEADS, DIM, DIM, q, out);
    args.scale = 1;
    args.chosen = chooses ? &chosen : NULL;
    EXPECT(&o->actor, kvc_plan_new(batch, &plan_args, &plan) == KVC_OK);
    choose_last(o, batch, own, tags, at, n, positions);
    crew_run(plan, 0, &args, NULL, 2);
    kvc_plan_free(plan);
    for (int h = 0; h < HEADS; h++) {
        double wide_q[DIM], k[MOST][DIM], v[MOST][DIM];
        seen_row seen[MOST];
        sight s = {.q = doubles(wide_q, q[h], DIM), .k_dim = DIM, .v_dim = DIM, .scale = 1, .rows = seen};
        for (int i = 0; i < at + n; i++) {
            const int tag = tag_behind(own, tags, at, 0, i);
            if (chooses && !names_row(&chosen, 0, h, at + n - 1, i, 1)) continue;
            for (int d = 0; d < DIM; d++)
                k[i][d] = (double)tag_element(tag, 0, 0, h, d), v[i][d] = (double)tag_element(tag, 0, 1, h, d);
            seen[s.num++] = (seen_row){.k = k[i], .v = v[i]};
        }
        attend_plainly(&s);
        for (int d = 0; d < DIM; d++) EXPECT(&o->actor, fabs((double)out[h][d] - s.out[d]) <= 1e-5 * (1 + s.out[d]));
    }
}

/* Adds tokens behind a sequence's last; some batches are aborted, of some only the first tokens are kept. */
static void feed_own(owner *o, int s) {
    enum { MOST_FED = 9 };
    actor *a = &o->actor;
    kvc_batch *batch = NULL;
    int64_t ids[MOST_FED];
    int tags[MOST_FED], n = 1 + pick(a, MOST_FED);
    static const int32_t all[MOST_FED] = {0, 1, 2, 3, 4, 5, 6, 7, 8};
    const int32_t at = kvc_next_position(a->cache, id_of(o, s));
    if (at + n > MOST) {
        clear_own(o, s);
        return;
    }
    for (int i = 0; i < n; i++) {
        ids[i] = id_of(o, s);
        tags[i] = ++o->last_tag;
    }
    const kvc_begin_args args = {.struct_size = sizeof args, .num_tokens = n, .seq_ids = ids, .timeout_ms = -1};
    const kvc_status status = kvc_begin_with(a->cache, &args, &batch);
    EXPECT_ONE_OF(a, status, KVC_ERR_FULL, KVC_ERR_GONE);
    if (status != KVC_OK) {
        o->num_full += status == KVC_ERR_FULL;
        check_own(o, s);
        clear_own(o, pick(a, 2) || status == KVC_ERR_GONE ? s : pick(a, OWN_IDS));
        return;
    }
    put_tags(o, batch, tags, n);
    attend_last(o, batch, &o->own[s], tags, at, n);
    const int kept = pick(a, 4) ? n : pick(a, n + 1);
    if (!kept)
        kvc_abort(batch);
    else
        EXPECT(a, (kept == n ? kvc_commit(batch) : kvc_commit_kept(batch, all, kept)) == KVC_OK);
    for (int l = 0; l < NUM_LAYERS; l++)
        for (int i = 0; i < kept; i++) o->own[s].tags[l][at + i] = tags[i];
    if (kept) check_window(o, s);
}

/* Drops positions [begin, end); later ones move down. */
static void remove_own(owner *o, int s, int begin, int end) {
    const kvc_status status = kvc_remove(o->actor.cache, id_of(o, s), begin, end, 1);
    EXPECT_ONE_OF(&o->actor, status, KVC_ERR_GONE);
    for (int l = 0; status == KVC_OK && l < NUM_LAYERS; l++)
        for (int i = begin; i < MOST; i++)
            o->own[s].tags[l][i] = i + end - begin < MOST ? o->own[s].tags[l][i + end - begin] : 0;
}

static void cut_own(owner *o, int s, int length) {
    const kvc_status status = kvc_truncate(o->actor.cache, id_of(o, s), length);
    EXPECT_ONE_OF(&o->actor, status, KVC_ERR_GONE);
    for (int l = 0; status == KVC_OK && l < NUM_LAYERS; l++)
        for (int i = length; i < MOST; i++) o->own[s].tags[l][i] = 0;
}

static void fork_own(owner *o, int s, int to) {
    if (s == to || !end_of(&o->own[s])) return;
    EXPECT(&o->actor, kvc_fork(o->actor.cache, id_of(o, s), id_of(o, to)) == KVC_OK);
    o->own[to] = o->own[s];
}

/* Replaces rows from `at` on in a layer that holds all of them. */
static void inject_own(owner *o, int s, int at) {
    actor *a = &o->actor;
    rows r;
    const int layer = pick(a, 2) ? 0 : KEYS;
    const int end = end_of(&o->own[s]), n = at < end ? 1 + pick(a, end - at) : 0, first_tag = o->last_tag + 1;
    o->last_tag += n;
    for (int i = 0; i < n; i++) set_row(&r, i, first_tag + i, layer);
    const kvc_rows_in in = {.struct_size = sizeof in,
                            .k = r.k,
                            .v = layer == KEYS ? NULL : r.v,
                            .k_head_stride = sizeof *r.k,
                            .k_row_stride = sizeof **r.k,
                            .v_head_stride = sizeof *r.v,
                            .v_row_stride = sizeof **r.v};
    const kvc_status status = kvc_inject(a->cache, id_of(o, s), layer, at, at + n, &in);
    EXPECT_ONE_OF(a, status, KVC_ERR_FULL); /* rows that another holds are copied */
    for (int i = 0; status == KVC_OK && i < n; i++) o->own[s].tags[layer][at + i] = first_tag + i;
}

static void *own(void *context) {
    owner *o = context;
    for (int step = 0; step < o->num_steps; step++) {
        const int s = pick(&o->actor, OWN_IDS), end = end_of(&o->own[s]), at = pick(&o->actor, end + 1);
        switch (pick(&o->actor, 12)) {
        case 0: remove_own(o, s, at, at + pick(&o->actor, end - at + 1)); break;
        case 1: cut_own(o, s, at); break;
        case 2: fork_own(o, s, pick(&o->actor, OWN_IDS)); break;
        case 3: inject_own(o, s, at); break;
        case 4: clear_own(o, s); break;
        case 5: retain_stretches(&o->actor, id_of(o, s)); break;
        default: feed_own(o, s);
        }
        check_own(o, pick(&o->actor, 2) ? s : pick(&o->actor, OWN_IDS));
    }
    for (int s = 0; s < OWN_IDS; s++) check_own(o, s);
    return NULL;
}

/* ---- guests -------------------------------------------------------------------------------------------------------
 */

static int64_t any_id(actor *a) {
    const int i = pick(a, OWNERS * OWN_IDS + GUEST_IDS);
    return i < GUEST_IDS ? FIRST_GUEST + GUEST_IDS * a->number + i : i - GUEST_IDS; /* or an owner's */
}

static int64_t own_id(actor *a) { return FIRST_GUEST + GUEST_IDS * a->number + pick(a, GUEST_IDS); }

static void clone_once(actor *a) {
    kvc_cache *clone = NULL;
    const kvc_status status = kvc_cache_clone(a->cache, &clone);
    EXPECT_ONE_OF(a, status, KVC_ERR_BUSY);
    if (status != KVC_OK) return;
    EXPECT(a, kvc_validate(clone) == KVC_OK);
    check_intact(a, clone, any_id(a));
    EXPECT(a, kvc_cache_free(clone) == KVC_OK);
}

/* Saves a sequence, and restores it in this cache under an id of its own. */
static void restore_once(actor *a) {
    if (KVC_IS_BIG_ENDIAN) return; /* test_saved.c checks that states are refused */
    saved file;
    const int64_t from = any_id(a), to = own_id(a);
    const kvc_status written = save_one(a->cache, from, &file);
    EXPECT(a, written == KVC_OK);
    kvc_load_args args = load_args_of(&file);
    args.seq_ids = &from;
    args.to_ids = &to;
    args.num_sequences = 1;
    if (written == KVC_OK) EXPECT_ONE_OF(a, kvc_restore(a->cache, &args), KVC_ERR_FULL);
    check_intact(a, a->cache, to);
    free(file.bytes);
}

/* Attaches stretches that a thread has retained, and perhaps drops or retains anew meanwhile. */
static void attach_once(actor *a) {
    int64_t ids[STRETCHES];
    const int64_t to = own_id(a);
    const int of = pick(a, 2) ? a->number : pick(a, OWNERS);
    int32_t matched = 0;
    for (int i = 0; i < STRETCHES; i++) ids[i] = FIRST_KEPT + STRETCHES * of + i;
    if (of == a->number) retain_stretches(a, own_id(a));
    EXPECT(a, pin_retained(a->cache, ids, 1, 1) == KVC_OK && touch_retained(a->cache, ids, STRETCHES) == KVC_OK);
    EXPECT(a, kvc_clear_sequence(a->cache, to) == KVC_OK);
    EXPECT(a, attach_retained(a->cache, ids, STRETCHES, to, STRETCHES * LENGTH, &matched) == KVC_OK);
    EXPECT(a, matched >= 0 && matched <= STRETCHES * LENGTH && kvc_next_position(a->cache, to) == matched);
    EXPECT(a, kvc_seq_len(a->cache, to, 0) == matched);
    check_intact(a, a->cache, to);
    check_intact(a, a->cache, ids[pick(a, STRETCHES)]);
    EXPECT(a, pin_retained(a->cache, ids, 1, -1) == KVC_OK);
}

/* Holds the rows of a sequence: they stay as they are, whatever becomes of it. */
static void hold_once(actor *a) {
    kvc_span spans[MOST];
    kvc_hold *held = NULL;
    int64_t num = 0;
    const int layer = pick(a, NUM_LAYERS);
    int tags[MOST], n;
    EXPECT(a, kvc_spans(a->cache, any_id(a), layer, spans, sizeof *spans, MOST, &num, &held) == KVC_OK && num <= MOST);
    for (int round = 0; round < 2; round++) {
        n = 0;
        for (int64_t i = 0; i < num; i++)
            for (int64_t r = 0; r < spans[i].num_rows; r++, n++) {
                const float *k = (const float *)spans[i].k + r * spans[i].k_row_stride / (int64_t)sizeof(float);
                const float *v = layer == KEYS
                                     ? NULL
                                     : (const float *)spans[i].v + r * spans[i].v_row_stride / (int64_t)sizeof(float);
                const int tag = tag_of(a, k, v, spans[i].k_head_stride / (int64_t)sizeof(float), layer);
                EXPECT(a, !round || tag == tags[n]);
                tags[n] = tag;
            }
        sched_yield();
    }
    kvc_hold_free(held);
}

static void ask_once(actor *a) {
    int64_t room = 0;
    EXPECT_ONE_OF(a, kvc_room(a->cache, own_id(a), &room), KVC_ERR_BUSY);
    EXPECT_ONE_OF(a, kvc_compact(a->cache), KVC_ERR_BUSY, KVC_ERR_HELD);
    EXPECT_ONE_OF(a, kvc_settle(a->cache), KVC_ERR_BUSY, KVC_ERR_HELD);
    EXPECT_ONE_OF(a, kvc_reserve(a->cache, own_id(a), 1 + pick(a, 9)), KVC_ERR_BUSY, KVC_ERR_FULL, KVC_ERR_GONE);
    EXPECT(a, room <= CAPACITY && kvc_utilization(a->cache) <= 1);
    EXPECT(a, kvc_validate(a->cache) == KVC_OK);
}

static void *visit(void *context) {
    static void (*const calls[])(actor *a) = {clone_once, restore_once, attach_once, attach_once, hold_once, ask_once};
    actor *a = context;
    while (!atomic_load(a->stop)) {
        calls[pick(a, sizeof calls / sizeof *calls)](a);
        check_intact(a, a->cache, any_id(a));
        if (!pick(a, 3)) EXPECT(a, kvc_clear_sequence(a->cache, own_id(a)) == KVC_OK);
        sched_yield();
    }
    return NULL;
}

/* ---- together -----------------------------------------------------------------------------------------------------
 */

static kvc_cache *new_cache(int block_size, int64_t max_bytes) {
    const kvc_rope none = {.kind = KVC_ROPE_NONE};
    const kvc_layer layers[NUM_LAYERS] = {
        {.num_kv_heads = HEADS, .k_dim = DIM, .v_dim = DIM, .rope = none},
        {.num_kv_heads = HEADS, .k_dim = DIM, .v_dim = DIM, .rope = none, .policy = sliding_policy(WINDOW, SINKS, 0)},
        {.num_kv_heads = HEADS, .k_dim = DIM, .rope = none}};
    return cache_of(
        layers, NUM_LAYERS,
        (kvc_config){.block_size = block_size, .capacity = CAPACITY, .max_bytes = max_bytes, .num_threads = 1});
}

/* Runs all threads; when they have ended, what they made can be dropped, and no memory of rows is left. */
static void run_together(uint64_t seed, int block_size, int64_t max_bytes, int num_steps) {
    static owner owners[OWNERS];
    actor guests[GUESTS];
    pthread_t threads[OWNERS + GUESTS];
    atomic_int stop = 0;
    kvc_stats stats;
    kvc_cache *cache = new_cache(block_size, max_bytes);
    const int64_t bytes = kvc_nbytes(cache);
    for (int i = 0; i < OWNERS; i++) {
        owners[i] = (owner){.actor = {cache, seed, seed * 16 + (uint64_t)i, i, &stop}, .num_steps = num_steps};
        CHECK(pthread_create(&threads[i], NULL, own, &owners[i]) == 0);
    }
    for (int i = 0; i < GUESTS; i++) {
        guests[i] = (actor){cache, seed, seed * 16 + 8 + (uint64_t)i, OWNERS + i, &stop};
        CHECK(pthread_create(&threads[OWNERS + i], NULL, visit, &guests[i]) == 0);
    }
    for (int i = 0; i < OWNERS; i++) pthread_join(threads[i], NULL);
    atomic_store(&stop, 1);
    for (int i = 0; i < GUESTS; i++) pthread_join(threads[OWNERS + i], NULL);
    for (int i = 0; i < OWNERS; i++)
        for (int s = 0; s < OWN_IDS; s++) check_own(&owners[i], s);
    CHECKF(kvc_validate(cache) == KVC_OK, "seed %llu: %s", (unsigned long long)seed, kvc_last_error());
    CHECK(kvc_clear(cache) == KVC_OK && kvc_compact(cache) == KVC_OK && kvc_validate(cache) == KVC_OK);
    kvc_get_stats(cache, &stats, sizeof stats);
    CHECKF(!stats.live_slots && !stats.retained && !stats.blocks_in_use && !stats.blocks_free, "seed %llu: %lld slots",
           (unsigned long long)seed, (long long)stats.live_slots);
    CHECKF(kvc_nbytes(cache) <= bytes + LEFT_OVER, "seed %llu: %lld bytes", (unsigned long long)seed,
           (long long)kvc_nbytes(cache));
    CHECKF(kvc_cache_free(cache) == KVC_OK, "%s", kvc_last_error());
}

int main(int argc, char **argv) {
    const uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    const int num_steps = is_quick() ? 200 : 800;
    for (uint64_t i = 0; i < 4; i++) run_together(seed + i, i % 2 ? 16 : 5, i < 2 ? 0 : 60 << 10, num_steps);
    return test_result();
}
