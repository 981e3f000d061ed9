/* checkpoint.h: recurrent states of a model, each kept with the block of tokens at whose end it was.
 *
 * All functions are called with the mutex held.
 */
#ifndef KVC_CHECKPOINT_H
#define KVC_CHECKPOINT_H

#include "cache/cache.h"

/* The state behind the last token of a block. */
typedef struct kvc_checkpoint {
    kvc_links unpinned;    /* place in kvc_checkpoints.unpinned, unless it has a pin; first, as checkpoint.c casts */
    struct kvc_node *node; /* its block; NULL: the block has gone, or has let go of it */
    int64_t stamp;         /* as of kvc_cache.evicting.num_uses: the more recently it was used, the larger */
    int32_t num_users;     /* the block, sequences that go on from it, and calls: it is freed with the last one */
    int64_t num_bytes;     /* of the state, which follows */
} kvc_checkpoint;

/* The checkpoints of all blocks of a tree. */
typedef struct kvc_checkpoints {
    kvc_cache *cache;
    kvc_sorted unpinned;                              /* those without a pin, by stamp */
    int64_t num, num_bytes, pinned_bytes, most_bytes; /* bytes of states; most 0: no limit */
} kvc_checkpoints;

static inline int64_t kvc_checkpoint_bytes(const kvc_checkpoint *checkpoint) {
    return (int64_t)sizeof *checkpoint + checkpoint->num_bytes;
}

/* A call that uses a checkpoint while it may release the mutex; on its stack.  It is in the list of the cache, so that
 * in the child of a fork(), which lacks the call, the use ends. */
typedef struct kvc_state_use {
    struct kvc_state_use *next, **at;
    kvc_thread thread; /* which made the call */
    kvc_checkpoint *checkpoint;
} kvc_state_use;

/* Begin and end the use of a checkpoint by a call.  kvc_state_use_end ignores a use of none. */
void kvc_state_use_begin(kvc_cache *cache, kvc_state_use *use, kvc_checkpoint *checkpoint);
void kvc_state_use_end(kvc_cache *cache, const kvc_state_use *use);

/* Begins the use of a new one, without a state yet.  May release the mutex.  Fails with KVC_ERR_NOMEM, and with
 * KVC_ERR_FULL if max_bytes leaves no room.  use->checkpoint is NULL then.  Evicts as kvc_need.before says.
 * kvc_checkpoint_new also copies the state, without the mutex, for a call that is no reader. */
kvc_status kvc_checkpoint_take(kvc_cache *cache, int64_t num_bytes, int64_t before, kvc_state_use *use);
kvc_status kvc_checkpoint_new(kvc_cache *cache, const void *state, int64_t num_bytes, kvc_state_use *use);

/* Notes whether it is freed if its block is evicted (kvc_useful_note_state). */
void kvc_checkpoint_note(kvc_cache *cache, const kvc_checkpoint *checkpoint);

/* Adds a user, or takes one away (add -1), which may free it; ignores NULL. */
void kvc_checkpoint_use(kvc_cache *cache, kvc_checkpoint *checkpoint, int32_t add);

/* Copies the state, without the mutex, for a call that is no reader. */
void kvc_checkpoint_read(kvc_cache *cache, kvc_checkpoint *checkpoint, void *state);

/* Returns whether pinned checkpoints leave room for so many bytes within the limit. */
static inline int kvc_checkpoints_have_room(const kvc_checkpoints *all, int64_t num_bytes) {
    return !all->most_bytes || all->pinned_bytes + num_bytes <= all->most_bytes;
}

/* Puts a checkpoint in its place in a block, unless the block has one there, or pinned checkpoints leave no room
 * within the limit.  Drops the least recently used checkpoints beyond the limit that are not pinned.  Returns
 * whether it was put there. */
int kvc_checkpoints_put(kvc_checkpoints *all, struct kvc_node *node, kvc_checkpoint *checkpoint);

/* Drops the checkpoint of a block, if it has one. */
void kvc_checkpoints_drop(kvc_checkpoints *all, struct kvc_node *node);

/* Adds to the pins of a block's state, whichever state the block has. */
void kvc_checkpoints_pin(kvc_checkpoints *all, struct kvc_node *node, int32_t add);

/* Marks one as used, in the place of its block among all uses. */
void kvc_checkpoints_touch(kvc_checkpoints *all, kvc_checkpoint *checkpoint);

#endif
