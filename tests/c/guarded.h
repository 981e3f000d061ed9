/* guarded.h: memory that ends where reading faults.  To be included with _DEFAULT_SOURCE, for MAP_ANONYMOUS. */
#ifndef KVC_TEST_GUARDED_H
#define KVC_TEST_GUARDED_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* The end of at least `size` bytes. */
static inline char *guarded_new(size_t size)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), used = (size + page - 1) / page * page;
    char *memory = mmap(NULL, used + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory + used, page, PROT_NONE)) {
        perror("guard page");
        exit(2);
    }
    return memory + used;
}

static inline void guarded_free(char *end, size_t size)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), used = (size + page - 1) / page * page;
    munmap(end - used, used + page);
}

#endif
