/* shelf.h: a store in memory, which threads may use side by side.  A program says first how many values there are at
 * most, MOST_VALUES, and how many bytes one has at most, MOST_VALUE. */
#ifndef KVC_TEST_SHELF_H
#define KVC_TEST_SHELF_H

#include <pthread.h>

#include "support/test.h"

typedef struct value {
    uint8_t name[KVC_NAME_BYTES], bytes[MOST_VALUE];
    int64_t size;
} value;

static value values[MOST_VALUES];
static int num_values;
static pthread_mutex_t shelf_mutex = PTHREAD_MUTEX_INITIALIZER;

static inline value *find_value(const uint8_t *name) {
    for (int i = 0; i < num_values; i++)
        if (!memcmp(values[i].name, name, KVC_NAME_BYTES)) return &values[i];
    return NULL;
}

static inline kvc_status read_value(void *user, const uint8_t *name, void *to, int64_t max_bytes, int64_t *size) {
    (void)user;
    pthread_mutex_lock(&shelf_mutex);
    const value *found = find_value(name);
    *size = found ? found->size : 0;
    if (found && *size <= max_bytes) memcpy(to, found->bytes, (size_t)*size);
    pthread_mutex_unlock(&shelf_mutex);
    return KVC_OK;
}

static inline kvc_status write_value(void *user, const uint8_t *name, const void *from, int64_t size) {
    (void)user;
    pthread_mutex_lock(&shelf_mutex);
    value *to = find_value(name);
    if (!to) to = &values[num_values++];
    CHECK(num_values <= MOST_VALUES && size <= MOST_VALUE);
    memcpy(to->name, name, KVC_NAME_BYTES);
    memcpy(to->bytes, from, (size_t)size);
    to->size = size;
    pthread_mutex_unlock(&shelf_mutex);
    return KVC_OK;
}

static const kvc_store store = {.struct_size = sizeof store, .read = read_value, .write = write_value};

#endif
