/* replace.h: restoring batches (kvc_begin_args.replaced), whose tokens take the place of all that their sequences held
 * in some of the groups: the replaced groups.
 *
 * The old rows stay until the commit, which can then leave groups of a sequence with different positions.  Rows that
 * one group lacks and another has are noted as missing, as expired rows are noted as lost.  So a query that needs them
 * is refused.
 */
#ifndef KVC_REPLACE_H
#define KVC_REPLACE_H

#include "cache/batch.h"

/* Returns KVC_ERR_INVALID if args->replaced, which is not NULL, or what comes with it, is not valid. */
kvc_status kvc_replace_check(const kvc_cache *cache, const kvc_begin_args *args);

/* Makes a batch, as yet without sequences, restore the groups of these layers. */
void kvc_replace_mark(kvc_batch *batch, const uint8_t *replaced);

/* Sorts the tokens of each sequence by position, those at the same one in the order given. */
void kvc_replace_sort(kvc_batch *batch);

/* Notes which positions a group had, before its rows are dropped for others. */
void kvc_replace_remember(kvc_run_list *list);

/* Notes what sequence s lacks now in which group, once its new rows are listed. */
void kvc_replace_note(const kvc_batch *batch, int32_t s);

#endif
