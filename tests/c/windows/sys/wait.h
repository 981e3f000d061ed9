/* sys/wait.h: never called, as there is no fork(). */
#ifndef TEST_WINDOWS_WAIT_H
#define TEST_WINDOWS_WAIT_H

#include <stdlib.h>
#include <sys/types.h>

#define WIFEXITED(status) ((status) == 0)
#define WEXITSTATUS(status) (status)

static inline pid_t waitpid(pid_t child, int *status, int options) {
    (void)child, (void)status, (void)options;
    abort();
}

#endif
