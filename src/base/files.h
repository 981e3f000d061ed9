/* files.h: files of one folder, which several processes use at a time, under one name for each system.
 *
 * Names are those of files within the folder, in ASCII.  Links are not followed.  Functions that return a number return
 * 0 on failure, except as noted; errno says why, on every system. */
#ifndef KVC_FILES_H
#define KVC_FILES_H

#include "kvcache.h"

/* An open folder, and an open file; each is what the system has for it. */
#if defined(_WIN32)
typedef struct kvc_folder {
    wchar_t *path; /* with room for a name behind it: one thread uses it at a time */
    size_t size;   /* without the name */
} kvc_folder;
typedef void *kvc_file;
#else
typedef int kvc_folder;
typedef int kvc_file;
#endif

/* Returns the path of a folder, whether there is one or not, from the root on, which the caller frees: what it names
 * stays, wherever the process goes; NULL on failure. */
char *kvc_folder_path(const char *path);

/* Makes a folder, and those it lies in, where they are missing.  The path ends with no slash. */
int kvc_folder_make(const char *path);

/* Opens a folder.  The path is UTF-8, of any length. */
int kvc_folder_open(kvc_folder *folder, const char *path);
void kvc_folder_close(kvc_folder folder);

/* Calls a function with the name of each file, until it returns 0. */
int kvc_folder_list(kvc_folder folder, int (*visit)(void *context, const char *name), void *context);

/* The kind of a file. */
typedef struct kvc_file_info {
    int is_regular; /* neither a folder, nor a link, nor anything else */
    int num_names;  /* hard links; 0 once it was removed */
    int64_t size;
    int64_t used; /* nanoseconds since 1970 to when it was last written or touched */
} kvc_file_info;

int kvc_file_find(kvc_folder folder, const char *name, kvc_file_info *info);
int kvc_file_remove(kvc_folder folder, const char *name);

/* Gives a file another name, and replaces the file of that name.  Everybody finds one of the two files, whole. */
int kvc_file_rename(kvc_folder folder, const char *from, const char *to);

/* Opens a file for reading.  Links and sockets may fail to open, with ENOENT. */
int kvc_file_open(kvc_file *file, kvc_folder folder, const char *name);
void kvc_file_close(kvc_file file);
int kvc_file_ask(kvc_file file, kvc_file_info *info);

/* Reads so many bytes; returns 1, 0 if there are fewer, or -1 on failure. */
int kvc_file_read(kvc_file file, void *data, int64_t size);
int kvc_file_write(kvc_file file, const void *data, int64_t size);

/* The same for the first bytes, wherever the file has been read or written before. */
int kvc_file_read_first(kvc_file file, void *data, size_t size);
int kvc_file_write_first(kvc_file file, const void *data, size_t size);

/* Marks a file as used now, if it is ours. */
void kvc_file_touch(kvc_file file);

/* Locks an open file against other processes and other openings of it in this one, without waiting: errno is
 * EWOULDBLOCK if another has the lock.  Closing it unlocks it. */
int kvc_file_lock(kvc_file file);

/* A file that is open for writing, and may be locked.  A child that is forked meanwhile closes it, and leaves the lock
 * to its parent. */
typedef struct kvc_own_file {
    struct kvc_own_file *next, **at;
    kvc_file file;
} kvc_own_file;

/* Call before a file is opened so; returns KVC_ERR_NOMEM if the system lacks memory. */
kvc_status kvc_own_files_init(void);

/* Opens a file that this function makes, if it is to be new, or where there is none. */
int kvc_own_file_open(kvc_own_file *file, kvc_folder folder, const char *name, int is_new);
void kvc_own_file_close(kvc_own_file *file);

/* A number that no other process has. */
uint64_t kvc_process_number(void);

#endif
