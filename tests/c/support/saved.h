/* saved.h: saved states in memory. */
#ifndef KVC_TEST_SAVED_H
#define KVC_TEST_SAVED_H

#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "saved/format.h"
#include "support/test.h"

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

/* Checks that a cache is saved to bytes which load and are saved to the same bytes; config: for what is loaded. */
static inline void check_saved(kvc_cache *cache, const kvc_config *config) {
    saved first, again;
    kvc_cache *loaded = NULL;
    if (KVC_IS_BIG_ENDIAN) return; /* test_saved.c checks that it is refused */
    CHECKF(save_all(cache, &first) == KVC_OK, "%s", kvc_last_error());
    kvc_load_args args = load_args_of(&first);
    args.config = config;
    CHECKF(kvc_load(&args, &loaded) == KVC_OK, "%s", kvc_last_error());
    if (loaded) {
        CHECK(kvc_validate(loaded) == KVC_OK && save_all(loaded, &again) == KVC_OK);
        CHECKF(is_same(&first, &again), "saves to other bytes");
        free(again.bytes);
        kvc_cache_free(loaded);
    }
    free(first.bytes);
}

#endif
