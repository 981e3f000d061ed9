/* directory.c: a store in the files of one folder: those of kvcache/stores/directory.py, byte for byte, so that
 * programs in C and in Python use a folder at the same time.
 *
 * A value is written to a temporary file, which then takes its name.  Whoever changes what the folder holds has the
 * lock of usage.lock, in which all count the bytes of all values; a temporary file is locked while its writer lives.
 * These locks (flock) belong to the open file, which a child that is forked meanwhile has open as well: so they are
 * given back, not only closed, and the child closes what it got.  (POSIX locks keep no threads apart.) */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* declares flock, O_DIRECTORY and the clock */
#endif
#include "base/status.h"

#if defined(_WIN32)

kvc_status kvc_dir_store_new(const char *path, int64_t max_bytes, kvc_store **store) {
    (void)path, (void)max_bytes, (void)store;
    return kvc_fail(KVC_ERR_UNSUPPORTED, "a store in a folder needs POSIX: this is Windows");
}

void kvc_dir_store_free(kvc_store *store) { (void)store; }

#else

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/blake2b.h"
#include "base/threads.h"
#include "store/value.h"

#if defined(__APPLE__)
#define st_mtim st_mtimespec
#endif

enum {
    KEY = 2 * KVC_NAME_BYTES, /* a name in hexadecimal digits, as in Python */
    HEADER = 20 + KEY,        /* MAGIC, the bytes of the key in 4 bytes and those of the value in 8, and the key */
    NAME = 48,                /* room for a file's name */
    SPARE = 16                /* an eviction makes room for 1/16 of the limit more than is needed */
};
static const int64_t LOCK_WAIT = 10000000000;      /* nanoseconds */
static const int64_t MOST_SIZE = INT64_C(1) << 42; /* bytes, more than any value has */
static const char MAGIC[] = "kvcstore";
static const char USAGE[] = "usage.lock"; /* 8 bytes, of which the lowest comes first: the bytes of all values */

typedef struct directory {
    kvc_store store;
    int64_t max_bytes;
    char path[];
} directory;

/* Return KVC_ERR_STORE: what could not be done with which file, and why; by errno. */
static kvc_status fail_because(const directory *d, const char *verb, const char *name, const char *reason) {
    return kvc_fail(KVC_ERR_STORE, "the store %.300s cannot %s %s: %s", d->path, verb, name, reason);
}

static kvc_status fail_for(const directory *d, const char *verb, const char *name) {
    return fail_because(d, verb, name, strerror(errno));
}

/* Opens the folder, anew for each call, so that one that was removed and made again is found. */
static kvc_status open_folder(const directory *d, int *folder) {
    *folder = open(d->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return *folder < 0 ? fail_for(d, "open", "its folder") : KVC_OK;
}

/* ---- locks ------------------------------------------------------------------------------------------------------- */

/* An open file, which may be locked. */
typedef struct locked {
    struct locked *next, **at;
    int file;
} locked;

static kvc_mutex list_mutex = PTHREAD_MUTEX_INITIALIZER;
static locked *list; /* of all that are open */

static void before_fork(void) { kvc_mutex_lock(&list_mutex); }
static void after_fork(void) { kvc_mutex_unlock(&list_mutex); }

static void in_child(void) {
    for (; list; list = list->next) close(list->file);
    after_fork();
}

static kvc_status register_fork(void) {
    static int is_set; /* guarded by list_mutex */
    kvc_mutex_lock(&list_mutex);
    const int status = is_set ? 0 : pthread_atfork(before_fork, after_fork, in_child);
    is_set = !status;
    kvc_mutex_unlock(&list_mutex);
    return status ? kvc_fail(KVC_ERR_NOMEM, "out of memory for a handler of fork()") : KVC_OK;
}

/* Opens a file that may be locked; returns whether it is open. */
static int open_locked(locked *l, int folder, const char *name, int flags) {
    kvc_mutex_lock(&list_mutex);
    l->file = openat(folder, name, flags | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
    if (l->file >= 0) {
        if (list) list->at = &l->next;
        l->next = list;
        l->at = &list;
        list = l;
    }
    kvc_mutex_unlock(&list_mutex);
    return l->file >= 0;
}

static void close_locked(locked *l) {
    kvc_mutex_lock(&list_mutex);
    *l->at = l->next;
    if (l->next) l->next->at = l->at;
    flock(l->file, LOCK_UN);
    close(l->file);
    kvc_mutex_unlock(&list_mutex);
}

static int try_lock(int file) { return flock(file, LOCK_EX | LOCK_NB); }

/* Waits until nobody else has the lock of an open usage.lock. */
static kvc_status wait_for_lock(const directory *d, const locked *usage, int64_t deadline) {
    struct stat found;
    if (fstat(usage->file, &found) || !S_ISREG(found.st_mode) || found.st_nlink > 1) /* a write would go elsewhere */
        return fail_because(d, "use", USAGE, "it is no file of this folder alone");
    while (try_lock(usage->file)) {
        if (errno != EWOULDBLOCK && errno != EINTR) return fail_for(d, "lock", USAGE);
        if (kvc_now() > deadline) return fail_because(d, "lock", USAGE, "others have had it locked for too long");
        kvc_nap();
    }
    return KVC_OK;
}

/* Opens usage.lock, and locks it. */
static kvc_status lock_usage(const directory *d, int folder, locked *usage) {
    const int64_t deadline = kvc_now() + LOCK_WAIT;
    for (;;) {
        struct stat found;
        if (!open_locked(usage, folder, USAGE, O_RDWR)) return fail_for(d, "open", USAGE);
        const kvc_status status = wait_for_lock(d, usage, deadline);
        if (status == KVC_OK && !fstat(usage->file, &found) && found.st_nlink) return KVC_OK;
        close_locked(usage); /* or somebody has removed the file meanwhile, and others lock the next one */
        KVC_TRY(status);
    }
}

/* ---- files ------------------------------------------------------------------------------------------------------- */

/* Writes all bytes; returns whether it could. */
static int write_all(int file, const void *data, int64_t size) {
    for (const char *p = data; size;) {
        const ssize_t num = write(file, p, (size_t)(size < 1 << 30 ? size : 1 << 30));
        if (num < 0 && errno != EINTR) return 0;
        if (num > 0) p += num, size -= num;
    }
    return 1;
}

/* Reads so many bytes; returns 0 if there are fewer, -1 if that failed. */
static int read_all(int file, void *data, int64_t size) {
    for (char *p = data; size;) {
        const ssize_t num = read(file, p, (size_t)(size < 1 << 30 ? size : 1 << 30));
        if (num <= 0 && (!num || errno != EINTR)) return (int)num;
        if (num > 0) p += num, size -= num;
    }
    return 1;
}

/* Marks a file as used now; the clock of the file system is not as fine. */
static void touch(int file) {
    struct timespec now[2];
    clock_gettime(CLOCK_REALTIME, now);
    now[1] = *now;
    futimens(file, now); /* fails for a file of somebody else's */
}

/* Sets what a value of `size` bytes begins with, and the name of its file. */
static void describe(const uint8_t *name, int64_t size, uint8_t *header, char *file_name) {
    uint8_t digest[20];
    kvc_blake2b hash;
    memcpy(header, MAGIC, sizeof MAGIC); /* its last byte is written over */
    kvc_put_integer(header + 8, 4, KEY);
    kvc_put_integer(header + 12, 8, (uint64_t)size);
    kvc_hex((char *)header + 20, name, KVC_NAME_BYTES);
    kvc_blake2b_begin(&hash, sizeof digest, NULL, 0, "");
    kvc_blake2b_add(&hash, header + 20, KEY);
    kvc_blake2b_end(&hash, digest);
    kvc_hex(file_name, digest, sizeof digest);
    memcpy(file_name + 40, ".kv", 4);
}

static int has_form(const char *name, size_t digits, const char *end) {
    return strspn(name, "0123456789abcdef") == digits && !strcmp(name + digits, end);
}

/* A file of a value. */
typedef struct value_file {
    char name[NAME];
    int64_t size;
    struct timespec used;
} value_file;

/* The files of all values, damaged ones too, and their bytes. */
typedef struct value_files {
    value_file *files;
    size_t num, room;
    int64_t size;
} value_files;

/* Returns the bytes that a file counts, so that those of sparse ones do not overflow a sum. */
static int64_t size_of(const struct stat *found) { return found->st_size < MOST_SIZE ? found->st_size : MOST_SIZE; }

/* Adds a file, if it is one of a value; returns whether there was memory. */
static int add_file(value_files *all, int folder, const char *name) {
    struct stat found;
    if (!has_form(name, 40, ".kv") || fstatat(folder, name, &found, AT_SYMLINK_NOFOLLOW) || !S_ISREG(found.st_mode))
        return 1;
    if (all->num == all->room) {
        value_file *more = realloc(all->files, (all->room * 2 + 64) * sizeof *more);
        if (!more) return 0;
        all->files = more;
        all->room = all->room * 2 + 64;
    }
    value_file *file = &all->files[all->num++];
    *file = (value_file){.size = size_of(&found), .used = found.st_mtim};
    memcpy(file->name, name, 44);
    all->size += file->size;
    return 1;
}

/* Removes a temporary file whose writer is gone: nobody has locked it. */
static void remove_leftover(int folder, const char *name) {
    struct stat found;
    if (!has_form(name, 32, ".tmp")) return;
    const int file = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (file < 0) return;
    if (!fstat(file, &found) && S_ISREG(found.st_mode) && !try_lock(file)) unlinkat(folder, name, 0);
    close(file);
}

/* Lists the files of values; free(all->files) in the end, whatever is returned. */
static kvc_status list_files(const directory *d, int folder, int removes_leftovers, value_files *all) {
    *all = (value_files){0};
    const int own = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *entries = own < 0 ? NULL : fdopendir(own);
    if (!entries) {
        const kvc_status status = fail_for(d, "list", "its folder");
        if (own >= 0) close(own);
        return status;
    }
    int has_memory = 1;
    for (const struct dirent *entry; has_memory && (entry = readdir(entries));) {
        if (removes_leftovers) remove_leftover(folder, entry->d_name);
        has_memory = add_file(all, folder, entry->d_name);
    }
    closedir(entries);
    return has_memory ? KVC_OK : kvc_fail(KVC_ERR_NOMEM, "out of memory for the names of %zu files", all->num);
}

/* ---- the bytes of all values ------------------------------------------------------------------------------------- */

static kvc_status write_total(const directory *d, const locked *usage, int64_t total) {
    uint8_t bytes[8];
    kvc_put_integer(bytes, 8, total < 0 ? 0 : (uint64_t)total);
    return pwrite(usage->file, bytes, 8, 0) == 8 ? KVC_OK : fail_for(d, "write", USAGE);
}

/* Counts anew where usage.lock is new, or has no count. */
static kvc_status read_total(const directory *d, int folder, const locked *usage, int64_t *total) {
    uint8_t bytes[8];
    value_files all;
    if (pread(usage->file, bytes, 8, 0) == 8 && kvc_get_integer(bytes, 8) <= INT64_MAX / 2) {
        *total = (int64_t)kvc_get_integer(bytes, 8);
        return KVC_OK;
    }
    const kvc_status status = list_files(d, folder, 0, &all);
    *total = all.size;
    free(all.files);
    return status;
}

static int is_used_later(const void *a, const void *b) {
    const value_file *x = a, *y = b;
    if (x->used.tv_sec != y->used.tv_sec) return x->used.tv_sec < y->used.tv_sec ? -1 : 1;
    if (x->used.tv_nsec != y->used.tv_nsec) return x->used.tv_nsec < y->used.tv_nsec ? -1 : 1;
    return strcmp(x->name, y->name);
}

/* Counts anew, and removes what was used least recently until `size` more bytes fit. */
static kvc_status evict(const directory *d, int folder, int64_t size, int64_t *total) {
    value_files all;
    const kvc_status status = list_files(d, folder, 0, &all);
    if (status == KVC_OK) {
        const int64_t most = d->max_bytes - d->max_bytes / SPARE - size;
        *total = all.size;
        if (all.num) qsort(all.files, all.num, sizeof *all.files, is_used_later);
        for (size_t i = 0; i < all.num && *total > (most < 0 ? 0 : most) && all.size + size > d->max_bytes; i++)
            if (!unlinkat(folder, all.files[i].name, 0) || errno == ENOENT) *total -= all.files[i].size;
    }
    free(all.files);
    return status;
}

/* ---- one value --------------------------------------------------------------------------------------------------- */

/* Reads the value of an open file, unless it is of another name, or not as long as it says. */
static int read_file(int file, const uint8_t *name, void *value, int64_t max_bytes, int64_t *size) {
    uint8_t expected[HEADER], found[HEADER];
    char file_name[NAME];
    struct stat s;
    if (fstat(file, &s) || !S_ISREG(s.st_mode) || s.st_size <= HEADER) return 0;
    const int64_t num = s.st_size - HEADER;
    describe(name, num, expected, file_name);
    int is_read = read_all(file, found, HEADER);
    if (is_read <= 0 || memcmp(found, expected, HEADER)) return is_read < 0 ? -1 : 0;
    if (num <= max_bytes && (is_read = read_all(file, value, num)) <= 0) return is_read;
    touch(file);
    *size = num;
    return 1;
}

static kvc_status read_value(void *user, const uint8_t *name, void *value, int64_t max_bytes, int64_t *size) {
    const directory *d = user;
    uint8_t header[HEADER];
    char file_name[NAME];
    int folder;
    *size = 0;
    KVC_TRY(open_folder(d, &folder));
    describe(name, 0, header, file_name);
    const int file = openat(folder, file_name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    const int is_missing = file < 0 && (errno == ENOENT || errno == ELOOP || errno == ENXIO); /* or a link, a socket */
    kvc_status status = file < 0 && !is_missing ? fail_for(d, "open", file_name) : KVC_OK;
    close(folder);
    if (file < 0) return status;
    if (read_file(file, name, value, max_bytes, size) < 0) status = fail_for(d, "read", file_name);
    close(file);
    return status;
}

/* Gives a temporary file of so many bytes its name, after making room for it. */
static kvc_status take_name(const directory *d, int folder, const locked *temporary, const char *from, const char *name,
                            int64_t size, const locked *usage) {
    struct stat found;
    int64_t total, before = 0;
    if (!fstatat(folder, name, &found, AT_SYMLINK_NOFOLLOW) && S_ISREG(found.st_mode)) before = size_of(&found);
    KVC_TRY(read_total(d, folder, usage, &total));
    if (d->max_bytes && total + size - before > d->max_bytes) {
        unlinkat(folder, name, 0); /* it is replaced */
        KVC_TRY(evict(d, folder, size, &total));
        before = 0;
    }
    KVC_TRY(write_total(d, usage, total + size)); /* too much rather than too little, if the process is killed here */
    if (renameat(folder, from, folder, name)) return fail_for(d, "rename a file to", name);
    touch(temporary->file);
    return write_total(d, usage, total + size - before);
}

/* Makes a file under a name that nobody uses, and locks it. */
static kvc_status make_temporary(const directory *d, int folder, locked *temporary, char *name) {
    for (;;) {
        struct stat found;
        snprintf(name, NAME, "%016llx%016llx.tmp", (unsigned long long)getpid() << 32 ^ (uintptr_t)temporary,
                 (unsigned long long)kvc_now());
        if (!open_locked(temporary, folder, name, O_WRONLY | O_EXCL)) {
            if (errno == EEXIST) continue;
            return fail_for(d, "make", name);
        }
        const int is_locked = !try_lock(temporary->file);
        if (is_locked && !fstat(temporary->file, &found) && found.st_nlink) return KVC_OK;
        const kvc_status status = is_locked || errno == EWOULDBLOCK ? KVC_OK : fail_for(d, "lock", name);
        close_locked(temporary); /* somebody took it for a leftover before it was locked */
        unlinkat(folder, name, 0);
        KVC_TRY(status);
    }
}

static kvc_status write_to(const directory *d, int folder, const uint8_t *name, const void *value, int64_t size) {
    uint8_t header[HEADER];
    char file_name[NAME], temporary_name[NAME];
    locked temporary, usage;
    describe(name, size, header, file_name);
    KVC_TRY(make_temporary(d, folder, &temporary, temporary_name));
    const int is_written = write_all(temporary.file, header, HEADER) && write_all(temporary.file, value, size);
    kvc_status status = is_written ? lock_usage(d, folder, &usage) : fail_for(d, "write", temporary_name);
    if (status == KVC_OK) {
        status = take_name(d, folder, &temporary, temporary_name, file_name, size + HEADER, &usage);
        close_locked(&usage);
    }
    if (status != KVC_OK) unlinkat(folder, temporary_name, 0);
    close_locked(&temporary);
    return status;
}

static kvc_status write_value(void *user, const uint8_t *name, const void *value, int64_t size) {
    const directory *d = user;
    const int64_t most = d->max_bytes ? d->max_bytes : INT64_MAX / 2;
    int folder;
    if (size > most - HEADER)
        return kvc_fail(KVC_ERR_STORE, "a value of %lld bytes takes %d more: max_bytes is %lld", (long long)size,
                        HEADER, (long long)most);
    KVC_TRY(open_folder(d, &folder));
    const kvc_status status = write_to(d, folder, name, value, size);
    close(folder);
    return status;
}

/* ---- making and freeing ------------------------------------------------------------------------------------------ */

/* Makes the folder, and those it lies in, where they are missing. */
static kvc_status make_folder(const directory *d, char *path) {
    int number = 0; /* of the first error */
    for (char *end = path + 1; (end = strchr(end, '/')); *end++ = '/') {
        *end = 0;
        if (mkdir(path, 0777) && errno != EEXIST && !number) number = errno;
    }
    if (!mkdir(path, 0700) || errno == EEXIST) return KVC_OK;
    if (number) errno = number;
    return fail_for(d, "make", "its folder");
}

/* Removes what writers that were killed have left behind, counts what is there, and evicts what is beyond the limit. */
static kvc_status begin(const directory *d) {
    int folder;
    value_files all;
    locked usage;
    KVC_TRY(open_folder(d, &folder));
    const int is_locked = lock_usage(d, folder, &usage) == KVC_OK; /* a folder may be there to read only */
    kvc_status status = list_files(d, folder, 1, &all);
    int64_t total = all.size;
    free(all.files);
    if (is_locked) {
        if (status == KVC_OK && d->max_bytes && total > d->max_bytes) status = evict(d, folder, 0, &total);
        if (status == KVC_OK) write_total(d, &usage, total);
        close_locked(&usage);
    }
    close(folder);
    return status;
}

kvc_status kvc_dir_store_new(const char *path, int64_t max_bytes, kvc_store **store) {
    if (!path || !*path || !store)
        return kvc_fail(KVC_ERR_INVALID, "%s", !store ? "store is NULL" : "path is empty: it names a folder");
    if (max_bytes < 0 || max_bytes > INT64_MAX / 2)
        return kvc_fail(KVC_ERR_INVALID, "max_bytes is %lld: it must be at least 0", (long long)max_bytes);
    KVC_TRY(register_fork());
    size_t size = strlen(path);
    while (size > 1 && path[size - 1] == '/') size--;
    directory *d = malloc(sizeof *d + size + 1);
    if (!d) return kvc_fail(KVC_ERR_NOMEM, "out of memory for a store");
    memcpy(d->path, path, size);
    d->path[size] = 0;
    d->max_bytes = max_bytes;
    d->store = (kvc_store){sizeof d->store, d, read_value, write_value};
    kvc_status status = make_folder(d, d->path);
    if (status == KVC_OK) status = begin(d);
    if (status != KVC_OK)
        free(d);
    else
        *store = &d->store;
    return status;
}

void kvc_dir_store_free(kvc_store *store) { free(store ? store->user : NULL); }

#endif
