/* avx512vnni.c: the vector kernels for AVX-512 with dot products of integers. */
#include "kernels/kernels.h"

#ifdef KVC_HAVE_AVX512
#define ISA avx512vnni
#define FLOATS avx512
#define TARGET __attribute__((target("avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#define DOT 1
#include "kernels/vector_avx512.h"
#include "kernels/template.h"
#endif
