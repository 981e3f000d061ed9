/* queries.c: see queries.h. */
#include "attend/queries.h"

#include <string.h>

#include "attend/bytes.h"
#include "attend/minima.h"

/* Copies what stays as it is here: `convert` begins copying too slowly for rows in the L1 cache. */
void kvc_convert_query_rows(const kvc_call *c, int32_t from, int32_t to, void *dst, int64_t dst_stride, const void *src,
                            int64_t src_stride, int32_t dim) {
    const int32_t num = c->plan->parts.heads;
    if (from != to) {
        c->kernels->convert(from, to, dst, dst_stride, src, src_stride, num, dim);
        return;
    }
    const size_t bytes = kvc_row_bytes(to, dim);
    for (int32_t i = 0; i < num; i++) memcpy((char *)dst + i * dst_stride, (const char *)src + i * src_stride, bytes);
}

void kvc_load_query_rows(const kvc_task *t, int32_t to) {
    const kvc_call *c = t->call;
    const kvc_attend_args *a = c->args;
    const int32_t dim = c->plan->k_dim, heads = c->plan->parts.heads;
    const int64_t stride = c->plan->attending.q_stride * (int64_t)sizeof(float);
    const int32_t padding = (KVC_CHUNK - dim % KVC_CHUNK) % KVC_CHUNK; /* elements */
    const size_t bytes = padding ? kvc_row_bytes(to, dim) : 0;
    const size_t padding_bytes = padding ? kvc_row_bytes(to, padding) : 0;
    char *row = (char *)t->q;
    for (int32_t i = 0; i < t->num_query_rows / heads; i++) {
        const char *q =
            (const char *)a->q + kvc_token_offset(t->tokens[i] - c->plan->args.first, a->tokens_per_sequence,
                                                  a->q_token_stride, a->q_batch_stride);
        kvc_convert_query_rows(c, a->q_type, to, row, stride, q + t->part * heads * a->q_head_stride, a->q_head_stride,
                               dim);
        for (int32_t h = 0; h < heads; h++, row += stride)
            if (padding) memset(row + bytes, 0, padding_bytes);
    }
}

int32_t kvc_delta_index_of(const kvc_task *t, const kvc_tile *tile) { return t->call->rope ? tile->delta_index : 0; }

/* Returns the angles that rotate a query row for keys that are off by the delta with this index. */
static const float *angles_of(const kvc_call *c, int32_t delta_index) {
    return c->angles + (size_t)(delta_index - 1) * (size_t)c->plan->deltas.angles_stride;
}

static void rotate_query_rows(const kvc_task *t, int32_t delta_index) {
    const kvc_call *c = t->call;
    const kvc_plan *plan = c->plan;
    const float *angles = angles_of(c, delta_index);
    for (int32_t r = 0; r < t->num_query_rows; r++)
        kvc_rope_rotate(c->rope, angles, t->q + (size_t)r * (size_t)plan->attending.q_stride);
}

const float *kvc_rotate_tile_keys(const kvc_task *t, const kvc_tile *tile, kvc_row_place *at, int32_t n) {
    const kvc_call *c = t->call;
    const int32_t dim = c->plan->k_dim;
    const int64_t stride = c->plan->attending.q_stride * (int64_t)sizeof(float);
    float *const first = t->workspace + c->plan->attending.rows, *to = first;
    for (int32_t i = 0, count; i < n; i += count) {
        const kvc_segment *segment = at->segment;
        count = kvc_rows_here(at, n - i);
        const kvc_rows keys = kvc_keys_in(tile, c->layer, segment, at->offset);
        kvc_decode_rows(c->kernels, to, stride, &keys, count, dim);
        for (int32_t j = 0; j < count; j++, to += c->plan->attending.q_stride) {
            if (c->k_mixing.order) c->kernels->hadamard(to, to, dim, c->k_mixing);
            if (segment->delta_index) kvc_rope_rotate_back(c->rope, angles_of(c, segment->delta_index), to);
        }
        kvc_go_on(at, count);
    }
    return first;
}

/* ---- kernels and prepared query rows ----------------------------------------------------------------------------- */

int kvc_key_minima_apart(const kvc_task *t, const kvc_tile *tile) {
    return kvc_delta_index_of(t, tile) != KVC_MIXED && t->k_lacks_minima;
}

const kvc_scorer *kvc_scorer_of(const kvc_task *t, const kvc_tile *tile) {
    const kvc_kernels *kernels = t->call->kernels;
    const int32_t delta_index = kvc_delta_index_of(t, tile), type = delta_index == KVC_MIXED ? KVC_F32 : t->k_as;
    const int is_same = type == t->call->args->q_type && !delta_index;
    return is_same && kernels->score_16[type].score ? &kernels->score_16[type] : &kernels->score[type];
}

/* Transforms the query rows as stored keys are, which leaves scores as they are. */
static void transform_query_rows(const kvc_task *t, kvc_mixing mixing) {
    const kvc_call *c = t->call;
    for (int32_t r = 0; r < t->num_query_rows; r++) {
        float *q = t->q + (size_t)r * (size_t)c->plan->attending.q_stride;
        c->kernels->hadamard(q, q, c->plan->k_dim, mixing);
    }
}

/* Prepares the query rows for products in bytes, transformed as keys in bytes are. */
static void prepare_in_bytes(const kvc_task *t) {
    kvc_load_query_rows(t, KVC_F32);
    if (t->delta_index > 0) rotate_query_rows(t, t->delta_index);
    if (t->call->byte_mixing.order) transform_query_rows(t, t->call->byte_mixing);
    kvc_prepare_bytes(t);
}

const float *kvc_query_rows_for(kvc_task *t, const kvc_tile *tile) {
    const kvc_plan *plan = t->call->plan;
    const int32_t delta_index = kvc_delta_index_of(t, tile);
    if (delta_index == t->delta_index) return t->q;
    if (t->slice->tiled == KVC_IN_BYTES) {
        t->delta_index = delta_index;
        prepare_in_bytes(t);
        return t->q;
    }
    const kvc_scorer *scorer = kvc_scorer_of(t, tile);
    kvc_prepare_fn *prepare = t->slice->tiled ? kvc_product_of(t, delta_index).prepare : scorer->prepare;
    const int is_as_16 = !t->slice->tiled && scorer == &t->call->kernels->score_16[t->call->args->q_type];
    t->delta_index = delta_index;
    kvc_load_query_rows(t, prepare && !is_as_16 ? KVC_F32 : t->call->args->q_type);
    if (!prepare) return t->q;
    if (delta_index > 0) rotate_query_rows(t, delta_index);
    if (t->call->k_mixing.order && delta_index != KVC_MIXED) transform_query_rows(t, t->call->k_mixing);
    if (kvc_key_minima_apart(t, tile)) kvc_add_up_blocks(t);
    prepare(t->q, plan->attending.q_stride, t->num_query_rows, plan->k_dim, t->call->scale);
    return t->q;
}
