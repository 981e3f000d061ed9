/* stores.h: calls that carry blocks between caches and stores. */
#ifndef KVC_STORES_H
#define KVC_STORES_H

#include "cache/cache.h"
#include "prefix/value.h"

/* State of a call of this kind, on its stack.  It is in the list of the cache while it has memory. */
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
    const uint8_t *writing;   /* name of the block that it is writing to the store; NULL: none */
    int32_t again;            /* it is to write this block once more, as another call was to do */
} kvc_carrier;

/* Gives the memory back, with the mutex held. */
void kvc_carrier_end(const kvc_carrier *c);

#endif
