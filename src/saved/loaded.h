/* loaded.h: the sequences and slots that the tables of a saved state ask for.  All functions but kvc_loaded_check are
 * called with the mutex held. */
#ifndef KVC_LOADED_H
#define KVC_LOADED_H

#include "saved/transit.h"

/* Returns KVC_ERR_FORMAT unless kvc_save writes tables like these, except for the tables of layers, for this kind of
 * cache. */
kvc_status kvc_loaded_check(kvc_state *state);

/* Finds which of the file's sequences are to be loaded.  Returns KVC_ERR_INVALID if the file lacks an id of seq_ids.
 * chosen: [num_sequences of the file] set to 0 for sequences that are not loaded, otherwise to 1 + the index in
 * seq_ids, or any other number.
 */
kvc_status kvc_loaded_choose(const kvc_state *state, const kvc_load_args *args, int32_t *chosen);

/* Takes slots for the rows of the chosen sequences, and makes these, so that rows may be copied to their extents.
 * Releases the mutex in between, as new memory takes long.  KVC_ERR_NOMEM, KVC_ERR_FULL, KVC_ERR_BUSY, KVC_ERR_INVALID;
 * kvc_state_end then drops what there is. */
kvc_status kvc_loaded_make(kvc_state *state, const kvc_load_args *args, const int32_t *chosen);

/* Makes the sequences part of the cache, once all rows were copied.  KVC_ERR_BUSY, KVC_ERR_NOMEM. */
kvc_status kvc_loaded_accept(kvc_state *state);

#endif
