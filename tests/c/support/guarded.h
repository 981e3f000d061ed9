/* guarded.h: memory that ends where reading faults.  Define _DEFAULT_SOURCE first, for MAP_ANONYMOUS. */
#ifndef KVC_TEST_GUARDED_H
#define KVC_TEST_GUARDED_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static inline size_t page_size(void) { return (size_t)sysconf(_SC_PAGESIZE); }

/* Rounds `size` up to whole pages. */
static inline size_t in_pages(size_t size) { return (size + page_size() - 1) / page_size() * page_size(); }

/* Returns the end of at least `size` bytes. */
static inline char *guarded_new(size_t size) {
    size_t page = page_size(), used = in_pages(size);
    char *memory = mmap(NULL, used + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory + used, page, PROT_NONE)) {
        perror("guard page");
        exit(2);
    }
    return memory + used;
}

static inline void guarded_free(char *end, size_t size) { munmap(end - in_pages(size), in_pages(size) + page_size()); }

#endif
