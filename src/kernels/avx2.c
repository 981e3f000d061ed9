/* avx2.c: the kernels for AVX2, FMA and F16C, and their table. */
#include "kernels/avx2.h"

#ifdef KVC_HAVE_AVX2
#define TARGET __attribute__((target(KVC_AVX2_TARGET)))
#include "kernels/vector_avx2.h"
#include "kernels/template.h"

DEFINE_FLOATS(avx2)
DEFINE_ROWS(avx2, f32, KVC_F32)
DEFINE_ROWS(avx2, f16, KVC_F16)
DEFINE_ROWS(avx2, bf16, KVC_BF16)

DEFINE_RANK(kvc_rank_int8_avx2, KVC_INT8)
DEFINE_SKETCH(kvc_sketch_avx2)

DEFINE_PREPARE(kvc_prepare_q8_0_avx2, KVC_Q8_0)
DEFINE_PREPARE(kvc_prepare_q4_0_avx2, KVC_Q4_0)
DEFINE_ROWS(avx2, q8_0, KVC_Q8_0)
DEFINE_ROWS(avx2, q4_0, KVC_Q4_0)
DEFINE_ROWS(avx2, int8, KVC_INT8)

const kvc_kernels kvc_kernels_avx2 = {
    .name = "avx2",
    KVC_AVX2_COMMON,
    .score[KVC_Q8_0] = {kvc_prepare_q8_0_avx2, kvc_score_q8_0_avx2},
    .score[KVC_INT8] = {kvc_prepare_q8_0_avx2, kvc_score_int8_avx2},
    .accumulate[KVC_Q8_0] = kvc_accumulate_q8_0_avx2,
    .accumulate[KVC_INT8] = kvc_accumulate_int8_avx2,
};
#endif
