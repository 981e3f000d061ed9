/* What a query does not see does not reach it: rows of infinities and NaN leave the results of queries that do not see
 * them as they are, bit for bit, in prompts, windows, chunks and trees, for every type. */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include <math.h>

#include "support/isas.h"
#include "support/test.h"

enum { STORED = 90, FRESH = 230, TOTAL = STORED + FRESH, HEADS = 4, KV_HEADS = 2, DIM = 64, SEQUENCES = 2 };

static const float bad_numbers[] = {NAN, INFINITY, -INFINITY};

typedef struct scene {
    kvc_policy policy;
    int32_t type;
    int is_tree;      /* tokens of the batch descend from every second one before them */
    int num_stored;   /* tokens before the batch */
    int num_fresh;    /* tokens of the batch, of each sequence */
    int is_forked;    /* the second sequence has the stored rows of the first; else there is one sequence */
    float softcap;
    const float *alibi;
} scene;

/* Puts n tokens; bad: the position whose rows are no numbers, or -1. */
static void put(kvc_batch *batch, int n, const int64_t *ids, const int32_t *positions, int32_t bad, float number)
{
    static float k[TOTAL * SEQUENCES][KV_HEADS][DIM], v[TOTAL * SEQUENCES][KV_HEADS][DIM];
    for (int t = 0; t < n; t++)
        for (int d = 0; d < KV_HEADS * DIM; d++) {
            const int is_bad = positions[t] == bad && ids[t] == 0;
            k[t][d / DIM][d % DIM] = is_bad && d % 7 == 3 ? number : element_of(0, ids[t], positions[t], d);
            v[t][d / DIM][d % DIM] = is_bad && d % 5 == 2 ? number : element_of(1, ids[t], positions[t], d);
        }
    put_floats(batch, 0, 0, n, KV_HEADS, DIM, DIM, k, v);
}

typedef struct answers {
    float out[TOTAL * SEQUENCES][HEADS][DIM], lse[TOTAL * SEQUENCES][HEADS];
} answers;

static int num_sequences(const scene *s) { return s->is_forked ? 2 : 1; }

/* Names the tokens of the batch, sequence after sequence, and their parents, if it is a tree; returns their number. */
static int name_tokens(const scene *s, int64_t *ids, int32_t *positions, int32_t *parents)
{
    int n = 0;
    for (int64_t id = 0; id < num_sequences(s); id++)
        for (int32_t i = 0; i < s->num_fresh; i++, n++) {
            ids[n] = id;
            positions[n] = s->num_stored + i;
            parents[n] = i < 2 ? -1 : n - 2;
        }
    return n;
}

static void compute(const scene *s, int32_t bad, float number, answers *a)
{
    static float q[TOTAL * SEQUENCES][HEADS][DIM];
    int64_t ids[TOTAL * SEQUENCES] = {0};
    int32_t positions[TOTAL * SEQUENCES], parents[TOTAL * SEQUENCES];
    const kvc_layer layer = {.num_kv_heads = KV_HEADS, .k_dim = DIM, .v_dim = DIM, .k_type = s->type,
                             .v_type = s->type, .policy = s->policy};
    kvc_batch *batch = NULL;
    kvc_cache *cache = cache_of(&layer, 1, (kvc_config){.block_size = 48, .num_threads = 1});
    for (int32_t i = 0; i < s->num_stored; i++)
        positions[i] = i;
    if (s->num_stored) {
        CHECKF(kvc_begin(cache, s->num_stored, positions, ids, NULL, &batch) == KVC_OK, "%s", kvc_last_error());
        put(batch, s->num_stored, ids, positions, bad, number);
        CHECK(kvc_commit(batch) == KVC_OK && (!s->is_forked || kvc_fork(cache, 0, 1) == KVC_OK));
    }
    const int n = name_tokens(s, ids, positions, parents);
    for (int t = 0; t < n; t++)
        for (int d = 0; d < HEADS * DIM; d++)
            q[t][d / DIM][d % DIM] = element_of(2, ids[t], positions[t], d);
    CHECKF(kvc_begin(cache, n, positions, ids, s->is_tree ? parents : NULL, &batch) == KVC_OK, "%s", kvc_last_error());
    put(batch, n, ids, positions, bad, number);
    const kvc_plan_args plan = {.struct_size = sizeof plan, .num_heads = HEADS};
    const kvc_attend_args args = {.struct_size = sizeof args, .q = q, .out = a->out, .lse = *a->lse,
                                  .q_token_stride = sizeof *q, .q_head_stride = sizeof **q,
                                  .out_token_stride = sizeof *a->out, .out_head_stride = sizeof **a->out,
                                  .lse_token_stride = sizeof *a->lse, .lse_head_stride = sizeof **a->lse,
                                  .softcap = s->softcap, .alibi = s->alibi};
    CHECKF(kvc_attend(batch, &plan, &args) == KVC_OK, "%s", kvc_last_error());
    kvc_abort(batch);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* Whether a token of the batch sees a position of its own sequence. */
static int sees(const scene *s, int32_t query, int32_t position)
{
    const kvc_policy *policy = &s->policy;
    if (position > query)
        return 0;
    if (s->is_tree && position >= s->num_stored && (query - position) % 2)
        return 0;
    if (policy->kind == KVC_SLIDING)
        return position > query - policy->window || position < policy->num_sink_tokens;
    const int32_t size = policy->attention_chunk_size;
    return policy->kind != KVC_CHUNKED || position / size == query / size;
}

/* Compares what tokens see with a row of numbers and without, at several positions. */
static void check(const scene *s)
{
    static answers clean, spoilt;
    int64_t ids[TOTAL * SEQUENCES];
    int32_t positions[TOTAL * SEQUENCES], parents[TOTAL * SEQUENCES];
    const int n = name_tokens(s, ids, positions, parents), total = s->num_stored + s->num_fresh;
    compute(s, -1, 0, &clean);
    for (int i = 0; i < 6; i++) {
        const int32_t bad = i < 4 ? total - 1 - i * s->num_fresh / 4 : s->num_stored / (i - 3) - 1;
        if (bad < 0)
            continue;
        compute(s, bad, bad_numbers[i % 3], &spoilt);
        int num_differ = 0;
        for (int t = 0; t < n; t++) {
            const int is_bad = sees(s, positions[t], bad) && (ids[t] == 0 || bad < s->num_stored);
            const int differs = memcmp(clean.out[t], spoilt.out[t], sizeof *clean.out) ||
                                memcmp(clean.lse[t], spoilt.lse[t], sizeof *clean.lse);
            num_differ += !is_bad && differs;
            CHECKF(!is_bad || differs, "type %d: position %d does not see the row at %d", s->type, positions[t], bad);
        }
        CHECKF(!num_differ, "%s, type %d, policy %d, %d + %d tokens: the row at %d reaches %d that do not see it",
               kvc_isa(), s->type, s->policy.kind, s->num_stored, s->num_fresh, bad, num_differ);
    }
}

static void test_all(void)
{
    static const float slopes[HEADS] = {0.5f, 0.25f, 0.125f, 0.01f};
    const kvc_policy policies[] = {{.kind = KVC_FULL},
                                   {.kind = KVC_SLIDING, .window = 16},
                                   {.kind = KVC_SLIDING, .window = 40, .num_sink_tokens = 5},
                                   {.kind = KVC_CHUNKED, .attention_chunk_size = 30}};
    for (int32_t type = 0; kvc_type_name(type); type++)
        for (int p = 0; p < 4; p++)
            for (int i = 0; i < 6; i++) {
                scene s = {.policy = policies[p], .type = type, .num_stored = i % 2 ? STORED : 0,
                           .num_fresh = i < 2 ? FRESH : i < 4 ? 7 : 30, .is_forked = i == 5, .is_tree = i == 3};
                if (is_quick() && (type + p + i) % 3)
                    continue;
                s.softcap = i == 4 ? 20 : 0;
                s.alibi = i == 0 ? slopes : NULL;
                check(&s);
            }
}

int main(void)
{
    for_some_isas(test_all);
    return test_result();
}
