/* drive_fuzz.c: bytes decide which calls one thread makes, and with which arguments.
 *
 *     drive_fuzz --seed 1 --runs 100    random bytes
 *
 * libFuzzer calls LLVMFuzzerTestOneInput: compile with -fsanitize=fuzzer -DFUZZER. */
#define _DEFAULT_SOURCE
#include "clock.h"

#include <stdlib.h>

int __wrap_clock_gettime(clockid_t which, struct timespec *now); /* clock.h */

enum { MOST_CALLS = 200, BYTES = 4096 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    client own = {.chance = {.state = size, .bytes = data, .num_bytes = size}};
    me = &own;
    drive = (driver){0};
    forget_texts();
    make_world(size, 1, 0);
    for (int i = 0; i < MOST_CALLS && own.chance.num_bytes; i++) play();
    look_around();
    end_world();
    return 0;
}

#ifndef FUZZER
static int run(uint64_t seed, int num_bytes) {
    uint8_t *bytes = malloc((size_t)num_bytes);
    client own = {.chance = {.state = seed}};
    me = &own;
    for (int i = 0; i < num_bytes; i++) bytes[i] = (uint8_t)(pick(4) ? pick(256) : 0);
    const int failed = LLVMFuzzerTestOneInput(bytes, (size_t)num_bytes);
    free(bytes);
    return failed;
}

int main(int argc, char **argv) { return run_all(argc, argv, BYTES, run); }
#endif
