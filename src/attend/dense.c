/* dense.c: copies rows to plain arrays and makes masks, for callers with an attention of their own.
 *
 * Rows are walked over twice, by kvc_batch_visit: once to count them, and so size a list of them, and once to list
 * them.  Each sequence's rows are listed by position.  With by_sequence, each sequence has its own place in the
 * caller's arrays, as long as the longest sequence needs.  Otherwise all rows stand one sequence after the other.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/parallel.h"
#include "read/batch_rows.h"
#include "cache/check.h"
#include "pass/masked.h"
#include "read/read.h"

/* A row to be copied out. */
typedef struct dense_row {
    int32_t position; /* of a group with a stride, its number */
    int32_t token;    /* token of the batch; -1: a stored row */
    int32_t sequence; /* index into batch->sequences */
    int64_t arrived;  /* index in order of arrival, which decides between equal positions */
    kvc_run run;      /* a run of this row alone */
} dense_row;

/* The rows of one sequence: dense->rows[first .. first + num). */
typedef struct slice {
    int64_t first, num;
} slice;

typedef struct member {
    int64_t id;
    int32_t sequence; /* index into batch->sequences */
} member;

/* Arguments that the functions of one call share. */
typedef struct dense {
    const kvc_batch *batch;
    int32_t layer, num_tasks, stride;
    kvc_dense_args args;
    kvc_rows_out out;
    int32_t listed; /* the sequence whose rows are being listed */
    int64_t num;    /* rows listed so far */
    dense_row *rows;
    slice *slices;             /* [batch->num_sequences] */
    member *order;             /* [batch->num_sequences] sequences in the order in which they are written */
    kvc_masked_ranges *masked; /* [batch->num_sequences]; NULL: nothing is masked */
    float *scratch;            /* for one kvc_rotator per task, where keys may have to be rotated */
} dense;

/* ---- visiting rows ----------------------------------------------------------------------------------------------- */

static void count_run(void *num, const kvc_run *run, const int32_t *tokens) {
    (void)tokens;
    *(int64_t *)num += run->count;
}

/* Lists each row of a run as a run of its own. */
static void list_run(void *to, const kvc_run *run, const int32_t *tokens) {
    dense *d = to;
    kvc_run row = {run->block, run->slot, 1, run->position, run->delta};
    for (int32_t i = 0; i < run->count; i++, d->num++, row.slot++, row.position++)
        d->rows[d->num] = (dense_row){row.position, tokens ? tokens[i] : -1, d->listed, d->num, row};
}

/* Counts the rows of all sequences, and the most rows of one sequence. */
static void count_rows(const kvc_batch *batch, int32_t layer, int64_t *num, int64_t *most) {
    *num = *most = 0;
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        int64_t rows = 0;
        kvc_batch_visit(batch, layer, s, count_run, &rows);
        if (rows > *most) *most = rows;
        *num += rows;
    }
}

kvc_status kvc_dense_rows(kvc_batch *batch, int32_t layer, int64_t *num_rows) {
    int64_t most;
    KVC_TRY(kvc_check_attention(batch, layer, KVC_NEEDS_VALUES));
    if (!num_rows) return kvc_fail(KVC_ERR_INVALID, "num_rows is NULL");
    count_rows(batch, layer, num_rows, &most);
    return KVC_OK;
}

/* Checks that the batch has equally many tokens of each sequence, and all tokens of one before those of the next. */
static kvc_status check_in_step(const kvc_batch *batch) {
    const kvc_batch_sequence *first = &batch->sequences[0];
    for (int32_t s = 1; s < batch->num_sequences; s++)
        if (batch->sequences[s].num_tokens != first->num_tokens)
            return kvc_fail(
                KVC_ERR_INVALID,
                "sequence %lld has %d tokens in the batch and %lld has %d: to be handed out each by itself, "
                "all must have as many",
                (long long)first->sequence->id, first->num_tokens, (long long)batch->sequences[s].sequence->id,
                batch->sequences[s].num_tokens);
    for (int32_t t = 0; t < batch->num_tokens; t++)
        if (batch->order[t] != t)
            return kvc_fail(KVC_ERR_INVALID,
                            "token %d of the batch comes between those of another sequence: to be handed out each by "
                            "itself, sequences must come one after the other",
                            t);
    return KVC_OK;
}

kvc_status kvc_dense_sequences(kvc_batch *batch, int32_t layer, int32_t *num_sequences, int64_t *most_rows) {
    int64_t num;
    kvc_status status = kvc_check_attention(batch, layer, KVC_NEEDS_VALUES);
    if (status == KVC_OK && (!num_sequences || !most_rows))
        status = kvc_fail(KVC_ERR_INVALID, "%s is NULL", num_sequences ? "most_rows" : "num_sequences");
    if (status == KVC_OK) status = check_in_step(batch);
    if (status != KVC_OK) return status;
    count_rows(batch, layer, &num, most_rows);
    *num_sequences = batch->num_sequences;
    return KVC_OK;
}

/* ---- the order of rows ------------------------------------------------------------------------------------------- */

static int by_position(const void *a, const void *b) {
    const dense_row *x = a, *y = b;
    if (x->position != y->position) return x->position < y->position ? -1 : 1;
    return x->arrived < y->arrived ? -1 : 1;
}

static int by_id(const void *a, const void *b) {
    const member *x = a, *y = b;
    return (x->id > y->id) - (x->id < y->id);
}

/* Whether rows are in the order of positions.  They usually are, and need not be sorted then. */
static int is_sorted(const dense_row *rows, int64_t num) {
    int64_t i = 1;
    while (i < num && rows[i - 1].position <= rows[i].position) i++;
    return i >= num;
}

/* Lists all rows, sequence after sequence, each in the order of positions. */
static void list_rows(dense *d) {
    const kvc_batch *batch = d->batch;
    for (int32_t s = 0; s < batch->num_sequences; s++) d->order[s] = (member){batch->sequences[s].sequence->id, s};
    if (!d->args.by_sequence) qsort(d->order, (size_t)batch->num_sequences, sizeof *d->order, by_id);
    for (int32_t i = 0; i < batch->num_sequences; i++) {
        const int32_t s = d->order[i].sequence;
        dense_row *rows = d->rows + d->num;
        d->slices[s].first = d->num;
        d->listed = s;
        kvc_batch_visit(batch, d->layer, s, list_run, d);
        d->slices[s].num = d->num - d->slices[s].first;
        if (!is_sorted(rows, d->slices[s].num)) qsort(rows, (size_t)d->slices[s].num, sizeof *rows, by_position);
    }
}

/* ---- rows and masks ---------------------------------------------------------------------------------------------- */

/* Returns the caller's arrays, from where the rows of sequence s go. */
static kvc_rows_out rows_of(const dense *d, int32_t s) {
    kvc_rows_out out = d->out;
    if (!d->args.by_sequence) return out;
    if (out.k) out.k = (char *)out.k + s * d->args.k_batch_stride;
    if (out.v) out.v = (char *)out.v + s * d->args.v_batch_stride;
    if (out.positions) out.positions += s * d->args.num_rows;
    return out;
}

/* Copies the listed rows [i, end).  Rows whose slots follow each other are copied at once, as a run. */
static void copy_rows(const dense *d, kvc_reader *reader, int64_t i, int64_t end) {
    for (int64_t n; i < end; i += n) {
        const dense_row *rows = d->rows + i;
        const kvc_rows_out out = rows_of(d, rows->sequence);
        const int64_t at = d->args.by_sequence ? i - d->slices[rows->sequence].first : i;
        kvc_run run = rows->run;
        for (n = 1; i + n < end && rows[n].sequence == rows->sequence && rows[n].run.block == run.block &&
                    rows[n].run.slot == run.slot + n && rows[n].run.delta == run.delta;)
            n++;
        run.count = (int32_t)n;
        kvc_reader_copy(reader, &run, &out, at);
        for (int64_t j = 0; out.positions && j < n; j++)
            out.positions[at + j] = kvc_position_of(rows[j].position, d->stride);
    }
}

/* Fills the arrays past the rows of sequence s, which may have fewer than others: with 0, positions with -1. */
static void pad_rows(const dense *d, const kvc_reader *reader, int32_t s) {
    const int64_t begin = d->slices[s].num, end = d->args.num_rows;
    const kvc_rows_out out = rows_of(d, s);
    kvc_reader_clear(reader, &out, begin, end);
    for (int64_t i = begin; out.positions && i < end; i++) out.positions[i] = -1;
}

/* The masks of one token; NULL for masks that the caller does not want. */
typedef struct masks {
    float *mask;
    uint8_t *seen;
} masks;

/* Writes that the token does not see rows [first, end). */
static void hide(const masks *m, int64_t first, int64_t end) {
    for (int64_t i = first; m->mask && i < end; i++) m->mask[i] = -INFINITY;
    if (m->seen) memset(m->seen + first, 0, (size_t)(end - first));
}

/* Whether the caller hides a row from all tokens. */
static int is_masked(const dense *d, const dense_row *row) {
    int32_t from = 0;
    return d->masked && !kvc_masked_next(&d->masked[row->sequence], &row->run, &from).count;
}

/* Writes the masks of a token, which sees rows of its own sequence only. */
static void fill_masks(const dense *d, int32_t t) {
    const kvc_batch *batch = d->batch;
    const kvc_dense_args *a = &d->args;
    const kvc_policy *policy = &batch->cache->policies[batch->cache->group_of[d->layer]];
    const slice own = d->slices[batch->sequence_of[t]];
    const int32_t position = batch->positions[t], low = kvc_policy_lowest(policy, position);
    const int32_t sinks = kvc_policy_sinks(policy), last = kvc_last_row(position, d->stride);
    const int sees_all = policy->kind == KVC_CROSS, sees_later = sees_all || (a->non_causal && a->non_causal[t]);
    const int64_t at = a->by_sequence ? 0 : own.first;
    const masks m = {a->mask ? (float *)(void *)((char *)a->mask + t * a->mask_token_stride) : NULL,
                     a->seen ? a->seen + t * a->seen_token_stride : NULL};
    hide(&m, 0, at);
    hide(&m, at + own.num, a->num_rows);
    for (int64_t i = 0; i < own.num; i++) {
        const dense_row *row = &d->rows[own.first + i];
        const int is_tree = batch->parents && row->token >= 0;
        const int in_order = is_tree ? kvc_descends(batch, t, row->token) : sees_later || row->position <= last;
        const int in_reach = sees_all || (in_order && (row->position >= low || row->position < sinks));
        const int sees = in_reach && !is_masked(d, row);
        if (m.mask) m.mask[at + i] = sees ? 0 : -INFINITY;
        if (m.seen) m.seen[at + i] = (uint8_t)sees;
    }
}

/* Returns the first item of a task's share, where n items are divided evenly. */
static int64_t share_of(const dense *d, int64_t n, int64_t task) {
    return n / d->num_tasks * task + n % d->num_tasks * task / d->num_tasks;
}

/* Writes one task's share of the rows, the padding and the masks. */
static void fill_share(void *context, int64_t task) {
    const dense *d = context;
    const kvc_batch *batch = d->batch;
    const size_t floats = kvc_rotator_floats(batch->cache->layers[d->layer].k_dim);
    kvc_reader reader =
        kvc_reader_for(batch->cache, d->layer, &d->out, d->scratch ? d->scratch + (size_t)task * floats : NULL);
    copy_rows(d, &reader, share_of(d, d->num, task), share_of(d, d->num, task + 1));
    for (int64_t s = share_of(d, batch->num_sequences, task); s < share_of(d, batch->num_sequences, task + 1); s++)
        if (d->args.by_sequence) pad_rows(d, &reader, (int32_t)s);
    for (int64_t t = share_of(d, batch->num_tokens, task); t < share_of(d, batch->num_tokens, task + 1); t++)
        if (d->args.mask || d->args.seen) fill_masks(d, (int32_t)t);
}

/* ---- kvc_dense --------------------------------------------------------------------------------------------------- */

static kvc_status read_args(const kvc_batch *batch, int32_t layer, const kvc_dense_args *given, dense *d) {
    kvc_status status = KVC_READ(kvc_dense_args, &d->args, given, "args");
    if (status == KVC_OK) status = kvc_check_attention(batch, layer, KVC_NEEDS_VALUES);
    if (status == KVC_OK) status = KVC_READ(kvc_rows_out, &d->out, d->args.rows, "rows");
    if (status == KVC_OK && d->args.num_masked)
        status = kvc_masked_check(batch, d->args.masked, d->args.masked_size, d->args.num_masked);
    return status == KVC_OK && d->args.by_sequence ? check_in_step(batch) : status;
}

static kvc_status resolve_num_rows(const dense *d, int64_t *num) {
    int64_t most;
    count_rows(d->batch, d->layer, num, &most);
    if (d->out.num_stored) *d->out.num_stored = *num;
    if (d->args.by_sequence && d->args.num_rows != most)
        return kvc_fail(KVC_ERR_INVALID, "num_rows is %lld: the sequence that has most in layer %d has %lld",
                        (long long)d->args.num_rows, d->layer, (long long)most);
    if (!d->args.by_sequence && d->args.num_rows != *num)
        return kvc_fail(KVC_ERR_INVALID, "num_rows is %lld: there are %lld in layer %d", (long long)d->args.num_rows,
                        (long long)*num, d->layer);
    return KVC_OK;
}

/* Checks the arrays, and resolves their strides. */
static kvc_status resolve_arrays(dense *d) {
    const kvc_batch *batch = d->batch;
    kvc_dense_args *a = &d->args;
    const int32_t num_batches = a->by_sequence ? batch->num_sequences : 0;
    const kvc_axis batches[] = {KVC_AXIS(a, k_batch_stride, num_batches), KVC_AXIS(a, v_batch_stride, num_batches)};
    const kvc_array mask = {.name = "mask",
                            .data = a->mask,
                            .is_output = 1,
                            .element_bytes = sizeof *a->mask,
                            .length = a->num_rows,
                            .axes = {KVC_AXIS(a, mask_token_stride, batch->num_tokens)}},
                    seen = {.name = "seen",
                            .data = a->seen,
                            .is_output = 1,
                            .element_bytes = sizeof *a->seen,
                            .length = a->num_rows,
                            .axes = {KVC_AXIS(a, seen_token_stride, batch->num_tokens)}};
    KVC_TRY(kvc_resolve_rows_out(&batch->cache->layers[d->layer], &d->out, "rows", a->num_rows, batches));
    KVC_TRY(kvc_resolve_array(&mask));
    return kvc_resolve_array(&seen);
}

/* Returns the number of tasks that are worth cutting the work into. */
static int32_t num_tasks(const dense *d, int64_t num) {
    static const double WORTH_THREADS = 1 << 16; /* elements */
    const kvc_layer *layer = &d->batch->cache->layers[d->layer];
    const double rows = (double)num * layer->num_kv_heads * (layer->k_dim + layer->v_dim),
                 masks = d->args.mask || d->args.seen ? (double)d->args.num_rows * d->batch->num_tokens : 0;
    return kvc_threads_for(rows + masks, WORTH_THREADS, kvc_cache_threads(d->batch->cache));
}

/* Copies rows and makes masks. */
static kvc_status make_dense(dense *d) {
    const kvc_batch *batch = d->batch;
    kvc_cache *cache = batch->cache;
    int64_t num;
    kvc_status status = resolve_num_rows(d, &num);
    if (status == KVC_OK) status = resolve_arrays(d);
    if (status != KVC_OK || num == 0) return status;
    d->num_tasks = num_tasks(d, num);
    const uint64_t floats = kvc_rope_of(cache, d->layer) ? kvc_rotator_floats(cache->layers[d->layer].k_dim) : 0;
    uint64_t size = 0;
    const uint64_t rows = kvc_add_array(&size, (uint64_t)num * sizeof *d->rows);
    const uint64_t slices = kvc_add_array(&size, (uint64_t)batch->num_sequences * sizeof *d->slices);
    const uint64_t order = kvc_add_array(&size, (uint64_t)batch->num_sequences * sizeof *d->order);
    const uint64_t scratch = kvc_add_array(&size, (uint64_t)d->num_tasks * floats * sizeof(float));
    const uint64_t ranges = kvc_add_array(&size, (uint64_t)d->args.num_masked * sizeof(kvc_masked_range));
    const uint64_t masked =
        kvc_add_array(&size, d->args.num_masked ? (uint64_t)batch->num_sequences * sizeof *d->masked : 0);
    kvc_lock(cache);
    char *start = kvc_memory_alloc(&cache->memory, size, KVC_MEMORY_SCRATCH, -1);
    kvc_unlock(cache, KVC_OK);
    if (!start) return kvc_fail(KVC_ERR_NOMEM, "out of memory for a list of %lld rows", (long long)num);
    d->rows = (void *)(start + rows);
    d->slices = (void *)(start + slices);
    d->order = (void *)(start + order);
    if (floats) d->scratch = (void *)(start + scratch);
    if (d->args.num_masked) {
        d->masked = (void *)(start + masked);
        kvc_masked_sort(batch, cache->group_of[d->layer], d->args.masked, d->args.masked_size, d->args.num_masked,
                        (void *)(start + ranges), d->masked);
    }
    list_rows(d);
    kvc_parallel(d->num_tasks, d->num_tasks, fill_share, d);
    kvc_lock(cache);
    kvc_memory_free(&cache->memory, start, size, KVC_MEMORY_SCRATCH, -1);
    return kvc_unlock(cache, KVC_OK);
}

kvc_status kvc_dense(kvc_batch *batch, int32_t layer, const kvc_dense_args *given) {
    dense d = {.batch = batch, .layer = layer};
    KVC_TRY(read_args(batch, layer, given, &d));
    d.stride = batch->cache->pools[batch->cache->group_of[layer]].stride;
    return make_dense(&d);
}
