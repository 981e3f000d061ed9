/* dispatch.c: looks at the processor and the environment. */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* syscall */
#endif
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/dispatch.h"

#ifdef KVC_HAVE_AVX2
#include <cpuid.h>

/* Asks cpuid for F16C, whose name not all compilers know.  That the system saves the registers is part of the answer
 * for AVX2, which uses the same. */
static int has_avx2(void) {
    unsigned eax, ebx, ecx, edx;
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &eax, &ebx, &ecx, &edx) &&
           (ecx & bit_F16C);
}
#endif

#ifdef KVC_HAVE_AVX512
static int has_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

static int has_avx512vnni(void) { return __builtin_cpu_supports("avx512vnni") != 0; }
#endif

#ifdef KVC_HAVE_AVX512_BF16
static int has_avx512bf16(void) { return __builtin_cpu_supports("avx512bf16") != 0; }
#endif

#ifdef KVC_HAVE_AMX
#include <sys/syscall.h>
#include <unistd.h>

/* Asks Linux (5.16 on) for the tile registers, which are so large that every process has to. */
static int has_amx(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18, AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24 };
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && edx & AMX_BF16 && edx & AMX_TILE &&
           !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
}

static int has_amxfp16(void) {
    enum { AMX_FP16 = 1 << 21 };
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && eax & AMX_FP16;
}
#endif

#ifdef KVC_HAVE_NEON
/* Whether the processor has a feature: by its bit in AT_HWCAP or AT_HWCAP2, whose names older headers of Linux lack, or
 * by macOS's name, which macOS 11 knows of what all its processors have. */
#if defined(__linux__)
#include <sys/auxv.h>
#define HAS_FEATURE(type, bit, name) ((int)(getauxval(type) >> (bit) & 1))
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#define HAS_FEATURE(type, bit, name) has_name("hw.optional." name)

static int has_name(const char *name) {
    int has = 0;
    size_t size = sizeof has;
    return sysctlbyname(name, &has, &size, NULL, 0) == 0 && has;
}
#else
#define HAS_FEATURE(type, bit, name) 0
#endif

static int has_dotprod(void) { return HAS_FEATURE(AT_HWCAP, 20, "arm64"); }
#endif

#ifdef KVC_HAVE_ARMV8_6
static int has_fhm(void) { return HAS_FEATURE(AT_HWCAP, 23, "armv8_2_fhm"); }

static int has_i8mm(void) { return HAS_FEATURE(AT_HWCAP2, 13, "arm.FEAT_I8MM"); }

static int has_bf16(void) { return HAS_FEATURE(AT_HWCAP2, 14, "arm.FEAT_BF16"); }
#endif

static int always(void) { return 1; }

/* Lists the sets of this build, of which later ones are preferred, each with a test whether this machine runs it if it
 * runs those before. */
static const struct {
    const kvc_kernels *kernels;
    int (*runs)(void);
} SETS[] = {
    {&kvc_kernels_scalar, always},
#ifdef KVC_HAVE_AVX2
    {&kvc_kernels_avx2, has_avx2},
#endif
#ifdef KVC_HAVE_AVX512
    {&kvc_kernels_avx512, has_avx512},
    {&kvc_kernels_avx512vnni, has_avx512vnni},
#endif
#ifdef KVC_HAVE_AVX512_BF16
    {&kvc_kernels_avx512bf16, has_avx512bf16},
#endif
#ifdef KVC_HAVE_AMX
    {&kvc_kernels_amx, has_amx},
    {&kvc_kernels_amxfp16, has_amxfp16},
#endif
#ifdef KVC_HAVE_NEON
    {&kvc_kernels_neon, always}, /* what is compiled for AArch64 uses NEON anyway */
    {&kvc_kernels_neondotprod, has_dotprod},
#endif
#ifdef KVC_HAVE_ARMV8_6
    {&kvc_kernels_neonfhm, has_fhm},
    {&kvc_kernels_neoni8mm, has_i8mm},
    {&kvc_kernels_neonbf16, has_bf16},
#endif
};

const kvc_kernels *kvc_cpu_kernels(const char **wanted) {
    const char *name = getenv("KVCACHE_ISA");
    const kvc_kernels *best = NULL;
    for (size_t i = 0; i < sizeof SETS / sizeof *SETS && SETS[i].runs(); i++) {
        best = SETS[i].kernels;
        if (name && !strcmp(name, best->name)) return best;
    }
    if (!name || !*name) return best;
    *wanted = name;
    return NULL;
}

/* 1 on AMD's processors with 48 KiB of L1 cache (Zen 5), which the tile being read and the next one do not fill: it was
 * faster there, and not with 32 KiB (Zen 3).  Other processors do not know this leaf of cpuid. */
int kvc_cpu_prefetch_level(void) {
#ifdef KVC_HAVE_AVX2
    unsigned eax, ebx, ecx, edx;
    if (__get_cpuid(0x80000005, &eax, &ebx, &ecx, &edx) && ecx >> 24 >= 48) return 1;
#endif
    return 2;
}
