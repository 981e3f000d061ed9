/* target.h: attributes of the functions of an instruction set.  TARGET is defined before it is included.
 *
 * They may be unused: sets that take kernels from another one leave some so, of which Clang warns where the core is one
 * source. */
#include <stdint.h>

#include "base/dtype.h"

#if defined(__SANITIZE_ADDRESS__)
#define HAVE_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HAVE_ADDRESS_SANITIZER 1
#endif
#endif

#if defined(__OPTIMIZE__) && !defined(HAVE_ADDRESS_SANITIZER)
#define INLINE static inline __attribute__((always_inline, unused)) TARGET
#define RARE static __attribute__((cold, noinline)) TARGET
#define APART static __attribute__((noinline, unused)) TARGET
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#else /* for tests: with sanitizers, it would take minutes to compile a copy of each function for every use */
#define INLINE static inline __attribute__((unused)) TARGET
#define RARE static TARGET
#define APART static __attribute__((unused)) TARGET
#define UNROLL
#endif

/* A block's elements, a byte each. */
typedef uint8_t code_bytes __attribute__((vector_size(KVC_QUANT_ELEMENTS)));
