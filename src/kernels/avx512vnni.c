/* avx512vnni.c: the kernels for AVX-512 with dot products of integers, and their table. */
#include "kernels/kernels.h"

#ifdef KVC_HAVE_AVX512
#include "kernels/avx512.h"
#define TARGET __attribute__((target("avx512vnni," KVC_AVX512_TARGET)))
#define HAS_VNNI 1
#include "kernels/vector_avx512.h"
#include "kernels/template.h"

DEFINE_PREPARE(kvc_prepare_q8_0_avx512vnni, KVC_Q8_0)
DEFINE_PREPARE(kvc_prepare_q4_0_avx512vnni, KVC_Q4_0)
DEFINE_SCORE(kvc_score_q8_0_avx512vnni, KVC_Q8_0)
DEFINE_SCORE(kvc_score_q4_0_avx512vnni, KVC_Q4_0)
DEFINE_ACCUMULATE(kvc_accumulate_q8_0_avx512vnni, KVC_Q8_0)
DEFINE_ACCUMULATE(kvc_accumulate_q4_0_avx512vnni, KVC_Q4_0)
DEFINE_PREPARE_CODES(kvc_prepare_q4_1_avx512vnni, KVC_Q4_1)
DEFINE_PREPARE_CODES(kvc_prepare_q5_0_avx512vnni, KVC_Q5_0)
DEFINE_PREPARE_CODES(kvc_prepare_q5_1_avx512vnni, KVC_Q5_1)
DEFINE_PREPARE_CODES(kvc_prepare_iq4_nl_avx512vnni, KVC_IQ4_NL)
DEFINE_SCORE_CODES(kvc_score_q4_1_avx512vnni, KVC_Q4_1)
DEFINE_SCORE_CODES(kvc_score_q5_0_avx512vnni, KVC_Q5_0)
DEFINE_SCORE_CODES(kvc_score_q5_1_avx512vnni, KVC_Q5_1)
DEFINE_SCORE_CODES(kvc_score_iq4_nl_avx512vnni, KVC_IQ4_NL)
DEFINE_ACCUMULATE_CODES(kvc_accumulate_q4_1_avx512vnni, KVC_Q4_1)
DEFINE_ACCUMULATE_CODES(kvc_accumulate_q5_0_avx512vnni, KVC_Q5_0)
DEFINE_ACCUMULATE_CODES(kvc_accumulate_q5_1_avx512vnni, KVC_Q5_1)
DEFINE_ACCUMULATE_CODES(kvc_accumulate_iq4_nl_avx512vnni, KVC_IQ4_NL)

const kvc_kernels kvc_kernels_avx512vnni = {
    .name = "avx512vnni",
    .convert = kvc_convert_avx512,
    .unpack = kvc_unpack_avx512,
    KVC_AVX512_FLOATS,
    KVC_AVX512_TILER_F32,
    KVC_AVX512_TILERS,
    KVC_AVX512VNNI_INTEGERS,
};
#endif
