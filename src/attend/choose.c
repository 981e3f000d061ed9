/* choose.c: runs tasks of a plan for choosing.  kvc_choose runs all of them, and kvc_plan_choose one.
 *
 * A slice is one token, and all its rows by position, cut into splits.  A task ranks the rows of a split: it gives each
 * a key for each choice, an integer that is larger for a better score.  The task that ends a slice's last split chooses
 * for all of the token's choices, as nothing else is left to do.  An entry is what is chosen: a row, or, with `block`,
 * a block of rows.  Its id is its position, or the number of the block.
 */
#include <math.h>
#include <string.h>

#include "attend/plan.h"
#include "attend/rank.h"
#include "attend/run.h"
#include "attend/topk.h"
#include "cache/check.h"

/* ---- a task ------------------------------------------------------------------------------------------------------ */

/* Returns where a task ranks the rows of its split: in the workspace. */
static uint32_t *ranks_of(const kvc_task *t) {
    return (uint32_t *)(void *)(t->workspace + t->call->plan->choosing.ranks);
}

/* Returns the keys of all rows of a task's slice for choice c.  Those of several splits are in plan->partials. */
static uint32_t *keys_of(const kvc_task *t, int32_t c) {
    const int is_whole = t->slice->num_splits == 1;
    uint32_t *const first = is_whole ? ranks_of(t) : (uint32_t *)(void *)(t->call->plan->partials + t->slice->partials);
    return first + (size_t)c * (size_t)t->slice->num_rows;
}

/* Ranks the rows of the task's split.  Returns 0 if the call was cancelled. */
static int rank_split(kvc_task *t) {
    const int64_t begin = t->job->split * t->slice->split_rows, num_rows = kvc_split_rows(t->slice, t->job->split);
    return kvc_rank_rows(t, kvc_cursor_at(t->call, t->slice, 0, 0, begin, num_rows), ranks_of(t), num_rows);
}

/* Copies the keys of the task's split to plan->partials, where the slice's last task finds them. */
static void keep_ranks(const kvc_task *t) {
    const int64_t begin = t->job->split * t->slice->split_rows, num_rows = kvc_split_rows(t->slice, t->job->split);
    for (int32_t c = 0; c < kvc_ranking_of(t)->args->num_choices; c++)
        memcpy(keys_of(t, c) + begin, ranks_of(t) + c * num_rows, (size_t)num_rows * sizeof(uint32_t));
}

/* Entries of one choice, in the workspace: rows, or blocks of rows, by position. */
typedef struct entry_list {
    uint32_t *keys; /* KVC_NO_KEY: the entry may not be chosen */
    int32_t *ids;   /* rising */
    int64_t num;
} entry_list;

/* Adds an entry.  If the last one has the same id, it gets the larger of both keys instead. */
static void add_entry(entry_list *to, int32_t id, uint32_t key) {
    if (key == KVC_NO_KEY) return;
    if (to->num && to->ids[to->num - 1] == id) {
        if (key > to->keys[to->num - 1]) to->keys[to->num - 1] = key;
        return;
    }
    to->ids[to->num] = id;
    to->keys[to->num++] = key;
}

/* Returns how many rows are chosen together. */
static int32_t rows_together(const kvc_task *t) {
    const int32_t block = kvc_ranking_of(t)->args->block, stride = t->call->plan->stride;
    return block > stride ? block / stride : 1;
}

/* Adds the rows of a segment as blocks of `block` rows.  A block has the key of its best row. */
static void add_blocks(entry_list *to, const kvc_segment *segment, const uint32_t *keys, int32_t block) {
    for (int32_t i = 0; i < segment->count;) {
        const int32_t id = (segment->position + i) / block;
        const int64_t end = kvc_smaller((int64_t)(id + 1) * block - segment->position, segment->count);
        uint32_t best = KVC_NO_KEY;
        for (; i < end; i++) best = keys[i] > best ? keys[i] : best;
        add_entry(to, id, best);
    }
}

/* Adds each row of a segment as an entry.  Only the first one may stand at the position of the row before. */
static void add_rows(entry_list *to, const kvc_segment *segment, const uint32_t *keys) {
    add_entry(to, segment->position, keys[0]);
    int64_t num = to->num;
    for (int32_t i = 1; i < segment->count; i++) {
        to->ids[num] = segment->position + i;
        to->keys[num] = keys[i];
        num += keys[i] != KVC_NO_KEY;
    }
    to->num = num;
}

/* Lists the entries that the task's token may choose: rows that it sees, or their blocks.  keys: one of each row. */
static entry_list list_entries(const kvc_task *t, const uint32_t *keys) {
    const kvc_plan *plan = t->call->plan;
    const int32_t block = rows_together(t);
    const kvc_segment *segment = plan->segments + plan->starts[t->slice->first_start].segment;
    entry_list list = {(uint32_t *)(void *)(t->workspace + plan->choosing.entries),
                       (int32_t *)(void *)(t->workspace + plan->choosing.ids), 0};
    for (int64_t row = 0; row < t->slice->num_rows; row += segment++->count) {
        if (block > 1)
            add_blocks(&list, segment, keys + row, block);
        else
            add_rows(&list, segment, keys + row);
    }
    return list;
}

/* Returns the index of the first entry whose id is not below this one. */
static int64_t find_entry(const entry_list *list, int64_t id) {
    int64_t begin = 0, end = list->num;
    while (begin < end) {
        const int64_t middle = begin + (end - begin) / 2;
        if ((list->ids[middle] & INT32_MAX) < id)
            begin = middle + 1;
        else
            end = middle;
    }
    return begin;
}

/* Lets only the entries that `among` lists be chosen, by positions of which each id has `unit`; a negative one is none.
 * Marks them by the sign bit of their ids meanwhile. */
static void keep_among(entry_list *list, const int32_t *among, int32_t width, int32_t unit) {
    for (int32_t i = 0; i < width; i++) {
        const int32_t id = unit == 1 ? among[i] : among[i] / unit;
        const int64_t at = among[i] < 0 ? list->num : find_entry(list, id);
        if (at < list->num && (list->ids[at] & INT32_MAX) == id) list->ids[at] |= INT32_MIN;
    }
    for (int64_t i = 0; i < list->num; i++) {
        if (list->ids[i] >= 0) list->keys[i] = KVC_NO_KEY;
        list->ids[i] &= INT32_MAX;
    }
}

/* Byte strides of an array of entries. */
typedef struct strides {
    int64_t token, batch, choice;
} strides;

/* Returns where the entries of choice c of the task's token begin. */
static void *entries_at(const kvc_task *t, const void *array, strides by, int32_t c) {
    const kvc_ranking *k = kvc_ranking_of(t);
    const int32_t token = t->tokens[0] - k->call.plan->args.first;
    const int64_t offset = kvc_token_offset(token, k->args->tokens_per_sequence, by.token, by.batch);
    return (char *)(uintptr_t)array + offset + c * by.choice;
}

/* Chooses for choice c, and writes ids and scores.  own: the entry of the token itself, or the last that it sees. */
static void choose(const kvc_task *t, int32_t c) {
    const kvc_choose_args *a = kvc_ranking_of(t)->args;
    const kvc_plan *plan = t->call->plan;
    const int32_t unit = a->block > 1 ? 1 : plan->stride,
                  last = kvc_last_row(plan->batch->positions[t->tokens[0]], plan->stride),
                  own = last < 0 ? -1 : last / rows_together(t);
    const strides of_among = {a->among_token_stride, a->among_batch_stride, a->among_choice_stride},
                  of_chosen = {a->chosen_token_stride, a->chosen_batch_stride, a->chosen_choice_stride},
                  of_scores = {a->scores_token_stride, a->scores_batch_stride, a->scores_choice_stride};
    int32_t *const chosen = entries_at(t, a->chosen, of_chosen, c);
    float *const scores = a->scores ? entries_at(t, a->scores, of_scores, c) : NULL;
    entry_list list = list_entries(t, keys_of(t, c));
    if (a->among) keep_among(&list, entries_at(t, a->among, of_among, c), a->among_width, unit);
    const kvc_entries entries = {.keys = list.keys,
                                 .num = list.num,
                                 .first = find_entry(&list, a->num_first),
                                 .local = find_entry(&list, (int64_t)own - a->num_local + 1),
                                 .local_end = find_entry(&list, (int64_t)own + 1)};
    const int32_t num = kvc_topk(&entries, a->width, chosen);
    for (int32_t i = 0; i < a->width; i++) {
        if (scores) scores[i] = i < num ? kvc_score_of(list.keys[chosen[i]]) : -INFINITY;
        chosen[i] = i < num ? kvc_position_of(list.ids[chosen[i]], unit) : -1;
    }
}

/* Ends a task whose rows are ranked: the last one of its slice chooses. */
static void end_split(const kvc_task *t) {
    if (t->slice->num_splits > 1) {
        keep_ranks(t);
        if (!kvc_ends_slice(t)) return;
    }
    for (int32_t c = 0; c < kvc_ranking_of(t)->args->num_choices; c++) choose(t, c);
}

/* ---- the public functions ---------------------------------------------------------------------------------------- */

/* Checks a number of an argument that is at least `least`. */
static kvc_status check_least(int32_t value, int32_t least, const char *name) {
    if (value >= least) return KVC_OK;
    return kvc_fail(KVC_ERR_INVALID, "%s is %d: it must be at least %d", name, value, least);
}

/* Checks the arrays, and resolves their strides. */
static kvc_status resolve_arrays(kvc_choose_args *a, const kvc_plan_args *plan, int32_t k_dim) {
    const int32_t inner = a->tokens_per_sequence, heads = plan->num_heads, choices = a->num_choices,
                  tokens = inner ? inner : plan->num_tokens, batches = inner ? plan->num_tokens / inner : 0;
    const kvc_array arrays[] = {
        {.name = "q",
         .data = a->q,
         .type = a->q_type,
         .length = k_dim,
         .axes = {KVC_AXIS(a, q_head_stride, heads), KVC_AXIS(a, q_token_stride, tokens),
                  KVC_AXIS(a, q_batch_stride, batches)}},
        {.name = "weights",
         .data = a->weights,
         .element_bytes = sizeof *a->weights,
         .length = 1,
         .axes = {KVC_AXIS(a, weights_head_stride, heads), KVC_AXIS(a, weights_token_stride, tokens),
                  KVC_AXIS(a, weights_batch_stride, batches)}},
        {.name = "among",
         .data = a->among,
         .element_bytes = sizeof *a->among,
         .length = a->among_width,
         .axes = {KVC_AXIS(a, among_choice_stride, choices), KVC_AXIS(a, among_token_stride, tokens),
                  KVC_AXIS(a, among_batch_stride, batches)}},
        {.name = "chosen",
         .data = a->chosen,
         .is_output = 1,
         .element_bytes = sizeof *a->chosen,
         .length = a->width,
         .axes = {KVC_AXIS(a, chosen_choice_stride, choices), KVC_AXIS(a, chosen_token_stride, tokens),
                  KVC_AXIS(a, chosen_batch_stride, batches)}},
        {.name = "scores",
         .data = a->scores,
         .is_output = 1,
         .element_bytes = sizeof *a->scores,
         .length = a->width,
         .axes = {KVC_AXIS(a, scores_choice_stride, choices), KVC_AXIS(a, scores_token_stride, tokens),
                  KVC_AXIS(a, scores_batch_stride, batches)}},
    };
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) KVC_TRY(kvc_resolve_array(&arrays[i]));
    return KVC_OK;
}

/* Checks arguments, and fills in the defaults. */
static kvc_status resolve_args(kvc_choose_args *a, const kvc_plan_args *plan, int32_t k_dim, int32_t stride) {
    if (!a->q || !a->chosen) return kvc_fail(KVC_ERR_INVALID, "%s is NULL", a->q ? "chosen" : "q");
    if (!isfinite(a->scale)) return kvc_fail(KVC_ERR_INVALID, "scale is %g: it must be finite", (double)a->scale);
    KVC_TRY(check_least(a->width, 1, "width"));
    KVC_TRY(check_least(a->among_width, 0, "among_width"));
    KVC_TRY(check_least(a->block, 0, "block"));
    KVC_TRY(check_least(a->num_first, 0, "num_first"));
    KVC_TRY(check_least(a->num_local, 0, "num_local"));
    if (!a->block) a->block = 1;
    if (a->block > 1 && a->block % stride)
        return kvc_fail(KVC_ERR_INVALID, "block is %d: it must be a multiple of the layer's stride, %d, or 1", a->block,
                        stride);
    if (!a->num_choices) a->num_choices = 1;
    if (a->num_choices != plan->num_choices)
        return kvc_fail(KVC_ERR_INVALID, "num_choices is %d: the plan was made for %d", a->num_choices,
                        plan->num_choices);
    if (a->tokens_per_sequence) KVC_TRY(kvc_check_tokens_per_sequence(a->tokens_per_sequence, plan->num_tokens));
    return resolve_arrays(a, plan, k_dim);
}

/* Returns the arguments of an attention with the same queries, for what both have in common. */
static kvc_attend_args as_attention(const kvc_choose_args *a) {
    return (kvc_attend_args){.q = a->q, .out = a->chosen, .lse = a->scores, .cancel = a->cancel, .scale = a->scale};
}

static void make_ranking(kvc_ranking *k, kvc_plan *plan, int32_t layer, const kvc_choose_args *args,
                         const kvc_attend_args *common) {
    static const kvc_work work = {rank_split, end_split, "the choice was cancelled"};
    k->args = args;
    k->lanes = kvc_rank_lanes_of(plan);
    kvc_call_init(&k->call, plan, layer, common, &work);
}

kvc_status kvc_plan_choose(kvc_plan *plan, int32_t layer, const kvc_choose_args *given, int64_t task) {
    kvc_choose_args args;
    kvc_ranking k;
    KVC_TRY(KVC_READ(kvc_choose_args, &args, given, "args"));
    KVC_TRY(kvc_check_choosing(plan->batch, layer));
    KVC_TRY(kvc_check_plan_layer(plan, layer));
    KVC_TRY(resolve_args(&args, &plan->args, plan->k_dim, plan->stride));
    const kvc_attend_args common = as_attention(&args);
    make_ranking(&k, plan, layer, &args, &common);
    return kvc_run_task(&k.call, layer, task);
}

kvc_status kvc_choose(kvc_batch *batch, const kvc_plan_args *given_plan, const kvc_choose_args *given) {
    kvc_choose_args args;
    kvc_plan_args plan_args;
    kvc_plan *plan;
    kvc_ranking k;
    KVC_TRY(KVC_READ(kvc_choose_args, &args, given, "args"));
    KVC_TRY(KVC_READ(kvc_plan_args, &plan_args, given_plan, "plan"));
    KVC_TRY(kvc_check_choosing(batch, plan_args.layer));
    if (!plan_args.num_choices) plan_args.num_choices = args.num_choices;
    KVC_TRY(kvc_resolve_plan(batch, &plan_args));
    KVC_TRY(resolve_args(&args, &plan_args, batch->cache->layers[plan_args.layer].k_dim,
                         batch->cache->pools[batch->cache->group_of[plan_args.layer]].stride));
    KVC_TRY(kvc_plan_get(batch, &plan_args, &plan));
    kvc_status status = kvc_check_all_seen(plan, plan_args.layer, /* put */ NULL);
    if (status == KVC_OK) {
        const kvc_attend_args common = as_attention(&args);
        make_ranking(&k, plan, plan_args.layer, &args, &common);
        status = kvc_run_tasks(&k.call);
    }
    kvc_plan_leave(plan);
    return status;
}
