/* sim.c: clients of one cache in a simulated world (world.h), each of whose calls is checked.
 *
 * Clients take a sequence before they change it, and know what it holds: every row tells by its contents which token it
 * was put for.  In a third of the runs they also meddle with sequences of others.  Functions that the core calls make
 * other calls, or take their time.  The world decides what others do to the cache meanwhile.  A call may fail only as
 * its documentation says, and only where its cause is there; then everything is as it was.  When all clients have
 * ended, what they made can be dropped, and every byte comes back.
 *
 *     sim --seed 1 --runs 100 --calls 400 --clients 3 --faults 127 --trace
 */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/personality.h>
#include <sys/wait.h>
#include <unistd.h>

#include "prefixes.h" /* first: world.h decides on sizes of the core */

#include "cache/cache.h"
#include "cache/waiting.h"
#include "support/sketches.h"

enum {
    MOST_LISTED = 256 /* blocks, and runs */
};

int64_t ids[IDS];
static int traces;
static client clients[MOST_CLIENTS];

int pick(int n) { return (int)sim_random((uint64_t)n); }

int64_t id_of(int s) { return ids[s]; }

void fail(const client *c, const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    sim_fail("client %d, %s: %s [%s]", c->number, c->call, text, kvc_last_error());
}

/* ---- calls that may fail ----------------------------------------------------------------------------------------- */

static uint64_t hash(uint64_t to, const void *data, size_t size) { /* FNV-1a */
    for (const unsigned char *byte = data; size; size--) to = (to ^ *byte++) * 0x100000001b3;
    return to;
}

/* Hashes what a layer's group holds, and how far each sequence goes. */
static uint64_t hash_contents(const world *w, int layer) {
    kvc_block_info blocks[MOST_LISTED];
    kvc_run_info runs[MOST_LISTED];
    int64_t num_blocks = 0, num_runs = 0;
    uint64_t to = hash(0, NULL, 0);
    kvc_blocks(w->cache, layer, blocks, sizeof *blocks, MOST_LISTED, &num_blocks, runs, sizeof *runs, MOST_LISTED,
               &num_runs);
    for (int64_t i = 0; i < num_blocks && i < MOST_LISTED; i++) {
        blocks[i].resident = 0;                      /* a batch that is aborted wrote */
        if (blocks[i].is_held) blocks[i].filled = 0; /* its mark falls once it is let go */
    }
    to = hash(to, blocks, (size_t)(num_blocks < MOST_LISTED ? num_blocks : MOST_LISTED) * sizeof *blocks);
    to = hash(to, runs, (size_t)(num_runs < MOST_LISTED ? num_runs : MOST_LISTED) * sizeof *runs);
    for (int s = 0; s < IDS; s++) {
        const int32_t next = kvc_next_position(w->cache, id_of(s));
        to = hash(to, &next, sizeof next);
    }
    return to;
}

static picture take_picture(world *w, int layer) {
    picture p = {.handovers = sim_handovers(), .layer = layer, .nbytes = kvc_nbytes(w->cache)};
    kvc_get_stats(w->cache, &p.stats, sizeof p.stats);
    p.contents = hash_contents(w, layer);
    read_prefix_stats(w, p.prefixes);
    return p;
}

/* Notes how things are before a call. */
void begin_call(client *c, const char *call) {
    c->call = call;
    c->was_cancelled = 0;
    c->before = take_picture(c->w, pick(c->w->num_layers));
    c->handovers = c->before.handovers;
    c->faults = sim_faults();
    sim_fail_memory(pick(4) ? 0 : 1 + (uint64_t)pick(20));
}

/* Whether others may have seen, or changed, something since the call began. */
int is_alone(const client *c) { return sim_handovers() == c->handovers; }

/* Whether nothing has changed since the call began, unless others ran meanwhile. */
void check_unchanged(client *c) {
    const picture *was = &c->before, now = take_picture(c->w, was->layer);
    if (!is_alone(c)) return;
    if (now.nbytes != was->nbytes)
        fail(c, "changed kvc_nbytes from %lld to %lld", (long long)was->nbytes, (long long)now.nbytes);
    if (memcmp(&now.stats, &was->stats, sizeof now.stats)) fail(c, "changed the statistics");
    if (now.contents != was->contents) fail(c, "changed the sequences, or the blocks of layer %d", was->layer);
    if (memcmp(now.prefixes, was->prefixes, sizeof now.prefixes)) fail(c, "changed the statistics of a prefix");
}

/* Whether the bytes of an allocator are counted right. */
static void check_bytes(client *c) {
    const uint64_t handovers = sim_handovers();
    const world *w = c->w;
    const int64_t nbytes = kvc_nbytes(w->cache), taken = w->bytes[KVC_MEMORY_ROWS] + w->bytes[KVC_MEMORY_BOOKKEEPING];
    if (sim_handovers() == handovers && w->has_allocator && !w->num_clones && nbytes != taken)
        fail(c, "kvc_nbytes is %lld, and the cache has %lld", (long long)nbytes, (long long)taken);
}

int ended(client *c, kvc_status status, int may) {
    const int met_fault = sim_faults() != c->faults;
    const char *answer = kvc_strerror(status); /* it steps, with --trace or without */
    if (c->w->is_meddled)
        may |= MAY_BE_BUSY | MAY_BE_FULL | MAY_BE_GONE | MAY_BE_INVALID | MAY_INDEX | MAY_BE_UNSUPPORTED;
    if (traces) printf("%llu client %d: %s: %s\n", (unsigned long long)sim_steps(), c->number, c->call, answer);
    const int is_allowed =
        status == KVC_OK || (status == KVC_ERR_NOMEM && met_fault) || (status == KVC_ERR_BUSY && may & MAY_BE_BUSY) ||
        (status == KVC_ERR_FULL && may & MAY_BE_FULL) ||
        (status == KVC_ERR_GONE && may & MAY_BE_GONE && c->w->expires) ||
        (status == KVC_ERR_HELD && may & MAY_BE_HELD) || (status == KVC_ERR_INVALID && may & MAY_BE_INVALID) ||
        (status == KVC_ERR_INDEX && may & MAY_INDEX) || (status == KVC_ERR_UNSUPPORTED && may & MAY_BE_UNSUPPORTED) ||
        (status == KVC_ERR_CANCELLED && may & MAY_CANCEL && c->was_cancelled) ||
        (status == KVC_ERR_CALLBACK && c->was_cancelled);
    if (!is_allowed) fail(c, "answers \"%s\"", answer);
    if (status != KVC_OK && !(may & MAY_CHANGE)) check_unchanged(c);
    return status == KVC_OK;
}

static client *self_of(void *user) { /* poll and the functions of ropes are called on the thread of a client */
    (void)user;
    static _Thread_local client *self;
    if (user) self = user;
    return self;
}

/* Passes the time for which the core waits for a function of the client: little, much, or other calls. */
static void pass_time(client *c);

static int32_t poll_once(void *user) {
    (void)user;
    client *c = self_of(NULL);
    if (!c) return 0;
    pass_time(c);
    const int32_t stops = !pick(8);
    c->was_cancelled |= stops;
    return stops;
}

/* Turns keys, as key_element says. */
static int32_t move_keys(void *user, int32_t layer, float *keys, int32_t num_kv_heads, int64_t num_rows, int32_t k_dim,
                         int32_t delta) {
    (void)user, (void)layer;
    client *c = self_of(NULL);
    pass_time(c);
    for (float *key = keys; key < keys + num_kv_heads * num_rows * k_dim; key += k_dim)
        for (int i = delta & 3; i > 0; i--) {
            const float x = key[2];
            key[2] = -key[3];
            key[3] = x;
        }
    const int32_t stops = !pick(8);
    c->was_cancelled |= stops;
    return stops;
}

/* Threads that make a call while their client makes another one, by its number.  They lie on no stack: in the child of
 * fork(), threads may get the stacks of threads that are not there. */
static struct beside {
    client c;
    void (*call)(client *c);
    int runs;
    pthread_t thread;
} besides[MOST_CLIENTS];

static void *run_beside(void *context) {
    beside *b = context;
    self_of(&b->c);
    for (int i = pick(1 << pick(12)); i > 0; i--) sim_step();
    b->call(&b->c);
    return NULL;
}

beside *begin_beside(const client *c, void (*call)(client *c)) {
    beside *b = &besides[c->number];
    if (b->runs) return NULL;
    b->c = *c;
    b->call = call;
    b->runs = sim_thread_create(&b->thread, NULL, run_beside, b) == 0;
    return b->runs ? b : NULL;
}

void end_beside(beside *b) {
    if (!b) return;
    b->c.is_last = 1;
    sim_thread_join(b->thread, NULL);
    b->runs = 0;
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

float element(int tag, int layer, int is_value, int h, int d) {
    return d ? (float)(1 + (tag * 31 + layer * 17 + is_value * 11 + h * 5 + d) % 4093) : (float)tag;
}

/* An element of a key at a position.  If keys carry positions, elements 2 and 3 are turned by a right angle for
 * each position that the key has moved up since it was put. */
float key_element(const world *w, int tag, int layer, int h, int d, int position) {
    const int turns = w->layers[layer].rope.kind == KVC_ROPE_NONE ? 0 : (position - w->origins[tag]) & 3;
    if (d < 2 || d > 3 || turns == 0) return element(tag, layer, 0, h, d);
    const float x = element(tag, layer, 0, h, 2), y = element(tag, layer, 0, h, 3);
    const float turned[4][2] = {{x, y}, {-y, x}, {-x, -y}, {y, -x}};
    return turned[turns][d - 2];
}

/* Returns a tag for a new row. */
int new_tag(world *w, int position) {
    if (++w->last_tag == MOST_TAGS) sim_fail("too many rows: give fewer --calls");
    w->origins[w->last_tag] = (uint8_t)position;
    return w->last_tag;
}

void set_row(rows *r, int i, int tag, int layer) {
    for (int h = 0; h < HEADS; h++)
        for (int d = 0; d < ROW; d++) {
            r->k[h][i][d] = element(tag, layer, 0, h, d);
            r->v[h][i][d] = element(tag, layer, 1, h, d);
        }
}

/* Returns the tag of a row, all of which must be of that tag, and its key turned as at this position. */
int tag_of(const client *c, const float *k, const float *v, int64_t k_stride, int64_t v_stride, int layer,
           int position) {
    const int tag = (int)k[0], has_values = c->w->layers[layer].v_dim;
    int differ = tag < 1 || tag > c->w->last_tag;
    for (int h = 0; h < HEADS && !differ; h++)
        for (int d = 0; d < key_dim(c->w, layer); d++)
            differ += k[h * k_stride + d] != key_element(c->w, tag, layer, h, d, position) ||
                      (has_values && d < DIM && v[h * v_stride + d] != element(tag, layer, 1, h, d));
    if (differ) fail(c, "%d elements of a row with tag %d are another's, layer %d", differ, tag, layer);
    return tag;
}

/* Returns the tag of row n of a span. */
static int tag_in(const client *c, const kvc_span *span, int n, int layer) {
    const int64_t size = sizeof(float);
    return tag_of(c, (const float *)span->k + n * span->k_row_stride / size,
                  (const float *)span->v + n * span->v_row_stride / size, span->k_head_stride / size,
                  span->v_head_stride / size, layer, span->position + n * stride_of(c->w, layer) - span->delta);
}

static kvc_put_args put_of(const world *w, int layer, const rows *r, int first, int n) {
    return (kvc_put_args){.struct_size = sizeof(kvc_put_args),
                          .first = first,
                          .num_tokens = n,
                          .k = r->k,
                          .v = w->layers[layer].v_dim ? r->v : NULL,
                          .k_token_stride = sizeof **r->k,
                          .k_head_stride = sizeof *r->k,
                          .v_token_stride = sizeof **r->v,
                          .v_head_stride = sizeof *r->v};
}

kvc_rows_in in_of(const world *w, int layer, const rows *r) {
    return (kvc_rows_in){.struct_size = sizeof(kvc_rows_in),
                         .k = r->k,
                         .v = w->layers[layer].v_dim ? r->v : NULL,
                         .k_head_stride = sizeof *r->k,
                         .k_row_stride = sizeof **r->k,
                         .v_head_stride = sizeof *r->v,
                         .v_row_stride = sizeof **r->v};
}

kvc_rows_out out_of(const world *w, int layer, rows *r) {
    return (kvc_rows_out){.struct_size = sizeof(kvc_rows_out),
                          .k = r->k,
                          .v = w->layers[layer].v_dim ? r->v : NULL,
                          .k_head_stride = sizeof *r->k,
                          .k_row_stride = sizeof **r->k,
                          .v_head_stride = sizeof *r->v,
                          .v_row_stride = sizeof **r->v,
                          .positions = r->positions};
}

int is_own(const world *w, int l) { return !w->layers[l].share && w->layers[l].policy.kind != KVC_CROSS; }
static int is_cross(const world *w, int l) { return w->layers[l].policy.kind == KVC_CROSS; }
int source_of(const world *w, int l) { return w->layers[l].share ? w->layers[l].share - 1 : l; }

kvc_status read_all(const client *c, kvc_cache *cache, int s, int l, rows *r) {
    const int stride = stride_of(c->w, l);
    kvc_rows_out out = out_of(c->w, l, r);
    out.k = r->k[0][stride - 1];
    if (out.v) out.v = r->v[0][stride - 1];
    out.k_row_stride *= stride;
    out.v_row_stride *= stride;
    const kvc_status status = kvc_extract(cache, id_of(s), l, 0, MOST, &out);
    for (int i = MOST - 1; status == KVC_OK && i >= 0; i--) {
        r->positions[i] = has_row(c->w, l, i) ? r->positions[i / stride] : -1;
        if (r->positions[i] != -1 && r->positions[i] != i)
            fail(c, "layer %d has position %d in place of %d", l, r->positions[i], i);
    }
    return status;
}

static int same_policy(const world *w, int a, int b) {
    return memcmp(&w->layers[a].policy, &w->layers[b].policy, sizeof(kvc_policy)) == 0;
}

/* Checks that layers of one policy, of keys and values or of keys alone, have rows at the same positions. */
static void check_together(const client *c, int s, int (*is_there)[MOST]) {
    const world *w = c->w;
    for (int l = 1; l < w->num_layers; l++)
        for (int other = 0; other < l; other++) {
            if (!is_own(w, l) || !is_own(w, other) || !same_policy(w, l, other)) continue;
            for (int i = 0; i < MOST; i++)
                if (is_there[l][i] != is_there[other][i])
                    fail(c, "sequence %lld has a row at %d in one of the layers %d and %d alone", (long long)id_of(s),
                         i, other, l);
        }
}

/* Checks that the keys of a sequence have their own sketches. */
static void check_sketches(const client *c, kvc_cache *cache, int s) {
    const world *w = c->w;
    if (!w->has_sketches) return;
    sim_mutex_lock(&cache->mutex); /* kvc_lock() here would be the system's */
    const kvc_sequence *of = kvc_cache_find(cache, id_of(s));
    for (int l = 0; of && l < w->num_layers; l++) {
        const int at = w->layers[l].sketch_bits && !w->layers[l].share ? wrong_sketch_in(cache, of, l) : -1;
        if (at >= 0)
            fail(c, "the sketch of the key at %d of sequence %lld is not its own, layer %d", at, (long long)id_of(s),
                 l);
    }
    sim_mutex_unlock(&cache->mutex);
}

/* Compares what a sequence of a cache holds with what it should: rows that may expire may lack. */
void check_sequence(client *c, kvc_cache *cache, int s) {
    rows r;
    int is_there[MOST_LAYERS][MOST] = {{0}};
    const world *w = c->w;
    const sequence *of = &w->sequences[s];
    const uint64_t handovers = sim_handovers();
    check_sketches(c, cache, s);
    for (int l = 0; l < w->num_layers; l++) {
        if (!is_own(w, l)) continue;
        const uint64_t faults = sim_faults();
        const kvc_status status = read_all(c, cache, s, l, &r);
        if (status == KVC_ERR_NOMEM && sim_faults() != faults) return;
        if (status != KVC_OK) fail(c, "kvc_extract of %lld: %s", (long long)id_of(s), kvc_strerror(status));
        for (int i = 0; i < MOST; i++) {
            const int tag = r.positions[i] < 0 ? 0 : tag_of(c, r.k[0][i], r.v[0][i], MOST * ROW, MOST * ROW, l, i);
            is_there[l][i] = tag != 0;
            if (of->is_spoilt || tag == of->tags[l][i]) continue;
            if (tag || w->layers[l].policy.kind == KVC_FULL)
                fail(c, "sequence %lld has tag %d at %d, not %d, layer %d", (long long)id_of(s), tag, i, of->tags[l][i],
                     l);
        }
    }
    if (sim_handovers() == handovers) check_together(c, s, is_there);
}

/* Reads a sequence that others may change: each row is whole. */
static void check_intact(client *c, kvc_cache *cache, int s) {
    rows r;
    const int l = source_of(c->w, pick(c->w->num_layers));
    if (is_cross(c->w, l) || read_all(c, cache, s, l, &r) != KVC_OK) return;
    for (int i = 0; i < MOST; i++)
        if (r.positions[i] >= 0) tag_of(c, r.k[0][i], r.v[0][i], MOST * ROW, MOST * ROW, l, i);
}

/* ---- sequences of a client --------------------------------------------------------------------------------------- */

/* Takes a sequence that nobody has; -1: a few tries found none. */
int take(client *c) {
    for (int i = 0; i < 4; i++) {
        const int s = pick(IDS);
        if (c->w->sequences[s].is_taken) continue;
        c->w->sequences[s].is_taken = 1;
        return s;
    }
    return -1;
}

void let_go(client *c, int s) {
    if (s < 0) return;
    check_sequence(c, c->w->cache, s);
    note_use(c, s);
    c->w->sequences[s].is_taken = 0;
}

int end_of(const sequence *s) {
    int end = 0;
    for (int l = 0; l < MOST_LAYERS; l++)
        for (int i = end; i < MOST; i++)
            if (s->tags[l][i]) end = i + 1;
    return end;
}

void forget(sequence *s) {
    memset(s->tags, 0, sizeof s->tags);
    s->num_cross = s->num_prompt = 0;
    s->barred = 0;
}

int clear_one(client *c, int s) {
    sequence *of = &c->w->sequences[s];
    const int meddlings = of->meddlers ? -1 : of->meddlings;
    begin_call(c, "kvc_clear_sequence");
    if (!ended(c, kvc_clear_sequence(c->w->cache, id_of(s)), 0)) return 0;
    forget(of);
    if (of->meddlings == meddlings) of->is_spoilt = 0;
    return 1;
}

/* Returns a position, usually one where no row of a layer with a stride is cut. */
static int usually_whole(const world *w, int position) {
    return pick(6) ? (position + w->unit - 1) / w->unit * w->unit : position;
}

/* Whether an edit cuts rows in two: it removes or moves positions [begin, end), and moves tokens by delta. */
static int cuts(const client *c, int s, int begin, int end, int delta) {
    const int next = kvc_next_position(c->w->cache, id_of(s)), unit = c->w->unit;
    return begin < next && (begin % unit || delta % unit || (end < next && end % unit));
}

/* Returns whether an edit succeeded.  It must fail if it cuts rows in two. */
static int edited(client *c, kvc_status status, int may, int is_cutting) {
    if (status == KVC_OK && is_cutting && !c->w->is_meddled) fail(c, "cuts a row in two");
    return ended(c, status, may | (is_cutting ? MAY_BE_UNSUPPORTED : 0));
}

static void remove_range(client *c, int s, int begin, int end, int shifts) {
    sequence *of = &c->w->sequences[s];
    begin_call(c, "kvc_remove");
    const int is_cutting = begin < end && end < kvc_next_position(c->w->cache, id_of(s)) && cuts(c, s, begin, end, 0);
    if (!edited(c, kvc_remove(c->w->cache, id_of(s), begin, end, shifts), MAY_BE_GONE | MAY_BE_FULL, is_cutting))
        return;
    for (int l = 0; l < MOST_LAYERS; l++)
        for (int i = begin; i < MOST; i++) {
            const int from = shifts ? i + end - begin : i < end ? MOST : i;
            of->tags[l][i] = from < MOST ? of->tags[l][from] : 0;
        }
}

/* ---- forward passes ---------------------------------------------------------------------------------------------- */

/* Whether all tokens of a pass are stored. */
static int is_stored(const pass *p) {
    for (int t = 0; t < p->num_tokens; t++)
        if (p->unstored[t]) return 0;
    return 1;
}

/* Puts rows, now and then while it attends; returns whether it could. */
static int put_rows_as(client *c, pass *p, int layer, int first, int n, int may_attend) {
    rows r;
    int num = 0;
    for (int t = first; t < first + n; t++)
        if (has_row(c->w, layer, p->stands[t])) set_row(&r, num++, p->tags[t], layer);
    kvc_put_args args = put_of(c->w, layer, &r, first, n);
    if (!num && pick(2)) args.k = args.v = NULL;
    for (;;) {
        if (!num && !pick(3)) break; /* no token has a row */
        if (may_attend && !pick(6) && is_stored(p) && c->w->layers[layer].v_dim) {
            if (put_and_attend(c, p, layer, first, n, &args)) break;
        } else {
            begin_call(c, "kvc_put");
            if (ended(c, kvc_put(p->batch, layer, &args), MAY_CANCEL | MAY_BE_FULL)) break;
        }
        if (!pick(4)) return 0;
    }
    p->num_put[layer] = first + n;
    return 1;
}

static int put_rows(client *c, pass *p, int layer, int first, int n) { return put_rows_as(c, p, layer, first, n, 1); }

static int put_by_call(client *c, pass *p, int layer, int first, int n) {
    return put_rows_as(c, p, layer, first, n, 0);
}

/* Writes rows where the core shows. */
static int write_rows(client *c, pass *p, int layer, int first, int n) {
    kvc_span span;
    for (int end = first + n, next; first < end; first = next) {
        next = first + 1;
        if (!has_row(c->w, layer, p->stands[first])) continue;
        begin_call(c, "kvc_slots");
        if (!ended(c, kvc_slots(p->batch, layer, first, &span, sizeof span, NULL), MAY_BE_FULL)) return 0;
        for (int t = first, i = 0; t < end && i < span.num_rows; next = ++t) {
            if (!has_row(c->w, layer, p->stands[t])) continue;
            for (int h = 0; h < HEADS; h++)
                for (int d = 0; d < key_dim(c->w, layer); d++) {
                    char *k = (char *)span.k + h * span.k_head_stride + i * span.k_row_stride;
                    ((float *)(void *)k)[d] = element(p->tags[t], layer, 0, h, d);
                    if (!span.v || d >= DIM) continue;
                    char *v = (char *)span.v + h * span.v_head_stride + i * span.v_row_stride;
                    ((float *)(void *)v)[d] = element(p->tags[t], layer, 1, h, d);
                }
            i++;
        }
        begin_call(c, "kvc_written");
        if (!ended(c, kvc_written(p->batch, layer, first, next - first), MAY_BE_FULL)) return 0;
        p->num_put[layer] = next;
    }
    p->num_put[layer] = first;
    return 1;
}

static int put_cross(client *c, const pass *p, int layer, int i) {
    rows r;
    const int n = 1 + pick(CROSS), tag = p->tags[p->first[i]];
    for (int j = 0; j < n; j++) set_row(&r, j, tag, layer);
    kvc_put_args args = put_of(c->w, layer, &r, 0, n);
    args.seq_id = id_of(p->sequences[i]);
    begin_call(c, "kvc_put of cross-attention");
    return ended(c, kvc_put(p->batch, layer, &args), MAY_CANCEL | MAY_BE_FULL);
}

static void let_go_of_hold(client *c) {
    kvc_hold *hold = c->w->holds[c->number];
    c->w->holds[c->number] = NULL;
    kvc_hold_free(hold);
    c->w->num_holds--;
}

/* Reads the rows of a sequence of the batch. */
static void read_batch(client *c, const pass *p, int layer, int i) {
    kvc_span spans[MOST];
    kvc_hold *hold = NULL;
    int64_t num = 0;
    const int s = p->sequences[i];
    c->call = "kvc_batch_spans";
    c->faults = sim_faults();
    c->handovers = UINT64_MAX;
    c->w->num_holds++;
    if (!ended(c, kvc_batch_spans(p->batch, id_of(s), layer, spans, sizeof *spans, MOST, &num, &hold), MAY_BE_GONE))
        num = 0;
    c->w->holds[c->number] = hold;
    for (int64_t j = 0; j < num; j++)
        for (int n = 0; n < spans[j].num_rows; n++) tag_in(c, &spans[j], n, source_of(c->w, layer));
    sim_step();
    let_go_of_hold(c);
}

/* Puts the rows of a layer of its own, and attends on the way: to rows that were not put yet, too. */
static int put_layer(client *c, pass *p, int l) {
    const int cut = pick(p->num_tokens + 1), rest = p->num_tokens - cut;
    if (cut && !put_rows(c, p, l, 0, cut)) return 0;
    const int has_begun = !pick(c->w->theme == PASSES ? 2 : 4) && begin_tasks(c, p, l);
    if (rest && !(pick(3) ? put_rows : write_rows)(c, p, l, cut, rest)) return 0; /* the plan ends with the batch */
    if (has_begun) end_tasks(c);
    return 1;
}

/* Puts rows in all layers; returns whether it could. */
static int fill(client *c, pass *p) {
    world *w = c->w;
    for (int l = 0; l < w->num_layers; l++) {
        if (is_cross(w, l)) {
            for (int i = 0; i < p->num_sequences; i++)
                if (!pick(3) && !put_cross(c, p, l, i)) return 0;
            continue;
        }
        if (!w->layers[l].share && !put_layer(c, p, l)) return 0;
        const int i = pick(p->num_sequences);
        if (p->select || !pick(3)) attend(c, p, l);
        if (!pick(6) && !p->unstored[p->first[i]]) read_batch(c, p, l, i);
        if (!pick(6)) check_dense(c, p, l);
    }
    return 1;
}

/* Lists n tokens behind a sequence.  In a tree, several may follow the same token.  If tokens may select rows, the rows
 * of some, and of those behind them, follow from no tokens. */
static void add_tokens(client *c, pass *p, int s, int n) {
    world *w = c->w;
    const int at = kvc_next_position(w->cache, id_of(s)), is_unstored = !pick(5), first = p->num_tokens;
    const int last = exact_end(w, &w->sequences[s]) < at ? -1 : at ? w->sequences[s].tags[w->whole][at - 1] : 0;
    int *selecting = &p->selecting[p->num_sequences];
    *selecting = !p->select ? first + n : n < 9 && pick(2) ? first : first + n - pick(n < 9 ? n + 1 : 9);
    for (int t = first; t < first + n; t++, p->num_tokens++) {
        const int back = p->is_tree ? 1 + pick(3) : 1, parent = t - back < first ? -1 : t - back;
        p->parents[t] = parent;
        p->positions[t] = parent < 0 ? at : p->positions[parent] + 1;
        p->tags[t] = next_tag(c, s, p->positions[t], t >= *selecting ? -1 : parent < 0 ? last : p->tags[parent]);
        note_computed(&p->tags[t], 1);
        p->unstored[t] = (uint8_t)is_unstored;
    }
}

/* Takes sequences and lists tokens behind theirs. */
static void make_pass(client *c, pass *p) {
    world *w = c->w;
    *p = (pass){.is_tree = !pick(5), .select = w->has_sketches && pick(4) ? 1 + pick(pick(2) ? 4 : 16) : 0};
    for (int i = 1 + pick(MOST_FED); i > 0; i--) {
        const int s = take(c);
        if (s < 0) continue;
        const int left = MOST_TOKENS - p->num_tokens,
                  wanted = 1 + pick(w->has_sketches && pick(4) ? MOST_TOKENS : FEED);
        const int n = wanted < left ? wanted : left;
        if (!n) {
            let_go(c, s);
            continue;
        }
        if (kvc_next_position(w->cache, id_of(s)) + n > (w->has_sketches ? MOST : USUAL_MOST)) {
            clear_one(c, s);
            let_go(c, s);
            continue;
        }
        if (p->is_tree && w->sequences[s].prefix) { /* its prompt is fed in order */
            let_go(c, s);
            continue;
        }
        if (p->select && !pick(6) && end_of(&w->sequences[s]) > 8) { /* rows that moved are selected, too */
            const int at = usually_whole(w, pick(end_of(&w->sequences[s]) - 3));
            remove_range(c, s, at, usually_whole(w, at + 1 + pick(3)), 1);
        }
        add_tokens(c, p, s, n);
        p->sequences[p->num_sequences++] = s;
        p->first[p->num_sequences] = p->num_tokens;
    }
}

/* A call that finds no room finds none either once the blocks that can be evicted are dropped. */
static void check_full(client *c, const kvc_begin_args *args) {
    kvc_batch *batch;
    if (!is_alone(c) || c->w->takes_rare_ways || pick(4)) return;
    evict_blocks(c);
    if (kvc_begin_with(c->w->cache, args, &batch) != KVC_OK) return;
    kvc_abort(batch);
    if (is_alone(c)) fail(c, "found no room, and does once blocks are dropped");
}

/* Checks what a batch that has begun leaves to others, and takes. */
static void check_limits(client *c) {
    const int64_t most = c->w->config.max_bytes, nbytes = kvc_nbytes(c->w->cache);
    if (most && nbytes > most && !has_quota(c->w) && is_alone(c))
        fail(c, "passes max_bytes by %lld", (long long)(nbytes - most));
    check_quotas(c);
}

/* Call once a batch has begun.  Checks that no client which called earlier still waits for a batch: calls wait in order
 * of arrival. */
static void check_turn(const client *c, int64_t called) {
    for (int i = 0; i < MOST_CLIENTS; i++) {
        const int64_t since = i == c->number ? 0 : sim_inside_since(clients[i].thread);
        if (clients[i].w && since && since < called) fail(c, "begins a batch before client %d, which waits for one", i);
    }
}

/* Begins a batch, for which it waits a while or not; returns whether it could. */
static int begin_with(client *c, kvc_begin_args *args, kvc_batch **batch, int may) {
    static const int64_t timeouts[] = {0, -1, 1, 50};
    args->timeout_ms = timeouts[pick(4)];
    begin_call(c, args->replaced ? "kvc_begin_with, to restore" : "kvc_begin_with");
    const int64_t called = sim_now();
    const kvc_status status = kvc_begin_with(c->w->cache, args, batch);
    if (status == KVC_OK) check_turn(c, called);
    const int has_begun = ended(c, status, may | MAY_BE_FULL | MAY_CANCEL | (args->timeout_ms >= 0 ? MAY_BE_BUSY : 0));
    if (status == KVC_ERR_FULL) check_full(c, args);
    if (has_begun) check_limits(c);
    return has_begun;
}

static int begin(client *c, pass *p) {
    int64_t ids[MOST_TOKENS];
    for (int i = 0; i < p->num_sequences; i++)
        for (int t = p->first[i]; t < p->first[i + 1]; t++) ids[t] = id_of(p->sequences[i]);
    kvc_begin_args args = {
        .struct_size = sizeof args, .num_tokens = p->num_tokens, .seq_ids = ids, .unstored = p->unstored};
    if (p->is_tree) args.positions = p->positions, args.parents = p->parents;
    const int has_begun = begin_with(c, &args, &p->batch, MAY_BE_GONE);
    for (int t = 0; has_begun && t < p->num_tokens; t++) {
        p->stands[t] = kvc_batch_positions(p->batch)[t];
        if (c->w->is_meddled) c->w->origins[p->tags[t]] = (uint8_t)p->stands[t];
    }
    return has_begun;
}

/* Notes what became of the tokens that were kept. */
static void note_kept(client *c, const pass *p, const uint8_t *kept) {
    for (int i = 0; i < p->num_sequences; i++) {
        sequence *s = &c->w->sequences[p->sequences[i]];
        for (int t = p->first[i]; t < p->first[i + 1]; t++)
            for (int l = 0; l < c->w->num_layers && kept[t]; l++)
                if (is_own(c->w, l) && has_row(c->w, l, p->positions[t])) s->tags[l][p->positions[t]] = p->tags[t];
        int t = p->first[i];
        while (t < p->first[i + 1] && kept[t]) t++;
        if (t < p->first[i + 1] && p->positions[t] < s->num_prompt) s->num_prompt = p->positions[t];
        if (p->unstored[p->first[i]]) forget(s);
    }
}

/* Returns the lowest position of a kept token of a sequence that may have selected rows.  surely: that has selected
 * rows. Returns INT32_MAX if no token has. */
static int32_t first_selecting(const pass *p, int i, const uint8_t *kept, int surely) {
    int32_t first = INT32_MAX;
    for (int t = p->selecting[i]; t < p->first[i + 1]; t++)
        if (kept[t] && (!surely || p->has_selected[t]) && p->positions[t] < first) first = p->positions[t];
    return first;
}

/* Before a commit: tells the cache of tokens whose rows follow from no tokens, though they selected none. */
static void mark_inexact(client *c, const pass *p, const uint8_t *kept) {
    for (int i = 0; i < p->num_sequences; i++) {
        const int32_t first = first_selecting(p, i, kept, 0);
        if (first < first_selecting(p, i, kept, 1) && kvc_mark_inexact(c->w->cache, id_of(p->sequences[i]), first))
            fail(c, "cannot mark rows");
    }
}

/* Checks that tokens which selected rows, or were marked, do not count as exact. */
static void check_inexact(client *c, const pass *p, const uint8_t *kept) {
    for (int i = 0; i < p->num_sequences && !c->w->is_meddled; i++) {
        const int32_t exact = kvc_exact_to(c->w->cache, id_of(p->sequences[i])), first = first_selecting(p, i, kept, 0);
        if (first < exact && first < INT32_MAX && !p->unstored[p->first[i]])
            fail(c, "sequence %lld is exact to %d, though not from %d on", (long long)id_of(p->sequences[i]), exact,
                 first);
    }
}

/* Notes that a token is about to be part of its sequence. */
static void note_token(const client *c, const pass *p, int t) {
    int i = 0;
    while (t >= p->first[i + 1]) i++;
    if (!p->unstored[t]) note_commit(c, p->sequences[i], p->tags[t]);
}

static void end_pass(client *c, const pass *p) {
    uint8_t kept[MOST_TOKENS] = {0};
    int32_t indices[MOST_TOKENS], num = 0;
    const int is_whole = pick(4) != 0;
    for (int i = 0; i < p->num_sequences; i++) {
        const int end = is_whole ? p->first[i + 1] : p->first[i] + pick(p->first[i + 1] - p->first[i] + 1);
        if (p->is_tree) /* the last one and its ancestors */
            for (int t = end > p->first[i] ? end - 1 : -1; t >= 0; t = p->parents[t]) kept[t] = 1;
        else
            memset(kept + p->first[i], 1, (size_t)(end - p->first[i]));
        for (int t = p->first[i]; t < end; t++)
            if (kept[t]) indices[num++] = t;
    }
    mark_inexact(c, p, kept);
    c->w->batch = NULL;
    c->call = "kvc_commit"; /* it cannot fail */
    const int before = begin_use(c);
    for (int t = 0; t < num; t++) note_token(c, p, indices[t]);
    const kvc_status status =
        num == p->num_tokens && pick(2) ? kvc_commit(p->batch) : kvc_commit_kept(p->batch, indices, num);
    end_use(c, before);
    if (status != KVC_OK) fail(c, "answers \"%s\"", kvc_strerror(status));
    if (traces)
        printf("%llu client %d: %d of %d tokens committed\n", (unsigned long long)sim_steps(), c->number, num,
               p->num_tokens);
    note_kept(c, p, kept);
    check_inexact(c, p, kept);
}

/* The state of the cache before a batch. */
typedef struct beginning {
    picture picture;
    uint64_t faults;
    int calls_aside;
    int64_t room;
} beginning;

static beginning note_beginning(client *c, int64_t seq_id) {
    beginning was = {.picture = take_picture(c->w, pick(c->w->num_layers)), .calls_aside = c->calls_aside};
    was.faults = sim_faults();
    if (pick(2) && !c->w->takes_rare_ways) kvc_room(c->w->cache, seq_id, &was.room);
    return was;
}

/* Aborts a batch: nothing has changed, except that rows have moved, expired, or were evicted to make room. */
static void abort_pass(client *c, const pass *p, const beginning *was) {
    int64_t room = 0;
    const uint64_t faults = sim_faults();
    c->call = "kvc_abort";
    c->w->batch = NULL;
    kvc_abort(p->batch);
    for (int i = 0; i < p->num_sequences; i++) { /* an empty sequence has no forgotten rows either */
        sequence *of = &c->w->sequences[p->sequences[i]];
        if (!end_of(of)) of->barred = 0;
    }
    const int is_trimmed = sim_faults() == faults; /* without memory, a list of runs keeps its longer array */
    if (traces) printf("%llu client %d: aborted\n", (unsigned long long)sim_steps(), c->number);
    const picture *before = &was->picture, now = take_picture(c->w, before->layer);
    const kvc_stats *x = &before->stats, *y = &now.stats;
    if (sim_handovers() != before->handovers || c->calls_aside != was->calls_aside) return;
    if (x->rows_moved + x->rows_expired != y->rows_moved + y->rows_expired) return;
    /* Without an allocator, rows of old blocks count once they are written. */
    if (c->w->has_allocator && is_trimmed && now.nbytes > before->nbytes)
        fail(c, "leaves %lld bytes, of %lld before the batch", (long long)now.nbytes, (long long)before->nbytes);
    if (x->rows_evicted == y->rows_evicted && x->blocks_returned == y->blocks_returned &&
        now.contents != before->contents)
        fail(c, "leaves other sequences, or other blocks of layer %d, than before the batch", before->layer);
    const kvc_status status = kvc_room(c->w->cache, id_of(p->sequences[0]), &room);
    if (sim_handovers() != before->handovers || sim_faults() != was->faults) return;
    if (status == KVC_OK && room < was->room)
        fail(c, "leaves room for %lld tokens, of %lld before the batch", (long long)room, (long long)was->room);
}

static void feed(client *c) {
    pass p;
    make_pass(c, &p);
    if (!p.num_sequences) return;
    const beginning was = note_beginning(c, id_of(p.sequences[0]));
    if (begin(c, &p)) {
        c->w->pass = &p;
        c->w->batch = p.batch;
        const int is_filled = fill(c, &p);
        if (!pick(3)) c->calls_aside++, call_prefix(c); /* others may make it, too */
        if (is_filled && pick(c->w->theme == PROMPTS ? 3 : 6))
            end_pass(c, &p);
        else
            abort_pass(c, &p, &was);
    } else if (pick(2)) {
        clear_one(c, p.sequences[pick(p.num_sequences)]); /* so that others have room */
    }
    for (int i = 0; i < p.num_sequences; i++) let_go(c, p.sequences[i]);
}

/* ---- edits ------------------------------------------------------------------------------------------------------- */

static void remove_some(client *c, int s) {
    const int last = end_of(&c->w->sequences[s]), begin = usually_whole(c->w, pick(last + 1));
    const int end = begin < last ? begin + pick(last - begin + 1) : begin;
    remove_range(c, s, begin, usually_whole(c->w, end), pick(2));
}

static int cut_to(client *c, int s, int length) {
    sequence *of = &c->w->sequences[s];
    begin_call(c, "kvc_truncate");
    if (!ended(c, kvc_truncate(c->w->cache, id_of(s), length), MAY_BE_GONE)) return 0;
    if (length < end_of(of) && length < of->num_prompt) of->num_prompt = length;
    for (int l = 0; l < MOST_LAYERS; l++) memset(of->tags[l] + length, 0, (size_t)(MOST - length) * sizeof(int));
    return 1;
}

static void cut(client *c, int s) { cut_to(c, s, pick(end_of(&c->w->sequences[s]) + 1)); }

static void shift_some(client *c, int s) {
    sequence *of = &c->w->sequences[s];
    const int end = end_of(of), begin = usually_whole(c->w, pick(end + 1)), most = MOST - end, any = pick(most + 1);
    const int delta = pick(6) ? any / c->w->unit * c->w->unit : any;
    begin_call(c, "kvc_shift");
    const int is_cutting = delta && cuts(c, s, begin, KVC_END, delta);
    if (!edited(c, kvc_shift(c->w->cache, id_of(s), begin, KVC_END, delta), MAY_BE_FULL, is_cutting)) return;
    for (int l = 0; l < MOST_LAYERS; l++)
        for (int i = MOST - 1; i >= begin; i--) of->tags[l][i] = i - delta >= begin ? of->tags[l][i - delta] : 0;
}

/* Keeps some positions of a sequence: in places every second one, or by chance. */
static void keep_some(client *c, int s) {
    sequence *of = &c->w->sequences[s];
    const int end = end_of(of), share = 1 + pick(4);
    int32_t kept[MOST];
    int num = 0, is_kept[MOST] = {0};
    for (int i = 0; i < end; i++)
        if (share == 1 ? i % 2 : pick(share)) is_kept[kept[num++] = i] = 1;
    begin_call(c, "kvc_keep_positions");
    if (!ended(c, kvc_keep_positions(c->w->cache, id_of(s), kept, num), MAY_BE_GONE)) return;
    for (int l = 0; l < MOST_LAYERS; l++)
        for (int i = 0; i < MOST; i++)
            if (!is_kept[i]) of->tags[l][i] = 0;
}

/* Replaces a few rows of a sequence. */
static void inject(client *c, int s) {
    world *w = c->w;
    rows r;
    sequence *of = &w->sequences[s];
    const int at = pick(end_of(of) + 1), n = 1 + pick(4), l = source_of(w, pick(w->num_layers));
    int tags[4], num = 0;
    if (at + n > MOST || is_cross(w, l)) return;
    for (int i = 0; i < n; i++)
        if (has_row(w, l, at + i)) set_row(&r, num++, tags[i] = new_tag(w, at + i), l);
    const kvc_rows_in in = in_of(w, l, &r);
    begin_call(c, "kvc_inject");
    if (!ended(c, kvc_inject(w->cache, id_of(s), l, at, at + n, &in), MAY_BE_FULL | MAY_INDEX)) return;
    for (int i = 0; i < n; i++)
        if (has_row(w, l, at + i)) of->tags[l][at + i] = tags[i];
}

static void copy(client *c, int s) {
    world *w = c->w;
    const int to = take(c);
    if (to < 0) return;
    sequence *from = &w->sequences[s], *into = &w->sequences[to];
    const int length = pick(2) ? KVC_END : 1 + pick(MOST), is_empty = !end_of(from);
    begin_call(c, length == KVC_END ? "kvc_fork" : "kvc_copy_prefix");
    const kvc_status status = length == KVC_END ? kvc_fork(w->cache, id_of(s), id_of(to))
                                                : kvc_copy_prefix(w->cache, id_of(s), id_of(to), length);
    if (ended(c, status, MAY_BE_GONE | (is_empty ? MAY_BE_INVALID : 0))) {
        memcpy(into->tags, from->tags, sizeof into->tags);
        into->is_spoilt |= from->is_spoilt;
        into->barred |= from->barred;
        for (int l = 0; l < MOST_LAYERS; l++)
            for (int i = length; i < MOST; i++) into->tags[l][i] = 0;
    }
    let_go(c, to);
}

static void share(client *c, int s) {
    world *w = c->w;
    const int to = take(c);
    if (to < 0) return;
    sequence *from = &w->sequences[s], *into = &w->sequences[to];
    const int held = end_of(into), begin = usually_whole(w, held), is_empty = !end_of(from);
    const int end = pick(2) ? MOST : begin + pick(MOST - begin + 1);
    begin_call(c, "kvc_share");
    const int is_cutting = cuts(c, s, begin, KVC_END, 0);
    const kvc_status status = kvc_share(w->cache, id_of(s), id_of(to), begin, end < MOST ? end : KVC_END);
    into->is_spoilt |= from->is_spoilt;
    into->barred |= from->barred;
    if (edited(c, status, (is_empty && !held ? MAY_BE_INVALID : 0) | MAY_BE_GONE, is_cutting))
        for (int l = 0; l < MOST_LAYERS; l++)
            memcpy(into->tags[l] + begin, from->tags[l] + begin, (size_t)(end - begin) * sizeof(int));
    let_go(c, to);
}

/* Asks for the weights of a query that finds all keys alike: the rows that it sees weigh the same, together 1. */
static void weigh(client *c, int s) {
    world *w = c->w;
    const int l = pick(w->num_layers);
    float q[HEADS * ROW] = {0}, weights[HEADS][MOST];
    const int64_t num = kvc_seq_len(w->cache, id_of(s), l);
    if (!w->layers[l].v_dim || w->layers[l].policy.kind == KVC_NONE || num < 1 || num > MOST) return;
    const kvc_weights_args args = {.struct_size = sizeof args,
                                   .q = q,
                                   .weights = weights[0],
                                   .q_token_stride = sizeof q,
                                   .q_head_stride = sizeof *q * ROW,
                                   .weights_head_stride = sizeof *weights,
                                   .num_rows = num,
                                   .num_queries = 1,
                                   .num_heads = HEADS,
                                   .reduction = pick(2),
                                   .scale = 1};
    begin_call(c, "kvc_weights");
    if (!ended(c, kvc_weights(w->cache, id_of(s), l, &args),
               MAY_CANCEL | (w->expires ? MAY_BE_INVALID | MAY_BE_GONE : 0)))
        return;
    for (int h = 0; h < HEADS; h++) {
        float sum = 0, largest = 0;
        for (int i = 0; i < num; i++) sum += weights[h][i], largest = fmaxf(largest, weights[h][i]);
        for (int i = 0; i < num; i++)
            if (weights[h][i] != 0 && weights[h][i] != largest) fail(c, "weighs rows differently, layer %d", l);
        if (sum != 0 && fabsf(sum - 1) > 1e-4f) fail(c, "weights make %g, layer %d", (double)sum, l);
    }
}

static void edit(client *c) {
    static void (*const edits[])(client *c, int s) = {remove_some, remove_some, keep_some, cut,  shift_some, shift_some,
                                                      divide,      inject,      copy,      copy, share,      weigh};
    const int s = take(c);
    if (s < 0) return;
    edits[pick(sizeof edits / sizeof *edits)](c, s);
    let_go(c, s);
}

/* Moves the tokens of a sequence, and reads them again and again: what settles keys must wait for that. */
static void read_moved(client *c) {
    const int s = take(c);
    if (s < 0) return;
    for (int i = 0; i < 3; i++) {
        shift_some(c, s);
        check_sequence(c, c->w->cache, s);
    }
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
    switch (pick(9)) {
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
    case 7: {
        const int32_t kept[] = {begin, begin + 2, begin + 3};
        begin_call(c, "kvc_keep_positions of another's");
        ended(c, kvc_keep_positions(w->cache, id_of(s), kept, pick(4)), 0);
        break;
    }
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
        const int64_t called = sim_now();
        if (!ended(c, kvc_begin(w->cache, 1, NULL, &id, NULL, &batch), 0)) break;
        check_turn(c, called);
        w->pass = NULL;
        w->batch = batch;
        for (int i = 0; i < 20; i++) sim_step();
        w->batch = NULL;
        kvc_abort(batch);
        break;
    }
    case 6: {
        rows r;
        const int l = source_of(w, pick(w->num_layers)), n = 1 + pick(MOST - begin);
        for (int i = 0, num = 0; i < n; i++)
            if (has_row(w, l, begin + i)) set_row(&r, num++, new_tag(w, begin + i), l);
        kvc_rows_in in = in_of(w, l, &r);
        in.skip_missing = 1;
        begin_call(c, "kvc_inject into another's");
        if (!is_cross(w, l)) ended(c, kvc_inject(w->cache, id_of(s), l, begin, begin + n, &in), 0);
        break;
    }
    default:
        begin_call(c, "kvc_reserve of another's");
        ended(c, kvc_reserve(w->cache, id_of(s), 1 + pick(12)), MAY_BE_HELD);
    }
    of->meddlers--;
}

static void clear_some(client *c) {
    const int s = take(c);
    if (s < 0) return;
    clear_one(c, s);
    let_go(c, s);
}

/* ---- layers that are restored ------------------------------------------------------------------------------------ */

/* A batch that restores layers of one sequence. */
typedef struct restoration {
    int s, num;
    uint8_t layers[MOST_LAYERS];
    int32_t positions[MOST_TOKENS];
    int tags[MOST_TOKENS]; /* by token */
    kvc_batch *batch;
} restoration;

/* Whether layers of two policies are of one group. */
static int is_same(const kvc_policy *a, const kvc_policy *b) {
    const int32_t keeps = a->kind == KVC_SLIDING && !a->resume_window ? a->window : a->resume_window,
                  other_keeps = b->kind == KVC_SLIDING && !b->resume_window ? b->window : b->resume_window;
    if (a->kind != b->kind) return 0;
    if (a->kind == KVC_SLIDING)
        return a->window == b->window && a->num_sink_tokens == b->num_sink_tokens && keeps == other_keeps;
    if (a->kind == KVC_CHUNKED) return a->attention_chunk_size == b->attention_chunk_size && keeps == other_keeps;
    return a->kind != KVC_CROSS && a->stride == b->stride;
}

/* Chooses layers, all layers of a policy together; returns whether it chose any. */
static int choose_layers(const world *w, uint8_t *layers) {
    int any = 0;
    for (int l = 0; l < w->num_layers; l++) {
        layers[l] = (uint8_t)pick(2);
        for (int i = 0; i < l; i++)
            if (is_same(&w->layers[i].policy, &w->layers[l].policy)) layers[l] = layers[i];
        any |= layers[l] && is_own(w, l);
    }
    return any;
}

/* Lists the positions that a batch restores, in any order: those below the end of the sequence, or of an earlier one.
 */
static int list_restored(client *c, restoration *r) {
    const int end = end_of(&c->w->sequences[r->s]), to = end ? 1 + pick(end) : 1 + pick(FEED);
    for (int at = to - 1 - pick(MOST_TOKENS - 1), holes = !pick(4); at < to; at++)
        if (at >= 0 && !(holes && !pick(3))) {
            const int i = pick(3) ? r->num : pick(r->num + 1);
            r->positions[r->num++] = r->positions[i];
            r->positions[i] = at;
        }
    for (int t = 0; t < r->num; t++) r->tags[t] = new_tag(c->w, r->positions[t]);
    return to;
}

/* Puts all tokens in all restored layers, some of them by the pointers that the core shows. */
static int put_restored(client *c, const restoration *r) {
    const world *w = c->w;
    pass p = {.batch = r->batch, .num_tokens = r->num, .num_sequences = 1, .sequences = {r->s}, .first = {0, r->num}};
    memcpy(p.tags, r->tags, sizeof r->tags);
    memcpy(p.stands, r->positions, sizeof r->positions);
    for (int l = 0; l < w->num_layers; l++) {
        const int cut = pick(r->num + 1);
        if (!r->layers[l] || !is_own(w, l)) continue;
        if (cut && !put_by_call(c, &p, l, 0, cut)) return 0;
        if (cut < r->num && !(pick(2) ? put_by_call : write_rows)(c, &p, l, cut, r->num - cut)) return 0;
    }
    return 1;
}

/* Notes that tokens are all that the sequence holds in these layers. */
static void note_restored(client *c, const restoration *r, const int32_t *kept, int num) {
    sequence *of = &c->w->sequences[r->s];
    for (int l = 0; num && l < c->w->num_layers; l++) {
        if (!r->layers[l] || !is_own(c->w, l)) continue;
        memset(of->tags[l], 0, sizeof of->tags[l]);
        for (int i = 0; i < num; i++)
            if (has_row(c->w, l, r->positions[kept[i]])) of->tags[l][r->positions[kept[i]]] = r->tags[kept[i]];
    }
    c->w->expires = 1; /* what a layer lacks is gone */
}

/* Whether all layers hold what a query at a position sees: rows of windows that were not restored may have expired. */
static int can_continue(const world *w, const restoration *r, int at) {
    const sequence *of = &w->sequences[r->s];
    for (int i = 0; i < at; i++)
        for (int l = 0; l < w->num_layers; l++) {
            if (!is_own(w, l) || !has_row(w, l, i) || !sees(&w->layers[l].policy, at, i)) continue;
            if (!of->tags[l][i] || (!r->layers[l] && w->layers[l].policy.kind != KVC_FULL)) return 0;
        }
    return 1;
}

/* Takes the sequence back to the position behind the restored ones, and begins a batch there, which finds all rows. */
static void go_on_behind(client *c, const restoration *r, int at) {
    const int64_t id = id_of(r->s);
    kvc_batch *batch;
    if (!cut_to(c, r->s, at) || c->w->is_meddled || !can_continue(c->w, r, at)) return;
    const kvc_begin_args args = {.struct_size = sizeof args, .num_tokens = 1, .seq_ids = &id, .timeout_ms = -1};
    begin_call(c, "kvc_begin_with behind what was restored");
    const kvc_status status = kvc_begin_with(c->w->cache, &args, &batch);
    if (status == KVC_OK) kvc_abort(batch);
    if (status == KVC_ERR_GONE) fail(c, "answers \"%s\"", kvc_strerror(status));
}

static void end_restoring(client *c, const restoration *r, int to) {
    int32_t kept[MOST_TOKENS], num = 0;
    const int keeps_all = pick(3) != 0;
    for (int t = 0; t < r->num; t++)
        if (keeps_all || pick(2)) kept[num++] = t;
    c->call = "kvc_commit of restored layers";
    c->w->batch = NULL;
    const kvc_status status = num == r->num && pick(2) ? kvc_commit(r->batch) : kvc_commit_kept(r->batch, kept, num);
    if (status != KVC_OK) fail(c, "answers \"%s\"", kvc_strerror(status));
    note_restored(c, r, kept, num);
    check_sequence(c, c->w->cache, r->s);
    if (num && pick(2)) go_on_behind(c, r, to); /* otherwise nothing was restored, and windows may lack rows */
}

/* Replaces what a sequence holds in some layers. */
static void restore_layers(client *c) {
    restoration r = {.s = take(c)};
    int64_t seq_ids[MOST_TOKENS];
    if (r.s < 0) return;
    const int to = list_restored(c, &r);
    for (int t = 0; t < r.num; t++) seq_ids[t] = id_of(r.s);
    kvc_begin_args args = {.struct_size = sizeof args,
                           .num_tokens = r.num,
                           .positions = r.positions,
                           .seq_ids = seq_ids,
                           .replaced = r.layers};
    if (r.num && choose_layers(c->w, r.layers) && begin_with(c, &args, &r.batch, 0)) {
        c->w->pass = NULL;
        c->w->batch = r.batch;
        if (put_restored(c, &r) && pick(6)) {
            end_restoring(c, &r, to);
        } else {
            c->w->batch = NULL;
            kvc_abort(r.batch);
        }
    }
    let_go(c, r.s);
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
    if (!is_alone(c) || sim_faults() != c->faults || status == KVC_ERR_BUSY) return;
    if ((status == KVC_OK) != (n == room))
        fail(c, "says %lld, and a batch of %lld is answered \"%s\"", (long long)room, (long long)n,
             kvc_strerror(status));
}

enum { COMPACT, SETTLE, RESERVE, ROOM, VALIDATE, NUM_TIDY };

static void tidy_as(client *c, int which) {
    static const char *const names[] = {"kvc_compact", "kvc_settle", "kvc_reserve", "kvc_room", "kvc_validate"};
    world *w = c->w;
    const int s = take(c);
    int64_t room = 0;
    if (s < 0) return;
    begin_call(c, names[which]);
    const kvc_status status = which == COMPACT   ? kvc_compact(w->cache)
                              : which == SETTLE  ? kvc_settle(w->cache)
                              : which == RESERVE ? kvc_reserve(w->cache, id_of(s), 1 + pick(12))
                              : which == ROOM    ? kvc_room(w->cache, id_of(s), &room)
                                                 : kvc_validate(w->cache);
    const int may_be_full = which == SETTLE || which == RESERVE ? MAY_BE_FULL : 0;
    ended(c, status,
          which == VALIDATE ? 0 : MAY_BE_BUSY | MAY_BE_HELD | may_be_full | (which == RESERVE ? MAY_BE_GONE : 0));
    if (which >= ROOM) check_unchanged(c);
    if (which == ROOM && status == KVC_OK) check_room(c, s, room);
    let_go(c, s);
}

static void tidy(client *c) { tidy_as(c, pick(NUM_TIDY)); }
static void compact(client *c) { tidy_as(c, COMPACT); }
static void settle(client *c) { tidy_as(c, SETTLE); }
static void reserve(client *c) { tidy_as(c, RESERVE); }

static void hold(client *c) {
    kvc_span spans[MOST];
    kvc_hold *held = NULL;
    int64_t num = 0;
    int tags[MOST], layer = source_of(c->w, pick(c->w->num_layers));
    if (is_cross(c->w, layer)) return;
    const int s = pick(IDS);
    begin_call(c, "kvc_spans");
    c->w->num_holds++;
    const int is_held = ended(c, kvc_spans(c->w->cache, id_of(s), layer, spans, sizeof *spans, MOST, &num, &held), 0);
    c->w->holds[c->number] = held;
    for (int round = 0; round < 3 * is_held; round++)
        for (int64_t i = 0, n = 0; i < num; i++)
            for (int j = 0; j < spans[i].num_rows && n < MOST; j++, n++) {
                const int tag = tag_in(c, &spans[i], j, layer);
                if (round && tag != tags[n]) fail(c, "a row that is held became another");
                tags[n] = tag;
                sim_step();
            }
    let_go_of_hold(c);
}

static void clone(client *c) {
    kvc_cache *copy = NULL;
    c->w->num_clones++;
    const int more = 2 * (c->w->num_acquiring - c->w->acquired);
    begin_call(c, "kvc_cache_clone");
    const int is_there = ended(c, kvc_cache_clone(c->w->cache, &copy), MAY_BE_BUSY);
    check_unchanged(c);
    c->w->num_clones -= !is_there;
    if (!is_there) return;
    if (kvc_validate(copy) != KVC_OK) fail(c, "the clone is corrupt");
    if (!c->w->is_meddled) check_known(c, copy, more);
    for (int s = 0; s < IDS; s++) check_intact(c, copy, s);
    if (kvc_cache_free(copy) != KVC_OK) fail(c, "the clone cannot be freed");
    c->w->num_clones--;
}

/* ---- files ------------------------------------------------------------------------------------------------------- */

typedef struct file {
    client *c;
    char *bytes;
    size_t size, room, at;
} file;

static int32_t write_file(void *user, const void *data, size_t size) {
    file *f = user;
    pass_time(f->c);
    if (!pick(100)) return f->c->was_cancelled = 1;
    if (f->size + size > f->room) f->bytes = realloc(f->bytes, f->room = 2 * (f->size + size));
    memcpy(f->bytes + f->size, data, size);
    f->size += size;
    return 0;
}

static int32_t read_file(void *user, void *data, size_t size) {
    file *f = user;
    pass_time(f->c);
    if (!pick(size == KVC_MAC_BYTES ? 8 : 100) || size > f->size - f->at) return f->c->was_cancelled = 1;
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

/* Replaces rows of the sequence that the client restores, again and again. */
static void inject_some(client *c) {
    const int s = c->replaces;
    c->replaces = -1;
    while (!c->is_last) inject(c, s);
}

/* Restores a sequence, while another thread replaces rows of what it held. */
static void restore_beside(client *c, const kvc_load_args *args, int to, int is_damaged) {
    c->replaces = to;
    c->w->sequences[to].is_spoilt = 1;
    beside *injects = begin_beside(c, inject_some);
    c->replaces = -1;
    begin_call(c, "kvc_restore beside kvc_inject");
    const kvc_status status = kvc_restore(c->w->cache, args);
    end_beside(injects);
    if (!is_damaged || status == KVC_OK) ended(c, status, MAY_BE_FULL);
    while (!clear_one(c, to)) continue;
}

/* Restores a sequence, with memory failing at a later request each time, until it is there or something else fails. */
static void restore(client *c, const kvc_load_args *args, file *f, int s, int to, int is_damaged) {
    world *w = c->w;
    sequence *into = &w->sequences[to];
    kvc_status status;
    int is_there, may, fails_late = !pick(3);
    for (uint64_t request = 1;; request += 1 + (uint64_t)pick((int)request)) {
        f->at = 0;
        begin_call(c, "kvc_restore");
        if (fails_late) sim_fail_memory(request);
        c->replaces = to;
        status = kvc_restore(w->cache, args);
        c->replaces = -1;
        if (c->batch && !c->takes_room && status == KVC_OK) fail(c, "replaced a sequence of the open batch");
        if (is_damaged && status == KVC_OK) fail(c, "took a damaged file");
        may = MAY_BE_FULL | (is_damaged || c->batch ? MAY_BE_INVALID | MAY_BE_BUSY : 0);
        if (is_damaged && status == KVC_ERR_FORMAT)
            is_there = 0, check_unchanged(c);
        else
            is_there = ended(c, status, may);
        if (!fails_late || status != KVC_ERR_NOMEM || c->batch) break;
    }
    if (is_there) {
        memcpy(into->tags, w->sequences[s].tags, sizeof into->tags);
        note_computed(*into->tags, MOST_LAYERS * MOST);
        into->is_spoilt |= w->sequences[s].is_spoilt;
        into->barred = -1; /* nobody knows how old the rows of a file are */
    }
    if (!c->batch) return;
    w->batch = NULL;
    kvc_abort(c->batch);
    c->batch = NULL;
}

/* Saves a sequence, and restores it as another, or loads it. */
static void save_and_restore(client *c) {
    world *w = c->w;
    file f = {.c = c};
    const int s = take(c), to = take(c);
    const int64_t from_id = id_of(s < 0 ? 0 : s), to_id = id_of(to < 0 ? 0 : to);
    const kvc_save_args save = {
        .struct_size = sizeof save, .write = write_file, .user = &f, .seq_ids = &from_id, .num_sequences = 1};
    begin_call(c, "kvc_save");
    if (s >= 0 && to >= 0 && ended(c, kvc_save(w->cache, &save), 0)) {
        check_unchanged(c);
        const int is_damaged = damage(&f), is_read = pick(2);
        kvc_load_args args = {.struct_size = sizeof args,
                              .data = is_read ? NULL : f.bytes,
                              .read = is_read ? read_file : NULL,
                              .user = &f,
                              .size = (int64_t)f.size,
                              .seq_ids = &from_id,
                              .to_ids = &to_id,
                              .num_sequences = 1};
        if (!pick(4))
            restore_beside(c, &args, to, is_damaged);
        else if (pick(3))
            restore(c, &args, &f, s, to, is_damaged);
        else
            load(c, &args, s, is_damaged);
    }
    free(f.bytes);
    let_go(c, s);
    let_go(c, to);
}

/* Whether a cleared cache gives back all memory of rows. */
static void check_empty(client *c) {
    world *w = c->w;
    kvc_stats stats;
    if (kvc_compact(w->cache) != KVC_OK) fail(c, "the cache cannot be compacted once it is cleared");
    kvc_get_stats(w->cache, &stats, sizeof stats);
    if (stats.live_slots || stats.blocks_in_use || stats.blocks_free || stats.retained) fail(c, "rows are left");
    if (w->bytes[KVC_MEMORY_ROWS] && !w->num_clones)
        fail(c, "%lld bytes of rows are left", (long long)w->bytes[KVC_MEMORY_ROWS]);
    if (kvc_validate(w->cache) != KVC_OK) fail(c, "the cache is corrupt once it is cleared");
}

/* ---- fork() ------------------------------------------------------------------------------------------------------ */

/* Goes on in the child with a batch that the parent has open, without what other threads were doing in it. */
static void end_in_child(client *c) {
    world *w = c->w;
    pass *p = w->pass;
    int is_whole = p != NULL;
    for (int l = 0; p && l < w->num_layers; l++) {
        if (is_cross(w, l)) continue;
        if (p->num_put[source_of(w, l)] < p->num_tokens)
            is_whole = 0;
        else
            attend_again(c, p, l);
    }
    c->call = "the end of the parent's batch";
    if (!is_whole || pick(2))
        kvc_abort(w->batch);
    else if (kvc_commit(w->batch) != KVC_OK)
        fail(c, "a batch that was filled cannot be committed");
}

/* In the child: everything is as it was, and can be dropped; then the cache can be used anew. */
static int check_child(void *context) {
    client *c = context;
    world *w = c->w;
    c->call = "fork()";
    sim_calm();
    if (kvc_validate(w->cache) != KVC_OK) fail(c, "the child's cache is corrupt");
    for (int s = 0; s < IDS; s++)
        if (!w->sequences[s].is_taken) check_sequence(c, w->cache, s);
    if (w->batch) end_in_child(c);
    if (kvc_validate(w->cache) != KVC_OK) fail(c, "the child's cache is corrupt without the batch");
    for (int s = 0; s < IDS; s++) check_intact(c, w->cache, s);
    check_prefixes_in_child(c);
    for (int i = 0; i < MOST_CLIENTS; i++) {
        w->num_holds -= w->holds[i] != NULL;
        kvc_hold_free(w->holds[i]);
    }
    if (kvc_clear(w->cache) != KVC_OK) { /* a batch that begins or ends is nobody's to abort */
        if (w->batch) fail(c, "the child's cache cannot be cleared");
        return 0;
    }
    if (!w->num_holds) check_empty(c);
    for (int s = 0; s < IDS; s++) w->sequences[s] = (sequence){0};
    w->batch = NULL;
    for (int i = 0; i < 12; i++) (i % 4 ? call_prefix : feed)(c);
    return 0;
}

void fork_process(client *c) {
    c->call = "fork()";
    const int result = sim_fork(check_child, c);
    if (result) fail(c, "the child ended with %d", result);
}

static void fork_once(client *c) {
    if (!pick(sim_num_stalled() ? 3 : 8)) fork_process(c); /* takes as long as a hundred calls */
}

/* ---- calls within calls ------------------------------------------------------------------------------------------ */

/* Begins a batch of the sequence that the running call replaces, or a batch that takes all room. */
static void begin_within(client *c) {
    enum { MOST_ROOM = 512, NOBODY = 77 };
    int64_t ids[MOST_ROOM]; /* not static: clients are threads */
    kvc_batch *batch;
    int64_t num = 1;
    if (c->batch) return;
    c->takes_room = pick(2);
    if (c->takes_room && (kvc_room(c->w->cache, NOBODY, &num) != KVC_OK || num < 1 || num > MOST_ROOM)) return;
    for (int i = 0; i < num; i++) ids[i] = c->takes_room ? NOBODY : id_of(c->replaces);
    if (kvc_begin(c->w->cache, (int32_t)num, NULL, ids, NULL, &batch) != KVC_OK) return;
    c->w->pass = NULL;
    c->batch = c->w->batch = batch;
}

static void pass_time(client *c) {
    static void (*const calls[])(client *c) = {edit, edit, edit, hold, tidy, clear_some};
    for (int i = 1 << pick(8); i > 0; i--) sim_step();
    if (c->is_called || pick(8)) return;
    client within = *c;
    within.is_called = 1;
    self_of(&within);
    if (c->replaces >= 0 && !c->batch && pick(2))
        begin_within(c);
    else if (pick(2))
        call_prefix(&within);
    else
        calls[pick(sizeof calls / sizeof *calls)](&within);
    self_of(c);
    sim_fail_memory(0);
    c->calls_aside++;
    c->handovers = UINT64_MAX;
}

/* ---- together ---------------------------------------------------------------------------------------------------- */

/* Makes a call that others must not notice who are in the middle of theirs. */
static void disturb(client *c) {
    static void (*const calls[])(client *c) = {compact, settle,    settle,    reserve, clear_some,
                                               clone,   fork_once, fork_once, edit};
    calls[pick(sizeof calls / sizeof *calls)](c);
}

/* Makes a call of the run's theme. */
static void follow_theme(client *c) {
    static void (*const passes[])(client *c) = {feed,           feed,           feed,    feed,
                                                restore_layers, restore_layers, reserve, fork_once};
    static void (*const moves[])(client *c) = {
        restore_layers, read_moved, read_moved, read_moved, settle, compact, edit, edit, hold, clone, save_and_restore};
    static void (*const prompts[])(client *c) = {feed, feed, call_prefix};
    if (c->w->theme == PASSES)
        passes[pick(sizeof passes / sizeof *passes)](c);
    else if (c->w->theme == PROMPTS)
        prompts[pick(sizeof prompts / sizeof *prompts)](c);
    else
        moves[pick(sizeof moves / sizeof *moves)](c);
}

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
                                               call_prefix,
                                               call_prefix,
                                               tidy,
                                               tidy,
                                               hold,
                                               clone,
                                               save_and_restore,
                                               clear_some,
                                               meddle,
                                               meddle,
                                               fork_once,
                                               read_moved,
                                               read_moved,
                                               restore_layers,
                                               call_wrongly};
    client *c = context;
    c->thread = sim_self();
    self_of(c);
    while (c->w->calls_left-- > 0) {
        if (sim_num_stalled() && pick(2))
            disturb(c);
        else if (c->w->theme && pick(4))
            follow_theme(c);
        else if (c->w->has_prefixes && pick(2))
            call_prefix(c);
        else
            calls[pick(sizeof calls / sizeof *calls)](c);
        check_intact(c, c->w->cache, pick(IDS));
        check_bytes(c);
        if (kvc_utilization(c->w->cache) > 1 &&
            c->w->cache->limits.has_own_capacity) /* a batch may exceed the default one */
            fail(c, "utilization is above 1");
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

static void *allocate(void *user, size_t size, size_t alignment, const kvc_memory_hint *hint) {
    world *w = user;
    void *memory = sim_aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
    if (memory) w->bytes[hint->kind] += (int64_t)size;
    return memory;
}

static void release(void *user, void *memory, size_t size, const kvc_memory_hint *hint) {
    world *w = user;
    w->bytes[hint->kind] -= (int64_t)size;
    sim_free(memory);
}

/* Gives a layer sketches of its keys, and values.  If it has a window, that becomes long enough. */
static void add_sketches(kvc_layer *layer) {
    kvc_policy *policy = &layer->policy;
    if (policy->kind == KVC_SLIDING) policy->window = 8192, policy->resume_window = 0;
    if (policy->kind == KVC_CHUNKED) policy->attention_chunk_size = 8192;
    layer->k_dim = ROW;
    layer->v_dim = DIM;
    layer->sketch_bits = 2;
}

/* Gives some layers a row for every n-th token. */
static void add_strides(world *w) {
    const int base = 2 + pick(2);
    for (int l = 1; l < w->num_layers; l++) {
        kvc_layer *layer = &w->layers[l];
        if (layer->share || !pick(3)) continue;
        layer->policy = (kvc_policy){.kind = KVC_FULL, .stride = base << pick(2)};
        layer->sketch_bits = 0;
        if (layer->policy.stride > w->unit) w->unit = layer->policy.stride;
    }
    const int last = w->num_layers - 1;
    for (int l = 0; l <= last; l++)
        if (w->layers[l].share) return; /* layer 0 */
    if (w->unit == 1 || pick(2)) return;
    const kvc_layer first = w->layers[0];
    w->layers[0] = w->layers[last];
    w->layers[w->whole = last] = first;
}

/* Makes a cache of any shape and limits. */
static void make_cache(world *w) {
    static const double right_angle[] = {1.57079632679489661923};
    static const int kinds[] = {KVC_ROPE_NONE, KVC_ROPE_FREQUENCIES, KVC_ROPE_FREQUENCIES, KVC_ROPE_FUNCTION};
    const int kind = kinds[pick(4)];
    /* Blocks of the largest sizes have memory that comes and goes by the page. */
    const int sizes[] = {6, 6, 6, 40, 40, 12000}, size = 1 + pick(sizes[pick(6)]);
    const int is_limited = w->theme != PROMPTS;
    w->num_layers = 1 + pick(MOST_LAYERS);
    w->has_sketches = pick(2);
    for (int l = 0; l < w->num_layers; l++) {
        w->layers[l] = (kvc_layer){.num_kv_heads = HEADS,
                                   .k_dim = DIM,
                                   .v_dim = DIM,
                                   .rope = {.kind = pick(4) ? kind : KVC_ROPE_NONE,
                                            .first_dim = 2,
                                            .num_freqs = 1,
                                            .inv_freq = right_angle,
                                            .shift = move_keys}};
        const int what = w->theme == PROMPTS ? 0 : l ? pick(5) : !pick(3);
        const int is_sketched = w->has_sketches && pick(4);
        if (what == 1 || what == 2) w->layers[l].policy = any_policy(), w->expires = 1;
        if (what == 3) w->layers[l].policy = (kvc_policy){.kind = KVC_CROSS, .max_len = CROSS};
        if (what < 4 && !pick(4)) w->layers[l].v_dim = 0; /* keys alone */
        if (what == 0 && l && pick(2)) w->layers[l].policy = w->layers[0].policy;
        if (what < 3 && is_sketched) add_sketches(&w->layers[l]);
        if (what == 4) w->layers[l] = w->layers[0], w->layers[l].share = 1;
    }
    w->unit = 1;
    w->whole = 0;
    if (pick(2)) add_strides(w);
    const int block_size = pick(4) ? (size + w->unit - 1) / w->unit * w->unit : size; /* as prefixes need it */
    w->config =
        (kvc_config){.struct_size = sizeof w->config,
                     .layers = w->layers,
                     .layer_size = sizeof *w->layers,
                     .num_layers = w->num_layers,
                     .block_size = block_size,
                     .max_seq_len = pick(3) ? 0 : 20 + pick(40),
                     .max_sequences = pick(3) ? 0 : 3 + pick(8),
                     .capacity = is_limited && pick(2) ? 40 + pick(120) : 0,
                     .max_bytes = !is_limited || pick(2) ? 0 : (20000 + pick(60000)) * (block_size > MOST ? 100 : 1),
                     .num_threads = 1 + pick(3),
                     .poll = pick(2) ? poll_once : NULL};
    const kvc_allocator allocator = {.struct_size = sizeof allocator, .user = w, .alloc = allocate, .free = release};
    w->has_allocator = pick(2);
    if (w->has_allocator) w->config.allocator = &allocator;
    kvc_status status;
    do status = kvc_cache_new(&w->config, &w->cache);
    while (status == KVC_ERR_NOMEM && sim_faults());
    w->config.allocator = NULL; /* the cache has a copy */
    if (status != KVC_OK) sim_fail("kvc_cache_new: %s", kvc_last_error());
}

/* Runs all clients until the calls are used up.  Nothing may be left then. */
static void run(uint64_t seed, int num_clients, int64_t num_calls, int faults) {
    static world w;
    pthread_t threads[MOST_CLIENTS];
    static const int handovers[] = {1, 4, 32, 256};
    /* Some faults hide what others show: a thread that wakes early misses no signal. */
    const sim_options options = {seed, faults & (int)(seed * 0x9e3779b97f4a7c15 >> 57), handovers[seed % 4]};
    w = (world){.calls_left = num_calls, .is_meddled = seed / 4 % 3 == 0, .takes_rare_ways = options.faults & SIM_RARE};
    w.theme = (theme)(seed % NUM_THEMES);
    if (seed % 5 == 4) num_clients = 1; /* what a failed call changes is seen where no other client runs */
    sim_begin(&options);
    sim_watch((void (*)(void))kvc_waiter_wait);
    memset(clients, 0, sizeof clients);
    clients[num_clients] = (client){.w = &w, .number = num_clients, .replaces = -1, .call = "end"};
    self_of(&clients[num_clients]);
    const int64_t bytes = sim_bytes();
    for (int s = 0; s < IDS; s++) ids[s] = s * 3000000 - 4000000;
    make_cache(&w);
    begin_prefixes(&clients[num_clients]);
    for (int i = 0; i < num_clients; i++) {
        clients[i] = (client){.w = &w, .number = i, .thread = sim_self(), .replaces = -1};
        while (sim_thread_create(&threads[i], NULL, run_client, &clients[i])) continue;
    }
    for (int i = 0; i < num_clients; i++) sim_thread_join(threads[i], NULL);
    sim_calm();
    client *c = &clients[num_clients];
    for (int s = 0; s < IDS; s++) check_sequence(c, w.cache, s);
    if (kvc_validate(w.cache) != KVC_OK) fail(c, "the cache is corrupt");
    drop_prefixes(c);
    if (kvc_clear(w.cache) != KVC_OK) fail(c, "the cache cannot be cleared");
    check_empty(c);
    end_prefixes(c);
    if (kvc_cache_free(w.cache) != KVC_OK) fail(c, "the cache cannot be freed");
    if (sim_bytes() != bytes) fail(c, "%lld bytes are left", (long long)(sim_bytes() - bytes));
}

int main(int argc, char **argv) {
    uint64_t seed = 1, runs = 1;
    int num_clients = 3, faults = SIM_ALL_FAULTS;
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
        if (child < 0 || waitpid(child, &status, 0) != child || status) {
            const int signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
            printf("seed %llu: status %d%s%s\n", (unsigned long long)(seed + i), status, signal ? ", " : "",
                   signal ? strsignal(signal) : "");
            return 1;
        }
    }
    printf("%llu steps\n", (unsigned long long)*total);
    return 0;
}
