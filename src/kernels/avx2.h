/* avx2.h: the kernels of avx2.c that stand in the table of avxvnni.c, too. */
#ifndef KVC_AVX2_H
#define KVC_AVX2_H

#include "kernels/kernels.h"

#define KVC_AVX2_TARGET "avx2,fma,f16c"

extern kvc_convert_fn kvc_convert_avx2;
extern kvc_unpack_fn kvc_unpack_avx2;
extern kvc_largest_fn kvc_largest_avx2;
extern kvc_times_fn kvc_times_avx2;
extern kvc_encode_fn kvc_encode_avx2;
extern kvc_round_fn kvc_round_avx2;
extern kvc_score_fn kvc_score_f32_avx2, kvc_score_f16_avx2, kvc_score_bf16_avx2;
extern kvc_accumulate_fn kvc_accumulate_f32_avx2, kvc_accumulate_f16_avx2, kvc_accumulate_bf16_avx2;
extern kvc_pack_keys_fn kvc_pack_keys_f32_avx2, kvc_pack_keys_f16_avx2, kvc_pack_keys_bf16_avx2;
extern kvc_pack_values_fn kvc_pack_values_f32_avx2, kvc_pack_values_f16_avx2, kvc_pack_values_bf16_avx2;
extern kvc_prepare_fn kvc_scale_avx2, kvc_prepare_q8_0_avx2, kvc_prepare_q4_0_avx2;
extern kvc_score_fn kvc_score_q4_0_avx2;
extern kvc_accumulate_fn kvc_accumulate_q4_0_avx2;
extern kvc_softmax_fn kvc_softmax_avx2;
extern kvc_matmul_fn kvc_matmul_avx2;
extern kvc_hadamard_fn kvc_hadamard_avx2;
extern kvc_rank_fn kvc_rank_f32_avx2, kvc_rank_int8_avx2;
extern kvc_make_sketches_fn kvc_make_sketches_avx2;
extern kvc_sketch_fn kvc_sketch_avx2;
extern kvc_weigh_pieces_fn kvc_weigh_pieces_avx2;

/* All but the name, and kernels of rows of 8 bits. */
#define KVC_AVX2_COMMON                                                                                               \
    .convert = kvc_convert_avx2, .unpack = kvc_unpack_avx2, .largest = kvc_largest_avx2, .encode = kvc_encode_avx2,   \
    .round = kvc_round_avx2, .score[KVC_F32] = {kvc_scale_avx2, kvc_score_f32_avx2},                                  \
    .score[KVC_F16] = {kvc_scale_avx2, kvc_score_f16_avx2}, .score[KVC_BF16] = {kvc_scale_avx2, kvc_score_bf16_avx2}, \
    .score[KVC_Q4_0] = {kvc_prepare_q4_0_avx2, kvc_score_q4_0_avx2}, .accumulate[KVC_F32] = kvc_accumulate_f32_avx2,  \
    .accumulate[KVC_F16] = kvc_accumulate_f16_avx2, .accumulate[KVC_BF16] = kvc_accumulate_bf16_avx2,                 \
    .accumulate[KVC_Q4_0] = kvc_accumulate_q4_0_avx2,                                                                 \
    .tiler[KVC_F32] =                                                                                                 \
        KVC_FLOAT_TILER(kvc_scale_avx2, kvc_pack_keys_f32_avx2, kvc_pack_values_f32_avx2, kvc_matmul_avx2),           \
    .tiler[KVC_F16] =                                                                                                 \
        KVC_FLOAT_TILER(kvc_scale_avx2, kvc_pack_keys_f16_avx2, kvc_pack_values_f16_avx2, kvc_matmul_avx2),           \
    .tiler[KVC_BF16] =                                                                                                \
        KVC_FLOAT_TILER(kvc_scale_avx2, kvc_pack_keys_bf16_avx2, kvc_pack_values_bf16_avx2, kvc_matmul_avx2),         \
    .matmul = kvc_matmul_avx2, .softmax = kvc_softmax_avx2, .times = kvc_times_avx2, .scale = kvc_scale_avx2,         \
    .hadamard = kvc_hadamard_avx2, .rank[KVC_F32] = kvc_rank_f32_avx2, .rank[KVC_INT8] = kvc_rank_int8_avx2,          \
    .sketch = kvc_sketch_avx2, .make_sketches = kvc_make_sketches_avx2, .weigh_pieces = kvc_weigh_pieces_avx2

#endif
