/* oracle.h: a cache, and what it should hold as plain lists of rows, driven together.
 *
 * Each pair_ function calls the library, does the same to the lists, and says whether the two agree on the outcome;
 * pair_check compares everything that can be seen.  Every token ever put has a number of its own, its tag.  The
 * contents of its rows follow from the tag, so that moved, shared or mixed up rows show.
 */
#ifndef KVC_TEST_ORACLE_H
#define KVC_TEST_ORACLE_H

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "rows/copy.h"
#include "kvcache.h"
#include "support/keeping.h"
#include "support/memory.h"
#include "support/sketches.h"
#include "support/test.h"

enum {
    MAX_LAYERS = 6,
    MAX_SEQUENCES = 12,
    MAX_ROWS = 320,
    MAX_BATCH = 300,
    MAX_PLACES = 1 << 13, /* blocks, runs or filled slots of a layer */
    MAX_TAGS = 1 << 18,
    MAX_ROW = 64 /* elements of all heads of a K or V row */
};

typedef struct row {
    int32_t position;
    int32_t tag;    /* number of its token, from which its contents follow */
    int32_t slot;   /* shared rows have the same slot, and count once */
    int32_t base;   /* position it was put at; its key has moved by position - base */
    int32_t delta;  /* part of position - base not yet applied to the stored key */
    int32_t before; /* tag of the token before it when it was put: token_before */
} row;

/* Positions [begin, end); end 0: none. */
typedef struct range {
    int32_t begin, end;
} range;

typedef struct row_list {
    int32_t num;
    range lost;    /* all rows that have expired stood here */
    range missing; /* and here other layers have, or had, rows that this one lacks since some were replaced */
    row rows[MAX_ROWS];
} row_list;

typedef struct sequence {
    int64_t id;
    int64_t used; /* of a retained sequence: when it was used last, from 1 on; 0: it is not a retained one */
    int64_t num_pins;
    int32_t exact_to;            /* rows from there on do not follow from the tokens; INT32_MAX: all do */
    row_list layers[MAX_LAYERS]; /* empty for layers that share rows */
} sequence;

/* The rows that the open batch was given for a sequence in a cross-attention layer. */
typedef struct cross_put {
    int layer, n;
    int64_t id;
    int32_t tag; /* tag of the first row */
} cross_put;

typedef struct pair {
    kvc_cache *cache;
    kvc_config config;
    kvc_layer layers[MAX_LAYERS];
    int roundings;    /* how often a key may be rounded to its type; 0: never, as all angles are right ones */
    int32_t next_tag; /* next unused tag, and slot */
    int num_holds;
    memory *memory;   /* not NULL: where the cache's memory comes from, which may be told to fail; without an
                         allocator, the test refuses what the core's own one asks for */
    kvc_batch *batch; /* the open one, its tokens are tagged from batch_tag on */
    int32_t num_tokens, batch_tag;
    int32_t positions[MAX_BATCH];
    int64_t ids[MAX_BATCH];
    const int32_t *parents; /* parents of its tokens, or NULL */
    int has_own_parents;    /* batches get own_parents, and not random ones */
    const int32_t *own_parents;
    char written[MAX_LAYERS][MAX_BATCH]; /* whether token was put in layer */
    const uint8_t *replaced;             /* which layers the open batch restores; NULL: it is an ordinary one */
    void (*look)(struct pair *p);        /* not NULL: called when random tokens were put */
    int num_cross_puts;
    cross_put cross_puts[MAX_SEQUENCES * MAX_LAYERS];
    int64_t moving;                         /* the sequence that is edited while move_keys is called */
    int calls_left, call_failed, num_calls; /* of move_keys, before one fails (-1: none does) */
    int64_t clock;                          /* counts uses of retained sequences */
    int has_mixed;                          /* retained sequences were attached that may not belong together */
    int32_t num_sequences;                  /* with rows, or whose rows were all expired */
    sequence sequences[MAX_SEQUENCES];
} pair;

static const size_t element_sizes[] = {4, 2, 2}; /* by KVC_F32, KVC_F16, KVC_BF16 */

static const kvc_policy full_policy = {.kind = KVC_FULL};

static inline kvc_policy chunked_policy(int32_t attention_chunk_size, int32_t resume_window) {
    return (kvc_policy){
        .kind = KVC_CHUNKED, .resume_window = resume_window, .attention_chunk_size = attention_chunk_size};
}

static inline kvc_policy sliding_policy(int32_t window, int32_t num_sink_tokens, int32_t resume_window) {
    return (kvc_policy){
        .kind = KVC_SLIDING, .window = window, .num_sink_tokens = num_sink_tokens, .resume_window = resume_window};
}

/* Makes a cache of these layers; set the other fields of p->config before. */
static inline void pair_new(pair *p, int num_layers, const kvc_layer *layers) {
    memcpy(p->layers, layers, (size_t)num_layers * sizeof *layers);
    p->calls_left = -1;
    for (int l = 0; l < num_layers; l++)
        if (p->layers[l].rope.kind == KVC_ROPE_FUNCTION) p->layers[l].rope.user = p;
    p->config.struct_size = sizeof p->config;
    p->config.layers = p->layers;
    p->config.layer_size = sizeof *p->layers;
    p->config.num_layers = num_layers;
    if (p->memory && p->memory->allocator.alloc) p->config.allocator = &p->memory->allocator;
    CHECKF(kvc_cache_new(&p->config, &p->cache) == KVC_OK, "%s", kvc_last_error());
}

static inline int64_t capacity_of(const pair *p) {
    return p->config.capacity ? p->config.capacity : p->config.max_seq_len * p->config.max_sequences;
}

static inline void pair_free(pair *p) { CHECKF(kvc_cache_free(p->cache) == KVC_OK, "%s", kvc_last_error()); }

/* ---- what rows hold ---------------------------------------------------------------------------------------------- */

/* An element of a token's K (or V) row.  It is a small odd integer, so that every type holds it, even after a rotation
 * by right angles, whose cosines are not quite 0.  The last element of SCALED_DIM is the largest, so that the scale is
 * 1. */
enum { SCALED_DIM = 32 };
static inline float element(int32_t tag, int32_t layer, int is_v, int32_t head, int32_t d) {
    uint32_t x = (uint32_t)tag * 0x9e3779b1u + (uint32_t)(((layer * 2 + is_v) * 64 + head) * 64 + d) * 0x85ebca6bu;
    x = (x ^ x >> 15) * 0x2c1b3c6du;
    if (d == SCALED_DIM - 1) return x >> 31 ? 127 : -127;
    return (float)(x >> 25) * 2 - 127;
}

/* The element after the caller's function has moved it: an integer again, and no larger. */
static inline float moved_element(float x, int32_t layer, int32_t moved) {
    return (float)(((uint32_t)(int32_t)x + 128 + (uint32_t)moved * (uint32_t)(2 * layer + 1)) & 255) - 128;
}

/* A rotation by right angles gives one of four keys, and rounds no element. */
#define RIGHT_ANGLE 1.57079632679489661923
static const double any_angles[] = {1, -0.31, 0.017, 1.7, 100};
static const double right_angles[] = {RIGHT_ANGLE, -RIGHT_ANGLE, 2 * RIGHT_ANGLE, 5 * RIGHT_ANGLE, -3 * RIGHT_ANGLE};

/* Rotates a key by moved * inv_freq, in double. */
static inline void rotate(const kvc_rope *rope, int32_t moved, double *k) {
    for (int32_t i = 0; i < rope->num_freqs; i++) {
        double *a = k + rope->first_dim + (rope->interleaved ? 2 * i : i);
        double *b = a + (rope->interleaved ? 1 : rope->num_freqs);
        double x = *a, y = *b, c = cos(moved * rope->inv_freq[i]), s = sin(moved * rope->inv_freq[i]);
        *a = x * c - y * s;
        *b = y * c + x * s;
    }
}

/* Computes head h of a token's K row after it moved by `moved`. */
static inline void moved_key(const pair *p, int l, int32_t tag, int32_t moved, int32_t h, double *k) {
    const kvc_layer *layer = &p->layers[l];
    int32_t first = layer->value_in_key ? layer->v_dim : 0;
    for (int d = 0; d < layer->k_dim; d++) k[d] = element(tag, l, 0, h, d);
    if (!moved) return;
    if (layer->rope.kind == KVC_ROPE_FREQUENCIES) rotate(&layer->rope, moved, k);
    for (int d = 0; d < layer->k_dim && !p->roundings; d++) k[d] = nearbyint(k[d]);
    for (int d = first; d < layer->k_dim && layer->rope.kind == KVC_ROPE_FUNCTION; d++)
        k[d] = moved_element((float)k[d], l, moved);
}

/* The kvc_shift_fn of all: what may and may not be done from inside is looked at on the way. */
static inline int32_t move_keys(void *user, int32_t layer, float *keys, int32_t num_kv_heads, int64_t num_rows,
                                int32_t k_dim, int32_t delta) {
    pair *p = user;
    const kvc_layer *config = &p->layers[layer];
    kvc_batch *batch = NULL;
    CHECK(num_kv_heads == config->num_kv_heads && k_dim == config->k_dim && num_rows > 0 && delta != 0);
    p->num_calls++;
    CHECK(kvc_seq_len(p->cache, p->moving, -1) > 0);
    CHECK(kvc_shift(p->cache, p->moving, 0, 1, 1) == KVC_ERR_BUSY);
    CHECK(kvc_begin(p->cache, 1, &(int32_t){0}, NULL, NULL, &batch) == KVC_ERR_BUSY);
    CHECK(kvc_settle(p->cache) == KVC_ERR_BUSY && kvc_cache_free(p->cache) == KVC_ERR_BUSY);
    CHECKF(kvc_validate(p->cache) == KVC_OK, "%s", kvc_last_error());
    for (int64_t i = 0; i < num_kv_heads * num_rows; i++)
        for (int d = config->value_in_key ? config->v_dim : 0; d < k_dim; d++)
            keys[i * k_dim + d] = moved_element(keys[i * k_dim + d], layer, delta);
    if (p->calls_left != 0) {
        p->calls_left--;
        return 0;
    }
    p->call_failed = 1;
    return -3;
}

static inline float read_element(const void *from, int32_t type) {
    float x;
    kvc_kernels_scalar.convert(type, KVC_F32, &x, 0, from, 0, 1, 1);
    return x;
}

/* ---- the oracle -------------------------------------------------------------------------------------------------- */

static inline sequence *find_sequence(const pair *p, int64_t id) {
    for (int s = 0; s < p->num_sequences; s++)
        if (p->sequences[s].id == id) return (sequence *)&p->sequences[s];
    return NULL;
}

static inline sequence *add_sequence(pair *p, int64_t id) {
    sequence *found = find_sequence(p, id);
    if (found) return found;
    CHECK(p->num_sequences < MAX_SEQUENCES);
    found = &p->sequences[p->num_sequences++];
    *found = (sequence){.id = id, .exact_to = INT32_MAX};
    return found;
}

static inline void forget_sequence(pair *p, int64_t id) {
    sequence *found = find_sequence(p, id);
    if (found) *found = p->sequences[--p->num_sequences];
}

/* Whether a layer has rows of its own, which are tokens'. */
static inline int keeps_tokens(const pair *p, int l) {
    const kvc_layer *layer = &p->layers[l];
    return !layer->share && layer->policy.kind != KVC_CROSS && layer->policy.kind != KVC_NONE;
}

static inline int is_cross(const pair *p, int l) {
    return !p->layers[l].share && p->layers[l].policy.kind == KVC_CROSS;
}

/* For how many positions a layer has one row. */
static inline int32_t stride_of(const pair *p, int l) {
    const kvc_policy *policy = &p->layers[l].policy;
    return policy->kind == KVC_FULL && policy->stride > 1 ? policy->stride : 1;
}

/* Whether a token at a position gets a row in a layer. */
static inline int gets_row(const pair *p, int l, int32_t position) {
    return (position + (int64_t)1) % stride_of(p, l) == 0;
}

/* Whether an edit cuts what a row of some layer stands for: it removes or moves positions [begin, end), and moves
 * tokens by delta. */
static inline int cuts_rows(const pair *p, int32_t next, int32_t begin, int32_t end, int32_t delta) {
    for (int l = 0; l < p->config.num_layers; l++) {
        const int32_t stride = stride_of(p, l);
        if (begin < next && (begin % stride || delta % stride || (end < next && end % stride))) return 1;
    }
    return 0;
}

static inline int has_strides(const pair *p) {
    for (int l = 0; l < p->config.num_layers; l++)
        if (stride_of(p, l) > 1) return 1;
    return 0;
}

/* The layer whose rows a layer reads. */
static inline int source_of(const pair *p, int l) { return p->layers[l].share ? p->layers[l].share - 1 : l; }

static inline int32_t rows_of(const pair *p, const sequence *s) {
    int32_t most = 0;
    for (int l = 0; s && l < p->config.num_layers; l++)
        if (keeps_tokens(p, l) && stride_of(p, l) == 1) most = s->layers[l].num > most ? s->layers[l].num : most;
    return most;
}

/* Whether it holds rows of tokens. */
static inline int holds_tokens(const pair *p, const sequence *s) {
    for (int l = 0; s && l < p->config.num_layers; l++)
        if (keeps_tokens(p, l) && s->layers[l].num) return 1;
    return 0;
}

/* Whether it holds rows in any layer. */
static inline int holds_rows(const pair *p, const sequence *s) {
    for (int l = 0; s && l < p->config.num_layers; l++)
        if (s->layers[l].num) return 1;
    return 0;
}

static inline void list_add(row_list *list, row r) {
    CHECK(list->num < MAX_ROWS);
    if (list->num < MAX_ROWS) list->rows[list->num++] = r;
}

/* Whether a sequence has rows, or has lost some. */
static inline int holds_any(const pair *p, int64_t id) {
    const sequence *s = find_sequence(p, id);
    for (int l = 0; s && l < p->config.num_layers; l++)
        if (s->layers[l].num || s->layers[l].lost.end) return 1;
    return 0;
}

static inline void tidy(pair *p, sequence *s) {
    if (!holds_any(p, s->id)) forget_sequence(p, s->id);
}

/* Smallest (sign -1) or largest (sign 1) position in any layer; -1: none. */
static inline int32_t extreme_of(const pair *p, const sequence *s, int sign) {
    int32_t found = -1;
    for (int l = 0; s && l < p->config.num_layers; l++)
        for (int i = 0; keeps_tokens(p, l) && i < s->layers[l].num; i++)
            if (found < 0 || (s->layers[l].rows[i].position - found) * sign > 0) found = s->layers[l].rows[i].position;
    return found;
}

/* The position behind all its tokens, expired ones included. */
static inline int32_t next_of(const pair *p, const sequence *s) {
    int32_t next = extreme_of(p, s, 1) + 1;
    for (int l = 0; s && l < p->config.num_layers; l++)
        next = s->layers[l].lost.end > next ? s->layers[l].lost.end : next;
    return next;
}

/* The lowest position at which a query may come: the next one, or one where a layer lacks rows that others have. */
static inline int32_t low_of(const pair *p, const sequence *s) {
    int32_t low = next_of(p, s);
    for (int l = 0; s && l < p->config.num_layers; l++)
        if (s->layers[l].missing.end && s->layers[l].missing.begin + 1 - stride_of(p, l) < low)
            low = s->layers[l].missing.begin + 1 - stride_of(p, l); /* where what the row stands for begins */
    return low;
}

static inline int32_t not_negative(int32_t x) { return x > 0 ? x : 0; }

static inline int32_t lowest_seen(const kvc_policy *policy, int32_t position) {
    if (policy->kind == KVC_CHUNKED) return position / policy->attention_chunk_size * policy->attention_chunk_size;
    return policy->kind == KVC_SLIDING ? not_negative(position - policy->window + 1) : 0;
}

static inline int32_t num_kept(const kvc_policy *policy) {
    return policy->resume_window ? policy->resume_window : policy->window;
}

static inline int is_kept(const kvc_policy *policy, int32_t position, int32_t low) {
    if (policy->kind == KVC_CHUNKED) return position >= lowest_seen(policy, low) - policy->resume_window;
    return policy->kind != KVC_SLIDING || position < policy->num_sink_tokens ||
           position >= not_negative(low - num_kept(policy) + 1);
}

/* Whether a query at this position would miss rows that have expired, or not replaced, below position `end`. */
static inline int misses_below(const pair *p, const sequence *s, int32_t position, int32_t end) {
    for (int l = 0; s && l < p->config.num_layers; l++) {
        if (!keeps_tokens(p, l)) continue;
        const kvc_policy *policy = &p->layers[l].policy;
        const range gone[] = {s->layers[l].lost, s->layers[l].missing};
        int32_t lowest = lowest_seen(policy, position),
                sinks = policy->kind == KVC_SLIDING ? policy->num_sink_tokens : 0;
        for (int i = 0; i < 2; i++)
            if (gone[i].end && gone[i].begin < end && (lowest < gone[i].end || gone[i].begin < sinks)) return 1;
    }
    return 0;
}

static inline int misses(const pair *p, const sequence *s, int32_t position) {
    return misses_below(p, s, position, KVC_END);
}

static inline int same_policy(const kvc_policy *a, const kvc_policy *b) {
    if (a->kind != b->kind) return 0;
    if (a->kind == KVC_FULL) return (a->stride > 1 ? a->stride : 1) == (b->stride > 1 ? b->stride : 1);
    if (a->kind == KVC_CHUNKED)
        return a->attention_chunk_size == b->attention_chunk_size && a->resume_window == b->resume_window;
    return a->window == b->window && a->num_sink_tokens == b->num_sink_tokens && num_kept(a) == num_kept(b);
}

/* Whether two layers, both with tokens, are of one group. */
static inline int same_group(const pair *p, int a, int b) {
    return keeps_tokens(p, a) && keeps_tokens(p, b) && same_policy(&p->layers[a].policy, &p->layers[b].policy);
}

/* Whether layer l is the first of its group; each cross-attention layer is one by itself. */
static inline int leads_group(const pair *p, int l) {
    for (int i = 0; i < l; i++)
        if (same_group(p, i, l)) return 0;
    return keeps_tokens(p, l) || is_cross(p, l);
}

/* Whether some layer of the group has a rope of this kind. */
static inline int group_has(const pair *p, int l, int32_t kind) {
    for (int i = 0; i < p->config.num_layers; i++)
        if (same_group(p, i, l) && p->layers[i].rope.kind == kind) return 1;
    return 0;
}

static inline int rope_is_unknown(const pair *p) {
    for (int l = 0; l < p->config.num_layers; l++)
        if (keeps_tokens(p, l) && p->layers[l].rope.kind == KVC_ROPE_UNKNOWN) return 1;
    return 0;
}

static inline int32_t new_slot(pair *p) {
    CHECK(p->next_tag < MAX_TAGS - 1);
    return p->next_tag++;
}

/* Rows of all sequences in a layer, shared ones counted once. */
static inline int32_t live_rows(const pair *p, int l) {
    static int32_t seen[MAX_TAGS], round;
    int32_t num = 0;
    round++;
    for (int s = 0; s < p->num_sequences; s++) {
        const row_list *list = &p->sequences[s].layers[l];
        for (int i = 0; i < list->num; i++) {
            num += seen[list->rows[i].slot] != round;
            seen[list->rows[i].slot] = round;
        }
    }
    return num;
}

static inline int count_id(int64_t id, int n, const int64_t *ids) {
    int num = 0;
    for (int t = 0; t < n; t++) num += ids[t] == id;
    return num;
}

/* The smallest position that one sequence has in a batch, its next included, or, if it has none, the one before. */
static inline int32_t lowest_query(const pair *p, const sequence *s, int n, const int32_t *positions,
                                   const int64_t *ids) {
    int32_t low = holds_tokens(p, s) ? low_of(p, s) : INT32_MAX;
    if (!count_id(s->id, n, ids)) return not_negative(low - 1);
    for (int t = 0; t < n; t++)
        if (ids[t] == s->id && positions[t] < low) low = positions[t];
    return low;
}

static inline void widen(range *r, int32_t position) {
    if (!r->end || position < r->begin) r->begin = position;
    if (position >= r->end) r->end = position + 1;
}

/* Expires what no query from position `low` on will see, and the policies do not keep. */
static inline void expire_below(pair *p, sequence *s, int32_t low) {
    for (int l = 0; l < p->config.num_layers; l++) {
        if (!keeps_tokens(p, l)) continue;
        row_list *list = &s->layers[l];
        int32_t num = 0;
        for (int i = 0; i < list->num; i++) {
            row r = list->rows[i];
            if (is_kept(&p->layers[l].policy, r.position, low)) {
                list->rows[num++] = r;
                continue;
            }
            widen(&list->lost, r.position);
        }
        list->num = num;
    }
}

/* Expires as a batch does that begins. */
static inline void expire(pair *p, int n, const int32_t *positions, const int64_t *ids) {
    for (int s = 0; s < p->num_sequences; s++)
        if (!p->sequences[s].used)
            expire_below(p, &p->sequences[s], lowest_query(p, &p->sequences[s], n, positions, ids));
}

/* Expires as a batch does that is committed: what a query in the place of a sequence's last token would not see. */
static inline void expire_behind(pair *p, sequence *s) { expire_below(p, s, not_negative(low_of(p, s) - 1)); }

/* Whether the tokens of a batch get rows in a layer. */
static inline int takes_tokens(const pair *p, int l, const uint8_t *replaced) {
    return keeps_tokens(p, l) && (!replaced || replaced[l]);
}

/* The arguments of a batch: num tokens at these positions of these sequences, and the layers that it restores (NULL: it
 * restores nothing). */
typedef struct wanted {
    int num;
    const int32_t *positions;
    const int64_t *ids;
    const uint8_t *replaced;
} wanted;

/* The most rows a policy keeps of a sequence that has one at each position. */
static inline int64_t most_kept(const kvc_policy *policy) {
    switch (policy->kind) {
    case KVC_SLIDING: return num_kept(policy) + policy->num_sink_tokens;
    case KVC_CHUNKED: return policy->attention_chunk_size + policy->resume_window;
    default: return INT64_MAX;
    }
}

/* Whether a layer will hold at most max_seq_len rows of a sequence once a batch is committed, whatever its number of
 * tokens.  That is so by its policy, if all rows and tokens stand at rising positions. */
static inline int stays_within(const pair *p, int l, int64_t id, wanted batch) {
    const sequence *s = find_sequence(p, id);
    const row_list *list = s ? &s->layers[l] : NULL;
    int32_t next = next_of(p, s);
    int rises = low_of(p, s) == next && !batch.replaced && most_kept(&p->layers[l].policy) <= p->config.max_seq_len;
    for (int t = 0; t < batch.num; t++) {
        if (batch.ids[t] != id) continue;
        rises &= batch.positions[t] >= next;
        next = batch.positions[t] + 1;
    }
    for (int i = 1; list && i < list->num; i++) rises &= list->rows[i].position > list->rows[i - 1].position;
    return rises;
}

/* How many of the first num tokens of a batch are of a sequence and get a row in a layer. */
static inline int count_rows(const pair *p, int l, int64_t id, int num, wanted batch) {
    int rows = 0;
    for (int t = 0; t < num; t++) rows += batch.ids[t] == id && gets_row(p, l, batch.positions[t]);
    return rows;
}

/* Whether a batch fits, in a copy of the oracle that has expired for it; num_sequences: with the batch. */
static inline int fits(const pair *p, const pair *expired, int64_t num_sequences, wanted batch) {
    const kvc_config *c = &p->config;
    if (c->max_sequences && num_sequences > c->max_sequences) return 0;
    for (int l = 0; l < c->num_layers; l++) {
        int64_t more = 0; /* tokens that count for the capacity */
        if (!takes_tokens(p, l, batch.replaced)) continue;
        for (int t = 0; t < batch.num; t++) {
            const sequence *s = find_sequence(expired, batch.ids[t]);
            const int64_t all = (s ? s->layers[l].num : 0) + count_rows(p, l, batch.ids[t], batch.num, batch),
                          until = (s ? s->layers[l].num : 0) + count_rows(p, l, batch.ids[t], t, batch);
            const int within = stays_within(p, l, batch.ids[t], batch);
            if (c->max_seq_len && all > c->max_seq_len && !within) return 0;
            more += gets_row(p, l, batch.positions[t]) && (c->capacity || !within || until < c->max_seq_len);
        }
        if (capacity_of(p) && live_rows(expired, l) + more > capacity_of(p)) return 0;
    }
    return 1;
}

/* Forgets what the sequences of these tokens hold in the layers that are replaced. */
static inline void drop_replaced(pair *p, int n, const int64_t *ids, const uint8_t *replaced) {
    for (int t = 0; t < n; t++) {
        sequence *s = find_sequence(p, ids[t]);
        for (int l = 0; s && l < p->config.num_layers; l++)
            if (takes_tokens(p, l, replaced)) {
                row_list *list = &s->layers[l]; /* what it had is missing from now on, unless it comes back */
                for (int i = 0; i < list->num; i++) widen(&list->missing, list->rows[i].position);
                for (int32_t at = list->lost.begin; at < list->lost.end; at++) widen(&list->missing, at);
                s->layers[l].num = 0;
                s->layers[l].lost = (range){0, 0};
            }
    }
}

/* Whether n tokens fit (max_bytes aside); if so, *after is the oracle once it has expired. */
static inline kvc_status oracle_fit(const pair *p, int n, const int32_t *positions, const int64_t *ids,
                                    const uint8_t *replaced, pair *after) {
    static pair rest;
    int64_t num_sequences = 0;
    for (int s = 0; s < p->num_sequences; s++)
        num_sequences += holds_rows(p, &p->sequences[s]) && !p->sequences[s].used;
    for (int t = 0; t < n; t++) num_sequences += !holds_rows(p, find_sequence(p, ids[t])) && !count_id(ids[t], t, ids);
    *after = *p;
    expire(after, n, positions, ids);
    rest = *after;
    if (replaced) drop_replaced(&rest, n, ids, replaced);
    return fits(p, &rest, num_sequences, (wanted){n, positions, ids, replaced}) ? KVC_OK : KVC_ERR_FULL;
}

/* The status that kvc_begin should return, apart from max_bytes.  On KVC_OK, *after is the oracle with rows expired. */
static inline kvc_status oracle_begin(const pair *p, int n, const int32_t *positions, const int64_t *ids,
                                      const uint8_t *replaced, pair *after) {
    for (int t = 0; !replaced && t < n; t++)
        if (misses(p, find_sequence(p, ids[t]), positions[t])) return KVC_ERR_GONE;
    return oracle_fit(p, n, positions, ids, replaced, after);
}

/* Returns the row put last at a position; NULL: none. */
static inline row *find_row(const row_list *list, int32_t position) {
    for (int i = list->num - 1; i >= 0; i--)
        if (list->rows[i].position == position) return (row *)&list->rows[i];
    return NULL;
}

/* Notes what layers of a sequence lack, once these have been replaced: what a window let go before, and what other
 * layers have. */
static inline void oracle_note(const pair *p, sequence *s, const uint8_t *replaced) {
    for (int l = 0; l < p->config.num_layers; l++) {
        const kvc_policy *policy = &p->layers[l].policy;
        row_list *list = &s->layers[l];
        int32_t last = -1, at = policy->kind == KVC_SLIDING ? policy->num_sink_tokens : 0;
        for (int i = 0; i < list->num; i++) last = list->rows[i].position > last ? list->rows[i].position : last;
        for (; takes_tokens(p, l, replaced) && last >= 0 && at < lowest_seen(policy, last + 1); at++)
            if (!find_row(list, at)) widen(&list->lost, at);
    }
    for (int l = 0; l < p->config.num_layers; l++) {
        row_list *list = &s->layers[l];
        const range before = list->missing;
        list->missing = (range){0, 0};
        for (int other = 0; other < p->config.num_layers; other++)
            for (int i = 0; keeps_tokens(p, l) && keeps_tokens(p, other) && i < s->layers[other].num; i++) {
                const int32_t last = s->layers[other].rows[i].position;
                for (int32_t at = last + 1 - stride_of(p, other); at <= last; at++)
                    if (gets_row(p, l, at) && !find_row(list, at) && !(at >= list->lost.begin && at < list->lost.end))
                        widen(&list->missing, at);
            }
        for (int32_t at = before.begin; at < before.end && at < list->missing.end; at++)
            if (gets_row(p, l, at) && !find_row(list, at) && !(at >= list->lost.begin && at < list->lost.end))
                widen(&list->missing, at);
    }
}

/* Trims what layers with a stride lack to positions of rows, after an edit. */
static inline void trim_missing(pair *p) {
    for (int s = 0; s < p->num_sequences; s++)
        for (int l = 0; l < p->config.num_layers; l++) {
            range *missing = &p->sequences[s].layers[l].missing;
            if (stride_of(p, l) == 1) continue;
            while (missing->begin < missing->end && !gets_row(p, l, missing->begin)) missing->begin++;
            while (missing->begin < missing->end && !gets_row(p, l, missing->end - 1)) missing->end--;
            if (missing->begin >= missing->end) *missing = (range){0, 0};
        }
}

/* ---- exactness: what follows from a sequence's tokens alone ------------------------------------------------------ */

static inline void make_inexact(sequence *s, int32_t position) {
    if (position < s->exact_to) s->exact_to = position;
}

/* The rows at the end of a sequence were dropped: it went on at `before`, and goes on at `next`. */
static inline void oracle_cut(sequence *s, int32_t next, int32_t before) {
    if (s->exact_to >= next && s->exact_to < before) s->exact_to = INT32_MAX;
}

/* Whether a token of the open batch sees another of its sequence. */
static inline int sees_token(const pair *p, int t, int other) {
    if (!p->parents) return p->positions[other] <= p->positions[t];
    while (t > other) t = p->parents[t];
    return t == other;
}

/* The position from which the open batch's tokens of a sequence are inexact if the tokens `kept` are kept.  A token is
 * inexact if it does not stand behind all rows, or if it saw others than the kept tokens before it. */
static inline int32_t batch_exact_to(const pair *p, int64_t id, const char *kept) {
    int32_t next = next_of(p, find_sequence(p, id)), exact_to = INT32_MAX;
    for (int t = 0; t < p->num_tokens; t++) {
        if (p->ids[t] != id || !kept[t]) continue;
        int follows = !p->replaced && p->positions[t] == next;
        for (int other = 0; other < p->num_tokens; other++) {
            if (p->ids[other] != id || other == t) continue;
            const int sees = sees_token(p, t, other);
            follows &= kept[other] ? sees || other > t : !sees;
        }
        if (!follows && p->positions[t] < exact_to) exact_to = p->positions[t];
        next = p->positions[t] + 1;
    }
    return exact_to;
}

/* Returns the tag of the token before token t of the open batch, or -1 for a first token.  Returns NO_TOKEN if token t
 * did not see exactly one token at each position before its own.  Returns ANY_TOKEN if that is not known, because rows
 * before it have expired. */
enum { NO_TOKEN = -2, ANY_TOKEN = -3 };
static inline int32_t token_before(const pair *p, int t) {
    const sequence *s = find_sequence(p, p->ids[t]);
    const int32_t at = p->positions[t];
    int32_t before = p->replaced ? NO_TOKEN : at ? ANY_TOKEN : -1, num = 0;
    for (int l = 0; s && l < p->config.num_layers; l++)
        for (int i = 0; keeps_tokens(p, l) && i < s->layers[l].num; i++) {
            const row *r = &s->layers[l].rows[i];
            if (r->position == at - 1 && before == ANY_TOKEN) before = r->tag;
            if (r->position >= at || (r->position == at - 1 && r->tag != before)) before = NO_TOKEN;
        }
    for (int other = 0; other < p->num_tokens; other++) {
        if (p->ids[other] != p->ids[t] || other == t || !sees_token(p, t, other)) continue;
        num += p->positions[other] == at - 1;
        if (p->positions[other] == at - 1 && before == ANY_TOKEN) before = p->batch_tag + other;
        if (p->positions[other] >= at || num > 1) before = NO_TOKEN;
    }
    return before == ANY_TOKEN && next_of(p, s) < at ? NO_TOKEN : before; /* behind a gap */
}

/* Checks that rows which pass for exact are: each was put where it stands, behind the token that is before it now. */
static inline void check_exact(const pair *p, const sequence *s) {
    enum { MOST = MAX_ROWS * 4 };
    static int32_t tags[MOST], before[MOST];
    if (p->has_mixed) return; /* the caller promises that they do */
    for (int i = 0; i < MOST; i++) tags[i] = before[i] = ANY_TOKEN;
    for (int l = 0; l < p->config.num_layers; l++)
        for (int i = 0; keeps_tokens(p, l) && i < s->layers[l].num; i++) {
            const row *r = &s->layers[l].rows[i];
            if (r->position >= s->exact_to || r->position >= MOST) continue;
            if (tags[r->position] == ANY_TOKEN) tags[r->position] = r->tag;
            before[r->position] = r->before;
            CHECKF(r->base == r->position && tags[r->position] == r->tag && r->before != NO_TOKEN,
                   "sequence %lld, position %d passes for exact", (long long)s->id, r->position);
        }
    for (int i = 0; i < MOST; i++)
        CHECKF(before[i] == ANY_TOKEN || (i && tags[i - 1] == ANY_TOKEN) || before[i] == (i ? tags[i - 1] : -1),
               "sequence %lld, position %d follows token %d", (long long)s->id, i, before[i]);
}

/* ---- committing -------------------------------------------------------------------------------------------------- */

/* Gives sequences the rows of the open batch, which restores layers, in order of position. */
static inline void oracle_restore(pair *p, const char *kept) {
    for (int t = 0; t < p->num_tokens; t++)
        if (kept[t]) {
            drop_replaced(p, 1, &p->ids[t], p->replaced);
            add_sequence(p, p->ids[t]);
        }
    for (int t = 0; t < p->num_tokens; t++) {
        sequence *s = kept[t] ? find_sequence(p, p->ids[t]) : NULL;
        for (int l = 0; s && l < p->config.num_layers; l++) {
            row_list *list = &s->layers[l];
            if (!takes_tokens(p, l, p->replaced) || !gets_row(p, l, p->positions[t])) continue;
            list_add(list, (row){p->positions[t], p->batch_tag + t, p->batch_tag + t, p->positions[t], 0, NO_TOKEN});
            for (int i = list->num - 1; i > 0 && list->rows[i - 1].position > list->rows[i].position; i--) {
                row after = list->rows[i];
                list->rows[i] = list->rows[i - 1];
                list->rows[i - 1] = after;
            }
        }
    }
    for (int t = 0; t < p->num_tokens; t++)
        if (kept[t]) oracle_note(p, find_sequence(p, p->ids[t]), p->replaced);
}

/* kept: of each token, whether it stays. */
static inline void oracle_commit(pair *p, const char *kept) {
    int32_t exact_to[MAX_BATCH], before[MAX_BATCH];
    for (int t = 0; t < p->num_tokens; t++) {
        exact_to[t] = batch_exact_to(p, p->ids[t], kept);
        before[t] = token_before(p, t);
    }
    if (p->replaced) oracle_restore(p, kept);
    for (int t = 0; !p->replaced && t < p->num_tokens; t++) {
        if (!kept[t]) continue;
        sequence *s = add_sequence(p, p->ids[t]);
        for (int l = 0; l < p->config.num_layers; l++)
            if (keeps_tokens(p, l) && gets_row(p, l, p->positions[t]))
                list_add(&s->layers[l],
                         (row){p->positions[t], p->batch_tag + t, p->batch_tag + t, p->positions[t], 0, before[t]});
    }
    for (int i = 0; i < p->num_cross_puts; i++) {
        const cross_put *put = &p->cross_puts[i];
        int any = 0;
        for (int t = 0; t < p->num_tokens; t++) any |= kept[t] && p->ids[t] == put->id;
        if (!any) continue;
        row_list *list = &add_sequence(p, put->id)->layers[put->layer];
        list->num = 0;
        for (int32_t r = 0; r < put->n; r++) list_add(list, (row){r, put->tag + r, put->tag + r, r, 0, NO_TOKEN});
    }
    for (int t = 0; t < p->num_tokens; t++)
        if (find_sequence(p, p->ids[t])) {
            make_inexact(find_sequence(p, p->ids[t]), exact_to[t]);
            expire_behind(p, find_sequence(p, p->ids[t]));
            tidy(p, find_sequence(p, p->ids[t]));
        }
}

static inline range range_below(range r, int32_t length) {
    return r.begin >= length ? (range){0, 0} : (range){r.begin, r.end < length ? r.end : length};
}

/* The range of the positions of missing rows once [begin, end) were moved or divided, from the lowest to the highest.
 * These follow from the first and last position that moves, and from the first and last that does not. */
static inline range range_moved(range r, int32_t begin, int32_t end, int32_t delta, int32_t divisor) {
    const int64_t ends[] = {r.begin, r.end - 1, begin - (int64_t)1, begin, end - (int64_t)1, end, -(int64_t)delta};
    range moved = {0, 0};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        const int64_t at = ends[i];
        int64_t to = at < begin || at >= end ? at : divisor ? at / divisor : at + delta;
        if (at >= r.begin && at < r.end && to >= 0) widen(&moved, to < INT32_MAX - 1 ? (int32_t)to : INT32_MAX - 2);
    }
    return moved;
}

static inline range range_removed(range r, int32_t begin, int32_t end, int shift) {
    const int32_t down = shift ? end - begin : 0;
    range left = {0, 0};
    if (r.begin < begin && r.begin < r.end) left = (range){r.begin, r.end < begin ? r.end : begin};
    if (r.end > end && r.begin < r.end) {
        widen(&left, (r.begin > end ? r.begin : end) - down);
        widen(&left, r.end - 1 - down);
    }
    return left;
}

static inline void oracle_copy_prefix(pair *p, int64_t src, int64_t dst, int32_t length) {
    forget_sequence(p, dst);
    if (!find_sequence(p, src)) return;
    sequence *to = add_sequence(p, dst);
    const sequence *from = find_sequence(p, src);
    for (int l = 0; l < p->config.num_layers; l++) {
        const row_list *list = &from->layers[l];
        for (int i = 0; i < list->num; i++)
            if (list->rows[i].position < length || is_cross(p, l)) list_add(&to->layers[l], list->rows[i]);
        to->layers[l].lost = range_below(list->lost, length);
        to->layers[l].missing = range_below(list->missing, length);
    }
    if (from->exact_to < length && next_of(p, to)) make_inexact(to, from->exact_to);
    tidy(p, to);
}

/* Whether this row, the same slot at the same position, is among the first num rows of a list. */
static inline int has_row(const row_list *list, int num, const row *r) {
    for (int i = 0; i < num; i++)
        if (list->rows[i].slot == r->slot && list->rows[i].position == r->position) return 1;
    return 0;
}

/* Whether a position is among the first num rows of a list. */
static inline int has_position(const row_list *list, int num, int32_t position) {
    for (int i = 0; i < num; i++)
        if (list->rows[i].position == position) return 1;
    return 0;
}

/* Adds the positions in [begin, end) that are gone from another list.  The first num rows of this list are its own.
 * Returns whether there are any. */
static inline int oracle_share_gone(const row_list *to, range *gone, range from, int num, int32_t begin, int32_t end) {
    begin = from.begin > begin ? from.begin : begin;
    end = from.end < end ? from.end : end;
    while (begin < end && has_position(to, num, begin)) begin++;
    while (begin < end && has_position(to, num, end - 1)) end--;
    if (begin >= end) return 0;
    gone->begin = gone->end && gone->begin < begin ? gone->begin : begin;
    gone->end = gone->end > end ? gone->end : end;
    return 1;
}

/* The position from which on rows are inexact that one sequence shares with another. */
static inline int32_t shared_exact_to(const pair *p, const sequence *from, const sequence *to, int32_t begin,
                                      int32_t end) {
    const int32_t next = next_of(p, to);
    int goes_on = next == 0;
    for (int l = 0; next && l < p->config.num_layers; l++) {
        const row *last = find_row(&to->layers[l], next - 1);
        goes_on |= keeps_tokens(p, l) && last && has_row(&from->layers[l], from->layers[l].num, last);
    }
    if (!goes_on || begin > next || from->exact_to < next || (next && to->exact_to < next)) return begin;
    return from->exact_to < end ? from->exact_to : INT32_MAX;
}

static inline void oracle_share(pair *p, int64_t src, int64_t dst, int32_t begin, int32_t end) {
    const sequence *from = find_sequence(p, src);
    if (!from || begin == end) return;
    sequence *to = add_sequence(p, dst);
    from = find_sequence(p, src);
    const int32_t exact_to = shared_exact_to(p, from, to, begin, end);
    int adds = 0;
    for (int l = 0; l < p->config.num_layers; l++) {
        const row_list *list = &from->layers[l];
        row_list *own = &to->layers[l];
        int num = own->num;
        for (int i = 0; i < list->num && is_cross(p, l) && !num; i++) list_add(own, list->rows[i]);
        if (is_cross(p, l)) continue;
        adds |= oracle_share_gone(own, &own->lost, list->lost, num, begin, end);
        oracle_share_gone(own, &own->missing, list->missing, num, begin, end);
        for (int i = 0; i < list->num; i++)
            if (list->rows[i].position >= begin && list->rows[i].position < end && !has_row(own, num, &list->rows[i])) {
                list_add(own, list->rows[i]);
                adds = 1;
            }
    }
    if (adds) make_inexact(to, exact_to);
    tidy(p, to);
}

/* Positions [begin, end) become their quotient, or are moved; moves_lost: rows that have expired as well. */
static inline void oracle_move_layer(pair *p, sequence *s, int l, int32_t begin, int32_t end, int32_t delta,
                                     int32_t divisor, int moves_lost) {
    row_list *list = &s->layers[l];
    int rotates = group_has(p, l, KVC_ROPE_FREQUENCIES), num = 0;
    int copied = group_has(p, l, KVC_ROPE_FUNCTION) || (rotates && divisor);
    for (int i = 0; i < list->num; i++) {
        row r = list->rows[i];
        if (r.position >= begin && r.position < end) {
            int64_t to = divisor ? r.position / divisor : (int64_t)r.position + delta;
            if (to < 0) continue;
            r.delta = copied ? 0 : rotates ? r.delta + (int32_t)to - r.position : 0;
            r.slot = copied ? new_slot(p) : r.slot;
            r.position = (int32_t)to;
        }
        list->rows[num++] = r;
    }
    list->num = num;
    list->lost = moves_lost ? range_moved(list->lost, begin, end, delta, divisor) : list->lost;
    list->missing = moves_lost ? range_moved(list->missing, begin, end, delta, divisor) : list->missing;
}

/* Forgets a sequence that an edit has left nothing of the tokens that it `had`, whatever an encoder's rows it has. */
static inline void end_without_tokens(pair *p, sequence *s, int had) {
    if (had && next_of(p, s) == 0)
        forget_sequence(p, s->id);
    else
        tidy(p, s);
}

static inline void oracle_move(pair *p, int64_t id, int32_t begin, int32_t end, int32_t delta, int32_t divisor,
                               int moves_lost) {
    sequence *s = find_sequence(p, id);
    if (!s || (divisor ? divisor == 1 : delta == 0)) return;
    int32_t next = next_of(p, s), had = next > 0, to = divisor ? begin / divisor : begin;
    const int drops_all = begin + (int64_t)delta < 0 && (end < -(int64_t)delta ? end : -(int64_t)delta) >= next;
    if (delta < 0) to = not_negative(begin + delta);
    if (begin < end && begin < next && !drops_all) make_inexact(s, to < begin && end > -(int64_t)delta ? to : begin);
    for (int l = 0; l < p->config.num_layers; l++)
        if (keeps_tokens(p, l)) oracle_move_layer(p, s, l, begin, end, delta, divisor, moves_lost);
    if (begin < end && begin < next && drops_all) oracle_cut(s, next_of(p, s), next);
    end_without_tokens(p, s, had);
}

static inline void oracle_remove(pair *p, int64_t id, int32_t begin, int32_t end, int shift) {
    sequence *s = find_sequence(p, id);
    const int32_t next = next_of(p, s);
    int moves = shift && extreme_of(p, s, 1) >= end, had = next > 0 || (begin == 0 && end > 0);
    if (s && begin < end && end < next) make_inexact(s, begin);
    for (int l = 0; s && l < p->config.num_layers; l++) {
        row_list *list = &s->layers[l];
        int32_t num = 0;
        if (!keeps_tokens(p, l)) continue;
        for (int i = 0; i < list->num; i++)
            if (list->rows[i].position < begin || list->rows[i].position >= end) list->rows[num++] = list->rows[i];
        list->num = num;
        list->lost = range_removed(list->lost, begin, end, shift);
        list->missing = range_removed(list->missing, begin, end, shift);
    }
    if (s && begin < end && end >= next) oracle_cut(s, next_of(p, s), next);
    if (s) end_without_tokens(p, s, had);
    if (moves) oracle_move(p, id, end, KVC_END, begin - end, 0, 0);
}

static inline int is_listed(const int32_t *positions, int32_t num, int32_t position) {
    for (int32_t i = 0; i < num; i++)
        if (positions[i] == position) return 1;
    return 0;
}

/* Whether some layer of a sequence has a row at a position, or the position has expired there. */
static inline int is_known(const pair *p, const sequence *s, int32_t position) {
    for (int l = 0; s && l < p->config.num_layers; l++) {
        const row_list *list = &s->layers[l];
        for (int i = 0; keeps_tokens(p, l) && i < list->num; i++)
            if (list->rows[i].position == position) return 1;
        if (position >= list->lost.begin && position < list->lost.end) return 1;
        if (position >= list->missing.begin && position < list->missing.end) return 1;
    }
    return 0;
}

/* Returns the position behind the last listed position that is known; 0 if none is. */
static inline int32_t end_of_known(const pair *p, int64_t id, const int32_t *positions, int32_t n) {
    const sequence *s = find_sequence(p, id);
    while (n && !is_known(p, s, positions[n - 1])) n--;
    return n ? positions[n - 1] + 1 : 0;
}

static inline void oracle_keep_positions(pair *p, int64_t id, const int32_t *positions, int32_t n) {
    sequence *s = find_sequence(p, id);
    const int32_t next = next_of(p, s), end = end_of_known(p, id, positions, n);
    int32_t first = INT32_MAX;
    for (int l = 0; s && l < p->config.num_layers; l++) {
        row_list *list = &s->layers[l];
        int32_t num = 0;
        if (!keeps_tokens(p, l)) continue;
        for (int i = 0; i < list->num; i++)
            if (is_listed(positions, n, list->rows[i].position))
                list->rows[num++] = list->rows[i];
            else
                first = list->rows[i].position < first ? list->rows[i].position : first;
        list->num = num;
        list->lost = range_below(list->lost, end);
        list->missing = range_below(list->missing, end);
    }
    if (!s) return;
    oracle_cut(s, next_of(p, s), next);
    if (first < next_of(p, s)) make_inexact(s, first);
    end_without_tokens(p, s, next > 0 || !end);
}

/* Applies all deltas; slots that sequences need at different deltas are copied. */
static inline void oracle_settle(pair *p) {
    static int32_t deltas[MAX_TAGS], seen[MAX_TAGS], round;
    for (int l = 0; l < p->config.num_layers; l++) {
        const int32_t disputed = INT32_MAX;
        round++;
        for (int s = 0; s < p->num_sequences; s++) {
            const row_list *list = &p->sequences[s].layers[l];
            for (int i = 0; i < list->num; i++) {
                const row *r = &list->rows[i];
                deltas[r->slot] = seen[r->slot] != round || deltas[r->slot] == r->delta ? r->delta : disputed;
                seen[r->slot] = round;
            }
        }
        for (int s = 0; s < p->num_sequences; s++) {
            row_list *list = &p->sequences[s].layers[l];
            for (int i = 0; i < list->num; i++) {
                row *r = &list->rows[i];
                r->slot = r->delta && deltas[r->slot] == disputed ? new_slot(p) : r->slot;
                r->delta = 0;
            }
        }
    }
}

/* Whether several rows have this slot. */
static inline int is_shared(const pair *p, int l, int32_t slot) {
    int num = 0;
    for (int s = 0; s < p->num_sequences; s++)
        for (int i = 0; i < p->sequences[s].layers[l].num; i++) num += p->sequences[s].layers[l].rows[i].slot == slot;
    return num > 1;
}

/* Replaces the rows at positions [begin, end) by rows tagged from `tag` on. */
static inline void oracle_inject(pair *p, int64_t id, int layer, int32_t begin, int32_t end, int32_t tag) {
    sequence *s = find_sequence(p, id);
    for (int l = 0; s && l < p->config.num_layers; l++)
        for (int i = 0; same_group(p, l, layer) && i < s->layers[l].num; i++) {
            row *r = &s->layers[l].rows[i];
            if (r->position >= begin && r->position < end && is_shared(p, l, r->slot)) r->slot = new_slot(p);
        }
    const int32_t stride = stride_of(p, layer);
    for (int32_t at = begin; s && at < end; at++) {
        row *r = find_row(&s->layers[layer], at);
        if (r) {
            r->tag = tag + at / stride - begin / stride;
            r->base = at;
            r->before = NO_TOKEN;
            if (!s->used) make_inexact(s, begin / stride * stride + stride - 1);
        }
    }
}

/* ---- comparing --------------------------------------------------------------------------------------------------- */

static inline void check_element(const row *r, int l, int is_v, int32_t h, int32_t d, float got) {
    CHECKF(got == element(r->tag, l, is_v, h, d), "layer %d, position %d, head %d, %c[%d] is %g, not %g", l,
           r->position, h, is_v ? 'v' : 'k', d, (double)got, (double)element(r->tag, l, is_v, h, d));
}

/* Checks head h of a key that moved by `moved`. */
static inline void check_key_row(const pair *p, int l, const row *r, int32_t moved, int32_t h, const float *got) {
    /* f32, f16 and bf16: of numbers near 1.  Integers: in units of 256. */
    static const double half_steps[KVC_STORED_TYPES] = {0x1p-24, 0x1p-11, 0x1p-8, [KVC_Q8_0] = 0x1p-8,
                                                        [KVC_INT8] = 0x1p-8};
    double right[MAX_ROW], error = p->roundings * half_steps[p->layers[l].k_type] * 256;
    moved_key(p, l, r->tag, moved, h, right);
    for (int d = 0; d < p->layers[l].k_dim; d++)
        CHECKF(got[d] == right[d] || fabs(got[d] - right[d]) <= error,
               "layer %d, position %d, put at %d, head %d, k[%d] is %g, not %g", l, r->position, r->base, h, d,
               (double)got[d], right[d]);
}

/* Checks head h of a row of values. */
static inline void check_value_row(const pair *p, int l, const row *r, int32_t h, const float *got) {
    for (int d = 0; d < p->layers[l].v_dim; d++) check_element(r, l, !p->layers[l].value_in_key, h, d, got[d]);
}

/* Describes arrays for the f32 keys and values of n rows of a layer, all heads. */
static inline kvc_rows_out room_for(const pair *p, int l, int32_t n, float *k, float *v) {
    const kvc_layer *layer = &p->layers[l];
    return (kvc_rows_out){.struct_size = sizeof(kvc_rows_out),
                          .type = KVC_F32,
                          .k = k,
                          .v = layer->v_dim ? v : NULL,
                          .k_head_stride = (int64_t)sizeof *k * n * layer->k_dim,
                          .k_row_stride = (int64_t)sizeof *k * layer->k_dim,
                          .v_head_stride = (int64_t)sizeof *v * n * layer->v_dim,
                          .v_row_stride = (int64_t)sizeof *v * layer->v_dim};
}

static inline void check_gather(const pair *p, const sequence *s, int l) {
    static float k[MAX_ROWS * MAX_ROW], v[MAX_ROWS * MAX_ROW];
    const kvc_layer *layer = &p->layers[l];
    const row_list *list = &s->layers[source_of(p, l)];
    const kvc_rows_out out = room_for(p, l, list->num, k, v);
    CHECKF(kvc_gather(p->cache, s->id, l, 0, list->num, &out) == KVC_OK, "%s", kvc_last_error());
    for (int h = 0; h < layer->num_kv_heads; h++) {
        for (int i = 0; i < list->num; i++) {
            const row *r = &list->rows[i];
            check_key_row(p, source_of(p, l), r, r->position - r->base, h, &k[(h * list->num + i) * layer->k_dim]);
            check_value_row(p, source_of(p, l), r, h, &v[(h * list->num + i) * layer->v_dim]);
        }
    }
}

/* Checks kvc_extract: rows by position, zeros at positions without a row. */
static inline void check_extract(const pair *p, const sequence *s, int l, int32_t begin, int32_t end) {
    static float k[MAX_ROWS * MAX_ROW], v[MAX_ROWS * MAX_ROW];
    static const float zeros[MAX_ROW];
    const kvc_layer *layer = &p->layers[l];
    const int32_t stride = stride_of(p, l), num = end / stride - begin / stride;
    const kvc_rows_out out = room_for(p, l, num, k, v);
    memset(k, 1, sizeof k);
    memset(v, 1, sizeof v);
    CHECKF(kvc_extract(p->cache, s->id, l, begin, end, &out) == KVC_OK, "%s", kvc_last_error());
    for (int h = 0; h < layer->num_kv_heads; h++) {
        for (int32_t at = 0; at < num; at++) {
            const row *r = find_row(&s->layers[source_of(p, l)], (begin / stride + at) * stride + stride - 1);
            const float *got_k = &k[(h * num + at) * layer->k_dim];
            const float *got_v = &v[(h * num + at) * layer->v_dim];
            if (r) {
                check_key_row(p, source_of(p, l), r, r->position - r->base, h, got_k);
                check_value_row(p, source_of(p, l), r, h, got_v);
            } else {
                CHECK(!memcmp(got_k, zeros, (size_t)layer->k_dim * sizeof *k));
                CHECK(!memcmp(got_v, zeros, (size_t)layer->v_dim * sizeof *v));
            }
        }
    }
}

/* Returns row i of head h of a span. */
static inline kvc_rows row_in_span(const kvc_layer *layer, const kvc_span *span, int is_v, int h, int i) {
    const char *scales = is_v ? span->v_scales : span->k_scales;
    const kvc_rows rows = {is_v ? layer->v_type : layer->k_type,
                           (char *)(is_v ? span->v : span->k),
                           is_v ? span->v_row_stride : span->k_row_stride,
                           is_v ? span->v_head_stride : span->k_head_stride,
                           (char *)(scales ? scales : (const char *)span->k),
                           KVC_SCALE_BYTES};
    return kvc_row_of(&rows, i, h);
}

/* Checks a span's rows against the list's rows.  Keys lack the span's delta. */
static inline void check_span(const pair *p, int l, const kvc_span *span, const row *rows) {
    const kvc_layer *layer = &p->layers[l];
    float values[MAX_ROW];
    if (!layer->v_dim) CHECK(!span->v && !span->v_scales && !span->v_row_stride && !span->v_head_stride);
    for (int i = 0; i < span->num_rows; i++) {
        const row *r = &rows[i];
        const int32_t position = span->position + i * stride_of(p, l);
        CHECKF(r->position == position, "position %d, not %d", position, r->position);
        CHECKF(r->delta == span->delta, "position %d: delta %d, not %d", r->position, span->delta, r->delta);
        for (int h = 0; h < layer->num_kv_heads; h++) {
            const kvc_rows key = row_in_span(layer, span, 0, h, i);
            kvc_decode_rows(&kvc_kernels_scalar, values, 0, &key, 1, layer->k_dim);
            check_key_row(p, source_of(p, l), r, r->position - r->delta - r->base, h, values);
            if (!layer->v_dim) continue;
            const kvc_rows value = row_in_span(layer, span, 1, h, i);
            kvc_decode_rows(&kvc_kernels_scalar, values, 0, &value, 1, layer->v_dim);
            check_value_row(p, source_of(p, l), r, h, values);
        }
    }
}

/* Checks that num spans are the rows of a list. */
static inline void compare_spans(const pair *p, int l, const kvc_span *spans, int64_t num, const row_list *list) {
    int32_t row = 0;
    for (int64_t i = 0; i < num; row += spans[i++].num_rows) {
        CHECK(spans[i].num_rows >= 1 && row + spans[i].num_rows <= list->num);
        if (row + spans[i].num_rows <= list->num) check_span(p, l, &spans[i], &list->rows[row]);
    }
    CHECKF(row == list->num, "spans of %d rows, not %d", row, list->num);
}

static inline void check_spans(const pair *p, const sequence *s, int l) {
    static kvc_span spans[MAX_ROWS];
    int64_t num;
    CHECK(kvc_spans(p->cache, s->id, l, spans, sizeof *spans, MAX_ROWS, &num, NULL) == KVC_OK);
    compare_spans(p, l, spans, num, &s->layers[source_of(p, l)]);
}

/* Sets *list to the rows that the open batch shows of a sequence: stored rows, then put rows. */
static inline void list_batch_rows(const pair *p, int64_t id, int l, row_list *list) {
    list->num = 0;
    for (int s = 0; s < p->num_sequences; s++)
        for (int i = 0; p->sequences[s].id == id && i < p->sequences[s].layers[l].num; i++)
            list_add(list, p->sequences[s].layers[l].rows[i]);
    for (int t = 0; keeps_tokens(p, l) && t < p->num_tokens; t++)
        if (p->ids[t] == id && p->written[l][t] && gets_row(p, l, p->positions[t]))
            list_add(list, (row){p->positions[t], p->batch_tag + t, p->batch_tag + t, p->positions[t], 0, NO_TOKEN});
    for (const cross_put *put = p->cross_puts; put < p->cross_puts + p->num_cross_puts; put++)
        if (put->layer == l && put->id == id) {
            list->num = 0;
            for (int32_t r = 0; r < put->n; r++) list_add(list, (row){r, put->tag + r, put->tag + r, r, 0, NO_TOKEN});
        }
}

/* Checks what the open batch shows of each of its sequences. */
static inline void check_batch_spans(const pair *p) {
    static kvc_span spans[MAX_ROWS];
    static row_list list;
    for (int l = 0; l < p->config.num_layers; l++)
        for (int t = 0; t < p->num_tokens; t++) {
            int64_t num = 0;
            const kvc_rows_out none = {.struct_size = sizeof none, .num_stored = &num, .batch = p->batch};
            if (p->layers[l].policy.kind == KVC_NONE || (t && p->ids[t] == p->ids[t - 1])) continue;
            list_batch_rows(p, p->ids[t], source_of(p, l), &list);
            CHECK(kvc_gather(p->cache, p->ids[t], l, 0, 0, &none) == KVC_OK && num == list.num);
            CHECKF(kvc_batch_spans(p->batch, p->ids[t], l, spans, sizeof *spans, MAX_ROWS, &num, NULL) == KVC_OK, "%s",
                   kvc_last_error());
            compare_spans(p, l, spans, num, &list);
        }
}

static inline void check_positions(const pair *p, const sequence *s, int l) {
    static int32_t positions[MAX_ROWS];
    const row_list *list = &s->layers[source_of(p, l)];
    int64_t num = kvc_positions(p->cache, s->id, l, positions, MAX_ROWS);
    CHECKF(num == list->num && kvc_seq_len(p->cache, s->id, l) == list->num,
           "sequence %lld, layer %d: %lld rows, not %d", (long long)s->id, l, (long long)num, list->num);
    for (int i = 0; i < list->num && i < num; i++)
        CHECKF(positions[i] == list->rows[i].position, "row %d at %d, not %d", i, positions[i], list->rows[i].position);
}

/* Whether any layer holds tokens. */
static inline int any_tokens(const pair *p) {
    int any = 0;
    for (int l = 0; l < p->config.num_layers; l++) any |= keeps_tokens(p, l);
    return any;
}

static inline void check_can_resume(const pair *p, const sequence *s, int32_t position) {
    int right = position >= 0 && (!any_tokens(p) || (position <= next_of(p, s) && !misses(p, s, position)));
    CHECKF(kvc_can_resume(p->cache, s->id, position) == right, "sequence %lld at %d", (long long)s->id, position);
}

/* Checks kvc_position_range of a layer; -1: of any. */
static inline void check_range(const pair *p, const sequence *s, int l) {
    int32_t first = 7, last = 7, low = l < 0 ? extreme_of(p, s, -1) : -1, high = l < 0 ? extreme_of(p, s, 1) : -1;
    const row_list *list = &s->layers[l < 0 ? 0 : source_of(p, l)];
    for (int i = 0; l >= 0 && i < list->num; i++) {
        low = low < 0 || list->rows[i].position < low ? list->rows[i].position : low;
        high = list->rows[i].position > high ? list->rows[i].position : high;
    }
    CHECKF(kvc_position_range(p->cache, s->id, l, &first, &last) == KVC_OK, "%s", kvc_last_error());
    CHECKF(first == low && last == high, "layer %d: positions %d to %d, not %d to %d", l, first, last, low, high);
}

/* Checks kvc_exact_to, in a batch as if all its tokens were kept, and that what it says can be. */
static inline void check_exact_to(const pair *p, const sequence *s) {
    char kept[MAX_BATCH];
    memset(kept, 1, sizeof kept);
    const int32_t in_batch = p->batch ? batch_exact_to(p, s->id, kept) : INT32_MAX;
    const int32_t right = s->exact_to < in_batch ? s->exact_to : in_batch, got = kvc_exact_to(p->cache, s->id);
    CHECKF(got == right, "sequence %lld is exact to %d, not %d", (long long)s->id, got, right);
    check_exact(p, s);
}

static inline void check_sequence(const pair *p, const sequence *s) {
    int32_t next = next_of(p, s);
    CHECK(kvc_seq_len(p->cache, s->id, -1) == rows_of(p, s));
    CHECK(kvc_next_position(p->cache, s->id) == next);
    for (int32_t i = -3; i < 2 && i <= INT32_MAX - next; i++) {
        check_can_resume(p, s, next + i);
        check_can_resume(p, s, random_int(0, (next < MAX_ROWS ? next : MAX_ROWS) + 1));
    }
    check_range(p, s, -1);
    check_exact_to(p, s);
    for (int l = 0; l < p->config.num_layers; l++) {
        check_range(p, s, l);
        check_positions(p, s, l);
        check_gather(p, s, l);
        check_spans(p, s, l);
        const row_list *list = &s->layers[source_of(p, l)];
        if (!random_int(0, 4)) {
            int32_t begin = list->num ? list->rows[random_int(0, list->num)].position : random_int(0, 9);
            begin = not_negative(begin - random_int(0, 9));
            check_extract(p, s, l, begin, begin < INT32_MAX - 20 ? begin + random_int(0, 20) : begin);
        }
    }
}

static inline void check_ids(const pair *p) {
    int64_t ids[MAX_SEQUENCES];
    int64_t num = kvc_sequences(p->cache, ids, MAX_SEQUENCES), right = 0;
    for (int s = 0; s < p->num_sequences; s++) right += holds_tokens(p, &p->sequences[s]) && !p->sequences[s].used;
    CHECKF(num == right, "%lld sequences, not %lld", (long long)num, (long long)right);
    for (int i = 0; i < num; i++) CHECK(holds_tokens(p, find_sequence(p, ids[i])) && (i == 0 || ids[i] > ids[i - 1]));
}

static inline kvc_stats stats_of(const pair *p) { return stats_in(p->cache); }

/* Counts the rows of the open batch in a layer. */
static inline int64_t batch_rows(const pair *p, int l) {
    int64_t num = 0;
    for (int t = 0; p->batch && takes_tokens(p, l, p->replaced) && t < p->num_tokens; t++)
        num += gets_row(p, l, p->positions[t]);
    if (!p->batch || keeps_tokens(p, l)) return num;
    for (int i = 0; i < p->num_cross_puts; i++) num += p->cross_puts[i].layer == l ? p->cross_puts[i].n : 0;
    return num;
}

static inline void check_live_slots(const pair *p) {
    int64_t right = 0;
    for (int l = 0; l < p->config.num_layers; l++)
        if (leads_group(p, l)) right += live_rows(p, l) + batch_rows(p, l);
    CHECKF(stats_of(p).live_slots == right, "%lld live slots, not %lld", (long long)stats_of(p).live_slots,
           (long long)right);
}

/* The runs of the sequence that *runs begins with are its spans; moves *runs past them. */
static inline void check_runs(const pair *p, int l, const kvc_run_info **runs) {
    static kvc_span spans[MAX_ROWS];
    int64_t num, id = (*runs)->seq_id;
    CHECK(kvc_spans(p->cache, id, l, spans, sizeof *spans, MAX_ROWS, &num, NULL) == KVC_OK && num > 0);
    for (int64_t i = 0; i < num; i++, ++*runs)
        CHECKF((*runs)->seq_id == id && !(*runs)->in_batch && (*runs)->count == spans[i].num_rows &&
                   (*runs)->position == spans[i].position && (*runs)->delta == spans[i].delta,
               "sequence %lld, layer %d: run %d is not its span", (long long)id, l, (int)i);
}

/* The runs of the sequences by rising id, then the runs of the open batch. */
static inline void check_all_runs(const pair *p, int l, const kvc_run_info *runs, int64_t num) {
    const kvc_run_info *run = runs, *end = runs + num;
    int64_t rows = 0, pending = 0;
    while (run < end && !run->in_batch) {
        CHECK(run == runs || run->seq_id > run[-1].seq_id);
        check_runs(p, l, &run);
    }
    for (int s = 0; s < p->num_sequences; s++) rows += p->sequences[s].layers[source_of(p, l)].num;
    for (const kvc_run_info *r = runs; r < run; r++) rows -= r->count;
    for (; run < end; run++) {
        CHECK(p->batch && run->in_batch && !run->delta);
        pending += run->count;
    }
    CHECKF(rows == 0, "layer %d: %lld rows are in no run", l, (long long)rows);
    CHECK(pending == batch_rows(p, source_of(p, l)));
}

/* Checks a block, given the number of holders of each slot below its fill mark. */
static inline void check_block(const kvc_block_info *block, const int32_t *holders, kvc_stats *sums) {
    int32_t live = 0, most = 0;
    for (int32_t s = 0; s < block->filled; s++) {
        live += holders[s] > 0;
        most = holders[s] > most ? holders[s] : most;
    }
    CHECKF(block->live == live && block->references == most, "%d live, %d references, not %d and %d", block->live,
           block->references, live, most);
    CHECK(block->filled <= block->resident && block->resident <= block->num_slots);
    CHECK(!block->is_free == (live || block->is_held));
    CHECK(block->is_held || !block->filled || holders[block->filled - 1]);
    sums->live_slots += live;
    sums->wasted_slots += block->filled - live;
    sums->blocks_in_use += !block->is_free;
    sums->blocks_free += block->is_free;
}

/* Checks a layer's blocks against the runs in them. */
static inline void check_layer_blocks(const pair *p, int l, kvc_stats *sums) {
    static kvc_block_info blocks[MAX_PLACES];
    static kvc_run_info runs[MAX_PLACES];
    static int32_t holders[MAX_PLACES], first[MAX_PLACES + 1];
    int64_t num_blocks, num_runs;
    CHECK(kvc_blocks(p->cache, l, blocks, sizeof *blocks, MAX_PLACES, &num_blocks, runs, sizeof *runs, MAX_PLACES,
                     &num_runs) == KVC_OK);
    CHECK(num_blocks <= MAX_PLACES && num_runs <= MAX_PLACES);
    check_all_runs(p, l, runs, num_runs);
    for (int i = 0; i < num_blocks; i++) first[i + 1] = first[i] + blocks[i].filled;
    CHECK(first[num_blocks] <= MAX_PLACES);
    memset(holders, 0, (size_t)first[num_blocks] * sizeof *holders);
    for (const kvc_run_info *run = runs; run < runs + num_runs; run++) {
        CHECK(run->slot >= 0 && run->count > 0 && run->slot + run->count <= blocks[run->block].filled);
        for (int32_t s = run->slot; s < run->slot + run->count; s++) holders[first[run->block] + s]++;
    }
    for (int i = 0; i < num_blocks; i++) check_block(&blocks[i], holders + first[i], sums);
}

static inline void check_blocks(const pair *p) {
    kvc_stats sums = {0}, stats = stats_of(p);
    for (int l = 0; l < p->config.num_layers; l++) {
        kvc_stats others = {0};
        check_layer_blocks(p, l, leads_group(p, l) ? &sums : &others);
    }
    CHECK(sums.live_slots == stats.live_slots && sums.wasted_slots == stats.wasted_slots &&
          sums.blocks_in_use == stats.blocks_in_use && sums.blocks_free == stats.blocks_free);
}

/* Compares all that can be seen with the oracle, and runs kvc_validate. */
/* Checks that every stored key of a cache has its own sketch. */
static inline void check_sketches_of(const kvc_cache *cache) {
    const kvc_table *table = &cache->sequences;
    for (const kvc_sequence *s = kvc_table_first(table); s; s = kvc_table_next(table, s))
        for (int l = 0; l < cache->num_layers; l++) {
            const int has_own = cache->layers[l].sketch_bits && !cache->layers[l].share;
            const int position = has_own ? wrong_sketch_in(cache, s, l) : -1;
            CHECKF(position < 0, "the sketch of the key at %d in layer %d of sequence %lld is not its own", position, l,
                   (long long)s->id);
        }
}

static inline void pair_check(const pair *p) {
    static const sequence unknown = {.id = INT64_MIN + 1, .exact_to = INT32_MAX};
    const int is_failing = p->memory && p->memory->is_failing;
    if (p->config.allocator && p->memory)
        CHECKF(kvc_nbytes(p->cache) == memory_bytes(p->memory), "%lld bytes, not %lld", (long long)kvc_nbytes(p->cache),
               (long long)memory_bytes(p->memory));
    if (p->memory) p->memory->is_failing = 0; /* comparing takes memory */
    CHECKF(kvc_validate(p->cache) == KVC_OK, "%s", kvc_last_error());
    check_ids(p);
    check_sketches_of(p->cache);
    check_live_slots(p);
    check_blocks(p);
    for (int s = 0; s < p->num_sequences; s++) check_sequence(p, &p->sequences[s]);
    check_sequence(p, &unknown);
    if (p->batch && !p->replaced) check_batch_spans(p);
    if (p->memory) p->memory->is_failing = is_failing;
}

/* ---- a forward pass ---------------------------------------------------------------------------------------------- */

/* Counts the retained sequences that may be evicted.  How many of them a call does is not modelled, nor whether that
 * is enough for it: see pair_see_evicted. */
static inline int num_evictable(const pair *p) {
    int num = 0;
    for (int s = 0; s < p->num_sequences; s++) num += p->sequences[s].used && !p->sequences[s].num_pins;
    return num;
}

/* Returns what the message of an error names at least. */
static inline const char *words_of(kvc_status status) {
    switch (status) {
    case KVC_ERR_BUSY: return "batch";
    case KVC_ERR_GONE: return "position";
    case KVC_ERR_HELD: return "views of the rows are held";
    case KVC_ERR_CALLBACK: return "the keys of layer";
    case KVC_ERR_UNSUPPORTED: return "layer";
    default: return NULL;
    }
}

/* Checks that the library answered as the oracle, or KVC_ERR_NOMEM after an allocation failed. */
static inline kvc_status agree(const pair *p, const char *what, kvc_status status, kvc_status right) {
    int nomem = p->memory && p->memory->failed && status == KVC_ERR_NOMEM;
    int evicts = right == KVC_ERR_FULL && status == KVC_OK && num_evictable(p);
    CHECKF(status == right || nomem || evicts, "%s: %s (%s), not %s", what, kvc_strerror(status), kvc_last_error(),
           kvc_strerror(right));
    CHECKF(status == KVC_OK || !words_of(status) || strstr(kvc_last_error(), words_of(status)), "%s: %s", what,
           kvc_last_error());
    return status;
}

/* Returns random parents of the tokens, or NULL: trees do not change where rows are stored. */
static inline const int32_t *random_parents(int n, const int64_t *ids) {
    static int32_t parents[MAX_BATCH];
    for (int t = 0; t < n; t++) {
        parents[t] = random_int(-1, t + 1);
        if (parents[t] == t || (parents[t] >= 0 && ids[parents[t]] != ids[t])) parents[t] = -1;
    }
    return random_int(0, 4) ? NULL : parents;
}

/* Opens p->batch; replaced: the layers it restores, or NULL. */
static inline kvc_status pair_begin_with(pair *p, int n, const int32_t *positions, const int64_t *ids,
                                         const uint8_t *replaced) {
    static pair after; /* large */
    kvc_status right = oracle_begin(p, n, positions, ids, replaced, &after);
    const int32_t *parents = replaced ? NULL : p->has_own_parents ? p->own_parents : random_parents(n, ids);
    const kvc_begin_args args = {.struct_size = sizeof args,
                                 .num_tokens = n,
                                 .positions = positions,
                                 .seq_ids = ids,
                                 .parents = parents,
                                 .replaced = replaced};
    kvc_status status = kvc_begin_with(p->cache, &args, &p->batch);
    if (status != KVC_ERR_FULL || !p->config.max_bytes) /* how many bytes there are is not modelled */
        agree(p, "begin", status, right);
    if (status != KVC_OK) return status;
    after.batch = p->batch;
    *p = after;
    p->num_tokens = n;
    p->parents = parents;
    p->replaced = replaced;
    memset(p->written, 0, sizeof p->written);
    p->num_cross_puts = 0;
    p->batch_tag = p->next_tag;
    p->next_tag += n;
    CHECK(p->next_tag <= MAX_TAGS - MAX_BATCH);
    memcpy(p->positions, positions, (size_t)n * sizeof *positions);
    memcpy(p->ids, ids, (size_t)n * sizeof *ids);
    return status;
}

static inline kvc_status pair_begin(pair *p, int n, const int32_t *positions, const int64_t *ids) {
    return pair_begin_with(p, n, positions, ids, NULL);
}

/* K or V rows of n tokens on their way to kvc_put, in some layout. */
typedef struct source {
    char bytes[MAX_BATCH * MAX_ROW * 4];
    const void *start; /* element 0 of token 0, head 0 */
    int64_t token_stride, head_stride, batch_stride;
    int32_t type;
} source;

/* Makes K or V rows of n tags, of a random type, token or head major, backwards or not, in groups of `inner` tokens (0:
 * one). */
static inline void fill_source(source *src, const pair *p, int l, int is_v, const int32_t *tags, int n, int inner) {
    int32_t heads = p->layers[l].num_kv_heads, dim = is_v ? p->layers[l].v_dim : p->layers[l].k_dim;
    src->type = random_int(0, 3);
    int64_t row = (int64_t)element_sizes[src->type] * dim;
    int token_major = random_int(0, 2), backwards = random_int(0, 2), group = inner ? inner : n;
    src->token_stride = token_major ? row * heads : row;
    src->head_stride = token_major ? row : row * group;
    src->batch_stride = row * heads * group;
    char *start = src->bytes;
    if (backwards) {
        start += (group - 1) * src->token_stride;
        src->token_stride = -src->token_stride;
    }
    src->start = start;
    for (int t = 0; t < n; t++) {
        for (int h = 0; h < heads; h++) {
            float values[MAX_ROW];
            for (int d = 0; d < dim; d++) values[d] = element(tags[t], l, is_v, h, d);
            char *to = start + t / group * src->batch_stride + t % group * src->token_stride + h * src->head_stride;
            kvc_kernels_scalar.convert(KVC_F32, src->type, to, 0, values, 0, 1, dim);
        }
    }
    if (!token_major || backwards) return; /* otherwise rows lie side by side, so that strides may be left out */
    if (random_int(0, 2)) src->head_stride = 0;
    if (random_int(0, 2)) src->token_stride = 0;
    if (random_int(0, 2)) src->batch_stride = 0;
}

/* Returns n tags from `tag` on. */
static inline const int32_t *tags_from(int32_t tag, int n) {
    static int32_t tags[MAX_BATCH];
    for (int i = 0; i < n; i++) tags[i] = tag + i;
    return tags;
}

/* Returns arguments for kvc_put of n rows of these tags. */
static inline kvc_put_args fill_put(const pair *p, int l, const int32_t *tags, int n) {
    static source k, v;
    int inner = stride_of(p, l) > 1 || random_int(0, 3) ? 0 : random_int(1, 6);
    if (inner && n % inner) inner = 0;
    fill_source(&k, p, l, 0, tags, n, inner);
    fill_source(&v, p, l, 1, tags, n, inner);
    return (kvc_put_args){.struct_size = sizeof(kvc_put_args),
                          .num_tokens = n,
                          .k = k.start,
                          .v = kvc_stores_values(&p->layers[l]) ? v.start : NULL,
                          .k_token_stride = k.token_stride,
                          .k_head_stride = k.head_stride,
                          .v_token_stride = v.token_stride,
                          .v_head_stride = v.head_stride,
                          .k_type = k.type,
                          .v_type = v.type,
                          .tokens_per_sequence = inner,
                          .k_batch_stride = k.batch_stride,
                          .v_batch_stride = v.batch_stride};
}

/* Writes a row of a batch's token where kvc_slots says. */
static inline void write_in_place(const pair *p, int l, const kvc_span *span, int i, int32_t tag) {
    const kvc_layer *layer = &p->layers[l];
    for (int h = 0; h < layer->num_kv_heads; h++) {
        float values[MAX_ROW];
        for (int is_v = 0; is_v < (kvc_stores_values(layer) ? 2 : 1); is_v++) {
            int32_t dim = is_v ? layer->v_dim : layer->k_dim;
            for (int d = 0; d < dim; d++) values[d] = element(tag, l, is_v, h, d);
            const kvc_rows to = row_in_span(layer, span, is_v, h, i);
            kvc_encode_rows(&kvc_kernels_scalar, &to, values, 0, 1, dim);
        }
    }
}

/* Puts tokens [first, first + n) of the open batch in a layer without kvc_put. */
static inline kvc_status put_in_place(const pair *p, int l, int first, int n) {
    while (n > 0) {
        kvc_span span;
        if (!gets_row(p, l, p->positions[first])) {
            first++, n--;
            continue;
        }
        CHECKF(kvc_slots(p->batch, l, first, &span, sizeof span, NULL) == KVC_OK, "%s", kvc_last_error());
        CHECK(span.position == p->positions[first] && span.num_rows >= 1 && span.delta == 0);
        int some = 0;
        for (int i = 0; some < n && i < span.num_rows; some++)
            if (gets_row(p, l, p->positions[first + some]))
                write_in_place(p, l, &span, i++, p->batch_tag + first + some);
        CHECKF(kvc_written(p->batch, l, first, some) == KVC_OK, "%s", kvc_last_error());
        first += some;
        n -= some;
    }
    return KVC_OK;
}

/* Puts tokens [first, first + n) of the open batch in a layer. */
static inline kvc_status pair_put(pair *p, int l, int first, int n) {
    memset(&p->written[l][first], 1, (size_t)n);
    if (!random_int(0, 4)) return put_in_place(p, l, first, n);
    int32_t tags[MAX_BATCH], num = 0;
    for (int t = first; t < first + n; t++)
        if (gets_row(p, l, p->positions[t])) tags[num++] = p->batch_tag + t;
    kvc_put_args args = fill_put(p, l, tags, num);
    args.first = first;
    args.num_tokens = n;
    return agree(p, "put", kvc_put(p->batch, l, &args), KVC_OK);
}

/* Puts all tokens of the open batch, in one or two ranges. */
static inline void pair_put_all(pair *p) {
    for (int l = 0; l < p->config.num_layers; l++) {
        int cut = random_int(0, p->num_tokens);
        if (!takes_tokens(p, l, p->replaced)) continue;
        pair_put(p, l, cut, p->num_tokens - cut);
        if (cut) pair_put(p, l, 0, cut);
    }
}

/* Puts n rows of a sequence in a cross-attention layer; they replace those put earlier in the batch. */
static inline kvc_status pair_put_cross(pair *p, int l, int64_t id, int n) {
    kvc_put_args args = fill_put(p, l, tags_from(p->next_tag, n), n);
    args.seq_id = id;
    kvc_status right = n > p->layers[l].policy.max_len ? KVC_ERR_FULL : KVC_OK;
    kvc_status status = kvc_put(p->batch, l, &args);
    if (status != KVC_ERR_FULL || !p->config.max_bytes) agree(p, "put", status, right);
    if (status != KVC_OK) return status;
    int i = 0;
    while (i < p->num_cross_puts && (p->cross_puts[i].layer != l || p->cross_puts[i].id != id)) i++;
    p->num_cross_puts += i == p->num_cross_puts;
    p->cross_puts[i] = (cross_put){l, n, id, p->next_tag};
    p->next_tag += n;
    return status;
}

/* Checks what the end of a batch adds to the statistics. */
static inline void check_counted(const pair *p, const kvc_stats *before, int is_committed, int32_t num_tokens) {
    const kvc_stats after = stats_of(p);
    CHECK(after.batches == before->batches + is_committed && after.aborted == before->aborted + !is_committed);
    CHECKF(after.tokens == before->tokens + num_tokens, "%lld tokens, not %lld", (long long)after.tokens,
           (long long)before->tokens + num_tokens);
}

/* Commits these tokens of the batch; NULL: all. */
static inline kvc_status pair_commit_kept(pair *p, const int32_t *kept, int32_t num_kept) {
    char stays[MAX_BATCH];
    memset(stays, !kept, sizeof stays);
    for (int i = 0; kept && i < num_kept; i++) stays[kept[i]] = 1;
    const kvc_stats before = stats_of(p);
    kvc_status status = kept ? kvc_commit_kept(p->batch, kept, num_kept) : kvc_commit(p->batch);
    CHECKF(status == KVC_OK, "commit: %s", kvc_last_error()); /* whether there is memory or not */
    if (status == KVC_OK) {
        check_counted(p, &before, 1, kept ? num_kept : p->num_tokens);
        p->batch = NULL;
        oracle_commit(p, stays);
    }
    return status;
}

static inline kvc_status pair_commit(pair *p) { return pair_commit_kept(p, NULL, 0); }

static inline void pair_abort(pair *p) {
    const kvc_stats before = stats_of(p);
    kvc_abort(p->batch);
    check_counted(p, &before, 0, 0);
    p->batch = NULL;
}

/* Begins, puts and commits a batch; returns the status of begin. */
static inline kvc_status pair_pass(pair *p, int n, const int32_t *positions, const int64_t *ids) {
    kvc_status status = pair_begin(p, n, positions, ids);
    if (status != KVC_OK) return status;
    pair_put_all(p);
    return pair_commit(p);
}

/* Runs a pass of positions [begin, end) of one sequence. */
static inline kvc_status pair_feed(pair *p, int64_t id, int32_t begin, int32_t end) {
    int32_t positions[MAX_BATCH] = {0};
    int64_t ids[MAX_BATCH] = {0};
    for (int32_t i = 0; i < end - begin; i++) {
        positions[i] = begin + i;
        ids[i] = id;
    }
    return pair_pass(p, end - begin, positions, ids);
}

/* ---- editing ----------------------------------------------------------------------------------------------------- */

static inline int in_batch(const pair *p, int64_t id) { return p->batch && count_id(id, p->num_tokens, p->ids); }

/* The status of dropping all rows of a sequence from this position on, or of sharing the rows before it. */
static inline kvc_status may_cut(const pair *p, int64_t id, int32_t length) {
    const sequence *s = find_sequence(p, id);
    if (s && length < next_of(p, s) && misses_below(p, s, length, length)) return KVC_ERR_GONE;
    return KVC_OK;
}

static inline kvc_status pair_copy_prefix(pair *p, int64_t src, int64_t dst, int32_t length) {
    kvc_status right = in_batch(p, src) || in_batch(p, dst) ? KVC_ERR_BUSY
                       : length && !holds_any(p, src)       ? KVC_ERR_INVALID
                                                            : may_cut(p, src, length);
    kvc_status status = agree(p, "copy_prefix", kvc_copy_prefix(p->cache, src, dst, length), right);
    if (status == KVC_OK) oracle_copy_prefix(p, src, dst, length);
    return status;
}

static inline kvc_status pair_fork(pair *p, int64_t src, int64_t dst) {
    kvc_status right = in_batch(p, src) || in_batch(p, dst) ? KVC_ERR_BUSY
                       : !holds_any(p, src)                 ? KVC_ERR_INVALID
                                                            : KVC_OK;
    kvc_status status = agree(p, "fork", kvc_fork(p->cache, src, dst), right);
    if (status == KVC_OK) oracle_copy_prefix(p, src, dst, KVC_END);
    return status;
}

/* The status of sharing a range: where src has a row, dst must have no row or the same row. */
static inline kvc_status may_share(const pair *p, int64_t src, int64_t dst, int32_t begin, int32_t end) {
    const sequence *from = find_sequence(p, src), *to = find_sequence(p, dst);
    if (from && cuts_rows(p, next_of(p, from), begin, KVC_END, 0)) return KVC_ERR_UNSUPPORTED;
    if (!holds_any(p, src) && !holds_any(p, dst) && begin == 0 && end == KVC_END)
        return KVC_ERR_INVALID; /* it would be a fork */
    for (int l = 0; from && to && l < p->config.num_layers; l++)
        for (int i = 0; keeps_tokens(p, l) && i < to->layers[l].num; i++) {
            const row *r = &to->layers[l].rows[i];
            const row_list *list = &from->layers[l];
            if (r->position >= begin && r->position < end && has_position(list, list->num, r->position) &&
                !has_row(list, list->num, r))
                return KVC_ERR_INVALID;
        }
    return KVC_OK;
}

static inline kvc_status pair_share(pair *p, int64_t src, int64_t dst, int32_t begin, int32_t end) {
    kvc_status right = in_batch(p, src) || in_batch(p, dst) ? KVC_ERR_BUSY : may_share(p, src, dst, begin, end);
    kvc_status status = agree(p, "share", kvc_share(p->cache, src, dst, begin, end), right);
    if (status == KVC_OK) oracle_share(p, src, dst, begin, end);
    return status;
}

/* Whether an edit that may rewrite keys returned the right status.  The function that moves keys may have been told to
 * fail, and the number of free bytes is not modelled. */
static inline kvc_status agree_moved(pair *p, const char *what, kvc_status status, kvc_status right) {
    if (p->call_failed) right = KVC_ERR_CALLBACK;
    p->call_failed = 0;
    return status == KVC_ERR_FULL && p->config.max_bytes ? status : agree(p, what, status, right);
}

/* Whether an edit copied rows of a layer to new slots. */
static inline int has_copied(const pair *before, const pair *after, int l) {
    for (int s = 0; s < after->num_sequences; s++)
        for (int i = 0; i < after->sequences[s].layers[l].num; i++)
            if (after->sequences[s].layers[l].rows[i].slot >= before->next_tag) return 1;
    return 0;
}

/* Checks that max_bytes is kept to. */
static inline void check_bytes(const pair *p) {
    CHECKF(!p->config.max_bytes || kvc_nbytes(p->cache) <= p->config.max_bytes, "%lld bytes, max_bytes is %lld",
           (long long)kvc_nbytes(p->cache), (long long)p->config.max_bytes);
}

/* Checks that an edit copied those rows that the oracle gave new slots, from `first` on, each once, and no others. */
static inline void check_copied(const pair *p, const kvc_stats *before, int32_t first) {
    int64_t num = 0;
    for (int l = 0; l < p->config.num_layers; l++)
        for (int s = 0; leads_group(p, l) && s < p->num_sequences; s++)
            for (int i = 0; i < p->sequences[s].layers[l].num; i++)
                num += p->sequences[s].layers[l].rows[i].slot >= first;
    CHECKF(stats_of(p).rows_copied - before->rows_copied == num, "%lld rows were copied, not %lld",
           (long long)(stats_of(p).rows_copied - before->rows_copied), (long long)num);
    if (num) check_bytes(p);
}

/* The status of an edit that leaves the oracle like this, if only capacity can refuse it.  While a batch restores rows,
 * the rows that it replaces count as well. */
static inline kvc_status fits_capacity(const pair *before, const pair *after) {
    for (int l = 0; capacity_of(after) && l < after->config.num_layers; l++)
        if (keeps_tokens(after, l) && has_copied(before, after, l) &&
            live_rows(after, l) + batch_rows(after, l) > capacity_of(after))
            return KVC_ERR_FULL;
    return KVC_OK;
}

/* Returns a copy of the oracle to try an edit on; large. */
static inline pair *copy_of(const pair *p) {
    static pair copy;
    copy = *p;
    return &copy;
}

static inline kvc_status pair_remove(pair *p, int64_t id, int32_t begin, int32_t end, int32_t shift) {
    const kvc_stats before = stats_of(p);
    const int32_t first_new = p->next_tag;
    const sequence *s = find_sequence(p, id);
    int moves = shift && extreme_of(p, s, 1) >= end, cuts = end >= next_of(p, s);
    kvc_status right = in_batch(p, id) ? KVC_ERR_BUSY : moves && rope_is_unknown(p) ? KVC_ERR_UNSUPPORTED : KVC_OK;
    if (right == KVC_OK && s && begin < end && !cuts && cuts_rows(p, next_of(p, s), begin, end, begin - end))
        right = KVC_ERR_UNSUPPORTED;
    if (right == KVC_OK) {
        pair *after = copy_of(p);
        oracle_remove(after, id, begin, end, shift);
        right = cuts ? may_cut(p, id, begin) : fits_capacity(p, after);
    }
    p->moving = id;
    kvc_status status = agree_moved(p, "remove", kvc_remove(p->cache, id, begin, end, shift), right);
    if (status == KVC_OK) {
        oracle_remove(p, id, begin, end, shift);
        check_copied(p, &before, first_new);
    }
    return status;
}

static inline kvc_status pair_keep_positions(pair *p, int64_t id, const int32_t *positions, int32_t n) {
    const kvc_stats before = stats_of(p);
    const kvc_status right = in_batch(p, id) ? KVC_ERR_BUSY : may_cut(p, id, end_of_known(p, id, positions, n));
    const kvc_status status = agree(p, "keep_positions", kvc_keep_positions(p->cache, id, positions, n), right);
    if (status != KVC_OK) return status;
    oracle_keep_positions(p, id, positions, n);
    check_copied(p, &before, p->next_tag);
    return status;
}

static inline kvc_status pair_truncate(pair *p, int64_t id, int32_t length) {
    kvc_status right = in_batch(p, id) ? KVC_ERR_BUSY : may_cut(p, id, length);
    kvc_status status = agree(p, "truncate", kvc_truncate(p->cache, id, length), right);
    if (status == KVC_OK) oracle_remove(p, id, length, KVC_END, 0);
    return status;
}

/* The largest position of [begin, end); -1 if the range holds no row. */
static inline int32_t last_in(const pair *p, const sequence *s, int32_t begin, int32_t end) {
    int32_t last = -1;
    for (int l = 0; s && l < p->config.num_layers; l++)
        for (int i = 0; keeps_tokens(p, l) && i < s->layers[l].num; i++) {
            int32_t position = s->layers[l].rows[i].position;
            last = position >= begin && position < end && position > last ? position : last;
        }
    return last;
}

/* Whether a sequence has tokens, expired ones included, whose keys cannot be moved. */
static inline int is_unmovable(const pair *p, int64_t id) {
    return rope_is_unknown(p) && next_of(p, find_sequence(p, id)) > 0;
}

static inline kvc_status pair_shift(pair *p, int64_t id, int32_t begin, int32_t end, int32_t delta) {
    const kvc_stats before = stats_of(p);
    const int32_t first_new = p->next_tag;
    int32_t last = last_in(p, find_sequence(p, id), begin, end);
    kvc_status right = is_unmovable(p, id)                                  ? KVC_ERR_UNSUPPORTED
                       : in_batch(p, id)                                    ? KVC_ERR_BUSY
                       : last >= 0 && (int64_t)last + delta > INT32_MAX - 1 ? KVC_ERR_INVALID
                                                                            : KVC_OK;
    if (right == KVC_OK && delta && find_sequence(p, id) &&
        cuts_rows(p, next_of(p, find_sequence(p, id)), begin, end, delta))
        right = KVC_ERR_UNSUPPORTED;
    if (right == KVC_OK) {
        pair *after = copy_of(p);
        oracle_move(after, id, begin, end, delta, 0, 1);
        right = fits_capacity(p, after);
    }
    p->moving = id;
    kvc_status status = agree_moved(p, "shift", kvc_shift(p->cache, id, begin, end, delta), right);
    if (status == KVC_OK) {
        oracle_move(p, id, begin, end, delta, 0, 1);
        check_copied(p, &before, first_new);
    }
    return status;
}

static inline kvc_status pair_divide(pair *p, int64_t id, int32_t begin, int32_t end, int32_t divisor) {
    const kvc_stats before = stats_of(p);
    const int32_t first_new = p->next_tag;
    kvc_status right = is_unmovable(p, id) ? KVC_ERR_UNSUPPORTED : in_batch(p, id) ? KVC_ERR_BUSY : KVC_OK;
    if (right == KVC_OK && divisor > 1 && has_strides(p) && find_sequence(p, id)) right = KVC_ERR_UNSUPPORTED;
    if (right == KVC_OK) {
        pair *after = copy_of(p);
        oracle_move(after, id, begin, end, 0, divisor, 1);
        right = fits_capacity(p, after);
    }
    p->moving = id;
    kvc_status status = agree_moved(p, "divide", kvc_divide(p->cache, id, begin, end, divisor), right);
    if (status == KVC_OK) {
        oracle_move(p, id, begin, end, 0, divisor, 1);
        check_copied(p, &before, first_new);
    }
    return status;
}

/* Forgets retained sequences that the cache has evicted, or the rows of their windows.  Checks the order of the
 * sequences that are left.  Call after each operation. */
static inline void pair_see_evicted(pair *p) {
    int64_t left[MAX_SEQUENCES], num = list_retained(p->cache, left, MAX_SEQUENCES), before = 0;
    for (int s = p->num_sequences - 1; s >= 0; s--) {
        const sequence *at = &p->sequences[s];
        if (!at->used || count_id(at->id, (int)num, left)) continue;
        CHECKF(!at->num_pins, "sequence %lld was evicted", (long long)at->id);
        forget_sequence(p, at->id);
    }
    for (int i = 0; i < num; i++) {
        sequence *at = find_sequence(p, left[i]);
        CHECKF(at && at->used > before, "sequence %lld is retained after one used later", (long long)left[i]);
        before = at ? at->used : before;
        for (int l = 0; at && l < p->config.num_layers; l++) {
            row_list *list = &at->layers[l];
            if (!keeps_tokens(p, l) || !list->num || kvc_seq_len(p->cache, left[i], l) > 0) continue;
            CHECK(!at->num_pins && p->layers[l].policy.kind != KVC_FULL);
            for (int r = 0; r < list->num; r++) widen(&list->lost, list->rows[r].position);
            list->num = 0;
        }
    }
}

static inline kvc_status pair_settle(pair *p) {
    const kvc_stats before = stats_of(p);
    const int32_t first_new = p->next_tag;
    kvc_status right = p->batch ? KVC_ERR_BUSY : p->num_holds ? KVC_ERR_HELD : KVC_OK;
    if (right == KVC_OK) {
        pair *after = copy_of(p);
        oracle_settle(after);
        right = fits_capacity(p, after);
    }
    kvc_status status = agree_moved(p, "settle", kvc_settle(p->cache), right);
    if (status != KVC_OK) return status;
    pair_see_evicted(p); /* what was evicted shares no row that has to be copied */
    oracle_settle(p);
    check_copied(p, &before, first_new);
    return status;
}

/* The number of positions of [begin, end) at which a sequence holds a row of a layer. */
static inline int32_t count_positions(const pair *p, int64_t id, int l, int32_t begin, int32_t end) {
    const sequence *s = find_sequence(p, id);
    int32_t num = 0;
    for (int32_t at = begin; s && at < end; at++) num += find_row(&s->layers[l], at) != NULL;
    return num;
}

/* Replaces a layer's rows at positions [begin, end); with skip_missing, only where there are rows. */
static inline kvc_status pair_inject_rows(pair *p, int64_t id, int l, int32_t begin, int32_t end, int skip_missing) {
    static source k, v;
    int64_t num = -1;
    const int32_t num_rows = end / stride_of(p, l) - begin / stride_of(p, l);
    fill_source(&k, p, l, 0, tags_from(p->next_tag, num_rows), num_rows, 0);
    fill_source(&v, p, l, 1, tags_from(p->next_tag, num_rows), num_rows, 0);
    const kvc_rows_in in = {.struct_size = sizeof in,
                            .k = k.start,
                            .v = kvc_stores_values(&p->layers[l]) ? v.start : NULL,
                            .k_head_stride = k.head_stride,
                            .k_row_stride = k.token_stride,
                            .v_head_stride = v.head_stride,
                            .v_row_stride = v.token_stride,
                            .k_type = k.type,
                            .v_type = v.type,
                            .skip_missing = skip_missing,
                            .num_replaced = random_int(0, 4) ? &num : NULL};
    int32_t stored = count_positions(p, id, l, begin, end);
    int own = !p->layers[l].share && p->layers[l].policy.kind != KVC_NONE;
    kvc_status right = !own                                 ? KVC_ERR_INVALID
                       : is_cross(p, l)                     ? KVC_ERR_UNSUPPORTED
                       : in_batch(p, id)                    ? KVC_ERR_BUSY
                       : !skip_missing && stored < num_rows ? KVC_ERR_INDEX
                                                            : KVC_OK;
    if (right == KVC_OK) {
        pair *after = copy_of(p);
        oracle_inject(after, id, l, begin, end, p->next_tag);
        right = fits_capacity(p, after);
    }
    kvc_status status = agree_moved(p, "inject", kvc_inject(p->cache, id, l, begin, end, &in), right);
    int32_t tag = p->next_tag;
    p->next_tag += end - begin;
    if (status == KVC_OK) oracle_inject(p, id, l, begin, end, tag);
    CHECKF(!in.num_replaced || num == (status == KVC_OK ? stored : -1), "%d rows replaced, not %d", (int)num, stored);
    return status;
}

static inline kvc_status pair_inject(pair *p, int64_t id, int l, int32_t begin, int32_t end) {
    return pair_inject_rows(p, id, l, begin, end, 1);
}

/* Whether n more tokens of a sequence can be added; if so, *after is the oracle after expiry. */
static inline kvc_status oracle_go_on(const pair *p, int64_t id, int n, pair *after) {
    static int32_t positions[MAX_BATCH];
    static int64_t ids[MAX_BATCH];
    const sequence *s = find_sequence(p, id);
    if (s && s->used) return KVC_ERR_INVALID;
    if (misses(p, s, next_of(p, s))) return KVC_ERR_GONE;
    for (int t = 0; t < n; t++) {
        positions[t] = next_of(p, s) + t;
        ids[t] = id;
    }
    return oracle_fit(p, n, positions, ids, NULL, after);
}

static inline kvc_status pair_reserve(pair *p, int64_t id, int num_tokens) {
    static pair after;
    kvc_status right = p->batch ? KVC_ERR_BUSY : oracle_go_on(p, id, num_tokens, &after);
    kvc_status status = agree_moved(p, "reserve", kvc_reserve(p->cache, id, num_tokens), right);
    if (status != KVC_OK) return status;
    *p = after;
    check_bytes(p);
    return status;
}

/* Checks kvc_room: a batch of that many tokens fits, and a larger one does not.  None fits where rows are gone. */
static inline kvc_status pair_room(pair *p, int64_t id) {
    static pair after;
    int64_t num = -1;
    const kvc_status one = oracle_go_on(p, id, 1, &after);
    const kvc_status right = p->batch ? KVC_ERR_BUSY : one == KVC_ERR_INVALID ? one : KVC_OK;
    kvc_status status = agree(p, "room", kvc_room(p->cache, id, &num), right);
    CHECK(status != KVC_OK || one != KVC_ERR_GONE || num == 0);
    if (status != KVC_OK || one == KVC_ERR_GONE || p->config.max_bytes || num_evictable(p)) return status;
    if (num > 0 && num <= MAX_BATCH) CHECK(oracle_go_on(p, id, (int)num, &after) == KVC_OK);
    if (num < MAX_BATCH) CHECK(oracle_go_on(p, id, (int)num + 1, &after) == KVC_ERR_FULL);
    return status;
}

/* Copies the cache, compares the copy with the oracle and frees it.  It has no retained sequences. */
static inline kvc_status pair_clone(pair *p) {
    static pair copy;
    kvc_cache *clone = NULL;
    kvc_status status = agree(p, "clone", kvc_cache_clone(p->cache, &clone), p->batch ? KVC_ERR_BUSY : KVC_OK);
    CHECK(!clone == (status != KVC_OK));
    if (status != KVC_OK) return status;
    if (p->memory) p->memory->is_failing = 0; /* checking the copy must not fail */
    copy = *p;
    copy.cache = clone;
    copy.memory = NULL;
    copy.num_holds = 0;
    for (int s = copy.num_sequences - 1; s >= 0; s--)
        if (copy.sequences[s].used) forget_sequence(&copy, copy.sequences[s].id);
    pair_check(&copy);
    CHECK(kvc_nbytes(clone) <= kvc_nbytes(p->cache));
    pair_free(&copy);
    return KVC_OK;
}

static inline kvc_status pair_clear_sequence(pair *p, int64_t id) {
    kvc_status right = in_batch(p, id) ? KVC_ERR_BUSY : KVC_OK;
    kvc_status status = agree(p, "clear_sequence", kvc_clear_sequence(p->cache, id), right);
    if (status == KVC_OK) forget_sequence(p, id);
    return status;
}

static inline kvc_status pair_keep(pair *p, int64_t id) {
    kvc_status right = KVC_OK;
    for (int t = 0; p->batch && t < p->num_tokens; t++)
        if (p->ids[t] != id) right = KVC_ERR_BUSY;
    kvc_status status = agree(p, "keep", kvc_keep(p->cache, id), right);
    for (int s = p->num_sequences - 1; status == KVC_OK && s >= 0; s--)
        if (p->sequences[s].id != id) forget_sequence(p, p->sequences[s].id);
    return status;
}

static inline kvc_status pair_clear(pair *p) {
    kvc_status status = agree(p, "clear", kvc_clear(p->cache), p->batch ? KVC_ERR_BUSY : KVC_OK);
    if (status == KVC_OK) p->num_sequences = 0;
    return status;
}

static inline kvc_status pair_mark_inexact(pair *p, int64_t id, int32_t position) {
    sequence *s = find_sequence(p, id);
    if (in_batch(p, id) && !s) return KVC_OK; /* it would be marked, too: test_exact.c */
    const kvc_status status = agree(p, "mark_inexact", kvc_mark_inexact(p->cache, id, position), KVC_OK);
    if (s) make_inexact(s, position);
    return status;
}

static inline kvc_status pair_compact(pair *p) {
    kvc_status right = p->batch ? KVC_ERR_BUSY : p->num_holds ? KVC_ERR_HELD : KVC_OK;
    return agree(p, "compact", kvc_compact(p->cache), right);
}

#endif
