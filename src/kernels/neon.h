/* neon.h: the kernels of neon.c that stand in the tables of several sets. */
#ifndef KVC_NEON_H
#define KVC_NEON_H

#include "kernels/kernels.h"

KVC_DECLARE_FLOATS(neon);
extern kvc_accumulate_fn kvc_accumulate_q8_0_neon, kvc_accumulate_q4_0_neon, kvc_accumulate_int8_neon;
extern kvc_rank_fn kvc_rank_int8_neondotprod;
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
#define KVC_NEON_BYTES(set)                                                                             \
    .rank[KVC_INT8] = kvc_rank_int8_neondotprod, .sketch = kvc_sketch_neondotprod,                      \
    KVC_ROWS(set, q8_0, KVC_Q8_0, kvc_prepare_##set), KVC_ROWS(set, q4_0, KVC_Q4_0, kvc_prepare_##set), \
    KVC_ROWS(set, int8, KVC_INT8, kvc_prepare_##set),                                                   \
    .bytes = {kvc_pack_byte_keys_##set,    kvc_pack_byte_values_##set, kvc_score_bytes_##set,           \
              kvc_weigh_bytes_neondotprod, kvc_sum_bytes_##set,        24},                             \
    .tiler[KVC_Q8_0] = {.prepare = kvc_prepare_##set,                                                   \
                        .pack_keys = kvc_pack_keys_q8_0_##set,                                          \
                        .pack_values = kvc_pack_values_q8_0_##set,                                      \
                        .score = kvc_score_panels_##set,                                                \
                        .accumulate = kvc_accumulate_panels_##set}

/* Scores of queries of f16. */
#define KVC_NEONFHM_F16 .score_16[KVC_F16] = {kvc_prepare_f16_neonfhm, kvc_score_f16_neonfhm}

/* Tiles of bf16, as floats. */
#define KVC_NEON_TILER_BF16 KVC_PANELS(neon, bf16, KVC_BF16)

/* All but the name, and these. */
#define KVC_NEON_COMMON                                                                            \
    .convert = kvc_convert_neon, KVC_FLOATS(neon), KVC_ROWS(neon, bf16, KVC_BF16, kvc_scale_neon), \
    KVC_PANELS(neon, f32, KVC_F32), KVC_PANELS(neon, f16, KVC_F16)

#endif
