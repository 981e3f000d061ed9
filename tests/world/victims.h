/* victims.h: who goes, in a closed world (closed.h) of several layer groups and two prefixes.
 *
 * All follows from where rows lie (kvc_blocks), from the order of uses, and from the limit: of the blocks that prefixes
 * keep, the fewest of the least recently used go without which a batch fits.  drive_limits.c plays with it. */
#ifndef WORLD_VICTIMS_H
#define WORLD_VICTIMS_H

#include "closed.h"

enum { MOST_KEPT = 128, MOST_BLOCKS = 512, MOST_RUNS = 1024, MOST_SLOTS = 16, MOST_OTHERS = 8, STATE_ROOM = 200 };

/* ---- shapes ------------------------------------------------------------------------------------------------------ */

static const float zeros[MOST_TEXT + HEADS][WIDTH];

static inline kvc_policy any_policy(int stride) {
    const int size = 1 + pick(8);
    switch (pick(4)) {
    case 0: return (kvc_policy){.kind = KVC_SLIDING, .window = size, .num_sink_tokens = pick(3) ? 0 : 1 + pick(3)};
    case 1: return (kvc_policy){.kind = KVC_CHUNKED, .attention_chunk_size = size};
    case 2: return (kvc_policy){.kind = KVC_FULL, .stride = stride};
    default: return (kvc_policy){.kind = KVC_FULL};
    }
}

/* Chooses layers of any policies, of which one has a row for each token. */
static inline void make_layers(void) {
    const int stride = 2 + pick(2);
    memset(&o, 0, sizeof o);
    memset(&w.o, 0, sizeof w.o);
    o.num_layers = w.o.num_layers = 1 + pick(3);
    const int whole = pick(o.num_layers);
    int has_stride = 0;
    for (int l = 0; l < o.num_layers; l++) {
        o.layers[l] = (kvc_layer){.num_kv_heads = 1 + pick(HEADS),
                                  .k_dim = WIDTH,
                                  .v_dim = pick(4) ? WIDTH : 0,
                                  .policy = any_policy(stride),
                                  .rope = {.kind = KVC_ROPE_NONE}};
        if (l == whole) o.layers[l].policy.stride = 0;
        has_stride |= o.layers[l].policy.stride != 0;
        w.o.layers[l] = o.layers[l];
    }
    const int size = 1 + pick(6);
    o.block = has_stride ? (size + stride - 1) / stride * stride : size;
}

static inline kvc_config config_of_layers(void) {
    return (kvc_config){.struct_size = sizeof(kvc_config),
                        .layers = o.layers,
                        .layer_size = sizeof *o.layers,
                        .num_layers = o.num_layers,
                        .block_size = o.block,
                        .num_threads = 1};
}

static inline int expires(int l) { return o.layers[l].policy.kind != KVC_FULL; }

/* Gives the tokens of a batch their rows, and commits it. */
static inline void put_all(kvc_batch *batch) {
    for (int l = 0; l < o.num_layers; l++) {
        const kvc_put_args args = {.struct_size = sizeof args,
                                   .k = zeros,
                                   .v = o.layers[l].v_dim ? zeros : NULL,
                                   .k_token_stride = sizeof *zeros,
                                   .v_token_stride = sizeof *zeros};
        must(kvc_put(batch, l, &args));
    }
    must(kvc_commit(batch));
}

static inline kvc_status begin(int64_t id, int n, kvc_batch **batch) {
    int64_t ids[MOST_TEXT];
    for (int i = 0; i < n; i++) ids[i] = id;
    return kvc_begin(o.cache, n, NULL, ids, NULL, batch);
}

static inline kvc_status feed_some(int64_t id, int n) {
    kvc_batch *batch;
    const kvc_status status = begin(id, n, &batch);
    if (!status) put_all(batch);
    return status;
}

/* ---- what lies where --------------------------------------------------------------------------------------------- */

/* A block that a prefix keeps: its text up to its end, and when a call used it last. */
typedef struct kept {
    int64_t id; /* of its runs */
    int prefix, text;
    long used;
    unsigned pins;    /* bits: those that hold it */
    int64_t state;    /* bytes of the state at its end */
    int rows[LAYERS]; /* that it has */
    enum { STAYS, LOSES_WINDOWS, GOES } fate;
} kept;

typedef struct pin_of {
    int prefix, text;
} pin_of;

/* A sequence that began with known tokens, perhaps inside a block, and was fed nothing. */
typedef struct begun {
    int64_t id, bytes; /* of its prompt */
    int prefix, text;  /* the known tokens */
} begun;

static struct {
    kvc_prefix *prefixes[2];
    kvc_cache *cache;
    int64_t budget, capacity, max_seq_len; /* in bytes, or slots of each group; 0: no such limit */
    int64_t costs[LAYERS];
    int num_kept, num_others, num_pins, num_holds, num_begun;
    kept kept[MOST_KEPT];
    int64_t others[MOST_OTHERS]; /* sequences that hold rows */
    pin_of pins[2];
    kvc_hold *holds[2];
    begun begun[2];
} v;

static struct place {
    int64_t num_blocks, num_runs;
    kvc_block_info blocks[MOST_BLOCKS];
    kvc_run_info runs[MOST_RUNS];
} places[LAYERS];

static inline kept *kept_of(int64_t id) {
    for (int i = 0; i < v.num_kept; i++)
        if (v.kept[i].id == id) return &v.kept[i];
    return NULL;
}

static inline int begin_of(const kept *k) { return (text_length(k->text) - 1) / o.block * o.block; }

static inline int tokens_of_kept(const kept *k) { return text_length(k->text) - begin_of(k); }

/* Looks where all rows lie.  Kept blocks that are new are of a text, and those without rows are gone. */
static inline void look(int prefix, int text) {
    for (int i = 0; i < v.num_kept; i++) memset(v.kept[i].rows, 0, sizeof v.kept[i].rows);
    for (int l = 0; l < o.num_layers; l++) {
        struct place *p = &places[l];
        p->num_blocks = p->num_runs = 0;
        if (!leads_group(&w.o, l)) continue;
        must(kvc_blocks(o.cache, l, p->blocks, sizeof *p->blocks, MOST_BLOCKS, &p->num_blocks, p->runs, sizeof *p->runs,
                        MOST_RUNS, &p->num_runs));
        for (const kvc_run_info *r = p->runs; r < p->runs + p->num_runs; r++) {
            kept *k = r->is_kept ? kept_of(r->seq_id) : NULL;
            if (r->is_kept && !k) {
                if (!text || v.num_kept == MOST_KEPT) wrong("a block is kept, though nothing was fed");
                *(k = &v.kept[v.num_kept++]) = (kept){
                    .id = r->seq_id, .prefix = prefix, .text = text_begin(text, (r->position / o.block + 1) * o.block)};
            }
            if (k) k->rows[l] += r->count;
        }
    }
    for (int i = v.num_kept; i-- > 0;) {
        int num = 0;
        for (int l = 0; l < o.num_layers; l++) num += v.kept[i].rows[l];
        if (!num) v.kept[i] = v.kept[--v.num_kept];
    }
}

/* What a group has in blocks without those that go. */
typedef struct sums {
    int64_t used, held, open, live, in_held;
} sums;

static inline int stays_in(const kvc_run_info *r, int l) {
    const kept *k = r->is_kept ? kept_of(r->seq_id) : NULL;
    return !k || k->fate == STAYS || (k->fate == LOSES_WINDOWS && !expires(l));
}

static uint8_t slots[MOST_BLOCKS][MOST_SLOTS]; /* whether somebody who stays holds them */

static inline sums sum_up(int l) {
    const struct place *p = &places[l];
    sums s = {0};
    memset(slots, 0, (size_t)p->num_blocks * sizeof *slots);
    for (const kvc_run_info *r = p->runs; r < p->runs + p->num_runs; r++)
        if (stays_in(r, l)) memset(&slots[r->block][r->slot], 1, (size_t)r->count);
    for (int64_t b = 0; b < p->num_blocks; b++) {
        int live = 0;
        for (int i = 0; i < p->blocks[b].num_slots; i++) live += slots[b][i];
        s.live += live;
        s.used += live || p->blocks[b].is_held;
        if (!p->blocks[b].is_held) continue;
        s.held++, s.in_held += live, s.open += p->blocks[b].num_slots - p->blocks[b].filled;
    }
    return s;
}

static inline int64_t bytes_of_others(void) {
    int64_t bytes = 0;
    for (int i = 0; i < v.num_kept; i++) bytes += v.kept[i].fate == GOES ? 0 : v.kept[i].state;
    for (int i = 0; i < v.num_begun; i++) bytes += v.begun[i].bytes;
    for (int i = 0; i < v.num_pins; i++) {
        const int is_twice = /* two pins of a prompt count once */
            i && v.pins[i].prefix == v.pins[0].prefix && v.pins[i].text == v.pins[0].text;
        if (!is_twice) bytes += PIN_BYTES * ((text_length(v.pins[i].text) + o.block - 1) / o.block);
    }
    return bytes;
}

/* Returns what counts with n tokens from position `first` on, as rows lie or once they are moved together.  The tokens
 * go to blocks of their own. */
static inline int64_t bytes_with(int first, int n, int is_packed) {
    int64_t bytes = bytes_of_others();
    for (int l = 0; l < o.num_layers; l++) {
        if (!leads_group(&w.o, l)) continue;
        const sums s = sum_up(l);
        const int64_t stride = stride_of(&w.o, l), size = o.block, rows = (first + n) / stride - first / stride,
                      rest = s.live - s.in_held + (rows > s.open ? rows - s.open : 0);
        bytes += v.costs[l] * (is_packed ? s.held + (rest + size - 1) / size : s.used + (rows + size - 1) / size);
    }
    return bytes;
}

/* Returns the groups that lack slots for n tokens, as bits. */
static inline unsigned lacking(int n) {
    unsigned lacks = 0;
    for (int l = 0; v.capacity && l < o.num_layers; l++)
        if (leads_group(&w.o, l) && sum_up(l).live + n / stride_of(&w.o, l) > v.capacity) lacks |= 1u << l;
    return lacks;
}

/* ---- who goes ---------------------------------------------------------------------------------------------------- */

/* Whether slots of a block are free in a group once all that go are gone. */
static inline int frees_in(const kept *k, int l, int is_unheld) {
    const struct place *p = &places[l];
    for (const kvc_run_info *r = p->runs; r < p->runs + p->num_runs; r++)
        for (int i = 0; r->is_kept && r->seq_id == k->id && i < r->count; i++)
            if (!slots[r->block][r->slot + i] && !(is_unheld && p->blocks[r->block].is_held)) return 1;
    return 0;
}

/* Of blocks that go, those stay that free nothing of what is lacking.  Others stay in layers that see everything, if
 * others hold their rows there.  lacks: bits of the groups that lack slots; 0: bytes are lacking. */
static inline void sift(unsigned lacks) {
    uint8_t frees[2][MOST_KEPT] = {{0}}; /* what is lacking; then, slots of layers that see everything */
    for (int pass = 0; pass < 2; pass++) {
        for (int l = 0; l < o.num_layers; l++) {
            if (!leads_group(&w.o, l) || (pass && expires(l)) || (!pass && lacks && !(lacks >> l & 1))) continue;
            sum_up(l);
            for (int i = 0; i < v.num_kept; i++)
                frees[pass][i] |= v.kept[i].fate == GOES && frees_in(&v.kept[i], l, !pass && !lacks);
        }
        for (int i = 0; i < v.num_kept && !pass; i++)
            if (!frees[0][i] && !(v.kept[i].state && !lacks)) v.kept[i].fate = STAYS;
    }
    for (int i = 0; i < v.num_kept; i++) {
        int num_full = 0;
        for (int l = 0; l < o.num_layers; l++) num_full += expires(l) ? 0 : v.kept[i].rows[l];
        if (v.kept[i].fate == GOES && num_full && !frees[1][i] && !(v.kept[i].state && !lacks))
            v.kept[i].fate = LOSES_WINDOWS;
    }
}

static inline int by_use(const void *a, const void *b) {
    const kept *x = a, *y = b;
    return (x->used > y->used) - (x->used < y->used);
}

/* Finds the fewest of the least recently used blocks without which n tokens fit; returns whether there are. */
static inline int choose(int n, int is_packed, unsigned lacks) {
    qsort(v.kept, (size_t)v.num_kept, sizeof *v.kept, by_use);
    for (int num = 0; num <= v.num_kept; num++) {
        for (int i = 0; i < v.num_kept; i++) v.kept[i].fate = i < num && !v.kept[i].pins ? GOES : STAYS;
        if (num && v.kept[num - 1].pins) continue;
        sift(lacks);
        if (v.budget ? bytes_with(0, n, is_packed) <= v.budget : !lacking(n)) return 1;
    }
    for (int i = 0; i < v.num_kept; i++) v.kept[i].fate = STAYS;
    return 0;
}

/* Says whether a batch of n tokens of a new sequence begins, and which blocks go for it. */
static inline int predict(int n) {
    for (int i = 0; i < v.num_kept; i++) v.kept[i].fate = STAYS;
    if (!v.budget) return choose(n, 0, lacking(n));
    const int64_t bytes = bytes_with(0, n, 0), packed = bytes_with(0, n, 1);
    if (bytes <= v.budget || (packed <= v.budget && bytes - packed >= v.budget / 8)) return 1;
    return choose(n, 0, 0) || choose(n, 1, 0);
}

/* Compares what is kept with what is to stay. */
static inline void check_kept(const char *what, int n) {
    static kept before[MOST_KEPT];
    const int num = v.num_kept;
    int64_t states = 0;
    memcpy(before, v.kept, sizeof before);
    look(0, 0);
    for (const kept *k = before; k < before + num; k++)
        for (int l = 0; l < o.num_layers; l++) {
            const kept *now = kept_of(k->id);
            const int right = k->fate == GOES || (k->fate == LOSES_WINDOWS && expires(l)) ? 0 : k->rows[l];
            if (leads_group(&w.o, l) && (now ? now->rows[l] : 0) != right)
                wrong("%s %d: %s of prefix %d, used at %ld, has %d rows in layer %d, not %d of %d", what, n,
                      spell(k->text), k->prefix, k->used, now ? now->rows[l] : 0, l, right, k->rows[l]);
        }
    int64_t blocks = v.num_kept;
    for (int i = 0; i < v.num_kept; i++) states += v.kept[i].state;
    for (int i = 0; i < 2; i++) {
        kvc_prefix_stats stats;
        kvc_prefix_get_stats(v.prefixes[i], &stats, sizeof stats);
        states -= stats.checkpoint_bytes;
        blocks -= stats.blocks;
    }
    if (blocks) wrong("%s %d: %d more blocks have rows than are kept", what, n, (int)blocks);
    if (states) wrong("%s %d: %d bytes of states are missing", what, n, (int)states);
}

#endif
