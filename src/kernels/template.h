/* template.h: the kernels, written once over vectors of floats.  A file of an instruction set defines what is listed
 * here and includes this, which defines its table.
 *
 *   ISA              name of the instruction set
 *   TARGET           attribute of every function
 *   INLINE           static, TARGET, and always inlined where speed counts
 *   RARE             static, TARGET, and small: for the shapes that few models have
 *   UNROLL           before a loop over registers; nothing where speed does not count
 *   LANES            floats in a vector; divides KVC_LANES, which is half of KVC_QUANT_ELEMENTS
 *   ACCUMULATORS     registers that score and accumulate add up in, at least 4; they need four more for factors.  It
 *                    takes more of them than the latency of an fma times the fmas started in a cycle
 *   MATMUL_ROWS      rows (at most 12) and vectors of the block of c that matmul keeps in registers, beside which it
 *   MATMUL_VECTORS   needs MATMUL_VECTORS + 1; MATMUL_VECTORS * LANES is KVC_LANES or twice that
 *
 *   vec                        a vector of LANES floats
 *   v_zero()  v_set(x)         all lanes
 *   v_keep(x)                  x, held in a register: compilers like to read memory anew for every use
 *   v_load(p)  v_store(p, x)   unaligned; likewise
 *   v_load_f16(p)  v_store_f16(p, x)  v_load_bf16(p)  v_store_bf16(p, x)
 *   v_load_i8(p)               LANES int8
 *   v_load_u4(p, shift)        bits [shift, shift + 4) of LANES bytes
 *   v_store_8(p, x)            LANES integers of [-128, 256), their low 8 bits
 *   v_set_f16(p)  store_f16(p, x)     all lanes one f16; one float as an f16
 *   v_add(x, y)  v_mul(x, y)
 *   v_fma(x, y, z)             x * y + z, rounded once
 *   v_max(x, y)  v_min(x, y)   y where either is NaN
 *   v_abs(x)  v_number(x)      0 for NaN
 *   v_round(x)                 to the nearest integer
 *   v_round_away(x)            to the nearest integer, halves away from 0
 *   v_truncate(x)              to an integer, towards 0
 *   v_equal(x, y)              a uint32_t with bit i set where lane i is equal
 *   v_scale(x, n)              x * 2^n, n an integer of [-125, 0]; 0 for n below, whatever x is; NaN where n is
 *   v_max_lane(x)  v_sum_lanes(x)     one float
 *   v_sums(x)                  the sums of the vectors x[0 .. LANES), each added up in the same order
 *   v_transpose(x)             lane j of x[i] for lane i of x[j]
 *   copy_row(dst, src, bytes)  memcpy, or what is better where rows lie apart
 *
 *   ivec                       a vector of LANES int32, or of twice as many int16
 *   i_zero()  i_set_16(x)      all lanes, of int16
 *   i_set_pair(p)              all lanes the int32, or the pair of int16, at p
 *   i_and(x, y)  i_xor(x, y)
 *   i_shift(x, n)              int16 lanes right by n, of 4, 8 or 12; zeros come in
 *   i_dot(sum, x, y)           sum + the two products of int16 in each int32 lane
 *   v_from_int(x)              as floats
 *   i_store_16(p, x, y)        two vectors of floats, rounded to nearest: 2 * LANES int16, saturated
 *   i_load_rows(x, rows, at)   16 bytes of each of LANES rows, `at` bytes into it: lane j of x[i] is int32 i of rows[j]
 *   v_load_scales(rows, at)    the f16 `at` bytes into each of LANES rows; two bytes after it may be read as well
 *   i_load_pairs(type, x, p, q)       elements of the same columns of two rows, from p and q on, in pairs of int16:
 *                              of q8_0, 2 * LANES columns in x[0 .. 2); of q4_0 LANES bytes, their low halves in x[0],
 *                              their high ones in x[1], and 16 times as large: as they lie in a byte, they need but
 *                              another sign.  q8_0 columns may be in any order ...
 *   i_order(type, x)           ... which this undoes, of their sums
 *
 * Where DOT_BF16 is 1:
 *   bvec                       a vector of 2 * LANES bf16
 *   b_load(p, count)           the first count of them at p, the others 0; nothing else is read
 *   b_dot(sum, x, y)           sum + the two products of bf16 in each lane
 *
 * Where a loop over registers has to be unrolled, its bounds are constants once it is inlined.  One result is always
 * computed by the same operations in the same order, whatever else is computed with it: a query's scores do not depend
 * on how many queries there are. */
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "kvcache.h"

enum {
    QUERIES = 4,     /* most query rows that are worked on together */
    MAX_BREADTH = 8, /* most rows that are worked on with them */
    FEW_VECS = 4,    /* most vectors of columns, but for the next one: a row of 128 where vectors are of 16 */
    MAX_VECS = LANES < 16 ? FEW_VECS : 8,
    MAX_STRETCH = 2, /* most vectors of a row that score reads before it turns to the next one */
    MAX_SUMS = 16,   /* vectors that are summed up for them, gaps included */
    EXPS = 4,        /* vectors that exp is taken of together */
    LINE = 64,       /* bytes of a cache line */
    QUANT_VECTORS = KVC_QUANT_ELEMENTS / LANES
};

INLINE int smaller(int a, int b) { return a < b ? a : b; }

/* ---- quantised types -------------------------------------------------------------------------------------------- */

/* Elements [i, i + LANES) of a block. */
INLINE vec load_q8_0(const char *block, int i) {
    return v_mul(v_set_f16(block), v_load_i8(block + KVC_SCALE_BYTES + i));
}

/* The first half of the elements are the low four bits of the bytes, the second half the high ones. */
INLINE vec load_q4_0(const char *block, int i) {
    const int half = KVC_QUANT_ELEMENTS / 2;
    vec q = v_load_u4(block + KVC_SCALE_BYTES + i % half, i / half * 4);
    return v_mul(v_set_f16(block), v_add(q, v_set(-8)));
}

/* 1 / d; 0 where that is infinite. */
INLINE float reciprocal(float d) {
    float x = d != 0 ? 1 / d : 0;
    return isinf(x) ? 0 : x;
}

INLINE float largest_magnitude(const vec x[QUANT_VECTORS]) {
    vec largest = v_zero();
    UNROLL
    for (int i = 0; i < QUANT_VECTORS; i++) largest = v_max(v_abs(x[i]), largest);
    return v_max_lane(largest);
}

INLINE void store_q8_0(char *block, const vec x[QUANT_VECTORS]) {
    float d = largest_magnitude(x) / 127;
    vec id = v_set(reciprocal(d));
    store_f16(block, d);
    UNROLL
    for (int i = 0; i < QUANT_VECTORS; i++)
        v_store_8(block + KVC_SCALE_BYTES + i * LANES, v_round_away(v_number(v_mul(x[i], id))));
}

/* The first of the elements of largest magnitude. */
INLINE float first_largest(const vec x[QUANT_VECTORS]) {
    float largest = largest_magnitude(x);
    uint32_t positive = 0, negative = 0; /* bit i: element i is such */
    UNROLL
    for (int i = 0; i < QUANT_VECTORS; i++) {
        positive |= v_equal(x[i], v_set(largest)) << i * LANES;
        negative |= v_equal(x[i], v_set(-largest)) << i * LANES;
    }
    uint32_t both = positive | negative, first = both & (0 - both);
    return first & ~positive ? -largest : largest; /* 0 where all are 0 or NaN */
}

/* The product is rounded before 8.5 is added: v_number stands between them, so that no compiler makes an fma of it. */
INLINE vec nibbles(vec x, vec id) { return v_truncate(v_min(v_add(v_number(v_mul(x, id)), v_set(8.5f)), v_set(15))); }

INLINE void store_q4_0(char *block, const vec x[QUANT_VECTORS]) {
    const int half = QUANT_VECTORS / 2;
    float d = first_largest(x) / -8, inverse = reciprocal(d);
    vec id = v_set(inverse);
    store_f16(block, d);
    if (d != 0 && inverse == 0 && isfinite(d)) { /* as in scalar.c */
        memset(block + KVC_SCALE_BYTES, 0, KVC_QUANT_ELEMENTS / 2);
        return;
    }
    UNROLL
    for (int i = 0; i < half; i++)
        v_store_8(block + KVC_SCALE_BYTES + i * LANES, v_fma(nibbles(x[half + i], id), v_set(16), nibbles(x[i], id)));
}

/* ---- rows of any type ------------------------------------------------------------------------------------------- */

/* Of the first i elements of a row; of the blocks before the one with element i, where they are quantised. */
INLINE size_t bytes_of(int type, int i) {
    if (type == KVC_Q8_0) return (size_t)i / KVC_QUANT_ELEMENTS * KVC_Q8_0_BYTES;
    if (type == KVC_Q4_0) return (size_t)i / KVC_QUANT_ELEMENTS * KVC_Q4_0_BYTES;
    return (size_t)i * (type == KVC_F32 ? sizeof(float) : sizeof(uint16_t));
}

/* Elements of a row that make no full vector: the last ones. */
INLINE int tail_of(int type, int dim) { return type < KVC_FLOAT_TYPES ? dim % LANES : 0; }

INLINE vec load_full(int type, const void *p) {
    return type == KVC_F16 ? v_load_f16(p) : type == KVC_BF16 ? v_load_bf16(p) : v_load(p);
}

INLINE void store_full(int type, void *p, vec x) {
    if (type == KVC_F16)
        v_store_f16(p, x);
    else if (type == KVC_BF16)
        v_store_bf16(p, x);
    else
        v_store(p, x);
}

/* The first count elements at p, the other lanes 0. */
RARE vec load_part(int type, const void *p, int count) {
    float part[LANES] = {0}; /* has room for any type */
    memcpy(part, p, bytes_of(type, count));
    return load_full(type, part);
}

RARE void store_part(int type, void *p, int count, vec x) {
    float part[LANES];
    store_full(type, part, x);
    memcpy(p, part, bytes_of(type, count));
}

/* Elements [i, i + count), count <= LANES, of a row; LANES of them where the type is quantised, i a multiple of that.
 * Nothing else is read or written. */
INLINE vec load(int type, const void *row, int i, int count) {
    const char *p = (const char *)row + bytes_of(type, i);
    if (type == KVC_Q8_0) return load_q8_0(p, i % KVC_QUANT_ELEMENTS);
    if (type == KVC_Q4_0) return load_q4_0(p, i % KVC_QUANT_ELEMENTS);
    return count == LANES ? load_full(type, p) : load_part(type, p, count);
}

/* Floating point types only. */
INLINE void store(int type, void *row, int i, int count, vec x) {
    char *p = (char *)row + bytes_of(type, i);
    if (count == LANES)
        store_full(type, p, x);
    else
        store_part(type, p, count, x);
}

/* Rows that are asked for while other work is done, evenly and in the order in which they lie: faster than memory is,
 * they would hold up what that reads, or not be fetched at all. */
typedef struct ahead {
    const void *const *row; /* the next one */
    const char *at, *end;   /* of the rest of the one before */
    int bytes, level;       /* of a row; kvc_ahead */
    int lines, steps, due;  /* so many lines in so many steps of the work; lines due, times the steps */
} ahead;

/* n rows.  Those that lie one after the other are one: a line between two of them is asked for once. */
INLINE ahead ahead_of(kvc_ahead next, int n, int steps) {
    if (!next.rows) n = 0;
    if (n && (uintptr_t)next.rows[n - 1] - (uintptr_t)next.rows[0] == (size_t)(n - 1) * (size_t)next.bytes) {
        next.bytes *= n;
        n = 1;
    }
    return (ahead){next.rows, NULL, NULL, next.bytes, next.level, n * ((next.bytes + LINE - 1) / LINE), steps, 0};
}

/* At each step. */
INLINE void ask(ahead *a) {
    for (a->due += a->lines; a->due >= a->steps; a->due -= a->steps, a->at += LINE) {
        if (a->at >= a->end) {
            a->at = *a->row++;
            a->end = a->at + a->bytes;
        }
        if (LANES == 16 && a->level == 1) /* the processors that want this have AVX-512 */
            __builtin_prefetch(a->at, 0, 3);
        else
            __builtin_prefetch(a->at, 0, 2);
    }
}

TARGET static void copy(void *dst, int64_t dst_stride, const void *src, int64_t src_stride, int64_t num_rows,
                        size_t row_bytes) {
    if (dst_stride == (int64_t)row_bytes && src_stride == dst_stride) {
        memcpy(dst, src, (size_t)num_rows * row_bytes);
        return;
    }
    for (int64_t r = 0; r < num_rows; r++)
        copy_row((char *)dst + r * dst_stride, (const char *)src + r * src_stride, row_bytes);
}

INLINE void quantise_row(int from, int to, char *dst, const char *src, int dim) {
    for (int d = 0; d < dim; d += KVC_QUANT_ELEMENTS) {
        vec x[QUANT_VECTORS];
        UNROLL
        for (int i = 0; i < QUANT_VECTORS; i++) x[i] = load(from, src, d + i * LANES, LANES);
        if (to == KVC_Q8_0)
            store_q8_0(dst + bytes_of(to, d), x);
        else
            store_q4_0(dst + bytes_of(to, d), x);
    }
}

INLINE void convert_row(int from, int to, char *dst, const char *src, int dim) {
    int tail = tail_of(from, dim), d = 0;
    for (; d < dim - tail; d += LANES) store(to, dst, d, LANES, load(from, src, d, LANES));
    if (tail) store(to, dst, d, tail, load(from, src, d, tail));
}

INLINE void convert(int from, int to, void *dst, int64_t dst_stride, const void *src, int64_t src_stride,
                    int64_t num_rows, int dim) {
    if (from == to) {
        copy(dst, dst_stride, src, src_stride, num_rows, bytes_of(from, dim));
        return;
    }
    for (int64_t r = 0; r < num_rows; r++) {
        const char *src_row = (const char *)src + r * src_stride;
        char *dst_row = (char *)dst + r * dst_stride;
        if (to >= KVC_FLOAT_TYPES)
            quantise_row(from, to, dst_row, src_row, dim);
        else
            convert_row(from, to, dst_row, src_row, dim);
    }
}

/* ---- what score and accumulate work on --------------------------------------------------------------------------- */

/* Score and accumulate add up outer products: of a few queries by as many rows, or vectors of columns, as ACCUMULATORS
 * allow.  Of the factors, the fewer stay in registers while the rest are loaded one by one. */

/* Rows of a block.  The sums of one query lie a power of two apart from those of the next: what is read from
 * across the middle of a vector that has just been stored has to wait for the store. */
INLINE int rows_of(int num_q) {
    const int most = ACCUMULATORS / num_q;
    return most >= 8 ? 8 : most >= 4 ? 4 : most;
}

INLINE int pitch_of(int num_rows) { return num_rows == 3 ? 4 : num_rows; }

/* What a call of accumulate works on; a block of it is some queries and columns. */
typedef struct accumulate_args {
    float *acc;
    const float *factor, *weights;
    const void *const *rows;
    int acc_stride, n, dim;
    ahead next;
} accumulate_args;

#include "kernels/quantised.h"

#if DOT_BF16
#include "kernels/bf16.h"
#endif

/* ---- score ------------------------------------------------------------------------------------------------------ */

/* Vectors of a row that score reads one after the other, before it turns to the next row: the cache line that two of 16
 * bits are, where there are registers for as much of all queries.  With fewer queries and more rows it is slower. */
INLINE int stretch_of(int type, int num_q) {
    return LANES * sizeof(uint16_t) * MAX_STRETCH == LINE && type != KVC_F32 && num_q == QUERIES ? MAX_STRETCH : 1;
}

/* Adds the products of elements [d, d + num_vecs * LANES) to sums[query][row]. */
INLINE void score_step(int type, int num_q, int num_rows, int num_vecs, vec *sums, const float *q, int q_stride,
                       const void *const *rows, int d) {
    const int pitch = pitch_of(num_rows);
    vec x[MAX_BREADTH], y[QUERIES][MAX_STRETCH];
    if (num_rows < num_q) { /* and num_vecs is 1 */
        UNROLL
        for (int j = 0; j < num_rows; j++) x[j] = v_keep(load(type, rows[j], d, LANES));
        UNROLL
        for (int r = 0; r < num_q; r++) {
            y[0][0] = v_keep(v_load(q + (ptrdiff_t)r * q_stride + d));
            UNROLL
            for (int j = 0; j < num_rows; j++) sums[r * pitch + j] = v_fma(x[j], y[0][0], sums[r * pitch + j]);
        }
    } else {
        UNROLL
        for (int r = 0; r < num_q; r++) UNROLL
        for (int i = 0; i < num_vecs; i++) y[r][i] = v_keep(v_load(q + (ptrdiff_t)r * q_stride + d + i * LANES));
        UNROLL
        for (int j = 0; j < num_rows; j++) UNROLL
        for (int i = 0; i < num_vecs; i++) {
            x[0] = v_keep(load(type, rows[j], d + i * LANES, LANES));
            UNROLL
            for (int r = 0; r < num_q; r++) sums[r * pitch + j] = v_fma(x[0], y[r][i], sums[r * pitch + j]);
        }
    }
}

/* The first `count` scores of each query. */
INLINE void store_scores(int num_q, int count, float *scores, const float *sum, int pitch) {
    UNROLL
    for (int r = 0; r < num_q; r++) memcpy(scores + r * KVC_TILE, sum + r * pitch, (size_t)count * sizeof *sum);
}

/* The tile has room for so many scores.  dots: of queries that are bf16, too. */
INLINE void score_block(int type, int dots, int num_q, int num_rows, float *scores, int room, const float *q,
                        int q_stride, const void *const *rows, int dim, ahead *next) {
    const int pitch = pitch_of(num_rows);
    vec sums[MAX_SUMS];
    float sum[MAX_SUMS];
    UNROLL
    for (int i = 0; i < MAX_SUMS; i++) sums[i] = v_zero();
#if DOT_BF16
    if (dots) add_dots(num_q, num_rows, sums, q, q_stride, rows, dim, next);
#endif
    const int stretch = stretch_of(type, num_q) * LANES;
    int d = dots ? dim : 0;
    for (; d + stretch <= dim; d += stretch) {
        ask(next);
        score_step(type, num_q, num_rows, stretch / LANES, sums, q, q_stride, rows, d);
    }
    if (stretch > LANES && d + LANES <= dim) score_step(type, num_q, num_rows, 1, sums, q, q_stride, rows, d);
    UNROLL
    for (int i = 0; i < num_q * pitch; i += LANES) v_store(sum + i, v_sums(sums + i));
    if (room >= pitch)
        store_scores(num_q, pitch, scores, sum, pitch);
    else
        store_scores(num_q, num_rows, scores, sum, pitch);
}

/* Adds the products of the last `count` elements, fewer than a vector, which few shapes have. */
RARE void score_tail(int type, int num_q, float *scores, const float *q, int q_stride, const void *const *rows, int n,
                     int d, int count) {
    vec y[QUERIES];
    for (int r = 0; r < num_q; r++) y[r] = load(KVC_F32, q + (ptrdiff_t)r * q_stride, d, count);
    for (int j = 0; j < n; j++) {
        vec x = load(type, rows[j], d, count);
        for (int r = 0; r < num_q; r++) scores[r * KVC_TILE + j] += v_sum_lanes(v_mul(x, y[r]));
    }
}

/* Scores of all rows for num_q <= QUERIES queries.  The last block takes rows of the one before it again, where that
 * fills it; where there are fewer rows than make a block, the last one is taken several times. */
INLINE void score_queries(int type, int dots, int num_q, float *scores, const float *q, int q_stride,
                          const void *const *rows, int n, int dim, kvc_ahead next) {
    if (type >= KVC_FLOAT_TYPES) {
        score_quantised(type, num_q, scores, q, q_stride, rows, n, dim, next);
        return;
    }
    const int num_rows = rows_of(num_q), num_blocks = (n + num_rows - 1) / num_rows;
    ahead after = ahead_of(next, n, num_blocks * (dim / (LANES * (dots ? 2 : stretch_of(type, num_q)))));
    const void *few[MAX_BREADTH];
    if (n < num_rows) {
        for (int j = 0; j < num_rows; j++) few[j] = rows[smaller(j, n - 1)];
        rows = few;
        n = num_rows;
    }
    for (int j = 0; j < n; j += num_rows) {
        const int first = smaller(j, n - num_rows);
        score_block(type, dots, num_q, num_rows, scores + first, KVC_TILE - first, q, q_stride, rows + first, dim,
                    &after);
    }
#if DOT_BF16
    if (dots) scale_scores(num_q, scores, q, q_stride, n, dim);
#endif
    int tail = tail_of(type, dim);
    if (tail && !dots) score_tail(type, num_q, scores, q, q_stride, rows, n, dim - tail, tail);
}

INLINE void score(int type, int dots, float *scores, const float *q, int q_stride, int num_q, const void *const *rows,
                  int n, int dim, kvc_ahead next) {
    const void *pads[KVC_TILE];
    if (type >= KVC_FLOAT_TYPES) rows = pad_rows(rows, n, pads);
    for (int r = 0; r < num_q; r += QUERIES, next.rows = NULL) {
        float *s = scores + r * KVC_TILE;
        const float *qr = q + (ptrdiff_t)r * q_stride;
        switch (smaller(num_q - r, QUERIES)) {
        case 1: score_queries(type, dots, 1, s, qr, q_stride, rows, n, dim, next); break;
        case 2: score_queries(type, dots, 2, s, qr, q_stride, rows, n, dim, next); break;
        case 3: score_queries(type, dots, 3, s, qr, q_stride, rows, n, dim, next); break;
        default: score_queries(type, dots, 4, s, qr, q_stride, rows, n, dim, next);
        }
    }
}

/* ---- accumulate ------------------------------------------------------------------------------------------------- */

/* Adds the products with row j to sums[query][vector]. */
INLINE void accumulate_step(int type, int num_q, int num_vecs, vec *sums, const accumulate_args *a, int j, int d) {
    vec x[MAX_VECS], y[QUERIES];
    if (num_vecs < num_q) {
        UNROLL
        for (int i = 0; i < num_vecs; i++) x[i] = v_keep(load(type, a->rows[j], d + i * LANES, LANES));
        UNROLL
        for (int r = 0; r < num_q; r++) {
            y[0] = v_set(a->weights[r * KVC_TILE + j]);
            UNROLL
            for (int i = 0; i < num_vecs; i++) sums[r * num_vecs + i] = v_fma(x[i], y[0], sums[r * num_vecs + i]);
        }
    } else {
        UNROLL
        for (int r = 0; r < num_q; r++) y[r] = v_set(a->weights[r * KVC_TILE + j]);
        UNROLL
        for (int i = 0; i < num_vecs; i++) {
            x[0] = v_keep(load(type, a->rows[j], d + i * LANES, LANES));
            UNROLL
            for (int r = 0; r < num_q; r++) sums[r * num_vecs + i] = v_fma(x[0], y[r], sums[r * num_vecs + i]);
        }
    }
}

/* num_vecs vectors of columns, from d on. */
INLINE void accumulate_block(int type, int num_q, int num_vecs, accumulate_args *a, int d) {
    ahead next = a->next; /* which is in registers then */
    vec sums[ACCUMULATORS];
    UNROLL
    for (int r = 0; r < num_q; r++) UNROLL
    for (int i = 0; i < num_vecs; i++)
        sums[r * num_vecs + i] =
            v_mul(v_load(a->acc + (ptrdiff_t)r * a->acc_stride + d + i * LANES), v_set(a->factor[r]));
    for (int j = 0; j < a->n; j++) {
        ask(&next);
        accumulate_step(type, num_q, num_vecs, sums, a, j, d);
    }
    UNROLL
    for (int r = 0; r < num_q; r++) UNROLL
    for (int i = 0; i < num_vecs; i++)
        v_store(a->acc + (ptrdiff_t)r * a->acc_stride + d + i * LANES, sums[r * num_vecs + i]);
    a->next = next;
}

/* The last `count` columns, fewer than a vector, which few shapes have. */
RARE void accumulate_tail(int type, int num_q, const accumulate_args *a, int d, int count) {
    for (int r = 0; r < num_q; r++) {
        float *acc = a->acc + (ptrdiff_t)r * a->acc_stride;
        vec sum = v_mul(load(KVC_F32, acc, d, count), v_set(a->factor[r]));
        for (int j = 0; j < a->n; j++)
            sum = v_fma(load(type, a->rows[j], d, count), v_set(a->weights[r * KVC_TILE + j]), sum);
        store(KVC_F32, acc, d, count, sum);
    }
}

/* How many of num_vecs vectors of columns are added up next: MAX_VECS where there are registers for their sums, as rows
 * are then read in the order in which they lie; else so many as make blocks of about the same width. */
INLINE int width_of(int num_q, int num_vecs) {
    const int most = ACCUMULATORS / num_q;
    if (num_vecs >= MAX_VECS && most >= MAX_VECS) return MAX_VECS;
    const int blocks = (num_vecs + smaller(most, FEW_VECS) - 1) / smaller(most, FEW_VECS);
    return (num_vecs + blocks - 1) / blocks;
}

/* All columns for num_q <= QUERIES queries. */
INLINE void accumulate_queries(int type, int num_q, accumulate_args *a, kvc_ahead next) {
    if (type >= KVC_FLOAT_TYPES) {
        accumulate_quantised(type, num_q, a, next);
        return;
    }
    const int most = ACCUMULATORS / num_q, num_vecs = a->dim / LANES, tail = tail_of(type, a->dim);
    int blocks = 0, d = 0;
    for (int i = 0; i < num_vecs; i += width_of(num_q, num_vecs - i)) blocks++;
    a->next = ahead_of(next, a->n, blocks * a->n);
    for (int i = 0, width; i < num_vecs; i += width, d += width * LANES) {
        width = width_of(num_q, num_vecs - i);
        switch (width) {
        case 1: accumulate_block(type, num_q, 1, a, d); break;
        case 2: accumulate_block(type, num_q, smaller(2, most), a, d); break;
        case 3: accumulate_block(type, num_q, smaller(3, most), a, d); break;
        case 4: accumulate_block(type, num_q, smaller(4, most), a, d); break;
        default: accumulate_block(type, num_q, most < MAX_VECS ? 1 : MAX_VECS, a, d);
        }
    }
    if (tail) accumulate_tail(type, num_q, a, d, tail);
}

INLINE void accumulate(int type, float *acc, int acc_stride, const float *factor, const float *weights, int num_q,
                       const void *const *rows, int n, int dim, kvc_ahead next) {
    const void *pads[KVC_TILE];
    if (type >= KVC_FLOAT_TYPES) rows = pad_rows(rows, n, pads);
    for (int r = 0; r < num_q; r += QUERIES, next.rows = NULL) {
        accumulate_args a = {.acc = acc + (ptrdiff_t)r * acc_stride,
                             .factor = factor + r,
                             .weights = weights + r * KVC_TILE,
                             .rows = rows,
                             .acc_stride = acc_stride,
                             .n = n,
                             .dim = dim};
        switch (smaller(num_q - r, QUERIES)) {
        case 1: accumulate_queries(type, 1, &a, next); break;
        case 2: accumulate_queries(type, 2, &a, next); break;
        case 3: accumulate_queries(type, 3, &a, next); break;
        default: accumulate_queries(type, 4, &a, next);
        }
    }
}

/* ---- softmax ---------------------------------------------------------------------------------------------------- */

/* exp(x) for x <= 0; 0 below -125.5 ln 2 = -87.0.  x = n ln 2 + r with n an integer, so that exp(x) = 2^n exp(r), and
 * exp(r) = 1 + r + r^2 p(r), p as in Cephes' expf.  Of some vectors side by side, as each step waits for the one
 * before.
 */
INLINE void exp_negative(int count, vec *x) {
    static const float factors[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                                    5.0000001201e-1f};
    vec n[EXPS], p[EXPS];
    UNROLL
    for (int i = 0; i < count; i++) n[i] = v_round(v_mul(x[i], v_set(1.44269504088896341f)));
    UNROLL
    for (int i = 0; i < count; i++) x[i] = v_fma(n[i], v_set(-0.693359375f), x[i]); /* ln 2 in two parts, ... */
    UNROLL
    for (int i = 0; i < count; i++) x[i] = v_fma(n[i], v_set(2.12194440e-4f), x[i]); /* ... n of the first one exact */
    UNROLL
    for (int i = 0; i < count; i++) p[i] = v_fma(v_set(1.9875691500e-4f), x[i], v_set(factors[0]));
    UNROLL
    for (int f = 1; f < 5; f++) UNROLL
    for (int i = 0; i < count; i++) p[i] = v_fma(p[i], x[i], v_set(factors[f]));
    UNROLL
    for (int i = 0; i < count; i++) p[i] = v_fma(p[i], v_mul(x[i], x[i]), x[i]);
    UNROLL
    for (int i = 0; i < count; i++) x[i] = v_scale(v_add(p[i], v_set(1.0f)), n[i]);
}

/* Rows' largest scores first, then their weights: what one row does waits for what it did before. */
INLINE void softmax_rows(float *scores, int num_q, int n, float *max, float *sum, float *factor) {
    const int step = EXPS * LANES, padded = (n + step - 1) / step * step;
    for (int r = 0; r < num_q; r++) {
        float *row = scores + r * KVC_TILE;
        vec largest = v_set(max[r]);
        int past = n;
        for (; past % LANES; past++) row[past] = -INFINITY;
        for (; past < padded; past += LANES) v_store(row + past, v_set(-INFINITY));
        for (; past < KVC_TILE; past += LANES) v_store(row + past, v_zero());
        for (int j = 0; j < padded; j += LANES) largest = v_max(v_load(row + j), largest);
        const float now = v_max_lane(largest);
        factor[r] = 1;
        if (max[r] != now) {
            vec change = v_set(max[r] - (now == -INFINITY ? 0 : now));
            exp_negative(1, &change);
            factor[r] = v_max_lane(change);
        }
        max[r] = now;
    }
    for (int r = 0; r < num_q; r++) {
        float *row = scores + r * KVC_TILE;
        /* where nothing is visible, weights are 0; or NaN, which is passed on */
        const vec shift = v_set(max[r] == -INFINITY ? 0 : -max[r]);
        vec total = v_zero();
        for (int j = 0; j < padded; j += step) {
            vec x[EXPS];
            UNROLL
            for (int i = 0; i < EXPS; i++) x[i] = v_add(v_load(row + j + i * LANES), shift);
            exp_negative(EXPS, x);
            UNROLL
            for (int i = 0; i < EXPS; i++) {
                v_store(row + j + i * LANES, x[i]);
                total = v_add(total, x[i]);
            }
        }
        sum[r] = sum[r] * factor[r] + v_sum_lanes(total);
    }
}

/* Elements past dim may be multiplied, too. */
INLINE void scale_rows(float *q, int q_stride, int num_q, int dim, float by) {
    for (int r = 0; r < num_q; r++)
        for (int d = 0; d < dim; d += LANES) {
            float *at = q + (ptrdiff_t)r * q_stride + d;
            v_store(at, v_mul(v_load(at), v_set(by)));
        }
}

/* ---- matmul and what packs for it ------------------------------------------------------------------------------- */

INLINE void matmul_block(int num_rows, int num_vectors, float *c, int ldc, const float *a, int lda, const float *b,
                         int ldb, int k, int add) {
    vec sums[MATMUL_ROWS * MATMUL_VECTORS], x[MATMUL_VECTORS];
    UNROLL
    for (int i = 0; i < num_rows; i++) UNROLL
    for (int j = 0; j < num_vectors; j++)
        sums[i * num_vectors + j] = add ? v_load(c + (ptrdiff_t)i * ldc + j * LANES) : v_zero();
    /* Rows of a are found from every fourth.  GCC, where it sees how these lie, counts all from the first: more places
     * than there are registers, and moves them there through the ports that the multiply-adds need. */
    const float *four[(MATMUL_ROWS + 3) / 4];
    UNROLL
    for (int i = 0; i < num_rows; i += 4) {
        four[i / 4] = a + (ptrdiff_t)i * lda;
        __asm__("" : "+r"(four[i / 4]));
    }
    for (int p = 0; p < k; p++) {
        UNROLL
        for (int j = 0; j < num_vectors; j++) x[j] = v_load(b + (ptrdiff_t)p * ldb + j * LANES);
        UNROLL
        for (int i = 0; i < num_rows; i++) {
            vec y = v_set(four[i / 4][(ptrdiff_t)(i % 4) * lda + p]);
            UNROLL
            for (int j = 0; j < num_vectors; j++) sums[i * num_vectors + j] = v_fma(y, x[j], sums[i * num_vectors + j]);
        }
    }
    UNROLL
    for (int i = 0; i < num_rows; i++) UNROLL
    for (int j = 0; j < num_vectors; j++) v_store(c + (ptrdiff_t)i * ldc + j * LANES, sums[i * num_vectors + j]);
}

/* Blocks of so many rows, as far as they go. */
#define MATMUL_ROWS_OF(rows)                                                                                       \
    for (; rows <= MATMUL_ROWS && i + rows <= m; i += rows)                                                        \
    matmul_block(rows <= MATMUL_ROWS ? rows : 1, num_vectors, c + (ptrdiff_t)i * ldc, ldc, a + (ptrdiff_t)i * lda, \
                 lda, b, ldb, k, add)

/* So many vectors of columns of c, while these columns of b stay in the L1 cache. */
INLINE void matmul_columns(int num_vectors, float *c, int ldc, const float *a, int lda, const float *b, int ldb, int m,
                           int k, int add) {
    int i = 0;
    MATMUL_ROWS_OF(12);
    MATMUL_ROWS_OF(8);
    MATMUL_ROWS_OF(6);
    MATMUL_ROWS_OF(4);
    MATMUL_ROWS_OF(2);
    MATMUL_ROWS_OF(1);
}

INLINE void matmul_rows(float *c, int ldc, const float *a, int lda, const float *b, int ldb, int m, int n, int k,
                        int add) {
    const int step = MATMUL_VECTORS * LANES;
    int j = 0;
    for (; n - j > step - KVC_LANES; j += step)
        matmul_columns(MATMUL_VECTORS, c + j, ldc, a, lda, b + j, ldb, m, k, add);
    if (j < n) matmul_columns(KVC_LANES / LANES, c + j, ldc, a, lda, b + j, ldb, m, k, add);
}

/* Transposes elements [d, d + LANES) of rows [j, j + LANES). */
INLINE void pack_keys_block(int type, float *dst, const void *const *rows, int j, int d) {
    vec x[LANES];
    UNROLL
    for (int i = 0; i < LANES; i++) x[i] = load(type, rows[j + i], d, LANES);
    v_transpose(x);
    UNROLL
    for (int i = 0; i < LANES; i++) v_store(dst + (d + i) * KVC_TILE + j, x[i]);
}

/* The same where there are fewer rows or elements. */
RARE void pack_keys_edge(int type, float *dst, const void *const *rows, int n, int j, int d, int count) {
    vec x[LANES];
    for (int i = 0; i < LANES; i++) x[i] = j + i < n ? load(type, rows[j + i], d, count) : v_zero();
    v_transpose(x);
    for (int i = 0; i < count; i++) v_store(dst + (d + i) * KVC_TILE + j, x[i]);
}

INLINE void pack_keys(int type, float *dst, const void *const *rows, int n, int dim) {
    for (int j = 0; j < KVC_TILE; j += LANES)
        for (int d = 0; d < dim; d += LANES)
            if (j + LANES <= n && d + LANES <= dim)
                pack_keys_block(type, dst, rows, j, d);
            else
                pack_keys_edge(type, dst, rows, n, j, d, smaller(LANES, dim - d));
}

INLINE void pack_values(int type, float *dst, int dst_stride, const void *const *rows, int n, int dim) {
    int padded = (dim + KVC_LANES - 1) / KVC_LANES * KVC_LANES;
    for (int j = 0; j < n; j++) {
        float *row = dst + (ptrdiff_t)j * dst_stride;
        int d = 0;
        for (; d + LANES <= dim; d += LANES) v_store(row + d, load(type, rows[j], d, LANES));
        for (; d < padded; d += LANES) v_store(row + d, d < dim ? load(type, rows[j], d, dim - d) : v_zero());
    }
}

#include "kernels/instantiate.h"
