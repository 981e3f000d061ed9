/* avx2.c: the kernels for AVX2, FMA and F16C, and their table. */
#include "kernels/avx2.h"

#ifdef KVC_HAVE_AVX2
#define TARGET __attribute__((target(KVC_AVX2_TARGET)))
#include "kernels/vector_avx2.h"
#include "kernels/template.h"

DEFINE_CONVERT(kvc_convert_avx2)
DEFINE_UNPACK(kvc_unpack_avx2)
DEFINE_LARGEST(kvc_largest_avx2)
DEFINE_TIMES(kvc_times_avx2)
DEFINE_ENCODE(kvc_encode_avx2)
DEFINE_ROUND(kvc_round_avx2)

DEFINE_SCORE(kvc_score_f32_avx2, KVC_F32)
DEFINE_SCORE(kvc_score_f16_avx2, KVC_F16)
DEFINE_SCORE(kvc_score_bf16_avx2, KVC_BF16)
DEFINE_ACCUMULATE(kvc_accumulate_f32_avx2, KVC_F32)
DEFINE_ACCUMULATE(kvc_accumulate_f16_avx2, KVC_F16)
DEFINE_ACCUMULATE(kvc_accumulate_bf16_avx2, KVC_BF16)

DEFINE_PACK_KEYS(kvc_pack_keys_f32_avx2, KVC_F32)
DEFINE_PACK_KEYS(kvc_pack_keys_f16_avx2, KVC_F16)
DEFINE_PACK_KEYS(kvc_pack_keys_bf16_avx2, KVC_BF16)
DEFINE_PACK_VALUES(kvc_pack_values_f32_avx2, KVC_F32)
DEFINE_PACK_VALUES(kvc_pack_values_f16_avx2, KVC_F16)
DEFINE_PACK_VALUES(kvc_pack_values_bf16_avx2, KVC_BF16)

DEFINE_SCALE(kvc_scale_avx2)
DEFINE_SOFTMAX(kvc_softmax_avx2)
DEFINE_MATMUL(kvc_matmul_avx2)
DEFINE_HADAMARD(kvc_hadamard_avx2)
DEFINE_RANK(kvc_rank_f32_avx2, KVC_F32)
DEFINE_RANK(kvc_rank_int8_avx2, KVC_INT8)
DEFINE_MAKE_SKETCHES(kvc_make_sketches_avx2)
DEFINE_WEIGH_PIECES(kvc_weigh_pieces_avx2)
DEFINE_SKETCH(kvc_sketch_avx2)

DEFINE_PREPARE(kvc_prepare_q8_0_avx2, KVC_Q8_0)
DEFINE_PREPARE(kvc_prepare_q4_0_avx2, KVC_Q4_0)
DEFINE_SCORE(kvc_score_q8_0_avx2, KVC_Q8_0)
DEFINE_SCORE(kvc_score_q4_0_avx2, KVC_Q4_0)
DEFINE_SCORE(kvc_score_int8_avx2, KVC_INT8)
DEFINE_ACCUMULATE(kvc_accumulate_q8_0_avx2, KVC_Q8_0)
DEFINE_ACCUMULATE(kvc_accumulate_q4_0_avx2, KVC_Q4_0)
DEFINE_ACCUMULATE(kvc_accumulate_int8_avx2, KVC_INT8)

const kvc_kernels kvc_kernels_avx2 = {
    .name = "avx2",
    KVC_AVX2_COMMON,
    .score[KVC_Q8_0] = {kvc_prepare_q8_0_avx2, kvc_score_q8_0_avx2},
    .score[KVC_INT8] = {kvc_prepare_q8_0_avx2, kvc_score_int8_avx2},
    .accumulate[KVC_Q8_0] = kvc_accumulate_q8_0_avx2,
    .accumulate[KVC_INT8] = kvc_accumulate_int8_avx2,
};
#endif
