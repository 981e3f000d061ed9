/* fuzz.h: what the fuzzers share.  Each is a function of an input; libFuzzer calls it, or replay.c. */
#ifndef KVC_TEST_FUZZ_H
#define KVC_TEST_FUZZ_H

#include "support/test.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Ends the process if a CHECK failed, as a fuzzer expects. */
static inline void fail_if_checks_failed(void) {
    fflush(stdout);
    if (test_failures) abort();
}

#endif
