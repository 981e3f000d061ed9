/* avx512bf16.c: scores of bf16 queries, and conversions to bf16, for AVX-512 with dot products of integers and of bf16,
 * and the table, all else of which is as in avx512vnni.c. */
#include "kernels/kernels.h"

#ifdef KVC_HAVE_AVX512_BF16
#include "kernels/avx512.h"
#define TARGET __attribute__((target("avx512bf16,avx512vnni," KVC_AVX512_TARGET)))
#define HAS_VNNI 1
#define HAS_BF16_DOT 1
#include "kernels/vector_avx512.h"
#include "kernels/template.h"

/* Converts rows of a type of which no element is a denormal float: the instruction would make these 0. */
INLINE void convert_to_bf16(int from, void *dst, int64_t dst_stride, const void *src, int64_t src_stride,
                            int64_t num_rows, int dim) {
    const int tail = tail_of(from, dim), whole = dim - tail;
    for (int64_t r = 0; r < num_rows; r++) {
        const char *src_row = (const char *)src + r * src_stride;
        char *dst_row = (char *)dst + r * dst_stride;
        for (int d = 0; d < whole; d += LANES)
            _mm256_storeu_si256((void *)(dst_row + bytes_of(KVC_BF16, d)),
                                (__m256i)_mm512_cvtneps_pbh(load(from, src_row, d, LANES)));
        if (tail) store(KVC_BF16, dst_row, whole, tail, load(from, src_row, whole, tail));
    }
}

#define DEFINE_CONVERT_TO_BF16(name, from)                                                                            \
    TARGET void name(void *dst, int64_t dst_stride, const void *src, int64_t src_stride, int64_t num_rows, int dim) { \
        convert_to_bf16(from, dst, dst_stride, src, src_stride, num_rows, dim);                                       \
    }
DEFINE_CONVERT_TO_BF16(kvc_convert_f16_bf16_avx512bf16, KVC_F16)
DEFINE_CONVERT_TO_BF16(kvc_convert_q8_0_bf16_avx512bf16, KVC_Q8_0)
DEFINE_CONVERT_TO_BF16(kvc_convert_q4_0_bf16_avx512bf16, KVC_Q4_0)

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
    KVC_AVX512BF16_TO_BF16,
    KVC_AVX512_TILER_F32,
    KVC_AVX512_TILERS,
    KVC_AVX512VNNI_INTEGERS,
    .score_bf16 = {kvc_prepare_bf16_avx512bf16, kvc_score_bf16_avx512bf16},
};
#endif
