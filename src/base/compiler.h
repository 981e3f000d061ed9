/* compiler.h: macros for what compilers spell differently. */
#ifndef KVC_COMPILER_H
#define KVC_COMPILER_H

#if defined(_MSC_VER)
#define KVC_THREAD_LOCAL __declspec(thread)
#else
#define KVC_THREAD_LOCAL _Thread_local
#endif

/* Has the compiler check the arguments from number `first` on against the format, which is argument number `string`.
 * On Windows GCC would take `printf` for Microsoft's old one, which MinGW calls in C89 alone. */
#if defined(__MINGW32__) && !defined(__clang__)
#define KVC_PRINTF(string, first) __attribute__((format(gnu_printf, string, first)))
#elif defined(__GNUC__)
#define KVC_PRINTF(string, first) __attribute__((format(printf, string, first)))
#else
#define KVC_PRINTF(string, first)
#endif

/* Tells GCC that `release` frees what the function returns, in its argument of this number: -fanalyzer then finds
 * leaks, uses after that, and allocations that nobody checks. */
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
#define KVC_FREED_BY(release, argument) __attribute__((__malloc__(release, argument)))
#else
#define KVC_FREED_BY(release, argument)
#endif

/* For functions whose callers make constants of their arguments, which compilers would not inline for their size. */
#if defined(__GNUC__)
#define KVC_INLINE static inline __attribute__((always_inline))
#else
#define KVC_INLINE static inline
#endif

/* For a function of a header that the core does not call: Clang warns of it where the core is one file. */
#if defined(__GNUC__)
#define KVC_UNUSED __attribute__((unused))
#else
#define KVC_UNUSED
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
enum { KVC_IS_BIG_ENDIAN = 1 };
#else
enum { KVC_IS_BIG_ENDIAN = 0 };
#endif

/* Whether to take a rare way here.  It is right at any time: the simulation of tests/world takes it now and then,
 * everyone else never. */
#if !defined(KVC_BUGGIFY)
#define KVC_BUGGIFY() 0
#endif

/* A size from which on the core goes another way.  The simulation, whose sequences are short, has the second one. */
#if !defined(KVC_SIZE)
#define KVC_SIZE(usual, simulated) (usual)
#endif

#endif
