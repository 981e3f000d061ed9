/* waiting.c: calls that wait for each other: see waiting.h. */
#include "store/waiting.h"

kvc_sequence *kvc_cache_find(kvc_cache *cache, int64_t id) {
    kvc_sequence *sequence;
    while ((sequence = kvc_table_find(&cache->sequences, id)) && sequence->in_place)
        kvc_signal_wait(&cache->idle, &cache->mutex);
    return sequence;
}

kvc_sequence *kvc_cache_find_to_copy(kvc_cache *cache, int64_t id) {
    kvc_sequence *sequence;
    do sequence = kvc_cache_find(cache, id);
    while (cache->max_bytes && kvc_cache_wait_pages(cache));
    return sequence;
}

void kvc_cache_find_all(kvc_cache *cache) {
    while (cache->num_in_place) kvc_signal_wait(&cache->idle, &cache->mutex);
}

void kvc_cache_begin_in_place(kvc_cache *cache, kvc_sequence *sequence) {
    sequence->in_place = 1;
    cache->num_in_place++;
}

void kvc_cache_end_in_place(kvc_cache *cache, kvc_sequence *sequence) {
    sequence->in_place = 0;
    cache->num_in_place--;
    kvc_signal_all(&cache->idle);
}

void kvc_cache_begin_reading(kvc_cache *cache) {
    while (cache->num_waiting) kvc_signal_wait(&cache->idle, &cache->mutex);
    cache->num_readers++;
}

void kvc_cache_end_reading(kvc_cache *cache) {
    if (--cache->num_readers == 0 && cache->num_waiting) kvc_signal_all(&cache->idle);
}

/* Cannot deadlock: the calls it waits for need nothing but the mutex, and call no function of the caller. */
void kvc_cache_wait(kvc_cache *cache) {
    cache->num_waiting++;
    while (cache->num_readers || cache->num_in_place) kvc_signal_wait(&cache->idle, &cache->mutex);
    if (--cache->num_waiting == 0) kvc_signal_all(&cache->idle);
}

int kvc_cache_wait_pages(kvc_cache *cache) {
    if (!kvc_memory_any_busy(&cache->memory)) return 0;
    cache->num_waiting++;
    while (kvc_memory_any_busy(&cache->memory)) kvc_signal_wait(&cache->idle, &cache->mutex);
    if (--cache->num_waiting == 0) kvc_signal_all(&cache->idle);
    return 1;
}
