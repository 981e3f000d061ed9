/* The core computes in another way from some numbers of rows, of query rows and of bytes on.  This test attends with
 * each number from two less to two more, and compares results with plain arithmetic. */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include "attend/work.h"
#include "support/answers.h"
#include "support/isas.h"

enum { NEAR = 2 };

static const int types[] = {KVC_F32, KVC_F16, KVC_Q8_0, KVC_INT4};
enum { NUM_TYPES = sizeof types / sizeof *types };

static scene scene_of(int type, int dim, int group, int num_stored, int num_new) {
    scene s = plain_scene(1, group, dim, num_stored, num_new);
    s.layer.k_type = s.layer.v_type = type;
    return s;
}

/* A token sees this many rows, which lie side by side, or apart. */
static void test_rows(void) {
    static const int borders[] = {KVC_LANES,     KVC_ROW_GROUP, KVC_PANEL,      KVC_PANEL + KVC_ROW_GROUP,
                                  2 * KVC_PANEL, KVC_TILE,      KVC_SPLIT_ROWS, 2 * KVC_SPLIT_ROWS};
    for (size_t i = 0; i < sizeof borders / sizeof *borders; i++)
        for (int rows = borders[i] - NEAR; rows <= borders[i] + NEAR; rows++)
            for (int t = 0; t < NUM_TYPES; t++) {
                const scene s = scene_of(types[t], 32, 2, rows - 1, 1);
                check_scene(&s, &(setting){.num_threads = 1, .scattered = rows % 2});
            }
}

/* A KV head has this many query rows: of as many tokens, or of half as many, for two query heads each. */
static void test_query_rows(void) {
    static const int borders[] = {KVC_LANES, KVC_STREAM_QUERIES, KVC_TASK_QUERIES, KVC_TILE_QUERIES};
    for (size_t i = 0; i < sizeof borders / sizeof *borders; i++)
        for (int n = borders[i] - NEAR; n <= borders[i] + NEAR; n++)
            for (int t = 0; t < NUM_TYPES; t++) {
                const int group = n % 2 ? 1 : 1 + t % 2;
                const scene s = scene_of(types[t], 32, group, 9 + t, n / group);
                check_scene(&s, &(setting){.num_threads = 1 + n % 2});
            }
}

/* A key, and a value, has about this many bytes: one element of 4 bytes more or less, or two. */
static void test_row_bytes(void) {
    static const int borders[] = {KVC_SHORT_ROW, KVC_MIDDLE_ROW, KVC_CACHE_LINE, 4 * KVC_LANES, 4 * KVC_CHUNK};
    for (size_t i = 0; i < sizeof borders / sizeof *borders; i++)
        for (int dim = borders[i] / 4 - NEAR; dim <= borders[i] / 4 + NEAR; dim++)
            for (int n = 1; n <= 1 + KVC_STREAM_QUERIES; n += KVC_STREAM_QUERIES) {
                const scene s = scene_of(n % 3 ? KVC_F32 : KVC_F16, n % 3 ? dim : 2 * dim, 1, KVC_TILE + 3, n);
                check_scene(&s, &(setting){.num_threads = 1});
            }
}

/* Rows lie side by side in stretches of each length up to more than kernels take at once. */
static void test_stretches(void) {
    for (int length = 1; length <= KVC_ROW_GROUP + NEAR; length++)
        for (int t = 0; t < NUM_TYPES; t++) {
            const scene s = scene_of(types[t], 32, 1, KVC_PANEL + 2 * KVC_ROW_GROUP, 1);
            check_scene(&s, &(setting){.num_threads = 1, .block_size = length, .pass = length, .scattered = 1});
        }
}

/* Two sequences share as many runs, of a row each. */
static void test_shared_runs(void) {
    for (int runs = KVC_PANEL - NEAR; runs <= KVC_PANEL + NEAR; runs++) {
        scene s = scene_of(KVC_F32, 8, 1, runs, 2);
        s.members[s.num_members++] = member_of_length(runs, 3);
        for (int m = 0; m < 2; m++)
            for (int i = 0; i < runs + 2 + m; i++) s.members[m].positions[i] = 2 * i;
        s.is_forked = 1;
        check_scene(&s, &(setting){.num_threads = 1, .thinned = 1});
    }
}

static void test_isa(void) {
    test_rows();
    test_query_rows();
    test_row_bytes();
    test_stretches();
    test_shared_runs();
}

int main(void) {
    for_some_isas(test_isa);
    return test_result();
}
