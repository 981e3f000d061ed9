/* directory.c: a store in the files of one folder, which any number of processes use at the same time.  Python's
 * DirectoryStore is a mapping over it.
 *
 * A value is written to a temporary file, which then takes its name.  Whoever changes what the folder holds has the
 * lock of usage.lock, in which all count the bytes of all values; a temporary file is locked while its writer lives. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/blake2b.h"
#include "base/files.h"
#include "base/status.h"
#include "base/threads.h"
#include "prefix/value.h"

enum {
    KEY = 2 * KVC_NAME_BYTES, /* a name in hexadecimal digits, the key of Python's mapping */
    HEADER = 20 + KEY,        /* MAGIC, the bytes of the key in 4 bytes and those of the value in 8, and the key */
    NAME = 48,                /* room for a file's name */
    TEMPORARY = 32,           /* hexadecimal digits in the name of a temporary file, before ".tmp" */
    EXTRA = 16                /* an eviction makes room for 1/16 of the limit more than is needed */
};
static const int64_t LOCK_WAIT = 10000000000;      /* nanoseconds */
static const int64_t MOST_SIZE = INT64_C(1) << 42; /* bytes, more than any value has */
static const char MAGIC[] = "kvcstore";
static const char USAGE[] = "usage.lock"; /* 8 bytes, of which the lowest comes first: the bytes of all values */

typedef struct directory {
    kvc_store store;
    int64_t max_bytes;
    char *path;
} directory;

/* Return KVC_ERR_STORE with a message: which file could not be opened, say, and why.  fail_for asks errno why. */
static kvc_status fail_because(const directory *d, const char *verb, const char *name, const char *reason) {
    return kvc_fail(KVC_ERR_STORE, "the store %.300s cannot %s %s: %s", d->path, verb, name, reason);
}

static kvc_status fail_for(const directory *d, const char *verb, const char *name) {
    return fail_because(d, verb, name, strerror(errno));
}

/* Opens the folder, anew for each call, so that a folder that was removed and made again is found. */
static kvc_status open_folder(const directory *d, kvc_folder *folder) {
    return kvc_folder_open(folder, d->path) ? KVC_OK : fail_for(d, "open", "its folder");
}

/* Waits until nobody else has the lock of an open usage.lock. */
static kvc_status wait_for_lock(const directory *d, const kvc_own_file *usage, int64_t deadline) {
    kvc_file_info found;
    if (!kvc_file_ask(usage->file, &found) || !found.is_regular || found.num_names > 1) /* a write would go elsewhere */
        return fail_because(d, "use", USAGE, "it is no file of this folder alone");
    while (!kvc_file_lock(usage->file)) {
        if (errno != EWOULDBLOCK && errno != EINTR) return fail_for(d, "lock", USAGE);
        if (kvc_now() > deadline) return fail_because(d, "lock", USAGE, "others have had it locked for too long");
        kvc_nap();
    }
    return KVC_OK;
}

/* Opens usage.lock, and locks it. */
static kvc_status lock_usage(const directory *d, kvc_folder folder, kvc_own_file *usage) {
    const int64_t deadline = kvc_now() + LOCK_WAIT;
    for (;;) {
        kvc_file_info found;
        if (!kvc_own_file_open(usage, folder, USAGE, /* is_new */ 0)) return fail_for(d, "open", USAGE);
        const kvc_status status = wait_for_lock(d, usage, deadline);
        if (status == KVC_OK && kvc_file_ask(usage->file, &found) && found.num_names) return KVC_OK;
        kvc_own_file_close(usage); /* an error, or somebody has removed the file: others lock the next one */
        KVC_TRY(status);
    }
}

/* ---- files ------------------------------------------------------------------------------------------------------- */

/* Sets the header that stands before a value of `size` bytes in its file, and the name of the file. */
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
    int64_t size, used; /* used: nanoseconds */
} value_file;

/* The files of all values, damaged ones too, and their bytes. */
typedef struct value_files {
    value_file *files;
    size_t num, room;
    int64_t size;
    kvc_folder folder;
    int lacks_memory;
} value_files;

/* Returns the bytes that a file counts: not so many that sparse files overflow a sum. */
static int64_t size_of(const kvc_file_info *found) { return found->size < MOST_SIZE ? found->size : MOST_SIZE; }

/* Adds a file, if it holds a value.  Returns whether there was memory. */
static int add_file(value_files *all, const char *name) {
    kvc_file_info found;
    if (!has_form(name, 40, ".kv") || !kvc_file_find(all->folder, name, &found) || !found.is_regular) return 1;
    if (all->num == all->room) {
        value_file *more = realloc(all->files, (all->room * 2 + 64) * sizeof *more);
        if (!more) return 0;
        all->files = more;
        all->room = all->room * 2 + 64;
    }
    value_file *file = &all->files[all->num++];
    *file = (value_file){.size = size_of(&found), .used = found.used};
    memcpy(file->name, name, 44);
    all->size += file->size;
    return 1;
}

/* Removes a temporary file whose writer is gone: nobody has locked it. */
static void remove_leftover(kvc_folder folder, const char *name) {
    kvc_file_info found;
    kvc_file file;
    if (!has_form(name, TEMPORARY, ".tmp") || !kvc_file_open(&file, folder, name)) return;
    if (kvc_file_ask(file, &found) && found.is_regular && kvc_file_lock(file)) kvc_file_remove(folder, name);
    kvc_file_close(file);
}

static int visit_file(void *context, const char *name) {
    value_files *all = context;
    remove_leftover(all->folder, name);
    all->lacks_memory = !add_file(all, name);
    return !all->lacks_memory;
}

/* Lists the files of values, and removes leftovers; free(all->files) in the end, whatever is returned. */
static kvc_status list_files(const directory *d, kvc_folder folder, value_files *all) {
    *all = (value_files){.folder = folder};
    if (!kvc_folder_list(folder, visit_file, all)) return fail_for(d, "list", "its folder");
    return all->lacks_memory ? kvc_fail(KVC_ERR_NOMEM, "out of memory for the names of %zu files", all->num) : KVC_OK;
}

/* ---- the bytes of all values ------------------------------------------------------------------------------------- */

static kvc_status write_total(const directory *d, const kvc_own_file *usage, int64_t total) {
    uint8_t bytes[8];
    kvc_put_integer(bytes, 8, total < 0 ? 0 : (uint64_t)total);
    return kvc_file_write_first(usage->file, bytes, 8) ? KVC_OK : fail_for(d, "write", USAGE);
}

/* Sets *total to the bytes of all values: what usage.lock says, or what a count finds if the file is new or damaged. */
static kvc_status read_total(const directory *d, kvc_folder folder, const kvc_own_file *usage, int64_t *total) {
    uint8_t bytes[8];
    value_files all;
    if (kvc_file_read_first(usage->file, bytes, 8) && kvc_get_integer(bytes, 8) <= INT64_MAX / 2) {
        *total = (int64_t)kvc_get_integer(bytes, 8);
        return KVC_OK;
    }
    const kvc_status status = list_files(d, folder, &all);
    *total = all.size;
    free(all.files);
    return status;
}

/* Compares two files for qsort: the least recently used one comes first. */
static int by_use(const void *a, const void *b) {
    const value_file *x = a, *y = b;
    return x->used == y->used ? strcmp(x->name, y->name) : x->used < y->used ? -1 : 1;
}

/* Counts anew, and removes the least recently used values until `size` more bytes fit, and 1/EXTRA of the limit. */
static kvc_status evict(const directory *d, kvc_folder folder, int64_t size, int64_t *total) {
    value_files all;
    const kvc_status status = list_files(d, folder, &all);
    if (status == KVC_OK) {
        const int64_t most = d->max_bytes - d->max_bytes / EXTRA - size;
        *total = all.size;
        if (all.num) qsort(all.files, all.num, sizeof *all.files, by_use);
        for (size_t i = 0; i < all.num && *total > (most < 0 ? 0 : most) && all.size + size > d->max_bytes; i++)
            if (kvc_file_remove(folder, all.files[i].name) || errno == ENOENT) *total -= all.files[i].size;
    }
    free(all.files);
    return status;
}

/* ---- one value --------------------------------------------------------------------------------------------------- */

/* Reads the value of an open file, or its first max_bytes bytes, unless the file has another name or another length
 * than it says. */
static int read_file(kvc_file file, const uint8_t *name, void *value, int64_t max_bytes, int64_t *size) {
    uint8_t expected[HEADER], found[HEADER];
    char file_name[NAME];
    kvc_file_info info;
    if (!kvc_file_ask(file, &info) || !info.is_regular || info.size <= HEADER) return 0;
    const int64_t num = info.size - HEADER;
    describe(name, num, expected, file_name);
    int is_read = kvc_file_read(file, found, HEADER);
    if (is_read <= 0 || memcmp(found, expected, HEADER)) return is_read < 0 ? -1 : 0;
    const int64_t room = num < max_bytes ? num : max_bytes;
    if (room && (is_read = kvc_file_read(file, value, room)) <= 0) return is_read;
    if (room) kvc_file_touch(file); /* asking for the size is no use */
    *size = num;
    return 1;
}

static kvc_status read_value(void *user, const uint8_t *name, void *value, int64_t max_bytes, int64_t *size) {
    const directory *d = user;
    uint8_t header[HEADER];
    char file_name[NAME];
    kvc_folder folder;
    *size = 0;
    KVC_TRY(open_folder(d, &folder));
    describe(name, 0, header, file_name);
    kvc_file file;
    const int is_open = kvc_file_open(&file, folder, file_name);
    kvc_status status = !is_open && errno != ENOENT ? fail_for(d, "open", file_name) : KVC_OK;
    kvc_folder_close(folder);
    if (!is_open) return status;
    if (read_file(file, name, value, max_bytes, size) < 0) status = fail_for(d, "read", file_name);
    kvc_file_close(file);
    return status;
}

/* Gives a temporary file of so many bytes its name, after making room for it. */
static kvc_status take_name(const directory *d, kvc_folder folder, const kvc_own_file *temporary, const char *from,
                            const char *name, int64_t size, const kvc_own_file *usage) {
    kvc_file_info found;
    int64_t total, before = 0;
    if (kvc_file_find(folder, name, &found) && found.is_regular) before = size_of(&found);
    KVC_TRY(read_total(d, folder, usage, &total));
    if (d->max_bytes && total + size - before > d->max_bytes) {
        kvc_file_remove(folder, name); /* it is replaced */
        KVC_TRY(evict(d, folder, size, &total));
        before = 0;
    }
    KVC_TRY(write_total(d, usage, total + size)); /* too much rather than too little, if the process is killed here */
    const int is_named = kvc_file_rename(folder, from, name), reason = errno;
    if (is_named) kvc_file_touch(temporary->file);
    KVC_TRY(write_total(d, usage, is_named ? total + size - before : total));
    errno = reason;
    return is_named ? KVC_OK : fail_for(d, "rename a file to", name);
}

/* Makes a file under a name that nobody uses, and locks it. */
static kvc_status make_temporary(const directory *d, kvc_folder folder, kvc_own_file *temporary, char *name) {
    for (;;) {
        kvc_file_info found;
        snprintf(name, NAME, "%016llx%016llx.tmp",
                 (unsigned long long)kvc_process_number() << 32 ^ (uintptr_t)temporary, (unsigned long long)kvc_now());
        if (!kvc_own_file_open(temporary, folder, name, /* is_new */ 1)) {
            if (errno == EEXIST) continue;
            return fail_for(d, "make", name);
        }
        const int is_locked = kvc_file_lock(temporary->file);
        if (is_locked && kvc_file_ask(temporary->file, &found) && found.num_names) return KVC_OK;
        const kvc_status status = is_locked || errno == EWOULDBLOCK ? KVC_OK : fail_for(d, "lock", name);
        kvc_own_file_close(temporary); /* somebody took it for a leftover before it was locked */
        kvc_file_remove(folder, name);
        KVC_TRY(status);
    }
}

static kvc_status write_to(const directory *d, kvc_folder folder, const uint8_t *name, const void *value,
                           int64_t size) {
    uint8_t header[HEADER];
    char file_name[NAME], temporary_name[NAME];
    kvc_own_file temporary, usage;
    describe(name, size, header, file_name);
    KVC_TRY(make_temporary(d, folder, &temporary, temporary_name));
    const int is_written =
        kvc_file_write(temporary.file, header, HEADER) && kvc_file_write(temporary.file, value, size);
    kvc_status status = is_written ? lock_usage(d, folder, &usage) : fail_for(d, "write", temporary_name);
    if (status == KVC_OK) {
        status = take_name(d, folder, &temporary, temporary_name, file_name, size + HEADER, &usage);
        kvc_own_file_close(&usage);
    }
    if (status != KVC_OK) kvc_file_remove(folder, temporary_name);
    kvc_own_file_close(&temporary);
    return status;
}

static kvc_status write_value(void *user, const uint8_t *name, const void *value, int64_t size) {
    const directory *d = user;
    const int64_t most = d->max_bytes ? d->max_bytes : INT64_MAX / 2;
    kvc_folder folder;
    if (size > most - HEADER)
        return kvc_fail(KVC_ERR_STORE, "a value of %lld bytes takes %d more: max_bytes is %lld", (long long)size,
                        HEADER, (long long)most);
    KVC_TRY(open_folder(d, &folder));
    const kvc_status status = write_to(d, folder, name, value, size);
    kvc_folder_close(folder);
    return status;
}

static kvc_status remove_from(const directory *d, kvc_folder folder, const char *file_name) {
    kvc_own_file usage;
    kvc_file_info found;
    int64_t total;
    KVC_TRY(lock_usage(d, folder, &usage));
    kvc_status status = read_total(d, folder, &usage, &total);
    if (status == KVC_OK && kvc_file_find(folder, file_name, &found) && found.is_regular) {
        if (kvc_file_remove(folder, file_name))
            status = write_total(d, &usage, total - size_of(&found));
        else if (errno != ENOENT)
            status = fail_for(d, "remove", file_name);
    }
    kvc_own_file_close(&usage);
    return status;
}

static kvc_status remove_value(void *user, const uint8_t *name) {
    const directory *d = user;
    uint8_t header[HEADER];
    char file_name[NAME];
    kvc_folder folder;
    KVC_TRY(open_folder(d, &folder));
    describe(name, 0, header, file_name);
    const kvc_status status = remove_from(d, folder, file_name);
    kvc_folder_close(folder);
    return status;
}

/* ---- making and freeing ------------------------------------------------------------------------------------------ */

/* Removes temporary files of writers that were killed, counts the values, and evicts values beyond the limit. */
static kvc_status begin(const directory *d) {
    kvc_folder folder;
    value_files all;
    kvc_own_file usage;
    KVC_TRY(open_folder(d, &folder));
    const int is_locked = lock_usage(d, folder, &usage) == KVC_OK; /* a folder may be there to read only */
    kvc_status status = list_files(d, folder, &all);
    int64_t total = all.size;
    free(all.files);
    if (is_locked) {
        if (status == KVC_OK && d->max_bytes && total > d->max_bytes) status = evict(d, folder, 0, &total);
        if (status == KVC_OK) write_total(d, &usage, total);
        kvc_own_file_close(&usage);
    }
    kvc_folder_close(folder);
    return status;
}

kvc_status kvc_dir_store_new(const char *path, int64_t max_bytes, kvc_store **store) {
    if (!store) return kvc_fail(KVC_ERR_INVALID, "store is NULL: it is where the new one goes");
    *store = NULL;
    if (!path || !*path) return kvc_fail(KVC_ERR_INVALID, "path is empty: it names a folder");
    if (max_bytes < 0 || max_bytes > INT64_MAX / 2)
        return kvc_fail(KVC_ERR_INVALID, "max_bytes is %lld: it must be at least 0", (long long)max_bytes);
    KVC_TRY(kvc_own_files_init());
    directory *d = malloc(sizeof *d);
    if (!d) return kvc_fail(KVC_ERR_NOMEM, "out of memory for a store");
    *d = (directory){{sizeof d->store, d, read_value, write_value, remove_value}, max_bytes, kvc_folder_path(path)};
    kvc_status status = KVC_OK;
    if (!d->path)
        status = kvc_fail(errno == ENOMEM ? KVC_ERR_NOMEM : KVC_ERR_STORE, "no path of a folder comes from %.300s: %s",
                          path, strerror(errno));
    if (status == KVC_OK && !kvc_folder_make(d->path)) status = fail_for(d, "make", "its folder");
    if (status == KVC_OK) status = begin(d);
    if (status != KVC_OK)
        kvc_dir_store_free(&d->store);
    else
        *store = &d->store;
    return status;
}

void kvc_dir_store_free(kvc_store *store) {
    directory *d = store ? store->user : NULL;
    if (d) free(d->path);
    free(d);
}
