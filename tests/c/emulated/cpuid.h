/* cpuid.h: has dispatch.c believe that the processor has all instruction sets of x86 that there are kernels for. */
#pragma GCC system_header
#include_next <cpuid.h>
#include <unistd.h>

#define KVC_NO_ASSEMBLY 1 /* asks which registers the system saves */
#define __get_cpuid_count(leaf, subleaf, a, b, c, d) (*(a) = *(b) = *(c) = *(d) = ~0u, 1)
#define syscall(...) 0 /* asks Linux for the tile registers */
