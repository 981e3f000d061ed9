/* avx512vnni.c: the kernels for AVX-512 with dot products of integers, and their table. */
#include "kernels/kernels.h"

#ifdef KVC_HAVE_AVX512
#include "kernels/avx512.h"
#define TARGET __attribute__((target("avx512vnni," KVC_AVX512_TARGET)))
#define HAS_VNNI 1
#define LARGEST_WEIGHT (127 * 256 + 127) /* what two digits can count: see scaled_rows.h */
#include "kernels/vector_avx512.h"
#include "kernels/template.h"
#include "kernels/matmul_quantised.h"
#include "kernels/scaled_rows.h"

enum { BYTE_QUERIES = 6 };

INLINE ivec i_of_bits(vec x) { return _mm512_castps_si512(x); }

/* Rounds 64 floats to bytes.  Packs work within quarters of 128 bits, so the int32 are put in order afterwards. */
INLINE void store_weights(void *p, const vec x[EXPS]) {
    const __m512i in_turns = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i low = _mm512_packs_epi32(_mm512_cvtps_epi32(x[0]), _mm512_cvtps_epi32(x[1])); /* by quarters */
    const __m512i high = _mm512_packs_epi32(_mm512_cvtps_epi32(x[2]), _mm512_cvtps_epi32(x[3]));
    i_store(p, _mm512_permutexvar_epi32(in_turns, _mm512_packus_epi16(low, high)));
}

#include "kernels/multiply_bytes.h"

DEFINE_BYTES(avx512vnni)

DEFINE_PREPARE(kvc_prepare_q8_0_avx512vnni, KVC_Q8_0)
DEFINE_PREPARE(kvc_prepare_q4_0_avx512vnni, KVC_Q4_0)
DEFINE_ROWS(avx512vnni, q8_0, KVC_Q8_0)
DEFINE_ROWS(avx512vnni, q4_0, KVC_Q4_0)
DEFINE_SCALED(int8, KVC_INT8)
DEFINE_SCALED(int6, KVC_INT6)
DEFINE_SCALED(int4, KVC_INT4)
DEFINE_PREPARE_CODES(kvc_prepare_q4_1_avx512vnni, KVC_Q4_1)
DEFINE_PREPARE_CODES(kvc_prepare_q5_0_avx512vnni, KVC_Q5_0)
DEFINE_PREPARE_CODES(kvc_prepare_q5_1_avx512vnni, KVC_Q5_1)
DEFINE_PREPARE_CODES(kvc_prepare_iq4_nl_avx512vnni, KVC_IQ4_NL)
DEFINE_SCORE_CODES(kvc_score_q4_1_avx512vnni, KVC_Q4_1)
DEFINE_SCORE_CODES(kvc_score_q5_0_avx512vnni, KVC_Q5_0)
DEFINE_SCORE_CODES(kvc_score_q5_1_avx512vnni, KVC_Q5_1)
DEFINE_SCORE_CODES(kvc_score_iq4_nl_avx512vnni, KVC_IQ4_NL)
DEFINE_ACCUMULATE_CODES(kvc_accumulate_q4_1_avx512vnni, KVC_Q4_1)
DEFINE_ACCUMULATE_CODES(kvc_accumulate_q5_0_avx512vnni, KVC_Q5_0)
DEFINE_ACCUMULATE_CODES(kvc_accumulate_q5_1_avx512vnni, KVC_Q5_1)
DEFINE_ACCUMULATE_CODES(kvc_accumulate_iq4_nl_avx512vnni, KVC_IQ4_NL)

DEFINE_RANK(kvc_rank_int8_avx512vnni, KVC_INT8)
DEFINE_SKETCH(kvc_sketch_avx512vnni)

TARGET void kvc_prepare_scaled_avx512vnni(float *q, int q_stride, int num_q, int dim, float scale) {
    prepare_scaled(q, q_stride, num_q, dim, scale);
}

TARGET void kvc_score_scaled_avx512vnni(float *c, int ldc, const float *a, int lda, const float *b, int ldb, int m,
                                        int n, int k, int add, kvc_ahead next) {
    (void)ldb, (void)add; /* scores are not added to */
    score_scaled_panels(c, ldc, a, lda, b, m, n, k, next);
}

TARGET void kvc_accumulate_scaled_avx512vnni(float *c, int ldc, const float *a, int lda, const float *b, int ldb, int m,
                                             int n, int k, int add, kvc_ahead next) {
    (void)ldb, (void)add; /* sums always are */
    accumulate_scaled_panels(c, ldc, a, lda, b, m, n, k, next);
}

TARGET void kvc_pack_keys_q8_0_avx512vnni(float *dst, const void *rows, int64_t row_stride, int first, int n, int dim) {
    (void)first; /* 0: tiles have KVC_PANEL rows */
    pack_quantised_keys(dst, rows, row_stride, n, dim);
}

TARGET void kvc_pack_values_q8_0_avx512vnni(float *dst, int dst_stride, const void *rows, int64_t row_stride, int first,
                                            int n, int dim) {
    (void)dst_stride, (void)first;
    pack_quantised_values(dst, rows, row_stride, n, dim);
}

TARGET void kvc_score_panels_avx512vnni(float *c, int ldc, const float *a, int lda, const float *b, int ldb, int m,
                                        int n, int k, int add, kvc_ahead next) {
    (void)ldb, (void)add; /* scores are not added to */
    score_quantised_panels(c, ldc, a, lda, b, m, n, k, next);
}

TARGET void kvc_accumulate_panels_avx512vnni(float *c, int ldc, const float *a, int lda, const float *b, int ldb, int m,
                                             int n, int k, int add, kvc_ahead next) {
    (void)ldb, (void)add; /* sums always are */
    accumulate_quantised_panels(c, ldc, a, lda, b, m, n, k, next);
}

const kvc_kernels kvc_kernels_avx512vnni = {
    .name = "avx512vnni",
    .convert = kvc_convert_avx512,
    KVC_AVX512_FLOATS,
    KVC_AVX512_TILERS,
    KVC_AVX512VNNI_TILER,
    KVC_AVX512VNNI_BYTES,
    KVC_AVX512VNNI_INTEGERS,
    .sketch = kvc_sketch_avx512vnni,
};
#endif
