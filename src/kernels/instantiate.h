/* instantiate.h: macros that define kernels; part of template.h and of scalar.c, whose functions (convert, score, ...)
 * they instantiate for an element type.
 *
 * A set's file lists each of its kernels once with its name in full, kvc_<operation>_<type>_<set>, and again in the
 * table.  The macros declare a kernel by its type in kernels.h, so that the compiler compares the two.
 */

#define DEFINE_CONVERT(name)                                                                               \
    extern kvc_convert_fn name;                                                                            \
    TARGET void name(int from, int to, void *dst, int64_t dst_stride, const void *src, int64_t src_stride, \
                     int64_t num_rows, int dim) {                                                          \
        convert(from, to, dst, dst_stride, src, src_stride, num_rows, dim);                                \
    }

#define DEFINE_UNPACK(name)                                                                         \
    extern kvc_unpack_fn name;                                                                      \
    TARGET void name(int type, void *dst, const void *rows, int64_t row_stride, const void *scales, \
                     int64_t scale_stride, int64_t n, int dim, float *minima) {                     \
        unpack(type, dst, rows, row_stride, scales, scale_stride, n, dim, minima);                  \
    }

#define DEFINE_TIMES(name)    \
    extern kvc_times_fn name; \
    TARGET void name(float *rows, int num_q, int n, const void *by) { times(rows, num_q, n, by); }

#define DEFINE_LARGEST(name)    \
    extern kvc_largest_fn name; \
    TARGET float name(const void *x, int n) { return largest(x, n); }

#define DEFINE_ROUND(name)                                                                                 \
    extern kvc_round_fn name;                                                                              \
    TARGET void name(int8_t *codes, float *units, const float *rows, int64_t row_stride, int n, int dim) { \
        round_rows(codes, units, rows, row_stride, n, dim);                                                \
    }

#define DEFINE_ENCODE(name)                                                                         \
    extern kvc_encode_fn name;                                                                      \
    TARGET void name(int type, void *dst, const void *x, int n, float unit, kvc_level_sums *sums) { \
        encode(type, dst, x, n, unit, sums);                                                        \
    }

#define DEFINE_SCORE(name, type)                                                                                   \
    extern kvc_score_fn name;                                                                                      \
    TARGET void name(float *scores, const float *q, int q_stride, int num_q, const void *rows, int64_t row_stride, \
                     int n, int dim, kvc_ahead next) {                                                             \
        score(type, KVC_F32, scores, q, q_stride, num_q, rows, row_stride, n, dim, next);                          \
    }

/* For rows of whole vectors; `others`: another set's kernel for all other rows. */
#define DEFINE_WHOLE_SCORE(name, type, others)                                                                     \
    extern kvc_score_fn name;                                                                                      \
    TARGET void name(float *scores, const float *q, int q_stride, int num_q, const void *rows, int64_t row_stride, \
                     int n, int dim, kvc_ahead next) {                                                             \
        if (dim % LANES)                                                                                           \
            others(scores, q, q_stride, num_q, rows, row_stride, n, dim, next);                                    \
        else                                                                                                       \
            score(type, KVC_F32, scores, q, q_stride, num_q, rows, row_stride, n, dim, next);                      \
    }

/* For queries of the same type of 16 bits (score_16.h). */
#define DEFINE_PREPARE_16(name)                                                 \
    extern kvc_prepare_fn name;                                                 \
    TARGET void name(float *q, int q_stride, int num_q, int dim, float scale) { \
        prepare_16(q, q_stride, num_q, dim, scale);                             \
    }

#define DEFINE_SCORE_16(name, type)                                                                                \
    extern kvc_score_fn name;                                                                                      \
    TARGET void name(float *scores, const float *q, int q_stride, int num_q, const void *rows, int64_t row_stride, \
                     int n, int dim, kvc_ahead next) {                                                             \
        score(type, type, scores, q, q_stride, num_q, rows, row_stride, n, dim, next);                             \
    }

#define DEFINE_ACCUMULATE(name, type)                                                                  \
    extern kvc_accumulate_fn name;                                                                     \
    TARGET void name(float *acc, int acc_stride, const float *factor, const float *weights, int num_q, \
                     kvc_value_piece *pieces, int64_t row_stride, int n, int dim) {                    \
        accumulate(type, acc, acc_stride, factor, weights, num_q, pieces, row_stride, n, dim);         \
    }

/* As DEFINE_WHOLE_SCORE. */
#define DEFINE_WHOLE_ACCUMULATE(name, type, others)                                                    \
    extern kvc_accumulate_fn name;                                                                     \
    TARGET void name(float *acc, int acc_stride, const float *factor, const float *weights, int num_q, \
                     kvc_value_piece *pieces, int64_t row_stride, int n, int dim) {                    \
        if (dim % LANES)                                                                               \
            others(acc, acc_stride, factor, weights, num_q, pieces, row_stride, n, dim);               \
        else                                                                                           \
            accumulate(type, acc, acc_stride, factor, weights, num_q, pieces, row_stride, n, dim);     \
    }

#define DEFINE_PREPARE(name, type)                                              \
    extern kvc_prepare_fn name;                                                 \
    TARGET void name(float *q, int q_stride, int num_q, int dim, float scale) { \
        prepare(type, q, q_stride, num_q, dim, scale);                          \
    }

/* Tiles of these sets have KVC_PANEL rows, so that `first` is 0. */
#define DEFINE_PACK_KEYS(name, type)                                                                \
    extern kvc_pack_keys_fn name;                                                                   \
    TARGET void name(float *dst, const void *rows, int64_t row_stride, int first, int n, int dim) { \
        (void)first;                                                                                \
        pack_keys(type, dst, rows, row_stride, n, dim);                                             \
    }

#define DEFINE_PACK_VALUES(name, type)                                                                              \
    extern kvc_pack_values_fn name;                                                                                 \
    TARGET void name(float *dst, int dst_stride, const void *rows, int64_t row_stride, int first, int n, int dim) { \
        (void)first;                                                                                                \
        pack_values(type, dst, dst_stride, rows, row_stride, n, dim);                                               \
    }

#define DEFINE_SCALE(name)                                                      \
    extern kvc_prepare_fn name;                                                 \
    TARGET void name(float *q, int q_stride, int num_q, int dim, float scale) { \
        scale_rows(q, q_stride, num_q, dim, scale);                             \
    }

#define DEFINE_SOFTMAX(name)                                                                                   \
    extern kvc_softmax_fn name;                                                                                \
    TARGET void name(float *scores, int num_q, int n, float *max, float *sum, float *factor, kvc_ahead next) { \
        softmax_rows(scores, num_q, n, max, sum, factor, next);                                                \
    }

#define DEFINE_MATMUL(name)                                                                                    \
    extern kvc_matmul_fn name;                                                                                 \
    TARGET void name(float *c, int ldc, const float *a, int lda, const float *b, int ldb, int m, int n, int k, \
                     int add, kvc_ahead next) {                                                                \
        matmul_rows(c, ldc, a, lda, b, ldb, m, n, k, add, next);                                               \
    }

#define DEFINE_HADAMARD(name)    \
    extern kvc_hadamard_fn name; \
    TARGET void name(float *dst, const void *src, int n, kvc_mixing mixing) { hadamard(dst, src, n, mixing); }

#define DEFINE_RANK(name, type)                                                                                     \
    extern kvc_rank_fn name;                                                                                        \
    TARGET void name(float *scores, const kvc_rank_query *q, const void *rows, int64_t row_stride, const float *by, \
                     int n) {                                                                                       \
        rank(type, scores, q, rows, row_stride, by, n);                                                             \
    }

#define DEFINE_MAKE_SKETCHES(name)                                                  \
    extern kvc_make_sketches_fn name;                                               \
    TARGET void name(void *to, int64_t stride, const float *keys, int n, int dim) { \
        make_sketches(to, stride, keys, n, dim);                                    \
    }

#define DEFINE_WEIGH_PIECES(name)                                                                                \
    extern kvc_weigh_pieces_fn name;                                                                             \
    TARGET void name(float *pieces, int64_t stride, int first, const float *scores, int num_q, float *exponents, \
                     float *sums) {                                                                              \
        weigh_pieces(pieces, stride, first, scores, num_q, exponents, sums);                                     \
    }

#define DEFINE_SKETCH(name)                                                                                     \
    extern kvc_sketch_fn name;                                                                                  \
    TARGET void name(float *scores, const kvc_sketch_query *q, int num_q, const void *rows, int64_t row_stride, \
                     int dim) {                                                                                 \
        score_sketches(scores, q, num_q, rows, row_stride, dim);                                                \
    }

/* Kernels of score_codes.h and accumulate_codes.h, of which all types have one copy. */
#define DEFINE_PREPARE_CODES(name, type)                                        \
    extern kvc_prepare_fn name;                                                 \
    TARGET void name(float *q, int q_stride, int num_q, int dim, float scale) { \
        prepare_codes(type, q, q_stride, num_q, dim, scale);                    \
    }

#define DEFINE_SCORE_CODES(name, type)                                                                             \
    extern kvc_score_fn name;                                                                                      \
    TARGET void name(float *scores, const float *q, int q_stride, int num_q, const void *rows, int64_t row_stride, \
                     int n, int dim, kvc_ahead next) {                                                             \
        score_codes(type, scores, q, q_stride, num_q, rows, row_stride, n, dim, next);                             \
    }

#define DEFINE_ACCUMULATE_CODES(name, type)                                                            \
    extern kvc_accumulate_fn name;                                                                     \
    TARGET void name(float *acc, int acc_stride, const float *factor, const float *weights, int num_q, \
                     kvc_value_piece *pieces, int64_t row_stride, int n, int dim) {                    \
        accumulate_codes(type, acc, acc_stride, factor, weights, num_q, pieces, row_stride, n, dim);   \
    }

/* The kernels that every set of vectors has: conversions, floats, and what chooses rows.  Scores and sums of floats
 * stand apart: AVX-512 leaves some of them to AVX2. */
#define DEFINE_FLOATS(set)                        \
    DEFINE_CONVERT(kvc_convert_##set)             \
    DEFINE_UNPACK(kvc_unpack_##set)               \
    DEFINE_LARGEST(kvc_largest_##set)             \
    DEFINE_TIMES(kvc_times_##set)                 \
    DEFINE_ENCODE(kvc_encode_##set)               \
    DEFINE_ROUND(kvc_round_##set)                 \
    DEFINE_PANELS(set, f32, KVC_F32)              \
    DEFINE_PANELS(set, f16, KVC_F16)              \
    DEFINE_PANELS(set, bf16, KVC_BF16)            \
    DEFINE_SCALE(kvc_scale_##set)                 \
    DEFINE_SOFTMAX(kvc_softmax_##set)             \
    DEFINE_MATMUL(kvc_matmul_##set)               \
    DEFINE_HADAMARD(kvc_hadamard_##set)           \
    DEFINE_MAKE_SKETCHES(kvc_make_sketches_##set) \
    DEFINE_WEIGH_PIECES(kvc_weigh_pieces_##set)   \
    DEFINE_RANK(kvc_rank_f32_##set, KVC_F32)
#define DEFINE_PANELS(set, name, type)                   \
    DEFINE_PACK_KEYS(kvc_pack_keys_##name##_##set, type) \
    DEFINE_PACK_VALUES(kvc_pack_values_##name##_##set, type)
#define DEFINE_ROWS(set, name, type)             \
    DEFINE_SCORE(kvc_score_##name##_##set, type) \
    DEFINE_ACCUMULATE(kvc_accumulate_##name##_##set, type)
