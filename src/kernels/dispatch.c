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

/* F16C is asked of cpuid, as not all compilers know its name; that the system saves the registers is part of the
 * answer for AVX2, which uses the same. */
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
#endif

#ifdef KVC_HAVE_AMX
#include <sys/syscall.h>
#include <unistd.h>

/* The tile registers are large, so Linux (5.16 on) has every process ask for them. */
static int has_amx(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18, AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24 };
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && edx & AMX_BF16 && edx & AMX_TILE &&
           !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
}
#endif

/* 1 where that was faster: on AMD's processors with 48 KiB of L1 cache (Zen 5), which the tile that is read and the one
 * that is asked for do not fill.  With 32 KiB it was not (Zen 3).  Others do not know this leaf. */
int kvc_cpu_prefetch_level(void) {
#ifdef KVC_HAVE_AVX2
    unsigned eax, ebx, ecx, edx;
    if (__get_cpuid(0x80000005, &eax, &ebx, &ecx, &edx) && ecx >> 24 >= 48) return 1;
#endif
    return 2;
}

const kvc_kernels *kvc_cpu_kernels(const char **wanted) {
    const kvc_kernels *tables[6]; /* that this machine can run, best last */
    int num_tables = 0;
    tables[num_tables++] = &kvc_kernels_scalar;
#ifdef KVC_HAVE_AVX2
    if (has_avx2()) tables[num_tables++] = &kvc_kernels_avx2;
#endif
#ifdef KVC_HAVE_AVX512
    const int has_both = has_avx2() && has_avx512();
    if (has_both) tables[num_tables++] = &kvc_kernels_avx512;
    const int has_vnni = has_both && __builtin_cpu_supports("avx512vnni");
    if (has_vnni) tables[num_tables++] = &kvc_kernels_avx512vnni;
#ifdef KVC_HAVE_AVX512_BF16
    const int has_bf16 = has_vnni && __builtin_cpu_supports("avx512bf16");
    if (has_bf16) tables[num_tables++] = &kvc_kernels_avx512bf16;
#ifdef KVC_HAVE_AMX
    if (has_bf16 && has_amx()) tables[num_tables++] = &kvc_kernels_amx;
#endif
#endif
#endif
#ifdef KVC_HAVE_NEON
    tables[num_tables++] = &kvc_kernels_neon; /* what was compiled for AArch64 uses it anyway */
#endif

    const char *name = getenv("KVCACHE_ISA");
    if (!name || !*name) return tables[num_tables - 1];
    for (int i = 0; i < num_tables; i++)
        if (!strcmp(name, tables[i]->name)) return tables[i];
    *wanted = name;
    return NULL;
}
