/* sequence.c: a sequence, and the table of all sequences: see sequence.h. */
#include "cache/sequence.h"

#include <string.h>

#include "base/status.h"

static size_t sequence_bytes(int32_t num_groups) {
    return sizeof(kvc_sequence) + (size_t)num_groups * sizeof(kvc_run_list);
}

kvc_sequence *kvc_sequence_new(kvc_memory *memory, int64_t id, int32_t num_groups, int32_t num_token_groups) {
    kvc_sequence *sequence = kvc_memory_alloc(memory, sequence_bytes(num_groups), KVC_MEMORY_BOOKKEEPING, -1);
    if (!sequence) return NULL;
    *sequence = (kvc_sequence){.id = id,
                               .exact_to = INT32_MAX,
                               .edited_from = INT32_MAX,
                               .num_groups = num_groups,
                               .num_token_groups = num_token_groups};
    for (int32_t g = 0; g < num_groups; g++) kvc_runs_init(&sequence->runs[g]);
    return sequence;
}

kvc_status kvc_fail_sequence(int64_t id) {
    return kvc_fail(KVC_ERR_NOMEM, "out of memory for sequence %lld", (long long)id);
}

void kvc_sequence_free(kvc_sequence *sequence, kvc_memory *memory, kvc_pool *pools) {
    for (int32_t g = 0; g < sequence->num_groups; g++) kvc_runs_destroy(&sequence->runs[g], &pools[g]);
    kvc_memory_free(memory, sequence, sequence_bytes(sequence->num_groups), KVC_MEMORY_BOOKKEEPING, -1);
}

int kvc_sequence_is_blank(const kvc_sequence *sequence) {
    for (int32_t g = 0; g < sequence->num_groups; g++)
        if (sequence->runs[g].num || sequence->runs[g].lost.end) return 0;
    return 1;
}

int64_t kvc_sequence_bytes(const kvc_sequence *sequence) {
    int64_t bytes = (int64_t)sequence_bytes(sequence->num_groups);
    for (int32_t g = 0; g < sequence->num_groups; g++) bytes += kvc_runs_bytes(&sequence->runs[g]);
    return bytes;
}

int kvc_sequence_holds(const kvc_sequence *sequence) {
    for (int32_t g = 0; g < sequence->num_groups; g++)
        if (sequence->runs[g].num) return 1;
    return 0;
}

int kvc_sequence_is_empty(const kvc_sequence *sequence) {
    for (int32_t g = 0; g < sequence->num_token_groups; g++)
        if (sequence->runs[g].num) return 0;
    return 1;
}

int32_t kvc_sequence_first(const kvc_sequence *sequence) {
    int32_t first = -1;
    for (int32_t g = 0; g < sequence->num_token_groups; g++) {
        const int32_t position = sequence->runs[g].min_position;
        if (position >= 0 && (first < 0 || position < first)) first = position;
    }
    return first;
}

int32_t kvc_sequence_last(const kvc_sequence *sequence) {
    int32_t last = -1;
    for (int32_t g = 0; g < sequence->num_token_groups; g++)
        if (sequence->runs[g].max_position > last) last = sequence->runs[g].max_position;
    return last;
}

int32_t kvc_sequence_next(const kvc_sequence *sequence) {
    int32_t next = 0;
    for (int32_t g = 0; g < sequence->num_token_groups; g++) {
        const kvc_run_list *list = &sequence->runs[g];
        if (list->max_position >= next) next = list->max_position + 1;
        if (list->lost.end > next) next = list->lost.end;
    }
    return next;
}

int32_t kvc_min_query_position(const kvc_sequence *sequence) {
    int32_t low = kvc_sequence_next(sequence);
    for (int32_t g = 0; g < sequence->num_token_groups; g++) {
        const kvc_interval missing = sequence->runs[g].missing;
        if (missing.end && missing.begin < low) low = missing.begin;
    }
    return low;
}

void kvc_sequence_note_edit(kvc_sequence *sequence, int32_t position, int32_t exact_to) {
    sequence->edited_from = kvc_lower(sequence->edited_from, position);
    sequence->exact_to = kvc_lower(sequence->exact_to, exact_to);
}

void kvc_sequence_note_cut(kvc_sequence *sequence, int32_t length, int32_t next_before) {
    /* A mark behind all rows (kvc_mark_inexact) is of rows to come, and stays. */
    if (sequence->exact_to >= length && sequence->exact_to < next_before) sequence->exact_to = INT32_MAX;
    kvc_sequence_note_edit(sequence, length, INT32_MAX);
}

/* ---- the table of sequences -------------------------------------------------------------------------------------- */

/* Returns the index of the first item that does not stand before such a sequence. */
static int32_t lower_bound(const kvc_table *table, int32_t is_hidden, int64_t id) {
    int32_t begin = 0, end = table->num;
    while (begin < end) {
        const int32_t middle = begin + (end - begin) / 2;
        const kvc_sequence *item = table->items[middle];
        if (item->is_hidden == is_hidden ? item->id < id : !item->is_hidden)
            begin = middle + 1;
        else
            end = middle;
    }
    return begin;
}

static kvc_sequence *find(const kvc_table *table, int32_t is_hidden, int64_t id) {
    const int32_t i = lower_bound(table, is_hidden, id);
    if (i == table->num || table->items[i]->id != id || table->items[i]->is_hidden != is_hidden) return NULL;
    return table->items[i];
}

kvc_sequence *kvc_table_find(const kvc_table *table, int64_t id) { return find(table, 0, id); }

kvc_sequence *kvc_table_find_hidden(const kvc_table *table, int64_t id) { return find(table, 1, id); }

static uint64_t table_bytes(const kvc_table *table) { return (uint64_t)table->capacity * sizeof *table->items; }

static void free_items(const kvc_table *table, kvc_memory *memory) {
    kvc_memory_free(memory, table->items, table_bytes(table), KVC_MEMORY_BOOKKEEPING, -1);
}

kvc_status kvc_table_reserve(kvc_table *table, int32_t extra, const kvc_table *before, kvc_memory *memory) {
    if (extra <= table->capacity - table->num) return KVC_OK;
    kvc_table more = {.num = table->num, .capacity = table->capacity ? table->capacity * 2 : 4};
    if (more.capacity < table->num + extra) more.capacity = table->num + extra;
    more.items = kvc_memory_alloc(memory, table_bytes(&more), KVC_MEMORY_BOOKKEEPING, -1);
    if (!more.items) return kvc_fail(KVC_ERR_NOMEM, "out of memory for a table of %d sequences", more.capacity);
    if (table->num) memcpy(more.items, table->items, (size_t)table->num * sizeof *table->items);
    if (table->items == before->items)
        memory->replaced += (int64_t)table_bytes(before);
    else
        free_items(table, memory);
    *table = more;
    return KVC_OK;
}

void kvc_table_keep(const kvc_table *table, const kvc_table *before, kvc_memory *memory) {
    if (table->items == before->items) return;
    memory->replaced -= (int64_t)table_bytes(before);
    free_items(before, memory);
}

void kvc_table_undo(kvc_table *table, const kvc_table *before, kvc_memory *memory) {
    if (table->items == before->items) return;
    if (table->num) memcpy(before->items, table->items, (size_t)table->num * sizeof *table->items);
    memory->replaced -= (int64_t)table_bytes(before);
    free_items(table, memory);
    table->items = before->items;
    table->capacity = before->capacity;
}

void kvc_table_trim(kvc_table *table, int32_t capacity, kvc_memory *memory) {
    kvc_table less = {.num = table->num, .capacity = capacity};
    if (capacity >= table->capacity || capacity < table->num) return;
    if (capacity) less.items = kvc_memory_alloc(memory, table_bytes(&less), KVC_MEMORY_BOOKKEEPING, -1);
    if (capacity && !less.items) return;
    if (table->num) memcpy(less.items, table->items, (size_t)table->num * sizeof *table->items);
    free_items(table, memory);
    *table = less;
}

void kvc_table_insert(kvc_table *table, kvc_sequence *sequence) {
    const int32_t at = lower_bound(table, sequence->is_hidden, sequence->id);
    memmove(table->items + at + 1, table->items + at, (size_t)(table->num - at) * sizeof *table->items);
    table->items[at] = sequence;
    table->num++;
}

void kvc_table_remove(kvc_table *table, const kvc_sequence *sequence) {
    const int32_t at = lower_bound(table, sequence->is_hidden, sequence->id);
    table->num--;
    memmove(table->items + at, table->items + at + 1, (size_t)(table->num - at) * sizeof *table->items);
}

void kvc_table_destroy(kvc_table *table, kvc_memory *memory) { free_items(table, memory); }
