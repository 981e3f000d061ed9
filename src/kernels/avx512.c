/* avx512.c: the vector kernels for AVX-512 (F, BW, DQ, VL). */
#include "kernels/kernels.h"

#ifdef KVC_HAVE_AVX512
#define ISA avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#define DOT 0
#include "kernels/vector_avx512.h"
#include "kernels/template.h"
#endif
