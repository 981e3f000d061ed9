/* openmp.c: parallel regions of OpenMP.  The only file with pragmas of OpenMP; it compiles without OpenMP, too.
 *
 * A runtime is a copy of OpenMP's library that the process has loaded.  A parallel region is a function that a team of
 * its threads runs.  The linked runtime is the one that this library was linked to.
 *
 * Threads of OpenMP spin after each parallel region, and so keep the processors.  A second team beside torch's or
 * scikit-learn's would get them late: with 16,384 tokens a step of decoding took 1.23 times as long.  Mostly the loader
 * sees to it, as two libraries that need libgomp.so.1 share one copy.  Wheels bring copies with names of their own,
 * though (libgomp-e985bcbb.so.1.0.0), and Clang's and Intel's runtimes are called otherwise.  So regions run on a
 * runtime that is found in the process, through the function that GCC compiles `#pragma omp parallel` to and that
 * LLVM's and Intel's runtimes have as well. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* declares dl_iterate_phdr */
#endif
#include "base/openmp.h"

#include <limits.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "kvcache.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

enum { MOST_PATH = 1024, MOST_RUNTIMES = 8 };

/* The functions of a runtime. */
typedef struct runtime {
    char path[MOST_PATH];
    int (*in_parallel)(void);
    int (*max_threads)(void);
    int (*thread_limit)(void);
    int (*num_places)(void);
    int (*proc_bind)(void);
    void (*parallel)(void (*work)(void *context), void *context, unsigned num_threads, unsigned flags);
} runtime;

#if defined(_OPENMP)
static int linked_proc_bind(void) { return (int)omp_get_proc_bind(); }

static void run_linked(void (*work)(void *context), void *context, unsigned num_threads, unsigned flags) {
    (void)flags;
#pragma omp parallel num_threads((int)num_threads)
    work(context);
}

static runtime linked = {"", /* kvc_openmp_find() notes the path */
                         omp_in_parallel,
                         omp_get_max_threads,
                         omp_get_thread_limit,
                         omp_get_num_places,
                         linked_proc_bind,
                         run_linked};
#define LINKED &linked
#else
#define LINKED NULL
#endif

static runtime runtimes[MOST_RUNTIMES]; /* found in the process; those below num_runtimes do not change any more */
static atomic_int num_runtimes;
static runtime *_Atomic in_use = LINKED; /* NULL: there are no regions */

int kvc_openmp_in_region(void) {
#if defined(_OPENMP)
    if (omp_in_parallel()) return 1;
#endif
    for (int i = atomic_load(&num_runtimes); i-- > 0;)
        if (runtimes[i].in_parallel()) return 1;
    return 0;
}

int kvc_openmp_thread_limit(void) {
    const runtime *r = atomic_load(&in_use);
    return r ? r->thread_limit() : INT_MAX;
}

int kvc_openmp_num_threads(void) {
    const runtime *r = atomic_load(&in_use);
    const int number = r ? r->max_threads() : INT_MAX, limit = kvc_openmp_thread_limit();
    const int least = number < limit ? number : limit;
    return least > 1 ? least : 1; /* LLVM's runtime, told a number that is none, may give a negative one */
}

int kvc_openmp_num_places(void) {
    const runtime *r = atomic_load(&in_use);
    return r && r->proc_bind() ? r->num_places() : 0; /* LLVM's has a place of all processors where it binds none */
}

void kvc_openmp_run(void (*work)(void *context), void *context, int num_threads) {
    const runtime *r = atomic_load(&in_use);
    if (r)
        r->parallel(work, context, (unsigned)num_threads, 0);
    else
        work(context);
}

/* ---- children of fork() ------------------------------------------------------------------------------------------ */

#if (defined(_OPENMP) || defined(KVC_OPENMP_OF_PROCESS)) && !defined(_WIN32)

#include <pthread.h>
#include <stdio.h>

static atomic_int was_forked;
static void note_fork(void) { atomic_store(&was_forked, 1); }

#if defined(__linux__)
/* Whether this process was forked, and has run the program of its parent since. */
static int runs_parents_program(void) {
    enum { FORKED_BUT_NOT_EXECUTED = 0x40 }; /* PF_FORKNOEXEC of Linux, in the 9th field */
    char line[512];
    unsigned flags = 0;
    FILE *file = fopen("/proc/self/stat", "r");
    if (!file) return 0;
    const char *name_end = fgets(line, sizeof line, file) ? strrchr(line, ')') : NULL; /* names may have spaces */
    if (name_end) sscanf(name_end, ") %*c %*d %*d %*d %*d %*d %u", &flags);
    fclose(file);
    return (flags & FORKED_BUT_NOT_EXECUTED) != 0;
}
#else
static int runs_parents_program(void) { return 0; }
#endif

/* Notes forks from the beginning on, and one before this library was loaded: a team may be torch's, and older than the
 * first cache, or than this library. */
__attribute__((constructor)) static void watch_forks(void) {
    atomic_store(&was_forked, runs_parents_program());
    pthread_atfork(NULL, NULL, note_fork);
}

int kvc_openmp_works(void) { return atomic_load(&in_use) && !atomic_load(&was_forked); }

#else

int kvc_openmp_works(void) { return atomic_load(&in_use) != NULL; }

#endif

/* ---- finding runtimes -------------------------------------------------------------------------------------------- */

#if defined(__ELF__) && defined(__GNUC__)

#include <dlfcn.h>
#include <link.h>

/* Weak: before version 2.34, glibc has them in a library of their own. */
extern __typeof__(dlopen) dlopen __attribute__((weak));
extern __typeof__(dlsym) dlsym __attribute__((weak));

/* What the loader's list of the process's libraries says. */
typedef struct survey {
    unsigned long long num_loads;
    char (*found)[MOST_PATH]; /* paths, in the order in which they were loaded */
    int num_found;
    char linked[MOST_PATH]; /* path of the runtime that this library links to; "" if it is not apart */
    int linked_is_shared;   /* another library needs it, too */
} survey;

static unsigned long long known_loads; /* when runtimes were looked for */

static const char *name_of(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static int is_within(const struct dl_phdr_info *object, uintptr_t address) { /* in a segment of the library */
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *segment = &object->dlpi_phdr[i];
        if (segment->p_type == PT_LOAD && address - object->dlpi_addr - segment->p_vaddr < segment->p_memsz) return 1;
    }
    return 0;
}

/* Notes the runtimes among the process's libraries: the linked one apart from the others. */
static int note_runtime(struct dl_phdr_info *object, size_t size, void *context) {
    survey *s = context;
    (void)size;
    if (object->dlpi_adds == known_loads) return 1; /* nothing was loaded since */
    s->num_loads = object->dlpi_adds;
    const char *name = name_of(object->dlpi_name);
    /* A library with this variable in it is this library. */
    if (strlen(object->dlpi_name) >= sizeof s->linked || is_within(object, (uintptr_t)&num_runtimes)) return 0;
#if defined(_OPENMP)
    if (is_within(object, (uintptr_t)omp_in_parallel)) {
        strcpy(s->linked, object->dlpi_name);
        return 0;
    }
#endif
    if (strncmp(name, "libgomp", 7) && strncmp(name, "libomp", 6) && strncmp(name, "libiomp", 7)) return 0;
    if (s->num_found < MOST_RUNTIMES) strcpy(s->found[s->num_found++], object->dlpi_name);
    return 0;
}

/* Notes whether this object, not being this library, needs the linked runtime. */
static int note_need(struct dl_phdr_info *object, size_t size, void *context) {
    survey *s = context;
    (void)size;
    if (is_within(object, (uintptr_t)&num_runtimes)) return 0;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        if (object->dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
        const ElfW(Dyn) *const begin = (const ElfW(Dyn) *)(object->dlpi_addr + object->dlpi_phdr[i].p_vaddr);
        uintptr_t strings = 0;
        for (const ElfW(Dyn) *entry = begin; entry->d_tag != DT_NULL; entry++)
            if (entry->d_tag == DT_STRTAB) strings = entry->d_un.d_ptr;
        if (strings < object->dlpi_addr) strings += object->dlpi_addr; /* glibc adds it for most processors */
        for (const ElfW(Dyn) *entry = begin; entry->d_tag != DT_NULL; entry++)
            if (entry->d_tag == DT_NEEDED && !strcmp((const char *)strings + entry->d_un.d_val, name_of(s->linked)))
                s->linked_is_shared = 1;
    }
    return s->linked_is_shared;
}

/* Returns the runtime of this path with its functions, from the table or added to it; NULL if it lacks one.  Keeps it
 * loaded for good: its threads stay until the process ends. */
static runtime *keep_runtime(const char *path) {
    const int num = atomic_load(&num_runtimes);
    for (int i = 0; i < num; i++)
        if (!strcmp(runtimes[i].path, path)) return &runtimes[i];
    void *library = num < MOST_RUNTIMES ? dlopen(path, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE) : NULL;
    if (!library) return NULL;
    runtime *r = &runtimes[num];
    *(void **)&r->in_parallel = dlsym(library, "omp_in_parallel");
    *(void **)&r->max_threads = dlsym(library, "omp_get_max_threads");
    *(void **)&r->thread_limit = dlsym(library, "omp_get_thread_limit");
    *(void **)&r->num_places = dlsym(library, "omp_get_num_places");
    *(void **)&r->proc_bind = dlsym(library, "omp_get_proc_bind");
    *(void **)&r->parallel = dlsym(library, "GOMP_parallel");
    if (!r->in_parallel || !r->max_threads || !r->thread_limit || !r->num_places || !r->proc_bind || !r->parallel)
        return NULL;
    strcpy(r->path, path);
    atomic_store(&num_runtimes, num + 1);
    return r;
}

void kvc_openmp_find(void) {
    static char found[MOST_RUNTIMES][MOST_PATH];
    survey s = {.found = found};
    if (!dlopen || !dlsym) return;
    dl_iterate_phdr(note_runtime, &s);
    if (!s.num_loads) return; /* nothing was loaded since the last call */
    known_loads = s.num_loads;
    runtime *others = NULL; /* the first one that other libraries have loaded */
    for (int i = s.num_found; i-- > 0;) {
        runtime *r = keep_runtime(found[i]);
        if (r) others = r;
    }
#if defined(_OPENMP)
    if (!*s.linked) return;
    if (!*linked.path && dlopen(s.linked, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE)) strcpy(linked.path, s.linked);
    dl_iterate_phdr(note_need, &s);
    atomic_store(&in_use, s.linked_is_shared || !others ? &linked : others);
#elif defined(KVC_OPENMP_OF_PROCESS)
    if (others) atomic_store(&in_use, others);
    (void)note_need;
#else
    (void)others, (void)note_need;
#endif
}

#else

void kvc_openmp_find(void) {}

#endif
