/* fuzz_calls.c: an input decides what clients call, and what they look at.  The oracle answers each call
 * (oracle.h), and plain arithmetic each attention (looking.h).  The input names the instruction set.  Behind the end
 * of the input, chance goes on, so that short inputs lead far, too. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign, setenv */
#include "support/looking.h"

#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const int block_sizes[] = {1, 3, 16, 64};
    static pair p;
    static view v;
    static memory heap;
    if (size < 3) return 0;
    let_input_decide(data, size, 2);
    memory_init(&heap);
    p = (pair){.config.block_size = block_sizes[data[1] % 4], .memory = &heap, .look = data[1] & 4 ? look : NULL};
    random_pair(&p);
    for (int i = 0; i < 40; i++) {
        random_step(&p, &v);
        pair_check(&p);
    }
    view_free(&v, &p);
    pair_free(&p);
    num_decisions = 0;
    fail_if_checks_failed();
    return 0;
}
