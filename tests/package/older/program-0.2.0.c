/* Uses each struct of kvcache.h of 0.2.0 once, with sizes of that header. */
#include "kvcache-0.2.0.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            printf("line %d: %s\n%s\n", __LINE__, #condition, kvc_last_error());                                       \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)
#define OK(call) CHECK((call) == KVC_OK)
#define LENGTH(array) ((int64_t)(sizeof(array) / sizeof *(array)))

enum { TOKENS = 6, HEADS = 2, DIM = 4 };

static int64_t given, purged;

static void *give(void *user, size_t size, size_t alignment, const kvc_memory_hint *hint) {
    CHECK(user == &given && hint->struct_size >= sizeof *hint && hint->end_head >= hint->first_head);
    given += (int64_t)size;
    return aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}

static void take(void *user, void *memory, size_t size, const kvc_memory_hint *hint) {
    CHECK(user == &given && hint->struct_size >= sizeof *hint);
    given -= (int64_t)size;
    free(memory);
}

static void purge(void *user, void *memory, size_t size) {
    CHECK(user == &given && memory);
    purged += (int64_t)size;
}

static int32_t polled(void *user) {
    ++*(int *)user;
    return 0;
}

static int32_t moved(void *user, int32_t layer, float *keys, int32_t num_kv_heads, int64_t num_rows, int32_t k_dim,
                     int32_t delta) {
    CHECK(layer == 1 && num_kv_heads == HEADS && k_dim == DIM && delta == 3 && keys[0] == keys[0]);
    *(int64_t *)user += num_rows;
    return 0;
}

int main(void) {
    static float k[TOKENS][HEADS][DIM], v[TOKENS][HEADS][DIM], q[TOKENS][HEADS][DIM], out[TOKENS][HEADS][DIM];
    static const double inv_freq[] = {1, 0.25};
    const int64_t row = sizeof k[0][0], token = sizeof k[0];
    int polls = 0;
    int64_t rows_moved = 0, num = 0, num_runs = 0, room = 0;
    for (int i = 0; i < TOKENS; i++)
        for (int j = 0; j < HEADS * DIM; j++) {
            k[i][j / DIM][j % DIM] = (float)(i + j);
            v[i][j / DIM][j % DIM] = (float)(i * 10 + j);
        }

    kvc_layer layers[2] = {
        {HEADS, DIM, DIM, KVC_F32, KVC_F32, .policy = {KVC_SLIDING, 100}, .rope = {KVC_ROPE_FREQUENCIES, 1, 0, 2, inv_freq}},
        {HEADS, DIM, DIM, KVC_F32, KVC_F32, .rope = {KVC_ROPE_FUNCTION, .shift = moved, .user = &rows_moved}},
    };
    kvc_allocator allocator = {sizeof allocator, &given, give, take, purge};
    kvc_config config = {sizeof config, layers, sizeof *layers, 2, 4, .num_threads = 1, .allocator = &allocator,
                         .poll = polled, .poll_user = &polls};
    kvc_cache *cache, *clone;
    kvc_batch *batch;
    kvc_plan *plan;
    kvc_hold *hold;
    CHECK(kvc_version() >= 200 && kvc_build_info() && kvc_isa() && kvc_num_threads() > 0);
    OK(kvc_cache_new(&config, &cache));

    /* A batch: put, attend in one call and task by task, and rows with a mask. */
    const int32_t positions[TOKENS] = {0, 1, 2, 3, 4, 5};
    kvc_begin_args begin = {sizeof begin, TOKENS, positions};
    kvc_put_args put = {sizeof put, .k = k, .v = v, .k_token_stride = token, .k_head_stride = row,
                        .v_token_stride = token, .v_head_stride = row};
    kvc_plan_args plans = {sizeof plans, .num_heads = HEADS};
    kvc_attend_args attend = {sizeof attend, .q = q, .out = out, .q_token_stride = token, .q_head_stride = row,
                              .out_token_stride = token, .out_head_stride = row, .put = &put};
    OK(kvc_begin_with(cache, &begin, &batch));
    CHECK(kvc_batch_positions(batch)[5] == 5);
    OK(kvc_attend(batch, &plans, &attend));
    CHECK(out[5][1][3] == 32); /* queries of 0 weigh all alike: the mean of 7, 17, ... 57 */
    plans.layer = 1;
    attend.put = NULL;
    OK(kvc_put(batch, 1, &put));
    OK(kvc_plan_new(batch, &plans, &plan));
    for (int64_t i = 0; i < kvc_plan_num_tasks(plan); i++) OK(kvc_plan_run(plan, 1, &attend, i));
    CHECK(out[5][1][3] == 32 && out[0][1][3] == 7);
    kvc_plan_free(plan);
    static float rows[2][HEADS][8][DIM], mask[TOKENS][8];
    kvc_rows_out to = {sizeof to, KVC_F32, rows[0], rows[1], sizeof rows[0][0], row, sizeof rows[0][0], row};
    kvc_dense_args dense = {sizeof dense, &to, mask[0], sizeof mask[0]};
    OK(kvc_dense_rows(batch, 1, &dense.num_rows));
    CHECK(dense.num_rows == TOKENS);
    OK(kvc_dense(batch, 1, &dense));
    CHECK(rows[1][1][4][3] == 47 && mask[4][4] == 0 && mask[4][5] < 0);
    OK(kvc_commit(batch));

    /* Looking at rows. */
    kvc_span spans[4];
    OK(kvc_spans(cache, 0, 1, spans, sizeof *spans, LENGTH(spans), &num, &hold));
    CHECK(num == 2 && spans[1].position == 4 && spans[1].num_rows == 2);
    CHECK(!memcmp((const char *)spans[1].v + spans[1].v_head_stride, v[4][1], sizeof v[4][1]));
    kvc_hold_free(hold);
    int32_t stored[8];
    int64_t num_stored = 0;
    to.positions = stored, to.num_stored = &num_stored;
    OK(kvc_gather(cache, 0, 0, 1, 3, &to));
    CHECK(stored[0] == 1 && rows[0][1][2][0] == k[3][1][0]);
    OK(kvc_extract(cache, 0, 1, 2, 6, &to));
    CHECK(num_stored == TOKENS && rows[1][0][3][2] == 52);
    int64_t num_replaced = 0;
    kvc_rows_in in = {sizeof in, v, k, row, token, row, token, .num_replaced = &num_replaced};
    OK(kvc_inject(cache, 0, 1, 0, 2, &in));
    CHECK(num_replaced == 2);
    kvc_block_info blocks[8];
    kvc_run_info runs[8];
    OK(kvc_blocks(cache, 1, blocks, sizeof *blocks, LENGTH(blocks), &num, runs, sizeof *runs, LENGTH(runs), &num_runs));
    CHECK(num == 2 && num_runs == 2 && blocks[0].live == 4 && runs[1].position == 4 && runs[1].count == 2);

    /* Edits, a clone, room. */
    OK(kvc_shift(cache, 0, 4, KVC_END, 3));
    CHECK(rows_moved == 2 && kvc_next_position(cache, 0) == 9);
    OK(kvc_fork(cache, 0, 7));
    OK(kvc_truncate(cache, 7, 3));
    OK(kvc_cache_clone(cache, &clone));
    int64_t ids[4];
    CHECK(kvc_sequences(clone, ids, LENGTH(ids)) == 2 && ids[1] == 7 && kvc_seq_len(clone, 7, 1) == 3);
    OK(kvc_cache_free(clone));
    OK(kvc_room(cache, 0, &room));
    CHECK(room > 0);

    /* A batch whose rows the caller writes, of which it keeps one. */
    kvc_span slot;
    const int64_t seq_ids[] = {7, 7};
    OK(kvc_begin(cache, 2, (int32_t[]){3, 4}, seq_ids, NULL, &batch));
    for (int32_t layer = 0; layer < 2; layer++)
        for (int32_t i = 0; i < 2; i++) {
            OK(kvc_slots(batch, layer, i, &slot, sizeof slot, &hold));
            OK(kvc_written(batch, layer, i, 1));
            kvc_hold_free(hold);
        }
    OK(kvc_commit_kept(batch, (int32_t[]){0}, 1));
    CHECK(kvc_next_position(cache, 7) == 4);

    /* The names of counters changed, not their places. */
    kvc_stats stats;
    memset(&stats, 0x55, sizeof stats);
    kvc_get_stats(cache, &stats, sizeof stats);
    CHECK(stats.batches == 2 && stats.aborted == 0 && stats.tokens == 7 && stats.live_slots > 0);
    OK(kvc_validate(cache));
    OK(kvc_cache_free(cache));
    CHECK(given == 0 && purged >= 0);
    return 0;
}
