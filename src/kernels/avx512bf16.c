/* avx512bf16.c: the vector kernels for AVX-512 with dot products of integers and of bf16; and with products of tiles.
 */
#include "kernels/kernels.h"

#ifdef KVC_HAVE_AVX512_BF16
#define ISA avx512bf16
#define FLOATS avx512
#define INTEGERS avx512vnni
#define TARGET __attribute__((target("avx512bf16,avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#define DOT 1
#define DOT_BF16 1
#include "kernels/vector_avx512.h"
#include "kernels/template.h"
#endif

#ifdef KVC_HAVE_AMX
#undef TARGET
#define TARGET                                                                                                   \
    __attribute__((target("amx-tile,amx-bf16,avx512bf16,avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma," \
                          "f16c")))
#include "kernels/amx.h"
#endif
