/* The rows that queries see, and attention over them: after random edits, in random batches, of any policy and rope. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/looking.h"

/* roundings: how often f32 keys, rotated by any angles, may be rounded; 0: keys of any type, by right angles. */
static void test_random(int block_size, int num_steps, int roundings) {
    static pair p;
    static view v;
    static memory heap;
    memory_init(&heap);
    p = (pair){.memory = &heap, .config.block_size = block_size, .roundings = roundings, .look = look};
    random_pair(&p);
    if (roundings) {
        kvc_layer layers[MAX_LAYERS];
        memcpy(layers, p.layers, sizeof layers);
        for (int l = 0; l < p.config.num_layers; l++) {
            layers[l].k_type = KVC_F32;
            layers[l].v_type = layers[l].value_in_key ? KVC_F32 : layers[l].v_type;
        }
        pair_free(&p);
        pair_new(&p, p.config.num_layers, layers);
    }
    for (int i = 0; i < num_steps; i++) random_step(&p, &v);
    pair_check(&p);
    view_free(&v, &p);
    pair_free(&p);
}

/* Positions up to the largest, in rows that are cut where a block ends and where rows are masked. */
static void test_largest_positions(void) {
    enum { NUM = 12 };
    static pair p;
    static const kvc_policy policies[] = {{.kind = KVC_FULL}, {.kind = KVC_SLIDING, .window = 5}};
    for (int i = 0; i < 2; i++) {
        const kvc_layer layer = {.num_kv_heads = 1, .k_dim = 4, .v_dim = 4, .k_type = KVC_F32, .policy = policies[i]};
        int32_t positions[NUM];
        for (int t = 0; t < NUM; t++) positions[t] = INT32_MAX - NUM + t;
        p = (pair){.config.block_size = 4};
        pair_new(&p, 1, &layer);
        CHECK(pair_begin(&p, NUM, positions, (int64_t[NUM]){0}) == KVC_OK);
        pair_put_all(&p);
        look(&p);
        num_masked = 1;
        masked[0] = (kvc_masked){0, positions[2], positions[3]};
        check_attend(&p, 0, 0, NUM, NULL);
        CHECK(pair_commit(&p) == KVC_OK);
        pair_check(&p);
        pair_free(&p);
    }
}

/* Single rows that lie evenly in their block, the first or the last of which was moved by another distance than those
 * beside it. */
static void test_single_rows(void) {
    enum { NUM = 24 };
    static pair p;
    const kvc_layer layer = {.num_kv_heads = 1,
                             .k_dim = 4,
                             .v_dim = 4,
                             .rope = {.kind = KVC_ROPE_FREQUENCIES, .num_freqs = 2, .inv_freq = right_angles}};
    for (int32_t from = 2; from < NUM; from += NUM - 4) {
        p = (pair){.config.block_size = 64};
        pair_new(&p, 1, &layer);
        pair_feed(&p, 0, 0, NUM);
        for (int32_t i = 1; i < NUM; i += 2) CHECK(pair_remove(&p, 0, i, i + 1, 0) == KVC_OK);
        CHECK(pair_shift(&p, 0, from, KVC_END, 3) == KVC_OK);
        CHECK(pair_begin(&p, 1, (int32_t[]){kvc_next_position(p.cache, 0)}, (int64_t[]){0}) == KVC_OK);
        pair_put_all(&p);
        num_masked = 0;
        check_attend(&p, 0, 0, 1, NULL);
        CHECK(pair_commit(&p) == KVC_OK);
        pair_free(&p);
    }
}

int main(int argc, char **argv) {
    static const int block_sizes[] = {1, 3, 16, 64};
    if (has_seed(argc, argv)) {
        test_random(block_sizes[random_int(0, 4)], 120, random_int(0, 3) ? 12 : 0);
        return test_result();
    }
    test_largest_positions();
    test_single_rows();
    for (int i = 0; i < 96; i++) test_random(block_sizes[i % 4], 120, i % 3 ? 12 : 0);
    CHECKF(num_looks > 500 && num_attends > 2000 && num_refused > 50 && num_weighed > 500, "%d, %d, %d, %d", num_looks,
           num_attends, num_refused, num_weighed);
    return test_result();
}
