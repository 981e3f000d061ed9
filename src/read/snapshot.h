/* snapshot.h: the runs of a sequence as they are at one moment, whose rows are then read without the mutex. */
#ifndef KVC_SNAPSHOT_H
#define KVC_SNAPSHOT_H

#include "base/threads.h"
#include "cache/waiting.h"

typedef struct kvc_snapshot {
    kvc_polling polling; /* first, so that fork() finds the snapshot */
    kvc_cache *cache;
    int32_t layer, num_runs; /* num_runs 0: there is nothing to read, nor to free */
    kvc_run *runs;           /* a copy, whose blocks are pinned */
    void *scratch;           /* memory for the call that reads; NULL if it asked for none */
    uint64_t size;           /* bytes of runs and scratch, one allocation */
} kvc_snapshot;

/* Takes a snapshot of runs, at least one, between kvc_cache_begin_reading and unlocking.  Can fail with
 * KVC_ERR_NOMEM. */
kvc_status kvc_snapshot_take(kvc_cache *cache, int32_t layer, const kvc_run *runs, int32_t num_runs,
                             uint64_t scratch_bytes, kvc_snapshot *snapshot);

/* Does what kvc_poll_timer_ask does, without the mutex, for a call that reads a snapshot: while the poll runs, others
 * do not wait for it as a reader. */
int kvc_snapshot_poll(kvc_snapshot *snapshot, kvc_poll_timer *timer);

/* Lets go, in the child of a fork(), of the snapshots of the parent's other threads, which were in their polls. */
void kvc_snapshots_forked(kvc_cache *cache);

/* Frees it and ends reading, without the mutex. */
void kvc_snapshot_close(const kvc_snapshot *snapshot);

#endif
