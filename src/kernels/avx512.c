/* avx512.c: the kernels for AVX-512 (F, BW, DQ, VL), and their table.
 *
 * template.h has the kernels as inline functions.  The macros of instantiate.h define functions that call them, under a
 * name for the table: DEFINE_FLOATS(avx512) defines kvc_convert_avx512, kvc_softmax_avx512 and so on.
 */
#include "kernels/kernels.h"

#ifdef KVC_HAVE_AVX512
#include "kernels/avx2.h"
#include "kernels/avx512.h"
#define TARGET __attribute__((target(KVC_AVX512_TARGET)))
#define HAS_VNNI 0
#include "kernels/vector_avx512.h"
#include "kernels/template.h"

DEFINE_FLOATS(avx512)

/* Rows whose dim is no multiple of LANES, as of heads of 40 or 72, are left to AVX2: a tail here took longer. */
DEFINE_WHOLE_SCORE(kvc_score_f32_avx512, KVC_F32, kvc_score_f32_avx2)
DEFINE_WHOLE_SCORE(kvc_score_f16_avx512, KVC_F16, kvc_score_f16_avx2)
DEFINE_WHOLE_SCORE(kvc_score_bf16_avx512, KVC_BF16, kvc_score_bf16_avx2)
DEFINE_WHOLE_ACCUMULATE(kvc_accumulate_f32_avx512, KVC_F32, kvc_accumulate_f32_avx2)
DEFINE_WHOLE_ACCUMULATE(kvc_accumulate_f16_avx512, KVC_F16, kvc_accumulate_f16_avx2)
DEFINE_WHOLE_ACCUMULATE(kvc_accumulate_bf16_avx512, KVC_BF16, kvc_accumulate_bf16_avx2)
/* Kernels of this set load even elements of bf16 before the odd ones, and take queries in that order. */
TARGET void kvc_prepare_bf16_avx512(float *q, int q_stride, int num_q, int dim, float scale) {
    if (dim % LANES)
        kvc_scale_avx2(q, q_stride, num_q, dim, scale);
    else
        scale_evens_first(q, q_stride, num_q, dim, scale);
}

DEFINE_PREPARE(kvc_prepare_q8_0_avx512, KVC_Q8_0)
DEFINE_PREPARE(kvc_prepare_q4_0_avx512, KVC_Q4_0)
DEFINE_ROWS(avx512, q8_0, KVC_Q8_0)
DEFINE_ROWS(avx512, q4_0, KVC_Q4_0)

/* Of AVX2: 20 KB less, and few processors have these instructions and no dot products of integers. */
extern kvc_score_fn kvc_score_int8_avx2;
extern kvc_accumulate_fn kvc_accumulate_int8_avx2;

const kvc_kernels kvc_kernels_avx512 = {
    .name = "avx512",
    .convert = kvc_convert_avx512,
    KVC_AVX512_FLOATS,
    KVC_AVX512_TILERS,
    .score[KVC_Q8_0] = {kvc_prepare_q8_0_avx512, kvc_score_q8_0_avx512},
    .score[KVC_Q4_0] = {kvc_prepare_q4_0_avx512, kvc_score_q4_0_avx512},
    .score[KVC_INT8] = {kvc_prepare_q8_0_avx2, kvc_score_int8_avx2},
    .accumulate[KVC_Q8_0] = kvc_accumulate_q8_0_avx512,
    .accumulate[KVC_Q4_0] = kvc_accumulate_q4_0_avx512,
    .accumulate[KVC_INT8] = kvc_accumulate_int8_avx2,
    .rank[KVC_INT8] = kvc_rank_int8_avx2,
    .sketch = kvc_sketch_avx2,
};
#endif
