/* save.c: kvc_save.
 *
 * With the mutex held, the tables are made and the rows' blocks pinned; then everything is written without it.  A row
 * gets its number in the file when it is first met, by rising id of the sequences and in order of arrival.  So
 * sequences that share nothing have their rows in that order.  All rows are numbered in two passes: the first counts
 * runs and extents (rows of the file in consecutive slots of a block), the second lists them. */
#include <stdio.h>
#include <string.h>

#include "base/hash.h"
#include "saved/saved_layers.h"
#include "saved/transit.h"
#include "cache/waiting.h"

/* The numbers of a group's rows. */
typedef struct numbering {
    int32_t num_blocks; /* that have rows of the sequences */
    int64_t *first;     /* [num_blocks] index of a block's first slot in rows, by its number */
    int64_t *rows;      /* the row that a slot became; -1: none yet */
    int64_t num_rows;   /* so far */
    int64_t num_slots;  /* of these blocks, as far as they are placed */
    int32_t num_placed; /* blocks in first, so far */
    kvc_extents *to;    /* has only its number in the first pass */
    kvc_extent last;    /* the last extent */
} numbering;

typedef struct saving {
    kvc_cache *cache;
    kvc_save_args args;
    const kvc_sequence **sequences; /* [num_sequences] NULL: it is empty */
    int64_t num_sequences;
    numbering *numberings; /* [num_groups] */
    kvc_saved_run *run;    /* where the next run goes; NULL in the first pass, which counts */
    int64_t num_runs;
    kvc_state state;
    char *header, *tables;
    uint64_t header_bytes, tables_bytes;
    uint64_t *checksums; /* [num_checksums] of tensors of rows */
    int64_t num_checksums;
    char *window;
    uint64_t window_bytes; /* bytes of the largest tensor, at most KVC_WINDOW_BYTES */
} saving;

/* ---- the numbers of rows ----------------------------------------------------------------------------------------- */

/* Makes a slot the next row. */
static void add_slot(const saving *s, numbering *n, kvc_block *block, int32_t slot) {
    kvc_extent *last = &n->last;
    if (last->block == block && last->slot + last->count == slot) {
        last->count++;
    } else {
        *last = (kvc_extent){.row = n->num_rows, .block = block, .slot = slot, .count = 1};
        n->to->num++;
    }
    if (s->run) n->to->items[n->to->num - 1] = *last;
    n->num_rows++;
}

/* Ends a run, unless it is empty. */
static void end_run(saving *s, const kvc_saved_run *run) {
    if (!run->count) return;
    if (s->run) *s->run++ = *run;
    s->num_runs++;
}

/* Numbers the rows of a list, and cuts it into runs of consecutive ones. */
static void number_runs(saving *s, numbering *n, const kvc_run_list *list) {
    kvc_saved_run to = {.count = 0};
    for (const kvc_run *run = kvc_runs_begin(list); run < kvc_runs_end(list); run++)
        for (int32_t i = 0; i < run->count; i++) {
            int64_t *row = &n->rows[n->first[run->block->number - 1] + run->slot + i];
            if (*row < 0) *row = n->num_rows;
            if (*row == n->num_rows) add_slot(s, n, run->block, run->slot + i);
            if (to.count && *row == to.row + to.count && run->position + i == to.position + to.count &&
                run->delta == to.delta) {
                to.count++;
                continue;
            }
            end_run(s, &to);
            to = (kvc_saved_run){*row, 1, run->position + i, run->delta};
        }
    end_run(s, &to);
}

static kvc_saved_holding holding_of(const kvc_run_list *list, int64_t num_runs) {
    const kvc_interval lost = list->lost, missing = list->missing;
    return (kvc_saved_holding){num_runs, lost.end ? lost.begin : 0, lost.end, missing.end ? missing.begin : 0,
                               missing.end};
}

/* Numbers the rows of all sequences; in the second pass, notes what each holds. */
static void number_rows(saving *s) {
    kvc_saved_holding *holdings = s->state.format.holdings; /* NULL at first: they are counted */
    int64_t num = 0;
    for (int32_t g = 0; g < s->cache->num_groups; g++) {
        numbering *n = &s->numberings[g];
        n->num_rows = n->to->num = 0;
        n->last = (kvc_extent){.block = NULL};
    }
    s->num_runs = 0;
    for (int64_t i = 0; i < s->num_sequences; i++)
        for (int32_t g = 0; g < s->cache->num_groups; g++, num++) {
            const int64_t before = s->num_runs;
            if (!s->sequences[i]) continue;
            number_runs(s, &s->numberings[g], &s->sequences[i]->runs[g]);
            if (s->run) holdings[num] = holding_of(&s->sequences[i]->runs[g], s->num_runs - before);
        }
}

/* Calls visit for the block of each run of the sequences in a group. */
static void visit_blocks(const saving *s, int32_t g, void (*visit)(numbering *n, kvc_block *block)) {
    for (int64_t i = 0; i < s->num_sequences; i++) {
        const kvc_run_list *list = s->sequences[i] ? &s->sequences[i]->runs[g] : NULL;
        const kvc_run *end = list ? kvc_runs_end(list) : NULL;
        for (const kvc_run *run = list ? kvc_runs_begin(list) : NULL; run < end; run++)
            visit(&s->numberings[g], run->block);
    }
}

/* Gives a block a number, from 1 on, the first time. */
static void number_block(numbering *n, kvc_block *block) {
    if (block->number) return;
    block->number = ++n->num_blocks;
    n->num_slots += block->fill;
}

static void unnumber_block(numbering *n, kvc_block *block) {
    (void)n;
    block->number = 0;
}

/* Notes where the slots of a block begin, the first time. */
static void place_block(numbering *n, kvc_block *block) {
    if (block->number != n->num_placed + 1) return; /* blocks come in the order of their numbers */
    n->first[n->num_placed++] = n->num_slots;
    n->num_slots += block->fill;
}

/* Numbers the blocks of a group, and gets memory for the numbers of their slots; no slot has a number yet. */
static kvc_status start_numbering(saving *s, int32_t g) {
    numbering *n = &s->numberings[g];
    *n = (numbering){.to = &s->state.groups[g]};
    visit_blocks(s, g, number_block);
    const int64_t num = n->num_slots;
    n->first = kvc_state_alloc(&s->state, (uint64_t)(num + n->num_blocks) * sizeof *n->first);
    if (!n->first) return KVC_ERR_NOMEM;
    n->rows = n->first + n->num_blocks;
    for (int64_t i = 0; i < num; i++) n->rows[i] = -1;
    n->num_slots = 0; /* place_block counts them anew */
    visit_blocks(s, g, place_block);
    return KVC_OK;
}

/* Takes the numbers of blocks away. */
static void end_numbering(const saving *s) {
    for (int32_t g = 0; s->numberings && g < s->cache->num_groups; g++) visit_blocks(s, g, unnumber_block);
}

/* Makes the first pass. */
static kvc_status count_rows(saving *s) {
    kvc_status status = kvc_state_add_groups(&s->state);
    if (status != KVC_OK) return status;
    s->numberings = kvc_state_alloc(&s->state, (uint64_t)s->cache->num_groups * sizeof *s->numberings);
    if (!s->numberings) return KVC_ERR_NOMEM;
    for (int32_t g = 0; status == KVC_OK && g < s->cache->num_groups; g++) status = start_numbering(s, g);
    if (status == KVC_OK) number_rows(s);
    return status;
}

/* ---- the beginning of the file ----------------------------------------------------------------------------------- */

/* Gets memory for the tables, and fills in what says how long they are. */
static kvc_status reserve_tables(saving *s) {
    const kvc_cache *cache = s->cache;
    kvc_saved_state state = {.num_layers = cache->num_layers,
                             .num_groups = cache->num_groups,
                             .num_sequences = s->num_sequences,
                             .num_runs = s->num_runs,
                             .num_freqs = kvc_count_freqs(cache)};
    for (int64_t i = 0; s->args.tokens && i < s->num_sequences; i++) state.num_tokens += s->args.num_tokens[i];
    kvc_save_limits(cache, &state);
    s->tables_bytes = kvc_format_tables_bytes(&state, INT64_MAX);
    s->tables = kvc_state_alloc(&s->state, s->tables_bytes);
    if (!s->tables) return KVC_ERR_NOMEM;
    memset(s->tables, 0, (size_t)s->tables_bytes);
    memcpy(s->tables, &state, sizeof state);
    kvc_format_place(&s->state.format, s->tables);
    return KVC_OK;
}

/* Gets memory for the extents that the first pass has counted. */
static kvc_status reserve_extents(saving *s) {
    for (int32_t g = 0; g < s->cache->num_groups; g++) {
        kvc_extents *extents = &s->state.groups[g];
        extents->items = kvc_state_alloc(&s->state, (uint64_t)extents->num * sizeof *extents->items);
        if (!extents->items) return KVC_ERR_NOMEM;
    }
    return KVC_OK;
}

/* Makes the second pass, and fills the tables. */
static void fill_tables(saving *s) {
    const kvc_format *f = &s->state.format;
    s->run = f->runs; /* not NULL: this is the second pass */
    number_rows(s);
    for (int32_t g = 0; g < s->cache->num_groups; g++) f->group_rows[g] = s->numberings[g].num_rows;
    kvc_save_layers(s->cache, f);
    for (int64_t i = 0; i < s->num_sequences; i++) {
        f->sequences[i].id = s->args.seq_ids ? s->args.seq_ids[i] : s->sequences[i]->id;
        f->sequences[i].num_tokens = s->args.tokens ? s->args.num_tokens[i] : 0;
        f->exact_to[i] = s->sequences[i] ? s->sequences[i]->exact_to : INT32_MAX;
    }
    if (f->state->num_tokens) memcpy(f->tokens, s->args.tokens, (size_t)f->state->num_tokens * sizeof *f->tokens);
}

static kvc_status measure_tensor(void *context, const kvc_tensor *tensor) {
    saving *s = context;
    if (tensor->kind != KVC_ROWS) return KVC_OK;
    s->num_checksums++;
    if (tensor->size > s->window_bytes)
        s->window_bytes = tensor->size < KVC_WINDOW_BYTES ? tensor->size : KVC_WINDOW_BYTES;
    return KVC_OK;
}

/* Writes the header to memory, and gets memory for what comes behind the tables. */
static kvc_status make_header(saving *s) {
    kvc_format *f = &s->state.format;
    snprintf(f->library, sizeof f->library, "%d.%d.%d", KVC_VERSION_MAJOR, KVC_VERSION_MINOR, KVC_VERSION_PATCH);
    snprintf(f->fingerprint, sizeof f->fingerprint, "%s", s->args.fingerprint ? s->args.fingerprint : "");
    s->header_bytes = kvc_format_header(f, /* only measure */ NULL, 0);
    if (s->header_bytes - 8 > KVC_MOST_HEADER)
        return kvc_fail(KVC_ERR_UNSUPPORTED, "a header of %llu bytes for %d layers: at most %d can be read",
                        (unsigned long long)s->header_bytes, s->cache->num_layers, KVC_MOST_HEADER);
    s->header = kvc_state_alloc(&s->state, s->header_bytes);
    kvc_format_visit(f, INT64_MAX, measure_tensor, s);
    s->checksums = kvc_state_alloc(&s->state, (uint64_t)s->num_checksums * sizeof *s->checksums);
    s->window = kvc_state_alloc(&s->state, s->window_bytes);
    if (!s->header || !s->checksums || !s->window) return KVC_ERR_NOMEM;
    kvc_format_header(f, s->header, s->header_bytes);
    const uint64_t seed = kvc_hash(s->header, (size_t)s->header_bytes, /* seed */ 0);
    *f->checksum = kvc_hash(s->tables, (size_t)((char *)f->checksum - s->tables), seed);
    return KVC_OK;
}

/* ---- the moment, with the mutex held ----------------------------------------------------------------------------- */

/* Lists the sequences to save: the named ones, or otherwise all that are not blank.  New sequences of an open batch are
 * blank.
 */
static kvc_status find_sequences(saving *s) {
    const kvc_table *table = &s->cache->sequences;
    const kvc_sequence *next = s->args.seq_ids ? NULL : kvc_table_first(table);
    const int64_t most = s->args.seq_ids ? s->args.num_sequences : table->named.num;
    s->sequences = kvc_state_alloc(&s->state, (uint64_t)most * sizeof *s->sequences);
    if (!s->sequences) return KVC_ERR_NOMEM;
    for (int64_t i = 0; i < most; i++) {
        const kvc_sequence *sequence = s->args.seq_ids ? kvc_table_find(table, s->args.seq_ids[i]) : next;
        if (next) next = kvc_table_next(table, next);
        if (s->args.seq_ids ||
            !(sequence->evicting.is_kept || sequence->call.is_own || kvc_sequence_is_blank(sequence)))
            s->sequences[s->num_sequences++] = sequence;
    }
    return KVC_OK;
}

/* Numbers rows, and makes all that does not need them again. */
static kvc_status make_tables(saving *s) {
    KVC_TRY(count_rows(s));
    KVC_TRY(reserve_tables(s));
    KVC_TRY(reserve_extents(s));
    fill_tables(s);
    return make_header(s);
}

/* Makes what follows from the cache at this moment, and keeps its rows in place. */
static kvc_status take_moment(saving *s) {
    kvc_cache_find_all(s->cache);
    KVC_TRY(find_sequences(s));
    const kvc_status status = make_tables(s);
    end_numbering(s);
    KVC_TRY(status);
    kvc_state_begin(&s->state);
    kvc_state_pin(&s->state);
    return KVC_OK;
}

/* ---- writing, without the mutex ---------------------------------------------------------------------------------- */

static kvc_status write_bytes(const saving *s, const void *data, uint64_t size) {
    if (!size || !s->args.write(s->args.user, data, (size_t)size)) return KVC_OK;
    return kvc_fail(KVC_ERR_CALLBACK, "write failed, for %llu bytes: what it was given before is no whole file",
                    (unsigned long long)size);
}

static kvc_status write_rows(saving *s, const kvc_tensor *tensor) {
    kvc_pieces pieces = {.state = &s->state, .tensor = tensor, .use = KVC_SAVE_PIECES, .bytes = s->window};
    uint64_t checksum = 0;
    for (kvc_status status; pieces.begin < tensor->size; pieces.begin += pieces.size) {
        const uint64_t rest = tensor->size - pieces.begin;
        pieces.size = rest < s->window_bytes ? rest : s->window_bytes;
        pieces.num_threads = kvc_cache_threads(s->cache);
        checksum = kvc_pieces_run(&pieces, checksum);
        status = write_bytes(s, s->window, pieces.size);
        if (status != KVC_OK) return status;
    }
    s->checksums[s->num_checksums++] = checksum;
    return KVC_OK;
}

static kvc_status write_tensor(void *context, const kvc_tensor *tensor) {
    static const char zeros[KVC_FORMAT_ALIGNMENT]; /* KVC_MAC_BYTES are fewer */
    saving *s = context;
    if (tensor->begin < s->tables_bytes) return KVC_OK; /* written all together */
    if (tensor->kind == KVC_ROWS) return write_rows(s, tensor);
    return write_bytes(s, tensor->kind == KVC_CHECKSUMS ? (const void *)s->checksums : zeros, tensor->size);
}

static kvc_status write_file(saving *s) {
    kvc_status status = write_bytes(s, s->header, s->header_bytes);
    if (status == KVC_OK) status = write_bytes(s, s->tables, s->tables_bytes);
    s->num_checksums = 0;
    return status == KVC_OK ? kvc_format_visit(&s->state.format, INT64_MAX, write_tensor, s) : status;
}

static kvc_status check_tokens(const kvc_save_args *args) {
    if (!args->tokens != !args->num_tokens)
        return kvc_fail(KVC_ERR_INVALID, "%s is NULL: give tokens and num_tokens, or neither",
                        args->tokens ? "num_tokens" : "tokens");
    if (args->tokens && !args->seq_ids)
        return kvc_fail(KVC_ERR_INVALID, "seq_ids is NULL: it must name the sequences whose tokens are given");
    for (int64_t i = 0; args->tokens && i < args->num_sequences; i++)
        if (args->num_tokens[i] < 0 || args->num_tokens[i] > INT32_MAX)
            return kvc_fail(KVC_ERR_INVALID, "num_tokens[%lld] is %lld: it must be between 0 and %d", (long long)i,
                            (long long)args->num_tokens[i], INT32_MAX);
    return KVC_OK;
}

static kvc_status check_args(const kvc_save_args *args) {
    KVC_TRY(kvc_check_endian());
    if (!args->write) return kvc_fail(KVC_ERR_INVALID, "write is NULL: it is what takes the bytes of the file");
    KVC_TRY(kvc_check_seq_ids(args->seq_ids, args->num_sequences));
    KVC_TRY(check_tokens(args));
    if (args->fingerprint && !kvc_is_fingerprint(args->fingerprint))
        return kvc_fail(KVC_ERR_INVALID,
                        "fingerprint is \"%.64s\": it must be up to %d printable ASCII characters but quotes and "
                        "backslashes, such as a hash in hexadecimal digits",
                        args->fingerprint, KVC_MOST_FINGERPRINT);
    return KVC_OK;
}

kvc_status kvc_save(kvc_cache *cache, const kvc_save_args *given) {
    saving s = {.cache = cache, .state = {.cache = cache, .memory = &cache->memory}};
    KVC_TRY(KVC_READ(kvc_save_args, &s.args, given, "args"));
    KVC_TRY(check_args(&s.args));
    kvc_lock(cache);
    kvc_status status = take_moment(&s);
    if (status == KVC_OK) {
        kvc_unlock(cache, KVC_OK);
        status = write_file(&s);
        kvc_lock(cache);
    }
    kvc_state_end(&s.state);
    return kvc_unlock(cache, status);
}
