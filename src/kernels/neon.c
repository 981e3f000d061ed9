/* neon.c: the kernels for AArch64, with what every such processor has (base ARMv8-A). */
#include "kernels/kernels.h"

#ifdef KVC_HAVE_NEON
#define ISA neon
#define TARGET
#include "kernels/vector_neon.h"
#include "kernels/template.h"
#endif
