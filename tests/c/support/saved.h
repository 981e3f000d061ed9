/* saved.h: saved states in memory; caches that are saved, loaded and compared with the oracle. */
#ifndef KVC_TEST_SAVED_H
#define KVC_TEST_SAVED_H

#include "base/hash.h"
#include "saved/format.h"
#include "support/oracle.h"

/* A file in memory, which is written or read; a call of its functions may be made to fail. */
typedef struct saved {
    char *bytes;
    size_t size, room, at;
    int fail_after; /* calls that succeed before one fails; -1: all do */
    size_t last;    /* bytes of the last call */
} saved;

static inline int32_t saved_write(void *user, const void *data, size_t size) {
    saved *s = user;
    CHECK(data && size);
    s->last = size;
    if (s->fail_after >= 0 && s->fail_after-- == 0) return 1;
    if (s->size + size > s->room) {
        s->room = (s->size + size) * 2;
        s->bytes = realloc(s->bytes, s->room);
    }
    memcpy(s->bytes + s->size, data, size);
    s->size += size;
    return 0;
}

static inline int32_t saved_read(void *user, void *data, size_t size) {
    saved *s = user;
    CHECK(data && size && size <= s->size - s->at);
    s->last = size;
    if (s->fail_after >= 0 && s->fail_after-- == 0) return 1;
    memcpy(data, s->bytes + s->at, size);
    s->at += size;
    return 0;
}

static inline kvc_status save_all(kvc_cache *cache, saved *to) {
    const kvc_save_args args = {.struct_size = sizeof args, .write = saved_write, .user = to};
    *to = (saved){.fail_after = -1};
    return kvc_save(cache, &args);
}

static inline int is_same(const saved *a, const saved *b) {
    return a->size == b->size && !memcmp(a->bytes, b->bytes, a->size);
}

/* Whether the tensors of these tables can be listed, and so have a header: kvc_load checks layers before it does. */
static inline int can_be_listed(const kvc_format *format) {
    for (int64_t i = 0; i < format->state->num_layers; i++) {
        const kvc_saved_layer *layer = &format->layers[i];
        const int64_t sizes[] = {layer->num_kv_heads, layer->k_dim, layer->v_dim};
        for (int s = 0; s < 3; s++)
            if (sizes[s] < (s < 2) || sizes[s] > 1 << 20) return 0;
        if (layer->k_type != (int32_t)layer->k_type || layer->v_type != (int32_t)layer->v_type) return 0;
        if (!kvc_row_bytes((int32_t)layer->k_type, (int32_t)layer->k_dim)) return 0;
        if (layer->v_dim && !kvc_row_bytes((int32_t)layer->v_type, (int32_t)layer->v_dim)) return 0;
        if (layer->group < 0 || layer->group >= format->state->num_groups) return 0;
    }
    return 1;
}

/* Sets the checksum of tables behind a header of so many bytes, as somebody would who means harm. */
static inline void sign_tables(const kvc_format *format, const char *header, uint64_t size) {
    const char *tables = (const char *)format->state, *end = (const char *)format->checksum;
    *format->checksum = kvc_hash(tables, (size_t)(end - tables), kvc_hash(header, (size_t)size, 0));
}

/* Saves one sequence. */
static inline kvc_status save_one(kvc_cache *cache, int64_t id, saved *to) {
    const kvc_save_args args = {
        .struct_size = sizeof args, .write = saved_write, .user = to, .seq_ids = &id, .num_sequences = 1};
    *to = (saved){.fail_after = -1};
    return kvc_save(cache, &args);
}

static inline kvc_load_args load_args_of(const saved *from) {
    return (kvc_load_args){.struct_size = sizeof(kvc_load_args), .data = from->bytes, .size = (int64_t)from->size};
}

static inline kvc_load_args read_args_of(saved *from) {
    from->at = 0;
    return (kvc_load_args){
        .struct_size = sizeof(kvc_load_args), .read = saved_read, .user = from, .size = (int64_t)from->size};
}

/* Compares a cache with a pair's oracle, without the open batch, and frees it. */
static inline void check_loaded(const pair *p, kvc_cache *cache, const kvc_config *config) {
    static pair copy;
    if (p->memory) p->memory->is_failing = 0; /* comparing takes memory */
    copy = *p;
    copy.cache = cache;
    copy.config = *config;
    copy.batch = NULL;
    copy.memory = NULL;
    copy.num_holds = 0;
    for (int s = copy.num_sequences - 1; s >= 0; s--) /* retained sequences are saved only where they are named */
        if (copy.sequences[s].used) forget_sequence(&copy, copy.sequences[s].id);
    pair_check(&copy);
    pair_free(&copy);
}

/* Checks that a file is refused for max_bytes where what is loaded without that limit has more bytes, and only there.
 * loaded: what it became; NULL: it was refused. */
static inline void check_max_bytes(pair *p, const saved *file, kvc_cache *loaded) {
    kvc_config config = p->config;
    kvc_load_args args = load_args_of(file);
    kvc_cache *cache = loaded;
    if (p->memory) p->memory->is_failing = 0;
    config.max_bytes = INT64_MAX; /* 0 would be the file's */
    args.config = &config;
    if (!loaded) CHECKF(kvc_load(&args, &cache) == KVC_OK, "%s", kvc_last_error());
    CHECKF((kvc_nbytes(cache) > p->config.max_bytes) == !loaded, "%lld bytes, max_bytes is %lld",
           (long long)kvc_nbytes(cache), (long long)p->config.max_bytes);
    if (!loaded) kvc_cache_free(cache);
}

/* Saves the cache; checks that what is loaded is the same, from memory and by a function, and saves to the same
 * bytes. */
static inline kvc_status pair_save(pair *p) {
    saved file, again;
    kvc_cache *loaded = NULL;
    if (KVC_IS_BIG_ENDIAN) /* test_saved.c checks that it is refused */
        return KVC_OK;
    kvc_status status = agree(p, "save", save_all(p->cache, &file), KVC_OK);
    kvc_load_args args = p->next_tag % 2 ? load_args_of(&file) : read_args_of(&file);
    args.config = &p->config;
    if (status == KVC_OK) status = kvc_load(&args, &loaded);
    if (status != KVC_ERR_FULL || !p->config.max_bytes) agree(p, "load", status, KVC_OK);
    CHECK(!loaded == (status != KVC_OK));
    if (p->config.max_bytes && (loaded || status == KVC_ERR_FULL)) check_max_bytes(p, &file, loaded);
    if (loaded) {
        if (p->memory) p->memory->is_failing = 0;
        CHECK(save_all(loaded, &again) == KVC_OK);
        CHECKF(is_same(&again, &file), "saves to other bytes");
        free(again.bytes);
        check_loaded(p, loaded, &p->config);
    }
    free(file.bytes);
    return status;
}

/* Saves a sequence, and restores it under another id, in place of the sequence there. */
static inline kvc_status pair_restore(pair *p, int64_t from, int64_t to) {
    saved file;
    if (KVC_IS_BIG_ENDIAN) return KVC_OK;
    kvc_status status = agree(p, "save", save_one(p->cache, from, &file), KVC_OK);
    kvc_load_args args = load_args_of(&file);
    args.seq_ids = &from;
    args.to_ids = &to;
    args.num_sequences = 1;
    if (status == KVC_OK)
        status = agree(p, "restore", kvc_restore(p->cache, &args), in_batch(p, to) ? KVC_ERR_BUSY : KVC_OK);
    free(file.bytes);
    if (status != KVC_OK) return status;
    if (from != to) oracle_copy_prefix(p, from, to, INT32_MAX);
    sequence *s = find_sequence(p, to);
    for (int l = 0; s && l < p->config.num_layers; l++)
        for (int i = 0; i < s->layers[l].num; i++) s->layers[l].rows[i].slot = new_slot(p);
    return status;
}

#endif
