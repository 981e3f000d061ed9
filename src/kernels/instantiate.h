/* instantiate.h: the kernels of a set by name, and its table; the last part of template.h and of scalar.c.
 *
 * Names end in that of the set, ISA.  A set may take the kernels of floats, or those that multiply quantised rows as
 * integers, from another one, which FLOATS or INTEGERS names: one copy of them serves all of AVX-512.
 */
#define JOIN_(kernel, isa) kernel##_##isa
#define JOIN(kernel, isa) JOIN_(kernel, isa)
#define OF(kernel) JOIN(kernel, ISA)

#ifndef FLOATS
#define FLOATS ISA
#define HAS_FLOATS 1
#endif
#ifndef INTEGERS
#define INTEGERS ISA
#define HAS_INTEGERS 1
#endif
#define OF_FLOATS(kernel) JOIN(kvc_##kernel, FLOATS)
#define OF_INTEGERS(kernel) JOIN(kvc_##kernel, INTEGERS)

#define DECLARE_TYPED(name)                                                                               \
    extern kvc_convert_fn OF_FLOATS(convert_f32_##name), OF_FLOATS(convert_f16_##name),                   \
        OF_FLOATS(convert_bf16_##name), OF_FLOATS(convert_##name##_f32), OF_FLOATS(convert_##name##_f16), \
        OF_FLOATS(convert_##name##_bf16), OF_FLOATS(convert_##name##_##name);                             \
    extern kvc_pack_keys_fn OF_FLOATS(pack_keys_##name);                                                  \
    extern kvc_pack_values_fn OF_FLOATS(pack_values_##name);

#define DECLARE_STREAMING(of, name)       \
    extern kvc_score_fn of(score_##name); \
    extern kvc_accumulate_fn of(accumulate_##name);

#define DECLARE_FLOATING(name) DECLARE_TYPED(name) DECLARE_STREAMING(OF_FLOATS, name)
#define DECLARE_QUANTISED(name)          \
    DECLARE_TYPED(name)                  \
    DECLARE_STREAMING(OF_INTEGERS, name) \
    extern kvc_prepare_fn OF_INTEGERS(prepare_##name);

DECLARE_FLOATING(f32)
DECLARE_FLOATING(f16)
DECLARE_FLOATING(bf16)
DECLARE_QUANTISED(q8_0)
DECLARE_QUANTISED(q4_0)
extern kvc_prepare_fn OF_FLOATS(scale);
extern kvc_softmax_fn OF_FLOATS(softmax);
extern kvc_matmul_fn OF_FLOATS(matmul);

#define STREAMING(of, name, type)                                                                                 \
    TARGET void of(score_##name)(float *scores, const float *q, int q_stride, int num_q, const void *const *rows, \
                                 int n, int dim, kvc_ahead next) {                                                \
        score(type, 0, scores, q, q_stride, num_q, rows, n, dim, next);                                           \
    }                                                                                                             \
    TARGET void of(accumulate_##name)(float *acc, int acc_stride, const float *factor, const float *weights,      \
                                      int num_q, const void *const *rows, int n, int dim, kvc_ahead next) {       \
        accumulate(type, acc, acc_stride, factor, weights, num_q, rows, n, dim, next);                            \
    }

#if HAS_FLOATS
#define CONVERT(from, from_type, to, to_type)                                                                        \
    TARGET void OF_FLOATS(convert_##from##_##to)(void *dst, int64_t dst_stride, const void *src, int64_t src_stride, \
                                                 int64_t num_rows, int dim) {                                        \
        convert(from_type, to_type, dst, dst_stride, src, src_stride, num_rows, dim);                                \
    }

#define TYPED(name, type)                                                                                            \
    CONVERT(name, type, f32, KVC_F32)                                                                                \
    CONVERT(name, type, f16, KVC_F16)                                                                                \
    CONVERT(name, type, bf16, KVC_BF16)                                                                              \
    TARGET void OF_FLOATS(pack_keys_##name)(float *dst, const void *const *rows, int n, int dim) {                   \
        pack_keys(type, dst, rows, n, dim);                                                                          \
    }                                                                                                                \
    TARGET void OF_FLOATS(pack_values_##name)(float *dst, int dst_stride, const void *const *rows, int n, int dim) { \
        pack_values(type, dst, dst_stride, rows, n, dim);                                                            \
    }

#define FLOATING(name, type)            \
    TYPED(name, type)                   \
    CONVERT(name, type, q8_0, KVC_Q8_0) \
    CONVERT(name, type, q4_0, KVC_Q4_0) \
    STREAMING(OF_FLOATS, name, type)

FLOATING(f32, KVC_F32)
FLOATING(f16, KVC_F16)
FLOATING(bf16, KVC_BF16)
TYPED(q8_0, KVC_Q8_0)
TYPED(q4_0, KVC_Q4_0)
CONVERT(q8_0, KVC_Q8_0, q8_0, KVC_Q8_0)
CONVERT(q4_0, KVC_Q4_0, q4_0, KVC_Q4_0)

TARGET void OF_FLOATS(scale)(float *q, int q_stride, int num_q, int dim, float scale) {
    scale_rows(q, q_stride, num_q, dim, scale);
}

TARGET void OF_FLOATS(softmax)(float *scores, int num_q, int n, float *max, float *sum, float *factor) {
    softmax_rows(scores, num_q, n, max, sum, factor);
}

TARGET void OF_FLOATS(matmul)(float *c, int ldc, const float *a, int lda, const float *b, int ldb, int m, int n, int k,
                              int add) {
    matmul_rows(c, ldc, a, lda, b, ldb, m, n, k, add);
}
#endif

#if HAS_INTEGERS
#define QUANTISED(name, type)                                                                          \
    STREAMING(OF_INTEGERS, name, type)                                                                 \
    TARGET void OF_INTEGERS(prepare_##name)(float *q, int q_stride, int num_q, int dim, float scale) { \
        prepare(type, q, q_stride, num_q, dim, scale);                                                 \
    }

QUANTISED(q8_0, KVC_Q8_0)
QUANTISED(q4_0, KVC_Q4_0)
#endif

#if DOT_BF16
TARGET static void score_dots(float *scores, const float *q, int q_stride, int num_q, const void *const *rows, int n,
                              int dim, kvc_ahead next) {
    score(KVC_BF16, 1, scores, q, q_stride, num_q, rows, n, dim, next);
}
#define SCORE_BF16 {prepare_dots, score_dots}
#else
#define SCORE_BF16 {NULL, NULL}
#endif

#define CONVERT_TO_FLOATS(from)                                                               \
    [KVC_F32] = OF_FLOATS(convert_##from##_f32), [KVC_F16] = OF_FLOATS(convert_##from##_f16), \
    [KVC_BF16] = OF_FLOATS(convert_##from##_bf16)
#define CONVERT_TO_ALL(from)                                                 \
    {CONVERT_TO_FLOATS(from), [KVC_Q8_0] = OF_FLOATS(convert_##from##_q8_0), \
     [KVC_Q4_0] = OF_FLOATS(convert_##from##_q4_0)}
#define SCORER(name) {OF_FLOATS(scale), OF_FLOATS(score_##name)}
#define INTEGER_SCORER(name) {OF_INTEGERS(prepare_##name), OF_INTEGERS(score_##name)}
#define PANELS(name)                                                                \
    {OF_FLOATS(scale),  OF_FLOATS(pack_keys_##name), OF_FLOATS(pack_values_##name), \
     OF_FLOATS(matmul), OF_FLOATS(matmul),           12}

/* A table, with tilers made by a macro like PANELS. */
#define KERNELS(its_name, tiler_of)                                                                     \
    {                                                                                                   \
        .name = its_name,                                                                               \
        .convert = {[KVC_F32] = CONVERT_TO_ALL(f32),                                                    \
                    [KVC_F16] = CONVERT_TO_ALL(f16),                                                    \
                    [KVC_BF16] = CONVERT_TO_ALL(bf16),                                                  \
                    [KVC_Q8_0] = {CONVERT_TO_FLOATS(q8_0), [KVC_Q8_0] = OF_FLOATS(convert_q8_0_q8_0)},  \
                    [KVC_Q4_0] = {CONVERT_TO_FLOATS(q4_0), [KVC_Q4_0] = OF_FLOATS(convert_q4_0_q4_0)}}, \
        .score = {[KVC_F32] = SCORER(f32),                                                              \
                  [KVC_F16] = SCORER(f16),                                                              \
                  [KVC_BF16] = SCORER(bf16),                                                            \
                  [KVC_Q8_0] = INTEGER_SCORER(q8_0),                                                    \
                  [KVC_Q4_0] = INTEGER_SCORER(q4_0)},                                                   \
        .score_bf16 = SCORE_BF16,                                                                       \
        .accumulate = {[KVC_F32] = OF_FLOATS(accumulate_f32),                                           \
                       [KVC_F16] = OF_FLOATS(accumulate_f16),                                           \
                       [KVC_BF16] = OF_FLOATS(accumulate_bf16),                                         \
                       [KVC_Q8_0] = OF_INTEGERS(accumulate_q8_0),                                       \
                       [KVC_Q4_0] = OF_INTEGERS(accumulate_q4_0)},                                      \
        .tiler = {[KVC_F32] = PANELS(f32),                                                              \
                  [KVC_F16] = tiler_of(f16),                                                            \
                  [KVC_BF16] = tiler_of(bf16),                                                          \
                  [KVC_Q8_0] = tiler_of(q8_0),                                                          \
                  [KVC_Q4_0] = tiler_of(q4_0)},                                                         \
        .softmax = OF_FLOATS(softmax),                                                                  \
        .scale = OF_FLOATS(scale),                                                                      \
    }

#define STRING_(x) #x
#define STRING(x) STRING_(x)

const kvc_kernels OF(kvc_kernels) = KERNELS(STRING(ISA), PANELS);
