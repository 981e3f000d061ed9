/* Sorted sets: members come out in the order of their keys, whatever went in and out before; and trees stay flat. */
#include "base/sorted.h"

#include "support/test.h"

typedef struct member {
    kvc_links links; /* first, so that its address is the member's */
    int key, is_in;
} member;

static int key_of(const kvc_links *links) { return ((const member *)(const void *)links)->key; }

static void insert(kvc_sorted *sorted, member *m) {
    kvc_links *above = NULL;
    int side = 0;
    for (kvc_links *next = sorted->root; next; next = above->below[side]) {
        above = next;
        side = m->key > key_of(above);
    }
    kvc_sorted_insert(sorted, &m->links, above, side);
}

static int depth_of(const kvc_links *links) {
    int depth = 0;
    for (; links; links = links->above) depth++;
    return depth;
}

/* Checks the order from one side to the other; members[i].key is i. */
static void check(const kvc_sorted *sorted, const member *members, int num, int side) {
    const kvc_links *next = kvc_sorted_end(sorted, !side);
    int found = 0;
    for (int i = side ? 0 : num - 1; i >= 0 && i < num; i += side ? 1 : -1) {
        if (!members[i].is_in) continue;
        CHECKF(next == &members[i].links, "key %d comes where %d should", next ? key_of(next) : -1, i);
        next = kvc_sorted_beside(next, side);
        found++;
    }
    CHECK(!next && found == sorted->num);
}

static void test_order(void) {
    enum { NUM = 60 };
    static member members[NUM];
    kvc_sorted sorted = {0};
    for (int i = 0; i < NUM; i++) members[i].key = i;
    for (int step = 0; step < 3000; step++) {
        member *m = &members[random_int(0, NUM)];
        if (m->is_in)
            kvc_sorted_remove(&sorted, &m->links);
        else
            insert(&sorted, m);
        m->is_in = !m->is_in;
        check(&sorted, members, NUM, step % 2);
    }
}

/* Keys in order are the worst case of a tree that is not balanced. */
static void test_depth(void) {
    enum { NUM = 100000, MOST = 64 };
    member *members = calloc(NUM, sizeof *members);
    kvc_sorted sorted = {0};
    for (int i = 0; i < NUM; i++) {
        members[i].key = i;
        insert(&sorted, &members[i]);
    }
    for (int i = 0; i < NUM; i += 2) kvc_sorted_remove(&sorted, &members[i].links);
    for (int i = 1; i < NUM; i += 2) CHECKF(depth_of(&members[i].links) <= MOST, "%d", depth_of(&members[i].links));
    for (int i = 1; i < NUM; i += 2) kvc_sorted_remove(&sorted, &members[i].links);
    CHECK(!sorted.root && !sorted.num);
    free(members);
}

int main(void) {
    test_order();
    test_depth();
    return test_result();
}
