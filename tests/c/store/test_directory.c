/* Stores in folders: what comes back, what is refused, who is evicted; files of others; threads and children that write
 * to one folder; and each request to the system failing in turn. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "support/memory.h"

enum { SIZE = 1000, FILE_SIZE = SIZE + 84, MOST = 100000 };

/* ---- requests of the core ---------------------------------------------------------------------------------------- */

static memory heap; /* its numbers are of all requests */

#define REFUSE(error, failed, call) (memory_refuses(&heap) ? (errno = (error), (failed)) : (call))

void *__wrap_malloc(size_t size) { return REFUSE(ENOMEM, NULL, malloc(size)); }
void *__wrap_realloc(void *p, size_t size) { return REFUSE(ENOMEM, NULL, realloc(p, size)); }
int __wrap_open(const char *path, int flags) { return REFUSE(EMFILE, -1, open(path, flags)); }
int __wrap_openat(int folder, const char *path, int flags, mode_t mode) {
    return REFUSE(EMFILE, -1, openat(folder, path, flags, mode));
}
DIR *__wrap_fdopendir(int file) { return REFUSE(ENOMEM, NULL, fdopendir(file)); }
int __wrap_flock(int file, int how) { return REFUSE(ENOLCK, -1, flock(file, how)); }
int __wrap_renameat(int a, const char *from, int b, const char *to) {
    return REFUSE(EIO, -1, renameat(a, from, b, to));
}
ssize_t __wrap_read(int file, void *data, size_t size) { return REFUSE(EIO, -1, read(file, data, size)); }
ssize_t __wrap_write(int file, const void *data, size_t size) { return REFUSE(ENOSPC, -1, write(file, data, size)); }
ssize_t __wrap_pwrite(int file, const void *data, size_t size, off_t at) {
    return REFUSE(ENOSPC, -1, pwrite(file, data, size, at));
}

/* ---- a folder ---------------------------------------------------------------------------------------------------- */

static char folder[] = P_tmpdir "/kvcache-test-XXXXXX";

static const char *path_of(const char *name) {
    static char paths[2][600]; /* of this call and the one before */
    static int turn;
    snprintf(paths[turn ^= 1], sizeof *paths, "%s/a/b/%s", folder, name);
    return paths[turn];
}

static kvc_store *open_store(int64_t max_bytes) {
    kvc_store *store = NULL;
    CHECKF(kvc_dir_store_new(path_of(""), max_bytes, &store) == KVC_OK, "%s", kvc_last_error());
    return store;
}

/* Calls a function with the name of each file that ends so; returns their number. */
static int for_each(const char *end, void (*call)(const char *)) {
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

static void remove_file(const char *name) { unlink(path_of(name)); }
static char found_name[300];
static void note_name(const char *name) { snprintf(found_name, sizeof found_name, "%s", name); }

static void empty_folder(void) {
    for_each(".kv", remove_file);
    for_each(".tmp", remove_file);
    remove_file("usage.lock");
}

/* The bytes of values that usage.lock has. */
static int64_t usage(void) {
    uint8_t bytes[8] = {0};
    int64_t total = 0;
    const int file = open(path_of("usage.lock"), O_RDONLY);
    CHECK(read(file, bytes, 8) == 8);
    close(file);
    for (int i = 7; i >= 0; i--) total = total << 8 | bytes[i];
    return total;
}

static const uint8_t *name_of(int number) {
    static _Thread_local uint8_t name[KVC_NAME_BYTES];
    memset(name, number & 255, sizeof name);
    name[0] = (uint8_t)(number >> 8);
    return name;
}

static kvc_status put(const kvc_store *store, int number, int64_t size) {
    uint8_t value[MOST];
    for (int64_t i = 0; i < size; i++) value[i] = (uint8_t)(number + i * i);
    return store->write(store->user, name_of(number), value, size);
}

/* Reads a value of at most max_bytes; returns its size, -1 if that failed. */
static int64_t get(const kvc_store *store, int number, int64_t max_bytes) {
    uint8_t value[MOST];
    int64_t size = -1;
    if (store->read(store->user, name_of(number), value, max_bytes, &size) != KVC_OK) return -1;
    for (int64_t i = 0; size <= max_bytes && i < size; i++) CHECK(value[i] == (uint8_t)(number + i * i));
    return size;
}

static int num_open_files(void) {
    int num = 0;
    for (int i = 0; i < 100; i++) num += fcntl(i, F_GETFD) >= 0;
    return num;
}

/* ---- tests ------------------------------------------------------------------------------------------------------- */

static void test_values(void) {
    kvc_store *store = open_store(0), *other = open_store(0);
    struct stat found;
    CHECK(get(store, 1, MOST) == 0);
    for (int i = 0; i < 3; i++) CHECK(put(store, i, i ? 7 : MOST) == KVC_OK);
    CHECK(get(other, 0, MOST) == MOST && get(other, 1, 7) == 7);
    CHECK(put(other, 1, 3000) == KVC_OK && get(store, 1, MOST) == 3000); /* in place of the first one */
    CHECK(usage() == MOST + 3000 + 7 + 3 * 84);
    CHECK(get(store, 1, 2999) == 3000); /* too long, and not read */
    CHECK(!stat(path_of(""), &found) && (found.st_mode & 0777) == 0700);
    for_each(".kv", note_name);
    CHECK(!stat(path_of(found_name), &found) && (found.st_mode & 0777) == 0600);
    CHECK(for_each(".kv", NULL) == 3 && for_each(".tmp", NULL) == 0);
    empty_folder();
    CHECK(!rmdir(path_of("")) && get(store, 1, MOST) == -1); /* one that is gone comes back */
    CHECK_FAILS(put(store, 1, 7), KVC_ERR_STORE, "cannot open its folder", "No such file");
    CHECK(!mkdir(path_of(""), 0700) && put(store, 1, 7) == KVC_OK && get(store, 1, 7) == 7);
    kvc_dir_store_free(store);
    kvc_dir_store_free(other);
    kvc_dir_store_free(NULL);
    empty_folder();
}

static void test_arguments(void) {
    kvc_store *store;
    CHECK_FAILS(kvc_dir_store_new(NULL, 0, &store), KVC_ERR_INVALID, "path", "empty");
    CHECK_FAILS(kvc_dir_store_new("", 0, &store), KVC_ERR_INVALID, "path", "empty");
    CHECK_FAILS(kvc_dir_store_new(P_tmpdir, 0, NULL), KVC_ERR_INVALID, "store", "NULL");
    CHECK_FAILS(kvc_dir_store_new(P_tmpdir, -1, &store), KVC_ERR_INVALID, "max_bytes", "-1");
    CHECK_FAILS(kvc_dir_store_new("/dev/null/a", 0, &store), KVC_ERR_STORE, "/dev/null/a", "Not a directory");
    CHECK_FAILS(kvc_dir_store_new("/proc/a/b", 0, &store), KVC_ERR_STORE, "cannot make its folder", "No such file");
    char path[600];
    snprintf(path, sizeof path, "/dev/null/%0500d", 0); /* so long that there is no room for all of it */
    CHECK_FAILS(kvc_dir_store_new(path, 0, &store), KVC_ERR_STORE, "cannot make its folder: ", "");
    snprintf(path, sizeof path, "%s", path_of("x"));
    fflush(stdout);
    const pid_t child = fork();
    if (!child) {
        test_failures = 0;
        CHECK(!chmod(folder, 0555) && (geteuid() || !setuid(65534))); /* for root no folder is to be read only */
        CHECK_FAILS(kvc_dir_store_new(path, 0, &store), KVC_ERR_STORE, "cannot make its folder", "Permission denied");
        fflush(stdout);
        _exit(test_failures != 0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && !WEXITSTATUS(status) && !chmod(folder, 0700));
}

/* Those that were read or written least recently go first, until 1/16 is free. */
static void test_eviction(void) {
    kvc_store *store = open_store(16 * FILE_SIZE);
    for (int i = 0; i < 16; i++) CHECK(put(store, i, SIZE) == KVC_OK);
    CHECK(for_each(".kv", NULL) == 16 && usage() == 16 * FILE_SIZE);
    CHECK(get(store, 0, MOST) == SIZE && put(store, 16, SIZE) == KVC_OK); /* 1 and 2 go, in place of 0 */
    for (int i = 0; i < 17; i++) CHECKF(get(store, i, MOST) == (i == 1 || i == 2 ? 0 : SIZE), "%d", i);
    CHECK(put(store, 5, SIZE) == KVC_OK && for_each(".kv", NULL) == 15); /* there is room for its replacement */
    CHECK(usage() == 15 * FILE_SIZE);
    CHECK_FAILS(put(store, 3, 16 * FILE_SIZE - 83), KVC_ERR_STORE, "max_bytes", "17344");
    CHECK(put(store, 20, 16 * FILE_SIZE - 84) == KVC_OK && for_each(".kv", NULL) == 1);
    CHECK(truncate(path_of("usage.lock"), 3) == 0 && put(store, 1, SIZE) == KVC_OK); /* no count: counted anew */
    CHECK(for_each(".kv", NULL) == 1 && usage() == FILE_SIZE);
    const int file = open(path_of("usage.lock"), O_WRONLY);
    CHECK(write(file, "\xff\xff\xff\xff\xff\xff\xff\xff", 8) == 8 && !close(file));
    CHECK(put(store, 2, SIZE) == KVC_OK && usage() == 2 * FILE_SIZE);
    for (int i = 0; i < 4; i++) CHECK(put(store, i, SIZE) == KVC_OK);
    kvc_dir_store_free(store);
    store =
        open_store(3 * FILE_SIZE); /* of a lower limit, which holds before anything is written: a disk may be full */
    CHECK(for_each(".kv", NULL) == 2 && usage() == 2 * FILE_SIZE && get(store, 3, MOST) == SIZE);
    kvc_dir_store_free(store);
    empty_folder();
}

/* Files that are said to be used in thousands of years, or to have more bytes than a disk has, count as such. */
static void test_odd_files(void) {
    const struct timespec late[2] = {{0}, {250000000000, 5}};
    kvc_store *store = open_store(3 * FILE_SIZE);
    CHECK(put(store, 1, SIZE) == KVC_OK);
    for_each(".kv", note_name);
    CHECK(!utimensat(AT_FDCWD, path_of(found_name), late, 0));
    for (int i = 2; i < 5; i++) CHECK(put(store, i, SIZE) == KVC_OK);
    CHECK(get(store, 1, MOST) == SIZE && for_each(".kv", NULL) == 2);
    for (int i = 0; i < 3; i++) {
        snprintf(found_name, sizeof found_name, "%040d.kv", i);
        const int file = open(path_of(found_name), O_WRONLY | O_CREAT, 0600);
        for (int64_t size = INT64_MAX - 4095; size > FILE_SIZE && ftruncate(file, size); size /= 2) continue;
        close(file);
    }
    kvc_dir_store_free(store);
    kvc_dir_store_free(open_store(0)); /* counts them */
    store = open_store(2 * FILE_SIZE);
    CHECK(put(store, 1, SIZE) == KVC_OK && usage() <= 2 * FILE_SIZE && for_each(".kv", NULL) <= 2);
    kvc_dir_store_free(store);
    empty_folder();
}

/* A file that was cut, made longer or altered, of another name, or that is none, counts as missing. */
static void test_damage(void) {
    kvc_store *store = open_store(0);
    char path[600];
    CHECK(put(store, 1, SIZE) == KVC_OK);
    for_each(".kv", note_name);
    snprintf(path, sizeof path, "%s", path_of(found_name));
    for (int size = 0; size < FILE_SIZE; size += 5) {
        CHECK(!truncate(path, size) && get(store, 1, MOST) == 0);
        CHECK(put(store, 1, SIZE) == KVC_OK && get(store, 1, MOST) == SIZE);
    }
    CHECK(!truncate(path, FILE_SIZE + 1) && get(store, 1, MOST) == 0);
    CHECK(!truncate(path, (off_t)1 << 40) && get(store, 1, MOST) == 0); /* sparse, and not what it says */
    for (int at = 0; at < 84; at += 7) {
        CHECK(put(store, 1, SIZE) == KVC_OK);
        const int file = open(path, O_WRONLY);
        CHECK(pwrite(file, "\xff", 1, at) == 1 && !close(file) && get(store, 1, MOST) == 0);
    }
    CHECK(put(store, 1, SIZE) == KVC_OK && put(store, 2, SIZE) == KVC_OK);
    for_each(".kv", note_name);
    if (!strcmp(path, path_of(found_name)))
        for_each(".kv", remove_file), put(store, 2, SIZE), for_each(".kv", note_name);
    CHECK(!rename(path_of(found_name), path) && get(store, 1, MOST) == 0);
    for (int kind = 0; kind < 4; kind++) {
        unlink(path);
        CHECK(!(kind == 0   ? symlink("/etc/passwd", path)
                : kind == 1 ? mkfifo(path, 0600)
                : kind == 2 ? mkdir(path, 0700)
                            : symlink("nothing", path)));
        CHECK(get(store, 1, MOST) == 0);
        CHECK(put(store, 1, SIZE) == (kind == 2 ? KVC_ERR_STORE : KVC_OK)); /* a folder stays */
        CHECK(get(store, 1, MOST) == (kind == 2 ? 0 : SIZE) && for_each(".tmp", NULL) == 0);
        if (kind == 2) rmdir(path);
    }
    kvc_dir_store_free(store);
    empty_folder();
}

static void make(const char *name) {
    const int file = open(path_of(name), O_WRONLY | O_CREAT, 0600);
    CHECK(file >= 0 && write(file, "something", 9) == 9 && !close(file));
}

/* Other files stay, whatever room is needed; a temporary file goes unless its writer lives. */
static void test_files_of_others(void) {
    static const char *const names[] = {"notes", "0.kv", "00000000000000000000000000000000000000000.kv",
                                        "000000000000000000000000000000000000000g.kv",
                                        "0000000000000000000000000000000.tmp"};
    static const char living[] = "00000000000000000000000000000001.tmp",
                      dead[] = "00000000000000000000000000000002.tmp";
    struct stat found;
    kvc_store *store = open_store(2 * FILE_SIZE);
    for (int i = 0; i < 5; i++) make(names[i]);
    make(living);
    make(dead);
    const int file = open(path_of(living), O_WRONLY);
    CHECK(!flock(file, LOCK_EX));
    kvc_dir_store_free(store);
    store = open_store(2 * FILE_SIZE);
    for (int i = 0; i < 9; i++) CHECK(put(store, i, SIZE) == KVC_OK);
    for (int i = 0; i < 5; i++) CHECKF(!stat(path_of(names[i]), &found), "%s", names[i]);
    CHECK(!stat(path_of(living), &found) && stat(path_of(dead), &found));
    close(file);
    unlink(path_of("usage.lock"));
    CHECK(!link(path_of("notes"), path_of("usage.lock"))); /* a write would reach another file */
    CHECK_FAILS(put(store, 1, SIZE), KVC_ERR_STORE, "cannot use usage.lock", "");
    unlink(path_of("usage.lock"));
    CHECK(!symlink("notes", path_of("usage.lock")));
    CHECK_FAILS(put(store, 1, SIZE), KVC_ERR_STORE, "cannot open usage.lock", "");
    unlink(path_of("usage.lock"));
    CHECK(!mkfifo(path_of("usage.lock"), 0600));
    CHECK_FAILS(put(store, 1, SIZE), KVC_ERR_STORE, "cannot use usage.lock", "no file of this folder alone");
    for (int i = 0; i < 5; i++) remove_file(names[i]);
    kvc_dir_store_free(store);
    empty_folder();
}

/* A disk that is full, as by a limit on the size of files: what was there stays, and nothing is left. */
static void test_full_disk(void) {
    kvc_store *store = open_store(0);
    struct rlimit limit;
    CHECK(put(store, 1, 700) == KVC_OK);
    CHECK(!getrlimit(RLIMIT_FSIZE, &limit) && signal(SIGXFSZ, SIG_IGN) != SIG_ERR);
    const rlim_t before = limit.rlim_cur;
    for (int most = 8; most < 1000; most += 90) {
        limit.rlim_cur = (rlim_t)most;
        CHECK(!setrlimit(RLIMIT_FSIZE, &limit));
        CHECK_FAILS(put(store, 1, SIZE), KVC_ERR_STORE, "cannot write", "File too large");
        CHECK(get(store, 1, MOST) == 700 && for_each(".tmp", NULL) == 0 && for_each(".kv", NULL) == 1);
    }
    limit.rlim_cur = before;
    CHECK(!setrlimit(RLIMIT_FSIZE, &limit) && put(store, 1, SIZE) == KVC_OK && get(store, 1, MOST) == SIZE);
    kvc_dir_store_free(store);
    empty_folder();
}

/* Each request to the system fails, alone, with the next and with all that follow; no file stays open, no value is lost
 * but one that was to be evicted or replaced, and the next call goes on. */
static void test_failing_requests(void) {
    static const int mosts[] = {1, 2, 10000};
    for (int kind = 0; kind < 3; kind++)
        for (int n = 0, is_over = 0; !is_over; n++) {
            empty_folder();
            kvc_store *store = open_store(4 * FILE_SIZE), *another = NULL;
            for (int i = 0; i < 4; i++) CHECK(put(store, i, SIZE) == KVC_OK);
            make("00000000000000000000000000000002.tmp");
            const int files = num_open_files();
            memory_fail(&heap, n, mosts[kind]);
            const kvc_status opened = kvc_dir_store_new(path_of(""), 4 * FILE_SIZE, &another);
            const int64_t size = get(store, 3, MOST);
            const kvc_status status = put(store, 4, SIZE);
            heap.is_failing = 0;
            is_over = !heap.failed;
            CHECK(files == num_open_files() && (size == SIZE || size == -1));
            CHECK(opened == KVC_OK || opened == KVC_ERR_STORE || opened == KVC_ERR_NOMEM);
            CHECK(status == KVC_OK || status == KVC_ERR_STORE || status == KVC_ERR_NOMEM);
            CHECK(!is_over || (opened == KVC_OK && size == SIZE && status == KVC_OK));
            CHECK(put(store, 4, SIZE) == KVC_OK && get(store, 4, MOST) == SIZE && get(store, 3, MOST) == SIZE);
            CHECK(for_each(".tmp", NULL) <= 1); /* one whose removal was not tried */
            if (opened == KVC_OK) kvc_dir_store_free(another);
            kvc_dir_store_free(store);
        }
    empty_folder();
}

/* ---- threads and processes --------------------------------------------------------------------------------------- */

enum { NUM_WRITERS = 3, STEPS = 150 };

static atomic_int is_over;

static void *write_some(void *argument) {
    const kvc_store *store = argument;
    for (int i = 0; i < STEPS; i++) {
        CHECKF(put(store, i * 7 % 40, 1 + i * 131 % SIZE) == KVC_OK, "%s", kvc_last_error());
        CHECK(get(store, i * 3 % 40, MOST) >= 0);
    }
    return NULL;
}

static void *write_always(void *argument) {
    const kvc_store *store = argument;
    for (int i = 0; !atomic_load(&is_over); i++) CHECK(put(store, i % 40, SIZE) == KVC_OK);
    return NULL;
}

/* Processes and threads write, read and evict at the same time; in the end the count is right. */
static void test_sharing(void) {
    pthread_t threads[NUM_WRITERS];
    kvc_store *store = open_store(12 * FILE_SIZE);
    fflush(stdout);
    const pid_t child = fork();
    if (!child) test_failures = 0;
    for (int i = 0; i < NUM_WRITERS; i++) pthread_create(&threads[i], NULL, write_some, store);
    for (int i = 0; i < NUM_WRITERS; i++) pthread_join(threads[i], NULL);
    if (!child) _exit(test_failures != 0);
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && !WEXITSTATUS(status));
    const int64_t counted = usage();
    kvc_dir_store_free(store);
    kvc_dir_store_free(open_store(0));
    CHECKF(usage() == counted && counted <= 12 * FILE_SIZE, "%lld bytes, not %lld", (long long)counted,
           (long long)usage());
    CHECK(for_each(".tmp", NULL) == 0);
    empty_folder();
}

static void *write_one(void *store) {
    CHECKF(put(store, 1, SIZE) == KVC_OK, "%s", kvc_last_error());
    return NULL;
}

/* Who waits for the lock of a file that is removed meanwhile, with all others, counts in the one that takes its place.
 */
static void test_removed_lock(void) {
    kvc_store *store = open_store(0);
    pthread_t thread;
    const int file = open(path_of("usage.lock"), O_RDWR);
    CHECK(!flock(file, LOCK_EX) && !pthread_create(&thread, NULL, write_one, store));
    while (!for_each(".tmp", NULL)) sched_yield();
    nanosleep(&(struct timespec){0, 50000000}, NULL); /* until it waits */
    remove_file("usage.lock");
    CHECK(!close(file) && !pthread_join(thread, NULL));
    CHECK(for_each(".kv", NULL) == 1 && usage() == FILE_SIZE);
    kvc_dir_store_free(store);
    empty_folder();
}

/* Children that are forked while a thread writes have none of its files, and keep none of its locks. */
static void test_fork(void) {
    pthread_t thread;
    kvc_store *store = open_store(12 * FILE_SIZE);
    kvc_store *unlimited = open_store(0); /* evicts nothing, and so needs no memory: sanitizers' malloc may hang */
    const int files = num_open_files();
    pid_t children[30];
    pthread_create(&thread, NULL, write_always, store);
    fflush(stdout);
    for (int i = 0; i < 30; i++) {
        nanosleep(&(struct timespec){0, 300000}, NULL);
        children[i] = fork();
        if (children[i]) continue;
        alarm(60);
        test_failures = 0;
        /* One more or less: the folder, or a file that is read or listed, has no lock. */
        CHECKF(num_open_files() <= files + 2, "%d open files, not %d", num_open_files(), files);
        CHECKF(put(unlimited, 41, SIZE) == KVC_OK, "%s", kvc_last_error());
        nanosleep(&(struct timespec){0, 200000000}, NULL); /* it lives on, and holds nothing up */
        fflush(stdout);
        _exit(test_failures != 0);
    }
    atomic_store(&is_over, 1);
    pthread_join(thread, NULL);
    for (int i = 0, status; i < 30; i++)
        CHECK(waitpid(children[i], &status, 0) == children[i] && WIFEXITED(status) && !WEXITSTATUS(status));
    kvc_dir_store_free(store);
    kvc_dir_store_free(unlimited);
    empty_folder();
}

int main(void) {
    memory_init(&heap);
    if (!mkdtemp(folder)) return 1;
    test_arguments();
    test_values();
    test_eviction();
    test_odd_files();
    test_damage();
    test_files_of_others();
    test_full_disk();
    test_failing_requests();
    test_sharing();
    test_removed_lock();
    test_fork();
    rmdir(path_of(""));
    snprintf(found_name, sizeof found_name, "%s/a", folder);
    rmdir(found_name);
    rmdir(folder);
    return test_result();
}
