/* packing.h: rows on their way into the cache, in one of many layouts. */
#ifndef WORLD_PACKING_H
#define WORLD_PACKING_H

#include "world.h"

/* Keys or values of some tokens in an array. */
typedef struct packed {
    char bytes[ROWS * HEADS * DIM * sizeof(float)];
    const void *start; /* of the first token's first head; NULL: there is no array */
    int64_t token_stride, head_stride, batch_stride;
    int32_t type;
} packed;

void make_put(const call *c, kvc_put_args *args, packed *k, packed *v); /* of tokens of the batch */

static inline void convert(float x, int32_t type, void *to) {
    uint32_t bits;
    uint16_t half;
    memcpy(&bits, &x, sizeof bits);
    if (type == KVC_F32) memcpy(to, &x, sizeof x);
    half = (uint16_t)(bits >> 16); /* numbers of rows have few bits */
    if (type == KVC_F16) half = (uint16_t)(bits ? (bits >> 16 & 0x8000) | (((bits >> 13) - (112u << 10)) & 0x7fff) : 0);
    if (type != KVC_F32) memcpy(to, &half, sizeof half);
}

static inline int64_t float_bytes(int32_t type) { return type == KVC_F32 ? 4 : 2; }

static inline void write_elements(char *to, const float *x, int num, int32_t type) {
    for (int d = 0; d < num; d++) convert(x[d], type, to + d * float_bytes(type));
}

/* Packs the rows of n tags, token or head major, backwards or not, in groups of `inner` tokens (0: one group).  Default
 * strides are left out now and then. */
static inline void pack_rows(packed *p, int l, int is_value, const int32_t *tags, int n, int inner) {
    const kvc_layer *layer = &w.o.layers[l];
    const int heads = layer->num_kv_heads, dim = is_value ? layer->v_dim : layer->k_dim;
    const int has_heads_inside = pick(2), backwards = pick(2), group = inner ? inner : n;
    p->type = is_transformed(layer, is_value) ? KVC_F32 : pick(3); /* other types would round them */
    const int64_t row_size = dim * float_bytes(p->type);
    p->token_stride = has_heads_inside ? row_size * heads : row_size;
    p->head_stride = has_heads_inside ? row_size : row_size * group;
    p->batch_stride = row_size * heads * group;
    char *start = p->bytes;
    if (backwards) {
        start += (group - 1) * p->token_stride;
        p->token_stride = -p->token_stride;
    }
    p->start = is_value && (!layer->v_dim || layer->value_in_key) ? NULL : start;
    for (int t = 0; t < n && p->start; t++)
        for (int h = 0; h < heads; h++) {
            float x[DIM];
            char *to = start + t / group * p->batch_stride + t % group * p->token_stride + h * p->head_stride;
            if (is_value)
                make_value(layer, tags[t], l, h, x);
            else
                make_key(layer, tags[t], l, h, 0, x);
            write_elements(to, x, dim, p->type);
        }
    if (!has_heads_inside || backwards) return; /* otherwise rows lie side by side */
    if (pick(2)) p->head_stride = 0;
    if (pick(2)) p->token_stride = 0;
    if (pick(2)) p->batch_stride = 0;
}

#endif
