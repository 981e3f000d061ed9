/* compiler.h: macros for what compilers spell differently. */
#ifndef KVC_COMPILER_H
#define KVC_COMPILER_H

#if defined(_MSC_VER)
#define KVC_THREAD_LOCAL __declspec(thread)
#else
#define KVC_THREAD_LOCAL _Thread_local
#endif

/* Has the compiler check the arguments from number `first` on against the format, which is argument number `string`. */
#if defined(__GNUC__)
#define KVC_PRINTF(string, first) __attribute__((format(printf, string, first)))
#else
#define KVC_PRINTF(string, first)
#endif

#endif
