/* folder.h: a store in a folder, and a look at its files.  Define _XOPEN_SOURCE 700 or more first, for mkdtemp(), and
 * _FILE_OFFSET_BITS 64 and _TIME_BITS 64, as readdir() may fail with 32. */
#ifndef KVC_TEST_FOLDER_H
#define KVC_TEST_FOLDER_H

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "support/test.h"

enum { LENGTH = 1000, FILE_LENGTH = LENGTH + 84, MOST = 100000 };

static char folder[] = P_tmpdir "/kvcache-test-XXXXXX";

static inline const char *path_of(const char *name) {
    static _Thread_local char paths[2][600]; /* of this call and the one before */
    static _Thread_local int turn;
    snprintf(paths[turn ^= 1], sizeof *paths, "%s/a/b%s%s", folder, *name ? "/" : "", name);
    return paths[turn];
}

static inline kvc_store *open_store(int64_t max_bytes) {
    kvc_store *store = NULL;
    CHECKF(kvc_dir_store_new(path_of(""), max_bytes, &store) == KVC_OK, "%s", kvc_last_error());
    return store;
}

/* Calls a function with the name of each file that ends so; returns their number. */
static inline int for_each(const char *end, void (*call)(const char *)) {
    int num = 0;
    DIR *entries = opendir(path_of(""));
    for (const struct dirent *entry; entries && (entry = readdir(entries));) {
        const size_t size = strlen(entry->d_name), end_size = strlen(end);
        if (size < end_size || strcmp(entry->d_name + size - end_size, end)) continue;
        if (call) call(entry->d_name);
        num++;
    }
    if (entries) closedir(entries);
    return num;
}

static inline void remove_file(const char *name) { unlink(path_of(name)); }
static char found_name[300];
static inline void note_name(const char *name) { snprintf(found_name, sizeof found_name, "%s", name); }

static inline void empty_folder(void) {
    for_each(".kv", remove_file);
    for_each(".tmp", remove_file);
    remove_file("usage.lock");
}

static inline void remove_folders(void) {
    char parent[sizeof folder + 2];
    snprintf(parent, sizeof parent, "%s/a", folder);
    rmdir(path_of(""));
    rmdir(parent);
    rmdir(folder);
}

/* Makes a file of these bytes.  If the file exists, its first bytes are overwritten. */
static inline void write_at(const char *path, long at, const void *bytes, size_t size) {
    FILE *file = fopen(path, "r+b");
    if (!file) file = fopen(path, "wb");
    CHECK(file && !fseek(file, at, SEEK_SET) && fwrite(bytes, 1, size, file) == size && !fclose(file));
}

/* The bytes of values that usage.lock has. */
static inline int64_t usage(void) {
    uint8_t bytes[8] = {0};
    int64_t total = 0;
    FILE *file = fopen(path_of("usage.lock"), "rb");
    CHECK(file && fread(bytes, 1, 8, file) == 8 && !fclose(file));
    for (int i = 7; i >= 0; i--) total = total << 8 | bytes[i];
    return total;
}

static inline const uint8_t *name_of(int number) {
    static _Thread_local uint8_t name[KVC_NAME_BYTES];
    memset(name, number & 255, sizeof name);
    name[0] = (uint8_t)(number >> 8);
    return name;
}

static inline kvc_status put(const kvc_store *store, int number, int64_t size) {
    uint8_t value[MOST];
    for (int64_t i = 0; i < size; i++) value[i] = (uint8_t)(number + i * i);
    return store->write(store->user, name_of(number), value, size);
}

/* Reads a value of at most max_bytes; returns its size, -1 if that failed. */
static inline int64_t get(const kvc_store *store, int number, int64_t max_bytes) {
    uint8_t value[MOST];
    int64_t size = -1;
    if (store->read(store->user, name_of(number), value, max_bytes, &size) != KVC_OK) return -1;
    for (int64_t i = 0; size <= max_bytes && i < size; i++) CHECK(value[i] == (uint8_t)(number + i * i));
    return size;
}

#endif
