/* replace.c: restoring batches (kvc_begin_args.replaced), whose rows replace all that their sequences held in some
 * groups.  Lost positions of a list are those whose rows have expired.  Missing ones are those at which other groups
 * have rows and the group has none since groups were replaced.  Both are intervals, which may cover more than that. */
#include "pass/replace.h"

#include <stdlib.h>

#include "cache/check.h"

/* ---- beginning --------------------------------------------------------------------------------------------------- */

kvc_status kvc_replace_check(const kvc_cache *cache, const kvc_begin_args *args) {
    int32_t num = 0;
    if (!args->positions) return kvc_fail(KVC_ERR_INVALID, "positions is NULL: a batch that restores has to name them");
    if (args->parents) return kvc_fail(KVC_ERR_INVALID, "parents is not NULL: a batch that restores has no trees");
    if (args->unstored) return kvc_fail(KVC_ERR_INVALID, "unstored is not NULL: what a batch restores is stored");
    for (int32_t i = 0; i < cache->num_layers; i++) num += args->replaced[i] && kvc_has_rows(cache, i);
    if (!num) return kvc_fail(KVC_ERR_INVALID, "replaced names no layer that has rows of its own");
    return kvc_check_groups(cache, args->replaced, "replaced");
}

/* Compares keys, each a position and below it the token's index. */
static int by_value(const void *a, const void *b) {
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Sorts the tokens of a sequence by position, those at the same one in the order given, and counts the stretches of
 * consecutive ones.  keys: [num_tokens]. */
static void sort_tokens(kvc_batch *batch, kvc_batch_sequence *member, int64_t *keys) {
    int32_t *tokens = batch->order + member->first;
    for (int32_t i = 0; i < member->num_tokens; i++) keys[i] = (int64_t)batch->positions[tokens[i]] << 32 | tokens[i];
    qsort(keys, (size_t)member->num_tokens, sizeof *keys, by_value);
    member->num_stretches = 1;
    for (int32_t i = 0; i < member->num_tokens; i++) {
        tokens[i] = (int32_t)(keys[i] & INT32_MAX);
        const int32_t position = batch->positions[tokens[i]];
        member->num_stretches += i && position != batch->positions[tokens[i - 1]] + 1;
    }
}

void kvc_replace_mark(kvc_batch *batch, const uint8_t *replaced) {
    const kvc_cache *cache = batch->cache;
    batch->replaced = batch->group_flags;
    for (int32_t g = 0; g < cache->num_groups; g++) batch->replaced[g] = 0;
    for (int32_t i = 0; i < cache->num_layers; i++)
        if (replaced[i] && kvc_has_rows(cache, i)) batch->replaced[cache->group_of[i]] = 1;
}

void kvc_replace_sort(kvc_batch *batch) {
    int64_t *keys = (void *)batch->runs; /* no runs are listed yet */
    for (int32_t s = 0; s < batch->num_sequences; s++) sort_tokens(batch, &batch->sequences[s], keys);
}

/* ---- ending ------------------------------------------------------------------------------------------------------ */

/* Widens a range (end 0: it is empty) by the positions of [begin, end) at which a list has no row, and that do not lie
 * in `skip`. */
static void add_lacking(kvc_interval *range, const kvc_run_list *list, kvc_interval skip, int32_t begin, int32_t end) {
    for (const kvc_run *run; begin < end;) { /* raises `begin` to the first such position */
        if (begin >= skip.begin && begin < skip.end)
            begin = skip.end;
        else if ((run = kvc_runs_at(list, begin)))
            begin = run->position + run->count;
        else
            break;
    }
    for (const kvc_run *run; begin < end;) { /* lowers `end` to behind the last one */
        if (end > skip.begin && end <= skip.end)
            end = skip.begin;
        else if ((run = kvc_runs_at(list, end - 1)))
            end = run->position;
        else
            break;
    }
    kvc_interval_add(range, (kvc_interval){begin, end});
}

/* Notes as lost the positions at which rows of a replaced group may have expired before they were restored.  These are
 * the positions without a row from the sinks up to the first one that the next query sees. */
static void note_lost(const kvc_policy *policy, kvc_run_list *list) {
    if (!kvc_policy_expires(policy) || !list->num) return;
    const kvc_interval nothing = {0, 0};
    const int32_t first_seen = kvc_policy_lowest(policy, list->max_position + 1);
    add_lacking(&list->lost, list, nothing, kvc_policy_sinks(policy), first_seen);
}

void kvc_replace_remember(kvc_run_list *list) {
    kvc_interval_add(&list->missing, list->lost);
    if (list->num) kvc_interval_add(&list->missing, (kvc_interval){list->min_position, list->max_position + 1});
}

/* Notes as missing what other groups have, and group g neither has nor has lost.  If there is any, positions
 * below its end at which the group had or lacked rows before the batch are missing, too: the groups that had these rows
 * may be replaced by now.  A row of a group with a stride counts for all positions that it stands for. */
static void note_missing(kvc_sequence *sequence, int32_t g) {
    kvc_run_list *list = &sequence->runs[g];
    const kvc_interval before = list->missing;
    list->missing = (kvc_interval){0, 0};
    for (int32_t i = 0; i < sequence->num_token_groups; i++) {
        const kvc_run_list *other = &sequence->runs[i];
        const int32_t stride = sequence->pools[i].stride, own = sequence->pools[g].stride;
        for (const kvc_run *run = kvc_runs_begin(other); i != g && run < kvc_runs_end(other); run++)
            add_lacking(&list->missing, list, list->lost, kvc_rows_below(run->position * stride, own),
                        kvc_rows_below((run->position + run->count) * stride, own));
    }
    const int32_t end = list->missing.end;
    if (end) add_lacking(&list->missing, list, list->lost, before.begin, before.end < end ? before.end : end);
}

void kvc_replace_note(const kvc_batch *batch, int32_t s) {
    const kvc_cache *cache = batch->cache;
    kvc_sequence *sequence = batch->sequences[s].sequence;
    for (int32_t g = 0; g < cache->num_token_groups; g++)
        if (kvc_takes_rows(batch, g)) note_lost(&cache->policies[g], &sequence->runs[g]);
    for (int32_t g = 0; g < cache->num_token_groups; g++) note_missing(sequence, g);
}
