/* fuzz.h: what the fuzzers share.  Each is a function of an input; libFuzzer calls it, or replay.c. */
#ifndef KVC_TEST_FUZZ_H
#define KVC_TEST_FUZZ_H

#include "base/hash.h"
#include "support/isas.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Lets byte 0 of an input choose the instruction set, and those from `first` on decide instead of chance, which goes on
 * where they end. */
static inline void let_input_decide(const uint8_t *data, size_t size, size_t first) {
    setenv("KVCACHE_ISA", choose_isa(data[0]), 1);
    random_state = kvc_hash(data, size, 0);
    decisions = data + first;
    num_decisions = size - first;
}

/* Ends the process if a CHECK failed, as a fuzzer expects. */
static inline void fail_if_checks_failed(void) {
    fflush(stdout);
    if (test_failures) abort();
}

#endif
