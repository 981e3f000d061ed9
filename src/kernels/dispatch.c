/* dispatch.c: looks at the processor and the environment.
 *
 * A set is the kernels for some instructions.  A has_ function says whether the processor has what a set needs beside
 * the sets before it in SETS.  On x86, cpuid is the instruction that lists features, as bits, page by page (leaf).
 */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* syscall */
#endif
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "base/environment.h"
#include "kernels/dispatch.h"

/* Asks a question about the machine once, as cpuid takes microseconds in a virtual one.  An answer below 0, "not now",
 * is no, and not kept.  known: the answer so far; threads that ask at once find the same. */
static int ask_once(atomic_int *known, int (*question)(void)) {
    enum { NOT_KNOWN, NO, YES };
    int answer = atomic_load_explicit(known, memory_order_relaxed);
    if (answer == NOT_KNOWN) {
        const int found = question();
        if (found < 0) return 0;
        answer = found ? YES : NO;
        atomic_store_explicit(known, answer, memory_order_relaxed);
    }
    return answer == YES;
}

#ifdef KVC_HAVE_AVX2
#include <cpuid.h>

/* Returns which registers the system saves, as bits of XCR0.  __builtin_cpu_supports would know, but reads a table of
 * the compiler's runtime, which stays empty in Zig's. */
static unsigned saved_registers(void) {
#ifdef KVC_NO_ASSEMBLY
    return ~0u;
#else
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_OSXSAVE)) return 0;
    __asm__ volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
    return eax;
#endif
}

static int has_avx2(void) {
    enum { XMM_YMM = 0x6, ARITHMETIC = bit_FMA | bit_F16C };
    unsigned eax, ebx, ecx, edx;
    return (saved_registers() & XMM_YMM) == XMM_YMM && __get_cpuid(1, &eax, &ebx, &ecx, &edx) &&
           (ecx & ARITHMETIC) == ARITHMETIC && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx & bit_AVX2);
}
#endif

#ifdef KVC_HAVE_AVX_VNNI
static int has_avxvnni(void) {
    enum { AVX_VNNI = 1 << 4 };
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & AVX_VNNI);
}
#endif

#ifdef KVC_HAVE_AVX512
static int has_avx512(void) {
    const unsigned sets = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    unsigned eax, ebx, ecx, edx;
#if !defined(__APPLE__) /* macOS saves them from their first use on */
    enum { MASKS_ZMM = 0xe0 };
    if ((saved_registers() & MASKS_ZMM) != MASKS_ZMM) return 0;
#endif
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx & sets) == sets;
}

static int has_avx512vnni(void) {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ecx & bit_AVX512VNNI);
}

static int has_avx512vbmi(void) {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ecx & bit_AVX512VBMI);
}

int kvc_cpu_has_avx512vbmi(void) {
    static atomic_int known;
    return ask_once(&known, has_avx512vbmi);
}
#endif

#ifdef KVC_HAVE_AVX512_BF16
static int has_avx512bf16(void) {
    enum { AVX512_BF16 = 1 << 5 };
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & AVX512_BF16);
}
#endif

#ifdef KVC_HAVE_AMX
#include <sys/syscall.h>
#include <unistd.h>

/* Asks Linux (5.16 on) for the tile registers, which are so large that every process has to.  They are refused while a
 * thread has a stack for signals that is too small for them. */
static int has_amx(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    const unsigned bf16 = 1 << 22, tile = 1 << 24, int8 = 1 << 25, all = bf16 | tile | int8;
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & all) != all) return 0;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) ? -1 : 1; /* -1: not now */
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
 * runs those before.  A machine may lack a set that is aside, and run later ones. */
static const struct {
    const kvc_kernels *kernels;
    int (*runs)(void);
    int is_aside;
} SETS[] = {
    {&kvc_kernels_scalar, always, 0},
#ifdef KVC_HAVE_AVX2
    {&kvc_kernels_avx2, has_avx2, 0},
#endif
#ifdef KVC_HAVE_AVX_VNNI
    {&kvc_kernels_avxvnni, has_avxvnni, 1},
#endif
#ifdef KVC_HAVE_AVX512
    {&kvc_kernels_avx512, has_avx512, 0},
    {&kvc_kernels_avx512vnni, has_avx512vnni, 0},
#endif
#ifdef KVC_HAVE_AVX512_BF16
    {&kvc_kernels_avx512bf16, has_avx512bf16, 0},
#endif
#ifdef KVC_HAVE_AMX
    {&kvc_kernels_amx, has_amx, 0},
    {&kvc_kernels_amxfp16, has_amxfp16, 0},
#endif
#ifdef KVC_HAVE_NEON
    {&kvc_kernels_neon, always, 0}, /* what is compiled for AArch64 uses NEON anyway */
    {&kvc_kernels_neondotprod, has_dotprod, 0},
#endif
#ifdef KVC_HAVE_ARMV8_6
    {&kvc_kernels_neonfhm, has_fhm, 0},
    {&kvc_kernels_neoni8mm, has_i8mm, 0},
    {&kvc_kernels_neonbf16, has_bf16, 0},
#endif
};

enum { NUM_SETS = sizeof SETS / sizeof *SETS };

const kvc_kernels *kvc_cpu_kernels(const char **wanted) {
    static atomic_int known[NUM_SETS];
    const char *name = kvc_environment("KVCACHE_ISA");
    const kvc_kernels *best = NULL;
    for (size_t i = 0; i < NUM_SETS; i++) {
        if (!ask_once(&known[i], SETS[i].runs)) {
            if (SETS[i].is_aside) continue;
            break;
        }
        best = SETS[i].kernels;
        if (name && !strcmp(name, best->name)) return best;
    }
    if (!name || !*name) return best;
    *wanted = name;
    return NULL;
}

/* Whether the processor is AMD's and has 48 KiB of L1 cache (Zen 5).  Others do not know this leaf of cpuid. */
static int has_large_l1(void) {
#ifdef KVC_HAVE_AVX2
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(0x80000005, &eax, &ebx, &ecx, &edx) && ecx >> 24 >= 48;
#else
    return 0;
#endif
}

/* 1 if the tile being read and the next one fit the L1 cache: that was faster with 48 KiB, not with 32 KiB (Zen 3). */
int kvc_cpu_prefetch_level(void) {
    static atomic_int known;
    return ask_once(&known, has_large_l1) ? 1 : 2;
}
