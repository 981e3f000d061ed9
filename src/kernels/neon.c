/* neon.c: the kernels for AArch64, with what every such processor has (base ARMv8-A), and their table. */
#include "kernels/neon.h"

#ifdef KVC_HAVE_NEON
#define TARGET
#include "kernels/vector_neon.h"
#include "kernels/template.h"

DEFINE_FLOATS(neon)
DEFINE_ROWS(neon, f32, KVC_F32)
DEFINE_ROWS(neon, f16, KVC_F16)
DEFINE_ROWS(neon, bf16, KVC_BF16)

DEFINE_RANK(kvc_rank_int8_neon, KVC_INT8)
DEFINE_SKETCH(kvc_sketch_neon)

DEFINE_PREPARE(kvc_prepare_q8_0_neon, KVC_Q8_0)
DEFINE_PREPARE(kvc_prepare_q4_0_neon, KVC_Q4_0)
DEFINE_ROWS(neon, q8_0, KVC_Q8_0)
DEFINE_ROWS(neon, q4_0, KVC_Q4_0)
DEFINE_ROWS(neon, int8, KVC_INT8)

const kvc_kernels kvc_kernels_neon = {
    .name = "neon",
    .score[KVC_Q8_0] = {kvc_prepare_q8_0_neon, kvc_score_q8_0_neon},
    .score[KVC_Q4_0] = {kvc_prepare_q4_0_neon, kvc_score_q4_0_neon},
    .score[KVC_INT8] = {kvc_prepare_q8_0_neon, kvc_score_int8_neon},
    .accumulate[KVC_Q8_0] = kvc_accumulate_q8_0_neon,
    .accumulate[KVC_Q4_0] = kvc_accumulate_q4_0_neon,
    .accumulate[KVC_INT8] = kvc_accumulate_int8_neon,
    .rank[KVC_INT8] = kvc_rank_int8_neon,
    .sketch = kvc_sketch_neon,
    KVC_NEON_COMMON,
    KVC_NEON_TILER_BF16,
};
#endif
