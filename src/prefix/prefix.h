/* prefix.h: the struct of a prefix. */
#ifndef KVC_PREFIX_H
#define KVC_PREFIX_H

#include "prefix/session.h"

struct kvc_prefix {
    kvc_cache *cache;
    kvc_tree *tree;
    kvc_session *sessions; /* list of the acquired sequences that have not ended */
    struct kvc_pinned *pins; /* list of what is pinned */
    kvc_prefix_stats stats;
    int64_t quota, ttl; /* of the tree */
    uint8_t salt[KVC_NAME_BYTES], root[KVC_NAME_BYTES];
};

#endif
