/* avx2.h: the kernels of avx2.c that stand in the table of avxvnni.c, too. */
#ifndef KVC_AVX2_H
#define KVC_AVX2_H

#include "kernels/kernels.h"

#define KVC_AVX2_TARGET "avx2,fma,f16c"

KVC_DECLARE_FLOATS(avx2);
extern kvc_prepare_fn kvc_prepare_q8_0_avx2, kvc_prepare_q4_0_avx2;
extern kvc_score_fn kvc_score_q4_0_avx2;
extern kvc_accumulate_fn kvc_accumulate_q4_0_avx2;
extern kvc_rank_fn kvc_rank_int8_avx2;
extern kvc_sketch_fn kvc_sketch_avx2;

/* All but the name, and kernels of rows of 8 bits. */
#define KVC_AVX2_COMMON                                                                                     \
    .convert = kvc_convert_avx2, KVC_FLOATS(avx2), KVC_ROWS(avx2, bf16, KVC_BF16, kvc_scale_avx2),          \
    KVC_ROWS(avx2, q4_0, KVC_Q4_0, kvc_prepare_q4_0_avx2), KVC_PANELS(avx2, f32, KVC_F32),                  \
    KVC_PANELS(avx2, f16, KVC_F16), KVC_PANELS(avx2, bf16, KVC_BF16), .rank[KVC_INT8] = kvc_rank_int8_avx2, \
    .sketch = kvc_sketch_avx2

#endif
