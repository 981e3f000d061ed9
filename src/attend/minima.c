/* minima.c: the share of attention that the minima of blocks have: see minima.h.
 *
 * An element of a stored row is scale * code + minimum, with a scale and a minimum for each block of
 * KVC_QUANT_ELEMENTS.  Kernels get rows without minima, which lie in the workspace as floats: [block][KVC_TILE rows].
 * A query row's product with a row lacks, for each block, the minimum times the sum of the query's elements there.
 */
#include "attend/minima.h"

#include <string.h>

void kvc_add_up_blocks(const kvc_task *t) {
    const kvc_plan *plan = t->call->plan;
    for (int32_t r = 0; r < t->num_query_rows; r++) {
        const float *q = t->q + (size_t)r * (size_t)plan->attending.q_stride;
        float *sums = t->q_blocks + (size_t)r * (size_t)plan->attending.block_stride;
        for (int32_t d = 0; d < plan->k_dim; d += KVC_QUANT_ELEMENTS) {
            float sum[4] = {0};
            for (int32_t i = d; i < d + KVC_QUANT_ELEMENTS; i += 4)
                for (int32_t j = 0; j < 4; j++) sum[j] += q[i + j];
            *sums++ = t->call->scale * ((sum[0] + sum[1]) + (sum[2] + sum[3]));
        }
    }
}

void kvc_score_minima(const kvc_task *t, int32_t n) {
    const kvc_attending *workspace = &t->call->plan->attending;
    t->call->kernels->matmul(t->scores, KVC_SCORES, t->q_blocks, workspace->block_stride,
                             t->workspace + workspace->minima, KVC_TILE, t->num_query_rows, n,
                             t->call->plan->k_dim / KVC_QUANT_ELEMENTS, 1, (kvc_ahead){.bytes = 0});
}

/* Adds sums[b], the weighted sum of a block's minima, to each column of block b of a row of acc. */
static void add_to_columns(float *acc, const float *sums, int32_t num_blocks) {
    for (int32_t b = 0; b < num_blocks; b++, acc += KVC_QUANT_ELEMENTS) {
        const float sum = sums[b]; /* which acc could overlap, as far as compilers know */
        for (int32_t i = 0; i < KVC_QUANT_ELEMENTS; i++) acc[i] += sum;
    }
}

/* The weighted sum of a block's minima is the product of a row of weights and the block's row of minima: a score.  So
 * the kernel that scores keys computes it, for up to KVC_TILE blocks at once. */
void kvc_accumulate_minima(const kvc_task *t, int32_t n) {
    enum { AT_ONCE = 8 }; /* rows that kernels score at once: of fewer, each takes as long as all of these */
    const kvc_plan *plan = t->call->plan;
    const kvc_attending *workspace = &plan->attending;
    const int32_t num_blocks = plan->v_dim / KVC_QUANT_ELEMENTS, num_rows = kvc_padded_rows(n);
    float *const sums = t->workspace + workspace->sum_blocks;
    for (int32_t b = 0; b < num_blocks; b += KVC_TILE) {
        float *const minima = t->workspace + workspace->minima + (size_t)b * KVC_TILE;
        const int32_t some = (int32_t)kvc_smaller(num_blocks - b, KVC_TILE);
        const int32_t padded = (some + AT_ONCE - 1) / AT_ONCE * AT_ONCE;
        memset(minima + some * KVC_TILE, 0, (size_t)(padded - some) * KVC_TILE * sizeof *minima);
        for (int32_t i = 0; i < some; i++)
            memset(minima + i * KVC_TILE + n, 0, (size_t)(num_rows - n) * sizeof *minima); /* there, weights are 0 */
        t->call->kernels->score[KVC_F32].score(sums, t->scores, KVC_SCORES, t->num_query_rows, minima,
                                               KVC_TILE * sizeof *minima, padded, num_rows, (kvc_ahead){.bytes = 0});
        for (int32_t r = 0; r < t->num_query_rows; r++)
            add_to_columns(t->acc + (size_t)r * (size_t)workspace->acc_stride + (size_t)b * KVC_QUANT_ELEMENTS,
                           sums + (size_t)r * KVC_SCORES, some);
    }
}
