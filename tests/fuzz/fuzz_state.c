/* fuzz_state.c: an input alters a saved state; what is then loaded is whole, and is saved to the same bytes again.
 *
 * A header and checksums that match what was altered lead the loader as far as it goes.  Bytes of an input:
 *   0     the state that is altered, of those that random calls led to
 *   1     bits: 1 repair header and checksums, 2 read by a function, 4 restore into a cache, 8 cut the end off,
 *         16 name the layers, some of which have sketches
 *   2...  five for each alteration: the number of an int64 of the tables, 2 bytes; how it is altered; a number, 2 bytes
 */
#define _POSIX_C_SOURCE 200809L /* posix_memalign, setenv */
#include "cache/cache.h"
#include "support/saved.h"
#include "support/sketches.h"
#include "world/world.h"

#include "fuzz.h"

enum { NUM_STATES = 32, MOST_TABLES = 1 << 18, MOST_FILE = 1 << 21, MOST_MEMORY = 1 << 26 };

/* ---- states ------------------------------------------------------------------------------------------------------ */

/* A saved state, and the layers that it is of. */
typedef struct source {
    saved file;
    int num_layers;
    kvc_layer layers[LAYERS];
} source;

/* Whether a layer's keys may have sketches. */
static int may_sketch(const kvc_layer *layer) {
    return layer->k_dim == DIM && layer->v_dim && !layer->value_in_key && !layer->share &&
           layer->policy.kind == KVC_FULL && layer->policy.stride <= 1;
}

/* Saves a state that random calls of tests/world lead to. */
static void make_state(uint64_t seed, source *to) {
    client own = {.chance = {.state = seed}};
    me = &own;
    forget_texts();
    make_world(4 * seed + EDITS, 1, 0); /* without prefixes */
    for (int i = 0; i < 100; i++) play();
    stop_playing();
    CHECK(save_all(w.cache, &to->file) == KVC_OK);
    to->num_layers = w.o.num_layers;
    memcpy(to->layers, w.o.layers, sizeof to->layers);
    for (int l = 0; l < LAYERS; l++) to->layers[l].sketch_bits = may_sketch(&to->layers[l]) ? 2 : 0;
    for (int l = 0; l < LAYERS; l++)
        if (to->layers[l].share) to->layers[to->layers[l].share - 1].sketch_bits = 0;
    end_world();
}

/* Returns state i of the states that load without a function for their keys. */
static const source *state_of(int i) {
    static source states[NUM_STATES], made;
    kvc_cache *cache = NULL;
    for (uint64_t seed = (uint64_t)i; !states[i].file.bytes; seed += NUM_STATES) {
        make_state(seed, &made);
        const kvc_load_args args = load_args_of(&made.file);
        if (kvc_load(&args, &cache) == KVC_OK)
            states[i] = made;
        else
            free(made.file.bytes);
    }
    kvc_cache_free(cache);
    return &states[i];
}

static uint64_t header_bytes(const char *file) {
    uint64_t length;
    memcpy(&length, file, sizeof length);
    return length + sizeof length;
}

/* ---- altering one ------------------------------------------------------------------------------------------------ */

static int64_t alter(int64_t value, uint8_t how, int64_t by) {
    const uint64_t bits = (uint64_t)value;
    switch (how % 8) {
    case 0: return by;
    case 1: return (int64_t)(bits + (uint64_t)by);
    case 2: return (int64_t)(bits ^ (uint64_t)1 << (by & 63));
    case 3: return INT64_MAX - (by & 255);
    case 4: return INT64_MIN + (by & 255);
    case 5: return INT32_MAX + by;
    case 6: return (int64_t)((uint64_t)1 << (by & 63));
    default: return ~value;
    }
}

/* A file that is being written. */
typedef struct writing {
    const saved *from; /* this file's rows are taken, again and again */
    uint64_t at, size, tables, num_checksums;
    uint64_t checksums[4 * LAYERS]; /* of keys, values, and scales of both */
    char bytes[MOST_FILE];
} writing;

/* Returns what kvc_save would write as the checksum of a tensor of rows. */
static uint64_t checksum_of(const char *rows, uint64_t size) {
    uint64_t checksum = 0;
    for (uint64_t begin = 0; begin < size; begin += KVC_FORMAT_PIECE) {
        const uint64_t rest = size - begin;
        const uint64_t hash = kvc_hash(rows + begin, rest < KVC_FORMAT_PIECE ? rest : KVC_FORMAT_PIECE, 0);
        checksum = kvc_hash(&hash, sizeof hash, checksum);
    }
    return checksum;
}

static kvc_status write_tensor(void *context, const kvc_tensor *tensor) {
    writing *w = context;
    if (tensor->begin < w->tables) return KVC_OK;
    if (tensor->size > MOST_FILE - w->size) return KVC_ERR_FULL;
    char *to = w->bytes + w->size;
    memset(to, 0, (size_t)tensor->size);
    if (tensor->kind == KVC_ROWS) {
        const uint64_t begin = header_bytes(w->from->bytes);
        for (uint64_t i = 0; i < tensor->size; i++) to[i] = w->from->bytes[begin + w->at++ % (w->from->size - begin)];
        w->checksums[w->num_checksums++] = checksum_of(to, tensor->size);
    } else if (tensor->kind == KVC_CHECKSUMS) {
        memcpy(to, w->checksums, (size_t)tensor->size);
    }
    w->size += tensor->size;
    return KVC_OK;
}

/* Writes a file of these tables with a matching header, rows and checksums; returns 0 if there is no such file. */
static int repair(writing *w, const kvc_format *f) {
    if (f->state->num_layers > LAYERS || !can_be_listed(f)) return 0;
    w->size = kvc_format_header(f, w->bytes, MOST_FILE);
    if (w->size > MOST_FILE - w->tables) return 0;
    sign_tables(f, w->bytes, w->size);
    memset(f->checksum + 1, 0, KVC_FORMAT_ALIGNMENT - sizeof *f->checksum);
    memcpy(w->bytes + w->size, f->state, (size_t)w->tables);
    w->size += w->tables;
    return kvc_format_visit(f, MOST_FILE, write_tensor, w) == KVC_OK;
}

/* Writes what an input makes of a state. */
static void write_altered(writing *w, const saved *from, const uint8_t *data, size_t size) {
    static union {
        int64_t numbers[MOST_TABLES / 8];
        kvc_saved_state state;
        char bytes[MOST_TABLES];
    } tables;
    kvc_format format = {.library = "0.3.0"};
    const uint64_t header = header_bytes(from->bytes), rest = from->size - header,
                   copied = rest < MOST_TABLES ? rest : MOST_TABLES;
    w->from = from;
    memset(&tables, 0, sizeof tables);
    memcpy(tables.bytes, from->bytes + header, (size_t)copied);
    for (size_t i = 2; i + 5 <= size; i += 5) {
        const int at = (data[i] | data[i + 1] << 8) % (int)(copied / 8);
        tables.numbers[at] = alter(tables.numbers[at], data[i + 2], (int16_t)(data[i + 3] | data[i + 4] << 8));
    }
    w->tables = data[1] & 1 ? kvc_format_tables_bytes(&tables.state, MOST_TABLES) : UINT64_MAX;
    if (w->tables <= MOST_TABLES) {
        kvc_format_place(&format, &tables);
        if (repair(w, &format)) return;
        sign_tables(&format, from->bytes, header); /* what cannot be listed is refused behind its old header */
    }
    w->size = from->size;
    memcpy(w->bytes, from->bytes, from->size);
    memcpy(w->bytes + header, tables.bytes, (size_t)copied);
}

/* ---- loading it -------------------------------------------------------------------------------------------------- */

/* Has no memory for a block of any shape that a file may name: it takes its address space. */
static void *alloc_some(void *user, size_t size, size_t alignment, const kvc_memory_hint *hint) {
    void *start;
    (void)user, (void)hint;
    return size > MOST_MEMORY || posix_memalign(&start, alignment, size) ? NULL : start;
}

static void free_some(void *user, void *start, size_t size, const kvc_memory_hint *hint) {
    (void)user, (void)size, (void)hint;
    free(start);
}

static const kvc_allocator allocator = {.struct_size = sizeof allocator, .alloc = alloc_some, .free = free_some};

/* Checks that a cache is valid, and that each stored key has its own sketch. */
static void check_valid(kvc_cache *cache) {
    const kvc_table *table = &cache->sequences;
    CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
    for (const kvc_sequence *s = kvc_table_first(table); s; s = kvc_table_next(table, s))
        for (int l = 0; l < cache->num_layers; l++) {
            const int has_own = cache->layers[l].sketch_bits && !cache->layers[l].share;
            const int position = has_own ? wrong_sketch_in(cache, s, l) : -1;
            CHECKF(position < 0, "the sketch of the key at %d in layer %d of sequence %lld is not its own", position, l,
                   (long long)s->id);
        }
}

/* Runs a pass of one token of a sequence, where it can go on. */
static void pass_one(kvc_cache *cache, int64_t id) {
    static const float rows[1 << 20];
    kvc_batch *batch;
    if (kvc_begin(cache, 1, NULL, &id, NULL, &batch) != KVC_OK) return;
    for (int32_t l = 0; l < LAYERS; l++) { /* some layers take no rows, and some no values */
        kvc_put_args args = {.struct_size = sizeof args, .k = rows, .v = rows};
        if (kvc_put(batch, l, &args) == KVC_OK) continue;
        args.v = NULL;
        kvc_put(batch, l, &args);
    }
    if (kvc_commit(batch) != KVC_OK) kvc_abort(batch);
}

/* Uses what was loaded, and frees it. */
static void use(kvc_cache *cache) {
    int64_t ids[8];
    check_valid(cache);
    check_saved(cache, &(kvc_config){.struct_size = sizeof(kvc_config), .allocator = &allocator});
    const int64_t num = kvc_sequences(cache, ids, 8);
    for (int64_t i = 0; i < num && i < 8; i++) {
        pass_one(cache, ids[i]);
        check_valid(cache);
        kvc_remove(cache, ids[i], 1, 3, 0);
        kvc_shift(cache, ids[i], 2, KVC_END, 1);
    }
    kvc_compact(cache);
    check_valid(cache);
    kvc_cache_free(cache);
}

/* Restores into a cache; where that fails, the cache is as it was. */
static void restore(const saved *from, const kvc_load_args *args, const kvc_config *config) {
    kvc_cache *cache = NULL;
    saved before, after;
    kvc_load_args good = load_args_of(from);
    good.config = config->layers ? config : NULL;
    CHECK(kvc_load(&good, &cache) == KVC_OK);
    CHECK(save_all(cache, &before) == KVC_OK);
    const kvc_status status = kvc_restore(cache, args);
    if (status != KVC_OK) {
        CHECK(save_all(cache, &after) == KVC_OK);
        CHECK(is_same(&before, &after));
        free(after.bytes);
    }
    free(before.bytes);
    use(cache);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static writing to;
    if (size < 2) return 0;
    const source *of = state_of(data[0] % NUM_STATES);
    const saved *from = &of->file;
    to.at = to.num_checksums = 0;
    write_altered(&to, from, data, size);
    if (data[1] & 8) to.size -= size % to.size;
    saved file = {.bytes = to.bytes, .size = (size_t)to.size, .fail_after = -1};
    const kvc_saved_state *altered = (const void *)(to.bytes + header_bytes(to.bytes)); /* unless it was cut off */
    kvc_config config = {.struct_size = sizeof config,
                         .block_size = altered->block_size > 1 << 12 ? 16 : 0, /* 0: the file's */
                         .allocator = &allocator};
    if (data[1] & 16)
        config.layers = of->layers, config.layer_size = sizeof *of->layers, config.num_layers = of->num_layers;
    kvc_load_args args = data[1] & 2 ? read_args_of(&file) : load_args_of(&file);
    kvc_cache *cache = NULL;
    if (data[1] & 4) {
        restore(from, &args, &config);
    } else {
        args.config = &config;
        const int is_checked = !(data[1] & 2);
        const kvc_status checked = is_checked ? kvc_load(&args, NULL) : KVC_OK, status = kvc_load(&args, &cache);
        const int lacks_layers = status == KVC_ERR_INVALID && !config.layers; /* a load meets that first */
        CHECKF(!is_checked || status == KVC_ERR_NOMEM || lacks_layers ||
                   (checked == KVC_ERR_FORMAT) == (status == KVC_ERR_FORMAT),
               "%d when it was checked, %d when it was loaded: %s", checked, status, kvc_last_error());
        CHECKF(status == KVC_OK || size >= 7 || data[1] & 8, "nothing was altered: %s", kvc_last_error());
        if (status == KVC_OK) use(cache);
    }
    fail_if_checks_failed();
    return 0;
}
