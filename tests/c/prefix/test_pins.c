/* Many pins: one takes few steps to find.  tests/world compares in which order blocks go, whatever was pinned. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "prefix/pin.h"

#include "support/serving.h"

static int depth_of(const kvc_links *links) {
    int depth = 0;
    for (; links; links = links->above) depth++;
    return depth;
}

/* Returns how many members that a search passes there are at most. */
static int most_steps(const kvc_sorted *sorted) {
    int most = 0;
    for (const kvc_links *next = kvc_sorted_end(sorted, 0); next; next = kvc_sorted_beside(next, 1))
        if (depth_of(next) > most) most = depth_of(next);
    return most;
}

/* Many pins are found, and many blocks put back, in few steps; and they end a few at a time. */
static void test_steps(void) {
    enum { MANY = 400, LONG = 15 * BLOCK, MOST_STEPS = 48 };
    const kvc_sorted *pins, *unpinned;
    int32_t kept;
    open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){0});
    pins = &prefix->tree->pins;
    unpinned = &prefix->tree->unpinned;
    for (int i = 0; i < MANY; i++) serve(numbers(1000 * i), BLOCK, BLOCK);
    CHECK(unpinned->num == MANY && most_steps(unpinned) <= MOST_STEPS);
    for (int i = MANY - 1; i >= 0; i--) {
        const kvc_tokens tokens = tokens_of(numbers(1000 * i), BLOCK);
        CHECK(kvc_prefix_pin(prefix, &tokens, &kept) == KVC_OK && kept == BLOCK);
    }
    CHECK(!unpinned->num && pins->num == MANY && most_steps(pins) <= MOST_STEPS);
    for (int left = MANY; left; left -= 100) {
        CHECK(kvc_pins_end_some(prefix->tree, 100) == (left > 100));
        CHECK(unpinned->num == MANY - left + 100 && pins->num == left - 100);
    }
    CHECK(most_steps(unpinned) <= MOST_STEPS);
    const kvc_tokens last = tokens_of(numbers(-1000), LONG);
    serve(last.ids, LONG, LONG);
    CHECK(kvc_prefix_pin(prefix, &last, &kept) == KVC_OK && kept == LONG && unpinned->num == MANY);
    CHECK(kvc_pins_end_some(prefix->tree, 10) && unpinned->num == MANY + 10 && pins->num == 1);
    CHECK(kvc_prefix_clear(prefix) == KVC_OK && !stats_now().blocks && !prefix->tree->pins.num);
    close_world();
}

/* Pins of one prompt that know different numbers of its tokens end together, with the last call. */
static void test_shorter_pins(void) {
    const int64_t *ids = numbers(0);
    int64_t num, num_names;
    const kvc_tokens tokens = tokens_of(ids, 4 * BLOCK);
    int32_t kept;
    open_world(&full, 1, (kvc_config){0}, (kvc_prefix_config){0});
    for (int blocks = 4; blocks > 0; blocks--) {
        serve(ids, blocks * BLOCK, 4 * BLOCK);
        CHECK(kvc_prefix_pin(prefix, &tokens, &kept) == KVC_OK && kept == blocks * BLOCK);
        CHECK(kvc_prefix_forget(prefix, &tokens, NULL, 0, &num_names, &num) == KVC_OK && num == kept);
    }
    CHECK(prefix->tree->pins.num == 4 && !known(ids, 4 * BLOCK));
    serve(ids, 3 * BLOCK, 4 * BLOCK);
    CHECK(kvc_prefix_pin(prefix, &tokens, &kept) == KVC_OK && kept == 3 * BLOCK);
    CHECK(prefix->tree->pins.num == 2);
    for (int calls = 5; calls > 0; calls--) {
        CHECK(kvc_prefix_evict(prefix, MOST, &num) == KVC_OK && !num);
        CHECK(kvc_prefix_unpin(prefix, &tokens) == KVC_OK);
    }
    CHECK(!prefix->tree->pins.num);
    CHECK(kvc_prefix_evict(prefix, MOST, &num) == KVC_OK && num == 3 * BLOCK);
    close_world();
}

/* Pins a prompt that is known up to its last token, which says which prompt it is. */
static kvc_status pin(int last) {
    int64_t *ids = numbers(0);
    ids[MOST - 1] = 1000 + last;
    const kvc_tokens tokens = tokens_of(ids, MOST);
    int32_t kept = 0;
    const kvc_status status = kvc_prefix_pin(prefix, &tokens, &kept);
    CHECK(kept == (status == KVC_OK ? MOST - 1 : 0));
    return status;
}

/* A pin takes memory for its list of blocks, within max_bytes; another pin of the same prompt takes no more. */
static void test_room_for_pins(void) {
    enum { PINS = 3000, MAX_BYTES = 1 << 17 };
    int num = 0;
    open_world(&full, 1, (kvc_config){.block_size = BLOCK, .max_bytes = MAX_BYTES}, (kvc_prefix_config){0});
    serve(numbers(0), MOST, MOST);
    while (num < PINS && pin(num) == KVC_OK) num++;
    const int64_t bytes = kvc_nbytes(cache);
    CHECKF(num > 100 && num < PINS, "%d pins", num);
    CHECK_FAILS(pin(num), KVC_ERR_FULL, "pinning a prompt", "kept blocks are pinned: unpin some");
    CHECK(prefix->tree->pins.num == num && known(numbers(0), MOST) == MOST && kvc_nbytes(cache) == bytes);
    CHECK(pin(0) == KVC_OK && prefix->tree->pins.num == num && kvc_nbytes(cache) == bytes);
    close_world();
}

int main(void) {
    test_steps();
    test_shorter_pins();
    test_room_for_pins();
    return test_result();
}
