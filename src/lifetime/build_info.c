/* build_info.c: the public functions that say what this library is: its version, build and instruction set. */
#include "base/openmp.h"
#include "kernels/dispatch.h"
#include "kvcache.h"

int32_t kvc_version(void) { return KVC_VERSION_MAJOR * 1000000 + KVC_VERSION_MINOR * 1000 + KVC_VERSION_PATCH; }

const char *kvc_build_info(void) {
#define STRING_OF(x) #x
#define STRING(x) STRING_OF(x)
    return "kvcache " STRING(KVC_VERSION_MAJOR) "." STRING(KVC_VERSION_MINOR) "." STRING(KVC_VERSION_PATCH)
#if defined(__clang__)
        ", clang " __clang_version__
#elif defined(__GNUC__)
        ", gcc " __VERSION__
#endif
        ", " KVC_KERNEL_NAMES ", " KVC_OPENMP_NAME;
#undef STRING
#undef STRING_OF
}

const char *kvc_isa(void) {
    const char *wanted;
    const kvc_kernels *kernels = kvc_cpu_kernels(&wanted);
    return kernels ? kernels->name : NULL;
}
