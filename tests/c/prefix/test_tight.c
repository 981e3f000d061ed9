/* Under max_bytes, a prompt that fits without a match fits with one, whatever others left behind. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/serving.h"

enum { SIZE = 16 }; /* tokens of a block */

static kvc_status feed_all(int64_t id, int num, int step) {
    kvc_status status = KVC_OK;
    for (int at, end; status == KVC_OK && (at = kvc_next_position(cache, id)) < num;) {
        end = (at / step + 1) * step; /* batches end at the same tokens, whatever matched */
        status = feed(cache, num_layers, id, (end < num ? end : num) - at);
    }
    return status;
}

/* Returns whether a prompt of `num` tokens fits, after one of `kept` tokens that begins with `common` of its tokens; -1
 * if the cache does not begin. */
static int prompt_fits(int64_t max_bytes, int is_windowed, int num, int step, int common, int kept) {
    const kvc_policy policies[] = {is_windowed ? sliding_policy(8, 0, 0) : full, full};
    const kvc_prefix_config config = {.struct_size = sizeof config, .fingerprint = "a model"};
    kvc_layer layers[2];
    for (int l = 0; l < 2; l++)
        layers[l] = (kvc_layer){.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM, .policy = policies[l]};
    num_layers = 2;
    cache = heap_cache(2, layers, (kvc_config){.block_size = SIZE, .max_bytes = max_bytes});
    kvc_status status = kvc_prefix_new(cache, &config, &prefix);
    const int begins = status == KVC_OK;
    if (begins && kept) {
        int64_t *other = numbers(100);
        for (int i = common; i < MOST; i++) other[i] = 1000 + i;
        const int64_t id = acquire(other, kept, NULL);
        feed_all(id, kept, step);
        release(id, other, kept);
    }
    if (begins) {
        const int64_t id = acquire(numbers(100), num, NULL);
        status = feed_all(id, num, step);
        CHECK(status == KVC_OK || status == KVC_ERR_FULL);
        CHECK(kvc_clear_sequence(cache, id) == KVC_OK);
    }
    free_valid(cache);
    return begins ? status == KVC_OK : -1;
}

int main(void) {
    for (int shape = 0; shape < 16; shape++) {
        const int is_windowed = shape % 2, num = 20 + 10 * (shape / 4), step = shape / 2 % 2 ? 64 : 8;
        int64_t low = 1000, high = 200000; /* the least with which it fits alone */
        while (high - low > 1) {
            const int64_t middle = (low + high) / 2;
            if (prompt_fits(middle, is_windowed, num, step, 0, 0) == 1)
                high = middle;
            else
                low = middle;
        }
        for (int common = 6; common <= num; common += 11)
            for (int more = 0; more < 6000; more += 1 + more * 2)
                CHECKF(prompt_fits(high + more, is_windowed, num, step, common, common + 7) == 1,
                       "%d tokens, %d at once, windows %d: %lld bytes are too few behind %d known ones", num, step,
                       is_windowed, (long long)(high + more), common);
    }
    return test_result();
}
