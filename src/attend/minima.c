/* minima.c: see minima.h. */
#include "attend/minima.h"

void kvc_add_up_blocks(const kvc_task *t) {
    const kvc_plan *plan = t->call->plan;
    for (int32_t r = 0; r < t->num_query_rows; r++) {
        const float *q = t->q + (size_t)r * (size_t)plan->lane.q_stride;
        float *sums = t->q_blocks + (size_t)r * (size_t)plan->lane.block_stride;
        for (int32_t d = 0; d < plan->k_dim; d += KVC_QUANT_ELEMENTS) {
            float sum[4] = {0};
            for (int32_t i = d; i < d + KVC_QUANT_ELEMENTS; i += 4)
                for (int32_t j = 0; j < 4; j++) sum[j] += q[i + j];
            *sums++ = t->call->scale * ((sum[0] + sum[1]) + (sum[2] + sum[3]));
        }
    }
}

void kvc_score_minima(const kvc_task *t, int32_t n) {
    const kvc_lane_layout *lane = &t->call->plan->lane;
    t->call->kernels->tiler[KVC_F32].score(t->scores, KVC_TILE, t->q_blocks, lane->block_stride, t->lane + lane->minima,
                                           KVC_TILE, t->num_query_rows, n, t->call->plan->k_dim / KVC_QUANT_ELEMENTS,
                                           1);
}

void kvc_accumulate_minima(const kvc_task *t, int32_t n) {
    const kvc_plan *plan = t->call->plan;
    const kvc_lane_layout *lane = &plan->lane;
    float *const sums = t->lane + lane->sum_blocks;
    const int32_t stride = lane->block_stride;
    t->call->kernels->tiler[KVC_F32].accumulate(sums, stride, t->scores, KVC_TILE, t->lane + lane->minima, stride,
                                                t->num_query_rows, plan->v_dim / KVC_QUANT_ELEMENTS, n, 0);
    for (int32_t r = 0; r < t->num_query_rows; r++) {
        float *acc = t->acc + (size_t)r * (size_t)lane->acc_stride;
        for (int32_t b = 0; b < plan->v_dim / KVC_QUANT_ELEMENTS; b++, acc += KVC_QUANT_ELEMENTS)
            for (int32_t i = 0; i < KVC_QUANT_ELEMENTS; i++) acc[i] += sums[(size_t)r * (size_t)stride + (size_t)b];
    }
}
