/* pin.h: blocks that are kept, whatever else needs memory.  All functions are called with the mutex held. */
#ifndef KVC_PIN_H
#define KVC_PIN_H

#include "prefix/match.h"

/* Pins the known tokens of a prompt, in place of the tokens that an earlier pin of it holds, unless these are more.
 * KVC_ERR_FULL, KVC_ERR_NOMEM. */
kvc_status kvc_pin_known(kvc_prefix *prefix, const kvc_match *m, const uint8_t *name);

/* Takes back one pin of the prompt with this name, if it has a pin.  After the last one, nothing of the prompt is
 * pinned. */
void kvc_pin_take_back(kvc_prefix *prefix, const uint8_t *name);

/* Takes pins from at most `num` nodes of a tree.  Returns whether there are more. */
int kvc_pins_end_some(kvc_tree *tree, int num);

#endif
