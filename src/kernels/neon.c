/* neon.c: the kernels for AArch64, with what every such processor has (base ARMv8-A), and their table. */
#include "kernels/neon.h"

#ifdef KVC_HAVE_NEON
#define TARGET
#include "kernels/vector_neon.h"
#include "kernels/template.h"

DEFINE_CONVERT(kvc_convert_neon)
DEFINE_UNPACK(kvc_unpack_neon)
DEFINE_LARGEST(kvc_largest_neon)
DEFINE_TIMES(kvc_times_neon)
DEFINE_ENCODE(kvc_encode_neon)
DEFINE_ROUND(kvc_round_neon)

DEFINE_SCORE(kvc_score_f32_neon, KVC_F32)
DEFINE_SCORE(kvc_score_f16_neon, KVC_F16)
DEFINE_SCORE(kvc_score_bf16_neon, KVC_BF16)
DEFINE_ACCUMULATE(kvc_accumulate_f32_neon, KVC_F32)
DEFINE_ACCUMULATE(kvc_accumulate_f16_neon, KVC_F16)
DEFINE_ACCUMULATE(kvc_accumulate_bf16_neon, KVC_BF16)

DEFINE_PACK_KEYS(kvc_pack_keys_f32_neon, KVC_F32)
DEFINE_PACK_KEYS(kvc_pack_keys_f16_neon, KVC_F16)
DEFINE_PACK_KEYS(kvc_pack_keys_bf16_neon, KVC_BF16)
DEFINE_PACK_VALUES(kvc_pack_values_f32_neon, KVC_F32)
DEFINE_PACK_VALUES(kvc_pack_values_f16_neon, KVC_F16)
DEFINE_PACK_VALUES(kvc_pack_values_bf16_neon, KVC_BF16)

DEFINE_SCALE(kvc_scale_neon)
DEFINE_SOFTMAX(kvc_softmax_neon)
DEFINE_MATMUL(kvc_matmul_neon)
DEFINE_HADAMARD(kvc_hadamard_neon)
DEFINE_RANK(kvc_rank_f32_neon, KVC_F32)
DEFINE_RANK(kvc_rank_int8_neon, KVC_INT8)
DEFINE_MAKE_SKETCHES(kvc_make_sketches_neon)
DEFINE_WEIGH_PIECES(kvc_weigh_pieces_neon)
DEFINE_SKETCH(kvc_sketch_neon)

DEFINE_PREPARE(kvc_prepare_q8_0_neon, KVC_Q8_0)
DEFINE_PREPARE(kvc_prepare_q4_0_neon, KVC_Q4_0)
DEFINE_SCORE(kvc_score_q8_0_neon, KVC_Q8_0)
DEFINE_SCORE(kvc_score_q4_0_neon, KVC_Q4_0)
DEFINE_SCORE(kvc_score_int8_neon, KVC_INT8)
DEFINE_ACCUMULATE(kvc_accumulate_q8_0_neon, KVC_Q8_0)
DEFINE_ACCUMULATE(kvc_accumulate_q4_0_neon, KVC_Q4_0)
DEFINE_ACCUMULATE(kvc_accumulate_int8_neon, KVC_INT8)

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
