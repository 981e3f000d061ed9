/* rows.h: what a row contains.  Each token that was ever put has a number, its tag.  Every element of its rows follows
 * from the tag, the layer and the head, so that rows which are moved, shared or mixed up show.  Elements are numbers
 * that the type of the row stores without an error.  The tag can be read from any row again. */
#ifndef WORLD_ROWS_H
#define WORLD_ROWS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kvcache.h"

enum {
    HEADS = 3,         /* most of a layer */
    DIM = 32,          /* most elements of a row */
    IN_KEY = 16,       /* elements of a value that lies in a key */
    FIRST_TURNED = 16, /* of a key, the first element that a rope may turn */
    TURNED = 4,        /* pairs of elements that it turns */
    FIRST_OF_TAG = 2,  /* the element with the lowest four bits of the tag */
    TAG_ELEMENTS = 6,  /* elements with four bits each */
    MOST_TAG = 1 << 24
};

/* Right angles for each position, in turn for each pair of elements. */
static const int quarters[TURNED] = {1, -1, 2, 3};

/* The sixteen numbers of which rows of a type consist. */
static inline float level_of(int32_t type, int n) {
    static const float iq4_nl[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
                       int6[] = {-97, -76, -60, -45, -33, -21, -9, -1, 1, 9, 21, 33, 45, 60, 76, 97},
                       int4[] = {-119, -90, -70, -54, -40, -28, -16, -5, 5, 16, 28, 40, 54, 70, 90, 119};
    if (type == KVC_INT6) return int6[n];
    if (type == KVC_INT4) return int4[n];
    if (type == KVC_IQ4_NL) return iq4_nl[n];
    if (type == KVC_Q4_0 || type == KVC_Q5_0) return (float)(n - 8);
    if (type == KVC_Q4_1 || type == KVC_Q5_1) return (float)n;
    return (float)(16 * n - 120);
}

/* The first element decides the scale of a quantised row, and the second the minimum's distance. */
static inline float first_of(int32_t type) {
    if (type == KVC_IQ4_NL) return -127;
    if (type == KVC_Q4_0) return -8;
    if (type == KVC_Q5_0) return -16;
    if (type == KVC_INT4) return 119;
    return type == KVC_Q4_1 || type == KVC_Q5_1 ? 0 : 127;
}

/* Element d of a token's key or value. */
static inline float element(int32_t type, int32_t tag, int layer, int is_value, int head, int d) {
    uint32_t x = (uint32_t)tag * 0x9e3779b1u + (uint32_t)(((layer * 2 + is_value) * 64 + head) * 64 + d) * 0x85ebca6bu;
    x = (x ^ x >> 15) * 0x2c1b3c6du;
    if (d == 0) return first_of(type);
    if (d == 1 && type == KVC_Q4_1) return 15;
    if (d == 1 && type == KVC_Q5_1) return 31;
    if (d >= FIRST_OF_TAG && d < FIRST_OF_TAG + TAG_ELEMENTS) return level_of(type, tag >> 4 * (d - FIRST_OF_TAG) & 15);
    return level_of(type, (int)(x >> 28));
}

/* Turns a key as if it had moved up by so many positions. */
static inline void turn(int interleaved, int32_t moved, float *k) {
    for (int i = 0; i < TURNED; i++) {
        float *a = k + FIRST_TURNED + (interleaved ? 2 * i : i), *b = a + (interleaved ? 1 : TURNED);
        for (unsigned n = (unsigned)moved * (unsigned)quarters[i] & 3; n > 0; n--) {
            const float x = *a;
            *a = -*b;
            *b = x;
        }
    }
}

/* Whether keys or values are transformed before they are stored.  Elements are those of the stored row then. */
static inline int is_transformed(const kvc_layer *of, int is_value) {
    const int32_t type = is_value && !of->value_in_key ? of->v_type : of->k_type;
    return type >= KVC_INT6 || (type > KVC_BF16 && (is_value ? of->v_transform : of->k_transform));
}

/* Multiplies a row of DIM elements by the matrix of its transform, which is its own inverse. */
static inline void transform_row(const kvc_layer *of, int is_value, float *x) {
    const int has_signs = (is_value ? of->v_type : of->k_type) >= KVC_INT6;
    float from[DIM];
    if (!is_transformed(of, is_value)) return;
    memcpy(from, x, sizeof from);
    for (int i = 0; i < DIM; i++) {
        double sum = 0;
        for (int j = 0; j < DIM; j++) {
            const int pairs = (i & i >> 1 & 5) ^ (j & j >> 1 & 5), both = i & j;
            int odd = 0;
            for (int bit = 0; bit < 5; bit++) odd ^= (both >> bit ^ (has_signs ? pairs >> bit : 0)) & 1;
            sum += odd ? -(double)from[j] : (double)from[j];
        }
        x[i] = (float)(sum / sqrt(DIM));
    }
}

/* Makes a key of a token that has moved up by so many positions since it was put. */
static inline void make_key(const kvc_layer *of, int32_t tag, int layer, int head, int32_t moved, float *k) {
    for (int d = 0; d < of->k_dim; d++) k[d] = element(of->k_type, tag, layer, 0, head, d);
    transform_row(of, 0, k);
    if (of->rope.kind != KVC_ROPE_NONE && of->rope.kind != KVC_ROPE_UNKNOWN) turn(of->rope.interleaved, moved, k);
}

/* Makes a value; one in the key has the key's first elements. */
static inline void make_value(const kvc_layer *of, int32_t tag, int layer, int head, float *v) {
    const int32_t type = of->value_in_key ? of->k_type : of->v_type;
    for (int d = 0; d < of->v_dim; d++) v[d] = element(type, tag, layer, !of->value_in_key, head, d);
    transform_row(of, 1, v);
}

/* How far off an element of a key may be.  Rotations by many right angles are not quite exact.  Transformed keys that a
 * rope turns are rounded whenever they are rewritten.  After seven rewrites, the farthest
 * of 200,000 keys was off by 5.9.  Levels are 16 apart. */
static inline float key_error(const kvc_layer *of) {
    return is_transformed(of, 0) && of->rope.kind == KVC_ROPE_FREQUENCIES ? 7 : 0.01f;
}

/* Reads the tag of a row of elements, which may be off by an error; -1 if they tell none. */
static inline int32_t tag_in(int32_t type, const float *row, float error) {
    int32_t tag = 0;
    for (int i = 0; i < TAG_ELEMENTS; i++) {
        int n = 0;
        while (n < 16 && !(fabsf(level_of(type, n) - row[FIRST_OF_TAG + i]) <= error)) n++;
        if (n == 16) return -1;
        tag |= n << 4 * i;
    }
    return tag;
}

/* Whether two rows are one. */
static inline int same_elements(const float *a, const float *b, int num, float error) {
    for (int d = 0; d < num; d++)
        if (!(fabsf(a[d] - b[d]) <= error)) return 0;
    return 1;
}

/* Reads the tag of a layer's key of head 0, which may have moved by any number of right angles; -1 if it tells none. */
static inline int32_t tag_of_key(const kvc_layer *of, int layer, const float *k) {
    for (int32_t moved = 0; moved < 4; moved++) {
        float x[DIM], own[DIM];
        memcpy(x, k, (size_t)of->k_dim * sizeof *x);
        if (!is_transformed(of, 0)) return tag_in(of->k_type, x, key_error(of));
        turn(of->rope.interleaved, moved, x);
        transform_row(of, 0, x);
        const int32_t tag = tag_in(of->k_type, x, key_error(of));
        if (tag < 0) continue;
        make_key(of, tag, layer, 0, -moved, own); /* another angle may seem to tell a tag, too */
        if (same_elements(k, own, of->k_dim, key_error(of))) return tag;
    }
    return -1;
}

#endif
