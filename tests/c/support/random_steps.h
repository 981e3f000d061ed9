/* random_steps.h: random operations on a cache and its oracle, and views held meanwhile. */
#ifndef KVC_RANDOM_STEPS_H
#define KVC_RANDOM_STEPS_H

#include "support/retained.h"
#include "support/saved.h"

/* ---- views ------------------------------------------------------------------------------------------------------- */

/* A view of a sequence's rows, and the rows as they were when the view was taken. */
typedef struct view {
    kvc_hold *hold;
    kvc_span spans[MAX_ROWS];
    int64_t num_spans;
    int layer;
    row rows[MAX_ROWS];
} view;

static inline kvc_status view_new(view *v, pair *p, int64_t id, int layer) {
    const sequence *s = find_sequence(p, id);
    kvc_status status = kvc_spans(p->cache, id, layer, v->spans, sizeof *v->spans, MAX_ROWS, &v->num_spans, &v->hold);
    agree(p, "spans", status, KVC_OK);
    CHECK(status != KVC_OK || !v->hold == !v->num_spans);
    v->layer = layer;
    if (!v->hold) return status;
    p->num_holds++;
    const row_list *list = &s->layers[source_of(p, layer)];
    memcpy(v->rows, list->rows, (size_t)list->num * sizeof *v->rows);
    return status;
}

static inline void view_check(const view *v, const pair *p) {
    const row *rows = v->rows;
    for (int64_t i = 0; i < v->num_spans; rows += v->spans[i++].num_rows) check_span(p, v->layer, &v->spans[i], rows);
}

static inline void view_free(view *v, pair *p) {
    if (!v->hold) return;
    view_check(v, p);
    kvc_hold_free(v->hold);
    v->hold = NULL;
    p->num_holds--;
}

/* ---- steps ------------------------------------------------------------------------------------------------------- */

enum { NUM_IDS = 6 };

static const int64_t some_ids[NUM_IDS] = {0, 1, -7, INT64_MAX, INT64_MIN, 1 << 20};

static inline int64_t random_id(void) { return some_ids[random_int(0, NUM_IDS)]; }

/* A sequence to share rows of, or to ask for room: now and then a retained one. */
static inline int64_t random_source(void) {
    return random_int(0, 4) ? random_id() : FIRST_RETAINED + random_int(0, NUM_RETAINED);
}

static inline int32_t random_position(const pair *p, int64_t id) {
    return random_int(0, next_of(p, find_sequence(p, id)) + 3);
}

/* Moves positions [begin, end) of a sequence or replaces their rows; or applies deltas, reserves, or asks for room. */
static inline kvc_status random_move(pair *p, int64_t id, int32_t begin, int32_t end) {
    const int choice = random_int(0, 12);
    kvc_status status;
    p->calls_left = random_int(0, 4) ? -1 : random_int(0, 3);
    if (choice < 5)
        status = pair_shift(p, id, begin, random_int(0, 2) ? end : KVC_END, random_int(-12, 13));
    else if (choice < 7)
        status = pair_divide(p, id, begin, random_int(0, 2) ? end : KVC_END, random_int(1, 4));
    else if (choice < 9)
        status = pair_inject_rows(p, id, random_int(0, p->config.num_layers), begin, end, random_int(0, 2));
    else if (choice < 11)
        status = pair_settle(p);
    else if (random_int(0, 2))
        status = pair_reserve(p, random_source(), random_int(1, 30));
    else
        status = pair_room(p, random_source());
    p->calls_left = -1;
    return status;
}

/* Shares some rows: from anywhere on, or those behind what dst holds. */
static inline kvc_status random_share(pair *p, int64_t src, int64_t dst) {
    int32_t next = next_of(p, find_sequence(p, dst));
    int32_t begin = random_int(0, 3) ? random_int(0, 2) ? next : random_position(p, src) : 0;
    int32_t end = random_int(0, 2) && begin < INT32_MAX - 40 ? begin + random_int(0, 40) : KVC_END;
    if (src == dst || rows_of(p, find_sequence(p, src)) + rows_of(p, find_sequence(p, dst)) >= 240) return KVC_OK;
    return pair_share(p, src, dst, begin, end);
}

/* Retains, attaches, pins, uses or drops retained sequences. */
static inline kvc_status random_retained(pair *p, int64_t id) {
    const int64_t retained = FIRST_RETAINED + random_int(0, NUM_RETAINED);
    int64_t ids[NUM_RETAINED];
    const int choice = random_int(0, 12);
    for (int i = 0; i < NUM_RETAINED; i++) { /* by position, if that is possible; some do not exist */
        int to = i;
        const int32_t first = extreme_of(p, find_sequence(p, FIRST_RETAINED + i), -1);
        for (; to > 0 && extreme_of(p, find_sequence(p, ids[to - 1]), -1) > first; to--) ids[to] = ids[to - 1];
        ids[to] = FIRST_RETAINED + i;
    }
    if (choice < 5) {
        const int32_t begin = random_int(0, 3) ? extreme_of(p, find_sequence(p, ids[NUM_RETAINED - 1]), 1) + 1 : 0;
        return pair_retain(p, id, retained, begin, begin + random_int(1, 12));
    } else if (choice < 8) {
        const int skipped = random_int(0, 3) ? 0 : random_int(0, NUM_RETAINED);
        return pair_attach(p, ids + skipped, NUM_RETAINED - skipped, id, random_int(0, 2) ? 10000 : random_int(0, 40));
    } else if (choice < 10) {
        pair_pin(p, retained, random_int(0, 2) ? 1 : -1);
    } else if (choice < 11) {
        pair_touch(p, retained);
    } else {
        return pair_clear_sequence(p, retained);
    }
    return KVC_OK;
}

/* Keeps some of the positions of a sequence, now and then all, none, or some without a row. */
static inline kvc_status random_keep_positions(pair *p, int64_t id) {
    enum { MOST = MAX_ROWS * MAX_LAYERS };
    const sequence *s = find_sequence(p, id);
    int32_t kept[2 * MOST], num = 0;
    const int kind = random_int(0, 6); /* 0 keeps all, 1 none, 2 every second one; others leave it to chance */
    for (int32_t at = extreme_of(p, s, -1), last = -1; s && at >= 0 && at != last;) {
        const int stays = kind == 2 ? at % 2 : kind > 2 ? random_int(0, kind) > 0 : !kind;
        int32_t next = INT32_MAX;
        if (stays) kept[num++] = at;
        for (int l = 0; l < p->config.num_layers; l++)
            for (int i = 0; keeps_tokens(p, l) && i < s->layers[l].num; i++) {
                const int32_t position = s->layers[l].rows[i].position;
                if (position > at && position < next) next = position;
            }
        if (next - 1 > at && !random_int(0, 8)) kept[num++] = at + 1;
        last = at;
        at = next < INT32_MAX ? next : at;
    }
    return pair_keep_positions(p, id, kept, num);
}

static inline kvc_status any_edit(pair *p) {
    int64_t id = random_id(), other = random_id(), source = random_source();
    int32_t begin = random_position(p, id), end = begin + random_int(0, 20);
    int choice = random_int(0, 254);
    if (choice >= 248) return random_keep_positions(p, id);
    if (choice >= 245) return pair_mark_inexact(p, id, begin);
    if (choice >= 175) return random_retained(p, id);
    if (choice >= 153) return random_share(p, random_source(), other);
    if (choice >= 151) return pair_clone(p);
    if (choice >= 149)
        return random_int(0, 3) || capacity_of(p) || p->config.max_bytes ? pair_save(p) : pair_restore(p, id, other);
    if (choice < 25) return pair_remove(p, id, begin, choice % 5 ? end : KVC_END, choice % 2);
    if (choice < 40) return pair_truncate(p, id, begin);
    if (choice < 60 && source != other) return pair_fork(p, source, other);
    if (choice < 85 && source != other) return pair_copy_prefix(p, source, other, begin);
    if (choice < 93) return pair_clear_sequence(p, id);
    if (choice < 94) return pair_keep(p, id);
    if (choice < 95) return pair_clear(p);
    if (choice < 100) return pair_compact(p);
    return random_move(p, id, begin, end);
}

/* Edits a random sequence; if it is in the open batch, the edit must be refused. */
static inline kvc_status random_edit(pair *p) {
    const kvc_status status = any_edit(p);
    trim_missing(p);
    pair_see_evicted(p);
    return status;
}

/* Tokens of up to three sequences: usually the next ones, sometimes with gaps, repeated, or from further back. */
static inline int random_tokens(const pair *p, int32_t *positions, int64_t *ids) {
    int64_t members[3] = {random_id(), random_id(), random_id()};
    int32_t next[3];
    int n = random_int(0, 4) ? random_int(1, 8) : random_int(1, 40), irregular = !random_int(0, 5);
    for (int m = 0; m < 3; m++) next[m] = next_of(p, find_sequence(p, members[m]));
    for (int t = 0; t < n; t++) {
        int m = t * 3 / n; /* one after the other, or mixed */
        if (irregular) m = random_int(0, 3);
        ids[t] = members[m];
        positions[t] = next[m];
        for (int i = 0; i < 3; i++) next[i] += members[i] == members[m];
        if (irregular && !random_int(0, 3)) positions[t] = not_negative(positions[t] + random_int(-6, 7));
    }
    return n;
}

/* Now and then puts cross-attention rows for sequences of the open batch. */
static inline void random_cross_puts(pair *p) {
    for (int l = 0; l < p->config.num_layers; l++)
        for (int i = random_int(-2, 3); i > 0 && is_cross(p, l) && (!p->replaced || p->replaced[l]); i--)
            pair_put_cross(p, l, p->ids[random_int(0, p->num_tokens)], random_int(1, p->layers[l].policy.max_len + 2));
}

/* Commits some of the open batch's tokens; only these need rows in all layers. */
static inline void random_commit_kept(pair *p) {
    int32_t kept[MAX_BATCH];
    int num = 0;
    for (int t = 0; t < p->num_tokens; t++) {
        int stays = random_int(0, 3) > 0;
        if (stays) kept[num++] = t;
        for (int l = 0; l < p->config.num_layers; l++)
            if (takes_tokens(p, l, p->replaced) && (stays || random_int(0, 2))) pair_put(p, l, t, 1);
    }
    if (p->look && !p->replaced) p->look(p);
    for (int i = 0; i < num; i++) { /* in any order */
        int j = random_int(0, num);
        int32_t t = kept[i];
        kept[i] = kept[j];
        kept[j] = t;
    }
    pair_commit_kept(p, kept, num);
}

/* Tokens that restore one or two sequences: a window of positions, or any, of each, in any order, some more than once.
 */
static inline int random_restored(const pair *p, int32_t *positions, int64_t *ids) {
    int n = 0;
    for (int m = random_int(0, 3) ? 1 : 2; m > 0; m--) {
        int64_t id = random_id();
        int32_t next = next_of(p, find_sequence(p, id)), end = random_int(0, 2) ? next : random_int(0, next + 6);
        int32_t begin = random_int(0, 3) ? end - random_int(1, 12) : random_int(0, 9), holes = random_int(0, 3) == 0;
        int repeats = random_int(0, 3) == 0;
        if (end > 1000 || count_id(id, n, ids)) /* a sequence that stands far from 0 */
            continue;
        for (int32_t at = begin > 0 ? begin : 0; at < (end ? end : 5) && n < 80; at++) {
            if (holes && !random_int(0, 3)) continue;
            int to = random_int(0, 4) ? n : random_int(0, n + 1);
            positions[n] = positions[to];
            ids[n++] = ids[to];
            positions[to] = at;
            ids[to] = id;
            at -= repeats && !random_int(0, 2);
        }
    }
    return n;
}

/* Begins a batch that restores one or more groups of layers; returns KVC_ERR_INVALID if there is nothing to restore. */
static inline kvc_status random_begin_restoring(pair *p) {
    static uint8_t replaced[MAX_LAYERS];
    int32_t positions[MAX_BATCH];
    int64_t ids[MAX_BATCH];
    int n = random_restored(p, positions, ids), any = 0;
    for (int l = 0; l < p->config.num_layers; l++) {
        replaced[l] = random_int(0, 2) || !n;
        for (int i = 0; i < l; i++)
            if (same_group(p, i, l)) replaced[l] = replaced[i];
        any |= replaced[l] && (keeps_tokens(p, l) || is_cross(p, l));
    }
    return n && any ? pair_begin_with(p, n, positions, ids, replaced) : KVC_ERR_INVALID;
}

/* Begins a batch of random tokens, or a batch that restores layers. */
static inline kvc_status random_begin(pair *p) {
    int32_t positions[MAX_BATCH];
    int64_t ids[MAX_BATCH];
    int n = random_tokens(p, positions, ids);
    kvc_status status = random_int(0, 6) ? pair_begin(p, n, positions, ids) : random_begin_restoring(p);
    if (status == KVC_OK) check_bytes(p);
    pair_see_evicted(p);
    return status;
}

static inline void random_pass(pair *p) {
    if (random_begin(p) != KVC_OK) return;
    for (int i = random_int(-2, 3); i > 0; i--) {
        random_edit(p);
        pair_check(p);
    }
    random_cross_puts(p);
    pair_see_evicted(p);
    int choice = random_int(0, 12);
    if (choice == 0) {
        pair_abort(p);
    } else if (choice < 3) {
        random_commit_kept(p);
    } else {
        pair_put_all(p);
        if (p->look && !p->replaced) p->look(p);
        pair_commit(p);
    }
}

/* Clears sequences that are long, and most sequences that cannot continue. */
static inline void keep_small(pair *p) {
    for (int i = 0; i < NUM_IDS; i++) {
        const sequence *s = find_sequence(p, some_ids[i]);
        if (rows_of(p, s) > 150 || next_of(p, s) > 1000 || (misses(p, s, next_of(p, s)) && !random_int(0, 4)))
            pair_clear_sequence(p, some_ids[i]);
    }
}

static inline kvc_policy random_policy(void) {
    int32_t window = random_int(1, 9), resume = random_int(0, 2) ? 0 : window + random_int(0, 6);
    switch (random_int(0, 10)) {
    case 0: return (kvc_policy){.kind = KVC_NONE};
    case 1: return (kvc_policy){.kind = KVC_CROSS, .max_len = random_int(1, 9)};
    case 2:
    case 3: return chunked_policy(random_int(1, 9), random_int(0, 2) * random_int(0, 9));
    case 4:
    case 5:
    case 6: return full_policy;
    default: return sliding_policy(window, random_int(0, 2) * random_int(0, 6), resume);
    }
}

/* Returns a random rope that the layer's dims allow. */
enum { MOST_FREQS = 3 }; /* of the angles that there are */

static inline kvc_rope random_rope(const kvc_layer *layer, const double *angles) {
    int first = layer->value_in_key ? layer->v_dim : 0, choice = random_int(0, 20);
    kvc_rope rope = {.kind = choice == 0 ? KVC_ROPE_UNKNOWN : choice < 5 ? KVC_ROPE_NONE : KVC_ROPE_FREQUENCIES};
    if (choice > 14 && layer->k_type < KVC_FLOAT_TYPES) /* it may move elements to -128 */
        return (kvc_rope){.kind = KVC_ROPE_FUNCTION, .shift = move_keys};
    if (rope.kind != KVC_ROPE_FREQUENCIES) return rope;
    if (layer->k_dim - first < 2) return (kvc_rope){.kind = KVC_ROPE_NONE};
    rope.first_dim = random_int(first, layer->k_dim - 1);
    int most = (layer->k_dim - rope.first_dim) / 2;
    rope.num_freqs = random_int(1, (most < MOST_FREQS ? most : MOST_FREQS) + 1);
    rope.interleaved = random_int(0, 2);
    rope.inv_freq = angles + random_int(0, 2);
    return rope;
}

static inline kvc_layer random_layer(const double *angles) {
    kvc_layer layer = {.num_kv_heads = random_int(1, 3),
                       .k_dim = random_int(1, 8),
                       .v_dim = random_int(1, 5),
                       .k_type = random_int(0, 3),
                       .v_type = random_int(0, 3),
                       .policy = random_policy()};
    const int32_t quantised = layer.num_kv_heads == 1 ? KVC_INT8 : KVC_Q8_0;
    if (layer.k_dim == 7) layer.k_dim = SCALED_DIM, layer.k_type = quantised;
    if (layer.k_dim == 6) layer.k_dim = SCALED_DIM;
    if (layer.v_dim == 4) layer.v_dim = SCALED_DIM, layer.v_type = quantised;
    layer.value_in_key = layer.v_dim <= layer.k_dim && layer.v_type == layer.k_type;
    if (!random_int(0, 5)) layer.v_dim = layer.value_in_key = 0; /* keys alone; their v_type is ignored */
    layer.rope = random_rope(&layer, angles);
    return layer;
}

/* Gives a layer sketches of its keys if it can have them.  Half of the windows become long enough for that. */
static inline void add_sketches(kvc_layer *layer) {
    kvc_policy *policy = &layer->policy;
    if (layer->k_dim != SCALED_DIM || !layer->v_dim || layer->value_in_key || policy->kind == KVC_CROSS) return;
    if (policy->stride > 1) return;
    if (policy->kind != KVC_FULL && layer->v_dim % 2 == 0) return;
    if (policy->kind == KVC_SLIDING) *policy = sliding_policy(8192 + policy->window % 8192, policy->num_sink_tokens, 0);
    if (policy->kind == KVC_CHUNKED) *policy = chunked_policy(8192, 0);
    layer->sketch_bits = 2;
}

/* Fills in random layers: the first stores tokens; others may have its policy, copy a layer, or share rows. */
static inline int random_layers(kvc_layer *layers, const double *angles) {
    int num_layers = random_int(1, MAX_LAYERS), lazy = random_int(0, 3);
    for (int l = 0; l < num_layers; l++) {
        do {
            layers[l] = random_layer(angles);
        } while (l == 0 && (layers[l].policy.kind == KVC_CROSS || layers[l].policy.kind == KVC_NONE));
        if (l && random_int(0, 2)) layers[l].policy = layers[l - 1].policy;
        if (l && !random_int(0, 4)) { /* like the layer before, except for the rope */
            layers[l] = layers[l - 1];
            layers[l].share = 0;
            layers[l].rope = random_rope(&layers[l], angles);
        }
        if (lazy && layers[l].rope.kind == KVC_ROPE_FUNCTION) /* a group with one has no deltas */
            layers[l].rope = (kvc_rope){.kind = KVC_ROPE_NONE};
        if (l && layers[l].policy.kind == KVC_FULL && !random_int(0, 3)) {
            layers[l].policy.stride = random_int(2, 6);
            layers[l].sketch_bits = 0; /* of the layer before */
        }
        add_sketches(&layers[l]);
        int from = random_int(0, num_layers);
        if (from < l && !layers[from].share && !random_int(0, 4)) {
            layers[l] = layers[from];
            layers[l].share = from + 1;
        }
    }
    return num_layers;
}

/* Makes a cache of random layers and limits; set the block size and p->roundings before. */
static inline void random_pair(pair *p) {
    kvc_layer layers[MAX_LAYERS];
    int num_layers = random_layers(layers, p->roundings ? any_angles : right_angles);
    if (!random_int(0, 3)) p->config.max_seq_len = random_int(30, 80);
    if (!random_int(0, 3)) p->config.max_sequences = random_int(2, 6);
    if (!random_int(0, 3)) p->config.capacity = random_int(40, 150);
    if (!random_int(0, 3)) p->config.max_bytes = random_int(20, 80) << 10;
    p->config.num_threads = random_int(0, 4) ? 1 : 3;
    pair_new(p, num_layers, layers);
}

/* Runs an edit or a pass, and now and then frees the view and takes another. */
static inline void random_step(pair *p, view *v) {
    if (random_int(0, 2))
        random_pass(p);
    else
        random_edit(p);
    keep_small(p);
    if (random_int(0, 8)) return;
    view_free(v, p);
    if (random_int(0, 2)) view_new(v, p, random_id(), random_int(0, p->config.num_layers));
}

/* Takes random steps on a new cache.  roundings: how often a key may be rounded, as settling, dividing and replacing
 * rotate it by any angle; 0: angles are right ones, which round nothing. */
static inline void random_test(int block_size, int roundings, int num_steps) {
    static pair p;
    static view v;
    p = (pair){.config.block_size = block_size, .roundings = roundings};
    random_pair(&p);
    for (int i = 0; i < num_steps; i++) {
        random_step(&p, &v);
        pair_check(&p);
    }
    view_free(&v, &p);
    pair_free(&p);
}

#endif
