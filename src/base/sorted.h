/* sorted.h: sets in the order of a key that the user compares.  Members are taken in and out without memory, in a time
 * that grows with the logarithm of their number. */
#ifndef KVC_SORTED_H
#define KVC_SORTED_H

#include <stdint.h>

/* A member's place in a tree.  Members with lower keys are below[KVC_LOW], others below[KVC_HIGH]. */
typedef struct kvc_links {
    struct kvc_links *above, *below[2];
} kvc_links;

/* The sides of a set, or of a member: lower keys, the first of which is the first member, or higher keys. */
enum { KVC_LOW, KVC_HIGH };

typedef struct kvc_sorted {
    kvc_links *root; /* NULL: the set is empty */
    int32_t num;
} kvc_sorted;

/* Inserts a member where a search for its key has ended: at above->below[side], or at the root if above is NULL. */
void kvc_sorted_insert(kvc_sorted *sorted, kvc_links *member, kvc_links *above, int side);

/* Returns whether a member stands behind another. */
typedef int kvc_behind_fn(const kvc_links *member, const kvc_links *other);

/* Inserts a member where is_behind says. */
void kvc_sorted_add(kvc_sorted *sorted, kvc_links *member, kvc_behind_fn *is_behind);

/* Takes a member out. */
void kvc_sorted_remove(kvc_sorted *sorted, kvc_links *member);

/* Returns the first member (KVC_LOW) or the last one (KVC_HIGH); NULL if the set is empty. */
kvc_links *kvc_sorted_end(const kvc_sorted *sorted, int side);

/* Returns the member before another (KVC_LOW) or behind it (KVC_HIGH); NULL at the end. */
kvc_links *kvc_sorted_beside(const kvc_links *member, int side);

#endif
