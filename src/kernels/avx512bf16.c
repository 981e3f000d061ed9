/* avx512bf16.c: scores of bf16 queries, and conversions to bf16, for AVX-512 with dot products of integers and of bf16,
 * and the table, all else of which is as in avx512vnni.c. */
#include "kernels/kernels.h"

#ifdef KVC_HAVE_AVX512_BF16
#include "kernels/avx512.h"
#define TARGET __attribute__((target("avx512bf16,avx512vnni," KVC_AVX512_TARGET)))
#define HAS_VNNI 1
#define HAS_DOT_16 1
#include "kernels/vector_avx512.h"
#include "kernels/template.h"

/* Converts a row of a type none of whose elements is a denormal f32: the instruction would make these 0. */
INLINE void convert_row_to_bf16(int from, int to, char *dst, const char *src, int dim) {
    const int tail = tail_of(from, dim), whole = dim - tail;
    for (int d = 0; d < whole; d += LANES)
        _mm256_storeu_si256((void *)(dst + bytes_of(to, d)), (__m256i)_mm512_cvtneps_pbh(load(from, src, d, LANES)));
    if (tail) store(to, dst, whole, tail, load(from, src, whole, tail));
}
DEFINE_CONVERT_ROWS(convert_to_bf16_f16, convert_row_to_bf16, KVC_F16, KVC_BF16)
DEFINE_CONVERT_ROWS(convert_to_bf16_q8_0, convert_row_to_bf16, KVC_Q8_0, KVC_BF16)
DEFINE_CONVERT_ROWS(convert_to_bf16_q4_0, convert_row_to_bf16, KVC_Q4_0, KVC_BF16)

TARGET void kvc_convert_avx512bf16(int from, int to, void *dst, int64_t dst_stride, const void *src, int64_t src_stride,
                                   int64_t num_rows, int dim) {
    static kvc_convert_fn *const to_bf16[KVC_STORED_TYPES] = {
        [KVC_F16] = convert_to_bf16_f16, [KVC_Q8_0] = convert_to_bf16_q8_0, [KVC_Q4_0] = convert_to_bf16_q4_0};
    kvc_convert_fn *const convert = to == KVC_BF16 && to_bf16[from] ? to_bf16[from] : kvc_convert_avx512;
    convert(from, to, dst, dst_stride, src, src_stride, num_rows, dim);
}

DEFINE_PREPARE_16(kvc_prepare_bf16_avx512bf16)
DEFINE_SCORE_16(kvc_score_bf16_avx512bf16, KVC_BF16)
DEFINE_RANK(kvc_rank_bf16_avx512bf16, KVC_BF16)

const kvc_kernels kvc_kernels_avx512bf16 = {
    .name = "avx512bf16",
    .convert = kvc_convert_avx512bf16,
    KVC_AVX512_FLOATS,
    KVC_AVX512_TILERS,
    KVC_AVX512VNNI_TILER,
    KVC_AVX512VNNI_BYTES,
    KVC_AVX512VNNI_INTEGERS,
    .sketch = kvc_sketch_avx512vnni,
    .score_16[KVC_BF16] = {kvc_prepare_bf16_avx512bf16, kvc_score_bf16_avx512bf16},
    .rank[KVC_BF16] = kvc_rank_bf16_avx512bf16,
};
#endif
