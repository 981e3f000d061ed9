/* sorted.c: sets in the order of a key, as binary trees (treaps).  Members that come before a member are on its side
 * KVC_LOW (below[KVC_LOW]), those behind it on side KVC_HIGH.  A member also stands above all members of lower rank. */
#include "base/sorted.h"

#include <stddef.h>

/* Returns the rank of a member: a hash of its address, which makes the tree about as flat as a random one, whatever the
 * keys are. */
static uint64_t rank_of(const kvc_links *member) {
    uint64_t x = (uint64_t)(uintptr_t)member + 0x9e3779b97f4a7c15u; /* SplitMix64 */
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Returns where the tree has a pointer to a member. */
static kvc_links **link_of(kvc_sorted *sorted, const kvc_links *member) {
    kvc_links *above = member->above;
    return above ? &above->below[above->below[1] == member] : &sorted->root;
}

/* Moves a member to the place of the one above it, which becomes one below it. */
static void rotate_up(kvc_sorted *sorted, kvc_links *member) {
    kvc_links *above = member->above, *top = above->above;
    const int side = above->below[1] == member;
    kvc_links *between = member->below[!side];
    *link_of(sorted, above) = member;
    above->below[side] = between;
    if (between) between->above = above;
    member->below[!side] = above;
    above->above = member;
    member->above = top;
}

void kvc_sorted_insert(kvc_sorted *sorted, kvc_links *member, kvc_links *above, int side) {
    *member = (kvc_links){above, {NULL, NULL}};
    *(above ? &above->below[side] : &sorted->root) = member;
    while (member->above && rank_of(member->above) < rank_of(member)) rotate_up(sorted, member);
    sorted->num++;
}

void kvc_sorted_add(kvc_sorted *sorted, kvc_links *member, kvc_behind_fn *is_behind) {
    kvc_links *above = NULL;
    int side = 0;
    for (kvc_links *next = sorted->root; next; next = above->below[side]) {
        above = next;
        side = is_behind(member, next);
    }
    kvc_sorted_insert(sorted, member, above, side);
}

void kvc_sorted_remove(kvc_sorted *sorted, kvc_links *member) {
    kvc_links **below = member->below;
    /* Moves it down until a side is free.  Then what is on the other side takes its place. */
    while (below[0] && below[1]) rotate_up(sorted, below[rank_of(below[1]) > rank_of(below[0])]);
    kvc_links *rest = below[below[1] != NULL];
    *link_of(sorted, member) = rest;
    if (rest) rest->above = member->above;
    sorted->num--;
}

/* Returns the member furthest to one side among a member and those below it; NULL if that is NULL. */
static kvc_links *end_of(kvc_links *member, int side) {
    while (member && member->below[side]) member = member->below[side];
    return member;
}

kvc_links *kvc_sorted_end(const kvc_sorted *sorted, int side) { return end_of(sorted->root, side); }

kvc_links *kvc_sorted_beside(const kvc_links *member, int side) {
    if (member->below[side]) return end_of(member->below[side], !side);
    while (member->above && member->above->below[side] == member) member = member->above;
    return member->above;
}
