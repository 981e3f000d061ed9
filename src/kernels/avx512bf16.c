/* avx512bf16.c: scores of bf16 queries for AVX-512 with dot products of integers and of bf16, and the table, all else
 * of which is as in avx512vnni.c. */
#include "kernels/kernels.h"

#ifdef KVC_HAVE_AVX512_BF16
#include "kernels/avx512.h"
#define TARGET __attribute__((target("avx512bf16,avx512vnni," KVC_AVX512_TARGET)))
#define HAS_VNNI 1
#define HAS_BF16_DOT 1
#include "kernels/vector_avx512.h"
#include "kernels/template.h"

TARGET void kvc_prepare_bf16_avx512bf16(float *q, int q_stride, int num_q, int dim, float scale) {
    prepare_bf16(q, q_stride, num_q, dim, scale);
}

TARGET void kvc_score_bf16_avx512bf16(float *scores, const float *q, int q_stride, int num_q, const void *const *rows,
                                      int n, int dim, kvc_ahead next) {
    score(KVC_BF16, KVC_BF16, scores, q, q_stride, num_q, rows, n, dim, next);
}

const kvc_kernels kvc_kernels_avx512bf16 = {
    .name = "avx512bf16",
    KVC_AVX512_FLOATS,
    KVC_AVX512_TILER_F32,
    KVC_AVX512_TILERS,
    KVC_AVX512VNNI_INTEGERS,
    .score_bf16 = {kvc_prepare_bf16_avx512bf16, kvc_score_bf16_avx512bf16},
};
#endif
