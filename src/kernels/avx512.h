/* avx512.h: the kernels of AVX-512 that stand in the tables of several sets: those of avx512.c that compute in floats,
 * those of avx512vnni.c that multiply quantised rows as integers, and those of avx512bf16.c. */
#ifndef KVC_AVX512_H
#define KVC_AVX512_H

#include "kernels/kernels.h"

#define KVC_AVX512_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"

KVC_DECLARE_FLOATS(avx512);
extern kvc_prepare_fn kvc_prepare_bf16_avx512;
extern kvc_rank_fn kvc_rank_int8_avx512vnni, kvc_rank_bf16_avx512bf16;
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
#define KVC_AVX512_FLOATS KVC_FLOATS(avx512), KVC_ROWS(avx512, bf16, KVC_BF16, kvc_prepare_bf16_avx512)

/* Tilers that multiply panels of floats. */
#define KVC_AVX512_TILERS \
    KVC_PANELS(avx512, f32, KVC_F32), KVC_PANELS(avx512, f16, KVC_F16), KVC_PANELS(avx512, bf16, KVC_BF16)

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

#define KVC_AVX512VNNI_INTEGERS                                                                                    \
    .rank[KVC_INT8] = kvc_rank_int8_avx512vnni, KVC_ROWS(avx512vnni, q8_0, KVC_Q8_0, kvc_prepare_q8_0_avx512vnni), \
    KVC_ROWS(avx512vnni, q4_0, KVC_Q4_0, kvc_prepare_q4_0_avx512vnni),                                             \
    KVC_ROWS(avx512vnni, q4_1, KVC_Q4_1, kvc_prepare_q4_1_avx512vnni),                                             \
    KVC_ROWS(avx512vnni, q5_0, KVC_Q5_0, kvc_prepare_q5_0_avx512vnni),                                             \
    KVC_ROWS(avx512vnni, q5_1, KVC_Q5_1, kvc_prepare_q5_1_avx512vnni),                                             \
    KVC_ROWS(avx512vnni, iq4_nl, KVC_IQ4_NL, kvc_prepare_iq4_nl_avx512vnni),                                       \
    KVC_ROWS(avx512vnni, int8, KVC_INT8, kvc_prepare_scaled_avx512vnni),                                           \
    KVC_ROWS(avx512vnni, int6, KVC_INT6, kvc_prepare_scaled_avx512vnni),                                           \
    KVC_ROWS(avx512vnni, int4, KVC_INT4, kvc_prepare_scaled_avx512vnni)

#endif
