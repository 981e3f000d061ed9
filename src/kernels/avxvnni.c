/* avxvnni.c: kernels that multiply integers, for processors with AVX2 and its dot products of integers (AVX-VNNI), and
 * the table, all else of which is as in avx2.c. */
#include "kernels/avx2.h"

#ifdef KVC_HAVE_AVX_VNNI
#define TARGET __attribute__((target("avxvnni," KVC_AVX2_TARGET)))
#define HAS_AVX_VNNI 1
#include "kernels/vector_avx2.h"
#include "kernels/template.h"

enum { BYTE_QUERIES = 3 };

/* Rounds 32 floats to bytes.  Packs work within halves of 128 bits, so the int32 are put in order afterwards. */
INLINE void store_weights(void *p, const vec x[EXPS]) {
    const __m256i in_turns = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i low = _mm256_packs_epi32(_mm256_cvtps_epi32(x[0]), _mm256_cvtps_epi32(x[1])); /* half by half */
    const __m256i high = _mm256_packs_epi32(_mm256_cvtps_epi32(x[2]), _mm256_cvtps_epi32(x[3]));
    i_store(p, _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), in_turns));
}

#include "kernels/multiply_bytes.h"

extern kvc_pack_bytes_fn kvc_pack_byte_keys_avxvnni, kvc_pack_byte_values_avxvnni;
extern kvc_score_bytes_fn kvc_score_bytes_avxvnni;
extern kvc_weigh_bytes_fn kvc_weigh_bytes_avxvnni;
extern kvc_sum_bytes_fn kvc_sum_bytes_avxvnni;

DEFINE_BYTES(avxvnni)

DEFINE_ROWS(avxvnni, q8_0, KVC_Q8_0)
DEFINE_ROWS(avxvnni, int8, KVC_INT8)

const kvc_kernels kvc_kernels_avxvnni = {
    .name = "avxvnni",
    KVC_AVX2_COMMON,
    .score[KVC_Q8_0] = {kvc_prepare_q8_0_avx2, kvc_score_q8_0_avxvnni},
    .score[KVC_INT8] = {kvc_prepare_q8_0_avx2, kvc_score_int8_avxvnni},
    .accumulate[KVC_Q8_0] = kvc_accumulate_q8_0_avxvnni,
    .accumulate[KVC_INT8] = kvc_accumulate_int8_avxvnni,
    .bytes = {kvc_pack_byte_keys_avxvnni, kvc_pack_byte_values_avxvnni, kvc_score_bytes_avxvnni,
              kvc_weigh_bytes_avxvnni, kvc_sum_bytes_avxvnni, 24},
};
#endif
