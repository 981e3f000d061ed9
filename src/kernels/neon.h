/* neon.h: the kernels of neon.c that stand in the tables of several sets. */
#ifndef KVC_NEON_H
#define KVC_NEON_H

#include "kernels/kernels.h"

extern kvc_convert_fn kvc_convert_neon;
extern kvc_unpack_fn kvc_unpack_neon;
extern kvc_largest_fn kvc_largest_neon;
extern kvc_times_fn kvc_times_neon;
extern kvc_encode_fn kvc_encode_neon;
extern kvc_round_fn kvc_round_neon;
extern kvc_score_fn kvc_score_f32_neon, kvc_score_f16_neon, kvc_score_bf16_neon;
extern kvc_accumulate_fn kvc_accumulate_f32_neon, kvc_accumulate_f16_neon, kvc_accumulate_bf16_neon,
    kvc_accumulate_q8_0_neon, kvc_accumulate_q4_0_neon, kvc_accumulate_int8_neon;
extern kvc_pack_keys_fn kvc_pack_keys_f32_neon, kvc_pack_keys_f16_neon, kvc_pack_keys_bf16_neon;
extern kvc_pack_values_fn kvc_pack_values_f32_neon, kvc_pack_values_f16_neon, kvc_pack_values_bf16_neon;
extern kvc_prepare_fn kvc_scale_neon;
extern kvc_softmax_fn kvc_softmax_neon;
extern kvc_matmul_fn kvc_matmul_neon;
extern kvc_hadamard_fn kvc_hadamard_neon;
extern kvc_make_sketches_fn kvc_make_sketches_neon;
extern kvc_weigh_pieces_fn kvc_weigh_pieces_neon;
extern kvc_rank_fn kvc_rank_f32_neon, kvc_rank_int8_neondotprod;
extern kvc_sketch_fn kvc_sketch_neondotprod;

extern kvc_prepare_fn kvc_prepare_neondotprod, kvc_prepare_neoni8mm, kvc_prepare_f16_neonfhm;
extern kvc_score_fn kvc_score_q8_0_neondotprod, kvc_score_q4_0_neondotprod, kvc_score_int8_neondotprod;
extern kvc_score_fn kvc_score_q8_0_neoni8mm, kvc_score_q4_0_neoni8mm, kvc_score_int8_neoni8mm;
extern kvc_score_fn kvc_score_f16_neonfhm;
extern kvc_accumulate_fn kvc_accumulate_q8_0_neondotprod, kvc_accumulate_q4_0_neondotprod,
    kvc_accumulate_int8_neondotprod;
extern kvc_accumulate_fn kvc_accumulate_q8_0_neoni8mm, kvc_accumulate_q4_0_neoni8mm, kvc_accumulate_int8_neoni8mm;
extern kvc_pack_keys_fn kvc_pack_keys_q8_0_neondotprod, kvc_pack_keys_q8_0_neoni8mm;
extern kvc_pack_values_fn kvc_pack_values_q8_0_neondotprod, kvc_pack_values_q8_0_neoni8mm;
extern kvc_matmul_fn kvc_score_panels_neondotprod, kvc_score_panels_neoni8mm;
extern kvc_matmul_fn kvc_accumulate_panels_neondotprod, kvc_accumulate_panels_neoni8mm;

extern kvc_pack_bytes_fn kvc_pack_byte_keys_neondotprod, kvc_pack_byte_keys_neoni8mm;
extern kvc_pack_bytes_fn kvc_pack_byte_values_neondotprod, kvc_pack_byte_values_neoni8mm;
extern kvc_score_bytes_fn kvc_score_bytes_neondotprod, kvc_score_bytes_neoni8mm;
extern kvc_weigh_bytes_fn kvc_weigh_bytes_neondotprod;
extern kvc_sum_bytes_fn kvc_sum_bytes_neondotprod, kvc_sum_bytes_neoni8mm;

/* The largest number that is 256 * high + low, of two signed bytes, as are those of the opposite sign. */
#define KVC_LARGEST_DIGITS (127 * 256 + 127)

/* The kernels of a set that multiplies bytes (score_bytes.h, accumulate_bytes.h). */
#define KVC_NEON_BYTES(set)                                                                                          \
    .rank[KVC_INT8] = kvc_rank_int8_neondotprod, .sketch = kvc_sketch_neondotprod,                                   \
    .score[KVC_Q8_0] = {kvc_prepare_##set, kvc_score_q8_0_##set},                                                    \
    .score[KVC_Q4_0] = {kvc_prepare_##set, kvc_score_q4_0_##set},                                                    \
    .score[KVC_INT8] = {kvc_prepare_##set, kvc_score_int8_##set}, .accumulate[KVC_Q8_0] = kvc_accumulate_q8_0_##set, \
    .accumulate[KVC_Q4_0] = kvc_accumulate_q4_0_##set, .accumulate[KVC_INT8] = kvc_accumulate_int8_##set,            \
    .bytes = {kvc_pack_byte_keys_##set,    kvc_pack_byte_values_##set, kvc_score_bytes_##set,                        \
              kvc_weigh_bytes_neondotprod, kvc_sum_bytes_##set,        24},                                          \
    .tiler[KVC_Q8_0] = {.prepare = kvc_prepare_##set,                                                                \
                        .pack_keys = kvc_pack_keys_q8_0_##set,                                                       \
                        .pack_values = kvc_pack_values_q8_0_##set,                                                   \
                        .score = kvc_score_panels_##set,                                                             \
                        .accumulate = kvc_accumulate_panels_##set}

/* Scores of queries of f16. */
#define KVC_NEONFHM_F16 .score_16[KVC_F16] = {kvc_prepare_f16_neonfhm, kvc_score_f16_neonfhm}

/* Tiles of bf16, as floats. */
#define KVC_NEON_TILER_BF16 \
    .tiler[KVC_BF16] =      \
        KVC_FLOAT_TILER(kvc_scale_neon, kvc_pack_keys_bf16_neon, kvc_pack_values_bf16_neon, kvc_matmul_neon)

/* All but the name, and these. */
#define KVC_NEON_COMMON                                                                                               \
    .convert = kvc_convert_neon, .unpack = kvc_unpack_neon, .largest = kvc_largest_neon, .encode = kvc_encode_neon,   \
    .round = kvc_round_neon, .score[KVC_F32] = {kvc_scale_neon, kvc_score_f32_neon},                                  \
    .score[KVC_F16] = {kvc_scale_neon, kvc_score_f16_neon}, .score[KVC_BF16] = {kvc_scale_neon, kvc_score_bf16_neon}, \
    .accumulate[KVC_F32] = kvc_accumulate_f32_neon, .accumulate[KVC_F16] = kvc_accumulate_f16_neon,                   \
    .accumulate[KVC_BF16] = kvc_accumulate_bf16_neon,                                                                 \
    .tiler[KVC_F32] =                                                                                                 \
        KVC_FLOAT_TILER(kvc_scale_neon, kvc_pack_keys_f32_neon, kvc_pack_values_f32_neon, kvc_matmul_neon),           \
    .tiler[KVC_F16] =                                                                                                 \
        KVC_FLOAT_TILER(kvc_scale_neon, kvc_pack_keys_f16_neon, kvc_pack_values_f16_neon, kvc_matmul_neon),           \
    .matmul = kvc_matmul_neon, .softmax = kvc_softmax_neon, .times = kvc_times_neon, .scale = kvc_scale_neon,         \
    .hadamard = kvc_hadamard_neon, .make_sketches = kvc_make_sketches_neon, .weigh_pieces = kvc_weigh_pieces_neon,    \
    .rank[KVC_F32] = kvc_rank_f32_neon

#endif
