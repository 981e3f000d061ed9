/* drive_faults.c: one thread calls, and each request for memory of each call fails once: then nothing has changed.
 *
 *     drive_faults --seed 1 --runs 10 --calls 100
 */
#define _DEFAULT_SOURCE
#include "clock.h"

int __wrap_clock_gettime(clockid_t which, struct timespec *now); /* clock.h */

int main(int argc, char **argv) {
    drive.faults = 2;
    return run_all(argc, argv, 100, run_alone);
}
