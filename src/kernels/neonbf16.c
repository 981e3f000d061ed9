/* neonbf16.c: scores of bf16 queries for AArch64 with dot products of bf16 (from ARMv8.6 on), and the table, all else
 * of which is as in neoni8mm.c.
 *
 * BFDOT adds two products to a lane.  These are exact, but denormals count as 0, and sums are rounded to odd: by less
 * than a unit in the last place, where others are off by up to half of one. */
#include "kernels/neon.h"

#ifdef KVC_HAVE_ARMV8_6
#if defined(__clang__)
#define TARGET __attribute__((target("bf16")))
#else
#define TARGET __attribute__((target("arch=armv8.2-a+bf16")))
#endif
#define HAS_DOT_16 1
#include "kernels/vector_neon.h"

/* The intrinsic is not there for one function in some compilers. */
INLINE vec b_dot(vec sum, bvec x, bvec y) {
    __asm__("bfdot %0.4s, %1.8h, %2.8h" : "+w"(sum) : "w"(x), "w"(y));
    return sum;
}

#include "kernels/template.h"

DEFINE_PREPARE_16(kvc_prepare_bf16_neonbf16)
DEFINE_SCORE_16(kvc_score_bf16_neonbf16, KVC_BF16)

const kvc_kernels kvc_kernels_neonbf16 = {
    .name = "neonbf16",
    KVC_NEON_COMMON,
    KVC_NEON_BYTES(neoni8mm),
    KVC_NEONFHM_F16,
    .score_16[KVC_BF16] = {kvc_prepare_bf16_neonbf16, kvc_score_bf16_neonbf16},
};
#endif
