/* merge.c: merges the results of a slice's splits by log-sum-exp (Flash-Decoding), and writes them out. */
#include "attend/merge.h"

#include <math.h>
#include <string.h>

#include "attend/step.h"

/* The results of a slice's splits for one KV head: in plan->partials or, if there is a single split, in the workspace.
 */
typedef struct results {
    const float *max, *sum, *acc; /* those of split 0 */
    uint64_t stride;              /* from split to split, in floats */
    float ln_of_base;             /* of maxima: 1, or ln(2) */
    float slice;                  /* what a value of 1 is in acc */
} results;

/* Returns the factor that turns a sum of exp(score - own_max) into one of exp(score - max). */
static float rescale_factor(float own_max, float max, float ln_of_base) {
    return own_max == -INFINITY ? 0 : own_max == max ? 1 : expf((own_max - max) * ln_of_base);
}

/* Adds up the splits of query row r, in their order, each rescaled to the maximum of all.  Writes the accumulated
 * values to `out`, which is the workspace's acc, and returns the sum. */
static float add_splits(const kvc_task *t, const results *all, int32_t r, float max, float *out) {
    const kvc_plan *plan = t->call->plan;
    const size_t stride = (size_t)plan->workspace.acc_stride, row = (size_t)r * stride;
    float factor = rescale_factor(all->max[r], max, all->ln_of_base), sum = factor * all->sum[r];
    if (t->slice->num_splits == 1 && factor == 1) return sum;
    if (t->slice->num_splits > 1) memcpy(out, all->acc + row, stride * sizeof *out);
    int32_t p = 1, n;
    do { /* runs once even for a single split, as `out` must be multiplied by the factor */
        float weights[KVC_TILE];
        const float *rows = all->acc + (uint64_t)p * all->stride + row;
        for (n = 0; n < KVC_TILE && p < t->slice->num_splits; n++, p++) {
            const uint64_t split = (uint64_t)p * all->stride;
            weights[n] = rescale_factor(all->max[split + (size_t)r], max, all->ln_of_base);
            sum += weights[n] * all->sum[split + (size_t)r];
        }
        t->call->kernels->accumulate[KVC_F32](out, (int)stride, &factor, weights, 1, rows,
                                              (int64_t)(all->stride * sizeof *rows), n, plan->v_dim,
                                              (kvc_ahead){.bytes = 0});
        factor = 1;
    } while (p < t->slice->num_splits);
    return sum;
}

/* Merges the splits of query row r, divides by their sum, and transforms the values back.  The output row takes acc's
 * place in the workspace.  lse: NULL, or where it is written. */
static void merge_row(const kvc_task *t, const results *all, int32_t r, float *lse) {
    const kvc_plan *plan = t->call->plan;
    const float *sinks = t->call->args->sinks;
    const int32_t order = t->call->v_order;
    const float sink = sinks ? sinks[kvc_query_head_of(t, r)] / all->ln_of_base : -INFINITY;
    float *out = t->acc + (size_t)r * (size_t)plan->workspace.acc_stride, max = sink;
    for (int32_t p = 0; p < t->slice->num_splits; p++) {
        const float of_split = all->max[(size_t)p * all->stride + (size_t)r];
        if (of_split > max) max = of_split;
    }
    const float sum = add_splits(t, all, r, max, out) + rescale_factor(sink, max, all->ln_of_base);
    /* If the sum is 0, the query saw nothing, and `out` is 0. */
    t->call->kernels->scale(out, 0, 1, plan->v_dim, sum == 0 ? 1 : 1 / (sum * all->slice));
    if (order) t->call->kernels->hadamard(out, out, plan->v_dim, order);
    if (lse) *lse = sum == 0 ? -INFINITY : max * all->ln_of_base + logf(sum);
}

/* Returns where the caller wants the lse of a token and query head. */
static float *lse_of(const kvc_attend_args *a, int32_t token, int32_t head) {
    char *to = (char *)a->lse +
               kvc_token_offset(token, a->tokens_per_sequence, a->lse_token_stride, a->lse_batch_stride) +
               head * a->lse_head_stride;
    return (float *)(void *)to;
}

/* Writes the output rows, and lse where the caller asks for it. */
static void write_out(const kvc_task *t, const results *all) {
    const kvc_call *c = t->call;
    const kvc_attend_args *a = c->args;
    const int32_t heads = c->plan->heads_per_kv, first = t->head * heads;
    const int64_t stride = c->plan->workspace.acc_stride;
    for (int32_t r = 0; r < t->num_query_rows; r += heads) {
        const int32_t token = t->tokens[r / heads] - c->plan->args.first;
        for (int32_t i = 0; i < heads; i++) merge_row(t, all, r + i, a->lse ? lse_of(a, token, first + i) : NULL);
        char *out = (char *)a->out +
                    kvc_token_offset(token, a->tokens_per_sequence, a->out_token_stride, a->out_batch_stride) +
                    first * a->out_head_stride;
        kvc_convert_query_rows(c, KVC_F32, a->q_type, out, a->out_head_stride, t->acc + r * stride,
                               stride * (int64_t)sizeof(float), c->plan->v_dim);
    }
}

/* Returns where the result of split p of the task's slice and KV head is kept. */
static float *partial_of(const kvc_task *t, int32_t p) {
    const kvc_plan *plan = t->call->plan;
    const uint64_t size = kvc_partial_size(t->num_query_rows, plan->workspace.acc_stride);
    return plan->partials + t->slice->partials + ((size_t)t->head * (size_t)t->slice->num_splits + (size_t)p) * size;
}

/* Copies the result of the task's split from the workspace to plan->partials. */
static void keep_partial(const kvc_task *t) {
    float *partial = partial_of(t, t->job->split);
    const size_t q = (size_t)t->num_query_rows;
    memcpy(partial, t->max, q * sizeof *partial);
    memcpy(partial + q, t->sum, q * sizeof *partial);
    memcpy(partial + kvc_align_up(2 * q, KVC_LANES), t->acc,
           q * (size_t)t->call->plan->workspace.acc_stride * sizeof *partial);
}

static results results_of(const kvc_task *t) {
    results all = {t->max, t->sum, t->acc, 0, 1, 1};
    if (t->slice->tiled) {
        const kvc_tiler *values = kvc_value_tiler(t);
        all.slice = (float)(1 << values->sum_shift);
        if (values->weigh) all.ln_of_base = 0.693147180559945309f;
    }
    if (t->slice->num_splits == 1) return all;
    const size_t q = (size_t)t->num_query_rows;
    all.max = partial_of(t, 0);
    all.sum = all.max + q;
    all.acc = all.max + kvc_align_up(2 * q, KVC_LANES);
    all.stride = kvc_partial_size(t->num_query_rows, t->call->plan->workspace.acc_stride);
    return all;
}

/* Keeps the result of one of several splits of a slice; returns whether all are there. */
static int end_one_of(const kvc_task *t) {
    const kvc_call *c = t->call;
    const kvc_query_slice *slice = t->slice;
    atomic_int *remaining = &c->plan->remaining[slice->first_counter + t->head];
    keep_partial(t);
    const int new_splits = c->was_done ? 0 : 1;
    if (atomic_fetch_sub(remaining, new_splits) != new_splits) return 0;
    if (!c->is_rerun) atomic_store(remaining, slice->num_splits); /* for the next layer */
    return 1;
}

/* The last task to end of a slice and KV head merges the splits and writes the output; in a rerun, each task that finds
 * all splits there does.  A single split is not counted: atomic instructions wait until all that was stored is in the
 * cache. */
static void end_split(const kvc_task *t) {
    if (t->slice->num_splits > 1 && !end_one_of(t)) return;
    const results all = results_of(t);
    write_out(t, &all);
}

void kvc_end_splits(const kvc_task *t) {
    if (t->job->num_slices == 1) {
        end_split(t);
        return;
    }
    for (int32_t m = 0, first = 0; m < t->job->num_slices; m++) {
        const kvc_task own = kvc_part_of(t, m, first);
        first += own.num_query_rows;
        end_split(&own);
    }
}
