/* drive_thread.c: one thread calls.  Each answer is predicted, and everything that can be seen compared.
 *
 *     drive_thread --seed 1 --runs 100 --calls 400
 *
 * What fails is made shorter, and printed in C. */
#define _DEFAULT_SOURCE
#include "clock.h"

#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

int __wrap_clock_gettime(clockid_t which, struct timespec *now); /* clock.h */

static int fork_once(int (*check)(void)) {
    int status = -1;
    fflush(stdout);
    const pid_t child = fork();
    if (!child) {
        alarm(60);
        status = check();
        fflush(stdout);
        _exit(status);
    }
    return child > 0 && waitpid(child, &status, 0) == child ? status : 0;
}

int main(int argc, char **argv) {
    drive.fork = fork_once;
    drive.faults = 1;
    return run_all(argc, argv, 400, run_alone);
}
