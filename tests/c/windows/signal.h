/* signal.h: handlers of faults, for the tests in C. */
#include_next <signal.h>

#ifndef TEST_WINDOWS_SIGNAL_H
#define TEST_WINDOWS_SIGNAL_H

#include <sys/types.h>
#include <windows.h>

enum { SIGBUS = -1, SIGALRM = -2 };

/* Signals interrupt no thread there: all are blocked. */
#undef pthread_sigmask
#define sigset_t _sigset_t
static inline int pthread_sigmask(int how, const sigset_t *blocks, sigset_t *blocked) {
    (void)how, (void)blocks;
    *blocked = (sigset_t)-1;
    return 0;
}
static inline int sigismember(const sigset_t *set, int number) { return (void)number, *set != 0; }

struct sigaction {
    void (*sa_handler)(int number);
};

static void (*on_fault)(int number);

static LONG CALLBACK handle_fault(EXCEPTION_POINTERS *fault) {
    if (fault->ExceptionRecord->ExceptionCode != EXCEPTION_ACCESS_VIOLATION || !on_fault)
        return EXCEPTION_CONTINUE_SEARCH;
    on_fault(SIGSEGV);
    return EXCEPTION_CONTINUE_EXECUTION;
}

/* Has a handler called when memory that may not be accessed is; afterwards the access is tried again. */
static inline int sigaction(int number, const struct sigaction *action, struct sigaction *before) {
    static void *is_set;
    if (number != SIGSEGV) return 0;
    if (before) before->sa_handler = on_fault;
    on_fault = action->sa_handler;
    if (!is_set) is_set = AddVectoredExceptionHandler(1, handle_fault);
    return is_set ? 0 : -1;
}

#endif
