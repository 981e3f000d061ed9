/* files.c: files of one folder, which several processes use at a time, for Windows and for POSIX.  Functions that
 * return a number return 0 on failure, unless their comment says -1, and set errno.  An own file is one that this
 * process writes, and may lock. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* declares flock, O_DIRECTORY and the clock */
#endif
#if !defined(_FILE_OFFSET_BITS) && !defined(_TIME_BITS)
#define _FILE_OFFSET_BITS 64 /* with 32, readdir and stat fail where inode numbers take more */
#define _TIME_BITS 64
#endif
#include "base/files.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/threads.h"

enum { MOST_BYTES = 1 << 30 }; /* of one request to the system */

#if defined(_WIN32)

/* ---- Windows ----------------------------------------------------------------------------------------------------- */

enum { MOST_NAME = 64, SHARED = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE };
static const int64_t TO_1970 = 116444736000000000; /* from 1601, in units of 100 ns, as times of files are counted */
static const int64_t BUSY_WAIT = 1000000000;       /* nanoseconds */

/* Sets errno to what POSIX calls the last error.  Returns 0. */
static int fail(void) {
    switch (GetLastError()) {
    case ERROR_FILE_NOT_FOUND:
    case ERROR_PATH_NOT_FOUND:
    case ERROR_INVALID_NAME:
    case ERROR_BAD_NETPATH: errno = ENOENT; break;
    case ERROR_DIRECTORY: errno = ENOTDIR; break;
    case ERROR_FILE_EXISTS:
    case ERROR_ALREADY_EXISTS: errno = EEXIST; break;
    case ERROR_ACCESS_DENIED: errno = EACCES; break;
    case ERROR_SHARING_VIOLATION: errno = EBUSY; break;
    case ERROR_LOCK_VIOLATION:
    case ERROR_IO_PENDING: errno = EWOULDBLOCK; break;
    case ERROR_DISK_FULL:
    case ERROR_HANDLE_DISK_FULL: errno = ENOSPC; break;
    case ERROR_WRITE_PROTECT: errno = EROFS; break;
    case ERROR_FILENAME_EXCED_RANGE: errno = ENAMETOOLONG; break;
    case ERROR_TOO_MANY_OPEN_FILES: errno = EMFILE; break;
    case ERROR_NOT_ENOUGH_MEMORY:
    case ERROR_OUTOFMEMORY: errno = ENOMEM; break;
    default: errno = EIO;
    }
    return 0;
}

/* Waits a moment and returns 1 if the last error may go by itself, within a second from `begin`.  The name of a
 * removed file stays until all have closed it, an open file cannot be replaced, and an unshared file cannot be
 * opened. */
static int may_try_again(int64_t begin) {
    const DWORD error = GetLastError();
    if ((error != ERROR_ACCESS_DENIED && error != ERROR_SHARING_VIOLATION) || kvc_now() - begin > BUSY_WAIT) return 0;
    kvc_nap();
    SetLastError(error);
    return 1;
}

static wchar_t *wide_from(const char *text) {
    const int size = MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, text, -1, NULL, 0);
    wchar_t *wide = size ? malloc((size_t)size * sizeof *wide) : NULL;
    if (wide) MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, text, -1, wide, size);
    return wide;
}

/* Returns a path from the root on, with room for some characters before it and behind it, which the caller frees; NULL,
 * after setting errno, if there is none. */
static wchar_t *full_from(const char *path, size_t before, size_t behind) {
    wchar_t *wide = wide_from(path);
    const DWORD num = wide ? GetFullPathNameW(wide, 0, NULL, NULL) : 0;
    wchar_t *full = num ? malloc((before + num + behind) * sizeof *full) : NULL;
    if (full) GetFullPathNameW(wide, num, full + before, NULL);
    if (!full) errno = wide ? ENOMEM : EILSEQ;
    free(wide);
    return full;
}

/* Sets a folder's path, with a backslash at its end, and space for a file's name behind it.  A prefix in front lets the
 * system limit no path's length.  Returns 0 if it cannot. */
static int set_path(kvc_folder *folder, const char *path) {
    enum { PREFIX = 7 }; /* most characters of a prefix */
    wchar_t *full = full_from(path, PREFIX, 1 + MOST_NAME);
    if (full) {
        wchar_t *begin = full + PREFIX;
        const int is_share = begin[0] == '\\' && begin[1] == '\\';
        const int has_prefix = is_share && (begin[2] == '?' || begin[2] == '.');
        const wchar_t *prefix = has_prefix ? L"" : is_share ? L"\\\\?\\UNC" : L"\\\\?\\";
        if (is_share && !has_prefix) begin++; /* of its two backslashes one stays */
        memmove(full + wcslen(prefix), begin, (wcslen(begin) + 1) * sizeof *full);
        memcpy(full, prefix, wcslen(prefix) * sizeof *full);
        folder->size = wcslen(full);
        if (full[folder->size - 1] != '\\') full[folder->size++] = '\\';
        full[folder->size] = 0;
    }
    folder->path = full;
    return full != NULL;
}

/* Returns the path of a file, until the next call for the same folder. */
static const wchar_t *path_in(kvc_folder folder, const char *name) {
    const size_t length = strlen(name), num = length < MOST_NAME ? length : MOST_NAME - 1;
    for (size_t i = 0; i < num; i++) folder.path[folder.size + i] = (wchar_t)name[i];
    folder.path[folder.size + num] = 0;
    return folder.path;
}

char *kvc_folder_path(const char *path) {
    wchar_t *full = full_from(path, 0, 0);
    if (!full) return NULL;
    const int size = WideCharToMultiByte(CP_UTF8, 0, full, -1, NULL, 0, NULL, NULL);
    char *text = malloc((size_t)size);
    if (text) WideCharToMultiByte(CP_UTF8, 0, full, -1, text, size, NULL, NULL);
    free(full);
    return text;
}

/* Whether the path names a folder, such as a drive's root, which cannot be made; keeps the last error. */
static int is_folder(const wchar_t *path) {
    const DWORD error = GetLastError(), found = GetFileAttributesW(path);
    SetLastError(error);
    return found != INVALID_FILE_ATTRIBUTES && found & FILE_ATTRIBUTE_DIRECTORY;
}

int kvc_folder_make(const char *path) {
    kvc_folder folder;
    int is_there = 0; /* the last one, whatever became of those before */
    if (!set_path(&folder, path)) return 0;
    for (size_t i = 1; i < folder.size; i++) {
        if (folder.path[i] != '\\') continue;
        folder.path[i] = 0;
        is_there = CreateDirectoryW(folder.path, NULL) || GetLastError() == ERROR_ALREADY_EXISTS;
        folder.path[i] = '\\';
    }
    is_there = is_there || is_folder(folder.path);
    if (!is_there) fail();
    kvc_folder_close(folder);
    return is_there;
}

int kvc_folder_open(kvc_folder *folder, const char *path) {
    if (!set_path(folder, path)) return 0;
    const DWORD found = GetFileAttributesW(folder->path);
    if (found != INVALID_FILE_ATTRIBUTES && found & FILE_ATTRIBUTE_DIRECTORY) return 1;
    if (found != INVALID_FILE_ATTRIBUTES) SetLastError(ERROR_DIRECTORY);
    fail();
    kvc_folder_close(*folder);
    return 0;
}

void kvc_folder_close(kvc_folder folder) { free(folder.path); }

int kvc_folder_list(kvc_folder folder, int (*visit)(void *context, const char *name), void *context) {
    WIN32_FIND_DATAW found;
    char name[3 * MAX_PATH + 1];
    const HANDLE entries = FindFirstFileW(path_in(folder, "*"), &found);
    if (entries == INVALID_HANDLE_VALUE) return GetLastError() == ERROR_FILE_NOT_FOUND ? 1 : fail();
    do {
        if (!WideCharToMultiByte(CP_UTF8, 0, found.cFileName, -1, name, sizeof name, NULL, NULL)) continue;
        if (!visit(context, name)) break;
    } while (FindNextFileW(entries, &found));
    FindClose(entries);
    return 1;
}

static int64_t join(DWORD high, DWORD low) { return (int64_t)((uint64_t)high << 32 | low); }

static void set_info(kvc_file_info *info, DWORD attributes, DWORD links, int64_t size, FILETIME used) {
    *info = (kvc_file_info){.is_regular = !(attributes & (FILE_ATTRIBUTE_DIRECTORY | FILE_ATTRIBUTE_REPARSE_POINT)),
                            .num_names = (int)links,
                            .size = size,
                            .used = (join(used.dwHighDateTime, used.dwLowDateTime) - TO_1970) * 100};
}

int kvc_file_find(kvc_folder folder, const char *name, kvc_file_info *info) {
    WIN32_FILE_ATTRIBUTE_DATA found;
    if (!GetFileAttributesExW(path_in(folder, name), GetFileExInfoStandard, &found)) return fail();
    set_info(info, found.dwFileAttributes, 1, join(found.nFileSizeHigh, found.nFileSizeLow), found.ftLastWriteTime);
    return 1;
}

int kvc_file_ask(kvc_file file, kvc_file_info *info) {
    BY_HANDLE_FILE_INFORMATION found;
    FILE_STANDARD_INFO standard;
    if (!GetFileInformationByHandle(file, &found) ||
        !GetFileInformationByHandleEx(file, FileStandardInfo, &standard, sizeof standard))
        return fail();
    set_info(info, found.dwFileAttributes, standard.DeletePending ? 0 : found.nNumberOfLinks,
             join(found.nFileSizeHigh, found.nFileSizeLow), found.ftLastWriteTime);
    return 1;
}

int kvc_file_remove(kvc_folder folder, const char *name) { return DeleteFileW(path_in(folder, name)) ? 1 : fail(); }

int kvc_file_rename(kvc_folder folder, const char *from, const char *to) {
    const int64_t begin = kvc_now();
    wchar_t *old = _wcsdup(path_in(folder, from));
    int is_done = 0;
    if (!old) return errno = ENOMEM, 0;
    while (!(is_done = MoveFileExW(old, path_in(folder, to), MOVEFILE_REPLACE_EXISTING) != 0) && may_try_again(begin));
    if (!is_done) fail();
    free(old);
    return is_done;
}

/* Opens a file or, to have a look at it, whatever has the name; links are not followed. */
static int open_as(kvc_file *file, const wchar_t *path, DWORD access, DWORD how) {
    const DWORD flags = FILE_FLAG_OPEN_REPARSE_POINT | FILE_FLAG_BACKUP_SEMANTICS;
    *file = CreateFileW(path, access, SHARED, NULL, how, FILE_ATTRIBUTE_NORMAL | flags, NULL);
    return *file != INVALID_HANDLE_VALUE;
}

int kvc_file_open(kvc_file *file, kvc_folder folder, const char *name) {
    const int64_t begin = kvc_now();
    const wchar_t *path = path_in(folder, name);
    do { /* to ask for the right to touch it fails where the file is somebody else's */
        if (open_as(file, path, GENERIC_READ | FILE_WRITE_ATTRIBUTES, OPEN_EXISTING) ||
            open_as(file, path, GENERIC_READ, OPEN_EXISTING))
            return 1;
    } while (may_try_again(begin));
    return fail();
}

/* Names the byte that stands for the file where it is locked: others cannot read one that is.  Python's msvcrt reaches
 * this one on every Windows; a value that is so long is read once its writer has closed it. */
static OVERLAPPED lock_byte(void) { return (OVERLAPPED){.Offset = 0x7fffffff}; }

void kvc_file_close(kvc_file file) {
    OVERLAPPED at = lock_byte();
    UnlockFileEx(file, 0, 1, 0, &at); /* closing alone may leave the lock for a while */
    CloseHandle(file);
}

int kvc_file_lock(kvc_file file) {
    OVERLAPPED at = lock_byte();
    return LockFileEx(file, LOCKFILE_EXCLUSIVE_LOCK | LOCKFILE_FAIL_IMMEDIATELY, 0, 1, 0, &at) ? 1 : fail();
}

int kvc_file_read(kvc_file file, void *data, int64_t size) {
    for (char *p = data; size;) {
        DWORD num;
        if (!ReadFile(file, p, (DWORD)(size < MOST_BYTES ? size : MOST_BYTES), &num, NULL)) return fail(), -1;
        if (!num) return 0;
        p += num, size -= num;
    }
    return 1;
}

int kvc_file_write(kvc_file file, const void *data, int64_t size) {
    for (const char *p = data; size;) {
        DWORD num;
        if (!WriteFile(file, p, (DWORD)(size < MOST_BYTES ? size : MOST_BYTES), &num, NULL)) return fail();
        p += num, size -= num;
    }
    return 1;
}

int kvc_file_read_first(kvc_file file, void *data, size_t size) {
    OVERLAPPED at = {0};
    DWORD num = 0;
    return ReadFile(file, data, (DWORD)size, &num, &at) ? num == size : fail();
}

int kvc_file_write_first(kvc_file file, const void *data, size_t size) {
    OVERLAPPED at = {0};
    DWORD num = 0;
    return WriteFile(file, data, (DWORD)size, &num, &at) ? num == size : fail();
}

void kvc_file_touch(kvc_file file) {
    FILETIME now;
    GetSystemTimePreciseAsFileTime(&now);
    SetFileTime(file, NULL, NULL, &now);
}

kvc_status kvc_own_files_init(void) { return KVC_OK; }

int kvc_own_file_open(kvc_own_file *file, kvc_folder folder, const char *name, int is_new) {
    const DWORD access = GENERIC_READ | GENERIC_WRITE, how = is_new ? CREATE_NEW : OPEN_ALWAYS;
    const int64_t begin = kvc_now();
    const wchar_t *path = path_in(folder, name);
    do {
        if (open_as(&file->file, path, access, how)) return 1;
    } while (may_try_again(begin));
    return fail();
}

void kvc_own_file_close(kvc_own_file *file) { kvc_file_close(file->file); }

uint64_t kvc_process_number(void) { return GetCurrentProcessId(); }

#else

/* ---- POSIX ------------------------------------------------------------------------------------------------------- */

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#if defined(__APPLE__)
#define st_mtim st_mtimespec
#endif

enum { READS = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC };

char *kvc_folder_path(const char *path) {
    size_t size = strlen(path);
    while (size > 1 && path[size - 1] == '/') size--;
    char *from = *path == '/' ? strdup("") : getcwd(NULL, 0);
    char *full = from ? malloc(strlen(from) + 1 + size + 1) : NULL;
    if (full) sprintf(full, "%s%s%.*s", from, *path == '/' ? "" : "/", (int)size, path);
    free(from);
    return full;
}

int kvc_folder_make(const char *path) {
    char *own = strdup(path);
    int error = 0; /* the first one */
    if (!own) return 0;
    for (char *end = own + 1; (end = strchr(end, '/')); *end++ = '/') {
        *end = 0;
        if (mkdir(own, 0777) && errno != EEXIST && !error) error = errno;
    }
    const int is_there = !mkdir(own, 0700) || errno == EEXIST; /* the last folder is this user's alone */
    if (!is_there && !error) error = errno;
    free(own);
    return is_there || (errno = error, 0);
}

int kvc_folder_open(kvc_folder *folder, const char *path) {
    *folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return *folder >= 0;
}

void kvc_folder_close(kvc_folder folder) { close(folder); }

int kvc_folder_list(kvc_folder folder, int (*visit)(void *context, const char *name), void *context) {
    const int own = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *entries = own < 0 ? NULL : fdopendir(own);
    if (!entries) {
        const int error = errno;
        if (own >= 0) close(own);
        return errno = error, 0;
    }
    const struct dirent *entry;
    while ((entry = readdir(entries)) && visit(context, entry->d_name));
    closedir(entries);
    return 1;
}

/* Returns a time in nanoseconds since 1970, or the nearest number of them that fits 64 bits. */
static int64_t nanoseconds_of(struct timespec time) {
    const int64_t second = 1000000000, most = INT64_MAX / second;
    if (time.tv_sec >= most) return INT64_MAX;
    return time.tv_sec <= -most ? INT64_MIN : time.tv_sec * second + time.tv_nsec;
}

static void set_info(kvc_file_info *info, const struct stat *found) {
    *info = (kvc_file_info){.is_regular = S_ISREG(found->st_mode),
                            .num_names = (int)found->st_nlink,
                            .size = found->st_size,
                            .used = nanoseconds_of(found->st_mtim)};
}

int kvc_file_find(kvc_folder folder, const char *name, kvc_file_info *info) {
    struct stat found;
    if (fstatat(folder, name, &found, AT_SYMLINK_NOFOLLOW)) return 0;
    set_info(info, &found);
    return 1;
}

int kvc_file_ask(kvc_file file, kvc_file_info *info) {
    struct stat found;
    if (fstat(file, &found)) return 0;
    set_info(info, &found);
    return 1;
}

int kvc_file_remove(kvc_folder folder, const char *name) { return !unlinkat(folder, name, 0); }

int kvc_file_rename(kvc_folder folder, const char *from, const char *to) { return !renameat(folder, from, folder, to); }

int kvc_file_open(kvc_file *file, kvc_folder folder, const char *name) {
    *file = openat(folder, name, READS);
    if (*file < 0 && (errno == ELOOP || errno == ENXIO || errno == EOPNOTSUPP)) errno = ENOENT; /* a link, a socket */
    return *file >= 0;
}

void kvc_file_close(kvc_file file) { close(file); }

int kvc_file_lock(kvc_file file) { return !flock(file, LOCK_EX | LOCK_NB); }

int kvc_file_read(kvc_file file, void *data, int64_t size) {
    for (char *p = data; size;) {
        const ssize_t num = read(file, p, (size_t)(size < MOST_BYTES ? size : MOST_BYTES));
        if (num <= 0 && (!num || errno != EINTR)) return (int)num;
        if (num > 0) p += num, size -= num;
    }
    return 1;
}

int kvc_file_write(kvc_file file, const void *data, int64_t size) {
    for (const char *p = data; size;) {
        const ssize_t num = write(file, p, (size_t)(size < MOST_BYTES ? size : MOST_BYTES));
        if (num < 0 && errno != EINTR) return 0;
        if (num > 0) p += num, size -= num;
    }
    return 1;
}

int kvc_file_read_first(kvc_file file, void *data, size_t size) { return pread(file, data, size, 0) == (ssize_t)size; }

int kvc_file_write_first(kvc_file file, const void *data, size_t size) {
    return pwrite(file, data, size, 0) == (ssize_t)size;
}

void kvc_file_touch(kvc_file file) { /* by this clock: the one that file systems use is not as fine */
    struct timespec now[2];
    clock_gettime(CLOCK_REALTIME, now);
    now[1] = *now;
    futimens(file, now);
}

static kvc_mutex own_mutex = PTHREAD_MUTEX_INITIALIZER;
static kvc_own_file *own_files; /* list of those that are open */

static void before_fork(void) { kvc_mutex_lock(&own_mutex); }
static void after_fork(void) { kvc_mutex_unlock(&own_mutex); }

static void in_child(void) {
    for (; own_files; own_files = own_files->next) close(own_files->file);
    after_fork();
}

kvc_status kvc_own_files_init(void) {
    static int is_set; /* guarded by own_mutex */
    kvc_mutex_lock(&own_mutex);
    const int status = is_set ? 0 : pthread_atfork(before_fork, after_fork, in_child);
    is_set = !status;
    kvc_mutex_unlock(&own_mutex);
    return status ? kvc_fail(KVC_ERR_NOMEM, "out of memory for a handler of fork()") : KVC_OK;
}

int kvc_own_file_open(kvc_own_file *file, kvc_folder folder, const char *name, int is_new) {
    const int how = (is_new ? O_WRONLY | O_EXCL : O_RDWR) | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    kvc_mutex_lock(&own_mutex);
    file->file = openat(folder, name, how, 0600);
    if (file->file >= 0) {
        if (own_files) own_files->at = &file->next;
        file->next = own_files;
        file->at = &own_files;
        own_files = file;
    }
    kvc_mutex_unlock(&own_mutex);
    return file->file >= 0;
}

/* Gives the lock back, as it belongs to the open file, which a child that is forked meanwhile has open as well. */
void kvc_own_file_close(kvc_own_file *file) {
    kvc_mutex_lock(&own_mutex);
    *file->at = file->next;
    if (file->next) file->next->at = file->at;
    flock(file->file, LOCK_UN);
    close(file->file);
    kvc_mutex_unlock(&own_mutex);
}

uint64_t kvc_process_number(void) { return (uint64_t)getpid(); }

#endif
