/* avx2.c: the kernels for AVX2, FMA and F16C. */
#include "kernels/kernels.h"

#ifdef KVC_HAVE_AVX2
#define ISA avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#include "kernels/vector_avx2.h"
#include "kernels/template.h"
#endif
