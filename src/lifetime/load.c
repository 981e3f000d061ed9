/* load.c: kvc_load and kvc_restore.
 *
 * The file is read from its beginning to its end.  Header and tables are copied and checked as a whole before anything
 * in them is used.  Rows are copied to slots of sequences that nobody sees yet, and checked on the way.  Then the
 * sequences become part of the cache.
 *
 * The window is a buffer through which tensors are read, unless the file is in memory.  Chosen sequences are those of
 * the file that are loaded.  A file whose contents do not fit together is "altered". */
#include <string.h>

#include "base/hash.h"
#include "cache/config.h"
#include "saved/loaded.h"
#include "saved/saved_layers.h"

typedef struct loading {
    kvc_load_args args;
    kvc_state state;
    uint64_t at; /* bytes of the file that were read */
    char *header;
    uint64_t header_bytes, tables_bytes;
    kvc_config saved; /* the file's, with its layers */
    int32_t *chosen;  /* [num_sequences of the file] kvc_loaded_choose */
    int32_t only_checks;
    char *window; /* NULL: the file is in memory */
    uint64_t window_bytes;
    uint64_t *checksums; /* [num_checksums] of the tensors of rows that were read */
    int64_t num_checksums;
} loading;

/* ---- reading ----------------------------------------------------------------------------------------------------- */

static uint64_t bytes_left(const loading *l) { return (uint64_t)l->args.size - l->at; }

/* Sets *bytes to the next `size` bytes of the file, which are read to `buffer` unless the file is in memory. */
static kvc_status read_in_place(loading *l, uint64_t size, char *buffer, char **bytes) {
    *bytes = buffer;
    if (size > bytes_left(l))
        return kvc_fail(KVC_ERR_FORMAT, "the file is truncated: it has %lld bytes, and %llu more are missing",
                        (long long)l->args.size, (unsigned long long)(size - bytes_left(l)));
    if (l->args.data)
        *bytes = (char *)(uintptr_t)l->args.data + l->at;
    else if (size && l->args.read(l->args.user, buffer, (size_t)size))
        return kvc_fail(KVC_ERR_CALLBACK, "read failed, for %llu bytes at %llu", (unsigned long long)size,
                        (unsigned long long)l->at);
    l->at += size;
    return KVC_OK;
}

/* Copies the next `size` bytes of the file. */
static kvc_status read_bytes(loading *l, void *to, uint64_t size) {
    char *bytes;
    const kvc_status status = read_in_place(l, size, to, &bytes);
    if (status == KVC_OK && bytes != to) memcpy(to, bytes, (size_t)size);
    return status;
}

/* ---- the beginning of the file ----------------------------------------------------------------------------------- */

static kvc_status read_header(loading *l) {
    uint8_t start[8] = {0};
    uint64_t length = 0;
    const uint64_t there = bytes_left(l) < sizeof start ? bytes_left(l) : sizeof start;
    KVC_TRY(read_bytes(l, start, there));
    for (int i = 0; i < 8; i++) length |= (uint64_t)start[i] << 8 * i;
    if (there && (length > KVC_MOST_HEADER || (length + sizeof start) % KVC_FORMAT_ALIGNMENT))
        return kvc_fail(KVC_ERR_FORMAT, "no saved state: the file does not begin like one");
    if (there < sizeof start)
        return kvc_fail(KVC_ERR_FORMAT, "the file is truncated: it has %lld bytes", (long long)l->args.size);
    if (length > bytes_left(l))
        return kvc_fail(KVC_ERR_FORMAT, "the file is truncated: it has %lld bytes, its header alone %llu",
                        (long long)l->args.size, (unsigned long long)length);
    l->header_bytes = length + sizeof start;
    l->header = kvc_state_take(&l->state, l->header_bytes);
    if (!l->header) return KVC_ERR_NOMEM;
    memcpy(l->header, start, sizeof start);
    kvc_status status = read_bytes(l, l->header + sizeof start, length);
    if (status == KVC_OK) status = kvc_format_read_strings(&l->state.format, l->header + sizeof start, length);
    if (status != KVC_OK || !l->args.fingerprint || !strcmp(l->args.fingerprint, l->state.format.fingerprint))
        return status;
    return kvc_fail(KVC_ERR_FORMAT, "the file is of another model: its fingerprint is \"%s\", not \"%.64s\"",
                    l->state.format.fingerprint, l->args.fingerprint);
}

static kvc_status check_zeros(const char *at, const char *end, const char *name) {
    while (at < end && !*at) at++;
    return at == end ? KVC_OK : kvc_fail(KVC_ERR_FORMAT, "altered: %s is not all zeros", name);
}

static kvc_status read_tables(loading *l) {
    kvc_saved_state counts;
    KVC_TRY(read_bytes(l, &counts, sizeof counts));
    const uint64_t most = (uint64_t)l->args.size - l->header_bytes;
    l->tables_bytes = kvc_format_tables_bytes(&counts, most);
    if (l->tables_bytes > most)
        return kvc_fail(KVC_ERR_FORMAT, "truncated or altered: its tables do not fit in %lld bytes",
                        (long long)l->args.size);
    char *tables = kvc_state_take(&l->state, l->tables_bytes);
    if (!tables) return KVC_ERR_NOMEM;
    memcpy(tables, &counts, sizeof counts);
    KVC_TRY(read_bytes(l, tables + sizeof counts, l->tables_bytes - sizeof counts));
    kvc_format *f = &l->state.format;
    kvc_format_place(f, tables);
    const uint64_t seed = kvc_hash(l->header, (size_t)l->header_bytes, /* seed */ 0);
    if (kvc_hash(tables, (size_t)((char *)f->checksum - tables), seed) != *f->checksum)
        return kvc_fail(KVC_ERR_FORMAT, "altered: its header and tables do not match their checksum");
    return check_zeros((const char *)(f->checksum + 1), tables + l->tables_bytes, "checksum.padding");
}

/* Raises l->window_bytes, for now, to where a tensor ends, and counts those that have checksums. */
static kvc_status measure_tensor(void *context, const kvc_tensor *tensor) {
    loading *l = context;
    if (tensor->begin + tensor->size > l->window_bytes) l->window_bytes = tensor->begin + tensor->size;
    l->num_checksums += tensor->kind == KVC_ROWS;
    return KVC_OK;
}

/* Finds how many bytes and checksums the file has by its tables, whose layers were checked.  Checks that its header and
 * its length agree. */
static kvc_status measure_file(loading *l) {
    const uint64_t most = (uint64_t)l->args.size - l->header_bytes;
    kvc_status status = kvc_format_visit(&l->state.format, most, measure_tensor, l);
    if (status != KVC_OK) return status;
    if (l->window_bytes != most)
        return kvc_fail(KVC_ERR_FORMAT, "altered: it has %llu bytes more than its header says",
                        (unsigned long long)(most - l->window_bytes));
    char *header = kvc_state_take(&l->state, l->header_bytes);
    if (!header) return KVC_ERR_NOMEM;
    if (kvc_format_header(&l->state.format, header, l->header_bytes) != l->header_bytes ||
        memcmp(header, l->header, (size_t)l->header_bytes))
        status = kvc_fail(KVC_ERR_FORMAT, "altered: its header is not the one that follows from its tables");
    return status;
}

/* Reads everything up to the rows, and gets memory to read these. */
static kvc_status read_beginning(loading *l) {
    KVC_TRY(read_header(l));
    KVC_TRY(read_tables(l));
    kvc_layer *layers = kvc_state_take(&l->state, (uint64_t)l->state.format.state->num_layers * sizeof *layers);
    if (!layers) return KVC_ERR_NOMEM;
    KVC_TRY(kvc_read_layers(&l->state.format, layers, &l->saved));
    KVC_TRY(measure_file(l));
    if (l->window_bytes > KVC_WINDOW_BYTES) l->window_bytes = KVC_WINDOW_BYTES; /* it was the size of all tensors */
    if (!l->args.data) l->window = kvc_state_take(&l->state, l->window_bytes);
    l->checksums = kvc_state_take(&l->state, (uint64_t)l->num_checksums * sizeof *l->checksums);
    l->chosen = kvc_state_take(&l->state, (uint64_t)l->state.format.state->num_sequences * sizeof *l->chosen);
    if ((!l->args.data && !l->window) || !l->checksums || !l->chosen) return KVC_ERR_NOMEM;
    return kvc_loaded_choose(&l->state, &l->args, l->chosen);
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

static kvc_status read_rows(loading *l, const kvc_tensor *tensor) {
    kvc_pieces pieces = {.state = &l->state,
                         .tensor = tensor,
                         .use = l->only_checks ? KVC_HASH_PIECES : KVC_LOAD_PIECES,
                         .num_threads = kvc_cache_threads(l->state.cache)};
    uint64_t checksum = 0;
    for (; pieces.begin < tensor->size; pieces.begin += pieces.size) {
        const uint64_t rest = tensor->size - pieces.begin;
        pieces.size = rest < KVC_WINDOW_BYTES ? rest : KVC_WINDOW_BYTES;
        const kvc_status status = read_in_place(l, pieces.size, l->window, &pieces.bytes);
        if (status != KVC_OK) return status;
        checksum = kvc_pieces_run(&pieces, checksum);
    }
    l->checksums[l->num_checksums++] = checksum;
    return KVC_OK;
}

static kvc_status read_zeros(loading *l, const kvc_tensor *tensor) {
    char padding[KVC_FORMAT_ALIGNMENT];
    KVC_TRY(read_bytes(l, padding, tensor->size));
    return check_zeros(padding, padding + tensor->size, tensor->name);
}

/* Reports that the checksum of a tensor of rows is not the file's.  context: number of tensors of rows before it. */
static kvc_status report_altered(void *context, const kvc_tensor *tensor) {
    int64_t *num_before = context;
    if (tensor->kind != KVC_ROWS || (*num_before)--) return KVC_OK;
    return kvc_fail(KVC_ERR_FORMAT, "altered: tensor %s does not match its checksum", tensor->name);
}

static kvc_status compare_checksums(loading *l) {
    for (int64_t i = 0; i < l->num_checksums; i++) {
        uint64_t expected;
        kvc_status status = read_bytes(l, &expected, sizeof expected);
        if (status != KVC_OK) return status;
        if (expected == l->checksums[i]) continue;
        int64_t num_before = i;
        return kvc_format_visit(&l->state.format, INT64_MAX, report_altered, &num_before);
    }
    return KVC_OK;
}

static kvc_status read_tensor(void *context, const kvc_tensor *tensor) {
    loading *l = context;
    char mac[KVC_MAC_BYTES];
    switch (tensor->kind) {
    case KVC_ROWS: return read_rows(l, tensor);
    case KVC_CHECKSUMS: return compare_checksums(l);
    case KVC_MAC: return read_bytes(l, mac, sizeof mac);
    default: return tensor->begin < l->tables_bytes ? KVC_OK : read_zeros(l, tensor); /* tables were read; padding */
    }
}

static kvc_status hand_out_tokens(const loading *l) {
    const kvc_format *f = &l->state.format;
    const int64_t *tokens = f->tokens;
    for (int64_t i = 0; l->args.tokens && i < f->state->num_sequences; tokens += f->sequences[i++].num_tokens) {
        const kvc_saved_sequence *s = &f->sequences[i];
        if (l->chosen[i] && l->args.tokens(l->args.user, s->id, tokens, s->num_tokens))
            return kvc_fail(KVC_ERR_CALLBACK, "tokens failed, for sequence %lld", (long long)s->id);
    }
    return KVC_OK;
}

/* Reads the rows, and makes the sequences part of the cache. */
static kvc_status load_rows(loading *l) {
    kvc_cache *cache = l->state.cache;
    kvc_status status = kvc_loaded_check(&l->state);
    if (status == KVC_OK && !l->only_checks) {
        kvc_lock(cache);
        status = kvc_unlock(cache, kvc_loaded_make(&l->state, &l->args, l->chosen));
    }
    l->num_checksums = 0; /* counts anew, as tensors are read */
    if (status == KVC_OK) status = kvc_format_visit(&l->state.format, INT64_MAX, read_tensor, l);
    if (status == KVC_OK) status = hand_out_tokens(l);
    if (status != KVC_OK || l->only_checks) return status;
    kvc_state_sketch(&l->state);
    kvc_lock(cache);
    return kvc_unlock(cache, kvc_loaded_accept(&l->state));
}

/* ---- the new cache ----------------------------------------------------------------------------------------------- */

/* Returns KVC_ERR_INVALID if a layer's keys are moved by a function that is not there. */
static kvc_status check_functions(const loading *l) {
    for (int32_t i = 0; !l->only_checks && i < l->saved.num_layers; i++)
        if (l->saved.layers[i].rope.kind == KVC_ROPE_FUNCTION)
            return kvc_fail(KVC_ERR_INVALID,
                            "config.layers is NULL: a function of the caller moves the keys of layer %d, and is not in "
                            "the file; give the layers, with it",
                            i);
    return KVC_OK;
}

/* Makes a cache.  If the file gives block_size, and max_bytes does not hold a block of each layer group, takes smaller
 * blocks.  Older releases made caches like that. */
static kvc_status make_fitting(kvc_config *config, int32_t is_chosen, kvc_cache **cache) {
    enum { DEFAULT_SIZE = 64 };
    const int32_t saved_size = config->block_size;
    kvc_status status = kvc_cache_new(config, cache);
    if (!config->max_bytes || is_chosen) return status;
    for (int32_t size = DEFAULT_SIZE; status == KVC_ERR_INVALID && size; size /= 2) {
        if (size >= saved_size) continue;
        config->block_size = size;
        status = kvc_cache_new(config, cache);
    }
    return status;
}

/* Makes a cache of the file's configuration and what the caller's puts in its place. */
static kvc_status make_cache(loading *l, const kvc_config *own) {
    kvc_config config = l->saved;
    KVC_TRY(own->layers ? kvc_match_layers(&l->saved, own) : check_functions(l));
    if (own->layers) {
        config.layers = own->layers;
        config.layer_size = own->layer_size;
    }
    if (own->block_size) config.block_size = own->block_size;
    if (own->max_seq_len) config.max_seq_len = own->max_seq_len;
    if (own->max_sequences) config.max_sequences = own->max_sequences;
    if (own->capacity) config.capacity = own->capacity;
    if (own->max_bytes) config.max_bytes = own->max_bytes;
    config.num_threads = own->num_threads;
    config.allocator = own->allocator;
    config.poll = own->poll;
    config.poll_user = own->poll_user;
    return make_fitting(&config, own->block_size, &l->state.cache);
}

/* ---- the public functions ---------------------------------------------------------------------------------------- */

static kvc_status read_args(const kvc_load_args *given, kvc_load_args *args) {
    KVC_TRY(KVC_READ(kvc_load_args, args, given, "args"));
    KVC_TRY(kvc_check_endian());
    if (!args->data == !args->read)
        return kvc_fail(KVC_ERR_INVALID, "data and read are %s NULL: give one of them",
                        args->data ? "both not" : "both");
    if (args->size < 0)
        return kvc_fail(KVC_ERR_INVALID, "size is %lld: it is the file's length", (long long)args->size);
    if (args->to_ids && !args->seq_ids)
        return kvc_fail(KVC_ERR_INVALID, "seq_ids is NULL: it must name the sequences that to_ids are for");
    return kvc_check_seq_ids(args->seq_ids, args->num_sequences);
}

/* Copies and checks the caller's configuration, except for fields that kvc_cache_new checks. */
static kvc_status read_config(const kvc_config *given, kvc_config *config, kvc_memory *memory) {
    kvc_status status = KVC_OK;
    *config = (kvc_config){.struct_size = sizeof *config};
    if (given) status = KVC_READ(kvc_config, config, given, "config");
    if (status == KVC_OK && config->layers) {
        kvc_config checked;
        status = kvc_config_read(&checked, config);
    }
    return status == KVC_OK ? kvc_memory_init(memory, config->allocator) : status;
}

static void begin_loading(loading *l) {
    kvc_lock(l->state.cache);
    kvc_state_begin(&l->state);
    kvc_unlock(l->state.cache, KVC_OK);
}

/* Ends loading; frees the new cache unless it is to be kept. */
static void end_loading(loading *l, int keeps_cache) {
    kvc_cache *cache = l->state.cache;
    if (cache) kvc_lock(cache);
    kvc_state_end(&l->state);
    if (cache) kvc_unlock(cache, KVC_OK);
    if (!keeps_cache) kvc_cache_free(cache);
}

kvc_status kvc_load(const kvc_load_args *given, kvc_cache **out) {
    loading l = {.only_checks = !out};
    kvc_config config;
    kvc_memory memory;
    if (out) *out = NULL;
    KVC_TRY(read_args(given, &l.args));
    KVC_TRY(read_config(l.args.config, &config, &memory));
    l.state.memory = &memory;
    kvc_status status = read_beginning(&l);
    if (status == KVC_OK) status = make_cache(&l, &config);
    if (status == KVC_OK) begin_loading(&l);
    if (status == KVC_OK) status = load_rows(&l);
    kvc_cache *cache = l.state.cache;
    const int keeps = status == KVC_OK && out;
    end_loading(&l, keeps);
    if (keeps) *out = cache;
    return status;
}

kvc_status kvc_restore(kvc_cache *cache, const kvc_load_args *given) {
    loading l = {.state = {.cache = cache, .memory = &cache->memory}};
    const kvc_config own = {
        .layers = cache->layers, .layer_size = sizeof *cache->layers, .num_layers = cache->num_layers};
    KVC_TRY(read_args(given, &l.args));
    if (l.args.config) return kvc_fail(KVC_ERR_INVALID, "config is not NULL: the cache has its own");
    begin_loading(&l);
    kvc_status status = read_beginning(&l);
    if (status == KVC_OK) status = kvc_match_layers(&l.saved, &own);
    if (status == KVC_OK) status = load_rows(&l);
    end_loading(&l, /* keeps_cache */ 1);
    return status;
}
