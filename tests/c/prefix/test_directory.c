/* Stores in folders, on every system.  Values come back, are refused or are evicted.  The tests also have other
 * programs' files, long names, threads that write to one folder, and a lock that somebody removes. */
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#define _TIME_BITS 64
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "base/files.h"
#include "support/folder.h"

static void test_values(void) {
    kvc_store *store = open_store(0), *other = open_store(0);
    CHECK(get(store, 1, MOST) == 0);
    for (int i = 0; i < 3; i++) CHECK(put(store, i, i ? 7 : MOST) == KVC_OK);
    CHECK(get(other, 0, MOST) == MOST && get(other, 1, 7) == 7);
    CHECK(put(other, 1, 3000) == KVC_OK && get(store, 1, MOST) == 3000); /* in place of the first one */
    CHECK(usage() == MOST + 3000 + 7 + 3 * 84);
    CHECK(get(store, 1, 2999) == 3000); /* too long: only its beginning is read */
    uint8_t beginning[8] = {0};
    int64_t size = 0;
    CHECK(store->read(store->user, name_of(1), beginning, 7, &size) == KVC_OK && size > 7 && beginning[7] == 0);
    for (int i = 0; i < 7; i++) CHECK(beginning[i] == 1 + i * i);
    CHECK(for_each(".kv", NULL) == 3 && for_each(".tmp", NULL) == 0);
    empty_folder();
    CHECK(!rmdir(path_of("")) && get(store, 1, MOST) == -1); /* a folder that is gone comes back */
    CHECK_FAILS(put(store, 1, 7), KVC_ERR_STORE, "cannot open its folder", "No such file");
    CHECK(!mkdir(path_of(""), 0700) && put(store, 1, 7) == KVC_OK && get(store, 1, 7) == 7);
    kvc_dir_store_free(store);
    kvc_dir_store_free(other);
    kvc_dir_store_free(NULL);
    empty_folder();
}

/* A removed value is gone, and its bytes are not counted.  Removing a name without a value does nothing. */
static void test_removing(void) {
    kvc_store *store = open_store(0);
    for (int i = 0; i < 3; i++) CHECK(put(store, i, LENGTH) == KVC_OK);
    for (int again = 0; again < 2; again++) {
        CHECK(store->remove(store->user, name_of(1)) == KVC_OK && get(store, 1, MOST) == 0);
        CHECK(get(store, 0, MOST) == LENGTH && get(store, 2, MOST) == LENGTH && usage() == 2 * FILE_LENGTH);
    }
    CHECK(put(store, 1, 7) == KVC_OK && get(store, 1, MOST) == 7);
    kvc_dir_store_free(store);
    empty_folder();
}

/* A file is the same on every system, byte for byte: its name too. */
static void test_bytes(void) {
    static const char name[] = "fa492884263b70ca235d44205ba9ed5c39c9971b.kv";
    kvc_store *store = open_store(0);
    uint8_t bytes[84 + 7 + 1];
    CHECK(put(store, 1, 7) == KVC_OK && for_each(".kv", note_name) == 1);
    CHECKF(!strcmp(found_name, name), "%s", found_name);
    FILE *file = fopen(path_of(found_name), "rb");
    CHECK(file && fread(bytes, 1, sizeof bytes, file) == 84 + 7 && !fclose(file));
    CHECK(!memcmp(bytes,
                  "kvcstore\x40\0\0\0\7\0\0\0\0\0\0\0"
                  "00010101",
                  28));
    for (int i = 0; i < 7; i++) CHECK(bytes[84 + i] == 1 + i * i);
    kvc_dir_store_free(store);
    empty_folder();
}

static void test_arguments(void) {
    kvc_store *store;
    CHECK_FAILS(kvc_dir_store_new(NULL, 0, &store), KVC_ERR_INVALID, "path", "empty");
    CHECK_FAILS(kvc_dir_store_new("", 0, &store), KVC_ERR_INVALID, "path", "empty");
    CHECK_FAILS(kvc_dir_store_new(P_tmpdir, 0, NULL), KVC_ERR_INVALID, "store", "NULL");
    CHECK_FAILS(kvc_dir_store_new(P_tmpdir, -1, &store), KVC_ERR_INVALID, "max_bytes", "-1");
}

/* A path may have names beyond ASCII, and be longer than the 260 characters of older systems. */
static void test_long_path(void) {
    static const char part[] = "/a folder of a prompt's blocks, f\xc3\xbcr Bl\xc3\xb6"
                               "cke \xe5\x9d\x97";
    char path[900] = "";
    kvc_store *store = NULL;
    snprintf(path, sizeof path, "%s", folder);
    for (int i = 0; i < 12; i++) strcat(path, part);
    CHECK(strlen(path) > 500);
    CHECKF(kvc_dir_store_new(path, 0, &store) == KVC_OK, "%s", kvc_last_error());
    if (!store) return;
    CHECKF(put(store, 1, LENGTH) == KVC_OK, "%s", kvc_last_error());
    CHECK(put(store, 1, 7) == KVC_OK && get(store, 1, MOST) == 7);
    kvc_dir_store_free(store);
    kvc_folder open;
    CHECK(kvc_folder_open(&open, path) && kvc_file_remove(open, "usage.lock"));
    CHECK(for_each(".kv", NULL) == 0); /* of the folder that the others use */
    kvc_file_remove(open, "fa492884263b70ca235d44205ba9ed5c39c9971b.kv");
    kvc_folder_close(open);
    for (int i = 0; i < 12; i++) {
        CHECK(!rmdir(path));
        *strrchr(path, '/') = 0;
    }
}

/* A relative path keeps the meaning that it had when the store was made, and may end with slashes. */
static void test_relative_path(void) {
    kvc_store *store = NULL;
    CHECK(!chdir(folder));
    CHECKF(kvc_dir_store_new("a/b//", 0, &store) == KVC_OK, "%s", kvc_last_error());
    CHECK(!chdir("a") && put(store, 1, 7) == KVC_OK && for_each(".kv", NULL) == 1 && !chdir(P_tmpdir));
    kvc_dir_store_free(store);
    empty_folder();
}

/* Values that were read or written least recently go first, until 1/16 is free. */
static void test_eviction(void) {
    kvc_store *store = open_store(16 * FILE_LENGTH);
    for (int i = 0; i < 16; i++) CHECK(put(store, i, LENGTH) == KVC_OK);
    CHECK(for_each(".kv", NULL) == 16 && usage() == 16 * FILE_LENGTH);
    CHECK(get(store, 0, MOST) == LENGTH && get(store, 1, 0) == LENGTH); /* to ask for the size is no use */
    CHECK(put(store, 16, LENGTH) == KVC_OK);                            /* 1 and 2 go, in place of 0 */
    for (int i = 0; i < 17; i++) CHECKF(get(store, i, MOST) == (i == 1 || i == 2 ? 0 : LENGTH), "%d", i);
    CHECK(put(store, 5, LENGTH) == KVC_OK && for_each(".kv", NULL) == 15); /* there is room for its replacement */
    CHECK(usage() == 15 * FILE_LENGTH);
    CHECK_FAILS(put(store, 3, 16 * FILE_LENGTH - 83), KVC_ERR_STORE, "max_bytes", "17344");
    CHECK(put(store, 20, 16 * FILE_LENGTH - 84) == KVC_OK && for_each(".kv", NULL) == 1);
    CHECK(truncate(path_of("usage.lock"), 3) == 0 && put(store, 1, LENGTH) == KVC_OK); /* no count: counted anew */
    CHECK(for_each(".kv", NULL) == 1 && usage() == FILE_LENGTH);
    write_at(path_of("usage.lock"), 0, "\xff\xff\xff\xff\xff\xff\xff\xff", 8);
    CHECK(put(store, 2, LENGTH) == KVC_OK && usage() == 2 * FILE_LENGTH);
    for (int i = 0; i < 4; i++) CHECK(put(store, i, LENGTH) == KVC_OK);
    kvc_dir_store_free(store);
    store = open_store(3 * FILE_LENGTH); /* a lower limit, which holds before anything is written: a disk may be full */
    CHECK(for_each(".kv", NULL) == 2 && usage() == 2 * FILE_LENGTH && get(store, 3, MOST) == LENGTH);
    kvc_dir_store_free(store);
    empty_folder();
}

/* A file counts as missing if it was cut, made longer or altered, if it has another's name, or if it is no file. */
static void test_damage(void) {
    kvc_store *store = open_store(0);
    char path[600];
    CHECK(put(store, 1, LENGTH) == KVC_OK);
    for_each(".kv", note_name);
    snprintf(path, sizeof path, "%s", path_of(found_name));
    for (int size = 0; size < FILE_LENGTH; size += 5) {
        CHECK(!truncate(path, size) && get(store, 1, MOST) == 0);
        CHECK(put(store, 1, LENGTH) == KVC_OK && get(store, 1, MOST) == LENGTH);
    }
    CHECK(!truncate(path, FILE_LENGTH + 1) && get(store, 1, MOST) == 0);
    for (int at = 0; at < 84; at += 7) {
        CHECK(put(store, 1, LENGTH) == KVC_OK);
        write_at(path, at, "\xff", 1);
        CHECK(get(store, 1, MOST) == 0);
    }
    CHECK(put(store, 1, LENGTH) == KVC_OK && put(store, 2, LENGTH) == KVC_OK);
    for_each(".kv", note_name);
    if (!strcmp(path, path_of(found_name)))
        for_each(".kv", remove_file), put(store, 2, LENGTH), for_each(".kv", note_name);
    unlink(path);
    CHECK(!rename(path_of(found_name), path) && get(store, 1, MOST) == 0);
    unlink(path);
    CHECK(!mkdir(path, 0700) && get(store, 1, MOST) == 0);
    CHECK(put(store, 1, LENGTH) == KVC_ERR_STORE && get(store, 1, MOST) == 0 && for_each(".tmp", NULL) == 0);
    CHECK(!rmdir(path) && put(store, 1, LENGTH) == KVC_OK);
    kvc_dir_store_free(store);
    empty_folder();
}

static void make(const char *name) { write_at(path_of(name), 0, "something", 9); }
static int is_there(const char *name) { return !access(path_of(name), F_OK); }

/* Other files stay, whatever room is needed; a temporary file goes unless its writer lives. */
static void test_files_of_others(void) {
    static const char *const names[] = {"notes", "0.kv", "00000000000000000000000000000000000000000.kv",
                                        "000000000000000000000000000000000000000g.kv",
                                        "0000000000000000000000000000000.tmp"};
    static const char living[] = "00000000000000000000000000000001.tmp",
                      dead[] = "00000000000000000000000000000002.tmp";
    kvc_own_file own;
    kvc_folder open;
    kvc_store *store = open_store(2 * FILE_LENGTH);
    for (int i = 0; i < 5; i++) make(names[i]);
    make(dead);
    CHECK(kvc_folder_open(&open, path_of("")) && kvc_own_file_open(&own, open, living, 1) && kvc_file_lock(own.file));
    kvc_dir_store_free(store);
    store = open_store(2 * FILE_LENGTH);
    CHECK(is_there(living) && !is_there(dead));
    make(dead);
    for (int i = 0; i < 9; i++) CHECK(put(store, i, LENGTH) == KVC_OK);
    for (int i = 0; i < 5; i++) CHECKF(is_there(names[i]), "%s", names[i]);
    CHECK(is_there(living) && !is_there(dead));
    kvc_own_file_close(&own);
    kvc_folder_close(open);
    unlink(path_of("usage.lock"));
    CHECK(!link(path_of("notes"), path_of("usage.lock"))); /* a write would reach another file */
    CHECK_FAILS(put(store, 1, LENGTH), KVC_ERR_STORE, "cannot use usage.lock", "no file of this folder alone");
    unlink(path_of("usage.lock"));
    for (int i = 0; i < 5; i++) remove_file(names[i]);
    kvc_dir_store_free(store);
    empty_folder();
}

enum { NUM_WRITERS = 3, STEPS = 150 };

static void *write_some(void *argument) {
    kvc_store *const own = open_store(12 * FILE_LENGTH), *const stores[] = {argument, own};
    for (int i = 0; i < STEPS; i++) {
        CHECKF(put(stores[i & 1], i * 7 % 40, 1 + i * 131 % LENGTH) == KVC_OK, "%s", kvc_last_error());
        CHECKF(get(stores[i & 1], i * 3 % 40, MOST) >= 0, "%s", kvc_last_error());
    }
    kvc_dir_store_free(own);
    return NULL;
}

/* Threads write, read and evict at the same time; in the end the count is right. */
static void test_threads(void) {
    pthread_t threads[NUM_WRITERS];
    kvc_store *store = open_store(12 * FILE_LENGTH);
    for (int i = 0; i < NUM_WRITERS; i++) pthread_create(&threads[i], NULL, write_some, store);
    for (int i = 0; i < NUM_WRITERS; i++) pthread_join(threads[i], NULL);
    const int64_t counted = usage();
    kvc_dir_store_free(store);
    kvc_dir_store_free(open_store(0));
    CHECKF(usage() == counted && counted <= 12 * FILE_LENGTH, "%lld bytes, not %lld", (long long)counted,
           (long long)usage());
    CHECK(for_each(".tmp", NULL) == 0);
    empty_folder();
}

static atomic_int num_done;

static void *write_all(void *store) {
    for (int i = 0; i < STEPS; i++) CHECKF(put(store, i % 40, LENGTH) == KVC_OK, "%s", kvc_last_error());
    atomic_fetch_add(&num_done, 1);
    return NULL;
}

/* Whoever needs the lock makes it again where somebody removes it, whenever that is. */
static void test_lost_lock(void) {
    pthread_t threads[NUM_WRITERS];
    kvc_store *store = open_store(0);
    for (int i = 0; i < NUM_WRITERS; i++) pthread_create(&threads[i], NULL, write_all, store);
    while (atomic_load(&num_done) < NUM_WRITERS) remove_file("usage.lock");
    for (int i = 0; i < NUM_WRITERS; i++) pthread_join(threads[i], NULL);
    CHECK(for_each(".kv", NULL) == 40 && for_each(".tmp", NULL) == 0);
    CHECK(put(store, 1, LENGTH) == KVC_OK && usage() == 40 * FILE_LENGTH);
    kvc_dir_store_free(store);
    empty_folder();
}

#if defined(_WIN32)
static void *close_late(void *file) {
    nanosleep(&(struct timespec){0, 50000000}, NULL);
    CloseHandle(file);
    return NULL;
}

/* Files that somebody reads and shares with nobody, as virus scanners do, are waited for. */
static void test_busy_files(void) {
    static const char *const names[] = {"usage.lock", "fa492884263b70ca235d44205ba9ed5c39c9971b.kv"};
    kvc_store *store = open_store(0);
    CHECK(put(store, 1, 7) == KVC_OK);
    for (int i = 0; i < 2; i++) {
        pthread_t thread;
        HANDLE file = CreateFileA(path_of(names[i]), GENERIC_READ, 0, NULL, OPEN_EXISTING, 0, NULL);
        CHECK(file != INVALID_HANDLE_VALUE && !pthread_create(&thread, NULL, close_late, file));
        CHECKF(put(store, 1, LENGTH) == KVC_OK, "%s: %s", names[i], kvc_last_error());
        pthread_join(thread, NULL);
    }
    CHECK(usage() == FILE_LENGTH);
    kvc_dir_store_free(store);
    empty_folder();
}
#else
static void test_busy_files(void) {}
#endif

int main(void) {
    if (!mkdtemp(folder)) return 1;
    test_arguments();
    test_values();
    test_removing();
    test_bytes();
    test_long_path();
    test_relative_path();
    test_eviction();
    test_damage();
    test_files_of_others();
    test_threads();
    test_lost_lock();
    test_busy_files();
    remove_folders();
    return test_result();
}
