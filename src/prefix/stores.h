/* stores.h: calls that carry blocks between caches and stores. */
#ifndef KVC_STORES_H
#define KVC_STORES_H

#include "cache/cache.h"
#include "prefix/value.h"

/* A block to be written, as it was when the call took it. */
typedef struct kvc_departure {
    int64_t id;
    uint8_t name[KVC_NAME_BYTES];
    kvc_value_owner owner; /* copied, as its prefix may be freed meanwhile */
    int32_t may_have_state;
    int32_t joins; /* it may be joined with its value in the store, which is of no forgotten rows */
    int64_t date;  /* cache->prefixes.clock when it was taken */
} kvc_departure;

/* A call that carries blocks; on its stack.  It is in the list of the cache while it has memory. */
typedef struct kvc_carrier {
    struct kvc_carrier *next, **at;
    kvc_thread thread; /* which made the call */
    kvc_cache *cache;
    kvc_store store;
    int64_t max_bytes; /* of a value */
    uint64_t size;     /* bytes of the memory; 0: it has none */
    kvc_crc *crc;      /* first in it; values follow */
    uint8_t *value;
    uint8_t *stored, *joined; /* others; NULL: a block's value never lacks anything */
    int32_t is_writing, writes_again;
    kvc_departure block;      /* while it is writing: what it writes.  If that was forgotten, it removes the value */
    kvc_departure next_block; /* if it writes again: what another call was to write under this name */
} kvc_carrier;

/* Gives the memory back, with the mutex held. */
void kvc_carrier_end(const kvc_carrier *c);

#endif
