/* sketches.h: sketches of keys in double, and what a token selects by them.  They are written from the rules in
 * include/kvcache.h and rows/sketch.h.  Elements and weights that rounding may move to the other side of a limit make
 * the answer unsure. */
#ifndef KVC_TEST_SKETCHES_H
#define KVC_TEST_SKETCHES_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cache/batch.h"
#include "rows/copy.h"
#include "cache/batch.h"
#include "world/attention.h"

/* ---- sketches ---------------------------------------------------------------------------------------------------- */

/* Multiplies a row by Hadamard's matrix of order n over the root of n, in each n elements. */
static inline void spread(double *x, int dim, int n) {
    for (int half = 1; half < n; half *= 2)
        for (int i = 0; i < dim; i++)
            if (!(i & half)) {
                const double a = x[i], b = x[i + half];
                x[i] = a + b;
                x[i + half] = a - b;
            }
    for (int i = 0; i < dim; i++) x[i] /= sqrt(n);
}

/* Multiplies a row by D, as kvcache.h says of KVC_INT6. */
static inline void turn_signs(double *x, int dim, int n) {
    for (int i = 0; i < dim; i++) {
        int pairs = 0;
        for (int j = i % n; j; j >>= 2) pairs += j % 4 == 3;
        if (pairs % 2) x[i] = -x[i];
    }
}

/* Multiplies a row by D * H * D. */
static inline void mix(double *x, int dim) {
    const int n = (dim & -dim) < 1024 ? dim & -dim : 1024;
    turn_signs(x, dim, n);
    spread(x, dim, n);
    turn_signs(x, dim, n);
}

/* The root of the mean square of a mixed key, times where its outer codes begin. */
static inline double threshold_of(const double *x, int dim) {
    double square = 0;
    for (int d = 0; d < dim; d++) square += x[d] * x[d];
    return 0.98 * sqrt(square / dim);
}

/* Returns element d of a sketch as a code from 0 to 3. */
static inline int code_of(const uint8_t *bytes, int d) { return bytes[d / 32 * 8 + d % 8] >> d % 32 / 8 * 2 & 3; }

/* Whether stored bytes are the sketch of a mixed key of numbers. */
static inline int is_sketch(const uint8_t *bytes, const double *x, int dim) {
    const double most = threshold_of(x, dim);
    double square = 0, product = 0;
    for (int d = 0; d < dim; d++) {
        const double limits[] = {-INFINITY, -most, 0, most, INFINITY};
        const int code = code_of(bytes, d);
        if (x[d] < limits[code] - 1e-4 * most || x[d] > limits[code + 1] + 1e-4 * most) return 0;
        square += x[d] * x[d];
        product += (code - 1.5) * x[d];
    }
    const double scale = product > 0 ? square / product : 0, got = from_half(bytes + dim / 4);
    return fabs(got - (scale < 65504 ? scale : 65504)) <= 0x1p-10 * fabs(scale) + 0x1p-24;
}

/* Decodes the stored key of a slot and head, mixed as its sketch has it. */
static inline void mixed_key(const kvc_kernels *kernels, const kvc_layer *layer, const kvc_layout *at,
                             const uint8_t *rows, int slot, int head, double *x) {
    float decoded[1024];
    const int dim = layer->k_dim;
    const kvc_rows all = kvc_stored_rows(layer, at, rows, slot, 0), one = kvc_row_of(&all, 0, head);
    const int is_fitted = layer->k_type == KVC_INT6 || layer->k_type == KVC_INT4;
    const int is_transformed = layer->k_transform && layer->k_type >= KVC_Q8_0 && !is_fitted;
    kvc_decode_rows(kernels, decoded, (int64_t)sizeof *decoded * dim, &one, 1, dim);
    for (int d = 0; d < dim; d++) x[d] = (double)decoded[d];
    if (is_transformed) spread(x, dim, (dim & -dim) < 1024 ? dim & -dim : 1024);
    if (!is_fitted) mix(x, dim);
}

/* Returns the first slot in which a head has a sketch of another key; -1: there is no such slot. */
static inline int wrong_sketch(const kvc_kernels *kernels, const kvc_layer *layer, const kvc_layout *at,
                               const uint8_t *rows, int slot, int count) {
    double x[1024];
    for (int end = slot + count; slot < end; slot++)
        for (int h = 0; h < layer->num_kv_heads; h++) {
            mixed_key(kernels, layer, at, rows, slot, h, x);
            double largest = 0;
            for (int d = 0; d < layer->k_dim; d++) largest = isnan(x[d]) ? INFINITY : fmax(largest, fabs(x[d]));
            const int has_squares = largest < 1e18 && (largest > 1e-15 || largest == 0); /* that floats can hold */
            if (has_squares && !is_sketch(kvc_sketch_at(at, rows, slot, h), x, layer->k_dim)) return slot;
        }
    return -1;
}

/* Returns the position of a row with a sketch of another key, of a sequence in a layer; -1: all rows have their own
 * sketches.  Call while nothing moves rows. */
static inline int wrong_sketch_in(const kvc_cache *cache, const kvc_sequence *sequence, int l) {
    const kvc_run_list *list = &sequence->runs[cache->group_of[l]];
    for (const kvc_run *run = kvc_runs_begin(list); run < kvc_runs_end(list); run++) {
        const kvc_layout *at = &cache->layouts[cache->layout_of[l]];
        const int slot = wrong_sketch(cache->kernels, &cache->layers[l], at, run->block->rows, run->slot, run->count);
        if (slot >= 0) return run->position + slot - run->slot;
    }
    return -1;
}

/* ---- selecting --------------------------------------------------------------------------------------------------- */

/* A row that a token of a batch may see, stored or of the batch. */
typedef struct sketched_row {
    const uint8_t *bytes; /* its sketch, head 0; heads are head_stride apart */
    size_t head_stride;
    int32_t position, token, delta; /* token: its index in the batch; -1: stored */
} sketched_row;

/* Lists the rows of a member of a batch in a layer of its own, by position, and at one position by arrival.  Rows of
 * the batch are listed whether they were put or not.  Returns their number. */
static inline int list_sketched(const kvc_batch *batch, int l, int member, sketched_row *to) {
    const kvc_cache *cache = batch->cache;
    const kvc_batch_sequence *of = &batch->sequences[member];
    const kvc_run_list *list = &of->sequence->runs[cache->group_of[l]];
    const kvc_layout *at = &cache->layouts[cache->layout_of[l]];
    int num = 0;
    for (const kvc_run *run = kvc_runs_begin(list); run < kvc_runs_end(list); run++)
        for (int i = 0; i < run->count; i++)
            to[num++] = (sketched_row){kvc_sketch_at(at, run->block->rows, run->slot + i, 0), at->head_stride,
                                       run->position + i, -1, run->delta};
    for (int i = of->first; i < of->first + of->num_tokens; i++) {
        const int t = batch->order[i];
        const kvc_place *place = &batch->places[cache->group_of[l] * batch->num_tokens + t];
        to[num++] = (sketched_row){kvc_sketch_at(at, place->block->rows, place->slot, 0), at->head_stride,
                                   batch->positions[t], t, 0};
    }
    for (int i = 1; i < num; i++) { /* rows come nearly in order */
        const sketched_row row = to[i];
        int j = i;
        for (; j && to[j - 1].position > row.position; j--) to[j] = to[j - 1];
        to[j] = row;
    }
    return num;
}

/* A query of one head as it is compared with sketches: whole numbers times `unit`. */
typedef struct rounded_query {
    double codes[1024], unit;
    int num_unsure; /* codes that rounding may make another */
} rounded_query;

static inline rounded_query round_query(const kvc_layer *layer, const float *q, int32_t delta) {
    rounded_query r = {.unit = 0};
    const int dim = layer->k_dim, has_freqs = layer->rope.kind == KVC_ROPE_FREQUENCIES;
    double x[1024], largest = 0;
    for (int d = 0; d < dim; d++) x[d] = (double)q[d];
    for (int i = 0; delta && has_freqs && i < layer->rope.num_freqs; i++) { /* in place of keys that were turned less */
        double *a = x + layer->rope.first_dim + (layer->rope.interleaved ? 2 * i : i);
        double *b = a + (layer->rope.interleaved ? 1 : layer->rope.num_freqs);
        const double c = cos(delta * layer->rope.inv_freq[i]), s = -sin(delta * layer->rope.inv_freq[i]), old = *a;
        *a = old * c - *b * s;
        *b = *b * c + old * s;
    }
    mix(x, dim);
    for (int d = 0; d < dim; d++) largest = fmax(largest, fabs(x[d]));
    r.unit = largest / 127;
    for (int d = 0; d < dim; d++) {
        const double exact = largest > 0 ? x[d] / r.unit : 0;
        r.codes[d] = round(exact);
        r.num_unsure += fabs(fabs(exact - r.codes[d]) - 0.5) < (delta ? 5e-4 : 1e-4);
    }
    return r;
}

/* Returns the product of a query and what a sketch stands for. */
static inline double product_with(const rounded_query *q, const uint8_t *bytes, int dim) {
    double sum = 0;
    for (int d = 0; d < dim; d++) sum += q->codes[d] * (code_of(bytes, d) - 1.5);
    return sum * q->unit * from_half(bytes + dim / 4);
}

/* Returns how far, at most, codes that are unsure put that product off. */
static inline double unsure_of(const rounded_query *q, const uint8_t *bytes, int dim) {
    return q->num_unsure * q->unit * 1.5 * from_half(bytes + dim / 4);
}

/* The rows that a token reads in any case, and about how many more. */
typedef struct selecting {
    int first, last, rows;
} selecting;

/* Marks which of n rows, that a token sees, it reads for a KV head.  scores: [num_heads][n]; off: how far, at most, a
 * difference of scores may be off.  Returns 0 if that may decide. */
static inline int mark_selected(const selecting *by, int n, const double *scores, int num_heads, double off,
                                uint8_t *reads) {
    const int pieces = (n + 3) / 4, begin = by->first / 4, end = (n - by->last) / 4, most = (by->rows + 3) / 4;
    memset(reads, 1, (size_t)n);
    if (n <= by->first + by->last + 2 * by->rows) return 1;
    double *masses = calloc((size_t)pieces, sizeof *masses);
    seen_row *rows = calloc((size_t)n, sizeof *rows);
    for (int h = 0; h < num_heads; h++) {
        for (int j = 0; j < n; j++) rows[j].score = scores[h * n + j];
        weigh_seen(rows, n, -INFINITY);
        for (int j = 0; j < n; j++) masses[j / 4] += rows[j].weight;
    }
    free(rows);
    double least = INFINITY, next = 0; /* weight of what is read of choice, and of what is not read */
    for (int i = begin; i < end; i++) {
        int before = 0;
        for (int j = begin; j < end; j++) before += masses[j] > masses[i] || (masses[j] == masses[i] && j < i);
        if (before < most)
            least = fmin(least, masses[i]);
        else
            memset(reads + 4 * i, 0, 4), next = fmax(next, masses[i]);
    }
    free(masses);
    return least > 1e-20 && least - next > (4.3e-4 + off) * least; /* floats lose smaller ones, and are off by 2e-4 */
}

#endif
