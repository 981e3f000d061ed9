/* prefix.h: the struct of a prefix. */
#ifndef KVC_PREFIX_H
#define KVC_PREFIX_H

#include "prefix/session.h"
#include "prefix/value.h"

/* A prompt whose blocks are kept, whatever else needs memory. */
typedef struct kvc_pinned {
    kvc_links links;              /* place in the set kvc_tree.pins; first, so that it has its address */
    struct kvc_pinned *next;      /* in a list of pins that end */
    kvc_node *with_state;         /* its state has a pin; NULL: none */
    int32_t num_calls;            /* of kvc_prefix_pin that have not been taken back; the prompt's other pins have 0 */
    int32_t known;                /* tokens that were known then */
    uint8_t name[KVC_NAME_BYTES]; /* of the prompt's tokens, as if they were one block */
    int32_t room, num;
    kvc_node *nodes[]; /* [room] num have a pin: behind others, the last node and all above it, from it on */
} kvc_pinned;

struct kvc_prefix {
    kvc_cache *cache;
    kvc_prefix *next, **at; /* place in the list of the cache */
    kvc_tree *tree;
    kvc_session *sessions; /* list of the acquired sequences that have not ended */
    kvc_prefix_stats stats;
    int64_t quota, ttl, most_checkpoint_bytes; /* of the tree */
    int64_t state_bytes;                       /* the most of a checkpoint; 0: the model has no recurrent state */
    int32_t reuse_min;                         /* fewest tokens in a row that are taken from elsewhere; 0: none are */
    int32_t collects;                          /* new blocks are listed for stores */
    void *user;
    int64_t number;      /* no other prefix of the cache has it; from 1 on */
    int64_t horizon;     /* cache->prefixes.clock when it last began, or ended, to forget a prompt; 0: it never did */
    int64_t num_leaving; /* forgotten prompts whose values are being removed from stores: nothing is fetched */
    kvc_events events;   /* in a ring behind this struct */
    uint64_t num_bytes;  /* of this allocation */
    uint8_t salt[KVC_NAME_BYTES], root[KVC_NAME_BYTES];
    kvc_value_owner owner; /* of its blocks in stores */
};

/* Locks the cache.  Drops some of the expired blocks; none of them is found from now on. */
void kvc_prefix_lock(kvc_prefix *prefix);

/* Locks the cache, and drops all expired blocks, a few at a time. */
void kvc_prefix_lock_late(kvc_prefix *prefix);

/* Waits until no call forgets a prompt of a prefix: such a call passes the mutex to others now and then. */
void kvc_prefix_wait(const kvc_prefix *prefix);

/* Reads a caller's struct, and checks it. */
kvc_status kvc_read_tokens(const kvc_tokens *from, kvc_tokens *tokens);

/* Sets how many of a prompt's tokens to match at most; KVC_ERR_INVALID if it has none, or max_matched is below -1. */
kvc_status kvc_match_limit(const kvc_tokens *tokens, int64_t max_matched, int64_t *limit);

/* Returns the first new block of a prefix, or NULL.  It passes the mutex to others now and then. */
kvc_node *kvc_prefix_next_new(kvc_cache *cache);

/* Returns the bytes of a payload in which no layer is missing, of a prefix with states of so many bytes. */
int64_t kvc_most_payload_bytes(const kvc_cache *cache, int64_t state_bytes);

/* Writes the payload of a block, and sets *size to its bytes: 0 if the block was dropped.  max_bytes is at least
 * kvc_most_payload_bytes; a state that does not fit is left out.
 * KVC_ERR_NOMEM. */
kvc_status kvc_read_block(kvc_cache *cache, int64_t id, void *payload, int64_t max_bytes, int64_t *size);

/* Joins two payloads of a block into `to`, which has room for max_bytes, and sets *size to the bytes of the result.  It
 * has the rows of each layer that either payload has, and the state with the larger position.  KVC_ERR_INVALID if
 * max_bytes does not suffice, KVC_ERR_FORMAT if either is no payload of this cache. */
kvc_status kvc_join_payloads(const kvc_cache *cache, const void *first, int64_t first_size, const void *second,
                             int64_t second_size, void *to, int64_t max_bytes, int64_t *size);

struct kvc_fetch;

/* Adds block number `block` of the prompt from its payload of `size` bytes.  Call it without the mutex.  Sets *is_kept
 * to 1 if the block is now kept with all that the payload has.  Sets it to 0 if there is no room for its rows and
 * state, or if kvc_fetch_find finds nothing to add it to.  A state within the block is kept with one more block, of the
 * tokens up to there.  *is_new: the block brought rows or a state.  KVC_ERR_FORMAT if it is no payload of this cache,
 * and KVC_ERR_NOMEM. */
kvc_status kvc_prefix_add_block(struct kvc_fetch *fetch, int32_t block, const void *payload, int64_t size,
                                int32_t *is_kept, int32_t *is_new);

/* Call in the child of the process's fork(): drops what calls of the parent were to drop. */
void kvc_prefixes_forked(kvc_cache *cache);

#endif
