/* saved_layers.h: the layers and limits of a cache in the tables of a saved state. */
#ifndef KVC_SAVED_LAYERS_H
#define KVC_SAVED_LAYERS_H

#include "cache/cache.h"
#include "saved/format.h"

/* Returns the number of frequencies that a cache's layers have, each distinct rope's counted once. */
int64_t kvc_count_freqs(const kvc_cache *cache);

/* Write the table of layers and the table of frequencies, or the limits of the cache. */
void kvc_save_layers(const kvc_cache *cache, const kvc_format *format);
void kvc_save_limits(const kvc_cache *cache, kvc_saved_state *state);

/* Reads the layers, [num_layers], and the cache's limits.  A layer with KVC_ROPE_FUNCTION gets a function that fails;
 * frequencies stay in their table.  KVC_ERR_FORMAT if no cache can have such layers or limits. */
kvc_status kvc_read_layers(const kvc_format *format, kvc_layer *layers, kvc_config *config);

/* Returns KVC_ERR_FORMAT, with the layer and the field in the message, unless rows of the saved layers are rows of
 * these as well.  Functions that move keys are not compared. */
kvc_status kvc_match_layers(const kvc_config *saved, const kvc_config *own);

#endif
