/* avx512.h: the kernels of AVX-512 that stand in the tables of several sets: those of avx512.c that compute in floats,
 * those of avx512vnni.c that multiply quantised rows as integers, and those of avx512bf16.c. */
#ifndef KVC_AVX512_H
#define KVC_AVX512_H

#include "kernels/kernels.h"

#define KVC_AVX512_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"

extern kvc_convert_fn kvc_convert_avx512;
extern kvc_unpack_fn kvc_unpack_avx512;
extern kvc_largest_fn kvc_largest_avx512;
extern kvc_times_fn kvc_times_avx512;
extern kvc_encode_fn kvc_encode_avx512;
extern kvc_round_fn kvc_round_avx512;
extern kvc_score_fn kvc_score_f32_avx512, kvc_score_f16_avx512, kvc_score_bf16_avx512;
extern kvc_accumulate_fn kvc_accumulate_f32_avx512, kvc_accumulate_f16_avx512, kvc_accumulate_bf16_avx512;
extern kvc_pack_keys_fn kvc_pack_keys_f32_avx512, kvc_pack_keys_f16_avx512, kvc_pack_keys_bf16_avx512;
extern kvc_pack_values_fn kvc_pack_values_f32_avx512, kvc_pack_values_f16_avx512, kvc_pack_values_bf16_avx512;
extern kvc_prepare_fn kvc_scale_avx512, kvc_prepare_bf16_avx512;
extern kvc_softmax_fn kvc_softmax_avx512;
extern kvc_matmul_fn kvc_matmul_avx512;
extern kvc_hadamard_fn kvc_hadamard_avx512;
extern kvc_make_sketches_fn kvc_make_sketches_avx512;
extern kvc_weigh_pieces_fn kvc_weigh_pieces_avx512;
extern kvc_rank_fn kvc_rank_f32_avx512, kvc_rank_int8_avx512vnni, kvc_rank_bf16_avx512bf16;
extern kvc_sketch_fn kvc_sketch_avx512vnni;

extern kvc_prepare_fn kvc_prepare_q8_0_avx512vnni, kvc_prepare_q4_0_avx512vnni;
extern kvc_score_fn kvc_score_q8_0_avx512vnni, kvc_score_q4_0_avx512vnni;
extern kvc_accumulate_fn kvc_accumulate_q8_0_avx512vnni, kvc_accumulate_q4_0_avx512vnni;
extern kvc_prepare_fn kvc_prepare_scaled_avx512vnni;
extern kvc_score_fn kvc_score_int8_avx512vnni, kvc_score_int6_avx512vnni, kvc_score_int4_avx512vnni;
extern kvc_accumulate_fn kvc_accumulate_int8_avx512vnni, kvc_accumulate_int6_avx512vnni, kvc_accumulate_int4_avx512vnni;
extern kvc_prepare_fn kvc_prepare_q4_1_avx512vnni, kvc_prepare_q5_0_avx512vnni, kvc_prepare_q5_1_avx512vnni,
    kvc_prepare_iq4_nl_avx512vnni;
extern kvc_score_fn kvc_score_q4_1_avx512vnni, kvc_score_q5_0_avx512vnni, kvc_score_q5_1_avx512vnni,
    kvc_score_iq4_nl_avx512vnni;
extern kvc_accumulate_fn kvc_accumulate_q4_1_avx512vnni, kvc_accumulate_q5_0_avx512vnni, kvc_accumulate_q5_1_avx512vnni,
    kvc_accumulate_iq4_nl_avx512vnni;

extern kvc_pack_keys_fn kvc_pack_keys_q8_0_avx512vnni;
extern kvc_pack_values_fn kvc_pack_values_q8_0_avx512vnni;
extern kvc_matmul_fn kvc_score_panels_avx512vnni, kvc_accumulate_panels_avx512vnni;

extern kvc_convert_fn kvc_convert_avx512bf16;
extern kvc_prepare_fn kvc_prepare_bf16_avx512bf16;
extern kvc_score_fn kvc_score_bf16_avx512bf16;

/* What the tables of all these sets have in common, tilers and conversions aside. */
#define KVC_AVX512_FLOATS                                                                                           \
    .score[KVC_F32] = {kvc_scale_avx512, kvc_score_f32_avx512},                                                     \
    .score[KVC_F16] = {kvc_scale_avx512, kvc_score_f16_avx512},                                                     \
    .score[KVC_BF16] = {kvc_prepare_bf16_avx512, kvc_score_bf16_avx512},                                            \
    .accumulate[KVC_F32] = kvc_accumulate_f32_avx512, .accumulate[KVC_F16] = kvc_accumulate_f16_avx512,             \
    .accumulate[KVC_BF16] = kvc_accumulate_bf16_avx512, .matmul = kvc_matmul_avx512, .softmax = kvc_softmax_avx512, \
    .times = kvc_times_avx512, .scale = kvc_scale_avx512, .hadamard = kvc_hadamard_avx512,                          \
    .make_sketches = kvc_make_sketches_avx512, .weigh_pieces = kvc_weigh_pieces_avx512,                             \
    .rank[KVC_F32] = kvc_rank_f32_avx512

/* Tilers that multiply panels of floats. */
#define KVC_AVX512_TILER_F32 \
    .tiler[KVC_F32] =        \
        KVC_FLOAT_TILER(kvc_scale_avx512, kvc_pack_keys_f32_avx512, kvc_pack_values_f32_avx512, kvc_matmul_avx512)
#define KVC_AVX512_TILERS                                                                                           \
    .tiler[KVC_F16] =                                                                                               \
        KVC_FLOAT_TILER(kvc_scale_avx512, kvc_pack_keys_f16_avx512, kvc_pack_values_f16_avx512, kvc_matmul_avx512), \
    .tiler[KVC_BF16] =                                                                                              \
        KVC_FLOAT_TILER(kvc_scale_avx512, kvc_pack_keys_bf16_avx512, kvc_pack_values_bf16_avx512, kvc_matmul_avx512)

extern kvc_pack_keys_fn kvc_pack_keys_int8_avx512vnni, kvc_pack_keys_int6_avx512vnni, kvc_pack_keys_int4_avx512vnni;
extern kvc_pack_values_fn kvc_pack_values_int8_avx512vnni, kvc_pack_values_int6_avx512vnni,
    kvc_pack_values_int4_avx512vnni;
extern kvc_matmul_fn kvc_score_scaled_avx512vnni, kvc_accumulate_scaled_avx512vnni;

/* Multiplies quantised rows as integers: those with one scale a row as they are, others as q8_0. */
#define KVC_SCALED_TILER(type)                           \
    {.prepare = kvc_prepare_scaled_avx512vnni,           \
     .pack_keys = kvc_pack_keys_##type##_avx512vnni,     \
     .pack_values = kvc_pack_values_##type##_avx512vnni, \
     .score = kvc_score_scaled_avx512vnni,               \
     .accumulate = kvc_accumulate_scaled_avx512vnni}
#define KVC_AVX512VNNI_TILER                                                              \
    .tiler[KVC_INT8] = KVC_SCALED_TILER(int8), .tiler[KVC_INT6] = KVC_SCALED_TILER(int6), \
    .tiler[KVC_INT4] = KVC_SCALED_TILER(int4),                                            \
    .tiler[KVC_Q8_0] = {.prepare = kvc_prepare_q8_0_avx512vnni,                           \
                        .pack_keys = kvc_pack_keys_q8_0_avx512vnni,                       \
                        .pack_values = kvc_pack_values_q8_0_avx512vnni,                   \
                        .score = kvc_score_panels_avx512vnni,                             \
                        .accumulate = kvc_accumulate_panels_avx512vnni}
extern kvc_pack_bytes_fn kvc_pack_byte_keys_avx512vnni, kvc_pack_byte_values_avx512vnni;
extern kvc_score_bytes_fn kvc_score_bytes_avx512vnni;
extern kvc_weigh_bytes_fn kvc_weigh_bytes_avx512vnni;
extern kvc_sum_bytes_fn kvc_sum_bytes_avx512vnni;

/* Prompts in bytes. */
#define KVC_AVX512VNNI_BYTES                                                                              \
    .bytes = {kvc_pack_byte_keys_avx512vnni, kvc_pack_byte_values_avx512vnni, kvc_score_bytes_avx512vnni, \
              kvc_weigh_bytes_avx512vnni,    kvc_sum_bytes_avx512vnni,        24}

#define KVC_AVX512VNNI_INTEGERS                                                                                     \
    .rank[KVC_INT8] = kvc_rank_int8_avx512vnni,                                                                     \
    .score[KVC_Q8_0] = {kvc_prepare_q8_0_avx512vnni, kvc_score_q8_0_avx512vnni},                                    \
    .score[KVC_Q4_0] = {kvc_prepare_q4_0_avx512vnni, kvc_score_q4_0_avx512vnni},                                    \
    .accumulate[KVC_Q8_0] = kvc_accumulate_q8_0_avx512vnni, .accumulate[KVC_Q4_0] = kvc_accumulate_q4_0_avx512vnni, \
    .score[KVC_Q4_1] = {kvc_prepare_q4_1_avx512vnni, kvc_score_q4_1_avx512vnni},                                    \
    .score[KVC_Q5_0] = {kvc_prepare_q5_0_avx512vnni, kvc_score_q5_0_avx512vnni},                                    \
    .score[KVC_Q5_1] = {kvc_prepare_q5_1_avx512vnni, kvc_score_q5_1_avx512vnni},                                    \
    .score[KVC_IQ4_NL] = {kvc_prepare_iq4_nl_avx512vnni, kvc_score_iq4_nl_avx512vnni},                              \
    .score[KVC_INT8] = {kvc_prepare_scaled_avx512vnni, kvc_score_int8_avx512vnni},                                  \
    .score[KVC_INT6] = {kvc_prepare_scaled_avx512vnni, kvc_score_int6_avx512vnni},                                  \
    .score[KVC_INT4] = {kvc_prepare_scaled_avx512vnni, kvc_score_int4_avx512vnni},                                  \
    .accumulate[KVC_INT8] = kvc_accumulate_int8_avx512vnni, .accumulate[KVC_INT6] = kvc_accumulate_int6_avx512vnni, \
    .accumulate[KVC_INT4] = kvc_accumulate_int4_avx512vnni, .accumulate[KVC_Q4_1] = kvc_accumulate_q4_1_avx512vnni, \
    .accumulate[KVC_Q5_0] = kvc_accumulate_q5_0_avx512vnni, .accumulate[KVC_Q5_1] = kvc_accumulate_q5_1_avx512vnni, \
    .accumulate[KVC_IQ4_NL] = kvc_accumulate_iq4_nl_avx512vnni

#endif
