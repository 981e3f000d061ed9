/* kernels.h: the loops over rows, one table of them per instruction set.
 *
 * A kernel knows nothing of sequences, policies or blocks: it gets rows, keys or values of dim elements, at equal
 * distances.  All are serial, allocate nothing and read no byte outside the rows they are given.  They accumulate in
 * f32.  A query row is one head of one token.  A tile is rows that are attended to together.  A panel is a tile's keys,
 * or values, packed for products with many query rows.  Quantised rows have a multiple of KVC_QUANT_ELEMENTS elements.
 *
 *   scalar.c          plain C, no vectors: what the others are tested against.  Keep it.
 *   scalar_select.h   part of scalar.c: which rows are to be read
 *   avx2.c avxvnni.c avx512.c avx512vnni.c avx512bf16.c amx.c neon.c neondotprod.c
 *   neonfhm.c neoni8mm.c neonbf16.c    a set each: its kernels, and its table
 *   matmul_quantised.h scaled_rows.h    parts of avx512vnni.c: products of many query rows with quantised ones; all
 *                                       products of rows with one scale
 *   multiply_bytes.h  part of the sets with products of bytes: prompts in bytes; scalar_bytes.h: part of scalar.c;
 *                     matrix_bytes.h: part of neoni8mm.c
 *   score_bytes.h accumulate_bytes.h    parts of neondotprod.c and neoni8mm.c: quantised rows as bytes
 *   dispatch.c        chooses a table
 *
 * The sets but scalar share their loops:
 *
 *   template.h        the loops, over a small set of vector primitives; its parts are elements.h rounding.h prefetch.h
 *                     score_quantised.h score_codes.h score_16.h score.h accumulate_quantised.h accumulate_codes.h
 *                     accumulate.h softmax.h matmul.h hadamard.h rank.h sketch.h
 *   vector_avx2.h vector_avx512.h vector_neon.h                the primitives; x86.h: what two of them share
 *   instantiate.h     macros that define a kernel of the template, or of scalar.c, under its name
 *   avx2.h avx512.h neon.h             the kernels that several sets have in their tables
 *   target.h          attributes of the functions of a set
 */
#ifndef KVC_KERNELS_H
#define KVC_KERNELS_H

#include <math.h>
#include <stdint.h>

#include "base/dtype.h"

enum {
    KVC_ROW_GROUP = 32,  /* most quantised rows that are scored side by side */
    KVC_TILE = 256,      /* most rows in a tile that is read for few query rows, which begin ... */
    KVC_PANEL = 64,      /* ... a multiple of this apart; rows in a tile for many query rows, unless ... */
    KVC_WIDE_TILE = 256, /* ... a kvc_tiler takes more of them */
    KVC_LANES = 16,      /* query rows, scores and panels are padded to a multiple of this many floats */
    KVC_CHUNK = 32,      /* what a kvc_tiler multiplies is padded to a multiple of this many elements along the sum, */
    KVC_PACKED = 48,     /* each of which takes up to this many floats, packed */
    KVC_BLOCK_QUERIES = 32, /* query rows that a kvc_weigh_fn takes, whose weights stay in the L1 cache */
    KVC_SKETCH_STEP = 16,   /* bytes of a sketch that a kvc_sketch_fn loads at once */
    KVC_SLACK = 24,         /* binary orders by which a score may exceed the exponent of a kvc_weigh_pieces_fn */
    KVC_STEP_BYTES = 4,     /* of a row, which a kvc_rank_fn multiplies at once: four int8, two bf16 or one f32 */
    KVC_BYTE_TILE = 128,    /* most rows in a tile that is multiplied in bytes */
    KVC_BYTE_CODES = 64, /* bytes from the beginning of a query row in bytes to its codes, and what these fill up to */
    KVC_BYTE_SCORES = KVC_BYTE_TILE + KVC_LANES, /* floats from one row of their scores to the next */
    /* Floats from one row of scores or weights to the next; KVC_WEIGHTS_STRIDE is for a kvc_weigh_fn.  Neither is a
     * power of two, so that rows use all of L1. */
    KVC_SCORES = KVC_TILE + KVC_LANES,
    KVC_WEIGHTS_STRIDE = KVC_WIDE_TILE / KVC_CHUNK * KVC_PACKED + KVC_LANES
};

/* Returns n, or the next multiple of KVC_PANEL. */
static inline int kvc_padded_rows(int n) { return (n + KVC_PANEL - 1) / KVC_PANEL * KVC_PANEL; }

/* Converts num_rows rows of dim elements of one type to another, of which at most one is quantised unless they are the
 * same; rows are src_stride and dst_stride bytes apart.  Round to nearest even;
 * infinities and denormals survive, and NaN with its sign and leading payload bits: as it is where the type stays or
 * bf16 becomes f32, else made quiet.  src and dst need no alignment; they do not overlap.
 *
 * Rows of a type with row scales are only copied; kvc_copy_rows goes by way of what follows.
 *
 * Quantising: finite elements become what kvc_type says, which is what ggml's reference does, bit for bit.  It does not
 * say what becomes of others, and of elements so small that 1 / d is infinite (d is 0 as an f16 then).  Here these are
 * stored as bits of 0; NaN is stored as 0 and does not count for d; with an infinity d is infinite and all elements are
 * stored as 0, which decodes to NaN. */
typedef void kvc_convert_fn(int from, int to, void *dst, int64_t dst_stride, const void *src, int64_t src_stride,
                            int64_t num_rows, int dim);

/* Unpacks n rows of codes for kernels of q8_0: to rows that lie one after the other, with the same scales, and as
 * elements what is multiplied by them: codes less half of their range, or levels.  minima[b * KVC_TILE + j] becomes
 * what block b of row j lacks then, where its type has minima.  The scales of a type with row scales stand at `scales`,
 * scale_stride bytes apart; NULL: rows are unpacked for kernels of int8, without. */
typedef void kvc_unpack_fn(int type, void *dst, const void *rows, int64_t row_stride, const void *scales,
                           int64_t scale_stride, int64_t n, int dim, float *minima);

/* Returns the largest magnitude of n floats, a multiple of KVC_QUANT_ELEMENTS; NaN does not count. */
typedef float kvc_largest_fn(const void *x, int n);

/* What the scale of a row of levels is a quotient of: sums of x * level and of level * level, each of every
 * KVC_LANES-th element, so that all sets round alike. */
typedef struct kvc_level_sums {
    float products[KVC_LANES], squares[KVC_LANES];
} kvc_level_sums;

/* Encodes n floats of a row of a type with row scales, `unit` of which is what a code or level of 1 stands for.  Adds
 * them to the sums where the type has levels. */
typedef void kvc_encode_fn(int type, void *dst, const void *x, int n, float unit, kvc_level_sums *sums);

/* Rounds n rows of f32, row_stride bytes apart, to int8 side by side.  units[j] becomes what a code of 1 of row j
 * stands for: the largest magnitude over 127; NaN if the row has one.  All sets give the codes of a kvc_encode_fn. */
typedef void kvc_round_fn(int8_t *codes, float *units, const float *rows, int64_t row_stride, int n, int dim);

/* Converts num_q query rows of f32, in place, to the form that score takes, so that scores are multiplied by scale.
 * Rows are padded to a multiple of KVC_LANES. */
typedef void kvc_prepare_fn(float *q, int q_stride, int num_q, int dim, float scale);

/* The rows of a tile lie one after the other: rows[j] is the row at rows + j * row_stride, a number of bytes. */

/* Memory that will be read next, which a kernel prefetches while it works.  It is passed in two registers. */
typedef struct kvc_ahead {
    const void *begin;
    int32_t bytes; /* 0: prefetch nothing */
    int32_t level; /* level of the cache to bring it into: 1 or 2 */
} kvc_ahead;

/* scores[r * KVC_SCORES + j] = q[r] . rows[j] for r < num_q, j < n <= KVC_TILE.  q: prepared, rows q_stride floats
 * apart.  If rows are quantised, scores past n, up to a multiple of KVC_ROW_GROUP, may change.  Reads each row once. */
typedef void kvc_score_fn(float *scores, const float *q, int q_stride, int num_q, const void *rows, int64_t row_stride,
                          int n, int dim, kvc_ahead next);

typedef struct kvc_scorer {
    kvc_prepare_fn *prepare;
    kvc_score_fn *score;
} kvc_scorer;

/* A piece of the rows that are summed at once, and what is prefetched while this piece is read.  If the second piece
 * has no `next`, the first one's is prefetched while all are read. */
typedef struct kvc_value_piece {
    const void *rows;
    kvc_ahead next;
} kvc_value_piece;

/* acc[r * acc_stride + d] = acc[...] * factor[r] + sum over j < n of weights[r * KVC_SCORES + j] * row[j][d]
 * for r < num_q, d < dim.  Rows lie in pieces of KVC_PANEL, of which the last may be shorter; rows of a piece are
 * row_stride bytes apart.  Rows of floats are one piece, of any length.  Uses up `next` of each piece.  For
 * quantised rows, weights[r * KVC_SCORES + j] are 0 for j past n, up to a multiple of KVC_PANEL. */
typedef void kvc_accumulate_fn(float *acc, int acc_stride, const float *factor, const float *weights, int num_q,
                               kvc_value_piece *pieces, int64_t row_stride, int n, int dim);

/* rows[r * KVC_SCORES + j] *= by[j] for r < num_q, j < n, up to a multiple of KVC_PANEL; by: f16, 0 from n on.
 * For types with row scales: scores take the keys' scales before the softmax, weights the values' scales after it. */
typedef void kvc_times_fn(float *rows, int num_q, int n, const void *by);

/* Takes a step of the online softmax of num_q query rows, over scores[r * KVC_SCORES + j], j < n <= KVC_TILE.  m is the
 * larger of max[r] and the row's largest score.  factor[r] becomes exp(max[r] - m): accumulated values are to be
 * multiplied by it.  Scores become exp(score - m).  sum[r] becomes sum[r] * factor[r] plus the sum of these, and max[r]
 * becomes m.  If m is -inf (nothing visible so far), scores become 0, sum[r] stays and factor[r] is 1.  Scores past n,
 * up to a multiple of KVC_PANEL, become 0.  exp is right to 2 ulp, and 0 below about -87.  A NaN score makes
 * sum[r] NaN.  Prefetches `next` on the way: num_q * n / KVC_LANES lines evenly, and what is left at once. */
typedef void kvc_softmax_fn(float *scores, int num_q, int n, float *max, float *sum, float *factor, kvc_ahead next);

/* c[i * ldc + j] = (add ? c[...] : 0) + sum over p < k of a[i * lda + p] * b[p * ldb + j], i < m, j < n.
 * ldb and ldc are multiples of KVC_LANES, b and c aligned to 64 bytes, and up to the next multiple of KVC_LANES past n,
 * columns of b may be read and columns of c written; where c are scores, up to ldc.  Prefetches `next` into L2. */
typedef void kvc_matmul_fn(float *c, int ldc, const float *a, int lda, const float *b, int ldb, int m, int n, int k,
                           int add, kvc_ahead next);

/* Packs n <= KVC_PANEL rows into the panel of k = dim that query rows are multiplied by, as columns from `first` on:
 * dst[d * KVC_PANEL + j] = rows[j][d] as f32; columns n .. KVC_PANEL become 0.  first: a multiple of KVC_PANEL. */
typedef void kvc_pack_keys_fn(float *dst, const void *rows, int64_t row_stride, int first, int n, int dim);

/* Packs n <= KVC_PANEL rows into the panel of k = n that weights are multiplied by, as rows from `first` on, of f32:
 * dst[j * dst_stride + d] = rows[j][d]; what lies between dim and the next multiple of KVC_LANES becomes 0. */
typedef void kvc_pack_values_fn(float *dst, int dst_stride, const void *rows, int64_t row_stride, int first, int n,
                                int dim);

/* One step of the online softmax, as a kvc_softmax_fn, of scores times scale, of num_q <= KVC_BLOCK_QUERIES query rows
 * and n <= KVC_WIDE_TILE rows: scores[r * KVC_WEIGHTS_STRIDE + j] become packed weights.  Maxima are times log2(e). */
typedef void kvc_weigh_fn(float *scores, int num_q, int n, float scale, float *max, float *sum, float *factor);

/* What `begin` of a kvc_kernels leaves for `end`: the shapes that the thread's tile registers had. */
typedef struct kvc_former {
    uint8_t bytes[64];
} kvc_former;

/* How a tile of rows is multiplied by many query rows.  These functions may give prepared rows and panels a form of
 * their own in the same place, with k rounded up to a multiple of KVC_CHUNK: panels and query rows have space for
 * KVC_PACKED floats for each chunk, and weights past n are 0.  Where there is `weigh`, ldb is the largest k that a
 * panel has space for.  Scores are never added to others, sums always are. */
typedef struct kvc_tiler {
    kvc_prepare_fn *prepare;
    kvc_pack_keys_fn *pack_keys;
    kvc_pack_values_fn *pack_values;
    kvc_matmul_fn *score, *accumulate; /* a: prepared query rows; packed weights */
    kvc_weigh_fn *weigh; /* NULL: tiles have KVC_PANEL rows, and weights are those of `softmax`, as they are */
    /* For query rows of bf16, neither scaled nor prepared, with zeros up to the end of a chunk; NULL: such are taken as
     * others. */
    kvc_matmul_fn *score_bf16;
    int sum_shift; /* accumulate adds up 2^sum_shift times what it should */
} kvc_tiler;

/* A kvc_tiler of panels of floats. */
#define KVC_FLOAT_TILER(scale, pack_keys_fn, pack_values_fn, matmul_fn) \
    {.prepare = scale,                                                  \
     .pack_keys = pack_keys_fn,                                         \
     .pack_values = pack_values_fn,                                     \
     .score = matmul_fn,                                                \
     .accumulate = matmul_fn}

/* A query row in bytes begins with this.  Its int8 codes stand KVC_BYTE_CODES bytes behind its beginning, with zeros up
 * to a multiple of KVC_BYTE_CODES. */
typedef struct kvc_byte_query {
    float unit;  /* what a code of 1 stands for, times the scale of scores */
    int32_t sum; /* of the codes */
} kvc_byte_query;

/* Moves n rows of dim int8 into a panel of a tile's keys, or values, from row `first` on, which is a multiple of
 * KVC_PANEL.  n is a multiple of KVC_LANES, dim of KVC_QUANT_ELEMENTS.  A panel takes KVC_BYTE_TILE rows. */
typedef void kvc_pack_bytes_fn(void *panel, const void *rows, int64_t row_stride, int first, int n, int dim);

/* scores[r * KVC_BYTE_SCORES + j] = (the product of codes of q[r] and key j, which is exact) * units[j] * the row's
 * unit, each product rounded, for r < num_q, j < n, up to a multiple of KVC_PANEL. */
typedef void kvc_score_bytes_fn(float *scores, const float *q, int q_stride, int num_q, const void *panel,
                                const float *units, int n, int dim);

/* The units of a tile's values, what their codes of 1 stand for, as weights take them: logarithms, and 1 over them. */
typedef struct kvc_byte_units {
    float logs[KVC_BYTE_TILE], inverses[KVC_BYTE_TILE];
} kvc_byte_units;

/* Takes a step of the online softmax of num_q query rows, over x = score + log of the value's unit.  m is the row's
 * largest x.  Its weights become exp(x - m) * 255, rounded.  They are bytes in the place of the scores, and 0 for j
 * past n, up to a multiple of KVC_PANEL.
 *
 * max[r] becomes the larger of max[r] and m.  factor[r] becomes exp(the old max[r] - the new one).  unit[r] becomes
 * exp(m - max[r]) / 255: products of weights are to be multiplied by it.  sum[r] becomes sum[r] * factor[r] plus the
 * sum of exp(x - max[r]) times 1 over the value's unit.  Scores of -inf have weight 0.  A NaN makes sum[r] NaN.
 *
 * exp is the polynomial of softmax.h.  Of a sum, the terms j, j + KVC_LANES, j + 2 KVC_LANES ... are added up first,
 * then these sums as kvc_add_up does.  So all sets give the same bits. */
typedef void kvc_weigh_bytes_fn(float *scores, int num_q, int n, const kvc_byte_units *units, float *max, float *sum,
                                float *factor, float *unit);

/* acc[r * acc_stride + d] = acc[...] * factor[r] + product * unit[r], for r < num_q, d < dim.  The product is that of
 * the row's weights and column d of the values, over n rows, up to a multiple of KVC_PANEL.  It is exact; its own
 * product with unit[r] is rounded once with the sum.  weights: as a kvc_weigh_bytes_fn leaves them. */
typedef void kvc_sum_bytes_fn(float *acc, int acc_stride, const float *factor, const float *unit, const float *weights,
                              int num_q, const void *panel, int n, int dim);

/* How a tile is multiplied by many query rows in bytes. */
typedef struct kvc_byte_kernels {
    kvc_pack_bytes_fn *pack_keys, *pack_values; /* into a form of the set's own */
    kvc_score_bytes_fn *score;                  /* NULL: the set has none of these */
    kvc_weigh_bytes_fn *weigh;
    kvc_sum_bytes_fn *sum;
    int queries; /* query rows that are best multiplied at once, at most KVC_BLOCK_QUERIES */
} kvc_byte_kernels;

/* The matrix by which rows are multiplied before they are stored: Sylvester's Hadamard matrix of this order (a power
 * of two, at least KVC_QUANT_ELEMENTS; 0: none) over sqrt(order), perhaps with the signs of KVC_INT6 in kvcache.h. */
typedef struct kvc_mixing {
    int32_t order, has_signs;
} kvc_mixing;

/* Multiplies every `order` of the n floats at src by a matrix, which is its own inverse; the order divides n.  src is
 * dst, or needs no alignment.  All sets, and ggml, give the same bits. */
typedef void kvc_hadamard_fn(float *dst, const void *src, int n, kvc_mixing mixing);

/* The queries of one token for a kvc_rank_fn.  Each head has a lane.  The heads of a choice have lanes side by
 * side, perhaps with empty lanes behind them. */
typedef struct kvc_rank_query {
    const void *packed;    /* [num_steps][num_lanes], each KVC_STEP_BYTES of a query; 0 in empty lanes */
    const float *weights;  /* [num_lanes] */
    const uint32_t *masks; /* [num_lanes]: all bits set, or 0 in empty lanes, which count 0 whatever rows hold */
    const int32_t *starts; /* of int8, [num_lanes]: -128 times the sum of a query's elements */
    int32_t num_steps;
    int32_t num_lanes;    /* a multiple of KVC_LANES */
    int32_t choice_lanes; /* lanes of a choice: a multiple of KVC_LANES, or a power of two below */
    int32_t relu;
} kvc_rank_query;

/* scores[c * KVC_SCORES + j] = sum over the lanes h of choice c of weights[h] * f(by[j] * (query h . rows[j])),
 * for j < n <= KVC_TILE.  f is the identity or, with relu, max(0, .), which keeps NaN.  Scores for j past n, up to a
 * multiple of KVC_LANES, may be overwritten.
 *
 * Products of int8 are exact, and all sets add heads up in the same order, each product and each sum rounded: lanes h,
 * h + KVC_LANES, h + 2 KVC_LANES ... one after the other; of these sums the second half to the first, of what results
 * again, until one is left.  So all sets give the same bits for int8. */
typedef void kvc_rank_fn(float *scores, const kvc_rank_query *q, const void *rows, int64_t row_stride, const float *by,
                         int n);

/* Adds halves, then halves of these, and so on, so that all sets round alike. */
static inline float kvc_add_up(const float x[KVC_LANES]) {
    float sums[KVC_LANES / 4];
    for (int i = 0; i < KVC_LANES / 4; i++)
        sums[i] = (x[i] + x[i + KVC_LANES / 2]) + (x[i + KVC_LANES / 4] + x[i + 3 * KVC_LANES / 4]);
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

/* Return the threshold and the scale of a key's sketch, by sums of squares and of products with levels. */
static inline float kvc_sketch_threshold(float squares, int dim) { return 0.98f * sqrtf(squares / (float)dim); }
static inline float kvc_sketch_scale(float squares, float products) {
    const float scale = products == 0 ? 0 : squares / products;
    return isnan(scale) ? NAN : scale > KVC_LARGEST_F16 ? KVC_LARGEST_F16 : scale;
}

/* Makes the sketches (rows/sketch.h) of n keys of dim floats, which are mixed, at `to` and each `stride` bytes behind.
 * Sums are of every KVC_LANES-th element, each product and each sum rounded.  So all sets give the same bits. */
typedef void kvc_make_sketches_fn(void *to, int64_t stride, const float *keys, int n, int dim);

/* Queries that are compared with sketches (rows/sketch.h): mixed as these are, and rounded to int8. */
typedef struct kvc_sketch_query {
    const int8_t *codes;  /* [num_q][stride] queries; zeros behind k_dim elements.  num_q is rounded up to a multiple of
                           * KVC_LANES: kernels may read what else is there. */
    const float *scales;  /* [num_q] what a code of 1 stands for, times the scale of scores */
    const float *offsets; /* [num_q] -1.5 times the sum of the codes */
    int32_t stride;       /* k_dim, or the next multiple of 4 * KVC_SKETCH_STEP */
} kvc_sketch_query;

/* scores[r * KVC_SCORES + k * KVC_LANES + i] = the score that query r gives row 4 i + k, for KVC_PANEL rows and r <
 * num_q.  With t = (sum of code times query code) + offsets[r], which is exact: t * (the row's scale) * scales[r], each
 * product rounded.  So all sets give the same bits, for any num_q.  Reads up to a cache line past the last row. */
typedef void kvc_sketch_fn(float *scores, const kvc_sketch_query *q, int num_q, const void *rows, int64_t row_stride,
                           int dim);

/* Turns the scores of a tile, as a kvc_sketch_fn gives them, into weights of KVC_LANES pieces of 4 rows.  pieces[r *
 * stride + first + i] becomes the sum of exp(score) / 2^exponents[r] over the rows of piece i, to 1.1e-4 of it. Weights
 * below 2^-126 may become 0.  A NaN score makes its piece NaN.  sums[r * KVC_LANES + i] grows by the weight.
 *
 * exponents[r] is a whole number, or -inf before there are scores.  If a score exceeds it by KVC_SLACK and more, in
 * powers of two, it is raised to that score, and the query's sums and earlier pieces become relative to it. */
typedef void kvc_weigh_pieces_fn(float *pieces, int64_t stride, int first, const float *scores, int num_q,
                                 float *exponents, float *sums);

typedef struct kvc_kernels {
    const char *name;
    kvc_convert_fn *convert;
    kvc_unpack_fn *unpack;
    kvc_largest_fn *largest;
    kvc_encode_fn *encode;
    kvc_round_fn *round;
    /* Of a type with row scales, for its elements as they are, times which come scores or weights: `times`.
     * NULL, here and in `accumulate`, of types that are unpacked first; in `tiler`, of those that are unpacked to q8_0
     * or decoded first.  What is unpacked becomes q8_0, or, with row scales, int8. */
    kvc_scorer score[KVC_STORED_TYPES];
    /* For rows and queries of this type, f16 or bf16; prepare takes queries that are of it already.  NULL: they are
     * scored as others. */
    kvc_scorer score_16[KVC_FLOAT_TYPES];
    kvc_accumulate_fn *accumulate[KVC_STORED_TYPES];
    kvc_tiler tiler[KVC_STORED_TYPES];
    /* For keys and query rows that are f16, as those of score_16; score NULL: they are taken as others. */
    kvc_tiler tiler_f16;
    kvc_tiler decoded; /* for rows of f32 that were decoded from other types; NULL: tiler[KVC_F32] */
    /* Unless NULL: to be called before and behind products of tilers, of bytes or of sketches, on the same thread. */
    void (*begin)(kvc_former *former);
    void (*end)(const kvc_former *former);
    kvc_byte_kernels bytes; /* for prompts in bytes */
    kvc_matmul_fn *matmul;  /* of panels of floats */
    kvc_softmax_fn *softmax;
    kvc_times_fn *times;
    kvc_prepare_fn *scale; /* multiplies rows of f32 by a number */
    kvc_hadamard_fn *hadamard;
    /* Each set has one for f32 and one for int8.  NULL: rows of the type are decoded to f32 first.  The one for bf16
     * takes queries of bf16, and rows of whole steps. */
    kvc_rank_fn *rank[KVC_STORED_TYPES];
    kvc_make_sketches_fn *make_sketches;
    kvc_sketch_fn *sketch;
    int tiled_sketches; /* the fewest query rows for which `sketch` is called between `begin` and `end`; 0: none is */
    kvc_weigh_pieces_fn *weigh_pieces;
} kvc_kernels;

/* Declares the kernels of DEFINE_FLOATS, and of DEFINE_ROWS for floats (instantiate.h). */
#define KVC_DECLARE_FLOATS(set)                                                                                 \
    extern kvc_convert_fn kvc_convert_##set;                                                                    \
    extern kvc_unpack_fn kvc_unpack_##set;                                                                      \
    extern kvc_largest_fn kvc_largest_##set;                                                                    \
    extern kvc_times_fn kvc_times_##set;                                                                        \
    extern kvc_encode_fn kvc_encode_##set;                                                                      \
    extern kvc_round_fn kvc_round_##set;                                                                        \
    extern kvc_score_fn kvc_score_f32_##set, kvc_score_f16_##set, kvc_score_bf16_##set;                         \
    extern kvc_accumulate_fn kvc_accumulate_f32_##set, kvc_accumulate_f16_##set, kvc_accumulate_bf16_##set;     \
    extern kvc_pack_keys_fn kvc_pack_keys_f32_##set, kvc_pack_keys_f16_##set, kvc_pack_keys_bf16_##set;         \
    extern kvc_pack_values_fn kvc_pack_values_f32_##set, kvc_pack_values_f16_##set, kvc_pack_values_bf16_##set; \
    extern kvc_prepare_fn kvc_scale_##set;                                                                      \
    extern kvc_softmax_fn kvc_softmax_##set;                                                                    \
    extern kvc_matmul_fn kvc_matmul_##set;                                                                      \
    extern kvc_hadamard_fn kvc_hadamard_##set;                                                                  \
    extern kvc_make_sketches_fn kvc_make_sketches_##set;                                                        \
    extern kvc_weigh_pieces_fn kvc_weigh_pieces_##set;                                                          \
    extern kvc_rank_fn kvc_rank_f32_##set

/* These kernels in a table, by the types of rows that they are for. */
#define KVC_FLOATS(set)                                                                                               \
    .unpack = kvc_unpack_##set, .largest = kvc_largest_##set, .encode = kvc_encode_##set, .round = kvc_round_##set,   \
    .matmul = kvc_matmul_##set, .softmax = kvc_softmax_##set, .times = kvc_times_##set, .scale = kvc_scale_##set,     \
    .hadamard = kvc_hadamard_##set, .make_sketches = kvc_make_sketches_##set, .weigh_pieces = kvc_weigh_pieces_##set, \
    .rank[KVC_F32] = kvc_rank_f32_##set, KVC_ROWS(set, f32, KVC_F32, kvc_scale_##set),                                \
    KVC_ROWS(set, f16, KVC_F16, kvc_scale_##set)
#define KVC_ROWS(set, name, type, prepare) \
    .score[type] = {prepare, kvc_score_##name##_##set}, .accumulate[type] = kvc_accumulate_##name##_##set
#define KVC_PANELS(set, name, type)                                                                               \
    .tiler[type] = KVC_FLOAT_TILER(kvc_scale_##set, kvc_pack_keys_##name##_##set, kvc_pack_values_##name##_##set, \
                                   kvc_matmul_##set)

extern const kvc_kernels kvc_kernels_scalar;
#if defined(__x86_64__) && defined(__GNUC__)
#define KVC_HAVE_AVX2 1
#define KVC_HAVE_AVX512 1
extern const kvc_kernels kvc_kernels_avx2; /* for dispatch.c, as what follows */
extern const kvc_kernels kvc_kernels_avx512;
extern const kvc_kernels kvc_kernels_avx512vnni;
int kvc_cpu_has_avx512vbmi(void); /* beside these: an instruction that looks bytes up in a table of 64 */
#if __clang_major__ >= 13 || (!defined(__clang__) && __GNUC__ >= 11) /* older ones lack the instructions */
#define KVC_HAVE_AVX_VNNI 1
#define KVC_HAVE_AVX512_BF16 1
extern const kvc_kernels kvc_kernels_avxvnni, kvc_kernels_avx512bf16;
#if defined(__linux__) /* dispatch.c asks it for the registers */
#define KVC_HAVE_AMX 1
#define KVC_KERNEL_NAMES "scalar avx2 avxvnni avx512 avx512vnni avx512bf16 amx amxfp16" /* in this build */
extern const kvc_kernels kvc_kernels_amx, kvc_kernels_amxfp16;
#else
#define KVC_KERNEL_NAMES "scalar avx2 avxvnni avx512 avx512vnni avx512bf16"
#endif
#else
#define KVC_KERNEL_NAMES "scalar avx2 avx512 avx512vnni"
#endif
#elif defined(__aarch64__) && defined(__GNUC__) && defined(__ARM_NEON) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define KVC_HAVE_NEON 1
extern const kvc_kernels kvc_kernels_neon, kvc_kernels_neondotprod;
#if defined(__clang__) || __GNUC__ >= 10 /* older ones lack the instructions */
#define KVC_HAVE_ARMV8_6 1
#define KVC_KERNEL_NAMES "scalar neon neondotprod neonfhm neoni8mm neonbf16"
extern const kvc_kernels kvc_kernels_neonfhm, kvc_kernels_neoni8mm, kvc_kernels_neonbf16;
#else
#define KVC_KERNEL_NAMES "scalar neon neondotprod"
#endif
#else
#define KVC_KERNEL_NAMES "scalar"
#endif

#endif
