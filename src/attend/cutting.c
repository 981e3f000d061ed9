/* cutting.c: cuts the queries of a batch into slices, and the rows that each sees into segments and splits.
 *
 * A slice is query tokens of one sequence with the rows that they see.  Positions in its reach are [0, sinks) and [low,
 * end).  Its rows are stored runs, consecutive slots of a block each, then the batch's own rows.  A segment is a part
 * of a run in reach, and a split is some segments' rows.  Keys of a run are off by its delta if the rows were moved.
 *
 * The rule for slices and splits.  It depends on the lengths of the sequence alone, never on threads, blocks or the
 * rest of the batch, so that the results of one sequence are always added up in the same order:
 *   - Up to KVC_STREAM_QUERIES query rows per KV head are one slice, which is streamed: every stored row is read once
 *     for all of them.  The rows in reach are cut every KVC_SPLIT_ROWS, however many they are, so that sequences that
 *     begin alike are cut alike.
 *   - More query rows are tiled.  Up to KVC_TASK_QUERIES are one slice.  More are cut into slices of about
 *     KVC_TILE_QUERIES, or a half or a quarter of that if the sequence would otherwise have less than KVC_TILED_TASKS
 *     tasks.  The rows in reach of a slice are cut every KVC_SPLIT_ROWS, or every 3/2, 2, 3, 4, 6 ...  times as many,
 *     so that the sequence has at most KVC_TILED_TASKS tasks: two for each of 64 threads, and few, as results are large
 *     here.  Slices in bytes have twice as many query rows.  pays_in_bytes says which sequences are in bytes.
 *   - Where rows are chosen, each token is a slice, which is tiled if it alone has more than KVC_STREAM_QUERIES query
 *     rows.  The chosen rows are cut every KVC_SPLIT_ROWS.
 *   - Where a plan chooses, each token is a slice, too.  Its rows may be cut anyhow, because each is ranked by itself.
 *     They are cut so that there are enough tasks for the plan's threads.
 *
 * An example of slices, with 8 KV heads and 4 query heads of each:
 *   - A sequence of 1,300 rows decodes a token: 4 query rows, a slice that is streamed.  Its splits are the rows
 *     [0, 512), [512, 1024) and [1024, 1300).
 *   - A prompt of 100 tokens has 400 query rows, which are tiled.  Slices of 256 or 128 query rows would be 16 or 32
 *     tasks, fewer than KVC_TILED_TASKS.  So slices have 64 query rows: 6 slices have 16 tokens, and one has 4.
 *
 * An example of segments, for a window of 64 and 4 sinks.  A token at position 100 sees the positions [0, 4) and
 * [37, 101).  The sequence has a run of positions [0, 64) in block A, and one of [64, 100) in block B:
 *
 *     segments    A [0, 4)   A [37, 64)   B [64, 100)   [100, 101), the batch's own row
 *     num_rows    4 + 27 + 36 + 1 = 68, which are one split
 *
 * Arrays are allocated between two passes over the same function, which first counts, then lists: cut_queries for
 * slices (kvc_count_slices, kvc_list_slices), visit_own_rows for the batch's own rows (count_own_rows, list_segment).
 */
#include "attend/cutting.h"

#include <stdlib.h>
#include <string.h>

#include "base/status.h"

/* ---- the queries of a slice -------------------------------------------------------------------------------------- */

/* The query tokens order[first .. end) of a sequence, cut into slices of `tokens` tokens; the last may have fewer. */
typedef struct query_cut {
    int32_t first, end, tokens;
    int32_t num_slices; /* 0: the sequence has no query tokens */
    int32_t way;        /* of kvc_query_slice's `tiled`, unless tokens choose or select */
    int32_t may_select; /* the tokens select if one sees more than kvc_most_unselected */
} query_cut;

/* Returns the number of query tokens per slice, for a sequence with more than KVC_TASK_QUERIES query rows that see at
 * most num_rows rows. */
static int32_t slice_tokens(const kvc_plan *plan, int32_t way, int64_t query_rows, int64_t num_rows) {
    const int64_t tasks_per_slice = KVC_DIVIDE_UP(num_rows, KVC_SPLIT_ROWS) * plan->num_kv_heads; /* upper bound */
    const int32_t whole = way == KVC_IN_BYTES ? KVC_BYTE_TILE_QUERIES : KVC_TILE_QUERIES;
    int32_t most = whole;
    while (most > whole / 4 && KVC_DIVIDE_UP(query_rows, most) * tasks_per_slice < KVC_TILED_TASKS) most /= 2;
    return most > plan->parts.heads ? most / plan->parts.heads : 1;
}

/* Returns the query tokens of a sequence, not cut yet: its tokens in the plan's range.  They stand side by side in
 * batch->order, where tokens of a sequence rise. */
static query_cut queries_of(const kvc_batch *batch, const kvc_plan_args *args, int32_t sequence) {
    const kvc_batch_sequence *member = &batch->sequences[sequence];
    const int32_t end = args->first + args->num_tokens;
    query_cut cut = {.first = member->first, .end = member->first + member->num_tokens};
    while (cut.first < cut.end && batch->order[cut.first] < args->first) cut.first++;
    while (cut.first < cut.end && batch->order[cut.end - 1] >= end) cut.end--;
    return cut;
}

/* Returns whether the num_queries query tokens of a sequence may select rows.  Counts all rows of the sequence, also
 * those that the tokens do not see. */
static int may_select(const kvc_batch *batch, const kvc_plan_args *args, int32_t sequence, int32_t num_queries) {
    const kvc_batch_sequence *member = &batch->sequences[sequence];
    const kvc_run_list *stored = &member->sequence->runs[batch->cache->group_of[args->layer]];
    return num_queries && num_queries <= KVC_MOST_SELECTING &&
           (int64_t)stored->num_rows + member->num_tokens > kvc_most_unselected(args);
}

/* Returns KVC_ERR_INVALID or KVC_ERR_UNSUPPORTED if the layer's rows cannot be selected. */
static kvc_status check_selecting(const kvc_cache *cache, const kvc_plan_args *args) {
    if (args->select_rows < 0)
        return kvc_fail(KVC_ERR_INVALID, "select_rows is %d: it must be positive, or 0 to read all rows",
                        args->select_rows);
    if (args->max_chosen)
        return kvc_fail(KVC_ERR_INVALID, "select_rows is %d and max_chosen %d: rows are chosen or selected, not both",
                        args->select_rows, args->max_chosen);
    if (!cache->layers[args->layer].sketch_bits)
        return kvc_fail(KVC_ERR_UNSUPPORTED, "select_rows is %d: layer %d has no sketches: make it with sketch_bits 2",
                        args->select_rows, args->layer);
    return KVC_OK;
}

kvc_status kvc_resolve_selecting(const kvc_batch *batch, kvc_plan_args *args) {
    KVC_TRY(check_selecting(batch->cache, args));
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        const query_cut queries = queries_of(batch, args, s);
        if (may_select(batch, args, s, queries.end - queries.first)) return KVC_OK;
    }
    args->select_rows = 0;
    return KVC_OK;
}

/* Cuts the query tokens of a sequence that are in the plan's range into slices: in bytes, or exactly. */
static query_cut cut_queries(const kvc_plan *plan, int32_t sequence, int in_bytes) {
    const kvc_batch *batch = plan->batch;
    query_cut cut = queries_of(batch, &plan->args, sequence);
    if (cut.first == cut.end) return cut;
    const int32_t num_tokens = cut.end - cut.first, last = batch->positions[batch->order[cut.end - 1]];
    const int64_t query_rows = (int64_t)num_tokens * plan->parts.heads;
    cut.way = in_bytes ? KVC_IN_BYTES : query_rows > KVC_STREAM_QUERIES ? KVC_TILED : KVC_STREAMED;
    cut.tokens = query_rows <= KVC_TASK_QUERIES
                     ? num_tokens
                     : slice_tokens(plan, cut.way, query_rows, (int64_t)kvc_last_row(last, plan->stride) + 1);
    cut.may_select = plan->args.select_rows && may_select(batch, &plan->args, sequence, num_tokens);
    if (plan->by_token) cut.tokens = 1;
    cut.num_slices = (int32_t)KVC_DIVIDE_UP(num_tokens, cut.tokens);
    return cut;
}

/* Counts slices that are not in bytes (0): a sequence in bytes has as many, or fewer. */
int32_t kvc_count_slices(const kvc_plan *plan) {
    int32_t num = 0;
    for (int32_t s = 0; s < plan->batch->num_sequences; s++) {
        const query_cut cut = cut_queries(plan, s, /* in_bytes */ 0);
        num += cut.may_select ? cut.end - cut.first : cut.num_slices;
    }
    return num;
}

/* ---- masked rows ------------------------------------------------------------------------------------------------- */

int64_t kvc_most_shown_runs(const kvc_plan *plan) {
    int64_t most = plan->args.num_masked; /* each is of one sequence, and cuts a run in two if positions ascend */
    for (int32_t s = 0; s < plan->batch->num_sequences; s++) {
        const kvc_run_list *list = &plan->batch->sequences[s].sequence->runs[plan->group];
        most += list->ascending ? list->num : list->num_rows;
    }
    return most;
}

void kvc_cut_masked(const kvc_plan *plan, const kvc_shown *shown, kvc_run *runs) {
    for (int32_t s = 0; s < plan->batch->num_sequences; s++) {
        const kvc_run_list *from = &plan->batch->sequences[s].sequence->runs[plan->group];
        kvc_run_list *to = &shown->stored[s];
        kvc_runs_init(to);
        to->runs = runs;
        for (const kvc_run *run = kvc_runs_begin(from); run < kvc_runs_end(from); run++) {
            int32_t next = 0;
            for (kvc_run part; (part = kvc_masked_next(&shown->masked[s], run, &next)).count;)
                kvc_runs_append(to, &part);
        }
        runs += to->num;
    }
}

/* ---- the rows of a slice ----------------------------------------------------------------------------------------- */

/* Finds the positions that the queries of a slice see, masked or not.  In a group with a stride, these are rows. */
static void find_reach(const kvc_plan *plan, const kvc_run_list *list, kvc_new_slice *u) {
    const kvc_batch *batch = plan->batch;
    const kvc_policy *policy = &batch->cache->policies[plan->group];
    int32_t first = INT32_MAX, last = 0, all = policy->kind == KVC_CROSS;
    for (int32_t i = 0; i < u->slice.num_tokens; i++) {
        const int32_t token = batch->order[u->slice.first + i], position = batch->positions[token];
        if (position < first) first = position;
        if (position > last) last = position;
        all |= kvc_plan_sees_all(plan, token);
    }
    kvc_reach reach = {kvc_policy_sinks(policy), kvc_policy_lowest(policy, first),
                       all ? INT32_MAX : kvc_last_row(last, plan->stride) + 1};
    if (reach.sinks > reach.end) reach.sinks = reach.end;
    if (reach.sinks >= reach.low) reach.sinks = reach.low = 0;
    u->stored = u->own = reach;
    if (batch->parents) u->own.end = INT32_MAX;
    /* Drop bounds that hide nothing, so that slices that see the same rows have the same reach. */
    if (list->min_position >= reach.low) u->stored.sinks = u->stored.low = 0;
    if (list->max_position < reach.end) u->stored.end = INT32_MAX;
}

/* Called for each segment, a part of a run.  token: index into plan->order of the token of the segment's first row;
 * -1 for stored rows and for rows of cross-attention. */
typedef void visit_fn(void *context, const kvc_run *segment, int32_t token);

/* Visits the rows of a run at positions [begin, end).  token: as in visit_fn, for the run's first row. */
static inline void visit_positions(const kvc_run *run, int32_t token, int32_t begin, int32_t end, visit_fn *visit,
                                   void *context) {
    const kvc_run segment = kvc_run_part(run, begin, end);
    if (segment.count) visit(context, &segment, token < 0 ? -1 : token + (segment.position - run->position));
}

/* Visits the rows of a run that are in reach, masked or not.  token: as in visit_positions. */
static inline void visit_run(const kvc_reach *reach, const kvc_run *run, int32_t token, visit_fn *visit,
                             void *context) {
    if (reach->sinks) visit_positions(run, token, 0, reach->sinks, visit, context);
    visit_positions(run, token, reach->low, reach->end, visit, context);
}

/* Visits the rows of a batch's own run that are in reach and not masked.  token: as in visit_positions. */
static void visit_own_run(const kvc_new_slice *u, const kvc_run *run, int32_t token, visit_fn *visit, void *context) {
    int32_t next = 0;
    if (!u->masked) {
        visit_run(&u->own, run, token, visit, context);
        return;
    }
    for (kvc_run part; (part = kvc_masked_next(u->masked, run, &next)).count;)
        visit_run(&u->own, &part, token < 0 ? -1 : token + (part.position - run->position), visit, context);
}

/* Visits, in a batch with parents, the rows of the slice's tokens and of their ancestors.  Others may not have been
 * put.  marks: as for kvc_list_slices. */
static void visit_ancestors(const kvc_plan *plan, const kvc_new_slice *u, const kvc_pending *pending, uint8_t *marks,
                            visit_fn *visit, void *context) {
    const kvc_batch *batch = plan->batch;
    const kvc_batch_sequence *member = &batch->sequences[u->slice.sequence];
    const int32_t *order = plan->order;
    int32_t token = member->first; /* index into plan->order, for the run's first row */
    for (int32_t i = u->slice.first; i < u->slice.first + u->slice.num_tokens; i++)
        for (int32_t t = batch->order[i]; t >= 0 && !marks[t]; t = batch->parents[t]) marks[t] = 1;
    for (int32_t r = 0; r < pending->num; token += pending->runs[r++].count)
        for (int32_t from = 0, to; from < pending->runs[r].count; from = to + 1) {
            kvc_run marked = pending->runs[r];
            for (to = from; to < marked.count && marks[order[token + to]];) to++;
            marked.slot += from;
            marked.position += from;
            marked.count = to - from;
            if (marked.count) visit_own_run(u, &marked, token + from, visit, context);
        }
    for (int32_t i = 0; i < member->num_tokens; i++) marks[batch->order[member->first + i]] = 0;
}

/* Visits the batch's own rows in reach, which come after the stored ones; in a cross-attention layer they replace them.
 * marks: as for kvc_list_slices. */
static void visit_own_rows(const kvc_plan *plan, const kvc_new_slice *u, uint8_t *marks, visit_fn *visit,
                           void *context) {
    const kvc_pending *pending = u->pending;
    const int has_tokens = pending->to != KVC_TO_CROSS; /* rows of cross-attention are no token's */
    if (has_tokens && plan->batch->parents) {
        visit_ancestors(plan, u, pending, marks, visit, context);
        return;
    }
    int32_t token = has_tokens ? plan->batch->sequences[u->slice.sequence].first : -1; /* of the run's first row */
    for (const kvc_run *run = pending->runs; run < pending->runs + pending->num; run++) {
        visit_own_run(u, run, token, visit, context);
        if (has_tokens) token += run->count; /* tokens are listed in the order of their rows */
    }
}

/* Counts a segment of the batch's own rows, and notes whether positions rise; context: the kvc_new_slice. */
static void count_own_rows(void *context, const kvc_run *segment, int32_t token) {
    kvc_new_slice *u = context;
    (void)token;
    u->own_rises &= !u->own_segments || segment->position > u->last_position;
    u->own_segments++;
    u->new_segments += segment->position >= u->new_from;
    u->own_rows += segment->count;
    u->rises &= segment->position > u->last_position;
    u->own_from = (int32_t)kvc_smaller(u->own_from, segment->position);
    u->last_position = segment->position + segment->count - 1;
}

/* Finds which rows a slice sees, and counts them. */
static void find_rows(const kvc_plan *plan, const kvc_shown *shown, kvc_new_slice *u, uint8_t *marks) {
    const kvc_batch *batch = plan->batch;
    const int32_t g = plan->group, s = u->slice.sequence;
    const kvc_run_list *stored = &batch->sequences[s].sequence->runs[g];
    const kvc_run_list *list = shown->stored ? &shown->stored[s] : stored;
    const kvc_pending *pending = kvc_pending_of(batch, g, s);
    const int is_cross = pending->to == KVC_TO_CROSS, is_replaced = is_cross && pending->num;
    u->pending = pending;
    if (shown->masked) u->masked = &shown->masked[s];
    find_reach(plan, list, u);
    u->stored_rises = u->rises = is_replaced || list->ascending;
    u->last_position = is_replaced ? -1 : list->max_position;
    u->own_from = INT32_MAX;
    u->own_rises = 1;
    visit_own_rows(plan, u, marks, count_own_rows, u);
    u->slice.num_rows = u->own_rows;
    u->slice.lacks_rows = is_cross && !is_replaced && !stored->num;
    if (is_replaced) return;
    u->runs = kvc_runs_begin(list);
    u->num_runs = list->num;
    if (kvc_reach_is_all(&u->stored))
        u->stored_rows = list->num_rows;
    else
        for (int32_t i = 0; i < u->num_runs; i++) u->stored_rows += kvc_rows_in_reach(&u->stored, &u->runs[i]);
    u->slice.num_rows += u->stored_rows;
    const int is_behind = u->stored_rises && u->own_from > list->max_position;
    if (!u->rises) u->tangled_rows = is_behind ? u->own_rows : u->slice.num_rows;
}

enum { SPLIT_ROWS = KVC_SIZE(KVC_SPLIT_ROWS, 4) };

/* Cuts the rows of a slice into splits.  num_slices: number of slices of its sequence. */
static void cut_rows(const kvc_plan *plan, int32_t num_slices, kvc_query_slice *slice) {
    const int64_t most_splits = KVC_TILED_TASKS / ((int64_t)plan->num_kv_heads * num_slices);
    slice->split_rows = SPLIT_ROWS;
    while (slice->tiled && !plan->args.max_chosen && slice->split_rows < slice->num_rows &&
           KVC_DIVIDE_UP(slice->num_rows, slice->split_rows) > most_splits)
        slice->split_rows += slice->split_rows / (slice->split_rows % 3 ? 2 : 3); /* 1, 3/2, 2, 3, 4, 6, 8 ... */
    slice->num_splits = (int32_t)KVC_DIVIDE_UP(slice->num_rows, slice->split_rows);
    if (!slice->num_splits) slice->num_splits = 1; /* a slice that sees nothing needs a task too, which writes zeros */
}

/* Cuts the rows of a slice for which a plan chooses, or whose token selects, into splits of whole units.  With enough
 * tasks, a slice is one split, whose results stay in the workspace.  Its split_rows are the most that fit: slices of
 * any length then have the same and may share rows (jobs.c). */
static void cut_ranked(const kvc_plan *plan, kvc_query_slice *slice) {
    const int64_t threads = plan->args.num_threads, enough = KVC_TASKS_PER_THREAD * threads;
    const int64_t tasks = (int64_t)plan->num_slices * plan->parts.num;
    const int64_t unit = slice->selects ? KVC_CHUNK_ROWS : SPLIT_ROWS;
    const int is_whole = threads == 1 || 2 * tasks >= enough;
    const int64_t units = KVC_DIVIDE_UP(slice->num_rows, unit), most_units = INT32_MAX / unit;
    const int64_t of_split = is_whole ? units : KVC_DIVIDE_UP(KVC_DIVIDE_UP(slice->num_rows * tasks, enough), unit);
    slice->split_rows = kvc_smaller(of_split < units ? of_split : most_units, most_units) * unit;
    slice->num_splits = (int32_t)kvc_larger(KVC_DIVIDE_UP(slice->num_rows, slice->split_rows), 1);
}

/* Counts the rows that each query token of a sequence sees.  Returns whether the tokens select rows: one token sees
 * more than kvc_most_unselected.  Rows that no token sees change nothing. */
static int count_seen(const kvc_plan *plan, const kvc_shown *shown, int32_t sequence, const query_cut *cut,
                      int64_t seen[KVC_MOST_SELECTING], uint8_t *marks) {
    int selects = 0;
    for (int32_t i = cut->first; i < cut->end; i++) {
        kvc_new_slice one = {.slice = {.sequence = sequence, .first = i, .num_tokens = 1}};
        find_rows(plan, shown, &one, marks);
        seen[i - cut->first] = one.slice.num_rows;
        selects |= one.slice.num_rows > kvc_most_unselected(&plan->args);
    }
    return selects;
}

/* ---- prompts in bytes -------------------------------------------------------------------------------------------- */

kvc_byte_costs kvc_costs_in_bytes = {.rounded = KVC_SIZE(10, 0), .stored = KVC_SIZE(2, 0), .query = KVC_SIZE(128, 0)};

/* Whether kernels multiply the plan's rows in bytes.  Longer keys could make a product exceed an int32_t. */
static int has_byte_dims(const kvc_plan *plan) {
    enum { MOST_DIM = 65536 };
    return plan->k_dim % KVC_QUANT_ELEMENTS == 0 && plan->v_dim % KVC_QUANT_ELEMENTS == 0 && plan->k_dim <= MOST_DIM;
}

void kvc_allow_bytes(kvc_plan *plan) {
    const kvc_cache *cache = plan->batch->cache;
    plan->in_bytes = cache->kernels->bytes.score && has_byte_dims(plan);
    for (int32_t i = 0; plan->in_bytes && i < cache->num_layers; i++) {
        const kvc_layer *layer = &cache->layers[i];
        const int is_rounded = kvc_taken_as(cache->kernels, layer->k_type, KVC_IN_BYTES) == KVC_F32 ||
                               kvc_taken_as(cache->kernels, layer->v_type, KVC_IN_BYTES) == KVC_F32;
        plan->rounds_rows |= is_rounded && kvc_plan_has_shape(plan, i);
    }
}

/* Whether slices cut for bytes take less time than exact ones, where a token sees num_rows rows.  The unit of time is
 * what one query row saves at one row, and depends on the dimensions.  A row costs some units for each slice, because
 * it is rounded and packed.  A query row costs units, too: it is rounded, and tiles are filled up to KVC_PANEL rows.
 * It costs half of the slice's tokens more, because a longer slice sees more rows that most of its tokens do not see.
 * docs/design/kernels.md has the measurements.  These are the only numbers that count here, so that the bits of a
 * sequence are the same on all processors, for any threads and beside any sequences. */
static int pays_in_bytes(const kvc_plan *plan, const query_cut *cut, int64_t num_rows) {
    const int64_t dims = plan->k_dim + plan->v_dim, query_rows = (int64_t)cut->tokens * plan->parts.heads;
    const int64_t unit = plan->rounds_rows ? kvc_costs_in_bytes.rounded : kvc_costs_in_bytes.stored;
    const int64_t of_row = unit * (16 + 2048 / dims),
                  of_query = kvc_costs_in_bytes.query * (int64_t)(256 + cut->tokens) / 256;
    return query_rows * num_rows >= of_row * num_rows + of_query * query_rows;
}

/* Cuts the query tokens of a sequence into slices: in bytes if that pays, otherwise exactly.  Judges by the number of
 * rows that the token in the middle sees, without masked ones. */
static query_cut cut_listed(const kvc_plan *plan, const kvc_shown *shown, int32_t sequence, uint8_t *marks) {
    const query_cut exact = cut_queries(plan, sequence, 0), in_bytes = cut_queries(plan, sequence, 1);
    const int32_t num = exact.end - exact.first;
    kvc_new_slice middle = {.slice = {.sequence = sequence, .first = exact.first + num / 2, .num_tokens = 1}};
    if (num <= KVC_MOST_SELECTING) return exact;
    find_rows(plan, shown, &middle, marks);
    return pays_in_bytes(plan, &in_bytes, middle.slice.num_rows) ? in_bytes : exact;
}

/* ---- the slices of a plan ---------------------------------------------------------------------------------------- */

/* Lists the slices of a sequence whose tokens choose or select rows.  The rows that all of them see are found once.
 * seen: what count_seen found, if they select; otherwise NULL.  Returns the number of slices. */
static int32_t list_choosing(const kvc_plan *plan, const kvc_shown *shown, int32_t sequence, const query_cut *cut,
                             const int64_t *seen, kvc_new_slice *slices, uint8_t *marks) {
    const int32_t num = cut->end - cut->first;
    const int tiled = !plan->chooses && plan->parts.heads > KVC_STREAM_QUERIES;
    kvc_new_slice all = {.slice = {.sequence = sequence,
                                   .first = cut->first,
                                   .num_tokens = num,
                                   .tiled = tiled,
                                   .tile_rows = tiled  ? kvc_tile_rows(plan)
                                                : seen ? KVC_CHUNK_ROWS
                                                       : KVC_TILE,
                                   .by_token = 1,
                                   .selects = seen != NULL}};
    find_rows(plan, shown, &all, marks);
    /* The most rows that can be chosen: positions that rise have one row each, but a tail may reach later rows. */
    const int sees_later = plan->args.non_causal || all.pending->to == KVC_TO_CROSS;
    const int64_t most =
        !all.stored_rises || sees_later ? INT64_MAX : plan->args.max_chosen + (all.rises ? 0 : all.own_rows);
    if (plan->chooses || seen) {
        cut_ranked(plan, &all.slice);
    } else {
        all.slice.num_rows = kvc_smaller(all.slice.num_rows, most);
        cut_rows(plan, num, &all.slice);
    }
    for (int32_t i = 0; i < num; i++) {
        slices[i] = all;
        slices[i].slice.first += i;
        slices[i].slice.num_tokens = 1;
        slices[i].may_share = seen && all.slice.num_splits == 1;
        if (seen) slices[i].slice.num_seen = seen[i];
    }
    return num;
}

int32_t kvc_list_slices(const kvc_plan *plan, const kvc_shown *shown, kvc_new_slice *slices, uint8_t *marks) {
    const kvc_new_slice *const first_slice = slices;
    for (int32_t s = 0; s < plan->batch->num_sequences; s++) {
        const query_cut cut = plan->in_bytes ? cut_listed(plan, shown, s, marks) : cut_queries(plan, s, /* exact */ 0);
        int64_t seen[KVC_MOST_SELECTING];
        const int selects = cut.may_select && count_seen(plan, shown, s, &cut, seen, marks);
        if (cut.num_slices && (plan->by_token || selects)) {
            slices += list_choosing(plan, shown, s, &cut, selects ? seen : NULL, slices, marks);
            continue;
        }
        const int32_t tile_rows = cut.way == KVC_STREAMED ? KVC_TILE
                                  : cut.way == KVC_TILED  ? kvc_tile_rows(plan)
                                                          : KVC_BYTE_TILE;
        for (int32_t i = 0; i < cut.num_slices; i++, slices++) {
            const int32_t first = cut.first + i * cut.tokens, rest = cut.end - first;
            *slices = (kvc_new_slice){.slice = {.sequence = s,
                                                .first = first,
                                                .num_tokens = rest < cut.tokens ? rest : cut.tokens,
                                                .tiled = cut.way,
                                                .tile_rows = tile_rows},
                                      .may_share = cut.num_slices == 1,
                                      .new_from = i ? slices[-1].own.end : 0};
            find_rows(plan, shown, slices, marks);
            cut_rows(plan, cut.num_slices, &slices->slice);
        }
    }
    return (int32_t)(slices - first_slice);
}

/* ---- segments ---------------------------------------------------------------------------------------------------- */

/* Returns the delta_index of a delta, which the plan has: its index in plan->deltas.values, plus 1. */
static int32_t find_delta_index(const kvc_plan *plan, int32_t delta) {
    int32_t begin = 0, end = plan->deltas.num;
    while (begin < end) {
        const int32_t middle = begin + (end - begin) / 2;
        if (plan->deltas.values[middle] < delta)
            begin = middle + 1;
        else
            end = middle;
    }
    return begin + 1;
}

/* Segments of a plan from `first` on, which are being listed. */
typedef struct listing {
    kvc_plan *plan;
    int64_t first;
} listing;

/* Adds a segment to the plan, or its rows to the last segment if both are the batch's own and it follows that one. */
static void list_segment(void *context, const kvc_run *segment, int32_t token) {
    const listing *list = context;
    kvc_plan *plan = list->plan;
    const kvc_segment next = {.rows = segment->block ? segment->block->rows : NULL,
                              .slot = segment->slot,
                              .count = segment->count,
                              .position = segment->position,
                              .delta_index = segment->delta ? find_delta_index(plan, segment->delta) : 0,
                              .token = token};
    kvc_segment *const to = plan->segments + plan->num_segments;
    if (plan->num_segments > list->first && to[-1].token >= 0 && kvc_extends(to - 1, &next))
        to[-1].count += next.count;
    else
        plan->segments[plan->num_segments++] = next;
}

int kvc_goes_on(const kvc_plan *plan, const kvc_new_slice *before, const kvc_new_slice *u) {
    if (before->slice.sequence != u->slice.sequence) return 0;
    if (u->slice.by_token) return 1; /* its sequence has the same segments for all */
    const kvc_reach *first = &before->own, *next = &u->own;
    if (!u->own_rises || plan->batch->parents || first->sinks != next->sinks || first->end > next->end) return 0;
    if (first->low == next->low) return memcmp(&before->stored, &u->stored, sizeof u->stored) == 0;
    return before->rises && u->rises && !next->sinks && first->low < next->low && before->stored.end == u->stored.end;
}

int64_t kvc_most_segments(const kvc_new_slice *u, int goes_on) {
    if (goes_on) return u->slice.by_token ? 0 : u->new_segments;
    const int64_t stored = (int64_t)(u->num_runs - u->first_run) * (u->stored.sinks ? 2 : 1);
    if (!u->slice.by_token || !u->tangled_rows) return stored + u->own_segments;
    return (u->tangled_rows > u->own_rows ? 0 : stored) + u->tangled_rows; /* sort_rows takes one for each row */
}

/* Orders single rows by position, and rows at one position by their numbers in order of arrival: `count`, here. */
static int compare_rows(const void *a, const void *b) {
    const kvc_segment *x = a, *y = b;
    if (x->position != y->position) return x->position < y->position ? -1 : 1;
    return (x->count > y->count) - (x->count < y->count);
}

/* Sorts the plan's segments from `first` on by position: cuts them into rows, sorts these, and joins them again. */
static void sort_rows(kvc_plan *plan, int64_t first, int64_t num_rows) {
    kvc_segment *const to = plan->segments + first;
    int64_t n = num_rows, num = 0;
    for (int64_t i = plan->num_segments - first - 1; i >= 0; i--) { /* backwards, as they are cut in place */
        const kvc_segment from = to[i];
        for (int32_t j = from.count - 1; j >= 0; j--, n--) {
            to[n - 1] = from;
            to[n - 1].slot += j;
            to[n - 1].position += j;
            if (from.token >= 0) to[n - 1].token += j;
            to[n - 1].count = (int32_t)n;
        }
    }
    qsort(to, (size_t)num_rows, sizeof *to, compare_rows);
    for (int64_t i = 0; i < num_rows; i++) {
        kvc_segment row = to[i];
        row.count = 1;
        if (num && kvc_extends(&to[num - 1], &row))
            to[num - 1].count++;
        else
            to[num++] = row;
    }
    plan->num_segments = first + num;
}

/* Does what kvc_list_segments does for a slice whose token chooses rows.  It has the segments of all query tokens of
 * its sequence, by position: those of `before`, or new ones if that is NULL. */
static void list_by_position(kvc_plan *plan, const kvc_new_slice *from, kvc_query_slice *slice,
                             const kvc_query_slice *before, uint8_t *marks) {
    if (before) {
        plan->starts[slice->first_start] = plan->starts[before->first_start];
        slice->first_own_segment = before->first_own_segment;
        return;
    }
    const query_cut cut = queries_of(plan->batch, &plan->args, slice->sequence);
    listing list = {plan, plan->num_segments};
    kvc_new_slice all = *from;
    all.slice.first = cut.first;
    all.slice.num_tokens = cut.end - cut.first;
    for (int32_t i = 0; i < from->num_runs; i++) visit_run(&from->stored, &from->runs[i], -1, list_segment, &list);
    slice->first_own_segment = from->tangled_rows > from->own_rows ? list.first : plan->num_segments;
    visit_own_rows(plan, &all, marks, list_segment, &list);
    if (from->tangled_rows) sort_rows(plan, slice->first_own_segment, from->tangled_rows);
    plan->starts[slice->first_start] = (kvc_split_start){list.first, 0};
}

/* Adds the rows of a slice that `before` lacks, behind the segments of that one.  Returns where the slice begins. */
static kvc_split_start list_new_rows(kvc_plan *plan, const kvc_new_slice *from, kvc_query_slice *slice,
                                     const kvc_query_slice *before, uint8_t *marks) {
    kvc_split_start start = plan->starts[before->first_start];
    listing list = {plan, start.segment};
    kvc_new_slice rest = *from;
    rest.own = (kvc_reach){0, (int32_t)kvc_larger(from->own.low, from->new_from), from->own.end};
    visit_own_rows(plan, &rest, marks, list_segment, &list);
    for (; !from->own.sinks && start.segment < plan->num_segments; start = (kvc_split_start){start.segment + 1, 0}) {
        const kvc_segment *segment = &plan->segments[start.segment];
        start.offset = (int32_t)kvc_larger(from->own.low - segment->position, 0);
        if (start.offset < segment->count) break;
    }
    slice->first_own_segment = kvc_larger(before->first_own_segment, start.segment);
    return start;
}

void kvc_list_segments(kvc_plan *plan, const kvc_new_slice *from, kvc_query_slice *slice, const kvc_query_slice *before,
                       int goes_on, uint8_t *marks) {
    kvc_split_start *starts = plan->starts + slice->first_start, at = {plan->num_segments, 0};
    listing list = {plan, plan->num_segments};
    if (slice->by_token) {
        list_by_position(plan, from, slice, goes_on ? before : NULL, marks);
    } else if (goes_on) {
        at = list_new_rows(plan, from, slice, before, marks);
    } else {
        if (from->first_split)
            memcpy(starts, plan->starts + before->first_start, (size_t)from->first_split * sizeof *starts);
        for (int32_t i = from->first_run; i < from->num_runs; i++)
            visit_run(&from->stored, &from->runs[i], -1, list_segment, &list);
        slice->first_own_segment = plan->num_segments;
        visit_own_rows(plan, from, marks, list_segment, &list);
    }
    slice->end_segment = plan->num_segments;
    slice->end_rows = plan->num_segments ? plan->segments[plan->num_segments - 1].count : 0;
    int64_t rows_before = from->rows_before - at.offset; /* rows in reach before segment at.segment */
    for (int32_t p = from->first_split; p < slice->num_splits && !slice->by_token; p++) {
        const int64_t row = p * slice->split_rows;
        while (row && rows_before + plan->segments[at.segment].count <= row)
            rows_before += plan->segments[at.segment++].count;
        starts[p] = (kvc_split_start){at.segment, (int32_t)(row - rows_before)};
    }
}
