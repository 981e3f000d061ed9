/* compiler.h: what compilers spell differently. */
#ifndef KVC_COMPILER_H
#define KVC_COMPILER_H

#if defined(_MSC_VER)
#define KVC_THREAD_LOCAL __declspec(thread)
#else
#define KVC_THREAD_LOCAL _Thread_local
#endif

/* Has the compiler check the arguments of a function that takes a format, as its argument number `string`. */
#if defined(__GNUC__)
#define KVC_PRINTF(string, first) __attribute__((format(printf, string, first)))
#else
#define KVC_PRINTF(string, first)
#endif

#endif
