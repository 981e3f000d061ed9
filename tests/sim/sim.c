/* sim.c: clients of one cache in a simulated world (world.h), each of whose calls is checked.
 *
 * Clients take a sequence before they change it, and know what it holds: every row tells by its contents which token it
 * was put for.  In a third of the runs they also meddle with sequences of others.  What others do to the cache
 * meanwhile is up to the world.  A call may fail only as its documentation says, and only where its cause is there;
 * then everything is as it was.  When all clients have ended, what they made can be dropped, and every byte comes back.
 *
 *     sim --seed 1 --runs 100 --calls 400 --clients 4 --faults 63 --trace
 */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/personality.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvcache.h"
#include "world.h"

enum {
    MOST_LAYERS = 4,
    MOST_CLIENTS = 8,
    HEADS = 2,
    DIM = 4,
    MOST = 56, /* positions of a sequence */
    IDS = 7,
    KEPT = 8, /* retained sequences: ids from FIRST_KEPT on */
    FIRST_KEPT = 100,
    FEED = 9,     /* most tokens of a sequence in one batch */
    MOST_FED = 3, /* most sequences of a batch */
    CROSS = 5,    /* most rows of a sequence in a cross-attention layer */
    MOST_TAGS = 1 << 20
};

/* What a sequence holds: tags by position, 0 where there is no row.  Of layers that expire rows, and of retained
 * sequences, it is all that may be there. */
typedef struct sequence {
    int is_taken; /* by a client, who alone may change it */
    int is_kept;
    int meddlers, meddlings; /* clients that change it though another one has it; how often any began to */
    int is_spoilt;           /* one did since it was cleared: nobody knows which rows it holds */
    int epoch;               /* odd while its rows are undefined: retained, and not written yet */
    int tags[MOST_LAYERS][MOST];
    int num_cross;
} sequence;

typedef struct world {
    kvc_cache *cache;
    kvc_layer layers[MOST_LAYERS];
    kvc_config config;
    int num_layers, expires, last_tag;
    int is_meddled;      /* not 0: clients change sequences that others have */
    int takes_rare_ways; /* not 0: rows may be moved together where that gains nothing */
    sequence sequences[IDS + KEPT];
    kvc_batch *batch; /* the open one; NULL while none is, or it begins or ends */
    int64_t calls_left;
    uint8_t origins[MOST_TAGS]; /* by tag: the position that the row was put at */
} world;

typedef struct client {
    world *w;
    int number;
    int was_cancelled; /* since the call began */
    uint64_t handovers, faults;
    int64_t nbytes;
    kvc_stats stats;
    const char *call;
} client;

static int traces;
static client clients[MOST_CLIENTS];

static int pick(int n) { return (int)sim_random((uint64_t)n); }

static int64_t id_of(int s) { return s < IDS ? s * 3 - 4 : FIRST_KEPT + s - IDS; }

static void fail(const client *c, const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    sim_fail("client %d, %s: %s [%s]", c->number, c->call, text, kvc_last_error());
}

/* ---- calls that may fail ----------------------------------------------------------------------------------------- */

/* Which failures a call may answer with, beside those of a fault that met it. */
enum {
    MAY_BE_BUSY = 1,
    MAY_BE_FULL = 2,
    MAY_BE_GONE = 4,
    MAY_BE_HELD = 8,
    MAY_BE_INVALID = 16,
    MAY_CANCEL = 32,
    MAY_INDEX = 64
};

/* Notes how things are before a call. */
static void begin_call(client *c, const char *call) {
    c->call = call;
    c->was_cancelled = 0;
    c->handovers = sim_handovers();
    c->nbytes = kvc_nbytes(c->w->cache);
    kvc_get_stats(c->w->cache, &c->stats, sizeof c->stats);
    c->faults = sim_faults();
}

/* Whether what a failed call may not change is as it was; others must not have run meanwhile. */
static void check_unchanged(client *c) {
    const uint64_t handovers = sim_handovers();
    kvc_stats now;
    const int64_t nbytes = kvc_nbytes(c->w->cache);
    kvc_get_stats(c->w->cache, &now, sizeof now);
    if (handovers != c->handovers || sim_handovers() != handovers) return;
    if (nbytes != c->nbytes)
        fail(c, "failed, and changed kvc_nbytes from %lld to %lld", (long long)c->nbytes, (long long)nbytes);
    if (memcmp(&now, &c->stats, sizeof now)) fail(c, "failed, and changed the statistics");
}

static int ended(client *c, kvc_status status, int may) {
    const int met_fault = sim_faults() != c->faults;
    const char *answer = kvc_strerror(status); /* it steps, with --trace or without */
    if (c->w->is_meddled) may |= MAY_BE_BUSY | MAY_BE_FULL | MAY_BE_GONE | MAY_BE_INVALID | MAY_INDEX;
    if (traces) printf("%llu client %d: %s: %s\n", (unsigned long long)sim_steps(), c->number, c->call, answer);
    const int is_allowed =
        status == KVC_OK || (status == KVC_ERR_NOMEM && met_fault) || (status == KVC_ERR_BUSY && may & MAY_BE_BUSY) ||
        (status == KVC_ERR_FULL && may & MAY_BE_FULL) ||
        (status == KVC_ERR_GONE && may & MAY_BE_GONE && c->w->expires) ||
        (status == KVC_ERR_HELD && may & MAY_BE_HELD) || (status == KVC_ERR_INVALID && may & MAY_BE_INVALID) ||
        (status == KVC_ERR_INDEX && may & MAY_INDEX) ||
        (status == KVC_ERR_CANCELLED && may & MAY_CANCEL && c->was_cancelled) ||
        (status == KVC_ERR_CALLBACK && c->was_cancelled);
    if (!is_allowed) fail(c, "answers \"%s\"", answer);
    if (status != KVC_OK) check_unchanged(c);
    return status == KVC_OK;
}

static client *self_of(void *user) { /* poll and the functions of ropes are called on the thread of a client */
    (void)user;
    static _Thread_local client *self;
    if (user) self = user;
    return self;
}

static int32_t poll_once(void *user) {
    (void)user;
    client *c = self_of(NULL);
    sim_step();
    if (!c || pick(8)) return 0;
    c->was_cancelled = 1;
    return 1;
}

/* Turns keys, as key_element says. */
static int32_t move_keys(void *user, int32_t layer, float *keys, int32_t num_kv_heads, int64_t num_rows, int32_t k_dim,
                         int32_t delta) {
    (void)user, (void)layer;
    client *c = self_of(NULL);
    sim_step();
    if (pick(2)) kvc_validate(c->w->cache);
    for (float *key = keys; key < keys + num_kv_heads * num_rows * k_dim; key += k_dim)
        for (int i = delta & 3; i > 0; i--) {
            const float x = key[2];
            key[2] = -key[3];
            key[3] = x;
        }
    if (pick(10)) return 0;
    c->was_cancelled = 1;
    return 1;
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

typedef struct rows {
    float k[HEADS][MOST][DIM], v[HEADS][MOST][DIM];
    int32_t positions[MOST];
} rows;

static float element(int tag, int layer, int is_value, int h, int d) {
    return d ? (float)(1 + (tag * 31 + layer * 17 + is_value * 11 + h * 5 + d) % 4093) : (float)tag;
}

/* An element of a key at a position: where keys carry it, its last two are turned by a right angle for each position
 * that it stands behind the one it was put at. */
static float key_element(const world *w, int tag, int layer, int h, int d, int position) {
    const int turns = w->layers[layer].rope.kind == KVC_ROPE_NONE ? 0 : (position - w->origins[tag]) & 3;
    if (d < 2 || turns == 0) return element(tag, layer, 0, h, d);
    const float x = element(tag, layer, 0, h, 2), y = element(tag, layer, 0, h, 3);
    const float turned[4][2] = {{x, y}, {-y, x}, {-x, -y}, {y, -x}};
    return turned[turns][d - 2];
}

/* Returns a tag for a new row. */
static int new_tag(world *w, int position) {
    if (++w->last_tag == MOST_TAGS) sim_fail("too many rows: give fewer --calls");
    w->origins[w->last_tag] = (uint8_t)position;
    return w->last_tag;
}

static void set_row(rows *r, int i, int tag, int layer) {
    for (int h = 0; h < HEADS; h++)
        for (int d = 0; d < DIM; d++) {
            r->k[h][i][d] = element(tag, layer, 0, h, d);
            r->v[h][i][d] = element(tag, layer, 1, h, d);
        }
}

/* Returns the tag of a row, all of which must be of that tag, and its key turned as at this position. */
static int tag_of(const client *c, const float *k, const float *v, int64_t head_stride, int layer, int position) {
    const int tag = (int)k[0];
    int differ = tag < 1 || tag > c->w->last_tag;
    for (int h = 0; h < HEADS && !differ; h++)
        for (int d = 0; d < DIM; d++)
            differ += k[h * head_stride + d] != key_element(c->w, tag, layer, h, d, position) ||
                      v[h * head_stride + d] != element(tag, layer, 1, h, d);
    if (differ) fail(c, "%d elements of a row with tag %d are another's, layer %d", differ, tag, layer);
    return tag;
}

static kvc_rows_out out_of(rows *r) {
    return (kvc_rows_out){.struct_size = sizeof(kvc_rows_out),
                          .k = r->k,
                          .v = r->v,
                          .k_head_stride = sizeof *r->k,
                          .k_row_stride = sizeof **r->k,
                          .v_head_stride = sizeof *r->v,
                          .v_row_stride = sizeof **r->v,
                          .positions = r->positions};
}

static int is_own(const world *w, int l) { return !w->layers[l].share && w->layers[l].policy.kind != KVC_CROSS; }
static int is_cross(const world *w, int l) { return w->layers[l].policy.kind == KVC_CROSS; }
static int source_of(const world *w, int l) { return w->layers[l].share ? w->layers[l].share - 1 : l; }

/* Compares what a sequence of a cache holds with what it should: rows that may expire, or be evicted, may lack. */
static void check_sequence(client *c, kvc_cache *cache, int s) {
    rows r;
    const world *w = c->w;
    const sequence *of = &w->sequences[s];
    for (int l = 0; l < w->num_layers; l++) {
        if (!is_own(w, l)) continue;
        const kvc_rows_out out = out_of(&r);
        const uint64_t faults = sim_faults();
        const kvc_status status = kvc_extract(cache, id_of(s), l, 0, MOST, &out);
        if (status == KVC_ERR_NOMEM && sim_faults() != faults) return;
        if (status != KVC_OK) fail(c, "kvc_extract of %lld: %s", (long long)id_of(s), kvc_strerror(status));
        for (int i = 0; i < MOST; i++) {
            const int tag = r.positions[i] < 0 ? 0 : tag_of(c, r.k[0][i], r.v[0][i], MOST * DIM, l, i);
            if (of->is_spoilt || tag == of->tags[l][i]) continue;
            if (tag || !(of->is_kept || w->layers[l].policy.kind != KVC_FULL))
                fail(c, "sequence %lld has tag %d at %d, not %d, layer %d", (long long)id_of(s), tag, i, of->tags[l][i],
                     l);
        }
    }
}

/* Reads a sequence that others may change: each row is whole. */
static void check_intact(client *c, kvc_cache *cache, int s) {
    rows r;
    const int l = source_of(c->w, pick(c->w->num_layers)), epoch = c->w->sequences[s].epoch;
    const kvc_rows_out out = out_of(&r);
    if (is_cross(c->w, l) || epoch % 2 || kvc_extract(cache, id_of(s), l, 0, MOST, &out) != KVC_OK) return;
    if (c->w->sequences[s].epoch != epoch) return;
    for (int i = 0; i < MOST; i++)
        if (r.positions[i] >= 0) tag_of(c, r.k[0][i], r.v[0][i], MOST * DIM, l, i);
}

/* ---- sequences of a client --------------------------------------------------------------------------------------- */

/* Takes a sequence that nobody has; -1: a few tries found none.  kept: a retained one. */
static int take(client *c, int kept) {
    for (int i = 0; i < 4; i++) {
        const int s = kept ? IDS + pick(KEPT) : pick(IDS);
        if (c->w->sequences[s].is_taken) continue;
        c->w->sequences[s].is_taken = 1;
        return s;
    }
    return -1;
}

static void let_go(client *c, int s) {
    if (s < 0) return;
    check_sequence(c, c->w->cache, s);
    c->w->sequences[s].is_taken = 0;
}

static int end_of(const sequence *s) {
    int end = MOST;
    while (end && !s->tags[0][end - 1]) end--;
    return end;
}

static void forget(sequence *s) {
    memset(s->tags, 0, sizeof s->tags);
    s->num_cross = 0;
    s->is_kept = 0;
}

static int clear_one(client *c, int s) {
    sequence *of = &c->w->sequences[s];
    const int meddlings = of->meddlers ? -1 : of->meddlings;
    begin_call(c, "kvc_clear_sequence");
    if (!ended(c, kvc_clear_sequence(c->w->cache, id_of(s)), 0)) return 0;
    forget(of);
    if (of->meddlings == meddlings) of->is_spoilt = 0;
    return 1;
}

/* Retains rows of sequence s at positions [begin, end) under a retained id, in place of others; returns whether it
 * could. */
static int retain_rows(client *c, int s, int to, int begin, int end) {
    const sequence *from = &c->w->sequences[s];
    sequence *kept = &c->w->sequences[to];
    if (!clear_one(c, to)) return 0;
    begin_call(c, "kvc_retain");
    if (!ended(c, kvc_retain(c->w->cache, id_of(s), id_of(to), begin, end), 0)) return 0;
    kept->is_kept = 1;
    kept->is_spoilt |= from->is_spoilt;
    for (int l = 0; l < MOST_LAYERS; l++)
        for (int i = begin; i < end && i < MOST; i++) kept->tags[l][i] = from->tags[l][i];
    return 1;
}

/* ---- forward passes ---------------------------------------------------------------------------------------------- */

typedef struct pass {
    kvc_batch *batch;
    int num_sequences, num_tokens;
    int sequences[MOST_FED], first[MOST_FED + 1]; /* tokens of each: [first[i], first[i + 1]) */
    int positions[MOST_FED * FEED], tags[MOST_FED * FEED];
    uint8_t unstored[MOST_FED * FEED];
} pass;

static int put_rows(client *c, const pass *p, int layer, int first, int n) {
    rows r;
    for (int i = 0; i < n; i++) set_row(&r, i, p->tags[first + i], layer);
    const kvc_put_args args = {.struct_size = sizeof args,
                               .first = first,
                               .num_tokens = n,
                               .k = r.k,
                               .v = r.v,
                               .k_token_stride = sizeof **r.k,
                               .k_head_stride = sizeof *r.k,
                               .v_token_stride = sizeof **r.v,
                               .v_head_stride = sizeof *r.v};
    for (;;) {
        begin_call(c, "kvc_put");
        if (ended(c, kvc_put(p->batch, layer, &args), MAY_CANCEL | MAY_BE_FULL)) return 1;
        if (!pick(4)) return 0;
    }
}

static int put_cross(client *c, const pass *p, int layer, int i) {
    rows r;
    const int n = 1 + pick(CROSS), tag = p->tags[p->first[i]];
    for (int j = 0; j < n; j++) set_row(&r, j, tag, layer);
    const kvc_put_args args = {.struct_size = sizeof args,
                               .num_tokens = n,
                               .k = r.k,
                               .v = r.v,
                               .k_token_stride = sizeof **r.k,
                               .k_head_stride = sizeof *r.k,
                               .v_token_stride = sizeof **r.v,
                               .v_head_stride = sizeof *r.v,
                               .seq_id = id_of(p->sequences[i])};
    begin_call(c, "kvc_put of cross-attention");
    return ended(c, kvc_put(p->batch, layer, &args), MAY_CANCEL | MAY_BE_FULL);
}

/* Whether a query at position `at` sees a position of its sequence in a layer. */
static int sees(const kvc_policy *policy, int at, int position) {
    if (position > at) return 0;
    if (policy->kind == KVC_SLIDING) return position > at - policy->window || position < policy->num_sink_tokens;
    if (policy->kind == KVC_CHUNKED)
        return position >= at / policy->attention_chunk_size * policy->attention_chunk_size;
    return 1;
}

/* Attends by a plan, whose tasks are run in any order, some of them twice. */
static kvc_status attend_by_tasks(kvc_batch *batch, const kvc_plan_args *args, const kvc_attend_args *attend) {
    kvc_plan *plan = NULL;
    kvc_status status = kvc_plan_new(batch, args, &plan);
    if (status != KVC_OK) return status;
    const int n = (int)kvc_plan_num_tasks(plan), first = pick(n);
    for (int i = 0; status == KVC_OK && i < n + !pick(4); i++)
        status = kvc_plan_run(plan, args->layer, attend, (first + i) % n);
    kvc_plan_free(plan);
    return status;
}

/* Attends with the last token of one sequence of the batch, and compares the result with that of its rows. */
static void attend_last(client *c, const pass *p, int layer, int i) {
    const world *w = c->w;
    const int t = p->first[i + 1] - 1, source = source_of(w, layer);
    const sequence *of = &w->sequences[p->sequences[i]];
    const float scale = 1e-4f;
    float q[HEADS][DIM], out[HEADS][DIM];
    for (int h = 0; h < HEADS; h++)
        for (int d = 0; d < DIM; d++) q[h][d] = (float)(pick(9) - 4);
    const kvc_plan_args plan = {
        .struct_size = sizeof plan, .layer = layer, .first = t, .num_tokens = 1, .num_heads = HEADS};
    const kvc_attend_args args = {.struct_size = sizeof args,
                                  .q = q,
                                  .out = out,
                                  .q_token_stride = sizeof q,
                                  .q_head_stride = sizeof *q,
                                  .out_token_stride = sizeof out,
                                  .out_head_stride = sizeof *out,
                                  .scale = scale};
    c->call = "kvc_attend";
    c->was_cancelled = 0;
    c->faults = sim_faults();
    c->handovers = UINT64_MAX;
    if (!ended(c, pick(3) ? kvc_attend(p->batch, &plan, &args) : attend_by_tasks(p->batch, &plan, &args),
               MAY_CANCEL | (p->unstored[t] ? MAY_BE_GONE : 0)) ||
        of->is_spoilt)
        return;
    for (int h = 0; h < HEADS; h++) {
        double sum = 0, value[DIM] = {0}, largest = 1;
        for (int at = 0; at <= p->positions[t]; at++) {
            int tag = of->tags[source][at];
            for (int j = p->first[i]; j <= t; j++)
                if (p->positions[j] == at) tag = p->tags[j];
            if (!tag || !sees(&w->layers[source].policy, p->positions[t], at)) continue;
            double score = 0;
            for (int d = 0; d < DIM; d++) score += q[h][d] * (double)key_element(w, tag, source, h, d, at);
            const double weight = exp(score * (double)scale);
            sum += weight;
            for (int d = 0; d < DIM; d++) {
                const double v = element(tag, source, 1, h, d);
                value[d] += weight * v;
                if (fabs(v) > largest) largest = fabs(v);
            }
        }
        for (int d = 0; d < DIM; d++)
            if (!(fabs(out[h][d] - value[d] / sum) <= 1e-4 * largest))
                fail(c, "%g in layer %d of sequence %lld, not %g", (double)out[h][d], layer,
                     (long long)id_of(p->sequences[i]), value[d] / sum);
    }
}

/* Reads what the batch holds of one of its sequences. */
static void read_batch(client *c, const pass *p, int layer, int i) {
    kvc_span spans[MOST];
    kvc_hold *hold = NULL;
    int64_t num = 0;
    const int s = p->sequences[i];
    c->call = "kvc_batch_spans";
    c->faults = sim_faults();
    c->handovers = UINT64_MAX;
    if (!ended(c, kvc_batch_spans(p->batch, id_of(s), layer, spans, sizeof *spans, MOST, &num, &hold), MAY_BE_GONE))
        return;
    for (int64_t j = 0; j < num; j++)
        for (int n = 0; n < spans[j].num_rows; n++) {
            const int64_t row = n * spans[j].k_row_stride / (int64_t)sizeof(float);
            tag_of(c, (const float *)spans[j].k + row,
                   (const float *)spans[j].v + n * spans[j].v_row_stride / (int64_t)sizeof(float),
                   spans[j].k_head_stride / (int64_t)sizeof(float), source_of(c->w, layer),
                   spans[j].position + n - spans[j].delta);
        }
    sim_step();
    kvc_hold_free(hold);
}

/* Puts rows in all layers; returns whether it could. */
static int fill(client *c, const pass *p) {
    world *w = c->w;
    for (int l = 0; l < w->num_layers; l++) {
        if (is_cross(w, l)) {
            for (int i = 0; i < p->num_sequences; i++)
                if (!pick(3) && !put_cross(c, p, l, i)) return 0;
            continue;
        }
        const int cut = pick(p->num_tokens + 1);
        if (!w->layers[l].share && ((cut && !put_rows(c, p, l, 0, cut)) ||
                                    (cut < p->num_tokens && !put_rows(c, p, l, cut, p->num_tokens - cut))))
            return 0;
        const int i = pick(p->num_sequences);
        if (!pick(3)) attend_last(c, p, l, i);
        if (!pick(6) && !p->unstored[p->first[i]]) read_batch(c, p, l, i);
    }
    return 1;
}

/* Takes sequences and lists tokens behind theirs. */
static void make_pass(client *c, pass *p) {
    world *w = c->w;
    *p = (pass){0};
    for (int i = 1 + pick(MOST_FED); i > 0; i--) {
        const int s = take(c, 0);
        if (s < 0) continue;
        const int at = kvc_next_position(w->cache, id_of(s)), n = 1 + pick(FEED), is_unstored = !pick(10);
        if (at + n > MOST) {
            clear_one(c, s);
            let_go(c, s);
            continue;
        }
        for (int t = 0; t < n; t++, p->num_tokens++) {
            p->positions[p->num_tokens] = at + t;
            p->tags[p->num_tokens] = new_tag(w, at + t);
            p->unstored[p->num_tokens] = (uint8_t)is_unstored;
        }
        p->sequences[p->num_sequences++] = s;
        p->first[p->num_sequences] = p->num_tokens;
    }
}

/* A call that finds no room finds none either once the retained sequences that can be evicted are cleared. */
static void check_full(client *c, const kvc_begin_args *args) {
    kvc_batch *batch;
    if (sim_handovers() != c->handovers || c->w->takes_rare_ways || pick(4)) return;
    for (int s = IDS; s < IDS + KEPT; s++)
        if (!c->w->sequences[s].is_taken && kvc_clear_sequence(c->w->cache, id_of(s)) == KVC_OK)
            forget(&c->w->sequences[s]);
    if (kvc_begin_with(c->w->cache, args, &batch) != KVC_OK) return;
    kvc_abort(batch);
    if (sim_handovers() == c->handovers) fail(c, "found no room, and does once retained sequences are cleared");
}

static int begin(client *c, pass *p) {
    int64_t ids[MOST_FED * FEED];
    for (int i = 0; i < p->num_sequences; i++)
        for (int t = p->first[i]; t < p->first[i + 1]; t++) ids[t] = id_of(p->sequences[i]);
    static const int64_t timeouts[] = {0, -1, 1, 50};
    const int64_t timeout = timeouts[pick(4)];
    const kvc_begin_args args = {.struct_size = sizeof args,
                                 .num_tokens = p->num_tokens,
                                 .seq_ids = ids,
                                 .unstored = p->unstored,
                                 .timeout_ms = timeout};
    begin_call(c, "kvc_begin_with");
    const kvc_status status = kvc_begin_with(c->w->cache, &args, &p->batch);
    const int has_begun = ended(c, status, MAY_BE_FULL | MAY_BE_GONE | MAY_CANCEL | (timeout >= 0 ? MAY_BE_BUSY : 0));
    if (status == KVC_ERR_FULL) check_full(c, &args);
    for (int t = 0; has_begun && t < p->num_tokens; t++) /* others may have moved the sequence's end */
        c->w->origins[p->tags[t]] = (uint8_t)kvc_batch_positions(p->batch)[t];
    return has_begun;
}

/* Notes what became of the tokens that were kept. */
static void note_kept(client *c, const pass *p, const uint8_t *kept) {
    for (int i = 0; i < p->num_sequences; i++) {
        sequence *s = &c->w->sequences[p->sequences[i]];
        for (int t = p->first[i]; t < p->first[i + 1]; t++)
            for (int l = 0; l < c->w->num_layers && kept[t]; l++)
                if (is_own(c->w, l)) s->tags[l][p->positions[t]] = p->tags[t];
        if (p->unstored[p->first[i]]) forget(s);
    }
}

static void end_pass(client *c, const pass *p) {
    uint8_t kept[MOST_FED * FEED] = {0};
    int32_t indices[MOST_FED * FEED], num = 0;
    const int is_whole = pick(4) != 0;
    for (int i = 0; i < p->num_sequences; i++) {
        const int end = is_whole ? p->first[i + 1] : p->first[i] + pick(p->first[i + 1] - p->first[i] + 1);
        for (int t = p->first[i]; t < end; t++) kept[t] = 1, indices[num++] = t;
    }
    c->w->batch = NULL;
    c->call = "kvc_commit";
    c->faults = sim_faults() - 1; /* it cannot fail: neither here nor there */
    c->faults = sim_faults();
    c->handovers = UINT64_MAX;
    const kvc_status status =
        num == p->num_tokens && pick(2) ? kvc_commit(p->batch) : kvc_commit_kept(p->batch, indices, num);
    if (status != KVC_OK) fail(c, "answers \"%s\"", kvc_strerror(status));
    if (traces)
        printf("%llu client %d: %d of %d tokens committed\n", (unsigned long long)sim_steps(), c->number, num,
               p->num_tokens);
    note_kept(c, p, kept);
}

/* Retains rows of a sequence of the running batch: those that it held, and the batch's if they are stored. */
static void retain_running(client *c, const pass *p) {
    const world *w = c->w;
    const int i = pick(p->num_sequences), to = take(c, 1), begin = pick(MOST), end = begin + pick(12);
    if (to >= 0 && retain_rows(c, p->sequences[i], to, begin, end))
        for (int t = p->first[i]; t < p->first[i + 1] && !p->unstored[t]; t++)
            for (int l = 0; l < w->num_layers; l++)
                if (p->positions[t] >= begin && p->positions[t] < end && is_own(w, l))
                    c->w->sequences[to].tags[l][p->positions[t]] = p->tags[t];
    let_go(c, to);
}

/* What there was before a batch. */
typedef struct before {
    uint64_t handovers, faults;
    int64_t room, rows_gone; /* moved or expired: that stays done */
} before;

static int64_t count_gone(const client *c) {
    kvc_stats stats;
    kvc_get_stats(c->w->cache, &stats, sizeof stats);
    return stats.rows_moved + stats.rows_expired;
}

static before note_before(const client *c, int64_t seq_id) {
    before b = {.handovers = sim_handovers(), .faults = sim_faults(), .rows_gone = count_gone(c)};
    if (pick(2) && !c->w->takes_rare_ways) kvc_room(c->w->cache, seq_id, &b.room);
    return b;
}

/* Aborts a batch: it leaves as much room as there was before it. */
static void abort_pass(client *c, const pass *p, const before *b) {
    int64_t room = 0;
    c->call = "kvc_abort";
    c->w->batch = NULL;
    kvc_abort(p->batch);
    if (traces) printf("%llu client %d: aborted\n", (unsigned long long)sim_steps(), c->number);
    const kvc_status status = kvc_room(c->w->cache, id_of(p->sequences[0]), &room);
    if (count_gone(c) != b->rows_gone || sim_handovers() != b->handovers || sim_faults() != b->faults) return;
    if (status == KVC_OK && room < b->room)
        fail(c, "leaves room for %lld tokens, of %lld before the batch", (long long)room, (long long)b->room);
}

static void feed(client *c) {
    pass p;
    make_pass(c, &p);
    if (!p.num_sequences) return;
    const before b = note_before(c, id_of(p.sequences[0]));
    if (begin(c, &p)) {
        c->w->batch = p.batch;
        const int is_filled = fill(c, &p);
        if (is_filled && !pick(6)) retain_running(c, &p);
        if (is_filled && pick(6))
            end_pass(c, &p);
        else
            abort_pass(c, &p, &b);
    } else if (pick(2)) {
        clear_one(c, p.sequences[pick(p.num_sequences)]); /* so that others have room */
    }
    for (int i = 0; i < p.num_sequences; i++) let_go(c, p.sequences[i]);
}

/* ---- edits ------------------------------------------------------------------------------------------------------- */

static void remove_some(client *c, int s) {
    sequence *of = &c->w->sequences[s];
    const int begin = pick(end_of(of) + 1), end = begin + pick(end_of(of) - begin + 1), shifts = pick(2);
    begin_call(c, "kvc_remove");
    if (!ended(c, kvc_remove(c->w->cache, id_of(s), begin, end, shifts), MAY_BE_GONE | MAY_BE_FULL)) return;
    for (int l = 0; l < MOST_LAYERS; l++)
        for (int i = begin; i < MOST; i++) {
            const int from = shifts ? i + end - begin : i < end ? MOST : i;
            of->tags[l][i] = from < MOST ? of->tags[l][from] : 0;
        }
}

static void cut(client *c, int s) {
    sequence *of = &c->w->sequences[s];
    const int length = pick(end_of(of) + 1);
    begin_call(c, "kvc_truncate");
    if (!ended(c, kvc_truncate(c->w->cache, id_of(s), length), MAY_BE_GONE)) return;
    for (int l = 0; l < MOST_LAYERS; l++) memset(of->tags[l] + length, 0, (size_t)(MOST - length) * sizeof(int));
}

static void shift_some(client *c, int s) {
    sequence *of = &c->w->sequences[s];
    const int end = end_of(of), begin = pick(end + 1), delta = pick(MOST - end + 1);
    begin_call(c, "kvc_shift");
    if (!ended(c, kvc_shift(c->w->cache, id_of(s), begin, KVC_END, delta), MAY_BE_FULL)) return;
    for (int l = 0; l < MOST_LAYERS; l++)
        for (int i = MOST - 1; i >= begin; i--) of->tags[l][i] = i - delta >= begin ? of->tags[l][i - delta] : 0;
}

/* Divides positions, reads the rows, and forgets the sequence: several rows stand at one position then. */
static void divide(client *c, int s) {
    begin_call(c, "kvc_divide");
    if (!ended(c, kvc_divide(c->w->cache, id_of(s), pick(9), KVC_END, 2 + pick(3)), MAY_BE_FULL)) return;
    check_intact(c, c->w->cache, s);
    while (!clear_one(c, s)) continue;
}

static void inject(client *c, int s) {
    world *w = c->w;
    rows r;
    sequence *of = &w->sequences[s];
    const int at = pick(end_of(of) + 1), l = source_of(w, pick(w->num_layers)), tag = new_tag(w, at);
    if (at == MOST || is_cross(w, l)) return;
    set_row(&r, 0, tag, l);
    const kvc_rows_in in = {.struct_size = sizeof in,
                            .k = r.k,
                            .v = r.v,
                            .k_head_stride = sizeof *r.k,
                            .k_row_stride = sizeof **r.k,
                            .v_head_stride = sizeof *r.v,
                            .v_row_stride = sizeof **r.v};
    begin_call(c, "kvc_inject");
    if (ended(c, kvc_inject(w->cache, id_of(s), l, at, at + 1, &in), MAY_BE_FULL | MAY_INDEX)) of->tags[l][at] = tag;
}

static void copy(client *c, int s) {
    world *w = c->w;
    const int to = take(c, 0);
    if (to < 0) return;
    sequence *from = &w->sequences[s], *into = &w->sequences[to];
    const int length = pick(2) ? KVC_END : 1 + pick(MOST), is_empty = !end_of(from);
    begin_call(c, length == KVC_END ? "kvc_fork" : "kvc_copy_prefix");
    const kvc_status status = length == KVC_END ? kvc_fork(w->cache, id_of(s), id_of(to))
                                                : kvc_copy_prefix(w->cache, id_of(s), id_of(to), length);
    if (ended(c, status, MAY_BE_GONE | (is_empty ? MAY_BE_INVALID : 0))) {
        memcpy(into->tags, from->tags, sizeof into->tags);
        into->is_spoilt |= from->is_spoilt;
        for (int l = 0; l < MOST_LAYERS; l++)
            for (int i = length; i < MOST; i++) into->tags[l][i] = 0;
    }
    let_go(c, to);
}

static void share(client *c, int s) {
    world *w = c->w;
    const int to = take(c, 0);
    if (to < 0) return;
    sequence *from = &w->sequences[s], *into = &w->sequences[to];
    const int begin = end_of(into), is_empty = !end_of(from);
    begin_call(c, "kvc_share");
    const kvc_status status = kvc_share(w->cache, id_of(s), id_of(to), begin, KVC_END);
    into->is_spoilt |= from->is_spoilt;
    if (ended(c, status, (is_empty && !begin ? MAY_BE_INVALID : 0) | MAY_BE_GONE))
        for (int l = 0; l < MOST_LAYERS; l++)
            memcpy(into->tags[l] + begin, from->tags[l] + begin, (size_t)(MOST - begin) * sizeof(int));
    let_go(c, to);
}

static void edit(client *c) {
    static void (*const edits[])(client *c, int s) = {remove_some, cut, shift_some, divide, inject, copy, copy, share};
    const int s = take(c, 0);
    if (s < 0) return;
    edits[pick(sizeof edits / sizeof *edits)](c, s);
    let_go(c, s);
}

/* Changes a sequence that another client has, perhaps in a batch: no row of another one may come of it. */
static void meddle(client *c) {
    world *w = c->w;
    const int s = pick(IDS), begin = pick(MOST), end = begin + pick(MOST - begin);
    sequence *of = &w->sequences[s];
    if (!w->is_meddled || !of->is_taken) return;
    of->meddlers++;
    of->meddlings++;
    of->is_spoilt = 1;
    switch (pick(7)) {
    case 0:
        begin_call(c, "kvc_remove of another's");
        ended(c, kvc_remove(w->cache, id_of(s), begin, end, pick(2)), 0);
        break;
    case 1:
        begin_call(c, "kvc_truncate of another's");
        ended(c, kvc_truncate(w->cache, id_of(s), begin), 0);
        break;
    case 2:
        begin_call(c, "kvc_clear_sequence of another's");
        ended(c, kvc_clear_sequence(w->cache, id_of(s)), 0);
        break;
    case 3:
        begin_call(c, "kvc_shift of another's");
        ended(c, kvc_shift(w->cache, id_of(s), begin, KVC_END, pick(3)), 0);
        break;
    case 4: {
        const int from = pick(IDS);
        begin_call(c, "kvc_fork over another's");
        ended(c, kvc_fork(w->cache, id_of(from), id_of(s)), 0);
        break;
    }
    case 5: {
        kvc_batch *batch;
        const int64_t id = id_of(s);
        begin_call(c, "kvc_begin of another's");
        if (!ended(c, kvc_begin(w->cache, 1, NULL, &id, NULL, &batch), 0)) break;
        w->batch = batch;
        for (int i = 0; i < 20; i++) sim_step();
        w->batch = NULL;
        kvc_abort(batch);
        break;
    }
    default:
        begin_call(c, "kvc_reserve of another's");
        ended(c, kvc_reserve(w->cache, id_of(s), 1 + pick(12)), MAY_BE_HELD);
    }
    of->meddlers--;
}

static void clear_some(client *c) {
    const int s = take(c, pick(2));
    if (s < 0) return;
    clear_one(c, s);
    let_go(c, s);
}

/* ---- retained sequences ------------------------------------------------------------------------------------------ */

static void retain(client *c) {
    const int s = take(c, 0), to = take(c, 1), begin = pick(MOST);
    if (s >= 0 && to >= 0) retain_rows(c, s, to, begin, begin + 1 + pick(12));
    let_go(c, s);
    let_go(c, to);
}

/* Notes which positions have rows in one of these retained sequences, by layer, and returns the position behind the
 * last that one had. */
static int list_rows(const client *c, const int64_t *ids, int num, uint8_t has[MOST_LAYERS][MOST]) {
    int32_t end = 0, positions[MOST];
    memset(has, 0, sizeof *has * MOST_LAYERS);
    for (int i = 0; i < num; i++) {
        const int32_t next = kvc_next_position(c->w->cache, ids[i]);
        if (next > end) end = next;
        for (int l = 0; l < c->w->num_layers; l++)
            for (int64_t n = kvc_positions(c->w->cache, ids[i], l, positions, MOST); n > 0; n--)
                has[l][positions[n - 1]] = 1;
    }
    return end;
}

/* Whether rows are there in all layers for what a query at a position sees below itself. */
static int can_go_on(const world *w, uint8_t has[MOST_LAYERS][MOST], int at) {
    for (int l = 0; l < w->num_layers; l++)
        for (int i = 0; is_own(w, l) && i < at; i++)
            if (sees(&w->layers[l].policy, at, i) && !has[l][i]) return 0;
    return 1;
}

/* Retains stretches of one sequence that follow each other, and makes another of them. */
static void attach(client *c) {
    world *w = c->w;
    enum { PIECES = 3, LENGTH = 5 };
    int64_t ids[PIECES];
    int pieces[PIECES], num = 0;
    const int s = take(c, 0), to = take(c, 0);
    int32_t matched = 0;
    while (num < PIECES && (pieces[num] = take(c, 1)) >= 0) ids[num] = id_of(pieces[num]), num++;
    int goes_on = s >= 0 && to >= 0 && num == PIECES && clear_one(c, to);
    for (int i = 0; goes_on && i < PIECES; i++) goes_on = retain_rows(c, s, pieces[i], i * LENGTH, (i + 1) * LENGTH);
    if (goes_on) {
        kvc_pin(w->cache, ids, 1 + pick(PIECES), 1);
        kvc_touch(w->cache, ids, PIECES);
        begin_call(c, "kvc_attach");
        uint8_t has[MOST_LAYERS][MOST];
        const int length = pick(PIECES * LENGTH + 3), last = list_rows(c, ids, PIECES, has);
        int most = length < last ? length : last;
        while (!can_go_on(w, has, most)) most--;
        if (ended(c, kvc_attach(w->cache, ids, PIECES, id_of(to), length, &matched), 0)) {
            w->sequences[to].is_spoilt |= w->sequences[s].is_spoilt;
            if (matched < 0 || matched > PIECES * LENGTH || (matched != most && sim_handovers() == c->handovers))
                fail(c, "matched %d, not %d", matched, most);
            for (int l = 0; l < MOST_LAYERS; l++)
                for (int i = 0; i < matched; i++) w->sequences[to].tags[l][i] = w->sequences[s].tags[l][i];
        }
        kvc_pin(w->cache, ids, PIECES, -1);
    }
    while (num) let_go(c, pieces[--num]);
    let_go(c, s);
    let_go(c, to);
}

static void retain_new(client *c) {
    world *w = c->w;
    rows r;
    const int to = take(c, 1), block_size = (int)kvc_block_size(w->cache), n = block_size < 6 ? block_size : 6,
              begin = pick(9);
    if (to < 0) return;
    const int64_t id = id_of(to);
    if (clear_one(c, to)) {
        w->sequences[to].epoch++;
        begin_call(c, "kvc_retain_new");
        if (ended(c, kvc_retain_new(w->cache, id, begin, begin + n, NULL), MAY_BE_FULL)) {
            sequence *kept = &w->sequences[to];
            kept->is_kept = 1;
            int is_whole = 1;
            for (int l = 0; l < w->num_layers && is_whole; l++) {
                if (!is_own(w, l)) continue;
                for (int i = 0; i < n; i++) set_row(&r, i, kept->tags[l][begin + i] = new_tag(w, begin + i), l);
                const kvc_rows_in in = {.struct_size = sizeof in,
                                        .k = r.k,
                                        .v = r.v,
                                        .k_head_stride = sizeof *r.k,
                                        .k_row_stride = sizeof **r.k,
                                        .v_head_stride = sizeof *r.v,
                                        .v_row_stride = sizeof **r.v};
                begin_call(c, "kvc_inject into a retained sequence");
                is_whole = ended(c, kvc_inject(w->cache, id, l, begin, begin + n, &in),
                                 MAY_BE_FULL); /* where others hold them */
            }
            if (!is_whole) /* what was not written must not be read */
                while (!clear_one(c, to)) continue;
            else
                kvc_pin(w->cache, &id, 1, -1);
        }
        w->sequences[to].epoch++;
    }
    let_go(c, to);
}

/* ---- the cache as a whole ---------------------------------------------------------------------------------------- */

/* A batch takes as many tokens as kvc_room said, and no more. */
static void check_room(client *c, int s, int64_t room) {
    const int64_t n = room + pick(2);
    int64_t ids[MOST];
    kvc_batch *batch;
    for (int i = 0; i < MOST; i++) ids[i] = id_of(s);
    if (n == 0 || n > MOST || c->w->takes_rare_ways) return;
    const kvc_begin_args args = {.struct_size = sizeof args, .num_tokens = (int32_t)n, .seq_ids = ids};
    const kvc_status status = kvc_begin_with(c->w->cache, &args, &batch);
    if (status == KVC_OK) kvc_abort(batch);
    if (sim_handovers() != c->handovers || sim_faults() != c->faults || status == KVC_ERR_BUSY) return;
    if ((status == KVC_OK) != (n == room))
        fail(c, "says %lld, and a batch of %lld is answered \"%s\"", (long long)room, (long long)n,
             kvc_strerror(status));
}

static void tidy(client *c) {
    static const char *const names[] = {"kvc_compact", "kvc_settle", "kvc_reserve", "kvc_room", "kvc_validate"};
    world *w = c->w;
    const int which = pick(5), s = take(c, 0);
    int64_t room = 0;
    if (s < 0) return;
    begin_call(c, names[which]);
    const kvc_status status = which == 0   ? kvc_compact(w->cache)
                              : which == 1 ? kvc_settle(w->cache)
                              : which == 2 ? kvc_reserve(w->cache, id_of(s), 1 + pick(12))
                              : which == 3 ? kvc_room(w->cache, id_of(s), &room)
                                           : kvc_validate(w->cache);
    ended(c, status,
          which == 4 ? 0
                     : MAY_BE_BUSY | MAY_BE_HELD | (which == 1 || which == 2 ? MAY_BE_FULL : 0) |
                           (which == 2 ? MAY_BE_GONE : 0));
    if (which == 3 && status == KVC_OK) check_room(c, s, room);
    let_go(c, s);
}

static void hold(client *c) {
    kvc_span spans[MOST];
    kvc_hold *held = NULL;
    int64_t num = 0;
    int tags[MOST], layer = source_of(c->w, pick(c->w->num_layers));
    if (is_cross(c->w, layer)) return;
    const int s = pick(IDS + KEPT), epoch = c->w->sequences[s].epoch;
    begin_call(c, "kvc_spans");
    if (!ended(c, kvc_spans(c->w->cache, id_of(s), layer, spans, sizeof *spans, MOST, &num, &held), 0)) return;
    const int is_defined = epoch % 2 == 0 && c->w->sequences[s].epoch == epoch;
    for (int round = 0; round < 3 * is_defined; round++)
        for (int64_t i = 0, n = 0; i < num; i++)
            for (int j = 0; j < spans[i].num_rows && n < MOST; j++, n++) {
                const int tag = tag_of(
                    c, (const float *)spans[i].k + j * spans[i].k_row_stride / (int64_t)sizeof(float),
                    (const float *)spans[i].v + j * spans[i].v_row_stride / (int64_t)sizeof(float),
                    spans[i].k_head_stride / (int64_t)sizeof(float), layer, spans[i].position + j - spans[i].delta);
                if (round && tag != tags[n]) fail(c, "a row that is held became another");
                tags[n] = tag;
                sim_step();
            }
    kvc_hold_free(held);
}

static void clone(client *c) {
    kvc_cache *copy = NULL;
    int epochs[IDS + KEPT], cloned_epochs[IDS + KEPT];
    for (int s = 0; s < IDS + KEPT; s++) epochs[s] = c->w->sequences[s].epoch;
    begin_call(c, "kvc_cache_clone");
    if (!ended(c, kvc_cache_clone(c->w->cache, &copy), MAY_BE_BUSY)) return;
    for (int s = 0; s < IDS + KEPT; s++) cloned_epochs[s] = c->w->sequences[s].epoch;
    if (kvc_validate(copy) != KVC_OK) fail(c, "the clone is corrupt");
    for (int i = 0; i < 3; i++) {
        const int s = pick(IDS + KEPT);
        if (epochs[s] % 2 == 0 && cloned_epochs[s] == epochs[s]) check_intact(c, copy, s);
    }
    if (kvc_cache_free(copy) != KVC_OK) fail(c, "the clone cannot be freed");
}

/* ---- files ------------------------------------------------------------------------------------------------------- */

typedef struct file {
    client *c;
    char *bytes;
    size_t size, room, at;
} file;

static int32_t write_file(void *user, const void *data, size_t size) {
    file *f = user;
    sim_step();
    if (!pick(200)) return f->c->was_cancelled = 1;
    if (f->size + size > f->room) f->bytes = realloc(f->bytes, f->room = 2 * (f->size + size));
    memcpy(f->bytes + f->size, data, size);
    f->size += size;
    return 0;
}

static int32_t read_file(void *user, void *data, size_t size) {
    file *f = user;
    sim_step();
    if (!pick(200) || size > f->size - f->at) return f->c->was_cancelled = 1;
    memcpy(data, f->bytes + f->at, size);
    f->at += size;
    return 0;
}

/* Damages some files; returns whether it did. */
static int damage(file *f) {
    if (pick(4)) return 0;
    if (pick(3))
        f->bytes[pick((int)f->size - KVC_MAC_BYTES)] ^= (char)(1 << pick(8));
    else
        f->size = (size_t)pick((int)f->size);
    return 1;
}

/* Loads what was saved of sequence s as a cache of its own. */
static void load(client *c, kvc_load_args *args, int s, int is_damaged) {
    kvc_cache *copy = NULL;
    kvc_config config = {.struct_size = sizeof config,
                         .layers = c->w->layers,
                         .layer_size = sizeof *c->w->layers,
                         .num_layers = c->w->num_layers,
                         .block_size = pick(2) ? 0 : 1 + pick(40),
                         .num_threads = 1 + pick(3)};
    args->config = &config;
    args->to_ids = NULL;
    begin_call(c, "kvc_load");
    const kvc_status status = kvc_load(args, &copy);
    if (is_damaged && status == KVC_OK) fail(c, "took a damaged file");
    if (status == KVC_ERR_FORMAT && is_damaged) return;
    if (!ended(c, status, MAY_BE_FULL)) return;
    if (kvc_validate(copy) != KVC_OK) fail(c, "what was loaded is corrupt");
    check_sequence(c, copy, s);
    if (kvc_cache_free(copy) != KVC_OK) fail(c, "what was loaded cannot be freed");
}

static void restore(client *c, const kvc_load_args *args, int s, int to, int is_damaged) {
    world *w = c->w;
    begin_call(c, "kvc_restore");
    const kvc_status status = kvc_restore(w->cache, args);
    if (is_damaged && status == KVC_OK) fail(c, "took a damaged file");
    if (is_damaged && status == KVC_ERR_FORMAT) {
        check_unchanged(c);
    } else if (ended(c, status, MAY_BE_FULL | (is_damaged ? MAY_BE_INVALID | MAY_BE_BUSY : 0))) {
        memcpy(w->sequences[to].tags, w->sequences[s].tags, sizeof w->sequences[to].tags);
        w->sequences[to].is_spoilt |= w->sequences[s].is_spoilt;
    }
}

/* Saves a sequence, and restores it as another, or loads it. */
static void save_and_restore(client *c) {
    world *w = c->w;
    file f = {.c = c};
    const int s = take(c, 0), to = take(c, 0);
    const int64_t from_id = id_of(s < 0 ? 0 : s), to_id = id_of(to < 0 ? 0 : to);
    const kvc_save_args save = {
        .struct_size = sizeof save, .write = write_file, .user = &f, .seq_ids = &from_id, .num_sequences = 1};
    begin_call(c, "kvc_save");
    if (s >= 0 && to >= 0 && ended(c, kvc_save(w->cache, &save), 0)) {
        const int is_damaged = damage(&f), is_read = pick(2);
        kvc_load_args args = {.struct_size = sizeof args,
                              .data = is_read ? NULL : f.bytes,
                              .read = is_read ? read_file : NULL,
                              .user = &f,
                              .size = (int64_t)f.size,
                              .seq_ids = &from_id,
                              .to_ids = &to_id,
                              .num_sequences = 1};
        if (pick(3))
            restore(c, &args, s, to, is_damaged);
        else
            load(c, &args, s, is_damaged);
    }
    free(f.bytes);
    let_go(c, s);
    let_go(c, to);
}

/* ---- fork() ------------------------------------------------------------------------------------------------------ */

/* In the child: everything is as it was, and can be dropped. */
static int check_child(void *context) {
    client *c = context;
    world *w = c->w;
    c->call = "fork()";
    if (kvc_validate(w->cache) != KVC_OK) fail(c, "the child's cache is corrupt");
    for (int s = 0; s < IDS + KEPT; s++)
        if (!w->sequences[s].is_taken) check_sequence(c, w->cache, s);
    if (w->batch) kvc_abort(w->batch);
    if (kvc_validate(w->cache) != KVC_OK) fail(c, "the child's cache is corrupt without the batch");
    for (int s = 0; s < IDS + KEPT; s++) check_intact(c, w->cache, s);
    const kvc_status status = kvc_clear(w->cache); /* a batch that begins or ends is nobody's to abort */
    if (status != KVC_OK && (w->batch || status != KVC_ERR_BUSY)) fail(c, "the child's cache cannot be cleared");
    kvc_stats stats;
    const int is_empty = status == KVC_OK && kvc_compact(w->cache) == KVC_OK;
    kvc_get_stats(w->cache, &stats, sizeof stats);
    if (is_empty && stats.live_slots) fail(c, "%lld slots are left in the child", (long long)stats.live_slots);
    if (kvc_validate(w->cache) != KVC_OK) fail(c, "the child's cache is corrupt when it was cleared");
    return 0;
}

static void fork_once(client *c) {
    c->call = "fork()";
    if (pick(8)) return; /* takes as long as a hundred calls */
    const int result = sim_fork(check_child, c);
    if (result) fail(c, "the child ended with %d", result);
}

/* ---- together ---------------------------------------------------------------------------------------------------- */

static void *run_client(void *context) {
    static void (*const calls[])(client *c) = {feed,
                                               feed,
                                               feed,
                                               feed,
                                               feed,
                                               feed,
                                               edit,
                                               edit,
                                               edit,
                                               edit,
                                               retain,
                                               retain,
                                               attach,
                                               retain_new,
                                               tidy,
                                               tidy,
                                               hold,
                                               clone,
                                               save_and_restore,
                                               clear_some,
                                               meddle,
                                               meddle,
                                               fork_once};
    client *c = context;
    self_of(c);
    while (c->w->calls_left-- > 0) {
        calls[pick(sizeof calls / sizeof *calls)](c);
        check_intact(c, c->w->cache, pick(IDS + KEPT));
        if (kvc_utilization(c->w->cache) > 1) fail(c, "utilization is above 1");
        if (!pick(4) && kvc_validate(c->w->cache) != KVC_OK) fail(c, "the cache is corrupt afterwards");
    }
    return NULL;
}

static kvc_policy any_policy(void) {
    const int window = 2 + pick(12);
    if (pick(3) == 0)
        return (kvc_policy){.kind = KVC_CHUNKED, .attention_chunk_size = window, .resume_window = pick(2) * pick(9)};
    return (kvc_policy){.kind = KVC_SLIDING,
                        .window = window,
                        .num_sink_tokens = pick(3),
                        .resume_window = pick(2) * (window + pick(9))};
}

/* Makes a cache of any shape and limits. */
static void make_cache(world *w) {
    static const double right_angle[] = {1.57079632679489661923};
    const int kind = KVC_ROPE_NONE + pick(3);
    /* Blocks of the largest sizes have memory that comes and goes by the page. */
    const int sizes[] = {6, 6, 6, 40, 40, 12000}, block_size = 1 + pick(sizes[pick(6)]);
    w->num_layers = 1 + pick(MOST_LAYERS);
    for (int l = 0; l < w->num_layers; l++) {
        w->layers[l] = (kvc_layer){
            .num_kv_heads = HEADS,
            .k_dim = DIM,
            .v_dim = DIM,
            .rope = {.kind = kind, .first_dim = 2, .num_freqs = 1, .inv_freq = right_angle, .shift = move_keys}};
        const int what = l ? pick(5) : 0;
        if (what == 1 || what == 2) w->layers[l].policy = any_policy(), w->expires = 1;
        if (what == 3) w->layers[l].policy = (kvc_policy){.kind = KVC_CROSS, .max_len = CROSS};
        if (what == 4) w->layers[l].share = 1;
    }
    w->config = (kvc_config){.struct_size = sizeof w->config,
                             .layers = w->layers,
                             .layer_size = sizeof *w->layers,
                             .num_layers = w->num_layers,
                             .block_size = block_size,
                             .max_seq_len = pick(3) ? 0 : 20 + pick(40),
                             .max_sequences = pick(3) ? 0 : 3 + pick(8),
                             .capacity = pick(2) ? 0 : 40 + pick(120),
                             .max_bytes = pick(2) ? 0 : (20000 + pick(60000)) * (block_size > MOST ? 100 : 1),
                             .num_threads = 1 + pick(3),
                             .poll = pick(2) ? poll_once : NULL};
    kvc_status status;
    do status = kvc_cache_new(&w->config, &w->cache);
    while (status == KVC_ERR_NOMEM && sim_faults());
    if (status != KVC_OK) sim_fail("kvc_cache_new: %s", kvc_last_error());
}

/* One run: all clients until the calls are used up; then nothing may be left. */
static void run(uint64_t seed, int num_clients, int64_t num_calls, int faults) {
    static world w;
    pthread_t threads[MOST_CLIENTS];
    static const int handovers[] = {1, 4, 32, 256};
    /* Some faults hide what others show: a thread that wakes early misses no signal. */
    const sim_options options = {seed, faults & (int)(seed * 0x9e3779b97f4a7c15 >> 58), handovers[seed % 4]};
    w = (world){.calls_left = num_calls, .is_meddled = seed / 4 % 3 == 0, .takes_rare_ways = options.faults & SIM_RARE};
    if (seed / 12 % 3 == 0) num_clients = 1; /* what a failed call changes is seen where no other client runs */
    sim_begin(&options);
    clients[num_clients] = (client){.w = &w, .number = -1, .call = "end"};
    self_of(&clients[num_clients]);
    const int64_t bytes = sim_bytes();
    make_cache(&w);
    for (int i = 0; i < num_clients; i++) {
        clients[i] = (client){.w = &w, .number = i};
        while (sim_thread_create(&threads[i], NULL, run_client, &clients[i])) continue;
    }
    for (int i = 0; i < num_clients; i++) sim_thread_join(threads[i], NULL);
    sim_calm();
    client *c = &clients[num_clients];
    for (int s = 0; s < IDS + KEPT; s++) check_sequence(c, w.cache, s);
    if (kvc_validate(w.cache) != KVC_OK) fail(c, "the cache is corrupt");
    if (kvc_clear(w.cache) != KVC_OK || kvc_compact(w.cache) != KVC_OK) fail(c, "the cache cannot be cleared");
    kvc_stats stats;
    kvc_get_stats(w.cache, &stats, sizeof stats);
    if (stats.live_slots || stats.blocks_in_use || stats.blocks_free || stats.retained) fail(c, "rows are left");
    if (kvc_cache_free(w.cache) != KVC_OK) fail(c, "the cache cannot be freed");
    if (sim_bytes() != bytes) fail(c, "%lld bytes are left", (long long)(sim_bytes() - bytes));
}

int main(int argc, char **argv) {
    uint64_t seed = 1, runs = 1;
    int num_clients = 4, faults = SIM_ALL_FAULTS;
    int64_t num_calls = 400;
    /* Addresses decide the order of some lists. */
    if (!(personality(0xffffffff) & ADDR_NO_RANDOMIZE) && personality(ADDR_NO_RANDOMIZE) >= 0)
        execv("/proc/self/exe", argv);
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "0";
        if (!strcmp(argv[i], "--seed")) seed = strtoull(value, NULL, 10), i++;
        if (!strcmp(argv[i], "--runs")) runs = strtoull(value, NULL, 10), i++;
        if (!strcmp(argv[i], "--calls")) num_calls = strtoll(value, NULL, 10), i++;
        if (!strcmp(argv[i], "--clients")) num_clients = atoi(value), i++;
        if (!strcmp(argv[i], "--faults")) faults = atoi(value), i++;
        if (!strcmp(argv[i], "--trace")) traces = 1;
    }
    if (num_clients < 1 || num_clients >= MOST_CLIENTS) return 2;
    /* Each run has a process of its own: what the core keeps for the next call decides, too. */
    uint64_t *total = mmap(NULL, sizeof *total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (uint64_t i = 0; i < runs; i++) {
        const pid_t child = fork();
        int status = -1;
        if (child == 0) {
            run(seed + i, num_clients, num_calls, faults);
            *total += sim_steps();
            return 0;
        }
        if (child < 0 || waitpid(child, &status, 0) != child || status) return 1;
    }
    printf("%llu steps\n", (unsigned long long)*total);
    return 0;
}
