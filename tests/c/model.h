/* model.h: a cache, and what it should hold as plain lists of rows, driven together.
 *
 * Each pair_ function calls the library, does the same to the lists, and says whether the two agree on the outcome;
 * pair_check compares everything that can be seen.  Every token ever put has a number of its own, its tag, from which
 * the contents of its rows follow, so that a row that was moved, shared or mixed up shows.
 */
#ifndef KVC_MODEL_H
#define KVC_MODEL_H

#include <string.h>

#include "kernels/kernels.h"
#include "kvcache.h"
#include "memory.h"
#include "test.h"

enum {
    MAX_LAYERS = 4,
    MAX_SEQUENCES = 12,
    MAX_ROWS = 700,
    MAX_BATCH = 300,
    MAX_TAGS = 1 << 18,
    MAX_ROW = 32 /* elements of all heads of a K or V row */
};

typedef struct row {
    int32_t position, tag;
} row;

typedef struct row_list {
    int32_t num, lost_end; /* below lost_end rows were evicted */
    row rows[MAX_ROWS];
} row_list;

typedef struct sequence {
    int64_t id;
    row_list layers[MAX_LAYERS];
} sequence;

typedef struct pair {
    kvc_cache *cache;
    kvc_config config;
    kvc_layer layers[MAX_LAYERS];
    int32_t num_sequences; /* those with rows, and those that lost all they had */
    sequence sequences[MAX_SEQUENCES];
    int32_t next_tag;
    int num_holds;
    memory *memory; /* not NULL: where the cache's memory comes from, which may be told to fail */
    kvc_batch *batch; /* the open one, its tokens are tagged from next_tag on */
    int32_t num_tokens;
    int32_t positions[MAX_BATCH];
    int64_t ids[MAX_BATCH];
} pair;

static const size_t element_sizes[] = {4, 2, 2}; /* of KVC_F32, KVC_F16, KVC_BF16 */

static const kvc_policy full_policy = {.kind = KVC_FULL};

static inline kvc_policy sliding_policy(int32_t window, int32_t num_sink_tokens, int32_t resume_window)
{
    return (kvc_policy){KVC_SLIDING, window, num_sink_tokens, resume_window, 0, 0};
}

/* A new cache of these layers; the other fields of p->config may be set before. */
static inline void pair_new(pair *p, int num_layers, const kvc_layer *layers)
{
    memcpy(p->layers, layers, (size_t)num_layers * sizeof *layers);
    p->config.struct_size = sizeof p->config;
    p->config.layers = p->layers;
    p->config.layer_size = sizeof *p->layers;
    p->config.num_layers = num_layers;
    if (p->memory)
        p->config.allocator = &p->memory->allocator;
    if (!p->config.capacity)
        p->config.capacity = p->config.max_seq_len * p->config.max_sequences;
    CHECKF(kvc_cache_new(&p->config, &p->cache) == KVC_OK, "%s", kvc_last_error());
}

static inline void pair_free(pair *p)
{
    CHECKF(kvc_cache_free(p->cache) == KVC_OK, "%s", kvc_last_error());
}

/* ---- what rows hold --------------------------------------------------------------------------------------------- */

/* An element of a token's K (or V) row: a small integer, so that every type holds it. */
static inline float element(int32_t tag, int32_t layer, int is_v, int32_t head, int32_t d)
{
    uint32_t x = (uint32_t)tag * 0x9e3779b1u + (uint32_t)(((layer * 2 + is_v) * 64 + head) * 64 + d) * 0x85ebca6bu;
    x = (x ^ x >> 15) * 0x2c1b3c6du;
    return (float)(x >> 24) - 128;
}

static inline float read_element(const void *from, int32_t type)
{
    float x;
    kvc_kernels_scalar.convert[type][KVC_F32](&x, 0, from, 0, 1, 1);
    return x;
}

/* ---- the model -------------------------------------------------------------------------------------------------- */

static inline sequence *find_sequence(const pair *p, int64_t id)
{
    for (int s = 0; s < p->num_sequences; s++)
        if (p->sequences[s].id == id)
            return (sequence *)&p->sequences[s];
    return NULL;
}

static inline sequence *add_sequence(pair *p, int64_t id)
{
    sequence *found = find_sequence(p, id);
    if (found)
        return found;
    CHECK(p->num_sequences < MAX_SEQUENCES);
    found = &p->sequences[p->num_sequences++];
    found->id = id;
    for (int l = 0; l < MAX_LAYERS; l++)
        found->layers[l].num = found->layers[l].lost_end = 0;
    return found;
}

static inline void forget_sequence(pair *p, int64_t id)
{
    sequence *found = find_sequence(p, id);
    if (found)
        *found = p->sequences[--p->num_sequences];
}

static inline int32_t rows_of(const pair *p, const sequence *s)
{
    int32_t most = 0;
    for (int l = 0; s && l < p->config.num_layers; l++)
        most = s->layers[l].num > most ? s->layers[l].num : most;
    return most;
}

/* Smallest (sign -1) or largest (sign 1) position in any layer; -1: none. */
static inline int32_t extreme_of(const pair *p, const sequence *s, int sign)
{
    int32_t found = -1;
    for (int l = 0; s && l < p->config.num_layers; l++)
        for (int i = 0; i < s->layers[l].num; i++)
            if (found < 0 || (s->layers[l].rows[i].position - found) * sign > 0)
                found = s->layers[l].rows[i].position;
    return found;
}

static inline int32_t next_of(const pair *p, const sequence *s)
{
    return extreme_of(p, s, 1) + 1;
}

static inline int32_t not_negative(int32_t x)
{
    return x > 0 ? x : 0;
}

static inline int32_t lowest_seen(const kvc_policy *policy, int32_t position)
{
    return policy->kind == KVC_SLIDING ? not_negative(position - policy->window + 1) : 0;
}

static inline int32_t num_kept(const kvc_policy *policy)
{
    return policy->resume_window ? policy->resume_window : policy->window;
}

static inline int is_kept(const kvc_policy *policy, int32_t position, int32_t low)
{
    return policy->kind != KVC_SLIDING || position < policy->num_sink_tokens ||
           position >= not_negative(low - num_kept(policy) + 1);
}

/* Whether a query there would miss rows that were evicted. */
static inline int misses(const pair *p, const sequence *s, int32_t position)
{
    for (int l = 0; s && l < p->config.num_layers; l++)
        if (lowest_seen(&p->layers[l].policy, position) < s->layers[l].lost_end)
            return 1;
    return 0;
}

static inline int same_policy(const kvc_policy *a, const kvc_policy *b)
{
    return a->kind == b->kind && a->window == b->window && a->num_sink_tokens == b->num_sink_tokens &&
           num_kept(a) == num_kept(b);
}

/* Whether layer l is the first of its group. */
static inline int leads_group(const pair *p, int l)
{
    for (int i = 0; i < l; i++)
        if (same_policy(&p->layers[i].policy, &p->layers[l].policy))
            return 0;
    return 1;
}

/* Rows of all sequences in a layer, shared ones counted once. */
static inline int32_t live_rows(const pair *p, int l)
{
    static int32_t seen[MAX_TAGS], round;
    int32_t num = 0;
    round++;
    for (int s = 0; s < p->num_sequences; s++) {
        const row_list *list = &p->sequences[s].layers[l];
        for (int i = 0; i < list->num; i++) {
            num += seen[list->rows[i].tag] != round;
            seen[list->rows[i].tag] = round;
        }
    }
    return num;
}

/* Of the positions in a batch, the smallest of one sequence, or where it goes on. */
static inline int32_t lowest_query(const pair *p, const sequence *s, int n, const int32_t *positions,
                                   const int64_t *ids)
{
    int32_t low = rows_of(p, s) ? next_of(p, s) : INT32_MAX;
    for (int t = 0; t < n; t++)
        if (ids[t] == s->id && positions[t] < low)
            low = positions[t];
    return low;
}

static inline void evict(pair *p, int n, const int32_t *positions, const int64_t *ids)
{
    for (int s = 0; s < p->num_sequences; s++) {
        int32_t low = lowest_query(p, &p->sequences[s], n, positions, ids);
        for (int l = 0; l < p->config.num_layers; l++) {
            row_list *list = &p->sequences[s].layers[l];
            int32_t num = 0;
            for (int i = 0; i < list->num; i++) {
                row r = list->rows[i];
                if (is_kept(&p->layers[l].policy, r.position, low))
                    list->rows[num++] = r;
                else if (r.position >= list->lost_end)
                    list->lost_end = r.position + 1;
            }
            list->num = num;
        }
    }
}

static inline int count_id(int64_t id, int n, const int64_t *ids)
{
    int num = 0;
    for (int t = 0; t < n; t++)
        num += ids[t] == id;
    return num;
}

/* Whether a batch fits, in a model that has evicted for it; num_sequences: with the batch. */
static inline int fits(const pair *p, int64_t num_sequences, int n, const int64_t *ids)
{
    const kvc_config *c = &p->config;
    if (c->max_sequences && num_sequences > c->max_sequences)
        return 0;
    for (int l = 0; l < c->num_layers; l++) {
        if (c->capacity && live_rows(p, l) + n > c->capacity)
            return 0;
        for (int t = 0; c->max_seq_len && t < n; t++) {
            const sequence *s = find_sequence(p, ids[t]);
            if ((s ? s->layers[l].num : 0) + count_id(ids[t], n, ids) > c->max_seq_len)
                return 0;
        }
    }
    return 1;
}

/* What kvc_begin should answer (max_bytes aside); on KVC_OK, *after is the model when it has evicted. */
static inline kvc_status model_begin(const pair *p, int n, const int32_t *positions, const int64_t *ids, pair *after)
{
    int64_t num_sequences = 0;
    for (int t = 0; t < n; t++)
        if (misses(p, find_sequence(p, ids[t]), positions[t]))
            return KVC_ERR_GONE;
    for (int s = 0; s < p->num_sequences; s++)
        num_sequences += rows_of(p, &p->sequences[s]) > 0;
    for (int t = 0; t < n; t++)
        num_sequences += !rows_of(p, find_sequence(p, ids[t])) && !count_id(ids[t], t, ids);
    *after = *p;
    evict(after, n, positions, ids);
    return fits(after, num_sequences, n, ids) ? KVC_OK : KVC_ERR_FULL;
}

static inline void model_commit(pair *p)
{
    for (int t = 0; t < p->num_tokens; t++) {
        sequence *s = add_sequence(p, p->ids[t]);
        for (int l = 0; l < p->config.num_layers; l++) {
            CHECK(s->layers[l].num < MAX_ROWS);
            s->layers[l].rows[s->layers[l].num++] = (row){p->positions[t], p->next_tag + t};
        }
    }
}

static inline void model_copy_prefix(pair *p, int64_t src, int64_t dst, int32_t length)
{
    forget_sequence(p, dst);
    if (!find_sequence(p, src))
        return;
    sequence *to = add_sequence(p, dst);
    const sequence *from = find_sequence(p, src);
    for (int l = 0; l < p->config.num_layers; l++) {
        const row_list *list = &from->layers[l];
        for (int i = 0; i < list->num; i++)
            if (list->rows[i].position < length)
                to->layers[l].rows[to->layers[l].num++] = list->rows[i];
        to->layers[l].lost_end = list->lost_end < length ? list->lost_end : length;
    }
    if (!rows_of(p, to))
        forget_sequence(p, dst);
}

static inline void model_remove(pair *p, int64_t id, int32_t begin, int32_t end)
{
    sequence *s = find_sequence(p, id);
    for (int l = 0; s && l < p->config.num_layers; l++) {
        row_list *list = &s->layers[l];
        int32_t num = 0;
        for (int i = 0; i < list->num; i++)
            if (list->rows[i].position < begin || list->rows[i].position >= end)
                list->rows[num++] = list->rows[i];
        list->num = num;
        if (list->lost_end > begin && list->lost_end <= end)
            list->lost_end = begin;
    }
    if (s && !rows_of(p, s))
        forget_sequence(p, id);
}

/* ---- comparing -------------------------------------------------------------------------------------------------- */

static inline void check_element(const row *r, int l, int is_v, int32_t h, int32_t d, float got)
{
    CHECKF(got == element(r->tag, l, is_v, h, d), "layer %d, position %d, head %d, %c[%d] is %g, not %g", l,
           r->position, h, is_v ? 'v' : 'k', d, (double)got, (double)element(r->tag, l, is_v, h, d));
}

static inline void check_gather(const pair *p, const sequence *s, int l)
{
    static float k[MAX_ROWS * MAX_ROW], v[MAX_ROWS * MAX_ROW];
    const kvc_layer *layer = &p->layers[l];
    const row_list *list = &s->layers[l];
    const kvc_rows_out out = {.struct_size = sizeof out,
                              .type = KVC_F32,
                              .k = k,
                              .v = v,
                              .k_head_stride = (int64_t)sizeof *k * list->num * layer->k_dim,
                              .k_row_stride = (int64_t)sizeof *k * layer->k_dim,
                              .v_head_stride = (int64_t)sizeof *v * list->num * layer->v_dim,
                              .v_row_stride = (int64_t)sizeof *v * layer->v_dim};
    CHECKF(kvc_gather(p->cache, s->id, l, 0, list->num, &out) == KVC_OK, "%s", kvc_last_error());
    for (int h = 0; h < layer->num_kv_heads; h++) {
        for (int i = 0; i < list->num; i++) {
            for (int d = 0; d < layer->k_dim; d++)
                check_element(&list->rows[i], l, 0, h, d, k[(h * list->num + i) * layer->k_dim + d]);
            for (int d = 0; d < layer->v_dim; d++)
                check_element(&list->rows[i], l, 1, h, d, v[(h * list->num + i) * layer->v_dim + d]);
        }
    }
}

/* The rows of one span, which should be these of the list. */
static inline void check_span(const pair *p, int l, const kvc_span *span, const row *rows)
{
    const kvc_layer *layer = &p->layers[l];
    CHECK(span->delta == 0);
    for (int i = 0; i < span->num_rows; i++) {
        CHECKF(rows[i].position == span->position + i, "position %d, not %d", span->position + i, rows[i].position);
        for (int h = 0; h < layer->num_kv_heads; h++) {
            const char *k = (const char *)span->k + h * span->k_head_stride + i * span->k_row_stride;
            const char *v = (const char *)span->v + h * span->v_head_stride + i * span->v_row_stride;
            for (int d = 0; d < layer->k_dim; d++)
                check_element(&rows[i], l, 0, h, d,
                              read_element(k + (size_t)d * element_sizes[layer->k_type], layer->k_type));
            for (int d = 0; d < layer->v_dim; d++)
                check_element(&rows[i], l, 1, h, d,
                              read_element(v + (size_t)d * element_sizes[layer->v_type], layer->v_type));
        }
    }
}

static inline void check_spans(const pair *p, const sequence *s, int l)
{
    static kvc_span spans[MAX_ROWS];
    int64_t num;
    int32_t row = 0;
    CHECK(kvc_spans(p->cache, s->id, l, spans, sizeof *spans, MAX_ROWS, &num, NULL) == KVC_OK);
    for (int64_t i = 0; i < num; row += spans[i++].num_rows) {
        CHECK(spans[i].num_rows >= 1 && row + spans[i].num_rows <= s->layers[l].num);
        if (row + spans[i].num_rows <= s->layers[l].num)
            check_span(p, l, &spans[i], &s->layers[l].rows[row]);
    }
    CHECKF(row == s->layers[l].num, "spans of %d rows, not %d", row, s->layers[l].num);
}

static inline void check_positions(const pair *p, const sequence *s, int l)
{
    static int32_t positions[MAX_ROWS];
    const row_list *list = &s->layers[l];
    int64_t num = kvc_positions(p->cache, s->id, l, positions, MAX_ROWS);
    CHECKF(num == list->num && kvc_seq_len(p->cache, s->id, l) == list->num,
           "sequence %lld, layer %d: %lld rows, not %d", (long long)s->id, l, (long long)num, list->num);
    for (int i = 0; i < list->num && i < num; i++)
        CHECKF(positions[i] == list->rows[i].position, "row %d at %d, not %d", i, positions[i], list->rows[i].position);
}

static inline void check_find_row(const pair *p, const sequence *s, int l, int32_t position)
{
    int64_t right = -1;
    for (int i = 0; i < s->layers[l].num; i++)
        if (s->layers[l].rows[i].position == position)
            right = i;
    CHECKF(kvc_find_row(p->cache, s->id, l, position) == right, "position %d is row %lld", position, (long long)right);
}

static inline void check_can_resume(const pair *p, const sequence *s, int32_t position)
{
    int right = position >= 0 && position <= next_of(p, s) && !misses(p, s, position);
    CHECKF(kvc_can_resume(p->cache, s->id, position) == right, "sequence %lld at %d", (long long)s->id, position);
}

static inline void check_sequence(const pair *p, const sequence *s)
{
    int32_t next = next_of(p, s);
    CHECK(kvc_seq_len(p->cache, s->id, -1) == rows_of(p, s));
    CHECK(kvc_first_position(p->cache, s->id) == extreme_of(p, s, -1));
    CHECK(kvc_last_position(p->cache, s->id) == next - 1);
    CHECK(kvc_next_position(p->cache, s->id) == next);
    for (int32_t i = -3; i < 2 && i <= INT32_MAX - next; i++) {
        check_can_resume(p, s, next + i);
        check_can_resume(p, s, random_int(0, (next < MAX_ROWS ? next : MAX_ROWS) + 1));
    }
    for (int l = 0; l < p->config.num_layers; l++) {
        check_positions(p, s, l);
        check_gather(p, s, l);
        check_spans(p, s, l);
        check_find_row(p, s, l, next);
        for (int i = 0; i < 4 && s->layers[l].num; i++)
            check_find_row(p, s, l, s->layers[l].rows[random_int(0, s->layers[l].num)].position + i % 2);
    }
}

static inline void check_ids(const pair *p)
{
    int64_t ids[MAX_SEQUENCES];
    int64_t num = kvc_sequences(p->cache, ids, MAX_SEQUENCES), right = 0;
    for (int s = 0; s < p->num_sequences; s++)
        right += rows_of(p, &p->sequences[s]) > 0;
    CHECKF(num == right, "%lld sequences, not %lld", (long long)num, (long long)right);
    for (int i = 0; i < num; i++)
        CHECK(rows_of(p, find_sequence(p, ids[i])) > 0 && (i == 0 || ids[i] > ids[i - 1]));
}

static inline kvc_stats stats_of(const pair *p)
{
    kvc_stats stats;
    kvc_get_stats(p->cache, &stats, sizeof stats);
    return stats;
}

static inline void check_live_slots(const pair *p)
{
    int64_t right = 0;
    for (int l = 0; l < p->config.num_layers; l++)
        if (leads_group(p, l))
            right += live_rows(p, l) + (p->batch ? p->num_tokens : 0);
    CHECKF(stats_of(p).live_slots == right, "%lld live slots, not %lld", (long long)stats_of(p).live_slots,
           (long long)right);
}

/* Everything that can be seen is as in the model, and the library finds no fault with itself. */
static inline void pair_check(const pair *p)
{
    static const sequence unknown = {.id = INT64_MIN + 1};
    int fail_after = p->memory ? p->memory->fail_after : -1;
    if (p->memory) {
        CHECKF(kvc_nbytes(p->cache) == memory_bytes(p->memory), "%lld bytes, not %lld",
               (long long)kvc_nbytes(p->cache), (long long)memory_bytes(p->memory));
        p->memory->fail_after = -1; /* comparing takes memory */
    }
    CHECKF(kvc_validate(p->cache) == KVC_OK, "%s", kvc_last_error());
    check_ids(p);
    check_live_slots(p);
    for (int s = 0; s < p->num_sequences; s++)
        check_sequence(p, &p->sequences[s]);
    check_sequence(p, &unknown);
    if (p->memory)
        p->memory->fail_after = fail_after;
}

/* ---- a forward pass --------------------------------------------------------------------------------------------- */

/* Whether the library answered as it should: as the model, or that there is no memory where that is so. */
static inline kvc_status agree(const pair *p, const char *what, kvc_status status, kvc_status right)
{
    int nomem = p->memory && p->memory->failed && status == KVC_ERR_NOMEM;
    CHECKF(status == right || nomem, "%s: %s (%s), not %s", what, kvc_strerror(status), kvc_last_error(),
           kvc_strerror(right));
    return status;
}

/* Opens p->batch. */
static inline kvc_status pair_begin(pair *p, int n, const int32_t *positions, const int64_t *ids)
{
    static pair after; /* large */
    kvc_status right = model_begin(p, n, positions, ids, &after);
    kvc_status status = kvc_begin(p->cache, n, positions, ids, NULL, &p->batch);
    if (status != KVC_ERR_FULL || !p->config.max_bytes) /* how many bytes there are is not modelled */
        agree(p, "begin", status, right);
    if (status != KVC_OK)
        return status;
    after.batch = p->batch;
    *p = after;
    p->num_tokens = n;
    memcpy(p->positions, positions, (size_t)n * sizeof *positions);
    memcpy(p->ids, ids, (size_t)n * sizeof *ids);
    return status;
}

/* K or V rows of n tokens on their way to kvc_put, in some layout. */
typedef struct source {
    char bytes[MAX_BATCH * MAX_ROW * 4];
    const void *start; /* of token 0, head 0 */
    int64_t token_stride, head_stride;
    int32_t type;
} source;

/* Token or head major, tokens backwards or not, of any type. */
static inline void fill_source(source *src, const pair *p, int l, int is_v, int first, int n)
{
    int32_t heads = p->layers[l].num_kv_heads, dim = is_v ? p->layers[l].v_dim : p->layers[l].k_dim;
    src->type = random_int(0, 3);
    int64_t row = (int64_t)element_sizes[src->type] * dim;
    int token_major = random_int(0, 2), backwards = random_int(0, 2);
    src->token_stride = token_major ? row * heads : row;
    src->head_stride = token_major ? row : row * n;
    char *start = src->bytes;
    if (backwards) {
        start += (n - 1) * src->token_stride;
        src->token_stride = -src->token_stride;
    }
    src->start = start;
    for (int t = 0; t < n; t++) {
        for (int h = 0; h < heads; h++) {
            float values[MAX_ROW];
            for (int d = 0; d < dim; d++)
                values[d] = element(p->next_tag + first + t, l, is_v, h, d);
            kvc_kernels_scalar.convert[KVC_F32][src->type](start + t * src->token_stride + h * src->head_stride, 0,
                                                           values, 0, 1, dim);
        }
    }
}

/* Puts tokens [first, first + n) of the open batch in a layer. */
static inline kvc_status pair_put(const pair *p, int l, int first, int n)
{
    static source k, v;
    fill_source(&k, p, l, 0, first, n);
    fill_source(&v, p, l, 1, first, n);
    const kvc_put_args args = {.struct_size = sizeof args,
                               .first = first,
                               .num_tokens = n,
                               .k = k.start,
                               .v = v.start,
                               .k_token_stride = k.token_stride,
                               .k_head_stride = k.head_stride,
                               .v_token_stride = v.token_stride,
                               .v_head_stride = v.head_stride,
                               .k_type = k.type,
                               .v_type = v.type};
    return agree(p, "put", kvc_put(p->batch, l, &args), KVC_OK);
}

/* Puts all tokens of the open batch, in one or two ranges. */
static inline void pair_put_all(const pair *p)
{
    for (int l = 0; l < p->config.num_layers; l++) {
        int cut = random_int(0, p->num_tokens);
        pair_put(p, l, cut, p->num_tokens - cut);
        if (cut)
            pair_put(p, l, 0, cut);
    }
}

static inline kvc_status pair_commit(pair *p)
{
    kvc_status status = agree(p, "commit", kvc_commit(p->batch), KVC_OK);
    if (status == KVC_OK) {
        model_commit(p);
        p->next_tag += p->num_tokens;
        CHECK(p->next_tag <= MAX_TAGS - MAX_BATCH);
        p->batch = NULL;
    }
    return status;
}

static inline void pair_abort(pair *p)
{
    kvc_abort(p->batch);
    p->batch = NULL;
}

/* A whole pass of tokens; what begin answers. */
static inline kvc_status pair_pass(pair *p, int n, const int32_t *positions, const int64_t *ids)
{
    kvc_status status = pair_begin(p, n, positions, ids);
    if (status != KVC_OK)
        return status;
    pair_put_all(p);
    return pair_commit(p);
}

/* A pass of positions [begin, end) of one sequence. */
static inline kvc_status pair_feed(pair *p, int64_t id, int32_t begin, int32_t end)
{
    int32_t positions[MAX_BATCH];
    int64_t ids[MAX_BATCH];
    for (int32_t i = 0; i < end - begin; i++) {
        positions[i] = begin + i;
        ids[i] = id;
    }
    return pair_pass(p, end - begin, positions, ids);
}

/* ---- editing ---------------------------------------------------------------------------------------------------- */

static inline int in_batch(const pair *p, int64_t id)
{
    return p->batch && count_id(id, p->num_tokens, p->ids);
}

static inline kvc_status pair_copy_prefix(pair *p, int64_t src, int64_t dst, int32_t length)
{
    kvc_status right = in_batch(p, src) || in_batch(p, dst) ? KVC_ERR_BUSY : KVC_OK;
    kvc_status status = agree(p, "copy_prefix", kvc_copy_prefix(p->cache, src, dst, length), right);
    if (status == KVC_OK)
        model_copy_prefix(p, src, dst, length);
    return status;
}

static inline kvc_status pair_fork(pair *p, int64_t src, int64_t dst)
{
    kvc_status right = in_batch(p, src) || in_batch(p, dst) ? KVC_ERR_BUSY : KVC_OK;
    kvc_status status = agree(p, "fork", kvc_fork(p->cache, src, dst), right);
    if (status == KVC_OK)
        model_copy_prefix(p, src, dst, KVC_END);
    return status;
}

static inline kvc_status pair_remove(pair *p, int64_t id, int32_t begin, int32_t end, int32_t shift)
{
    int moves = shift && next_of(p, find_sequence(p, id)) > end;
    kvc_status right = in_batch(p, id) ? KVC_ERR_BUSY : moves ? KVC_ERR_UNSUPPORTED : KVC_OK;
    kvc_status status = agree(p, "remove", kvc_remove(p->cache, id, begin, end, shift), right);
    if (status == KVC_OK)
        model_remove(p, id, begin, end);
    return status;
}

static inline kvc_status pair_truncate(pair *p, int64_t id, int32_t length)
{
    kvc_status right = in_batch(p, id) ? KVC_ERR_BUSY : KVC_OK;
    kvc_status status = agree(p, "truncate", kvc_truncate(p->cache, id, length), right);
    if (status == KVC_OK)
        model_remove(p, id, length, KVC_END);
    return status;
}

static inline kvc_status pair_clear_sequence(pair *p, int64_t id)
{
    kvc_status right = in_batch(p, id) ? KVC_ERR_BUSY : KVC_OK;
    kvc_status status = agree(p, "clear_sequence", kvc_clear_sequence(p->cache, id), right);
    if (status == KVC_OK)
        forget_sequence(p, id);
    return status;
}

static inline kvc_status pair_keep(pair *p, int64_t id)
{
    kvc_status right = KVC_OK;
    for (int t = 0; p->batch && t < p->num_tokens; t++)
        if (p->ids[t] != id)
            right = KVC_ERR_BUSY;
    kvc_status status = agree(p, "keep", kvc_keep(p->cache, id), right);
    for (int s = p->num_sequences - 1; status == KVC_OK && s >= 0; s--)
        if (p->sequences[s].id != id)
            forget_sequence(p, p->sequences[s].id);
    return status;
}

static inline kvc_status pair_clear(pair *p)
{
    kvc_status status = agree(p, "clear", kvc_clear(p->cache), p->batch ? KVC_ERR_BUSY : KVC_OK);
    if (status == KVC_OK)
        p->num_sequences = 0;
    return status;
}

static inline kvc_status pair_compact(pair *p)
{
    kvc_status right = p->batch ? KVC_ERR_BUSY : p->num_holds ? KVC_ERR_HELD : KVC_OK;
    return agree(p, "compact", kvc_compact(p->cache), right);
}

#endif
