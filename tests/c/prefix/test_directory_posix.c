/* Stores in folders, on POSIX: links and modes of files, a full disk, children of fork(), each request to the system
 * failing in turn, and random steps. Not for Windows: it has none of them, nor can requests be diverted. */
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#define _TIME_BITS 64
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

#include "support/folder.h"
#include "support/memory.h"

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

static int num_open_files(void) {
    int num = 0;
    for (int i = 0; i < 100; i++) num += fcntl(i, F_GETFD) >= 0;
    return num;
}

/* ---- tests ------------------------------------------------------------------------------------------------------- */

/* Nobody else may read the files, which tell what was in the prompts. */
static void test_modes(void) {
    kvc_store *store = open_store(0);
    struct stat found;
    CHECK(put(store, 1, 7) == KVC_OK);
    CHECK(!stat(path_of(""), &found) && (found.st_mode & 0777) == 0700);
    for_each(".kv", note_name);
    CHECK(!stat(path_of(found_name), &found) && (found.st_mode & 0777) == 0600);
    kvc_dir_store_free(store);
    empty_folder();
}

/* The error of a folder that cannot be made is the first one, whatever its path. */
static void test_paths(void) {
    kvc_store *store;
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

/* Files that are said to be used in thousands of years, or to have more bytes than a disk has, count as such. */
static void test_odd_files(void) {
    const struct timespec late[2] = {{0}, {250000000000, 5}};
    kvc_store *store = open_store(3 * FILE_LENGTH);
    CHECK(put(store, 1, LENGTH) == KVC_OK);
    for_each(".kv", note_name);
    CHECK(!utimensat(AT_FDCWD, path_of(found_name), late, 0));
    for (int i = 2; i < 5; i++) CHECK(put(store, i, LENGTH) == KVC_OK);
    CHECK(get(store, 1, MOST) == LENGTH && for_each(".kv", NULL) == 2);
    for (int i = 0; i < 3; i++) {
        snprintf(found_name, sizeof found_name, "%040d.kv", i);
        const int file = open(path_of(found_name), O_WRONLY | O_CREAT, 0600);
        for (int64_t size = INT64_MAX - 4095; size > FILE_LENGTH && ftruncate(file, size); size /= 2) continue;
        close(file);
    }
    kvc_dir_store_free(store);
    kvc_dir_store_free(open_store(0)); /* counts them */
    store = open_store(2 * FILE_LENGTH);
    CHECK(put(store, 1, LENGTH) == KVC_OK && usage() <= 2 * FILE_LENGTH && for_each(".kv", NULL) <= 2);
    kvc_dir_store_free(store);
    empty_folder();
}

/* A name counts as missing if it is no file, or claims to be longer than the disk; a write takes its place. */
static void test_no_files(void) {
    kvc_store *store = open_store(0);
    char path[600];
    CHECK(put(store, 1, LENGTH) == KVC_OK);
    for_each(".kv", note_name);
    snprintf(path, sizeof path, "%s", path_of(found_name));
    CHECK(!truncate(path, (off_t)1 << 40) && get(store, 1, MOST) == 0); /* sparse, and not what it says */
    for (int kind = 0; kind < 3; kind++) {
        unlink(path);
        CHECK(!(kind == 0 ? symlink("/etc/passwd", path) : kind == 1 ? mkfifo(path, 0600) : symlink("nothing", path)));
        CHECK(get(store, 1, MOST) == 0 && put(store, 1, LENGTH) == KVC_OK);
        CHECK(get(store, 1, MOST) == LENGTH && for_each(".tmp", NULL) == 0);
    }
    unlink(path_of("usage.lock"));
    CHECK(!symlink("notes", path_of("usage.lock")));
    CHECK_FAILS(put(store, 1, LENGTH), KVC_ERR_STORE, "cannot open usage.lock", "");
    unlink(path_of("usage.lock"));
    CHECK(!mkfifo(path_of("usage.lock"), 0600));
    CHECK_FAILS(put(store, 1, LENGTH), KVC_ERR_STORE, "cannot use usage.lock", "no file of this folder alone");
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
        CHECK_FAILS(put(store, 1, LENGTH), KVC_ERR_STORE, "cannot write", "File too large");
        CHECK(get(store, 1, MOST) == 700 && for_each(".tmp", NULL) == 0 && for_each(".kv", NULL) == 1);
    }
    limit.rlim_cur = before;
    CHECK(!setrlimit(RLIMIT_FSIZE, &limit) && put(store, 1, LENGTH) == KVC_OK && get(store, 1, MOST) == LENGTH);
    kvc_dir_store_free(store);
    empty_folder();
}

/* Each request to the system fails, alone, with the next and with all later ones.  No file stays open, and the next
 * call goes on.  Only a value that was to be evicted or replaced may be lost. */
static void test_failing_requests(void) {
    static const int mosts[] = {1, 2, 10000};
    for (int kind = 0; kind < 3; kind++)
        for (int n = 0, is_over = 0; !is_over; n++) {
            empty_folder();
            kvc_store *store = open_store(4 * FILE_LENGTH), *another = NULL;
            for (int i = 0; i < 4; i++) CHECK(put(store, i, LENGTH) == KVC_OK);
            write_at(path_of("00000000000000000000000000000002.tmp"), 0, "something", 9);
            const int files = num_open_files();
            memory_fail(&heap, n, mosts[kind]);
            const kvc_status opened = kvc_dir_store_new(path_of(""), 4 * FILE_LENGTH, &another);
            const int64_t size = get(store, 3, MOST);
            const kvc_status status = put(store, 4, LENGTH);
            heap.is_failing = 0;
            is_over = !heap.failed;
            CHECK(files == num_open_files() && (size == LENGTH || size == -1));
            CHECK(opened == KVC_OK || opened == KVC_ERR_STORE || opened == KVC_ERR_NOMEM);
            CHECK(status == KVC_OK || status == KVC_ERR_STORE || status == KVC_ERR_NOMEM);
            CHECK(!is_over || (opened == KVC_OK && size == LENGTH && status == KVC_OK));
            CHECK(put(store, 4, LENGTH) == KVC_OK && get(store, 4, MOST) == LENGTH && get(store, 3, MOST) == LENGTH);
            CHECK(for_each(".tmp", NULL) <= 1); /* a file whose removal was not tried */
            if (opened == KVC_OK) kvc_dir_store_free(another);
            kvc_dir_store_free(store);
        }
    empty_folder();
}

/* ---- random steps ------------------------------------------------------------------------------------------------ */

enum { NAMES = 10, STEPS_OF_SHELF = 120 };

/* The contents of a folder: for each name, the bytes of its file (0: there is no file), and when it was used. */
typedef struct shelf {
    int64_t max_bytes, clock, bytes[NAMES], used[NAMES];
    int is_damaged[NAMES]; /* its value counts, and is not there */
    int may_go[NAMES];     /* the call that failed was to evict it */
    int is_counted;        /* usage.lock has the bytes, and no more */
} shelf;

static int64_t bytes_of(const shelf *s) {
    int64_t bytes = 0;
    for (int i = 0; i < NAMES; i++) bytes += s->bytes[i];
    return bytes;
}

/* Drops what was used least recently where `more` bytes lack room, until 1/16 of the limit is free. */
static void make_room(shelf *s, int64_t more) {
    int64_t most = s->max_bytes - s->max_bytes / 16 - more;
    if (!s->max_bytes || bytes_of(s) + more <= s->max_bytes) return;
    while (bytes_of(s) > (most < 0 ? 0 : most)) {
        int oldest = -1;
        for (int i = 0; i < NAMES; i++)
            if (s->bytes[i] && (oldest < 0 || s->used[i] < s->used[oldest])) oldest = i;
        s->bytes[oldest] = 0;
        s->may_go[oldest] = 1;
    }
}

/* The files that a folder has, by name, and their bytes. */
static int64_t there[NAMES];
static char files_there[NAMES][48];

static void note_file(const char *file_name) {
    char key[3] = {0};
    struct stat found;
    FILE *file = fopen(path_of(file_name), "rb");
    CHECK(file && !fstat(fileno(file), &found) && !fseek(file, 22, SEEK_SET) && fread(key, 1, 2, file) == 2);
    const long name = strtol(key, NULL, 16);
    CHECK(name >= 0 && name < NAMES && !there[name] && !fclose(file));
    there[name] = found.st_size;
    snprintf(files_there[name], sizeof *files_there, "%s", file_name);
}

static void look_into_folder(void) {
    memset(there, 0, sizeof there);
    for_each(".kv", note_file);
}

static int64_t size_in(const shelf *s, int name) {
    return s->bytes[name] && !s->is_damaged[name] ? s->bytes[name] - FILE_LENGTH + LENGTH : 0;
}

static void step_put(shelf *s, const kvc_store *store, int name) {
    const int64_t size = 1 + random_int(0, LENGTH), bytes = size + FILE_LENGTH - LENGTH;
    shelf after = *s;
    memset(after.may_go, 0, sizeof after.may_go);
    if (s->max_bytes && bytes_of(s) - s->bytes[name] + bytes > s->max_bytes) after.bytes[name] = 0;
    if (!after.bytes[name]) make_room(&after, bytes);
    after.bytes[name] = bytes;
    after.is_damaged[name] = 0;
    after.used[name] = ++after.clock;
    if (random_int(0, 2)) memory_fail(&heap, random_int(0, 16), random_int(0, 2) ? 1 : 10000);
    const kvc_status status = put(store, name, size);
    heap.is_failing = 0;
    if (status == KVC_OK) {
        *s = after;
        return;
    }
    CHECKF(s->max_bytes ? heap.failed || bytes > s->max_bytes : heap.failed, "%s", kvc_last_error());
    s->is_counted = 0;
    look_into_folder();
    for (int i = 0; i < NAMES; i++)
        CHECKF(there[i] == s->bytes[i] || (!there[i] && (after.may_go[i] || i == name)) ||
                   (i == name && there[i] == bytes),
               "the file of name %d has %d bytes, not %d", i, (int)there[i], (int)s->bytes[i]);
    memcpy(s->bytes, there, sizeof there);
    const int64_t found = get(store, name, MOST);
    s->is_damaged[name] &= !found;
    CHECKF(found == size_in(s, name), "name %d has %d bytes, not %d", name, (int)found, (int)size_in(s, name));
    if (found) s->used[name] = ++s->clock;
}

static void step_get(shelf *s, const kvc_store *store, int name) {
    const int64_t most = random_int(0, 3) ? MOST : random_int(0, LENGTH);
    if (!random_int(0, 3)) memory_fail(&heap, random_int(0, 6), 1);
    const int64_t found = get(store, name, most);
    heap.is_failing = 0;
    CHECKF(found == size_in(s, name) || (heap.failed && found == -1), "name %d has %d bytes, not %d", name, (int)found,
           (int)size_in(s, name));
    if (found > 0) s->used[name] = ++s->clock;
}

/* Writes over a byte of a file's header, as of another time; or removes the file. */
static void step_harm(shelf *s, int name) {
    struct stat was;
    look_into_folder();
    if (!there[name]) return;
    const char *path = path_of(files_there[name]);
    if (random_int(0, 2)) {
        remove_file(files_there[name]);
        s->bytes[name] = s->is_counted = 0;
    } else if (!s->is_damaged[name]) {
        CHECK(!stat(path, &was));
        write_at(path, random_int(0, 20), "\377", 1);
        CHECK(!utimensat(AT_FDCWD, path, (struct timespec[]){was.st_atim, was.st_mtim}, 0));
        s->is_damaged[name] = 1;
    }
}

/* Random calls on two stores in one folder, with requests that fail now and then, beside a list of the values. */
static void test_random(void) {
    shelf s = {.is_counted = 1, .max_bytes = random_int(0, 4) ? random_int(1, 9) * FILE_LENGTH : 0};
    kvc_store *stores[] = {open_store(s.max_bytes), open_store(s.max_bytes)};
    const int files = num_open_files();
    write_at(path_of("a text"), 0, "something", 9);
    for (int i = 0; i < STEPS_OF_SHELF; i++) {
        const int name = random_int(0, NAMES), of = random_int(0, 2), choice = random_int(0, 12);
        if (choice < 6) {
            step_put(&s, stores[of], name);
        } else if (choice < 10) {
            step_get(&s, stores[of], name);
        } else if (choice == 10) {
            step_harm(&s, name);
        } else {
            kvc_dir_store_free(stores[of]);
            stores[of] = open_store(s.max_bytes);
            s.is_counted = 1;
        }
        look_into_folder();
        CHECK(!memcmp(there, s.bytes, sizeof there));
        CHECKF(usage() >= bytes_of(&s) && (usage() == bytes_of(&s) || !s.is_counted), "%d bytes are counted of %d",
               (int)usage(), (int)bytes_of(&s));
        CHECK(for_each(".tmp", NULL) == 0);
    }
    CHECK(files == num_open_files() && access(path_of("a text"), F_OK) == 0);
    for (int i = 0; i < 2; i++) kvc_dir_store_free(stores[i]);
    remove_file("a text");
    empty_folder();
}

/* ---- threads and processes --------------------------------------------------------------------------------------- */

enum { NUM_WRITERS = 3, STEPS = 150 };

static atomic_int is_over;

static void *write_some(void *argument) {
    const kvc_store *store = argument;
    for (int i = 0; i < STEPS; i++) {
        CHECKF(put(store, i * 7 % 40, 1 + i * 131 % LENGTH) == KVC_OK, "%s", kvc_last_error());
        CHECK(get(store, i * 3 % 40, MOST) >= 0);
    }
    return NULL;
}

static void *write_always(void *argument) {
    const kvc_store *store = argument;
    for (int i = 0; !atomic_load(&is_over); i++) CHECK(put(store, i % 40, LENGTH) == KVC_OK);
    return NULL;
}

/* Processes and threads write, read and evict at the same time; in the end the count is right. */
static void test_sharing(void) {
    pthread_t threads[NUM_WRITERS];
    kvc_store *store = open_store(12 * FILE_LENGTH);
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
    CHECKF(usage() == counted && counted <= 12 * FILE_LENGTH, "%lld bytes, not %lld", (long long)counted,
           (long long)usage());
    CHECK(for_each(".tmp", NULL) == 0);
    empty_folder();
}

static void *write_one(void *store) {
    CHECKF(put(store, 1, LENGTH) == KVC_OK, "%s", kvc_last_error());
    return NULL;
}

/* Who waits for the lock of a file that is removed meanwhile counts, with all others, in the one in its place. */
static void test_removed_lock(void) {
    kvc_store *store = open_store(0);
    pthread_t thread;
    const int file = open(path_of("usage.lock"), O_RDWR);
    CHECK(!flock(file, LOCK_EX) && !pthread_create(&thread, NULL, write_one, store));
    while (!for_each(".tmp", NULL)) sched_yield();
    nanosleep(&(struct timespec){0, 50000000}, NULL); /* until it waits */
    remove_file("usage.lock");
    CHECK(!close(file) && !pthread_join(thread, NULL));
    CHECK(for_each(".kv", NULL) == 1 && usage() == FILE_LENGTH);
    kvc_dir_store_free(store);
    empty_folder();
}

/* Children that are forked while a thread writes have none of its files, and keep none of its locks. */
static void test_fork(void) {
    pthread_t thread;
    kvc_store *store = open_store(12 * FILE_LENGTH);
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
        /* Up to three more have no lock that holds anybody up: the folder, its list, and a file of which it is tried
         * whether its writer is dead. */
        CHECKF(num_open_files() <= files + 3, "%d open files, not %d", num_open_files(), files);
        CHECKF(put(unlimited, 41, LENGTH) == KVC_OK, "%s", kvc_last_error());
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

int main(int argc, char **argv) {
    memory_init(&heap);
    if (!mkdtemp(folder)) return 1;
    if (has_seed(argc, argv)) {
        for (int i = 0; i < 4; i++) test_random();
        remove_folders();
        return test_result();
    }
    for (int i = 0; i < 20; i++) test_random();
    test_paths();
    test_modes();
    test_odd_files();
    test_no_files();
    test_full_disk();
    test_failing_requests();
    test_sharing();
    test_removed_lock();
    test_fork();
    remove_folders();
    return test_result();
}
