/* neonfhm.c: scores of f16 queries for AArch64 with products of f16 that are added to f32 (FHM, of most processors from
 * ARMv8.4 on), and the table, all else of which is as in neondotprod.c.
 *
 * FMLAL and FMLAL2 multiply and add the lower and the upper four of eight f16, exactly: scores have the bits of
 * neon.c's, where its queries are not rounded as they are scaled, and the dimension is a multiple of 4. */
#include "kernels/neon.h"

#ifdef KVC_HAVE_ARMV8_6
#if defined(__clang__)
#define TARGET __attribute__((target("fp16fml")))
#else
#define TARGET __attribute__((target("arch=armv8.2-a+fp16fml")))
#endif
#define HAS_DOT_16 1
#include "kernels/vector_neon.h"

/* The intrinsics are not there for one function in some compilers. */
INLINE vec b_dot(vec sum, bvec x, bvec y) {
    __asm__("fmlal %0.4s, %1.4h, %2.4h\n\tfmlal2 %0.4s, %1.4h, %2.4h" : "+w"(sum) : "w"(x), "w"(y));
    return sum;
}

#include "kernels/template.h"

DEFINE_PREPARE_16(kvc_prepare_f16_neonfhm)
DEFINE_SCORE_16(kvc_score_f16_neonfhm, KVC_F16)

const kvc_kernels kvc_kernels_neonfhm = {
    .name = "neonfhm",
    KVC_NEON_COMMON,
    KVC_NEON_TILER_BF16,
    KVC_NEON_BYTES(neondotprod),
    KVC_NEONFHM_F16,
};
#endif
